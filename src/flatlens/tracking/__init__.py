"""Measures followed through training: at which steps, at what cost, and how near the edge of stability.

    training loop -> Tracker.step -> due? -> Lens, begun with the last one's eigenpairs -> rows of the history
                                                                                        -> a live line on stderr

`flatlens.tracking.lightning` and `flatlens.tracking.transformers` hang a tracker into those trainers.
"""

from flatlens.tracking.live import Live, Moment
from flatlens.tracking.stability import Edge, edge_of
from flatlens.tracking.tracker import Tracker

__all__ = ["Edge", "Live", "Moment", "Tracker", "edge_of"]
