"""Comparison of networks and of groups of networks: an answer, rankings by each measure, and their agreement."""

from flatlens.comparing.comparison import Comparison, direction
from flatlens.comparing.groups import GroupComparison
from flatlens.comparing.measuring import compare
from flatlens.comparing.rankings import Agreement

__all__ = ["Agreement", "Comparison", "GroupComparison", "compare", "direction"]
