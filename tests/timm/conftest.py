"""timm needs torchvision, whose wheel from PyPI does not fit torch's CPU build: its compiled operators cannot be
loaded, and the import ends in "operator torchvision::nms does not exist". Of these operators timm uses none, so that
their schemas, defined here before the import, are enough. For these tests alone: flatlens itself does no such thing.

Without timm the tests here are skipped. `.ci/timm` makes an environment with both, and runs them.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
SCHEMAS = ("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
           "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skipped only where timm is not there at all: a timm that cannot be imported is a failure."""
    if find_spec("timm") is None:
        reason = pytest.mark.skip(reason="timm is not installed: .ci/timm runs these in an environment of their own")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(reason)


def _loads() -> bool:
    """Whether torchvision's operators fit this torch."""
    found = find_spec("torchvision")
    places = [] if found is None else found.submodule_search_locations or []
    libraries = [file for place in places for file in Path(place).glob("_C*.so")]
    try:
        for file in libraries:
            torch.ops.load_library(file)
    except OSError:
        return False
    return bool(libraries)


if find_spec("timm") is not None and not _loads():
    for schema in SCHEMAS:
        LIBRARY.define(schema)
