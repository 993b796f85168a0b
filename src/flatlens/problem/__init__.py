"""The problem that is measured: a model, a loss and data, checked once and then left as they were."""

from flatlens.problem.batches import Batch
from flatlens.problem.data import Data
from flatlens.problem.eval_context import measuring
from flatlens.problem.loss import Loss
from flatlens.problem.problem import Problem
from flatlens.problem.ranks import Ranks
from flatlens.problem.row_layout import next_token

__all__ = ["Batch", "Data", "Loss", "Problem", "Ranks", "measuring", "next_token"]
