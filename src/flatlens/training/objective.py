"""What training minimises: a loss, whose targets may be probabilities, and regularisers of the network's derivatives.

Each regulariser is a term of the loss of a batch, from one random backward pass:

    InputJacobian       coefficient * mean_i ||df_i/dx_i||_F^2
    ParameterJacobian   coefficient * mean_i ||df_i/dtheta||_F^2
    RelativeFlatness    coefficient * kappa_Tr of some layers, Gauss-Newton part

All three are differentiated again, so a step costs about as much as two more backward passes.

Scaling. The `published` form of the Jacobian regularisers (sharpening App. D, after Lee et al. 2023) is ||u^T J||_2.
There J is the Jacobian of the whole batch, with n N rows, and u is ONE vector, uniform on the unit sphere. The mean of
the square is ||J||_F^2 / (n N), and ||J||_F^2 is the sum over samples of ||J_i||_F^2. So the text's
||J||_F ~ ||u^T J||_2 lacks a factor sqrt(n N), and the number is about sqrt(mean_i ||J_i||_F^2 / N) for any batch size.
The default form, `mean_square`, is an unbiased estimate of the mean above. With BatchNorm in train mode samples are
coupled: both forms then contain the derivatives of each sample's outputs in the other samples' inputs, too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from flatlens.errors import BadData, BadInput, BadModel, UnknownName
from flatlens.grams.data_pass import random_signs
from flatlens.grams.record import Call
from flatlens.operations.layers import is_linear, layer_of
from flatlens.problem.loss import Loss, smoothed
from flatlens.problem.losses import CrossEntropy, SquaredError
from flatlens.progress import count_of
from flatlens.settings_json import require_setting

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
            raise UnknownName.among("loss", self.name, LOSSES, where="for training")
        if not 0 <= self.label_smoothing <= 1:
            raise BadInput(f"Training(label_smoothing={self.label_smoothing}): expected a number from 0 to 1")

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
                fit = f"targets of shape {tuple(y.shape)} do not fit {count_of(N, 'output')} per sample"
                raise BadData(fit, argument=what, call="train")
            return y.reshape(len(y), N).to(outputs.dtype)
        if y.ndim != 1 or (len(y) and not 0 <= int(y.min()) <= int(y.max()) < N):
            met = f"shape {tuple(y.shape)}" if y.ndim != 1 else f"{int(y.min())} to {int(y.max())}"
            expected = f"expected labels from 0 to {N - 1}, since the network has {count_of(N, 'output')}; got {met}"
            mend = "y.float() makes them targets of a regression, y.argmax(1) turns one-hot rows into labels"
            whole = f"{expected}. Whole numbers are class labels"
            raise BadData(whole, argument=what, remedy=mend, call="train")
        return smoothed(F.one_hot(y.long(), N).to(outputs.dtype), self.label_smoothing)

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample, (n,), for targets as `targets` makes them."""
        return _PLAIN[self.name].values(outputs, targets)

    def curved(self, outputs: Tensor, u: Tensor) -> Tensor:
        """Return R u, differentiable in the outputs, with R R^T = C, the loss's Hessian in the outputs.

        For cross-entropy sqrt p is computed as exp(log p / 2): sqrt has an infinite derivative where p underflows to 0.
        """
        if self.name != "cross_entropy":
            return u * (1.0 if self.name == "half_squared_error" else (2 / outputs.shape[1]) ** 0.5)
        root = (0.5 * F.log_softmax(outputs, 1)).exp()
        return root * u - root.square() * (root * u).sum(1, keepdim=True)


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


PenaltyForm: TypeAlias = Literal["mean_square", "published"]


@dataclass(frozen=True, eq=False)
class Pass:
    """A forward pass over a batch, with its autograd graph."""

    x: Tensor  #: inputs (n, ...), with requires_grad set
    outputs: Tensor  #: (n, N)
    parameters: Sequence[Tensor]  #: trainable parameters
    linear: Mapping[str, Call]  #: calls of linear layers in execution order
    loss: TrainingLoss


@dataclass(frozen=True)
class _JacobianPenalty(ABC):
    coefficient: float
    form: PenaltyForm = "mean_square"

    def __post_init__(self) -> None:
        require_setting(self, "coefficient", 0 <= self.coefficient < math.inf, "it must not be negative")
        known = self.form in ("mean_square", "published")
        require_setting(self, "form", known, "expected 'mean_square' or 'published'")

    def value(self, seen: Pass, generator: Generator) -> Tensor:
        """Return the penalty on a batch, without its coefficient; differentiable.

        ||u^T J||^2 / n for random signs u, or ||u^T J|| for u on the unit sphere.
        """
        f = seen.outputs
        if self.form == "published":
            u = torch.randn(f.shape, generator=generator, dtype=torch.float64)
            u = (u / u.norm()).to(f)
        else:
            u = random_signs(tuple(f.shape), f, generator)
        rows = torch.autograd.grad(f, self._at(seen), u, create_graph=True, allow_unused=True)
        squares = [row.square().sum() for row in rows if row is not None]
        square = torch.stack(squares).sum() if squares else f.new_zeros(())  # without a derivative there is no penalty
        if self.form == "mean_square":
            return square / len(f)
        return square.clamp(min=torch.finfo(square.dtype).tiny).sqrt()  # at 0 the root has no slope

    @abstractmethod
    def _at(self, seen: Pass) -> Sequence[Tensor]: ...


