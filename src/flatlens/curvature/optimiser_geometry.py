"""The Hessian as an optimiser meets it: P^-1/2 (H + D) P^-1/2, and the largest curvature over a ball of Muon.

A step with a frozen state is theta <- theta - lr P^-1 m, where P is diagonal and m is built from gradients: its own
for SGD, the root of the mean square of gradients for Adam, RMSprop and Adagrad. D is the weight decay that the
optimiser adds to the gradient.

Muon moves each matrix W by lr s U V^T, where U S V^T is a mean of its gradients and s depends on the shape of W.
These steps are the corners of the ball ||D_l||_2 <= s_l, and the dual norm of the gradient is sum_l s_l ||G_l||_*.
Without momentum, a step changes a quadratic loss by -lr ||G||_* + lr^2 <D, H D> / 2. So it falls whenever the largest
curvature over the ball, divided by ||G||_*, is below 2 / lr (Islamov et al. 2026, Non-Euclidean gradient descent
operates at the edge of stability).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from flatlens.curvature.operators import Operator, VectorProduct
from flatlens.curvature.space import dot
from flatlens.errors import BadInput
from flatlens.estimate import Progress
from flatlens.problem import Batch, Problem
from flatlens.problem.batches import size
from flatlens.progress import SEARCH, expected_of_search

_State = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Preconditioner:
    """The diagonal P of an optimiser in units of its leading learning rate, by the names of the parameters it moves."""

    divisor: Mapping[str, Tensor]  #: P, float64, in the shapes of the parameters
    decay: Mapping[str, float]  #: weight decay that is added to the gradient


def plain_optimiser(optimiser: object, call: str) -> torch.optim.Optimizer | None:
    """Return an optimiser without the wrapping of accelerate, or None; refuse anything else. `call` is the user's."""
    inner = getattr(optimiser, "optimizer", optimiser)
    if not isinstance(inner, torch.optim.Optimizer | None):
        raise BadInput(f"{call}(optimiser=...): expected a torch.optim.Optimizer, got {type(optimiser).__name__}")
    return inner


def leading_rate(optimiser: torch.optim.Optimizer) -> float:
    """Return the largest learning rate of the optimiser's groups, in whose unit a preconditioner is."""
    return max(float(group["lr"]) for group in optimiser.param_groups)


def rate_of_a_step(optimiser: torch.optim.Optimizer) -> float:
    """Return the leading rate; refuse an optimiser whose learning rates are 0."""
    rate = leading_rate(optimiser)
    if not rate > 0:
        raise BadInput(f"the learning rate is {rate:g}: the optimiser makes no step")
    return rate


def uniform_groups(optimiser: torch.optim.Optimizer) -> bool:
    """Return whether all groups have the same learning rate and weight decay."""
    return len({(float(group["lr"]), float(group["weight_decay"])) for group in optimiser.param_groups}) == 1


