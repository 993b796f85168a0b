"""Schemas of torchvision's operators, without which timm cannot be imported.

The wheel of torchvision from PyPI does not fit torch's CPU build: its compiled operators cannot be loaded, and the
import ends in "operator torchvision::nms does not exist". timm uses none of these operators, so it is enough to define
their schemas before the import. Only for the zoo and the tests: flatlens itself does not do this.
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
    """Define the schemas, once, if torchvision is installed and its operators do not fit this torch."""
    found = find_spec("torchvision")
    if found is None or _loads(found.submodule_search_locations or []):
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in SCHEMAS:
        library.define(schema)
    return library


def _loads(places: list[str]) -> bool:
    """Return whether torchvision's operators fit this torch."""
    libraries = [file for place in places for file in Path(place).glob("_C*.so")]
    try:
        for file in libraries:
            torch.ops.load_library(file)
    except OSError:
        return False
    return bool(libraries)
