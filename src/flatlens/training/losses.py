"""The loss that training minimises; targets may be probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from flatlens.errors import BadData, BadInput, UnknownName
from flatlens.problem.loss import Loss, smoothed
from flatlens.problem.losses import CrossEntropy, SquaredError

LossName: TypeAlias = Literal["cross_entropy", "half_squared_error", "mse"]
LOSSES: tuple[LossName, ...] = ("cross_entropy", "half_squared_error", "mse")


@dataclass(frozen=True)
class TrainingLoss:
    """A loss by its name, with labels smoothed to (1 - a) y + a / N.

    `measured` is the same loss, with its smoothing, as a `Problem` takes it.

    >>> TrainingLoss("cross_entropy", 0.5).targets(torch.tensor([1]), torch.zeros(1, 2))
    tensor([[0.2500, 0.7500]])
    """

    name: LossName
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in LOSSES:
            raise UnknownName.among("loss to train on", self.name, LOSSES)
        if not 0 <= self.label_smoothing <= 1:
            raise BadInput(f"Training(label_smoothing={self.label_smoothing}): a number from 0 to 1 is needed")

    def measured(self) -> Loss:
        """Return the loss that `flatlens.Problem` takes."""
        if self.name == "cross_entropy":
            return CrossEntropy(label_smoothing=self.label_smoothing)
        return SquaredError(self.name, label_smoothing=self.label_smoothing)

    def targets(self, y: Tensor, outputs: Tensor, what: str = "data") -> Tensor:
        """Return the targets that outputs (., N) are compared with, (n, N) in the dtype of the outputs.

        Integers are class labels, for every loss: they become one-hot vectors and are then smoothed. The targets of a
        regression are floating numbers.
        """
        N = outputs.shape[1]
        if y.is_floating_point():
            if self.label_smoothing:
                raise BadData("Training(label_smoothing=...): needs integer class labels, and the targets are not")
            if y.numel() != len(y) * N:
                raise BadData(f"train({what}=...): targets of shape {tuple(y.shape)} do not fit {N} outputs per sample")
            return y.reshape(len(y), N).to(outputs.dtype)
        if y.ndim != 1 or (len(y) and not 0 <= int(y.min()) <= int(y.max()) < N):
            met = f"shape {tuple(y.shape)}" if y.ndim != 1 else f"{int(y.min())} to {int(y.max())}"
            raise BadData(
                f"train({what}=...): labels from 0 to {N - 1} are needed, since the network has {N} outputs; got "
                f"{met}. Whole numbers are class labels: y.float() makes them targets of a regression, y.argmax(1) "
                f"turns one-hot rows into labels"
            )
        return smoothed(F.one_hot(y.long(), N).to(outputs.dtype), self.label_smoothing)

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample, (n,), for targets as `targets` makes them."""
        return self._plain.values(outputs, targets)

    def curved(self, outputs: Tensor, u: Tensor) -> Tensor:
        """Return R u, differentiable in the outputs, with R R^T = C, the loss's Hessian in the outputs.

        For cross-entropy sqrt p is computed as exp(log p / 2): sqrt has an infinite derivative where p underflows to 0.
        """
        if self.name != "cross_entropy":
            return u * (1.0 if self.name == "half_squared_error" else (2 / outputs.shape[1]) ** 0.5)
        root = (0.5 * F.log_softmax(outputs, 1)).exp()
        return root * u - root.square() * (root * u).sum(1, keepdim=True)

    @property
    def _plain(self) -> Loss:
        return _PLAIN[self.name]


_PLAIN: dict[str, Loss] = {
    "cross_entropy": CrossEntropy(),
    "half_squared_error": SquaredError("half_squared_error"),
    "mse": SquaredError("mse"),
}


def accuracy(outputs: Tensor, labels: Tensor) -> float:
    """Return the share of samples whose class is right; NaN for regression."""
    if labels.is_floating_point():
        return float("nan")
    return float((outputs.argmax(1) == labels).to(torch.float64).mean())