def preconditioner_of(optimiser: torch.optim.Optimizer, model: nn.Module) -> Preconditioner:
    """Return P of SGD, Adam, AdamW, RMSprop or Adagrad, from the state that its last step left.

    P is the divisor of the gradient in a step, for Adam with both corrections of its bias: (1 - beta1^t) (sqrt(v / (1 -
    beta2^t)) + eps) (Cohen et al. 2022, Adaptive gradient methods at the edge of stability). A group with a learning
    rate of its own, lr_g, gets P lr / lr_g with lr the largest one. Weight decay w that AdamW applies to the weights
    themselves makes it P (1 - lr_g w / 2): with that, the steps grow where lambda_max(P^-1/2 H P^-1/2) exceeds the edge
    without decay. Weight decay that is added to the gradient is in `decay`; for SGD whose groups are alike it is left
    out, because there it only shifts the edge.

    Parameters that the optimiser does not move (not its own, learning rate 0, never a gradient) are left out.

    Raises:
        BadInput: another optimiser, one that maximises or holds none of the network's parameters, or one that has not
            made a step yet, or whose learning rates are 0, or whose decay alone makes its steps grow.

    >>> net = nn.Linear(2, 1, bias=False)
    >>> sgd = torch.optim.SGD([{"params": net.parameters(), "lr": 0.1}])
    >>> preconditioner_of(sgd, net).divisor["weight"]
    tensor([[1., 1.]], dtype=torch.float64)
    """
    kind = type(optimiser)
    if kind not in _DIVISORS:
        known = ", ".join(one.__name__ for one in _DIVISORS)
        raise BadInput(f"flatlens has no preconditioner for {kind.__name__}, only for {known}")
    if any(group.get("maximize") for group in optimiser.param_groups):
        raise BadInput(f"{kind.__name__}(maximize=True) maximises the loss, so it has no edge of stability")
    names = {id(p): name for name, p in model.named_parameters()}
    rate = rate_of_a_step(optimiser)
    divisor: dict[str, Tensor] = {}
    decay: dict[str, float] = {}
    held = False
    for group in optimiser.param_groups:
        own, after = float(group["lr"]), kind is torch.optim.AdamW or group.get("decoupled_weight_decay", False)
        for p in group["params"]:
            held |= id(p) in names
            state = optimiser.state.get(p, {})
            stepped = kind is torch.optim.SGD or (state and float(state["step"]) > 0)  # Adagrad's begins at 0
            if id(p) not in names or own == 0 or not stepped:
                continue
            P = _DIVISORS[kind](group, state, p) * (rate / own)
            weight_decay = float(group["weight_decay"])
            if after and own * weight_decay >= 2:
                raise BadInput(f"{kind.__name__}: its weight decay alone makes the steps grow, as lr x decay is over 2")
            divisor[names[id(p)]] = P * (1 - own * weight_decay / 2) if after else P
            decay[names[id(p)]] = 0.0 if after else weight_decay
    if not held:
        raise BadInput(f"the {kind.__name__} holds none of the network's parameters: give the optimiser that trains it")
    if not divisor:
        raise BadInput(f"{kind.__name__} has not stepped yet, so it has no preconditioner")
    if kind is torch.optim.SGD and uniform_groups(optimiser):
        decay = dict.fromkeys(decay, 0.0)
    return Preconditioner(divisor, decay)


def _adam(group: _State, state: _State, p: Tensor) -> Tensor:
    (beta1, beta2), t = map(float, group["betas"]), float(state["step"])
    v: Tensor = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"].to(torch.float64)
    of_mean, of_square = 1 - math.pow(beta1, t), 1 - math.pow(beta2, t)
    return of_mean * ((v / of_square).sqrt() + float(group["eps"]))


def _rmsprop(group: _State, state: _State, p: Tensor) -> Tensor:
    v: Tensor = state["square_avg"].to(torch.float64)
    if group["centered"]:
        v = v - state["grad_avg"].to(torch.float64).square()
    return v.clamp(min=0).sqrt() + float(group["eps"])


def _adagrad(group: _State, state: _State, p: Tensor) -> Tensor:
    v: Tensor = state["sum"].to(torch.float64)
    return (v.sqrt() + float(group["eps"])) * (1 + float(state["step"]) * float(group["lr_decay"]))


_DIVISORS: dict[type, Callable[[_State, _State, Tensor], Tensor]] = {
    torch.optim.SGD: lambda group, state, p: torch.ones_like(p, dtype=torch.float64, requires_grad=False),
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adagrad: _adagrad,
}


@final
class PreconditionedHessian(Operator):
    """P^-1/2 (H + D) P^-1/2 over the parameters that the preconditioner names.

    >>> net = nn.Linear(2, 1, bias=False)
    >>> problem = Problem(net, "half_squared_error", (torch.tensor([[3.0, 4.0]]), torch.zeros(1, 1)))
    >>> P = Preconditioner({"weight": torch.tensor([[9.0, 4.0]])}, {"weight": 0.0})
    >>> PreconditionedHessian(problem, P)(torch.tensor([1.0, 0.0]))  # of H = x x^T
    tensor([1., 2.])
    """

    def __init__(self, problem: Problem, preconditioner: Preconditioner, *, model: nn.Module | None = None) -> None:
        names = [name for name in preconditioner.divisor if name in problem.parameters]
        if not names:
            raise BadInput("the optimiser moves none of the measured parameters")
        super().__init__(problem, names, model=model)
        self._root = self.space.flat({name: preconditioner.divisor[name].rsqrt() for name in names})
        shift = {name: preconditioner.decay[name] / preconditioner.divisor[name] for name in names}
        self._shift = self.space.flat(shift)

    def _open(self, batch: Batch, number: int) -> VectorProduct:
        f, y = self.problem.run_chunk(self.model, batch, number)
        risk = self.problem.loss.total(f, y) / self.problem.mass
        times, share = self._second_derivative(risk, batch), size(batch) / self.problem.n

        def product(v: Tensor) -> Tensor:
            return self._root * times(self._root * v) + share * self._shift * v

        return product


