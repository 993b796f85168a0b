"""flatlens: flatness, compression and sensitivity of PyTorch networks, every number with its accuracy."""

from __future__ import annotations

import sys

# `python -m flatlens` searches the current folder first, where a queue.py would hide Python's
if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] in ("flatlens", "-mflatlens") and not sys.flags.safe_path:
    del sys.path[0]

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatlens import bounds as bounds
    from flatlens import curvature as curvature
    from flatlens import distributions as distributions
    from flatlens import landscape as landscape
    from flatlens import measures as measures
    from flatlens import perturbation as perturbation
    from flatlens import statistics as statistics
    from flatlens import tracking as tracking
    from flatlens import transforms as transforms
    from flatlens.bounds import BoundsReport as BoundsReport
    from flatlens.bounds import check_bounds as check_bounds
    from flatlens.comparing import Comparison as Comparison
    from flatlens.comparing import Compression as Compression
    from flatlens.comparing import Forgetting as Forgetting
    from flatlens.comparing import GroupComparison as GroupComparison
    from flatlens.comparing import compare as compare
    from flatlens.comparing import compression as compression
    from flatlens.comparing import forgetting as forgetting
    from flatlens.errors import FlatlensError as FlatlensError
    from flatlens.errors import StaleLens as StaleLens
    from flatlens.estimate import Estimate as Estimate
    from flatlens.estimate import Report as Report
    from flatlens.forecast import Cost as Cost
    from flatlens.forecast import cost as cost
    from flatlens.landscape import LossPath as LossPath
    from flatlens.landscape import LossPlane as LossPlane
    from flatlens.landscape import path as path
    from flatlens.landscape import plane as plane
    from flatlens.measures import Lens as Lens
    from flatlens.measures import catalogue as catalogue
    from flatlens.measures import measure as measure
    from flatlens.problem import Problem as Problem
    from flatlens.problem import Ranks as Ranks
    from flatlens.statistics import Relations as Relations
    from flatlens.statistics import relate as relate
    from flatlens.tracking import Tracker as Tracker
    from flatlens.transforms import InvarianceReport as InvarianceReport
    from flatlens.transforms import check_invariance as check_invariance

from flatlens.version import __version__ as __version__

# Imported on first use (PEP 562), so that `flatlens --help` never waits for torch.
_NAMES = {
    "bounds": ("BoundsReport", "check_bounds"),
    "comparing": (
        "Comparison", "Compression", "Forgetting", "GroupComparison", "compare", "compression", "forgetting",
    ),
    "errors": ("FlatlensError", "StaleLens"),
    "estimate": ("Estimate", "Report"),
    "forecast": ("Cost", "cost"),
    "landscape": ("LossPath", "LossPlane", "path", "plane"),
    "measures": ("Lens", "catalogue", "measure"),
    "problem": ("Problem", "Ranks"),
    "statistics": ("Relations", "relate"),
    "tracking": ("Tracker",),
    "transforms": ("InvarianceReport", "check_invariance"),
}  # fmt: skip
_HOME = dict(sorted((name, f"flatlens.{home}") for home, names in _NAMES.items() for name in names))
_MODULES = (
    "bounds", "curvature", "distributions", "landscape", "measures", "perturbation", "statistics", "tracking",
    "transforms",
)  # fmt: skip
__all__ = [*_HOME, *_MODULES]


class _FormerModules:
    """Asked by Python where it finds no module of a name: earlier versions let extensions import from other modules."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> Any:
        if not name.startswith("flatlens."):
            return None
        return import_module("flatlens.deprecated_names").former_module(name)


sys.meta_path.append(_FormerModules)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"flatlens.{name}")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'flatlens' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
