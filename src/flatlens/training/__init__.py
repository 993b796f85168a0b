"""Optimisers that experiments train with."""

from flatlens.training.sgd import SGD
from flatlens.training.train import TrainingResult, train

__all__ = ["SGD", "TrainingResult", "train"]