_SETTLED = 1e-4  #: relative rise at which a climb ends
_STEPS, _USUAL = 40, 10  #: the largest and the usual number of steps of a climb


@dataclass(frozen=True, eq=False)
class BallPeak:
    """The largest <D, H D> that climbs over the ball found."""

    value: float
    restarts: Tensor  #: the value of each climb
    products: int


def ball_of(optimiser: torch.optim.Optimizer, model: nn.Module) -> dict[str, float]:
    """Return s of each matrix that a `torch.optim.Muon` moves, in units of its largest learning rate."""
    names = {id(p): name for name, p in model.named_parameters()}
    largest = rate_of_a_step(optimiser)
    found = {}
    for group in optimiser.param_groups:
        for p in group["params"]:
            if id(p) in names and float(group["lr"]) > 0:
                rows, columns = p.shape
                by_shape = math.sqrt(max(1.0, rows / columns))  # torch's factor on the learning rate of a matrix
                if group["adjust_lr_fn"] == "match_rms_adamw":
                    by_shape = 0.2 * math.sqrt(max(rows, columns))
                found[names[id(p)]] = by_shape * float(group["lr"]) / largest
    if not found:
        raise BadInput("the Muon holds none of the network's parameters: give the optimiser that trains it")
    return found


def dual_norm(gradient: Mapping[str, Tensor], radius: Mapping[str, float]) -> float:
    """Return sum_l s_l ||G_l||_*, the largest <G, D> over the ball.

    >>> dual_norm({"w": torch.diag(torch.tensor([3.0, 4.0]))}, {"w": 2.0})
    14.0
    """
    nuclear = {name: float(torch.linalg.svdvals(gradient[name].to(torch.float64)).sum()) for name in radius}
    return sum(s * nuclear[name] for name, s in radius.items())


def corner(along: Mapping[str, Tensor], radius: Mapping[str, float]) -> dict[str, Tensor]:
    """Return the point of the ball with the largest inner product: s_l U V^T for each matrix."""
    found = {}
    for name, s in radius.items():
        U, _, Vh = torch.linalg.svd(along[name].to(torch.float64), full_matrices=False)
        found[name] = (s * (U @ Vh)).to(along[name])
    return found


def climb_in_ball(
    operator: Operator,
    radius: Mapping[str, float],
    starts: Iterable[Tensor],
    *,
    progress: Progress | None = None,
) -> BallPeak:
    """Return the largest <D, H D> over the ball that climbs from these directions, (P,), reach.

    From D a climb goes to the best point between D and the corner along H D, on which <D, H D> is a parabola: it
    never falls. The largest value is at least the one found; the problem is not convex, and no climb proves more.
    """
    before, values = operator.products, []
    starts, taken = list(starts), 0
    for start in starts:
        D = _corner(operator, start, radius)
        HD = operator(D)
        value = dot([D], [HD])
        for _ in range(_STEPS):
            taken += 1
            if progress is not None:
                progress(SEARCH, taken, expected_of_search(taken, len(starts) * _STEPS, len(starts) * _USUAL))
            E = _corner(operator, HD, radius)
            HE = operator(E)
            across, there = dot([E], [HD]), dot([E], [HE])
            bend = value - 2 * across + there  # along D + t (E - D): value + 2 t (across - value) + t^2 bend
            t = 1.0 if bend >= 0 else min(1.0, max(0.0, (value - across) / bend))
            D, HD = D + t * (E - D), HD + t * (HE - HD)
            rise, value = dot([D], [HD]) - value, dot([D], [HD])
            if rise <= _SETTLED * abs(value):
                break
        values.append(value)
    if progress is not None:
        progress(SEARCH, taken, taken)
    return BallPeak(max(values), torch.tensor(values, dtype=torch.float64), operator.products - before)


def _corner(operator: Operator, v: Tensor, radius: Mapping[str, float]) -> Tensor:
    return operator.space.flat(corner(operator.space.named(v), radius))
