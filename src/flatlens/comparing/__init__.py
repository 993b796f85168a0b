"""Comparison of checkpoints: rankings by each measure, and their agreement."""

from flatlens.comparing.agreement import Agreement
from flatlens.comparing.compare import compare
from flatlens.comparing.comparison import Comparison
from flatlens.comparing.direction import direction

__all__ = ["Agreement", "Comparison", "compare", "direction"]
