"""The network at other weights, without changing it: its risk, its gradients, the steps that an optimiser would take.

`Elsewhere` takes weights as one vector and is differentiable in them; `Landscape` walks along directions, from
forwards and single backward passes alone; `Spread` tells how gradients of groups of samples vary; `ShardedHessian`
multiplies by the Hessian of a network whose parameters are spread over processes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor, nn

from flatlens.curvature.krylov import finite_gradient
from flatlens.curvature.operators import LARGEST_CHUNK, bytes_of_a_sample, bytes_saved, samples_at_once
from flatlens.curvature.optimiser_geometry import rate_of_a_step, without_ascent
from flatlens.curvature.space import as_one_vector, dot, inner, space_of, uphill
from flatlens.curvature.symmetry import operations
from flatlens.errors import BadInput, NotDifferentiable, one_line, out_of_memory
from flatlens.estimate import Progress
from flatlens.grams.autograd import Runner, require_second_derivative
from flatlens.grams.data_pass import random_signs
from flatlens.operations.table import operation_of
from flatlens.perturbation.autograd_check import coarsest_inside
from flatlens.problem import Batch, Problem
from flatlens.problem.batches import FORWARD_CHUNK, size, take
from flatlens.problem.eval_context import differentiable, moved_in_place
from flatlens.problem.forward import Outcomes, outcomes
from flatlens.problem.op_overrides import HALF
from flatlens.problem.ranks import in_one_piece, of_the_first, whole_parameters

_DRAWS = 4  #: draws of a rounding


def rounded(values: Tensor, generator: torch.Generator, eps: float) -> Tensor:
    """Return the values, each moved up or down by one rounding, `eps` times its own size."""
    return values + eps * values.abs() * random_signs(values.shape, values, generator)


@final
class Elsewhere:
    """The problem's network at other values of some named parameters (all measured ones if None).

    Values travel as one vector theta, (P,). Nothing is ever written to the network.

    >>> net = nn.Linear(2, 1, bias=False)
    >>> problem = Problem(net, "half_squared_error", (torch.tensor([[3.0, 4.0]]), torch.zeros(1, 1)))
    >>> Elsewhere(problem).outcomes(torch.tensor([1.0, 0.0])).risk
    4.5
    """

    def __init__(
        self, problem: Problem, parameters: str | Iterable[str] | None = None, *, model: nn.Module | None = None
    ) -> None:
        self.problem = problem
        self.model = problem.measured() if model is None else model
        self.space = space_of(problem, self.model, parameters)
        self.here = self.space.point()  #: the network's own values
        self._runner = Runner(problem, self.model)

    def run(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Any]:
        """Return (outputs, targets) of a placed batch at theta; differentiable in theta."""
        if theta.shape != self.here.shape:
            raise BadInput(f"theta: expected shape ({self.space.size},), got {tuple(theta.shape)}")
        return self._runner.at(self.space.named(theta.to(self.here)), batch)

    def outcomes(self, theta: Tensor) -> Outcomes:
        """Return losses and correctness of every sample of the data at theta."""
        problem = self.problem
        with problem.measuring(self.model):
            return outcomes(problem, problem.shared(FORWARD_CHUNK), lambda batch: self.run(theta, batch))

    def rounding(self, at: Tensor | None = None) -> float:
        """Return the risk's own rounding error: its change when parameters and outputs move by one rounding each.

        `at`: the parameters, (P,); None for the network's own. Where the risk is steep it is larger.

        Every number moves up or down. The outputs' own rounding counts where they are far from 0 whatever the weights
        are, such as by a constant that forward() adds.
        """
        at = self.here if at is None else at
        here, problem, risks = self.outcomes(at).risk, self.problem, []
        eps = torch.finfo(coarsest_inside(problem, self.model)).eps
        of_weights, of_outputs = (torch.Generator().manual_seed(seed) for seed in (0, 1))
        for _ in range(_DRAWS):
            theta = rounded(at, of_weights, eps)

            def run(batch: Batch, theta: Tensor = theta) -> tuple[Tensor, Any]:
                f, y = self.run(theta, batch)
                return rounded(f, of_outputs, eps), y

            with problem.measuring(self.model):
                risks.append(outcomes(problem, problem.shared(FORWARD_CHUNK), run).risk)
        return max(abs(risk - here) for risk in risks)

    def slope(self, theta: Tensor, batches: Iterable[Batch], mass: float) -> tuple[float, Tensor]:
        """Return (sum of losses / mass, its gradient (P,)) over some batches; only one chunk's graph is held."""
        risk, slope = 0.0, torch.zeros_like(theta)
        with self.problem.measuring(self.model):
            for raw in batches:
                at = theta.detach().clone().requires_grad_()
                f, y = self.run(at, self.problem.place(raw))
                part = self.problem.loss.total(f, y) / mass
                slope += sum(row for row in self.problem.derivative(part, [at]) if row is not None)
                risk += float(part.detach())
        return risk, slope

    def mass(self, group: Batch | None) -> float:
        """Return the mass in the risk of a group of samples, or of all the data."""
        if group is None:
            return self.problem.mass
        with self.problem.measuring(self.model), torch.no_grad():
            found = (self.problem.run(self.model, self.problem.place(raw)) for raw in self.chunks(group))
            return sum(float(self.problem.loss.mass(f, y).sum()) for f, y in found)

    def chunks(self, group: Batch | None = None) -> Iterator[Batch]:
        """Yield a group of samples, or all the data, in pieces whose graph fits in the problem's memory."""
        if group is None:
            yield from self.problem.batches(self.fitting)
        else:
            for start in range(0, size(group), self.fitting):
                yield take(group, start, min(start + self.fitting, size(group)))

    @cached_property
    def fitting(self) -> int:
        """Return how many samples' graphs fit in the problem's memory."""
        probe, at = self.problem.place(self.problem.probes[0]), self.here.clone().requires_grad_()
        with self.problem.measuring(self.model):
            each = bytes_saved(self.model, size(probe), lambda: self.run(at, probe))
        return samples_at_once(self.problem, each)


