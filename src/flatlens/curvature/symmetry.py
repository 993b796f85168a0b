"""A check that second derivatives by double backward are right.

A Hessian is symmetric, and J^T is the adjoint of J. Autograd's products are so if it can differentiate the backward of
every operation. Fused kernels and a user's own functions may not allow this. The check: with random u, v and w,

    <u, H v> = <v, H u>        <w, J v> = <J^T w, v>

to a relative error of sqrt(eps). It runs on each graph that holds an operation that no earlier graph of the same matrix
and problem held. The first graph is of a few samples, so a check takes two products on these; later checks are due to
rare branches alone. A matrix with relative asymmetry a passes with a probability of about sqrt(eps) / a. A symmetric
error passes, such as a wrong second derivative of an activation. Torch's own operations are trusted in this. Others
(torch.autograd.Function outside torch.distributed, extensions) are not: every graph that holds one is examined in
float64, and its products are also compared with central differences of the gradient. These find every error above 1e-4,
unless a kink lies between the two points.

Products in reduced precision are not checked.

The backward of torch's logcumsumexp takes the logarithm of its slope, and what depends on a slope of exactly 0 is lost:
of a network that ends in it and meets its targets, all of the Hessian. A graph that loses so is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from flatlens.curvature.krylov import VectorProduct
from flatlens.curvature.space import dot
from flatlens.errors import NotDifferentiable, out_of_memory
from flatlens.grams.autograd import Runner, places_of
from flatlens.operations.graph import Place, sources_of, walk
from flatlens.problem import Batch, Problem
from flatlens.problem.batches import move
from flatlens.problem.eval_context import copy_of, device_of, differentiable

STEP = 1e-5  #: step of central differences, relative to the root mean square of the tensor moved
PERIOD = 65_537  #: number of random entries of a tensor after which they repeat
_BETWEEN_PROCESSES = ("torch.distributed.", "torch._functional_collectives")
WRONG = 1e-4  #: relative error, in float64, that neither rounding nor third derivatives explain
_ROUNDINGS = 64  #: the same where a network rounds inside, in halves of its unit in the last place
_LOSING = "LogcumsumexpBackward0"  #: autograd's node that has no second derivative at slopes of exactly 0

_Gradients: TypeAlias = list[Tensor | None]
"""A gradient with its graph: one tensor for each tensor differentiated to, or None where nothing depends on it."""


@final
class SymmetryCheck:
    """A check of operations that are new in what is differentiated (`of`); it refuses wrong second derivatives."""

    def __init__(self, problem: Problem, model: nn.Module, of: Hashable = None) -> None:
        self._problem, self._model = problem, model
        self._facts = {} if of is None else problem.facts
        self._key = "operations checked", of, problem.ghost_batch, problem.precision
        self.products = 0  #: products taken by the checks, each on the samples of one graph

    def require_symmetric(self, batch: Batch, of: Tensor, rows: _Gradients, at: Sequence[Place]) -> None:
        """Refuse a network where H = d rows / d at is not symmetric; `rows` is the gradient of `of` in `at`."""
        _require_kept(of, at)
        self._require(batch, [of, *rows], lambda: asymmetry(rows, at))

    def require_adjoint(
        self, batch: Batch, of: Tensor, like: list[Tensor], jacobian: tuple[VectorProduct, VectorProduct]
    ) -> None:
        """Refuse where w -> J^T w and v -> J v, of `jacobian`, are not adjoint; w and v have the shapes of `like`."""

        def error_of() -> float:
            w, v = random_like(like)
            JTw, Jv = jacobian[0](w), jacobian[1](v)
            return _relative(dot([w], [Jv]) - dot([v], [JTw]), [Jv], [JTw])

        _require_kept(of.sum(), like[:1])
        self._require(batch, [of], error_of)

    def _require(self, batch: Batch, graph: _Gradients, error_of: Callable[[], float]) -> None:
        kinds, foreign = operations(graph)
        eps = torch.finfo(self._problem.dtype).eps
        known: frozenset[str] = self._facts.get(self._key, frozenset())
        rounds = self._problem.nudge is not None
        if (kinds <= known and (not foreign or rounds)) or self._problem.precision > eps:
            return
        self.products += 2
        found = error_of()
        if found > eps**0.5 or foreign:
            with saved_tensors_hooks(lambda t: t.detach(), lambda t: t):  # the counting of saved bytes leaves this out
                self._examine(batch, found, foreign)
        self._facts[self._key] = known | kinds

    def _examine(self, batch: Batch, found: float, foreign: list[str]) -> None:
        """Refuse the network if it is wrong in float64, too; the error names the module."""
        problem, wrong = self._problem, WRONG
        if problem.nudge is not None:  # short differences of a network that rounds inside are 0, or jumps
            wrong = max(WRONG, _ROUNDINGS * problem.nudge[1])
        self.products += 4
        try:
            twin = self._model
            if any(p.dtype != torch.float64 for p in _floating(twin.parameters())):
                twin = copy_of(twin, "the check of second derivatives").double()
            batch = move(batch, device_of(twin), torch.float64)
            with problem.measuring(twin), differentiable(twin.parameters()):
                runner, names = Runner(problem, twin), [n for n, p in twin.named_parameters() if p.is_floating_point()]

                def risk(at: list[Tensor]) -> Tensor:
                    f, y = runner.at(dict(zip(names, at, strict=True)), batch)
                    return problem.loss.total(f, y)

                at = _floating(twin.parameters())
                # the gradient of a random combination of the outputs: about as long as their Jacobian
                f, _ = problem.run(twin, batch)
                rows = list(torch.autograd.grad((random_like([f])[0] * f).sum(), at, allow_unused=True))
                found = faults(risk, at, _length(_dense(rows, at)), differences=bool(foreign) and wrong == WRONG)
                suspect = _suspect(problem, twin, batch) if found > wrong else ""
        except RuntimeError as error:  # no copy, or no float64: judge by the first error found
            if out_of_memory(error):
                raise
            found, suspect = (found if found > torch.finfo(problem.dtype).eps ** 0.25 else 0.0), "the network"
        if found > wrong:
            own = f", which runs {', '.join(foreign)}," if foreign else ""
            raise NotDifferentiable(
                f"second derivatives of {suspect}{own} are wrong by {found:.1g} of their size: its backward (a fused "
                "kernel or a torch.autograd.Function) cannot be differentiated. Write it with plain torch "
                "operations, or mark its backward once_differentiable: curvature is then undefined",
                argument="model",
            )


def operations(graph: _Gradients) -> tuple[frozenset[str], list[str]]:
    """Return (the names of all operations in the graphs of some tensors, the names of those not torch's own)."""
    kinds, foreign = set[str](), set[str]()
    for node in _nodes(graph):
        name = node.name()
        kinds.add(name)
        module = str(getattr(type(node), "_forward_cls", type(node)).__module__)
        if (isinstance(node, BackwardCFunction) and not module.startswith(_BETWEEN_PROCESSES)) or "CppNode" in name:
            foreign.add(name)
    return frozenset(kinds), sorted(foreign)


def _nodes(graph: _Gradients) -> Iterator[Any]:
    return walk([t.grad_fn for t in graph if t is not None and t.grad_fn is not None], sources_of)


def _require_kept(of: Tensor, at: Sequence[Place]) -> None:
    """Refuse a scalar whose second derivative in `at` goes through slopes of `_LOSING` that are exactly 0."""
    # a slope that is 0 wherever the weights are, as below a ReLU that is off, has nothing to lose
    losing, met = [node for node in _nodes([of]) if node.name() == _LOSING], list[Tensor]()
    # the slopes in the outputs of these nodes, each with its graph; of those above `at` alone
    with ExitStack() as hooks:
        for node in losing:
            hooks.callback(node.register_prehook(lambda slopes: met.append(slopes[0])).remove)
        if losing:
            torch.autograd.grad(of, at, create_graph=True, allow_unused=True)
    slopes = [slope for slope in met if slope.requires_grad]
    if not slopes:
        return

    def along(r: list[Tensor]) -> float:
        rows = torch.autograd.grad(slopes, at, r, retain_graph=True, allow_unused=True)
        return _length([row for row in rows if row is not None])

    r = random_like(slopes)
    whole, lost = along(r), along([torch.where(slope == 0, one, 0) for slope, one in zip(slopes, r, strict=True)])
    if not lost <= WRONG * whole:  # NaN below a further logcumsumexp
        raise NotDifferentiable(
            "torch's logcumsumexp has no second derivative at slopes of 0, as at targets met exactly: write it by "
            "cumsum()"
        )


def asymmetry(rows: _Gradients, at: Sequence[Place], least: float = 0.0) -> float:
    """Return |<u, H v> - <v, H u>| / (||H u|| + ||H v|| + least) for H = d rows / d at and random u, v."""
    live = [(g, place) for g, place in zip(rows, at, strict=True) if g is not None]
    found, there = [g for g, _ in live], [place for _, place in live]
    u, v = random_like(found), random_like(found, seed=1)
    Hu, Hv = (_dense(derivative_along(found, there, w), w) for w in (u, v))
    return _relative(dot(u, Hv) - dot(v, Hu), Hu, Hv, least)


def faults(
    value: Callable[[list[Tensor]], Tensor], at: list[Tensor], response: float = 0.0, *, differences: bool = True
) -> float:
    """Return the relative error of a scalar's derivatives at some tensors, the largest of three.

    `response`: the size of the derivative of the outputs, of which the scalar is a function with curvature of order 1.
    Derivatives below 1e-10 of what follows from it are rounding: a sample that is classified beyond doubt has slopes
    p - 1 of 1e-40, and an asymmetry of that size. Without `differences` the third is left out: torch's own operations
    are trusted in it, and a network may cut its gradients on purpose (detach(), a `padding_idx`).
    """
    here = [p.detach() for p in at]
    along = [v * (float(p.square().mean().sqrt()) or 1.0) for v, p in zip(random_like(here), here, strict=True)]

    def gradient(point: list[Tensor], twice: bool = True) -> tuple[list[Tensor], _Gradients]:
        leaves = [p.detach().requires_grad_() for p in point]
        of = value(leaves)
        if not of.requires_grad:
            return leaves, [None] * len(leaves)
        return leaves, list(torch.autograd.grad(of, leaves, create_graph=twice, allow_unused=True))

    def central(step: float) -> list[Tensor]:
        ends = ([p + sign * step * v for p, v in zip(here, along, strict=True)] for sign in (1, -1))
        ahead, behind = (_dense(gradient(end)[1], end) for end in ends)
        return [(plus - minus) / (2 * step) for plus, minus in zip(ahead, behind, strict=True)]

    # the gradient with a graph must be the one without
    leaves, rows = gradient(here)
    once, slope = _dense(gradient(here, False)[1], here), _dense(rows, here)
    first = _relative(_length(_minus(once, slope)), once, slope, 1e-10 * response)
    # the second derivative must be symmetric
    least = 1e-6 * _length(slope) + 1e-10 * response**2  # a second derivative of 0 is 0 up to rounding
    first = max(first, asymmetry(rows, leaves, least))
    if not differences:
        return first
    # and it must be the limit of central differences, where these converge
    product = _dense(derivative_along(rows, leaves, along), along)
    wide, near = central(4 * STEP), central(STEP)
    rounding = torch.finfo(torch.float64).eps / STEP * (100 * _length(slope) + response)  # p - 1 is off by eps
    unsettled = _length(_minus(wide, near)) + rounding
    off = _length(_minus(near, product))
    return max(first, _relative(off, near, product, least) if off > 3 * unsettled else 0.0)


def _suspect(problem: Problem, twin: nn.Module, batch: Batch) -> str:
    """Return the innermost module whose own derivatives are wrong, in words."""
    calls: dict[str, Any] = {}

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def keep(_: nn.Module, args: Any, kwargs: Any) -> None:
            calls.setdefault(name, tree_map_only(Tensor, lambda leaf: leaf.detach().clone(), (args, kwargs)))

        return keep

    with ExitStack() as hooks:
        for name, module in twin.named_modules():
            hooks.callback(module.register_forward_pre_hook(watch(name), with_kwargs=True).remove)
        problem.run(twin, batch)
    for name, module in reversed(list(twin.named_modules())):  # reversed: submodules come before their module
        if name in calls and _faults_alone(module, *calls[name]) > WRONG:
            return f"{name!r} ({type(module).__name__})" if name else f"the network itself ({type(module).__name__})"
    return "the loss"


def _faults_alone(module: nn.Module, args: Any, kwargs: Any) -> float:
    """Return the `faults` of a scalar function of one module's outputs, in its floating inputs and parameters."""
    leaves, form = tree_flatten((args, kwargs))
    moved = [number for number, leaf in enumerate(leaves) if _floating([leaf])]
    named = {name: p for name, p in module.named_parameters() if p.is_floating_point()}

    def value(at: list[Tensor]) -> Tensor:
        given = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for number, leaf in zip(moved, at, strict=False):
            given[number] = leaf.clone()
        own_args, own_kwargs = tree_unflatten(given, form)
        weights = places_of(module, dict(zip(named, at[len(moved) :], strict=True)))
        outputs = _floating(tree_leaves(functional_call(module, weights, own_args, own_kwargs, tie_weights=False)))
        linear = random_like(outputs, seed=2)
        return torch.stack([(r * z + z.square() / 2).sum() for z, r in zip(outputs, linear, strict=True)]).sum()

    try:
        return faults(value, [*(leaves[number] for number in moved), *named.values()])
    except Exception:  # a module that cannot run alone is not named
        return 0.0


def _floating(leaves: Iterable[Any]) -> list[Tensor]:
    return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]


