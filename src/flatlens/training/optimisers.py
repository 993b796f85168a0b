"""The optimisers that experiments train with: gradient descent, Adam, RMSProp; ridge regression; rates; ascent.

Sharpness-aware minimisation takes the gradient at nearby weights where the loss is largest:

    SAM    eps = rho g / ||g||                                      Foret et al. 2021, Eq. 2
    ASAM   eps = rho T^2 g / ||T g||,  T = diag(|theta| + eta)      Kwon et al. 2021, Eq. 8

g is the gradient at theta of what is minimised on this batch, with regularisers but without weight decay. The step uses
the gradient at theta + eps. Here T covers all trainable parameters; the authors of ASAM set T = 1 for biases.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn

from flatlens.curvature.space import uphill
from flatlens.errors import BadInput, BadModel
from flatlens.settings_json import require_setting


@dataclass(frozen=True)
class Ridge:
    """Ridge regression: the last linear layer minimises sum_i ||W phi_i + b - y_i||^2 + penalty ||W||_F^2.

    The other layers do not change. The bias has no penalty, as in scikit-learn. A run takes one step, whatever number
    of steps the settings give.

    >>> from flatlens.training import Training
    >>> Training(Ridge(0.5), loss="half_squared_error", max_steps=1).optimiser.penalty
    0.5
    """

    penalty: float = 1.0
    lr: ClassVar[float] = 0.0  #: placeholder for tables of networks: ridge regression has no learning rate

    def __post_init__(self) -> None:
        positive = 0 < self.penalty < math.inf
        require_setting(self, "penalty", positive, "it must be positive, so that there is one solution")


@torch.no_grad()
def solve(model: nn.Module, x: Tensor, targets: Tensor, penalty: float) -> None:
    """Put the solution for these inputs and targets into the last linear layer, in place; computed in float64."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not layers:
        lacks = "the network has no nn.Linear whose weights can be computed"
        raise BadModel(lacks, argument="Training(Ridge())", call="")
    # the input features of the last one, whose outputs must be the network's
    last, was = layers[-1], model.training
    seen: list[Tensor] = []
    handle = last.register_forward_hook(lambda _, inputs, outputs: seen.extend((inputs[0], outputs)))
    try:
        f = model.eval()(x)
    finally:
        handle.remove()
        model.train(was)
    if len(seen) != 2 or f.shape != seen[1].shape or not bool((f == seen[1]).all()):
        raise BadModel("the network must end in an nn.Linear, called once", argument="Training(Ridge())", call="")
    W, b = solution(seen[0].double(), targets.double(), penalty, bias=last.bias is not None)
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


class _Stepping(ABC):
    """An optimiser of torch by its settings."""

    lr: float
    weight_decay: float
    _rates: ClassVar[tuple[str, ...]]  #: settings between 0 and 1
    _kind: ClassVar[type[torch.optim.Optimizer]]

    def __post_init__(self) -> None:
        require_setting(self, "lr", 0 < self.lr < math.inf, "the learning rate must be positive")
        require_setting(self, "weight_decay", 0 <= self.weight_decay < math.inf, "it must not be negative")
        for rate in self._rates:
            require_setting(self, rate, 0 <= getattr(self, rate) < 1, "it must be at least 0 and below 1")

    def build(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Build the torch optimiser."""
        # foreach: for small networks the loop over parameters is what costs
        options = {"lr": self.lr, "weight_decay": self.weight_decay, "foreach": True, **self._options()}
        return self._kind(parameters, **options)

    @abstractmethod
    def _options(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class SGD(_Stepping):
    """(Stochastic) gradient descent with heavy-ball momentum; weight decay adds decay * w to the gradient.

    >>> SGD(lr=0.1).build([torch.nn.Parameter(torch.ones(1))]).param_groups[0]["lr"]
    0.1
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    _rates, _kind = ("momentum",), torch.optim.SGD

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "nesterov", not self.nesterov or self.momentum != 0, "it needs a momentum")

    def _options(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "nesterov": self.nesterov}


