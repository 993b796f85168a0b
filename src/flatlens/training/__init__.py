"""Optimisers that experiments train with."""

from flatlens.training.sgd import SGD

__all__ = ["SGD"]
