"""The step of each optimiser while its adaptive state is frozen: a linear map of a weight and its buffers.

Second moments, preconditioners, step counters and averaging weights stay as the last step left them. In units of the
matrix P that divides the gradient, a step on 0.5 h x^2 then takes s = (x, buffers) to

    s' = (A - h u e1^T) s,    A: the step without a gradient,    u: what a unit of gradient moves.

Each optimiser states A and u. The edge is the least h at which the spectral radius of this matrix exceeds 1. Where it
does so at the eigenvalue -1, as in every optimiser here, (I + A) s = h u x gives h = 1 / (e1^T (I + A)^-1 u).

Groups may differ. With an edge E_i for each weight, the eigenvalue -1 appears where H x = E x with E = diag(E_i P_i):
where the largest eigenvalue of E^-1/2 H E^-1/2 is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from flatlens.errors import BadInput

_State = Mapping[str, Any]
_Step: TypeAlias = "Callable[[_State, _State], FrozenStep]"


@dataclass(frozen=True, eq=False)
class FrozenStep:
    """A step with a frozen state. `divisor` and `axes` read the state only when called."""

    A: ArrayLike  #: (k, k)
    u: ArrayLike  #: (k,), learning rate included
    divisor: Callable[[], Tensor] | None = None  #: P, float64, along `axes`; None for 1
    decay: float = 0.0  #: weight decay that is added to the gradient before P divides it
    formula: str = ""  #: of the edge, if there is a short one
    axes: Callable[[], Sequence[Tensor | None]] | None = None  #: orthonormal axes of P in each dimension; None: its own

    def radius(self, h: float) -> float:
        """Return the spectral radius at a curvature h."""
        M = np.array(self.A, dtype=float)
        M[:, 0] -= h * np.asarray(self.u)
        return float(np.abs(np.linalg.eigvals(M)).max())

    @property
    def edge(self) -> float:
        """The least curvature at which steps grow; NaN if they grow at any, or make no step."""
        A, u = np.array(self.A, dtype=float), np.asarray(self.u, dtype=float)
        still = np.eye(len(u)) + A
        slope = float(np.linalg.solve(still, u)[0]) if np.linalg.det(still) else math.nan  # 1 / h at the eigenvalue -1
        if not slope > 0 or self.radius(1e-3 / slope) > 1 - 1e-12:
            return math.nan
        low, high = 0.0, 1 / slope
        while self.radius((1 - 1e-6) / slope) > 1 and high - low > 1e-9 * high:  # another eigenvalue grows before
            middle = (low + high) / 2
            low, high = (low, middle) if self.radius(middle) > 1 else (middle, high)
        return high

    def same_as(self, other: FrozenStep) -> bool:
        """Return whether both are the same linear map."""
        return bool(np.array_equal(self.A, other.A) and np.array_equal(self.u, other.u) and self.decay == other.decay)


def frozen_step(optimiser: torch.optim.Optimizer, group: _State, state: _State) -> FrozenStep:
    """Return the step of a group's weights, given one's state; raise BadInput where it is not linear or not known."""
    name, kind = name_of(optimiser), type(optimiser).__name__
    if group.get("maximize") or getattr(optimiser, "maximize", False):
        raise BadInput(f"{kind}(maximize=True) maximises the loss, so it has no edge of stability")
    if name in _NOT_LINEAR:
        one_step = "above 2 / lr of critical_sharpness its next step raises the loss"
        raise BadInput(f"{kind} {_NOT_LINEAR[name]}: no preconditioner, no linear edge of stability; {one_step}")
    if name not in _STEPS:
        known = ", ".join(sorted({one.removeprefix("torch.") for one in _STEPS}, key=str.lower))
        raise BadInput(f"{kind} is unknown: flatlens has no preconditioner for {kind}, only for {known}")
    if used := [option for option in _OPTIONS if group.get(option)]:
        raise BadInput(f"{kind}({used[0]}={group[used[0]]}) is unknown: flatlens has no preconditioner for this option")
    try:
        return _STEPS[name](group, state)
    except KeyError as missing:
        raise BadInput(f"{kind} is unknown: it has no {missing}, unlike the {kind} that flatlens knows") from missing


def name_of(optimiser: torch.optim.Optimizer) -> str:
    """Return the name of an optimiser's class, with "torch." before it if it is one of torch's own."""
    kind = type(optimiser)
    return f"torch.{kind.__name__}" if getattr(torch.optim, kind.__name__, None) is kind else kind.__name__


def steps_taken(group: _State, state: _State) -> float:
    """Return the number of steps that shaped a parameter's state."""
    if "Q" in state and "step" not in state:  # the first call of pytorch_optimizer's SOAP makes no step
        return float(group["step"]) - 1
    return float(state["step"] if "step" in state else group["step"] if "step" in group else group["k"])


