"""The optimisers that experiments train with: gradient descent, Adam, RMSProp; ridge regression; rates; ascent.

Sharpness-aware minimisation takes the gradient at nearby weights where the loss is largest:

    SAM    eps = rho g / ||g||                                      Foret et al. 2021, Eq. 2
    ASAM   eps = rho T^2 g / ||T g||,  T = diag(|theta| + eta)      Kwon et al. 2021, Eq. 8

g is the gradient at theta of what is minimised on this batch, with regularisers but without weight decay. The step uses
the gradient at theta + eps. Here T covers all trainable parameters; the authors of ASAM set T = 1 for biases.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn

from flatlens.errors import BadInput, BadModel


@dataclass(frozen=True)
class Ridge:
    """Ridge regression: the last linear layer minimises sum_i ||W phi_i + b - y_i||^2 + penalty ||W||_F^2.

    The other layers do not change. The bias has no penalty, as in scikit-learn. A run takes one step, whatever number
    of steps the settings give.
    """

    penalty: float = 1.0
    lr: ClassVar[float] = 0.0  #: placeholder for tables of networks: ridge regression has no learning rate

    def __post_init__(self) -> None:
        if not (self.penalty > 0 and math.isfinite(self.penalty)):
            raise BadInput(f"Ridge(penalty={self.penalty}): it must be positive, so that there is one solution")


@torch.no_grad()
def solve(model: nn.Module, x: Tensor, targets: Tensor, penalty: float) -> None:
    """Put the solution for these inputs and targets into the last linear layer, in place; computed in float64.

    Raises:
        BadModel: the network does not end in an `nn.Linear`.
    """
    last = _last(model)
    W, b = solution(_features(model, last, x).double(), targets.double(), penalty, bias=last.bias is not None)
    last.weight.copy_(W)
    if last.bias is not None:
        last.bias.copy_(b)


def solution(phi: Tensor, y: Tensor, penalty: float, *, bias: bool = True) -> tuple[Tensor, Tensor]:
    """Return the W (outputs, m) and b (outputs,) that `Ridge` describes, for features (n, m) and targets (n, outputs).

    >>> W, b = solution(torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [5.0]]), penalty=2.0)
    >>> W.item(), b.item()
    (1.0, 2.0)
    """
    centre, level = (phi.mean(0), y.mean(0)) if bias else (phi.new_zeros(phi.shape[1]), y.new_zeros(y.shape[1]))
    phi, y = phi - centre, y - level
    units = torch.eye(phi.shape[1], dtype=phi.dtype, device=phi.device)
    W = torch.linalg.solve(phi.T @ phi + penalty * units, phi.T @ y).T
    return W, level - W @ centre


def _last(model: nn.Module) -> nn.Linear:
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise BadModel(
            "the network has no nn.Linear whose weights can be computed", argument="Training(Ridge())", call=""
        )
    return layers[-1]


def _features(model: nn.Module, last: nn.Linear, x: Tensor) -> Tensor:
    """Return the layer's input features, (n, m)."""
    seen: list[Tensor] = []
    handle = last.register_forward_hook(lambda _, inputs, outputs: seen.extend((inputs[0], outputs)))
    was = model.training
    try:
        f = model.eval()(x)
    finally:
        handle.remove()
        model.train(was)
    if len(seen) != 2 or f.shape != seen[1].shape or not bool((f == seen[1]).all()):
        raise BadModel("the network must end in an nn.Linear, called once", argument="Training(Ridge())", call="")
    return seen[0]


