"""Measures followed during training: when they are due, what they cost, and how near the edge of stability is.

    training loop -> Tracker.step -> due? -> Lens, starts from the last eigenpairs -> rows of the history
                                                                                   -> a live line on stderr
                                                                                   -> logs: CSV, TensorBoard, ...

`flatlens.tracking.lightning` and `flatlens.tracking.transformers` connect a tracker to those trainers.
"""

from flatlens.curvature.optimiser_geometry import Edge, edge_of
from flatlens.tracking.loggers import CSVLog, Live, MLflowLog, Moment, TensorBoardLog, WandbLog, scalars
from flatlens.tracking.tracker import Tracker

__all__ = [
    "CSVLog", "Edge", "Live", "MLflowLog", "Moment", "TensorBoardLog", "Tracker", "WandbLog", "edge_of", "scalars",
]  # fmt: skip