def _wide(state: _State, name: str) -> Tensor:
    found: Tensor = state[name]
    return found.to(torch.float64)


def _root(group: _State, state: _State, t: float, name: str = "exp_avg_sq", k: int = 1) -> Tensor:
    """Return the root of a mean square of t terms, v / (1 - beta_k^t), plus eps."""
    return (_wide(state, name) / (1 - math.pow(float(group["betas"][k]), t))).sqrt() + float(group["eps"])


def _averaging(
    a: float, b: float, into: float, *, mean: float = 1.0, gradient: float = 0.0, keep: float = 1.0
) -> tuple[list[list[float]], list[float]]:
    """Return A and u of m' = b m + into g, x' = keep x - a (mean m' + gradient g)."""
    return [[keep, -a * mean * b], [0.0, b]], [a * (mean * into + gradient), -into]


def _decays(group: _State, decoupled: object) -> tuple[float, float]:
    """Return the factor on the weights, and the decay that is added to the gradient."""
    w = float(group["weight_decay"])
    return (1 - w * (1.0 if group.get("fixed_decay") else float(group["lr"])), 0.0) if decoupled else (1.0, w)


def _of_momentum(b: float, nesterov: bool = False, dampening: float = 0.0) -> str:
    if not b:
        return "2/lr"
    if nesterov:
        return "2(1+momentum)/(lr(1+2momentum))"
    return "2(1+momentum)/(lr(1-dampening))" if dampening else "2(1+momentum)/lr"


def _sgd(group: _State, state: _State) -> FrozenStep:
    b, nesterov = float(group["momentum"]), bool(group["nesterov"])
    dampening = float(group["dampening"]) if b else 0.0  # torch never applies it without momentum
    mean, gradient = (b, 1.0) if nesterov else (1.0, 0.0)
    A, u = _averaging(float(group["lr"]), b, 1 - dampening, mean=mean, gradient=gradient)
    return FrozenStep(A, u, None, float(group["weight_decay"]), _of_momentum(b, nesterov, dampening))


def _asgd(group: _State, state: _State) -> FrozenStep:
    rate = float(state.get("eta", group["lr"]))  # of the next step; the average of the weights moves nothing
    return FrozenStep([[1 - float(group["lambd"]) * rate]], [rate], None, float(group["weight_decay"]))


def _dividing(P: Callable[[_State, _State], Tensor]) -> _Step:
    """A step along the divided gradient, or its sum with momentum."""

    def step(group: _State, state: _State) -> FrozenStep:
        b = float(group.get("momentum", 0.0))
        A, u = _averaging(float(group["lr"]), b, 1.0)
        return FrozenStep(A, u, lambda: P(group, state), float(group["weight_decay"]), _of_momentum(b))

    return step


def _rmsprop(group: _State, state: _State) -> Tensor:
    v = _wide(state, "square_avg")
    if group["centered"]:
        v = v - _wide(state, "grad_avg").square()
    return v.clamp(min=0).sqrt() + float(group["eps"])


def _adagrad(group: _State, state: _State) -> Tensor:
    return (_wide(state, "sum").sqrt() + float(group["eps"])) * (1 + float(state["step"]) * float(group["lr_decay"]))


def _adadelta(group: _State, state: _State) -> Tensor:
    of_gradients, of_steps = (_wide(state, name) + float(group["eps"]) for name in ("square_avg", "acc_delta"))
    return (of_gradients / of_steps).sqrt()


def _like_adam(P: Callable[[_State, _State, float], Tensor], decoupled: Callable[[_State], object]) -> _Step:
    """A step along the mean of gradients, divided by P after t steps and by 1 - beta1^t."""

    def step(group: _State, state: _State) -> FrozenStep:
        b, (keep, decay) = float(group["betas"][0]), _decays(group, decoupled(group))

        def divisor() -> Tensor:
            t = steps_taken(group, state)
            return (1 - math.pow(b, t)) * P(group, state, t)

        A, u = _averaging(float(group["lr"]), b, 1 - b, keep=keep)
        return FrozenStep(A, u, divisor, decay, "2(1+beta1)/((1-beta1)lr)" if b else "2/lr")

    return step