@dataclass(frozen=True)
class SGD:
    """(Stochastic) gradient descent with heavy-ball momentum; weight decay adds decay * w to the gradient.

    >>> SGD(lr=0.1).build([torch.nn.Parameter(torch.ones(1))]).param_groups[0]["lr"]
    0.1
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _require(self, lr=self.lr, weight_decay=self.weight_decay, rates={"momentum": self.momentum})
        if self.nesterov and self.momentum == 0:
            raise BadInput("SGD(nesterov=True): it needs a momentum")

    def build(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Build the torch optimiser."""
        return torch.optim.SGD(
            parameters,
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
            foreach=True,  # for small networks the loop over parameters is what costs
        )


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma & Ba); with `decoupled` AdamW, whose weight decay is not scaled as the gradient is."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    def __post_init__(self) -> None:
        _require(self, lr=self.lr, weight_decay=self.weight_decay, rates={"beta1": self.beta1, "beta2": self.beta2})

    def build(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Build the torch optimiser."""
        kind = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        return kind(
            parameters,
            lr=self.lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            weight_decay=self.weight_decay,
            foreach=True,
        )


@dataclass(frozen=True)
class RMSProp:
    """RMSProp (Hinton), as in torch; `alpha` is the decay rate of the mean square."""

    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _require(
            self, lr=self.lr, weight_decay=self.weight_decay, rates={"alpha": self.alpha, "momentum": self.momentum}
        )

    def build(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Build the torch optimiser."""
        return torch.optim.RMSprop(
            parameters,
            lr=self.lr,
            alpha=self.alpha,
            eps=self.eps,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            foreach=True,
        )


Stepping: TypeAlias = SGD | Adam | RMSProp
Optimiser: TypeAlias = Stepping | Ridge


def _require(settings: Stepping, *, lr: float, weight_decay: float, rates: dict[str, float]) -> None:
    """Refuse learning rates, decays and rates outside their ranges."""
    name = type(settings).__name__
    if not (lr > 0 and math.isfinite(lr)):
        raise BadInput(f"{name}(lr={lr}): the learning rate must be positive")
    if not (weight_decay >= 0 and math.isfinite(weight_decay)):
        raise BadInput(f"{name}(weight_decay={weight_decay}): it must not be negative")
    for rate, value in rates.items():
        if not 0 <= value < 1:
            raise BadInput(f"{name}({rate}={value}): it must be at least 0 and below 1")


Unit: TypeAlias = Literal["epochs", "steps"]


@dataclass(frozen=True)
class Constant:
    """The same learning rate throughout."""

    def factor(self, step: int, epoch: int) -> float:
        """Return 1."""
        return 1.0


@dataclass(frozen=True)
class Steps:
    """A factor that is multiplied by `factor_each` after each time in `at`.

    >>> drop = Steps(at=(50, 80), factor_each=0.1)
    >>> drop.factor(step=0, epoch=49), drop.factor(step=0, epoch=50)
    (1.0, 0.1)
    """

    at: tuple[int, ...]  #: times of the drops, counted from 0 in `unit`
    factor_each: float = 0.1
    unit: Unit = "epochs"

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", tuple(self.at))
        if list(self.at) != sorted(set(self.at)) or min(self.at, default=1) < 1:
            raise BadInput(f"Steps(at={self.at}): give increasing numbers of {self.unit}, such as (50, 80)")
        if not self.factor_each > 0:
            raise BadInput(f"Steps(factor_each={self.factor_each}): it must be positive")
        _require_unit(self.unit, "Steps")

    def factor(self, step: int, epoch: int) -> float:
        """Return the factor on the learning rate at step `step` of epoch `epoch`, both counted from 0."""
        now = epoch if self.unit == "epochs" else step
        return float(self.factor_each ** sum(now >= at for at in self.at))


@dataclass(frozen=True)
class Cosine:
    """Half a period of the cosine, from 1 down to `floor` over `length`; after that, `floor`.

    >>> [round(Cosine(length=10, unit="steps").factor(step, 0), 3) for step in (0, 5, 10, 20)]
    [1.0, 0.5, 0.0, 0.0]
    """

    length: int
    unit: Unit = "epochs"
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.length < 1 or not 0 <= self.floor <= 1:
            raise BadInput(
                f"Cosine(length={self.length}, floor={self.floor}): length must be at least 1, and floor from 0 to 1"
            )
        _require_unit(self.unit, "Cosine")

    def factor(self, step: int, epoch: int) -> float:
        """Return the factor on the learning rate at step `step` of epoch `epoch`, both counted from 0."""
        share = min((epoch if self.unit == "epochs" else step) / self.length, 1.0)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * share))


LearningRateSchedule: TypeAlias = Constant | Steps | Cosine


def _require_unit(unit: str, name: str) -> None:
    if unit not in ("epochs", "steps"):
        raise BadInput(f"{name}(unit={unit!r}): 'epochs' or 'steps' is needed")


@dataclass(frozen=True)
class SAM:
    """The largest loss in a ball of radius `rho`, to first order; with 0, plain descent."""

    rho: float = 0.05

    def __post_init__(self) -> None:
        _require_radius(self.rho, "SAM")

    def move(self, parameters: Sequence[Tensor], slopes: Sequence[Tensor]) -> list[Tensor]:
        """Return eps, one tensor per parameter."""
        length = norm(slopes)
        return [g * (self.rho / length) if length > 0 else torch.zeros_like(g) for g in slopes]


@dataclass(frozen=True)
class ASAM:
    """The largest loss in an ellipsoid whose axes grow with the parameters; with 0, plain descent."""

    rho: float = 0.5
    eta: float = 0.01

    def __post_init__(self) -> None:
        _require_radius(self.rho, "ASAM")
        if not 0 <= self.eta < math.inf:
            raise BadInput(f"ASAM(eta={self.eta}): it must not be negative")

    def move(self, parameters: Sequence[Tensor], slopes: Sequence[Tensor]) -> list[Tensor]:
        """Return eps, one tensor per parameter."""
        units = [p.detach().abs() + self.eta for p in parameters]
        scaled = [T * g for T, g in zip(units, slopes, strict=True)]
        length = norm(scaled)
        return [
            T * s * (self.rho / length) if length > 0 else torch.zeros_like(s)
            for T, s in zip(units, scaled, strict=True)
        ]


Ascent: TypeAlias = SAM | ASAM


def norm(parts: Sequence[Tensor]) -> float:
    """Return the norm of several tensors taken as one vector, summed in float64."""
    return math.sqrt(sum(float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2 for part in parts))


def _require_radius(rho: float, name: str) -> None:
    if not 0 <= rho < math.inf:
        raise BadInput(f"{name}(rho={rho}): the radius must not be negative")
