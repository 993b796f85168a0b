"""Inequalities between measures, checked on the user's own network."""

from flatlens.bounds.check import BoundsReport, check_bounds
from flatlens.bounds.context import Assumption, Claim, Target
from flatlens.bounds.definition import BOUNDS, Bound, Verdict, bound

__all__ = ["BOUNDS", "Assumption", "Bound", "BoundsReport", "Claim", "Target", "Verdict", "bound", "check_bounds"]