def _is_decoupled(group: _State) -> object:
    return group.get("decoupled_weight_decay")  # an older torch has no such setting


def _adam(group: _State, state: _State, t: float) -> Tensor:
    return _root(group, state, t, "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq")


def _rectification(beta2: float, t: float, least: float = 4.0) -> float:
    """Return the factor of RAdam on the rate (Liu et al. 2020); 0 while its rho_t is at most `least`."""
    most = 2 / (1 - beta2) - 1
    rho = most - 2 * t * math.pow(beta2, t) / (1 - math.pow(beta2, t))
    return math.sqrt((rho - 4) * (rho - 2) * most / ((most - 4) * (most - 2) * rho)) if rho > least else 0.0


def _radam(group: _State, state: _State, t: float) -> Tensor:
    v, beta2 = _wide(state, "exp_avg_sq"), float(group["betas"][1])
    rect = _rectification(beta2, t, least=5)  # torch divides by the root of a mean square only after that
    if not rect:
        return torch.ones_like(v)
    return (v.sqrt() + float(group["eps"])) / (math.sqrt(1 - math.pow(beta2, t)) * rect)


def _nadam(group: _State, state: _State) -> FrozenStep:
    """The gradient and its mean have coefficients of their own, which change with the step."""
    b, (keep, decay) = float(group["betas"][0]), _decays(group, _is_decoupled(group))
    t = float(state.get("step", 1))
    now, later = (b * (1 - 0.5 * math.pow(0.96, n * float(group["momentum_decay"]))) for n in (t, t + 1))
    product = float(state.get("mu_product", now))
    mean, gradient = later / (1 - product * later), (1 - now) / (1 - product)
    A, u = _averaging(float(group["lr"]), b, 1 - b, mean=mean, gradient=gradient, keep=keep)
    return FrozenStep(A, u, lambda: _root(group, state, t), decay)


def _schedule_free(group: _State, state: _State) -> FrozenStep:
    """The weights y between the average and z: y' = (1-c) y + c z - a (1 - b (1-c)) g, z' = z - a g."""
    adaptive, t = "betas" in group, max(float(group["k"] if "k" in group else group.get("step", 0)), 1.0)
    b = float(group["betas"][0] if adaptive else group["momentum"])
    a = float(group["lr"]) * min(1.0, t / max(float(group.get("warmup_steps", 0)), 1.0))
    if "silent_sgd_phase" in group:
        a *= _rectification(float(group["betas"][1]), t)
    total, power = float(group["weight_sum"]), float(group["weight_lr_power"])
    c = math.pow(t, float(group["r"])) * math.pow(float(group["lr_max"]), power) / total if total > 0 else 1.0
    if scale := float(group.get("decoupling_c", 0)):
        c = min(1.0, c * (1 - b) * scale)
    A, u = np.array([[1 - c, c], [0.0, 1.0]]), np.array([a * (1 - b * (1 - c)), a])
    w = float(group["weight_decay"])
    if not adaptive:
        return FrozenStep(A, u, None, w)
    A[:, 0] -= w * u  # it decays y, beside the divided gradient
    return FrozenStep(A, u, lambda: _root(group, state, t))


def _adan(group: _State, state: _State) -> FrozenStep:
    """Means of the gradient and of its change; the buffers are both, and the last gradient."""
    a, w, (b, beta2, _) = float(group["lr"]), float(group["weight_decay"]), map(float, group["betas"])
    t = max(float(group.get("step", 1)), 1.0)
    keep, then = (1 - a * w, 1.0) if group["weight_decouple"] else (1.0, 1 / (1 + a * w))  # before or after the step
    p, q = a / (1 - math.pow(b, t)), a * beta2 / (1 - math.pow(beta2, t))
    of_change = 1 - beta2
    A = np.array([[keep, -p * b, -q * beta2, q * of_change], [0, b, 0, 0], [0, 0, beta2, -of_change], [0, 0, 0, 0]])
    u = np.array([p * (1 - b) + q * of_change, b - 1, -of_change, -1.0])
    A[0], u[0] = A[0] * then, u[0] * then
    return FrozenStep(A, u, lambda: _root(group, state, t, k=2))


