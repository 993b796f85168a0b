"""The Hessian as an optimiser meets it: P^-1/2 (H + D) P^-1/2, and the largest curvature over a ball of Muon.

A step with a frozen state (`frozen_steps`) is theta <- theta - lr P^-1 m, where m is built from gradients and P is the
identity for SGD, the root of the mean square of gradients for Adam, RMSprop and Adagrad; for SOAP along axes of its
own. D is the weight decay that the optimiser adds to the gradient.

Muon moves each matrix W by lr s U V^T, where U S V^T is a mean of its gradients and s depends on the shape of W.
These steps are the corners of the ball ||D_l||_2 <= s_l, and the dual norm of the gradient is sum_l s_l ||G_l||_*.
Without momentum, a step changes a quadratic loss by -lr ||G||_* + lr^2 <D, H D> / 2. So it falls whenever the largest
curvature over the ball, divided by ||G||_*, is below 2 / lr (Islamov et al. 2026, Non-Euclidean gradient descent
operates at the edge of stability).

The edge of stability is the curvature above which these steps grow on a quadratic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from flatlens.column import Column
from flatlens.curvature.frozen_steps import FrozenStep, frozen_step, name_of, steps_taken
from flatlens.curvature.krylov import VectorProduct
from flatlens.curvature.operators import Operator
from flatlens.curvature.space import dot
from flatlens.errors import BadInput
from flatlens.estimate import Progress
from flatlens.problem import Batch, Problem
from flatlens.problem.batches import size
from flatlens.progress import SEARCH, expected_of_search


@dataclass(frozen=True, eq=False)
class Preconditioner:
    """The matrix P of an optimiser in units of its leading learning rate, diagonal along `axes`, by parameters."""

    divisor: dict[str, Tensor]  #: the diagonal of P, float64, in the shapes of the parameters
    decay: dict[str, float]  #: weight decay that is added to the gradient
    axes: dict[str, Sequence[Tensor | None]] = field(default_factory=dict)  #: by dimension, columns; None: its own


def plain_optimiser(optimiser: object, call: str) -> torch.optim.Optimizer | None:
    """Return an optimiser without the wrapping of accelerate, or None; refuse anything else. `call` is the user's."""
    wrapped = any(kind.__name__ == "AcceleratedOptimizer" for kind in type(optimiser).__mro__)
    inner = getattr(optimiser, "optimizer", optimiser) if wrapped else optimiser
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