class InputJacobian(_JacobianPenalty):
    """Penalty on the Jacobian of the outputs with respect to the inputs.

    >>> from flatlens.training import SGD, Training
    >>> Training(SGD(lr=0.1), max_epochs=5, penalties=(InputJacobian(0.01),)).penalties[0].form
    'mean_square'
    """

    def _at(self, seen: Pass) -> Sequence[Tensor]:
        return [seen.x]


class ParameterJacobian(_JacobianPenalty):
    """Penalty on the Jacobian of the outputs with respect to the trainable parameters.

    >>> from flatlens.training import SGD, Training
    >>> Training(SGD(lr=0.1), max_epochs=5, penalties=(ParameterJacobian(0.01),)).penalties[0].form
    'mean_square'
    """

    def _at(self, seen: Pass) -> Sequence[Tensor]:
        return seen.parameters


@dataclass(frozen=True)
class RelativeFlatness:
    r"""Relative flatness, Gauss-Newton part, of the last linear layer, of all linear layers, or of the named ones.

    It is estimated with one probe u of random signs per sample. Let v = R u, where C = R R^T is the Hessian of the loss
    in the outputs, and M_v the gradient of <v, f> in the layer's weight. Then mean_i ||W^T M_v||_F^2 has the mean
    kappa_Tr = mean_i tr(C_i R_i^l) (relative2021 Def. 3). For a layer applied once it equals
    ||phi||^2 ||v^T df/dphi||^2. The penalty is differentiated through C, too. All layers share one backward pass.

    >>> from flatlens.training import SGD, Training
    >>> Training(SGD(lr=0.1), max_epochs=5, penalties=(RelativeFlatness(0.1, layers="all"),)).penalties[0].layers
    'all'
    """

    coefficient: float
    layers: Literal["last", "all"] | tuple[str, ...] = "last"

    def __post_init__(self) -> None:
        if not isinstance(self.layers, str):
            object.__setattr__(self, "layers", tuple(self.layers))
            require_setting(self, "layers", bool(self.layers), "name at least one layer, or 'last', or 'all'")
        known = isinstance(self.layers, tuple) or self.layers in ("last", "all")
        require_setting(self, "layers", known, "expected 'last', 'all' or a tuple of names")
        require_setting(self, "coefficient", 0 <= self.coefficient < math.inf, "it must not be negative")

    def value(self, seen: Pass, generator: Generator) -> Tensor:
        """Return the penalty on a batch, without its coefficient; differentiable."""
        calls = self._chosen(seen.linear)
        u = random_signs(tuple(seen.outputs.shape), seen.outputs, generator)
        slopes = torch.autograd.grad(
            seen.outputs, [call.z for call in calls], seen.loss.curved(seen.outputs, u), create_graph=True
        )
        found, n = [], len(u)
        for call, slope in zip(calls, slopes, strict=True):
            # sum_i ||W^T M_i||_F^2 with M_i = sum_p slope_ip (x) phi_ip; no m x m product is formed
            assert is_linear(call.module)
            layer = layer_of(call.module)
            W, phi, J = layer.matrix(call.module.weight), layer.patches(call.x, n), layer.by_position(slope, n)
            if phi.shape[-1] == 1:  # one position: M is of rank one
                back = torch.einsum("gdm,ngd->ngm", W, J[..., 0])
                found.append((phi.square().sum((2, 3)) * back.square().sum(2)).sum())
            else:
                M = J @ phi.mT
                found.append((M * torch.einsum("gde,ngem->ngdm", W @ W.mT, M)).sum())
        return torch.stack(found).sum() / n

    def _chosen(self, calls: Mapping[str, Call]) -> list[Call]:
        known = list(dict.fromkeys(call.name for call in calls.values()))
        if not known:
            raise BadModel("the network has no linear layer", argument="RelativeFlatness", call="")
        named = {"last": tuple(known[-1:]), "all": tuple(known)}
        names = named[self.layers] if isinstance(self.layers, str) else self.layers
        for name in names:
            if name not in known:
                raise UnknownName.among("linear layer", name, known)
            if f"{name}:1" in calls:
                again, mend = f"the layer {name!r} is used more than once in forward()", "leave it out of layers="
                raise BadModel(again, argument="RelativeFlatness", remedy=mend, call="")
        return [calls[name] for name in names]


Penalty: TypeAlias = InputJacobian | ParameterJacobian | RelativeFlatness