@dataclass(frozen=True)
class Adam(_Stepping):
    """Adam (Kingma & Ba); with `decoupled` AdamW, whose weight decay is not scaled as the gradient is.

    >>> from flatlens.training import Training
    >>> Training(Adam(lr=0.01, decoupled=True, weight_decay=0.1), max_epochs=5).optimiser.beta1
    0.9
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    _rates = ("beta1", "beta2")

    @property
    def _kind(self) -> type[torch.optim.Optimizer]:  # type: ignore[override]
        return torch.optim.AdamW if self.decoupled else torch.optim.Adam

    def _options(self) -> dict[str, Any]:
        return {"betas": (self.beta1, self.beta2), "eps": self.eps}


@dataclass(frozen=True)
class RMSProp(_Stepping):
    """RMSProp (Hinton), as in torch; `alpha` is the decay rate of the mean square.

    >>> from flatlens.training import Training
    >>> Training(RMSProp(lr=0.01), max_epochs=5).optimiser.alpha
    0.99
    """

    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    weight_decay: float = 0.0
    _rates, _kind = ("alpha", "momentum"), torch.optim.RMSprop

    def _options(self) -> dict[str, Any]:
        return {"alpha": self.alpha, "eps": self.eps, "momentum": self.momentum}


Stepping: TypeAlias = SGD | Adam | RMSProp
Optimiser: TypeAlias = Stepping | Ridge


Unit: TypeAlias = Literal["epochs", "steps"]


@dataclass(frozen=True)
class Constant:
    """The same learning rate throughout.

    >>> Constant().factor(step=100, epoch=2)
    1.0
    """

    def factor(self, step: int, epoch: int) -> float:
        """Return 1."""
        return 1.0


class _Timed(ABC):
    """A schedule in epochs or steps."""

    unit: Unit

    def __post_init__(self) -> None:
        require_setting(self, "unit", self.unit in ("epochs", "steps"), "expected 'epochs' or 'steps'")

    def factor(self, step: int, epoch: int) -> float:
        """Return the factor on the learning rate at step `step` of epoch `epoch`, both counted from 0."""
        return self._at(epoch if self.unit == "epochs" else step)

    @abstractmethod
    def _at(self, now: int) -> float: ...


@dataclass(frozen=True)
class Steps(_Timed):
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
        increasing = list(self.at) == sorted(set(self.at)) and min(self.at, default=1) >= 1
        require_setting(self, "at", increasing, f"give increasing numbers of {self.unit}, such as (50, 80)")
        require_setting(self, "factor_each", self.factor_each > 0, "it must be positive")
        super().__post_init__()

    def _at(self, now: int) -> float:
        return float(self.factor_each ** sum(now >= at for at in self.at))


@dataclass(frozen=True)
class Cosine(_Timed):
    """Half a period of the cosine, from 1 down to `floor` over `length`; after that, `floor`.

    >>> [round(Cosine(length=10, unit="steps").factor(step, 0), 3) for step in (0, 5, 10, 20)]
    [1.0, 0.5, 0.0, 0.0]
    """

    length: int
    unit: Unit = "epochs"
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.length < 1 or not 0 <= self.floor <= 1:
            needed = "length must be at least 1, and floor from 0 to 1"
            raise BadInput(f"Cosine(length={self.length}, floor={self.floor}): {needed}")
        super().__post_init__()

    def _at(self, now: int) -> float:
        share = min(now / self.length, 1.0)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * share))


LearningRateSchedule: TypeAlias = Constant | Steps | Cosine


@dataclass(frozen=True)
class SAM:
    """The largest loss in a ball of radius `rho`, to first order; with 0, plain descent.

    >>> from flatlens.training import SGD, Training
    >>> Training(SGD(lr=0.1), batch_size=16, max_epochs=5, ascent=SAM(0.1)).ascent
    SAM(rho=0.1)
    """

    rho: float = 0.05

    def __post_init__(self) -> None:
        require_setting(self, "rho", 0 <= self.rho < math.inf, "the radius must not be negative")

    def move(self, parameters: Sequence[Tensor], slopes: Sequence[Tensor]) -> list[Tensor]:
        """Return eps, one tensor per parameter."""
        return _step(*uphill(slopes, self.rho))


@dataclass(frozen=True)
class ASAM:
    """The largest loss in an ellipsoid whose axes grow with the parameters; with 0, plain descent.

    >>> from flatlens.training import SGD, Training
    >>> Training(SGD(lr=0.1), batch_size=16, max_epochs=5, ascent=ASAM(0.5)).ascent
    ASAM(rho=0.5, eta=0.01)
    """

    rho: float = 0.5
    eta: float = 0.01

    def __post_init__(self) -> None:
        require_setting(self, "rho", 0 <= self.rho < math.inf, "the radius must not be negative")
        require_setting(self, "eta", 0 <= self.eta < math.inf, "it must not be negative")

    def move(self, parameters: Sequence[Tensor], slopes: Sequence[Tensor]) -> list[Tensor]:
        """Return eps, one tensor per parameter."""
        return _step(*uphill(slopes, self.rho, [p.detach().abs() + self.eta for p in parameters]))


Ascent: TypeAlias = SAM | ASAM


def _step(direction: Sequence[Tensor], factor: float) -> list[Tensor]:
    return [d * factor if factor else torch.zeros_like(d) for d in direction]  # without a length it may be NaN


class SharpnessAware(torch.optim.Optimizer):
    """A base optimiser and the radius of an ascent, for `edge_of`: `train` itself takes the steps."""

    def __init__(self, base: torch.optim.Optimizer, ascent: Ascent) -> None:
        own = {"rho": ascent.rho, "adaptive": isinstance(ascent, ASAM), "eta": getattr(ascent, "eta", 0.0)}
        super().__init__([{**group, **own} for group in base.param_groups], {})
        self.base_optimizer = base

    def step(self, closure: Any = None) -> Any:
        """Refuse: the next step needs a gradient at other weights."""
        raise BadInput("a sharpness-aware step needs the gradient at other weights")
