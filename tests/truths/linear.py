"""f = W x with 2 outputs, 3 inputs and 8 samples: its derivatives are known with pen and paper."""

from __future__ import annotations

from builders import chain, lens_on, normal
from torch import nn

import flatlens as fl

X = normal(8, 3, seed=3)
A = X.T @ X / 8  #: block of the Hessian for each output, under the half squared error, (3, 3)


def linear() -> nn.Sequential:
    """Return f = W x."""
    return chain([3, 2], 5, bias=False)


def measured(*keys: str | fl.measures.Measure, loss: str = "half_squared_error") -> fl.Report:
    """Return these measures of f = W x, with targets 0 (class 0 for cross-entropy)."""
    return fl.measure(lens_on(linear(), X, loss), list(keys))