Direction = Mapping[str, Tensor]
_LINEAR = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "Muon")
"""Optimisers of torch whose step is proportional to the learning rate, whatever their state."""
_LONG = 2.0**40  #: a learning rate at which the weights are rounding beside the step; a power of 2 rounds nothing
_LOST = 1e-3  #: share of a step that the weights' own rounding may be


@final
class Landscape:
    """The network, moved along directions and put back; fast attention, except where a second derivative is taken."""

    def __init__(self, problem: Problem, *, model: nn.Module | None = None, few: Sequence[Batch] | None = None) -> None:
        self.problem = problem
        self.model = problem.measured() if model is None else model
        self.space = space_of(problem, self.model)
        self._runner = Runner(problem, self.model)
        self._moved: dict[str, Tensor] = {}  #: other values of some parameters, inside `walk`
        self.few = few  #: the batches that derivatives over spread parameters see; None: all the data
        self.forwards = 0  #: evaluations of the risk over all the data
        self.mass = 0.0  #: mass of the samples that were last differentiated
        self.coarsest = self.space.dtype  #: type of the parameters in the last second derivative: FSDP2 may narrow them

    def risk_and_gradient(self) -> tuple[float, dict[str, Tensor]]:
        """Return the risk, and its gradient in each measured parameter."""
        risk, gradient = self._summed()
        dtype = self.space.dtype
        return risk, finite_gradient({name: part.to(dtype) for name, part in gradient.items()}, dtype)

    def summed_gradient(self) -> Tensor:
        """Return the gradient of the risk, (P,) float64."""
        return as_one_vector(self._summed()[1])

    def _summed(self) -> tuple[float, dict[str, Tensor]]:
        """Return the risk and its gradient by parameter, in float64 where it is a sum of several."""
        # where parameters are spread over processes, each process walks all the data: it takes part in every backward
        own, self.mass = not self.problem.sharded and self.few is None, 0.0
        batches = (raw for _, raw in self.problem.shared(self.fitting)) if own else self._all()
        with self.differentiated():
            shares = (self.gradient_of(raw, self.problem.mass) for raw in batches)
            risk, gradient = self.space.total(shares, self.problem.ranks)
        return self._known(risk), gradient

    def _all(self) -> Iterable[Batch]:
        return self.problem.batches(FORWARD_CHUNK) if self.few is None else self.few

    @contextmanager
    def differentiated(self) -> Iterator[None]:
        """Make ready for `gradient_of` inside this context."""
        with self.problem.measuring(self.model, twice=False), differentiable(self.space.tensors):
            yield

    def gradient_of(self, raw: Batch, mass: float) -> tuple[float, dict[str, Tensor]]:
        """Return the sum of a batch's losses over `mass`, and its gradient by parameter, inside `differentiated`."""
        part = self._risk_of(raw, mass)
        if self.problem.sharded:  # backward() gathers the gradient from the processes, in float64
            torch.autograd.backward(part)
            found = self.whole([p.grad for p in self.space.tensors])
            for p in self.space.tensors:
                p.grad = None
            return float(part.detach()), found
        at = {**self.space.parameters, **self._moved}
        rows = self.problem.derivative(part, list(at.values()))
        named = zip(at.items(), rows, strict=True)
        return float(part.detach()), {name: p.new_zeros(p.shape) if row is None else row for (name, p), row in named}

    def _run(self, batch: Batch) -> tuple[Tensor, Any]:
        return self._runner.at(self._moved, batch) if self._moved else self.problem.run(self.model, batch)

    def _risk_of(self, raw: Batch, mass: float) -> Tensor:
        f, y = self._run(self.problem.place(raw))
        self.mass += float(self.problem.loss.mass(f, y).sum())
        return self.problem.loss.total(f, y) / mass

    def whole(self, rows: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """Return tensors, one for each parameter, in one piece each, in float64; where there is none it is zero."""
        named = zip(rows, self.space.parameters.items(), strict=True)
        known = {
            name: torch.zeros(p.shape, device=p.device) if row is None else in_one_piece(row.detach())
            for row, (name, p) in named
        }
        return {name: row.to(torch.float64) for name, row in known.items()}

    def second_derivative(self, direction: Direction) -> Tensor:
        """Return the Hessian's product with a direction, (P,) float64; each process walks all the data."""
        # each process walks all the data
        total = torch.zeros(self.space.size, dtype=torch.float64, device=self.space.device)
        with (
            self.problem.measuring(self.model),
            differentiable(self.space.tensors),
            whole_parameters(self.model, self.space.parameters) as tensors,
        ):
            self.coarsest = max((t.dtype for t in tensors), key=lambda dtype: torch.finfo(dtype).eps)
            for raw in self._all():
                part = self._risk_of(raw, self.problem.mass)
                rows = torch.autograd.grad(part, tensors, create_graph=True, allow_unused=True)
                require_second_derivative(rows)
                named = zip(rows, self.space.parameters, strict=True)
                live = [(row, spread_like(direction[name], row)) for row, name in named
                        if row is not None and row.requires_grad]  # fmt: skip
                if live:
                    of, along = zip(*live, strict=True)
                    again = torch.autograd.grad(of, tensors, along, allow_unused=True)
                    total += as_one_vector(self.whole(again))
        return of_the_first(total, self.problem.sharded)

    def operations(self) -> tuple[frozenset[str], list[str]]:
        """Return (the names of the operations that make the risk, those among them that are not torch's own)."""
        with self.problem.measuring(self.model), differentiable(self.space.tensors):
            return operations([self._risk_of(raw, 1.0) for raw in self._all()])

    def risk(self) -> float:
        """Return the risk where the weights are."""
        self.forwards += 1
        with self.problem.measuring(self.model, twice=False):
            found = outcomes(self.problem, self.problem.shared(FORWARD_CHUNK), self._run)
        return self._known(found.risk)

    def rounding(self, gradient: Direction) -> float:
        """Return how far rounding of the outputs, and of the weights to first order, moves the risk."""
        # a difference of risks has this error, however near they are: the outputs round anew at each point
        self.forwards += 1
        generator, risks = torch.Generator().manual_seed(0), torch.zeros(1 + _DRAWS, dtype=torch.float64)
        eps = torch.finfo(coarsest_inside(self.problem, self.model)).eps
        with self.problem.measuring(self.model, twice=False), torch.no_grad():
            for _, raw in self.problem.shared(FORWARD_CHUNK):
                f, y = self.problem.run(self.model, self.problem.place(raw))
                moved = (f, *(rounded(f, generator, eps) for _ in range(_DRAWS)))
                risks += torch.tensor([float(self.problem.loss.total(one, y)) for one in moved], dtype=torch.float64)
        risks = self.problem.ranks.total(risks) / self.problem.mass
        of_outputs = self._known(float((risks[1:] - risks[0]).abs().max()))
        weights = {name: in_one_piece(p.detach()) for name, p in self.space.parameters.items() if name in gradient}
        shares = [p.to(torch.float64) * gradient[name].to(p.device, torch.float64) for name, p in weights.items()]
        return of_outputs + eps * math.sqrt(dot(shares, shares))

    def _known(self, risk: float) -> float:
        """Return the first process's risk: the others' may differ by rounding, and all have to decide alike."""
        of = torch.tensor(risk, dtype=torch.float64, device=self.space.device)
        return float(of_the_first(of, self.problem.sharded))

    @contextmanager
    def walk(self, direction: Direction) -> Iterator[Callable[[float], None]]:
        """Give a function that moves the weights to theta - distance * direction; they are back at theta after.

        The moved weights are new tensors, which the network's modules get for the time of a call. A network that is
        measured in place may read its parameters elsewhere, too, or has them spread over processes: these parameters
        themselves get other values for a time.
        """
        there = {name: p for name, p in self.space.parameters.items() if name in direction}
        with self.problem.measuring(self.model, twice=False), ExitStack() as stack:
            if self.model is self.problem.model:
                kept, put = stack.enter_context(moved_in_place(list(there.values())))
            else:
                kept, put = [p.detach() for p in there.values()], None
                stack.callback(self._moved.clear)
            along = [spread_like(direction[name], p) for name, p in zip(there, kept, strict=True)]

            def move(distance: float) -> None:
                ends = (torch.add(p, part, alpha=-distance) for p, part in zip(kept, along, strict=True))
                if put is not None:
                    put(ends)
                else:
                    self._moved.update((name, end.requires_grad_()) for name, end in zip(there, ends, strict=True))

            yield move

    @property
    def fitting(self) -> int:
        """Return how many samples' graphs fit in half the problem's memory; the same number in every process."""
        if self.problem.sharded:  # what a graph keeps may differ between processes
            return LARGEST_CHUNK

        def run(batch: Batch) -> tuple[Tensor, Any]:
            with self.differentiated():
                return self.problem.run(self.model, batch)

        return samples_at_once(self.problem, bytes_of_a_sample(self.problem, self.model, run, "gradient"))


def next_update(optimiser: torch.optim.Optimizer, model: nn.Module, gradient: Direction) -> dict[str, Tensor]:
    """Return (theta - theta') / lr by name: what the optimiser subtracts next, given a gradient, at learning rate 1.

    A copy of the optimiser takes the step, on copies of the weights: it costs the memory of both. lr is the largest
    learning rate of its groups. The step holds momentum, preconditioner and weight decay. Where it is proportional to
    lr, the copy takes a very long one, of which the weights' rounding hides nothing. Raises BadInput.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    rate = rate_of_a_step(optimiser)
    known: dict[str, tuple[Tensor, Tensor]] = {}
    try:
        held = (p.grad for group in optimiser.param_groups for p in group["params"])
        without: dict[int, Any] = {id(grad): None for grad in held if grad is not None}  # gradients are not copied
        twin = copy.deepcopy(optimiser, without)
        for key, value in vars(optimiser).items():  # torch copies groups and state, and no setting of a subclass
            if value is None or isinstance(value, bool | int | float | str | torch.dtype):
                vars(twin).setdefault(key, value)
        _widen(twin)
        # a very long step, where it is proportional to the learning rate and the weights' dtype has room
        room = all(torch.finfo(p.dtype).max > _LONG**3 for group in twin.param_groups for p in group["params"])
        linear = type(twin) in (getattr(torch.optim, name, None) for name in _LINEAR)
        scale = _LONG / rate if room and linear else 1.0
        for group, own in zip(twin.param_groups, optimiser.param_groups, strict=True):
            group["lr"] = group["lr"] * scale
            for p, original in zip(group["params"], own["params"], strict=True):
                name = names.get(id(original), "")
                p.grad = None
                if name in gradient and original.requires_grad:
                    # a copy, as some optimisers write to gradients; in p's own layout, as fused ones read memory
                    p.grad = torch.empty_like(p).copy_(spread_like(gradient[name].detach(), p))
                    known[name] = original.detach(), p
        with _global_hooks_put_away():
            twin.step()
    except Exception as error:  # whatever the code of a class of the user's own raises
        raise BadInput(
            f"{type(optimiser).__name__}: no step of a copy of it is possible ({one_line(error)})"
        ) from error
    if not known:
        raise BadInput(f"the {type(optimiser).__name__} holds none of the measured parameters")
    # in memory already at hand
    moved = {name: in_one_piece(after.detach().sub_(before)) for name, (before, after) in known.items()}
    if scale == 1.0:  # the length of the rounding errors of the weights
        errors = [torch.finfo(p.dtype).eps / math.sqrt(12) * in_one_piece(w) for w, p in known.values()]
        rounding, length = math.sqrt(dot(errors, errors)), inner(moved, moved) ** 0.5
        if rounding > _LOST * length > 0:
            raise BadInput(
                f"the next step of {type(optimiser).__name__} is lost in the rounding of the weights: it is "
                f"{length:.2g} long, the rounding {rounding:.2g}; from {rounding / _LOST:.2g} on it would be measurable"
            )
    return {name: step.div_(-rate * scale) for name, step in moved.items()}


def update_after_ascent(
    optimiser: torch.optim.Optimizer, landscape: Landscape, gradient: Direction
) -> dict[str, Tensor]:
    """Return the optimiser's next update, as `next_update` does; a sharpness-aware one's from the gradient uphill.

    SAM's gradient is that at theta + rho T^2 g / ||T g||, T = 1, or |theta| + eta if it is adaptive. It is taken on the
    data that are measured. Raises BadInput.
    """
    base, model = without_ascent(optimiser), landscape.problem.model
    if base is optimiser:
        return next_update(optimiser, model, gradient)
    groups, named = optimiser.param_groups, landscape.space.parameters
    names = {id(p): name for name, p in model.named_parameters()}
    trained = {names.get(id(p), "") for group in groups for p in group["params"] if p.requires_grad}
    if not trained <= gradient.keys():
        raise BadInput("the ascent of the sharpness-aware optimiser moves parameters that are not measured")
    radii = {
        (float(group.get("rho", math.nan)), bool(group.get("adaptive")), float(group.get("eta", 0))) for group in groups
    }
    (rho, adaptive, eta), *others = radii
    if others or not rho >= 0:
        raise BadInput("the ascent of the sharpness-aware optimiser has no radius, or several")
    moving = [name for name in gradient if name in trained]
    units = [named[name].detach().abs() + eta for name in moving] if adaptive else None
    direction, factor = uphill([gradient[name] for name in moving], rho, units)
    with landscape.walk(dict(zip(moving, direction, strict=True))) as move:
        move(-factor)
        _, there = landscape.risk_and_gradient()
    return next_update(base, model, there)


def _widen(twin: torch.optim.Optimizer) -> None:
    """Give a copy of an optimiser its weights and state of half types in float32: a step in them is mostly rounding."""
    for group in twin.param_groups:
        for p in group["params"]:
            if p.dtype in HALF and not hasattr(p, "to_local"):
                p.data = p.data.to(torch.float32)
                state = twin.state.get(p, {})
                half = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.dtype in HALF}
                state.update({k: v.to(torch.float32) for k, v in half.items()})


@contextmanager
def _global_hooks_put_away() -> Iterator[None]:
    """Keep the user's hooks on the steps of all optimisers from running: a copy's step is none of the training."""
    of_all = import_module("torch.optim.optimizer")  # torch.optim deletes this name of its own
    hooks = [getattr(of_all, f"_global_optimizer_{when}_hooks") for when in ("pre", "post")]
    kept = [dict(one) for one in hooks]
    for one in hooks:
        one.clear()
    try:
        yield
    finally:
        for one, before in zip(hooks, kept, strict=True):
            one.update(before)


def spread_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor in the dtype and on the device of another, and spread over processes as that one is."""
    if not hasattr(like, "full_tensor"):
        return tensor.to(like)
    spread = import_module("torch.distributed.tensor").distribute_tensor  # seconds to import: only where it is used
    moved: Tensor = tensor.to(like.device, like.dtype)
    mesh, placements = getattr(like, "device_mesh", None), getattr(like, "placements", None)
    found: Tensor = spread(moved, mesh, placements, src_data_rank=None)
    return found


@dataclass(frozen=True, eq=False)
class Spread:
    """Gradients g_k of groups of n_k samples, by their distances from their mean g."""

    sizes: Tensor  #: n_k, (m,) float64
    squares: Tensor  #: ||g_k - g||^2, (m,)
    along: Tensor  #: <g_k - g, g>, (m,)
    square: float  #: ||g||^2

    @property
    def covariance(self) -> float:
        """Return tr Sigma: g_k varies around its mean by tr Sigma / n_k."""
        return float(self.sizes @ self.squares) / (len(self.sizes) - 1)

    def without_each(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return tr Sigma, ||g||^2 and the number of samples without each one of the groups, (m,)."""
        n = self.sizes.sum()
        left = n - self.sizes
        totals = self.sizes @ self.squares - self.sizes * self.squares * n / left
        moved = self.sizes / left  # the mean moves by this share of g - g_k
        squares = self.square - 2 * moved * self.along + moved.square() * self.squares
        return totals / max(len(self.sizes) - 2, 1), squares, left


def spread_of(
    landscape: Landscape,
    gradient: Mapping[str, Tensor],
    groups: int,
    generator: torch.Generator,
    progress: Progress | None = None,
) -> Spread:
    """Return the spread around `gradient`, that of all the data, of those of `groups` groups, dealt at random."""
    problem, g = landscape.problem, as_one_vector(gradient)
    parts = torch.randperm(problem.n, generator=generator).tensor_split(min(groups, problem.n))
    found: dict[int, tuple[int, float, float]] = {}
    with landscape.differentiated(), problem.ranks.as_one():
        for number, part in enumerate(parts):
            if not problem.ranks.takes(number):
                continue
            own = torch.zeros_like(g)
            for raw in problem.data.picked(part).chunks(landscape.fitting):
                own += as_one_vector(landscape.gradient_of(raw, problem.mass)[1])
            apart = own * (problem.n / len(part)) - g
            found[number] = len(part), float(apart.square().sum()), float(apart @ g)
            if progress is not None:
                progress("gradients of groups", number + 1, len(parts))
    rows = torch.tensor(problem.ranks.in_order(found), dtype=torch.float64)
    return Spread(rows[:, 0], rows[:, 1], rows[:, 2], float(g.square().sum()))


_ROUNDED = 1e-9
"""Relative difference of two products that is rounding in float64, where the error by differences happens to be 0."""

_NARROW, _JUMPS = 1 / 16, 0.05
"""A difference over this part of the distance is another by less than this: by 0.006 for smooth networks in float32, by
about 1 where the gradient of a few samples jumps."""
_FEW = 8  #: samples on which double backward is checked
_HOW = "how products with the Hessian are taken"
"""A fact about a problem: a tracker would find it out at every moment."""

By: TypeAlias = Literal["double backward", "central differences of gradients"]


@final
class ShardedHessian:
    """Products with R H R + S, R and S diagonal (without them: with H). Vectors are (P,) in float64.

    By double backward, where the wrappers that spread the parameters have one. Else from gradients at four points: H u
    is the limit of D(h) = (g(theta + h u) - g(theta - h u)) / (2 h), extrapolated from D(h) and D(2h). The error is
    D(h) - D(2h): three times that of D(h) by its length, and about that of the product by rounding.

    Which of the two is found out once for a problem, unless `by` says it. Double backward has to be symmetric on a few
    samples, and within three times the error of the differences there. Where gradients jump between the points of a
    difference even there, as in wide ReLU networks, every operation has to be torch's own instead. Under FSDP2 each
    process holds the parameters whole for it.

    Raises:
        NotDifferentiable: there is no double backward, and gradients jump. Differences then measure the jumps, too: in
            the mean over many samples they do not even depend on their distance.
    """

    def __init__(
        self, landscape: Landscape, root: Tensor | None = None, shift: Tensor | None = None, *, by: By | None = None
    ) -> None:
        self.landscape = landscape
        self.root, self.shift = root, shift
        self.products = 0
        space, facts = landscape.space, landscape.problem.facts
        size = sum(float(in_one_piece(p.detach()).to(torch.float64).square().sum()) for p in space.tensors) ** 0.5
        self.distance = torch.finfo(space.dtype).eps ** 0.2 * 1e-2 * max(size, 1.0)
        if by is None:
            by = facts[_HOW] = facts[_HOW] if _HOW in facts else self._tried()
        if by is None:
            raise NotDifferentiable(
                "double backward fails or is wrong here, and the network's gradient jumps, as that of a ReLU does: "
                "differences of gradients would measure the jumps, too"
            )
        self.by: By = by  #: how the products are taken

    def _tried(self) -> By | None:
        """Return how products are taken; None where neither way is right."""
        one = self.landscape
        few = Landscape(one.problem, model=one.model, few=[next(iter(one.problem.batches(_FEW)))])
        kinds, foreign = few.operations()
        if self._right_on(few, foreign):
            return "double backward"
        known = [operation_of(kind) for kind in kinds]
        bends = any(op is not None and op.kinks and op.role == "piecewise linear" for op in known)
        return None if bends or self._jumps(self._drawn(0)) else "central differences of gradients"

    def _right_on(self, few: Landscape, foreign: list[str]) -> bool:
        """Return whether double backward is right on a few samples; `foreign`: operations not torch's own."""
        u, v = self._drawn(0), self._drawn(1)
        try:
            Hu, Hv = (few.second_derivative(self.landscape.space.named(w)) for w in (u, v))
        except (RuntimeError, AttributeError, TypeError, ValueError, AssertionError) as failed:
            if out_of_memory(failed):
                raise
            return False
        asymmetry = abs(float(u @ Hv - v @ Hu))
        if asymmetry > torch.finfo(few.coarsest).eps ** 0.5 * float(Hu.norm() + Hv.norm()):
            return False
        small = ShardedHessian(few, by="central differences of gradients")
        if few.coarsest != self.landscape.space.dtype or small._jumps(u):
            return not foreign
        length = float(u.norm())
        differenced, error = small._differenced(u / length)
        most = 3 * float(error.norm()) + _ROUNDED * float(Hu.norm()) / length
        return float((Hu / length - differenced).norm()) <= most

    def _drawn(self, seed: int) -> Tensor:
        """Return a standard normal vector, the same in every process."""
        drawn = torch.randn(self.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return drawn.to(self.landscape.space.device)

    def _jumps(self, along: Tensor) -> bool:
        """Return whether the gradient jumps between the points of a difference."""
        unit = along / along.norm()
        wide, narrow = self._difference(unit, 1.0), self._difference(unit, _NARROW)
        return float((wide - narrow).norm()) > _JUMPS * float(wide.norm())

    @property
    def exact(self) -> bool:
        """Return whether the last product had no error but the rounding of its vectors' type."""
        return self.by == "double backward" and self.landscape.coarsest == self.landscape.space.dtype

    @property
    def size(self) -> int:
        """Return P, the number of rows and columns."""
        return self.landscape.space.size

    def flat(self, named: Mapping[str, Tensor]) -> Tensor:
        """Return one vector (P,) float64 from whole tensors by parameter; a missing one is zero."""
        rows = [named.get(name) for name in self.landscape.space.parameters]
        return as_one_vector(self.landscape.whole(rows))

    def __call__(self, v: Tensor) -> Tensor:
        """Return the product with a vector."""
        return self.with_error(v)[0]

    def with_error(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return (the product with a vector, the error of each entry)."""
        self.products += 1
        v = v.to(torch.float64)
        w = v if self.root is None else self.root * v
        length = float(w.norm())
        if length == 0:
            return torch.zeros_like(v), torch.zeros_like(v)
        if self.by == "double backward":
            product = self.landscape.second_derivative(self.landscape.space.named(w))
            error = product * (0.0 if self.exact else torch.finfo(self.landscape.coarsest).eps)
        else:
            product, error = (part * length for part in self._differenced(w / length))
        if self.root is not None:
            product, error = self.root * product, self.root * error
        return product if self.shift is None else product + self.shift * v, error

    def _differenced(self, unit: Tensor) -> tuple[Tensor, Tensor]:
        """Return (the product with a vector of length 1, the error of each entry)."""
        near, far = self._difference(unit, 1.0), self._difference(unit, 2.0)
        return (4 * near - far) / 3, near - far

    def _difference(self, unit: Tensor, times: float) -> Tensor:
        step, direction = times * self.distance, self.landscape.space.named(unit)
        with self.landscape.walk(direction) as move:
            move(-step)
            ahead = self.landscape.summed_gradient()
            move(step)
            behind = self.landscape.summed_gradient()
        return (ahead - behind).div_(2 * step)
