"""The steps that an optimiser would take, and the risk along them: from forwards and single backward passes alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, final

import torch
from torch import Tensor, nn

from flatlens.curvature.graphs import LARGEST_CHUNK, bytes_of_a_sample, samples_at_once
from flatlens.curvature.krylov import finite_gradient
from flatlens.curvature.preconditioned import rate_of_a_step
from flatlens.curvature.space import as_one_vector, dot, inner, space_of
from flatlens.curvature.symmetry import operations
from flatlens.errors import BadInput, one_line
from flatlens.grams.second_derivative import require_second_derivative
from flatlens.perturbation.weights import coarsest_inside, rounded
from flatlens.problem import Batch, Problem
from flatlens.problem.outcomes import outcomes
from flatlens.problem.samples import FORWARD_CHUNK
from flatlens.problem.shards import in_one_piece, of_the_first, whole_parameters
from flatlens.problem.state import differentiable, elsewhere

Direction = Mapping[str, Tensor]
_LINEAR = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "Muon")
"""Optimisers of torch whose step is proportional to the learning rate, whatever their state."""
_LONG = 2.0**40  #: a learning rate at which the weights are rounding beside the step; a power of 2 rounds nothing
_DRAWS = 4  #: draws of the outputs' rounding
_LOST = 1e-3  #: share of a step that the weights' own rounding may be


@final
class Landscape:
    """The network of a problem, moved along directions and put back, without a copy of its activations.

    Attention runs by its fast kernels, except where a second derivative is taken.

    >>> net = nn.Linear(2, 1, bias=False)
    >>> problem = Problem(net, "half_squared_error", (torch.tensor([[3.0, 4.0]]), torch.zeros(1, 1)))
    >>> landscape = Landscape(problem)
    >>> with torch.no_grad():
    ...     _ = net.weight.copy_(torch.tensor([[1.0, 0.0]]))
    >>> landscape.risk_and_gradient()[1]["weight"]
    tensor([[ 9., 12.]])
    >>> with landscape.walk({"weight": torch.tensor([[1.0, 0.0]])}) as move:
    ...     move(1.0)
    ...     landscape.risk()
    0.0
    """

    def __init__(self, problem: Problem, *, model: nn.Module | None = None, few: Sequence[Batch] | None = None) -> None:
        self.problem = problem
        self.model = problem.measured() if model is None else model
        self.space = space_of(problem, self.model)
        self.few = few  #: the batches that derivatives over spread parameters see; None: all the data
        self.forwards = 0  #: evaluations of the risk over all the data
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
        """Return the risk and its gradient by parameter, in float64 where it is a sum of several.

        Where parameters are spread over processes, each process walks all the data: it takes part in every backward.
        """
        batches = self._all() if self.problem.sharded or self.few is not None else self._own()
        with self.differentiated():
            shares = (self.gradient_of(raw, self.problem.mass) for raw in batches)
            risk, gradient = self.space.total(shares, self.problem.ranks)
        return self._known(risk), gradient

    def _all(self) -> Iterable[Batch]:
        return self.problem.batches(FORWARD_CHUNK) if self.few is None else self.few

    def _own(self) -> Iterator[Batch]:
        return (raw for _, raw in self.problem.shared(self.fitting))

    @contextmanager
    def differentiated(self) -> Iterator[None]:
        """Make ready for `gradient_of` inside this context."""
        with self.problem.measuring(self.model, twice=False), differentiable(self.space.tensors):
            yield

    def gradient_of(self, raw: Batch, mass: float) -> tuple[float, dict[str, Tensor]]:
        """Return the sum of a batch's losses over `mass`, and its gradient by parameter, inside `differentiated`."""
        part = self._risk_of(raw, mass)
        if self.problem.sharded:
            return float(part.detach()), self._gathered(part)
        rows = torch.autograd.grad(part, self.space.tensors, allow_unused=True)
        named = zip(self.space.parameters.items(), rows, strict=True)
        return float(part.detach()), {name: p.new_zeros(p.shape) if row is None else row for (name, p), row in named}

    def _risk_of(self, raw: Batch, mass: float) -> Tensor:
        f, y = self.problem.run(self.model, self.problem.place(raw))
        return self.problem.loss.total(f, y) / mass

    def _gathered(self, part: Tensor) -> dict[str, Tensor]:
        """Return a gradient by backward(), which gathers it from the processes, in float64."""
        torch.autograd.backward(part)
        found = self.whole([p.grad for p in self.space.tensors])
        for p in self.space.tensors:
            p.grad = None
        return found

    def whole(self, rows: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """Return tensors, one for each parameter, in one piece each, in float64; where there is none it is zero."""
        named = zip(rows, self.space.parameters.items(), strict=True)
        known = {
            name: torch.zeros(p.shape, device=p.device) if row is None else in_one_piece(row.detach())
            for row, (name, p) in named
        }
        return {name: row.to(torch.float64) for name, row in known.items()}

    def second_derivative(self, direction: Direction) -> Tensor:
        """Return the Hessian's product with a direction, (P,) float64, by double backward.

        Each process walks all the data. It raises whatever autograd raises where it cannot differentiate twice; it does
        so, too, for an operation that autograd would leave out silently.
        """
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
            found = outcomes(
                self.problem, self.problem.shared(FORWARD_CHUNK), lambda b: self.problem.run(self.model, b)
            )
        return self._known(found.risk)

    def rounding(self, gradient: Direction) -> float:
        """Return how far rounding of the outputs, and of the weights to first order, moves the risk.

        A difference of risks along a step has this error, however near they are: the outputs round anew at each point.
        """
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
        """Give a function that moves the weights to theta - distance * direction; put them back, to the bit, after."""
        there = {name: p for name, p in self.space.parameters.items() if name in direction}
        with self.problem.measuring(self.model, twice=False), elsewhere(list(there.values())) as (kept, put):
            along = [spread_like(direction[name], p) for name, p in zip(there, kept, strict=True)]

            def move(distance: float) -> None:
                put(torch.add(p, part, alpha=-distance) for p, part in zip(kept, along, strict=True))

            yield move

    @property
    def fitting(self) -> int:
        """Return how many samples' graphs fit in half the problem's memory; the same number in every process."""
        if self.problem.sharded:  # what a graph keeps may differ between processes
            return LARGEST_CHUNK
        with self.differentiated():
            each = bytes_of_a_sample(self.problem, self.model, lambda b: self.problem.run(self.model, b), "gradient")
        return samples_at_once(self.problem, each)


def next_update(optimiser: torch.optim.Optimizer, model: nn.Module, gradient: Direction) -> dict[str, Tensor]:
    """Return (theta - theta') / lr by name: what the optimiser subtracts next, given a gradient, at learning rate 1.

    A copy of the optimiser takes the step, on copies of the weights: it costs the memory of both. lr is the largest
    learning rate of its groups. The step holds momentum, preconditioner and weight decay. Where it is proportional to
    lr, the copy takes a very long one, of which the weights' rounding hides nothing.

    Raises:
        BadInput: the optimiser cannot be copied, steps with a closure only, or makes a step that is lost in rounding.

    >>> net = nn.Linear(2, 1, bias=False)
    >>> sgd = torch.optim.SGD(net.parameters(), lr=0.5)
    >>> next_update(sgd, net, {"weight": torch.tensor([[1.0, 2.0]])})["weight"].round(decimals=5)
    tensor([[1., 2.]])
    """
    names = {id(p): name for name, p in model.named_parameters()}
    rate = rate_of_a_step(optimiser)
    known: dict[str, tuple[Tensor, Tensor]] = {}
    scale = _LONG / rate if _is_linear(optimiser) else 1.0
    try:
        held = (p.grad for group in optimiser.param_groups for p in group["params"])
        without: dict[int, Any] = {id(grad): None for grad in held if grad is not None}  # gradients are not copied
        twin = copy.deepcopy(optimiser, without)
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
    if scale == 1.0 and _rounding(before for before, _ in known.values()) > _LOST * inner(moved, moved) ** 0.5 > 0:
        raise BadInput(f"the next step of {type(optimiser).__name__} is lost in the rounding of the weights")
    return {name: step.div_(-rate * scale) for name, step in moved.items()}


def _is_linear(optimiser: torch.optim.Optimizer) -> bool:
    """Return whether the step is proportional to the learning rate, and may be long in the weights' dtype."""
    wide = all(torch.finfo(p.dtype).max > _LONG**3 for group in optimiser.param_groups for p in group["params"])
    return wide and type(optimiser) in (getattr(torch.optim, name, None) for name in _LINEAR)


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


def _rounding(weights: Iterable[Tensor]) -> float:
    """Return the length of the rounding errors of weights."""
    errors = [torch.finfo(w.dtype).eps / math.sqrt(12) * in_one_piece(w) for w in weights]
    return math.sqrt(dot(errors, errors))


def spread_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor in the dtype and on the device of another, and spread over processes as that one is."""
    if not hasattr(like, "full_tensor"):
        return tensor.to(like)
    spread = import_module("torch.distributed.tensor").distribute_tensor  # seconds to import: only where it is used
    moved: Tensor = tensor.to(like.device, like.dtype)
    mesh, placements = getattr(like, "device_mesh", None), getattr(like, "placements", None)
    found: Tensor = spread(moved, mesh, placements, src_data_rank=None)
    return found