def without_ascent(optimiser: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimiser inside a sharpness-aware one, which makes its steps; others as they are."""
    ascends = type(optimiser).__name__ in ("SAM", "SharpnessAware")  # the latter is in `flatlens.training`
    base = getattr(optimiser, "base_optimizer", None) if ascends else None
    return base if isinstance(base, torch.optim.Optimizer) else optimiser


def leading_step(optimiser: torch.optim.Optimizer, **settings: float) -> FrozenStep:
    """Return the frozen step (or raise BadInput) of the group with the largest rate, with some settings changed."""
    group = max(optimiser.param_groups, key=lambda group: float(group["lr"]))
    return _first_step(optimiser, {**group, **settings})


def _first_step(optimiser: torch.optim.Optimizer, group: Mapping[str, Any]) -> FrozenStep:
    """Return the frozen step of the first parameter of a group that has a state."""
    states = (optimiser.state.get(p) for p in group["params"])
    return frozen_step(optimiser, group, next(filter(None, states), {}))


def is_plain(optimiser: torch.optim.Optimizer) -> bool:
    """Return whether all weights take the same step, along the gradient itself."""
    lead = leading_step(optimiser)
    steps = (_first_step(optimiser, group) for group in optimiser.param_groups)
    return lead.divisor is None and all(step.same_as(lead) for step in steps)


def preconditioner_of(optimiser: torch.optim.Optimizer, model: nn.Module) -> Preconditioner:
    """Return P of an optimiser whose step is linear (`frozen_steps`), from the state that its last step left.

    P is the divisor of the gradient in a step, for Adam with both corrections of its bias: (1 - beta1^t) (sqrt(v / (1 -
    beta2^t)) + eps) (Cohen et al. 2022, Adaptive gradient methods at the edge of stability). Weights whose steps have
    another edge than those of the leading learning rate have P times their edge over that one: a group with a learning
    rate of its own, lr_g, gets P lr / lr_g. So it is with weight decay w that AdamW applies to the weights themselves,
    P (1 - lr_g w / 2): the leading edge is without it. With that, the steps grow where lambda_max(P^-1/2 H P^-1/2)
    exceeds the leading edge. Weight decay that is added to the gradient is in `decay`; for SGD whose groups are alike
    it is left out, because there it only shifts the edge.

    Parameters that the optimiser does not move (not its own, learning rate 0, never a gradient) are left out.

    Raises:
        BadInput: another optimiser, one that maximises or holds none of the network's parameters, or one that has not
            made a step yet, or whose learning rates are 0, or whose steps grow at any curvature.
    """
    optimiser = without_ascent(optimiser)
    kind, names = type(optimiser).__name__, {id(p): name for name, p in model.named_parameters()}
    rate_of_a_step(optimiser)
    plain = is_plain(optimiser)
    edge = leading_step(optimiser, **({} if plain else {"weight_decay": 0.0})).edge
    found = Preconditioner({}, {}, {})
    held = False
    for group in optimiser.param_groups:
        for p in group["params"]:
            held |= id(p) in names
            state = optimiser.state.get(p, {})
            step = frozen_step(optimiser, group, state)
            stepped = step.divisor is None or (state and steps_taken(group, state) > 0)  # Adagrad has a state at 0
            if id(p) not in names or float(group["lr"]) == 0 or not stepped:
                continue
            if not (own := step.edge) > 0:
                raise BadInput(f"{kind}: its steps grow at any curvature; reduce its weight decay or momentum")
            name, ones = names[id(p)], partial(torch.ones_like, p, dtype=torch.float64, requires_grad=False)
            found.divisor[name] = (step.divisor or ones)() * (own / edge)
            found.decay[name] = 0.0 if plain else step.decay
            if step.axes is not None:
                found.axes[name] = step.axes()
    if not held:
        raise BadInput(f"the {kind} holds none of the network's parameters: give the optimiser that trains it")
    if not found.divisor:
        raise BadInput(f"{kind} has not stepped yet, so it has no preconditioner")
    return found


@final
class PreconditionedHessian(Operator):
    """P^-1/2 (H + D) P^-1/2 over the parameters that the preconditioner names, in the axes of P."""

    def __init__(self, problem: Problem, preconditioner: Preconditioner, *, model: nn.Module | None = None) -> None:
        names = [name for name in preconditioner.divisor if name in problem.parameters]
        if not names:
            raise BadInput("the optimiser moves none of the measured parameters")
        super().__init__(problem, names, model=model)
        self._root = self.space.flat({name: preconditioner.divisor[name].rsqrt() for name in names})
        shift = {name: preconditioner.decay[name] / preconditioner.divisor[name] for name in names}
        self._shift = self.space.flat(shift)
        like = self.space.point()
        turned = {name: preconditioner.axes[name] for name in names if name in preconditioner.axes}
        self._axes = {
            name: [(k, Q.to(like)) for k, Q in enumerate(axes) if Q is not None] for name, axes in turned.items()
        }

    def _open(self, batch: Batch, number: int) -> VectorProduct:
        times = self._second_derivative(self._risk(batch, number), batch)
        share = size(batch) / self.problem.n

        def product(v: Tensor) -> Tensor:
            return self._root * self._turned(times(self._turned(self._root * v)), back=True) + share * self._shift * v

        return product

    def _turned(self, v: Tensor, back: bool = False) -> Tensor:
        """Return a vector along the preconditioner's axes in the weights' own, or back."""
        if not self._axes:
            return v
        parts = self.space.named(v)
        for name, axes in self._axes.items():
            for k, Q in axes:
                parts[name] = torch.tensordot(Q.T if back else Q, parts[name], dims=([1], [k])).movedim(0, k)
        return self.space.flat(parts)


_SETTLED = 1e-4  #: relative rise at which a climb ends
_STEPS, _USUAL = 40, 10  #: the largest and the usual number of steps of a climb


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
    """Return sum_l s_l ||G_l||_*, the largest <G, D> over the ball."""
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
    operator: Operator, radius: Mapping[str, float], starts: Iterable[Tensor], *, progress: Progress | None = None
) -> Tensor:
    """Return the <D, H D> that the climbs from these directions, (P,), reach in the ball, one each, float64.

    From D a climb goes to the best point between D and the corner along H D, on which <D, H D> is a parabola: it
    never falls. The largest value is at least the one found; the problem is not convex, and no climb proves more.
    """
    values = []
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
    return torch.tensor(values, dtype=torch.float64)


def _corner(operator: Operator, v: Tensor, radius: Mapping[str, float]) -> Tensor:
    return operator.space.flat(corner(operator.space.named(v), radius))


WITH_EDGE = ("sharpness", "preconditioned_sharpness", "critical_sharpness", "batch_sharpness")
"""The measures that are compared with an edge."""


def has_edge(row: str) -> bool:
    """Return whether a report's row is compared with an edge: a measure of `WITH_EDGE` itself, not a part of it."""
    column = Column.parse(row)
    return column.name in WITH_EDGE and not column.part


@dataclass(frozen=True)
class Edge:
    """A learning rate and its edge of stability; NaN where there is none, with the reason in `note`.

    >>> Edge(lr=0.1, value=20.0, formula="2 / lr").value
    20.0
    """

    lr: float = math.nan  #: the largest one, if groups of parameters have their own
    value: float = math.nan  #: the edge, in the unit of the measure `of`
    formula: str = ""  #: where there is a short one
    of: str = "sharpness"  #: or "preconditioned_sharpness"; where it is the sharpness, the two are the same
    batches: float = math.nan  #: the edge of `batch_sharpness`; NaN where it is a range, or not known
    note: str = ""  #: why there is none

    def beside(self, measure: str) -> float:
        """Return the edge that belongs beside a measure; NaN beside a sharpness that has none.

        >>> Edge(0.1, 380.0, "2(1+beta1)/((1-beta1)lr)", "preconditioned_sharpness").beside("sharpness")
        nan
        """
        if measure == "critical_sharpness":  # above it the next step raises the loss, whatever the optimiser
            return 2 / self.lr if self.lr > 0 else math.nan
        if measure == "batch_sharpness":
            return self.batches
        return math.nan if measure == "sharpness" != self.of else self.value


def edge_of(optimiser: torch.optim.Optimizer | None, *, gradient_norm: float = math.nan) -> Edge:
    r"""Return the largest curvature h of the loss at which an optimiser still converges on a quadratic.

    Its adaptive state (second moments, step counters) is frozen: then a step is a linear map of the weights and
    buffers, and the edge is the least h at which its spectral radius exceeds 1 (`frozen_steps` has the map of each
    optimiser). For SGD with learning rate a, momentum b, dampening t and weight decay w

        h < 2 (1 + b) / (a (1 - t)) - w,    Nesterov:  h < 2 (1 + b) / (a (1 + 2 b)) - w

    (Cohen et al. 2021, Gradient descent on neural networks typically occurs at the edge of stability, Appendix B).

    Adaptive optimisers, and SGD whose groups have settings of their own, divide the gradient by a matrix P. While P
    changes slowly, the same holds for the measure `preconditioned_sharpness`, which contains P and all decay, at the
    largest learning rate a. For Adam with beta1 = b it is

        h < 2 (1 + b) / (a (1 - b)),    38 / a for b = 0.9

    (Cohen et al. 2022, Adaptive gradient methods at the edge of stability). For Muon without momentum it is 2 / a; with
    momentum it is not known.

    SAM with radius r on SGD with the edge E needs the norm of the gradient g, which is frozen, too. Its step follows
    the gradient at x + r g / ||g||, which is h (1 + r h / ||g||) x, so that

        h < (||g|| / 2r) (sqrt(1 + 4 r E / ||g||) - 1)

    (Long and Bartlett 2024, Sharpness-aware minimization and the edge of stability, for E = 2 / a).

    Where the step is not linear (Lion, Adafactor) or not known, the value is NaN and `note` says why. For all,
    `beside("critical_sharpness")` is 2 / a, above which the next step raises the loss.

    >>> w = [torch.nn.Parameter(torch.zeros(1))]
    >>> edge_of(torch.optim.SGD(w, lr=0.05)).value, round(edge_of(torch.optim.Adam(w, lr=0.05)).value, 9)
    (40.0, 760.0)
    """
    if optimiser is None:
        return Edge()
    lr, base = leading_rate(optimiser), without_ascent(optimiser)
    if not 0 < lr < math.inf:
        return Edge(lr, note=f"the learning rate is {lr:g}")
    if base is not optimiser:
        edge = edge_of(base)
        radii = {(float(group.get("rho", math.nan)), bool(group.get("adaptive"))) for group in optimiser.param_groups}
        (rho, adaptive), *others = radii
        if edge.of != "sharpness" or not edge.value > 0:
            return Edge(lr, note=edge.note or "the edge of SAM over an optimiser with a preconditioner is unknown")
        if adaptive or others or not rho > 0:
            return Edge(lr, note="the edge of SAM is known for one radius above 0, and not for its adaptive form")
        if not gradient_norm > 0:
            return Edge(lr, note="the edge of SAM depends on the gradient: edge_of(optimiser, gradient_norm=...)")
        reach = gradient_norm / (2 * rho)
        return Edge(lr, reach * (math.sqrt(1 + 2 * edge.value / reach) - 1))
    if name_of(base) == "torch.Muon":
        if any(group["momentum"] for group in base.param_groups):
            return Edge(lr, note="the edge of Muon with momentum is not known")
        return Edge(lr, 2 / lr, "2/lr", "preconditioned_sharpness")
    try:
        plain = is_plain(base)
        step = leading_step(base, **({} if plain else {"weight_decay": 0.0}))
    except BadInput as error:
        return Edge(lr, note=str(error))
    value = step.edge
    if not value > 0:
        return Edge(lr, note="its steps grow at any curvature, or it makes none")
    if not plain:
        return Edge(lr, value, step.formula, "preconditioned_sharpness")
    value, formula = value - step.decay, f"{step.formula} - weight decay" if step.decay else step.formula
    return Edge(lr, value, formula, batches=value if step.formula == "2/lr" else math.nan)


def edge_of_batches(optimiser: torch.optim.Optimizer) -> tuple[float, float]:
    """Return the range in which the edge of `batch_sharpness` lies; NaN where none is known.

    For SGD it is 2 / lr without momentum; with momentum b between 2(1-b) / lr, for small batches, and 2(1+b) / lr, for
    large ones (Andreyev and Beneventano 2024). Weight decay, which the measured loss does not have, lowers both.
    """
    edge, group = edge_of(optimiser), optimiser.param_groups[0]
    if edge.batches == edge.batches:
        return edge.batches, edge.batches
    heavy_ball = type(optimiser) is torch.optim.SGD and not (group["nesterov"] or group["dampening"])
    if not heavy_ball or edge.of != "sharpness":
        return math.nan, math.nan
    return edge.value - 4 * float(group["momentum"]) / edge.lr, edge.value
