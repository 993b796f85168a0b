"""Comparison of networks and of groups of networks: an answer, rankings by each measure, and their agreement.

`forgetting` splits the change of one task's loss between two checkpoints of a network; `compression` forecasts and
measures the rise that fewer bits, entries or ranks of each weight cause.
"""

from flatlens.comparing.comparison import Comparison, direction
from flatlens.comparing.compressing import Compression, compression
from flatlens.comparing.expansion import Forgetting, forgetting, forgetting_memory
from flatlens.comparing.groups import GroupComparison
from flatlens.comparing.measuring import compare
from flatlens.comparing.rankings import Agreement

__all__ = [
    "Agreement", "Comparison", "Compression", "Forgetting", "GroupComparison", "compare", "compression", "direction",
    "forgetting", "forgetting_memory",
]  # fmt: skip
