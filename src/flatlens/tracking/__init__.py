"""Measures followed during training: when they are due, what they cost, and how near the edge of stability is.

    training loop -> Tracker.step -> due? -> Lens, starts from the last eigenpairs -> rows of the history
                                                                                   -> a live line on stderr

`flatlens.tracking.lightning` and `flatlens.tracking.transformers` connect a tracker to those trainers.
"""

from flatlens.tracking.live import Live, Moment
from flatlens.tracking.stability import Edge, edge_of
from flatlens.tracking.tracker import Tracker

__all__ = ["Edge", "Live", "Moment", "Tracker", "edge_of"]
