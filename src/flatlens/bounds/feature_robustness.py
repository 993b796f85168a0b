"""Petzka, Kamp et al.: relative flatness is, to leading order, how far moved features move the risk.

phi -> (I + delta A) phi at a layer is W -> W + delta W A (the key equation), so that a second order in the weight
speaks of features. Labels are kept, as the theorems suppose; where they may move by O(delta^3) for all A (Cor. 10), the
same holds with that in the rest.

The theorems end in "+ O(delta^3)". An inequality with an unknown constant cannot be checked, so the rest is observed:
the change of the risk is computed at delta, delta/2 and delta/4 along the same A, and the rest is the part that no
multiple of delta^2 explains. No curvature is used there, so that the two sides of a claim stay independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from flatlens.bounds.context import Assumption, Claim, Context
from flatlens.bounds.definition import bound
from flatlens.curvature import Hessian, eigenpairs
from flatlens.curvature.probes import student
from flatlens.grams import Weight, row_factor
from flatlens.grams.record import record
from flatlens.operations.graph import Graph, Node
from flatlens.operations.table import SOFTPLUS_TAIL, operation_of
from flatlens.perturbation.features import RotatedFeatures, unmovable

_COMPARISONS = frozenset({
    "gt", "ge", "lt", "le", "eq", "ne", "greater", "greater_equal", "less", "less_equal", "maximum", "minimum",
    "sign", "sgn", "signbit", "copysign", "heaviside", "floor", "ceil", "round", "trunc", "searchsorted",
    "argmax", "argmin", "argsort", "sort", "topk", "max", "min", "median", "kthvalue", "bucketize",
})  # fmt: skip
"""Functions whose results are constant between jumps, or that choose entries by their size."""
_HIDING = frozenset({"detach", "item", "tolist", "__float__", "__int__", "__bool__", "int", "long", "bool"})
"""Ways to values without a gradient: a comparison of these is not seen. `float()` of a tensor keeps its gradient."""


class _Compared(TorchFunctionMode):
    """Keeps which tensors with a gradient were compared, and by what; and which were read without their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, Any]] = []
        self.hidden: list[tuple[str, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = getattr(func, "__name__", "")
        name = called.strip("_")
        if name in _COMPARISONS or called in _HIDING:
            given = (part for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor))
            kept = self.found if name in _COMPARISONS else self.hidden
            kept += [(name, part.grad_fn) for part in given if part.grad_fn is not None]
        return func(*args, **(kwargs or {}))


def smooth(context: Context, layer: str) -> Assumption:
    """Return the assumption that no operation between the layer's output and the loss has a kink.

    The operations are read from autograd's graph of one probe. Those below the layer do not matter, because its
    features stay fixed. ELU counts as a kink, because its second derivative jumps; so does every operation on a part
    that was changed in place, and a comparison of what depends on the layer (a mask `z > 0`, an argmax). An operation
    that may have a kink (a norm, a square root, a user's own `torch.autograd.Function`) leaves the assumption open, as
    does one that hides values from autograd (`detach()`): the user may declare it.
    """
    # The graph of one probe, and its nodes between the layer's outputs and the loss
    problem, model = context.lens.problem, context.lens.model
    with problem.measuring(model), torch.enable_grad(), record(model) as tape, _Compared() as compared:
        f, y = problem.run(model, problem.place(problem.probes[0]))
        risk = problem.loss.values(f.to(torch.float64), y).sum()
    ends = [call.z.grad_fn for key, call in tape.linear.items() if key in context.layers[layer].calls]
    graph, above, waiting = Graph(risk), set[Node](), [end for end in ends if end is not None]
    while waiting:
        more = {reader for reader, _ in graph.readers[waiting.pop()]} - above
        above |= more
        waiting += more
    nodes, of_layer = [node for node in graph.nodes if node in above], above.union(ends)
    # Kinks: of operations (torch.where has none where its condition is fixed), and of comparisons
    names = [node.name() for node in nodes if node.name() != "WhereBackward0"]
    kinks = (name for name in names if getattr(operation_of(name), "kinks", False))
    masks = (f"{name}Backward" for name, node in compared.found if _leads_to(node, of_layer))
    if bent := next(chain(kinks, masks), ""):
        return Assumption("smooth", False, f"{_called(bent)} acts above {layer}")
    # What may have one
    hidden = (f"{name}Backward" for name, node in compared.hidden if _leads_to(node, of_layer))
    unproved = next(chain((node.name() for node in nodes if not _without_kinks(node)), hidden), "")
    if not unproved or "smooth" in context.declared:
        return context.declare("smooth") if unproved else Assumption("smooth", True)
    return Assumption("smooth", None, f"{_called(unproved)} acts above {layer}, and may have a kink")


def _leads_to(node: Any, wanted: set[Any]) -> bool:
    # Whether a node is made from one of the wanted; it need not lead to the loss
    waiting, seen = {node}, set[Any]()
    while waiting and not waiting & wanted:
        seen |= waiting
        waiting = {below for one in waiting for below, _ in one.next_functions if below is not None} - seen
    return bool(waiting)


def _without_kinks(node: Any) -> bool:
    # Whether a node of no known kink has none where it is defined
    name = node.name()
    if name == "WhereBackward0":
        return False  # its condition may come from values by a way that is not recorded
    if name == "PowBackward0":
        return float(node._saved_exponent).is_integer()  # sqrt(z^2) is |z|
    if name == "SoftplusBackward0":
        return float(node._saved_threshold) >= SOFTPLUS_TAIL  # below it, the jump is more than rounding
    return operation_of(name) is not None


def _called(name: str) -> str:
    """Return a node's name as users know the operation.

    >>> _called("ReluBackward0"), _called("torch::autograd::CopySlices"), _called("PreluKernelBackward0")
    ('relu', 'copyslices', 'prelu')
    """
    return name.rpartition("::")[2].partition("Backward")[0].removesuffix("Kernel").lower()


_STEPS = (1.0, 0.5, 0.25, 1 / 32)  #: multiples of delta; the last one shows whether the series differs nearer to 0
AT_ZERO = (1 / 45, -20 / 45, 64 / 45, 0.0)  #: weights of the four steps that give a from a + c delta^2 + e delta^4
RESOLVED = 0.01  #: largest accepted relative error of the leading coefficient
PAIRS = 512  #: largest number of pairs A and -A of a balanced set; if more are needed, rotations are random
_DRAWS = 32  #: number of random rotations
WATCHED, RUNGS = 4, 12  #: number of matrices A, and of values of delta, from which orders are found
SETTLED = 0.05  #: largest change of an order from one delta to the next


@dataclass(frozen=True, eq=False)
class Expansion:
    """A series M(delta) = a delta^2 + c delta^4 + ..., where M is the mean of the changes along A and -A."""

    delta: float  #: the largest step
    quotients: Tensor  #: M / delta^2 at the steps for each A, (4, draws)
    floor: float  #: rounding error of the third quotient
    exact: bool  #: true if the mean of a quadratic form over the draws equals its mean over all rotations
    apart: float = 0.0  #: difference between a and its value from a series nearer to 0, less rounding

    @property
    def mean(self) -> Tensor:
        """Return the mean over A, (4,)."""
        return self.quotients.mean(1)

    @property
    def change(self) -> float:
        """Return M(delta)."""
        return self.delta**2 * float(self.mean[0])

    @property
    def leading(self) -> float:
        """Return a, extrapolated from the first three quotients: its error is of order delta^6."""
        return float(self.mean @ torch.tensor(AT_ZERO, dtype=torch.float64))

    @property
    def rest(self) -> float:
        """Return M(delta) - a delta^2."""
        return self.change - self.delta**2 * self.leading

    @property
    def error(self) -> float:
        """Return the relative error of a: the largest of three differences, plus rounding.

        The differences are: a from three steps against a from two; a against the quotient nearest to 0; `apart`.
        """
        two = float(4 * self.mean[2] - self.mean[1]) / 3
        if not bool(self.quotients.any()):  # nothing changes, for any A
            return 0.0
        rests = 2 * _STEPS[3] ** 2 * float((self.mean[0] - self.leading).abs())
        far = max(0.0, abs(self.leading - float(self.mean[3])) - rests - self.floor * (_STEPS[2] / _STEPS[3]) ** 2)
        off = max(abs(self.leading - two), far, self.apart) + self.floor
        return off / abs(self.leading) if self.leading else math.inf

    @property
    def stderr(self) -> float:
        """Return the standard error of the leading term of M(delta): 0 if the draws are balanced."""
        if self.exact:
            return 0.0
        return self.delta**2 * float(student(torch.tensor(AT_ZERO, dtype=torch.float64) @ self.quotients)[1])

    @property
    def resolved(self) -> Assumption:
        """Return the assumption that the steps are small enough for the series, and large enough for the arithmetic."""
        why = f"at delta = {self.delta:.3g} the leading term is known to {self.error:.1g} of its size"
        return Assumption("resolved_expansion", self.error <= RESOLVED, why)


def series(context: Context, features: RotatedFeatures, moves: Tensor, delta: float, exact: bool) -> Expansion:
    """Return the series for the given moves W A, (draws, g, d, m); each move is taken with both signs."""
    quotients = torch.empty(len(_STEPS), len(moves), dtype=torch.float64)
    for number, move in enumerate(moves):
        for k, step in enumerate(_STEPS):
            there = step * delta * move
            quotients[k, number] = (features.change(there) + features.change(-there)) / (2 * (step * delta) ** 2)
        if context.progress is not None:
            context.progress("moved features", number + 1, len(moves))
    floor = rounding_of(context, features, delta**2 * float(quotients[0].abs().max())) / (_STEPS[2] * delta) ** 2
    return Expansion(delta, quotients, floor, exact)


def looked_at_twice(context: Context, features: RotatedFeatures, moves: Tensor, found: Expansion) -> Expansion:
    """Return the series with its difference from a second series that starts four times nearer to 0."""
    nearer = series(context, features, moves, found.delta / 4, found.exact)
    return replace(found, apart=max(0.0, abs(found.leading - nearer.leading) - 3 * nearer.floor))


def rounding_of(context: Context, features: RotatedFeatures, change: float) -> float:
    """Return the rounding error of a change of the risk."""
    return 8 * torch.finfo(context.lens.problem.dtype).eps * (abs(features.risk) + abs(change))


def first_step(context: Context) -> float:
    """Return the first delta to try; in low precision it cannot be small."""
    return 0.1 if context.lens.problem.dtype == torch.float64 else 0.3


def averaged(context: Context, features: RotatedFeatures) -> Expansion:
    """Return the mean series over rotations drawn from Haar's law.

    Delta is divided by 4, at most three times, until the error of the leading coefficient is small.
    """
    moves = features.balanced(PAIRS, context.generator)
    exact = moves is not None
    if moves is None:
        moves = torch.stack([features.draw(1.0, "rotations", 1.0, context.generator) for _ in range(_DRAWS)])
    found: list[Expansion] = []
    for smaller in (1, 4, 16, 64):
        along = series(context, features, moves, first_step(context) / smaller, exact)
        found.append(looked_at_twice(context, features, moves, along))
        if found[-1].error <= RESOLVED / 100:
            break
    return min(found, key=lambda one: one.error)


@dataclass(frozen=True)
class Order:
    """The observed order p of a remainder that falls like delta^p."""

    value: float  #: infinite if there is no remainder beyond rounding
    settled: Assumption


def orders(context: Context, features: RotatedFeatures) -> tuple[Order, Order]:
    """Return the orders of two remainders of E_F(delta A), from a few random A.

    The first is of the mean over A and -A, without its second-order term; the second of A alone, without its terms of
    first and second order.
    """
    moves = [features.draw(1.0, "rotations", 1.0, context.generator) for _ in range(WATCHED)]
    _, G = features.slope(torch.zeros_like(features.W))
    deltas = first_step(context) * 0.5 ** torch.arange(RUNGS, dtype=torch.float64)
    even, single = torch.empty(2, RUNGS, WATCHED, dtype=torch.float64)
    for number, move in enumerate(moves):
        slope = float((G * move).sum())
        for k, delta in enumerate(deltas.tolist()):
            ahead, back = features.change(delta * move), features.change(-delta * move)
            even[k, number], single[k, number] = (ahead + back) / 2, ahead - delta * slope
    floors = rounding_of(context, features, 0.0) / deltas.square()
    return order_of(even / deltas[:, None].square(), floors), order_of(single / deltas[:, None].square(), floors)


def order_of(quotients: Tensor, floors: Tensor) -> Order:
    """Return the order of a remainder from `quotients`, remainder / delta^2 plus a constant, (deltas, draws).

    Each delta is half of the one before. Differences between successive ones do not contain the constant; they are
    taken as root mean squares over A. The order is read at the smallest delta at which `floors`, rounding, is little.

    >>> rungs = 0.5 ** torch.arange(6, dtype=torch.float64)
    >>> order_of(1 + rungs[:, None] ** 2, torch.zeros(6)).value
    4.0
    """
    differences = (quotients[1:] - quotients[:-1]).square().mean(1).sqrt()
    size = quotients.abs().amax(1)[1:]
    above = differences > 100 * (floors[1:] + torch.finfo(quotients.dtype).eps * size)
    count = len(above) if bool(above.all()) else int((~above).int().argmax())
    hidden = bool(100 * floors[1] > 1e-6 * size[0]) and bool(size.any())
    if count < 3:  # nothing above rounding, or too little to read an order
        shown = Assumption("settled_order", count == 0 and not hidden, "rounding hides the rest")
        return Order(math.nan if count else math.inf, shown)
    seen = 2 + (differences[: count - 1] / differences[1:count]).log2()
    moved = abs(float(seen[-1] - seen[-2]))
    why = f"the order still changes by {moved:.2g} from delta to delta/2"
    return Order(float(seen[-1]), Assumption("settled_order", moved <= SETTLED, why))


HAAR_ORDER = 3.5  #: smallest accepted order; the theory gives 4
FIXED_ORDER = 2.8  #: smallest accepted order; the theory gives 3
RESTARTS, CLIMBS = 3, 200  #: restarts and steps of the search for the worst A
SMALLEST = 0.002  #: delta of that search


def mean_term(kappa: float, delta: float, m: int) -> float:
    """Return Theorem 5's term: delta^2 kappa_Tr / (2 m)."""
    return delta**2 * kappa / (2 * m)


def uniform_term(kappa: float, delta: float, d: int) -> float:
    """Return Theorem 14's term: delta^2 d kappa^phi / 2."""
    return delta**2 * d * kappa / 2


def spectral_term(norm2: float, top: float, delta: float) -> float:
    """Return the term of reparam2019 C.1: delta^2 ||W||_F^2 lmax(H) / 2."""
    return delta**2 * norm2 * top / 2


@bound(id="B12", symbol=r"E_A[\mathcal{E}_F(f, S, \delta A)] \leq \frac{\delta^2}{2m} \kappa_{Tr} + O(\delta^3)",
       source="relative2021 Thm 5, Cor. 10",
       cost="6 forward passes per rotation, about 2 m N rotations per layer; relative flatness",
       on_request=True)  # fmt: skip
def feature_robustness_bound(context: Context) -> Iterator[Claim]:
    r"""Relative flatness bounds the mean change under rotated features: delta^2/(2m) kappa_Tr + O(delta^4).

    The left side is |mean of E_F(delta A)| over A of Haar's law, drawn in pairs A and -A such that a quadratic form is
    averaged exactly. The right side is the theorem's term plus the observed rest: the part of the change at delta,
    delta/2 and delta/4, with the same A, that is not a multiple of delta^2, with the opposite sign where the change is
    negative. So the claim compares the extrapolated leading terms, and the note gives the share of the rest. The pairs
    leave no odd order: the rest is O(delta^4), and no minimum is needed. If a layer is too wide for balanced draws,
    there is a standard error, which is doubled: both sides have the same leading term, and within 4 standard errors
    nothing is decided.

    `.order` claims that the observed order of the rest is at least 3.5 (the theory gives 4). `.fixed_order` claims at
    least 2.8 (the theory gives 3) for A of one sign, after its first-order term is removed. |E| <= eps needs kappa >=
    0.
    """
    for layer, weight in context.layers.items():
        if why := unmovable(weight):
            yield Claim(math.nan, math.nan, layer, assumptions=(Assumption("movable_features", False, why),))
            continue
        features = RotatedFeatures(context.lens.problem, context.lens.model, weight)
        # The theorem with the observed rest
        found, smoothly = averaged(context, features), smooth(context, layer)
        kappa = context.measured("relative_flatness", layer).value
        sign = Assumption("nonnegative_flatness", kappa >= 0, f"kappa_Tr is {kappa:.3g}")
        right = mean_term(kappa, found.delta, features.m) + math.copysign(1.0, found.change) * found.rest
        share = f"{abs(found.rest / found.change):.2g} of it" if found.change else ""
        beyond = f"{share} beyond the leading term" if share else "nothing moves"
        yield Claim(
            abs(found.change), right, layer, "", (smoothly, sign, found.resolved), 2 * found.stderr,
            rounding=_rounding(found), note=f"delta = {found.delta:.3g}, labels kept; {beyond}",
        )  # fmt: skip
        # The orders of the rests
        paired, single = orders(context, features)
        for part, least, order in (("order", HAAR_ORDER, paired), ("fixed_order", FIXED_ORDER, single)):
            note = "no rest beyond rounding" if math.isinf(order.value) else ""
            yield Claim(least, order.value, layer, part, (smoothly, order.settled), note=note)


def _rounding(found: Expansion) -> float:
    return max(1e-6, 2 * found.error)


@dataclass(frozen=True, eq=False)
class Worst:
    """The worst A found at a layer, with the sides of Theorem 14 and C.1."""

    change: float  #: E_F(delta A)
    gradient: float  #: delta ||W^T G||_*, the largest first-order term: 0 at a minimum
    rest: float  #: the change without its first and second order, along this A
    uniform: float  #: delta^2 d kappa^phi / 2
    spectral: float  #: delta^2 ||W||_F^2 lmax(H) / 2
    dip: float  #: the part of a negative smallest eigenvalue in the uniform term
    expansion: Expansion
    assumptions: tuple[Assumption, ...]  #: those of both theorems
    semidefinite: Assumption

    @property
    def note(self) -> str:
        """Return delta and the term that is not the theorem's own, in words."""
        beyond = f"{(self.gradient + self.dip + self.rest) / self.uniform:.2g}" if self.uniform else "all"
        return f"delta = {self.expansion.delta:.3g}, labels kept; slope and rest are {beyond} of the term"


@bound(id="B13",
       symbol=r"\max_{\|A\| \leq 1} \mathcal{E}_F(f, S, \delta A) \leq \frac{\delta^2 d}{2} \kappa^\phi + O(\delta^3)",
       source="relative2021 Thm 14; reparam2019 C.1", cost="a search of about 100 gradients per layer; Lanczos",
       on_request=True)  # fmt: skip
def uniform_robustness_bound(context: Context) -> Iterator[Claim]:
    r"""Maximal relative flatness bounds the worst change under moved features: delta^2 d/2 kappa^phi + O(delta^3).

    The left side is the largest E_F(delta A) with ||A|| <= 1 that a search finds: a lower bound of the largest, which
    is sound on this side. d is the number of rows. The right side is the theorem's term plus the terms that O(delta^3)
    stands for: the observed rest of the change along that A; delta ||W^T G||_*, the largest contribution of the
    gradient G, which is 0 at a minimum; and (d - 1) eps delta^2/2 ||W||_F^2 if the layer's Hessian is only known to be
    >= -eps. `.spectral` is the form of 2019, delta^2/2 ||W||_F^2 lmax(H). It needs no positive semidefinite H, and may
    be smaller or larger than the other.
    """
    for layer, weight in context.layers.items():
        if why := unmovable(weight):
            yield Claim(math.nan, math.nan, layer, assumptions=(Assumption("movable_features", False, why),))
            continue
        found = worst_of(context, layer, weight)
        beyond, error = found.gradient + found.rest, _rounding(found.expansion)
        premises = (*found.assumptions, found.semidefinite)
        right = found.uniform + found.dip + beyond
        yield Claim(found.change, right, layer, "", premises, rounding=error, note=found.note)
        yield Claim(found.change, found.spectral + beyond, layer, "spectral", found.assumptions, rounding=error)


def worst_of(context: Context, layer: str, weight: Weight) -> Worst:
    """Return the worst A found at a layer, with the terms of its change."""
    assert weight.parameter is not None
    features = RotatedFeatures(context.lens.problem, context.lens.model, weight)
    operator = Hessian(context.lens.problem, [weight.parameter], model=context.lens.model)
    pairs = eigenpairs(operator, top_k=1, bottom_k=1, rtol=1e-6, generator=context.generator)
    # W A of the worst A and the series along it, at a delta small enough for its series
    steepest = pairs.vectors[0].to("cpu", torch.float64).reshape(features.W.shape)
    smaller, best = first_step(context) / 2, None
    while best is None or (best[1].error > RESOLVED / 10 and smaller > SMALLEST):
        A = _search(context, features, steepest, smaller)
        found = looked_at_twice(context, features, A[None], series(context, features, A[None], smaller, exact=True))
        best = (A, found) if best is None or found.error < best[1].error else best
        smaller /= 2
    A, expansion = best
    # The terms of its change
    delta, value = expansion.delta, features.change(expansion.delta * A)
    G = features.slope(torch.zeros_like(A))[1]
    top = float(pairs.values[0] + pairs.residuals[0])
    eps = max(0.0, float(pairs.residuals[-1] - pairs.values[-1]))
    g, d, _ = features.W.shape
    norm2, kappa = float(features.W.square().sum()), context.measured("maximal_relative_flatness", layer)
    missed = 1.0 if kappa.kind == "exact" else 1.001  # the tolerance of kappa
    low = float(pairs.values[-1])
    indefinite = f"a Ritz value of the Hessian of {layer} is {low:.2g}, the largest {top:.2g}"
    return Worst(
        change=value,
        # ||W^T G||_*, the largest <W A, G> over ||A|| <= 1; summed over groups
        gradient=delta * float(torch.linalg.svdvals(row_factor(features.W) @ row_factor(G).mT).sum()),
        rest=value - delta * float((G * A).sum()) - delta**2 * expansion.leading,
        uniform=uniform_term(kappa.value * missed, delta, g * d),
        spectral=spectral_term(norm2, max(0.0, top), delta),
        dip=spectral_term(norm2, eps, delta) * (g * d - 1),
        expansion=expansion,
        assumptions=(smooth(context, layer), context.local_minimum, expansion.resolved),
        semidefinite=Assumption("positive_semidefinite", low >= -1e-3 * max(top, 0.0), indefinite),
    )


def _search(context: Context, features: RotatedFeatures, top: Tensor, delta: float) -> Tensor:
    """W A of the worst A found; searches start along the top eigenvector in both directions, and at random."""
    ahead = features.steepest(top)
    drawn = [features.draw(1.0, "rotations", 1.0, context.generator) for _ in range(RESTARTS - 1)]
    best, where = -math.inf, ahead
    for start in (ahead, -ahead, *drawn):
        A, highest, stalled = start, -math.inf, 0
        for _ in range(CLIMBS):
            value, G = features.slope(delta * A)
            stalled = stalled + 1 if value <= highest * (1 + 1e-9) else 0
            if value > best:
                best, where = value, A
            highest = max(highest, value)
            if stalled == 3:
                break
            A = features.steepest(G)
    return where
