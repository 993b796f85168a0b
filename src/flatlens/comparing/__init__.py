"""Comparison of checkpoints: rankings by each measure, and their agreement."""

from flatlens.comparing.comparison import Comparison, compare, direction
from flatlens.comparing.rankings import Agreement

__all__ = ["Agreement", "Comparison", "compare", "direction"]
