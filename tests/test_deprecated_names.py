"""Modules under their former names: extensions import from them for one more version."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

from flatlens.deprecated_names import FORMER_MODULES, FormerName

NAMES = {
    "flatlens.bounds.bound": "bound",
    "flatlens.bounds.claim": "Claim",
    "flatlens.measures.card": "FUNCTION on_lens per_sample",
    "flatlens.measures.reduce": "mean largest",
    "flatlens.papers.predictions": "Prediction",
    "flatlens.transforms.moves": "order_reader order_source rescale_reader rescale_source",
    "flatlens.transforms.permutation": "feature_by_feature",
    "flatlens.transforms.transform": "transform",
}
"""What the guide to extensions imported."""


@pytest.mark.parametrize("name", FORMER_MODULES)
def test_a_former_module_has_the_present_names_and_warns_where_it_is_imported(name: str) -> None:
    sys.modules.pop(name, None)
    package, _, own = name.rpartition(".")
    before = vars(importlib.import_module(package)).get(own)
    before = None if isinstance(before, ModuleType) else before
    with pytest.warns(FormerName, match=f"{name} is now called {FORMER_MODULES[name]}") as told:
        __import__(name)
    found, present = sys.modules[name], importlib.import_module(FORMER_MODULES[name])
    assert {n for n in vars(present) if n[0] != "_" and not hasattr(found, n)} == set()
    assert before is None or vars(sys.modules[package])[own] is before, "the package's own object of this name stays"
    assert told[0].filename == __file__
    assert NAMES[name].split() == [public for public in NAMES[name].split() if hasattr(found, public)]


def test_a_module_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        importlib.import_module("flatlens.nothing")
