"""The conditions that end training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flatlens.errors import BadInput


@dataclass(frozen=True)
class Until:
    """Conditions at a check point: training has converged when all conditions that are set hold together.

    If none is set, training continues to the end of its steps or epochs.

    >>> rule = Until(loss_below=0.1, loss_window=2)
    >>> rule.met([0.3, 0.09], accuracy=1.0, gradient_norm=0.0), rule.met([0.1, 0.09], 1.0, 0.0)
    (False, True)
    """

    loss_below: float | None = None  #: upper limit of the mean of the last `loss_window` losses
    loss_window: int = 1  #: number of check points
    loss_over: Literal["data", "epoch"] = "data"
    """Which loss: that over all data, at check points; or the mean over an epoch's batches as they were trained on."""
    accuracy: float | None = None  #: smallest accuracy on the training data
    gradient_norm: float | None = None  #: largest ||dL/dtheta|| over all data

    def __post_init__(self) -> None:
        if self.loss_window < 1:
            raise BadInput(f"Until(loss_window={self.loss_window}): at least 1 is needed")
        if self.loss_over not in ("data", "epoch"):
            raise BadInput(f"Until(loss_over={self.loss_over!r}): 'data' or 'epoch' is needed")
        for name in ("loss_below", "gradient_norm"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise BadInput(f"Until({name}={value}): a finite number is needed")
        if self.accuracy is not None and not 0 <= self.accuracy <= 1:
            raise BadInput(f"Until(accuracy={self.accuracy}): a share from 0 to 1 is needed")

    @property
    def anything(self) -> bool:
        """Return whether any condition is set."""
        return not (self.loss_below is None and self.accuracy is None and self.gradient_norm is None)

    def met(self, losses: Sequence[float], accuracy: float, gradient_norm: float) -> bool:
        """Return whether training has converged; `losses` are those of the last check points, or of all."""
        if not self.anything:
            return False
        recent = losses[-self.loss_window :]
        low = self.loss_below is None or (
            len(recent) == self.loss_window and math.fsum(recent) / self.loss_window < self.loss_below
        )
        right = self.accuracy is None or accuracy >= self.accuracy
        flat = self.gradient_norm is None or gradient_norm <= self.gradient_norm
        return low and right and flat
