"""timm needs torchvision, whose wheel from PyPI does not fit torch's CPU build: its compiled operators cannot be
loaded, and the import ends in "operator torchvision::nms does not exist". Of these operators timm uses none, so that
their schemas, defined before the import, are enough. For the zoo and the tests alone: flatlens does no such thing.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

SCHEMAS = ("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
           "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # fmt: skip


@cache
def operators_of_torchvision() -> torch.library.Library | None:
    """Defines the schemas, once, where torchvision is there and its operators do not fit this torch."""
    found = find_spec("torchvision")
    if found is None or _loads(found.submodule_search_locations or []):
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in SCHEMAS:
        library.define(schema)
    return library


def _loads(places: list[str]) -> bool:
    """Whether torchvision's operators fit this torch."""
    libraries = [file for place in places for file in Path(place).glob("_C*.so")]
    try:
        for file in libraries:
            torch.ops.load_library(file)
    except OSError:
        return False
    return bool(libraries)