def derivative_along(
    rows: Sequence[Tensor | None], at: Sequence[Place], v: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Return d<rows, v>/d at, whose graph is kept; None where nothing depends on a place."""
    live = [(g, along) for g, along in zip(rows, v, strict=True) if g is not None and g.requires_grad]
    if not live:
        return [None] * len(at)
    of, along = zip(*live, strict=True)
    return torch.autograd.grad(of, at, along, retain_graph=True, allow_unused=True)


def _dense(rows: Sequence[Tensor | None], like: list[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(p) if g is None else g.detach() for g, p in zip(rows, like, strict=True)]


def random_like(tensors: Iterable[Tensor], seed: int = 0) -> list[Tensor]:
    """Return standard normal tensors of the same shapes, the same for equal seeds; entries repeat after PERIOD."""
    generator, found = torch.Generator().manual_seed(seed), []
    for t in tensors:
        dtype = torch.float64 if t.dtype == torch.float64 else torch.float32
        drawn = torch.randn(min(t.numel(), PERIOD), generator=generator, dtype=dtype).to(t)
        found.append(drawn.repeat(-(-t.numel() // PERIOD))[: t.numel()].reshape(t.shape))
    return found


def _length(a: list[Tensor]) -> float:
    return math.sqrt(dot(a, a))


def _minus(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
    return [x - y for x, y in zip(a, b, strict=True)]


def _relative(difference: float, a: list[Tensor], b: list[Tensor], least: float = 0.0) -> float:
    size = _length(a) + _length(b) + least
    return abs(difference) / size if size else 0.0
