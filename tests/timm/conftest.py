"""Without timm the tests here are skipped. `.ci/timm` makes an environment with it and torchvision, and runs them."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))
from benchmarks.zoo.shim import operators_of_torchvision


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skipped only where timm is not there at all: a timm that cannot be imported is a failure."""
    if find_spec("timm") is None:
        reason = pytest.mark.skip(reason="timm is not installed: .ci/timm runs these in an environment of their own")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(reason)


if find_spec("timm") is not None:
    operators_of_torchvision()
