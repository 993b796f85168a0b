"""Inequalities between measures, checked on the user's own network."""

from flatlens.bounds.bound import Bound, Verdict
from flatlens.bounds.check import BoundsReport, check_bounds
from flatlens.bounds.claim import Assumption, Claim
from flatlens.bounds.registry import BOUNDS
from flatlens.bounds.target import Target

__all__ = ["BOUNDS", "Assumption", "Bound", "BoundsReport", "Claim", "Target", "Verdict", "check_bounds"]