def _ademamix(group: _State, state: _State) -> FrozenStep:
    """A fast mean, corrected, and a slow one with the coefficient alpha."""
    a, (keep, decay), (b, _, slow) = float(group["lr"]), _decays(group, group["weight_decouple"]), group["betas"]
    t = max(float(group.get("step", 1)), 1.0)
    p, q = a / (1 - math.pow(b, t)), a * float(group["alpha"])
    A = [[keep, -p * b, -q * slow], [0.0, b, 0.0], [0.0, 0.0, slow]]
    u = [p * (1 - b) + q * (1 - slow), b - 1, slow - 1]
    return FrozenStep(A, u, lambda: _root(group, state, t), decay)


def _soap(group: _State, state: _State) -> FrozenStep:
    """Adam along the axes Q; its weight decay comes after the step."""
    b, beta2 = map(float, group["betas"])
    a, keep = float(group["lr"]), 1 - float(group["lr"]) * float(group["weight_decay"])

    def divisor() -> Tensor:
        t = steps_taken(group, state)
        corrected = (1 - math.pow(b, t)) / math.sqrt(1 - math.pow(beta2, t)) if group["correct_bias"] else 1.0
        return corrected * (_wide(state, "exp_avg_sq").sqrt() + float(group["eps"]))

    A, u = _averaging(a * keep, b, 1 - b, keep=keep)
    return FrozenStep(A, u, divisor, axes=lambda: [Q.to(torch.float64) if len(Q) else None for Q in state["Q"]])


def _shampoo(group: _State, state: _State) -> FrozenStep:
    """The inverse roots of pytorch_optimizer's Shampoo, one for each dimension."""
    if group["momentum"]:
        raise BadInput("Shampoo(momentum=...) is unknown: it averages divided gradients with others")
    keep, decay = _decays(group, group["weight_decouple"])

    def roots() -> list[tuple[Tensor, Tensor]]:
        found = (_wide(state, f"inv_pre_cond_{k}") for k in range(sum("inv" in name for name in state)))
        return [torch.linalg.eigh((root + root.T) / 2) for root in found]

    def divisor() -> Tensor:
        P = torch.ones((), dtype=torch.float64)
        for values, _ in roots():
            P = P[..., None] / values
        return P

    return FrozenStep([[keep]], [float(group["lr"])], divisor, decay, axes=lambda: [axes for _, axes in roots()])


_OPTIONS = (
    "cautious", "stable_adamw", "adanorm", "use_gc", "rectify", "ams_bound", "adam_debias", "use_palm", "merge_dims",
    "normalize_gradient", "normalize_grads", "max_grad_norm", "t_alpha_beta3",
)  # fmt: skip
"""Options of other packages that change the step, and are not known."""

_STEPS: dict[str, _Step] = {
    "torch.SGD": _sgd,
    "torch.ASGD": _asgd,
    "torch.RMSprop": _dividing(_rmsprop),
    "torch.Adagrad": _dividing(_adagrad),
    "torch.Adadelta": _dividing(_adadelta),
    "torch.Adam": _like_adam(_adam, _is_decoupled),
    "torch.AdamW": _like_adam(_adam, lambda group: True),
    "torch.Adamax": _like_adam(lambda group, state, t: _wide(state, "exp_inf"), _is_decoupled),
    "torch.RAdam": _like_adam(_radam, _is_decoupled),
    "torch.NAdam": _nadam,
    **dict.fromkeys(("SGDScheduleFree", "AdamWScheduleFree", "RAdamScheduleFree"), _schedule_free),
    **dict.fromkeys(("ScheduleFreeSGD", "ScheduleFreeAdamW", "ScheduleFreeRAdam"), _schedule_free),
    "AdaBelief": _like_adam(partial(_root, name="exp_avg_var"), itemgetter("weight_decouple")),
    "Yogi": _like_adam(_root, itemgetter("weight_decouple")),
    "Adan": _adan,
    "AdEMAMix": _ademamix,
    "SOAP": _soap,
    "Shampoo": _shampoo,
}

_NOT_LINEAR = {
    **dict.fromkeys(("Lion", "SignSGD", "Tiger", "torch.Rprop"), "steps by signs"),
    **dict.fromkeys(("torch.Adafactor", "Adafactor", "AdaFactor", "CAME", "StableAdamW"), "limits the size of a step"),
    **dict.fromkeys(("Lamb", "LARS"), "scales its steps by the norms of the weights"),
    "torch.LBFGS": "builds its step from several gradients",
}
"""Optimisers whose step is not linear in the weights, whatever is frozen, and why."""
