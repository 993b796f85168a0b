"""Matrices of derivatives of the risk and of the outputs, known by their products with vectors.

    Hessian       d2 L / dtheta2
    GaussNewton   (1/mass) sum_i J_i^T C_i J_i
    Residual      Hessian - GaussNewton: (1/mass) sum_i sum_k (dl_i/df_k) d2 f_ik / dtheta2
    Fisher        (1/mass) sum_i J_i^T F_i J_i, F_i = E[s s^T] with s the slope of the loss in the outputs, over
                  targets drawn from the model (exact or sampled), or with the data's own targets (empirical)

The matrices are over any named parameters; tied ones count once, unused ones give zeros. Sums run over all batches and
are divided once. A product takes and returns one vector (P,), k vectors (k, P), or a dict by parameter name. Each
vector counts as one product, whatever the number of batches. The autograd graphs are kept between products while they
fit in memory: a product then costs one backward pass, not a forward and two backwards. The first product also runs the
check of `curvature.symmetry` on a few samples; the products of the check are counted in `certificate.products`.

>>> from flatlens import Problem
>>> net = nn.Linear(2, 1, bias=False)
>>> problem = Problem(net, "half_squared_error", (torch.tensor([[3.0, 4.0]]), torch.zeros(1, 1)))
>>> Hessian(problem)(torch.tensor([1.0, 0.0]))  # x x^T
tensor([ 9., 12.])
>>> problem = Problem(net, "mse", (torch.tensor([[3.0, 4.0], [5.0, 6.0]]), torch.zeros(2, 1)))
>>> ParameterJacobian(problem).times(torch.tensor([1.0, 0.0])).flatten().tolist()
[3.0, 5.0]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeAlias, TypeVar, cast, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from flatlens.curvature.krylov import VectorProduct, finite_gradient
from flatlens.curvature.space import Space, dot, space_of
from flatlens.curvature.symmetry import SymmetryCheck, derivative_along
from flatlens.errors import BadInput, Give
from flatlens.grams.autograd import clear_autograd_errors, require_second_derivative
from flatlens.grams.record import run_recorded
from flatlens.problem import Batch, Problem
from flatlens.problem.batches import size, spaced, take
from flatlens.problem.eval_context import catch_up, device_of, differentiable, fingerprint, hook_failed, in_turn
from flatlens.problem.forward import slopes
from flatlens.problem.op_overrides import OperationMode, checkpoints_made
from flatlens.problem.ranks import ALONE, Ranks
from flatlens.progress import count_of
from flatlens.user_code import users_code

_T = TypeVar("_T")
_COUNTED_ON = 2  #: samples on which the bytes that autograd saves are counted, and a product's operations checked
GRAPH_BYTES = "bytes of a sample's graph"  #: first part of a key of a problem's facts
LARGEST_CHUNK = 1024  #: largest number of samples in a chunk: more make nothing faster
_FEWEST = 128  #: samples of a chunk that make the products of large networks fast
_CACHED = 2**24  #: bytes of a graph on a processor: LeNet takes 1.4 times as long if its chunks have four times as many


@final
@dataclass(eq=False)
class Graphs(Generic[_T]):
    """A cache of one result for each batch of the data, as many as fit in half the problem's memory.

    The others are built again in each iteration. So are graphs with checkpoints: backward() runs parts of the network
    anew, and these must meet it in the same state. `make` is not stored: an operator that makes its own graphs would
    refer to itself, and their memory would wait for the garbage collector.
    """

    problem: Problem
    model: nn.Module
    parameters: list[Tensor]
    every: int = 1  #: k: every k-th sample is used; every k-th ghost batch where samples are coupled
    ranks: Ranks = ALONE  #: the processes that share the data
    of: Hashable = None  #: what is made; the bytes of a sample's graph are counted once for a problem if given
    _kept: list[_T] = field(default_factory=list, init=False)
    _all_kept: bool = field(default=False, init=False)
    _state: tuple[object, ...] = field(default=(), init=False)
    _each: int = field(default=0, init=False)  #: bytes of a sample; 0 until they are counted

    def made_by(self, make: Callable[[Batch, int], _T]) -> Iterator[_T]:
        """Yield what `make` makes of each batch and its number; kept results come from an earlier call with it."""
        with in_turn(self.model), differentiable(self.parameters):
            catch_up(self.model)
            state = tuple(fingerprint(p) for p in self.model.parameters())
            if state != self._state:  # the network has changed since the graphs were built
                self._kept, self._all_kept, self._state = [], False, state
            yield from self._kept
            if not self._all_kept:
                with self.problem.measuring(self.model):
                    yield from self._rest(make, len(self._kept))

    def _rest(self, make: Callable[[Batch, int], _T], known: int) -> Iterator[_T]:
        if not self._each:
            self._each = bytes_of_a_sample(self.problem, self.model, lambda probe: make(probe, -1), self.of)
        each = self._each
        budget = self.problem.memory // 2
        most = max(1, min(samples_at_once(self.problem, each), budget // (2 * each)))
        own = sum(p.nbytes for p in self.parameters)  # each graph holds its gradient; one is kept also if this is large
        turn = seen = 0
        coupled = self.problem.coupled
        for number, raw in self.problem.shared(most if coupled else most * self.every, self.ranks):
            if coupled and number % self.every:
                continue
            if self.every > 1 and not coupled:  # of every k-th sample the outputs are not compared with those seen
                number, raw = -1 - number, spaced(raw, -(-size(raw) // self.every))
            turn, seen = turn + 1, seen + size(raw)
            if turn <= known:
                continue
            before = checkpoints_made()
            made = make(self.problem.place(raw), number)
            fits = seen * each + (turn - 1) * own <= budget
            if turn == len(self._kept) + 1 and fits and checkpoints_made() == before:
                self._kept.append(made)
            yield made
            del made  # free its memory before the next one is built
        self._all_kept = turn == len(self._kept)


def memory_of_graphs(problem: Problem, n: int) -> int:
    """Return the bytes of the graphs that products with an operator would keep of n samples; 0 before any product."""
    each = [found for key, found in problem.facts.items() if isinstance(key, tuple) and key[0] == GRAPH_BYTES]
    return min(problem.memory // 2, n * max(each, default=0))


def samples_at_once(problem: Problem, each: int) -> int:
    """Return how many samples a chunk with a graph has, at `each` bytes a sample: within half the problem's memory."""
    most = LARGEST_CHUNK
    if device_of(problem.model).type == "cpu":
        most = min(most, max(_FEWEST, _CACHED // each))
    return max(1, min(most, problem.memory // 2 // each))


def bytes_of_a_sample(problem: Problem, model: nn.Module, make: Callable[[Batch], object], of: Hashable) -> int:
    """Return the bytes that autograd saves for a sample, counted once for a problem and what the graph is `of`."""
    key = GRAPH_BYTES, of, problem.ghost_batch, *(p.requires_grad for p in model.parameters())
    each: int | None = None if of is None else problem.facts.get(key)
    if each is None:
        probe = problem.place(take(problem.probes[0], 0, _COUNTED_ON))
        each = problem.facts[key] = bytes_saved(model, size(probe), lambda: make(probe))
    return each


def bytes_saved(model: nn.Module, n: int, make: Callable[[], object]) -> int:
    """Return the bytes per sample that autograd saves, without parameters, when `make` builds a graph of n samples."""
    held: dict[int, int] = {p.untyped_storage().data_ptr(): 0 for p in model.parameters()}

    def count(tensor: Tensor) -> Tensor:
        for part in _dense_parts(tensor):
            storage = part.untyped_storage()
            held.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor.detach()  # an output that its own node keeps would never be freed

    try:
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            made: object = make()
        total = sum(held.values())
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        # where forward() uses torch.func, torch does not tell what it saves: the bytes of all tensors, which are more
        with _Computed() as computed:
            made = make()
        total = computed.bytes
    del made
    return max(1, total // n)


def _dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that hold a tensor's numbers: a sparse one has no memory of its own."""
    if tensor.layout == torch.strided:
        return (tensor,)
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


class _Computed(OperationMode):
    """Adds up the bytes of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._efficientzerotensor.default:
            func = torch.ops.aten.zeros.default  # zeros without memory crash in the next operation inside a mode
        found = func(*args, **(kwargs or {}))
        made = (part for t in tree_leaves(found) if isinstance(t, Tensor) for part in _dense_parts(t))
        self.bytes += sum(part.numel() * part.element_size() for part in made)
        return found


Vectors = TypeVar("Vectors", Tensor, Mapping[str, Tensor])


class Operator(ABC):
    """A symmetric matrix over named parameters, known by its products.

    >>> import torch, flatlens as fl
    >>> data = torch.ones(4, 3), torch.zeros(4, 2)
    >>> problem = fl.Problem(torch.nn.Linear(3, 2), "half_squared_error", data, dtype=torch.float64)
    >>> H = fl.curvature.Hessian(problem)
    >>> isinstance(H, Operator), H.dtype
    (True, torch.float64)
    """

    def __init__(
        self, problem: Problem, parameters: str | Iterable[str] | None = None, *, model: nn.Module | None = None
    ) -> None:
        self.problem = problem.as_asked()
        self.model = problem.measured() if model is None else model
        self.space: Space = space_of(problem, self.model, parameters)
        self.products = 0  #: vectors multiplied so far
        self._of = type(self).__name__, *self.space.parameters
        self.certificate = SymmetryCheck(self.problem, self.model, self._of)
        self._graphs = self._shared_graphs()

    def __repr__(self) -> str:
        told, kind = repr(self.problem).removeprefix("Problem: "), str(self.dtype).removeprefix("torch.")
        so_far = f"{count_of(self.products, 'product')} so far"
        return (
            f"{type(self).__name__}: {self.size:,} x {self.size:,} of {told}; {kind} on {self.space.device}; {so_far}"
        )

    @property
    def size(self) -> int:
        """Return P, the number of rows and columns."""
        return self.space.size

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the vectors."""
        return self.space.dtype

    def __call__(self, vectors: Vectors) -> Vectors:
        """Return the product with one vector (P,), with k vectors (k, P), or with a dict by parameter name."""
        if isinstance(vectors, Mapping):
            return self.space.named(self(self.space.flat(vectors)))
        if not isinstance(vectors, Tensor):
            got = type(vectors).__name__
            raise BadInput(f"{type(self).__name__}(v): expected a tensor or a dict of tensors, got {got}")
        if vectors.ndim not in (1, 2) or vectors.shape[-1] != self.size:
            raise BadInput(
                f"{type(self).__name__}(v): v must be ({self.size},) or (k, {self.size}), got {tuple(vectors.shape)}"
            )
        with _differentiating():
            rows = vectors.reshape(-1, self.size).to(self.space.device, self.dtype, copy=vectors.is_inference())
            totals: list[Tensor] = []
            with self.problem.ranks.as_one():
                for product in self._graphs.made_by(self._open):
                    parts = [product(row) for row in rows]
                    totals = [total.add_(part) for total, part in zip(totals, parts, strict=True)] if totals else parts
            whole = totals[0] if len(totals) == 1 else torch.stack(totals) if totals else torch.zeros_like(rows)
            whole = self.problem.ranks.total(whole)
        self.products += len(rows)
        return whole.reshape(vectors.shape)

    @abstractmethod
    def _open(self, batch: Batch, number: int) -> VectorProduct:
        """Build the graph of one batch, and return the product with this batch's part of the matrix."""

    def on_every(self, share: int) -> VectorProduct:
        """Return the product with the matrix of every `share`-th sample, scaled to all; it is not counted."""
        graphs = self._shared_graphs(share)

        def apply(v: Tensor) -> Tensor:
            total = torch.zeros_like(v)
            with self.problem.ranks.as_one():
                for product in graphs.made_by(self._open):
                    total += product(v)
            return self.problem.ranks.total(total) * share

        return apply

    def _shared_graphs(self, every: int = 1) -> Graphs[VectorProduct]:
        ranks, tensors = self.problem.ranks, self.space.tensors
        return Graphs(self.problem, self.model, tensors, every, ranks, self._of)

    def _risk(self, batch: Batch, number: int) -> Tensor:
        f, y = self.problem.run_chunk(self.model, batch, number)
        return self.problem.loss.total(f, y) / self.problem.mass

    def _second_derivative(self, of: Tensor, batch: Batch) -> _Twice:
        """Return v -> (d2 of / dtheta2) v, checked to be symmetric."""
        rows: list[Tensor | None] = [None] * len(self.space.tensors)
        if of.requires_grad:
            rows = self.problem.derivative(of, self.space.tensors, again=True)
            require_second_derivative(rows)
        self.certificate.require_symmetric(batch, of, rows, self.space.tensors)
        return _Twice(float(of.detach()), rows, self.space)

    def matrix(self) -> Tensor:
        """Return the whole matrix, (P, P), in P products: for small networks, and for checks.

        Raises:
            BadInput: The matrix does not fit in the problem's memory.
        """
        P, memory = self.size, self.problem.memory
        row = P * self.dtype.itemsize
        if P * row > memory:
            needed, allowed = _in_words(P * row), _in_words(memory)
            what = f"{P:,} x {P:,} numbers take {needed}, and Problem(memory=...) allows {allowed}"
            mend = "use products, or eigenpairs(); or choose fewer parameters, or give the Problem more memory"
            raise BadInput(f"{type(self).__name__}.matrix(): {what}: {mend}")
        rows = torch.arange(P, device=self.space.device)
        whole = torch.empty(P, P, dtype=self.dtype, device=self.space.device)
        for some in torch.split(rows, max(1, memory // (4 * row))):
            whole[some] = self((some[:, None] == rows).to(self.dtype))
        return whole


def _in_words(size: int) -> str:
    """Return a number of bytes in words, such as '1.07 GB' or '800 bytes'."""
    unit = next(((10**power, name) for power, name in ((12, "TB"), (9, "GB"), (6, "MB")) if size >= 10**power), None)
    return f"{size:,} bytes" if unit is None else f"{size / unit[0]:.3g} {unit[1]}"


@final
@dataclass(frozen=True, eq=False)
class _Twice:
    """v -> (d2 of / dtheta2) v, by backward passes through the graph of the gradient, which is kept."""

    of: float
    gradient: list[Tensor | None]
    space: Space

    def __call__(self, v: Tensor) -> Tensor:
        return _side_by_side(self._along(list(self.space.named(v).values())), self.space)

    def share(self) -> tuple[float, dict[str, Tensor]]:
        named = zip(self.space.parameters.items(), self.gradient, strict=True)
        return self.of, {name: p.new_zeros(p.shape) if row is None else row.detach() for (name, p), row in named}

    def quadratic(self, u: list[Tensor]) -> float:
        """Return u^T (d2 of / dtheta2) u, without a whole vector in memory."""
        pairs = [(one, row) for one, row in zip(u, self._along(u), strict=True) if row is not None]
        return dot([one for one, _ in pairs], [row.to_dense() if row.is_sparse else row for _, row in pairs])

    def _along(self, u: list[Tensor]) -> Sequence[Tensor | None]:
        return derivative_along(self.gradient, self.space.tensors, u)


@contextmanager
def _differentiating() -> Iterator[None]:
    with (
        torch.inference_mode(False),
        clear_autograd_errors(),
        users_code(hook_failed, hooks=True),  # kept graphs are gone through again where nothing is being measured
    ):
        yield


def _side_by_side(rows: Iterable[Tensor | None], space: Space) -> Tensor:
    return torch.cat([
        p.new_zeros(p.numel()) if row is None else row.to_dense().reshape(-1) if row.is_sparse else row.reshape(-1)
        for row, p in zip(rows, space.tensors, strict=True)
    ])  # fmt: skip


@final
class Hessian(Operator):
    """The Hessian of the risk. The graph of the gradient is kept, so a product costs one backward pass.

    >>> import torch, flatlens as fl
    >>> data = torch.ones(4, 3), torch.zeros(4, 2)
    >>> problem = fl.Problem(torch.nn.Linear(3, 2), "half_squared_error", data, dtype=torch.float64)
    >>> H = fl.curvature.Hessian(problem)
    >>> H.size, round(float(H.matrix().trace()), 9)
    (8, 8.0)
    >>> str(H).partition(", ")[0]
    'Hessian: 8 x 8 of Linear of 8 parameters'
    """

    def risk_and_gradient(self) -> tuple[float, dict[str, Tensor]]:
        """Return the risk and its gradient by parameter, of the graphs that the next products go through."""
        with _differentiating():
            shares = (cast(_Twice, graph).share() for graph in self._graphs.made_by(self._open))
            risk, gradient = self.space.total(shares, self.problem.ranks)
        return risk, finite_gradient({name: part.to(self.dtype) for name, part in gradient.items()}, self.dtype)

    def quadratic(self, direction: Mapping[str, Tensor]) -> float:
        """Return u^T H u for a direction u by parameter; a part that is missing is zero. It counts as one product."""
        u = [direction.get(name, p.new_zeros(())).to(p).expand(p.shape) for name, p in self.space.parameters.items()]
        with _differentiating(), self.problem.ranks.as_one():
            total = sum(cast(_Twice, graph).quadratic(u) for graph in self._graphs.made_by(self._open))
        self.products += 1
        return float(self.problem.ranks.total(torch.tensor(total, dtype=torch.float64, device=self.space.device)))

    def _open(self, batch: Batch, number: int) -> _Twice:
        self.problem.loss.require_curvature()
        return self._second_derivative(self._risk(batch, number), batch)


@final
class Residual(Operator):
    """The functional Hessian: Hessian minus Gauss-Newton matrix.

    >>> import torch, flatlens as fl
    >>> data = torch.ones(4, 3), torch.zeros(4, 2)
    >>> problem = fl.Problem(torch.nn.Linear(3, 2), "half_squared_error", data, dtype=torch.float64)
    >>> float(fl.curvature.Residual(problem).matrix().norm())  # a linear network has none
    0.0
    """

    def _open(self, batch: Batch, number: int) -> VectorProduct:
        f, y = self.problem.run_chunk(self.model, batch, number)
        return self._second_derivative((slopes(self.problem, f, y) * f).sum(), batch)


class _Squared(Operator):
    """A matrix J^T A J with A block-diagonal over samples."""

    def _open(self, batch: Batch, number: int) -> VectorProduct:
        f, y = self.problem.run_chunk(self.model, batch, number)
        between = self._between(f, y, number)
        forward, backward = jacobian_products(f, self.space)
        # only a loss that autograd differentiates twice adds operations to be checked
        of = f if self.problem.loss.closed else self.problem.loss.values(f.to(torch.float64), y)
        v = torch.empty(self.space.size, dtype=self.space.dtype, device=self.space.device)  # its shape alone is read
        self.certificate.require_adjoint(batch, of, [f, v], (backward, forward))
        mass = self.problem.mass
        # not in place: it may be a constant zero
        return lambda v: backward((between(forward(v)) / mass).to(f.dtype))

    @abstractmethod
    def _between(self, f: Tensor, y: object, number: int) -> Callable[[Tensor], Tensor]:
        """Return the function u -> A_i u_i, both (n, N)."""


def jacobian_products(f: Tensor, space: Space) -> tuple[VectorProduct, VectorProduct]:
    """Return (v -> J v of shape (n, N), w -> J^T w of shape (P,)), from one graph."""
    times, transposed_times = derivative_of(f, space.tensors)
    where = space.slices().values()

    def forward(v: Tensor) -> Tensor:
        return times([v[at].reshape(p.shape) for at, p in zip(where, space.tensors, strict=True)])

    def backward(w: Tensor) -> Tensor:
        return _side_by_side(transposed_times(w), space)

    return forward, backward


def derivative_of(
    f: Tensor, at: list[Tensor]
) -> tuple[Callable[[list[Tensor]], Tensor], Callable[[Tensor], list[Tensor | None]]]:
    """Return (directions -> df along them, w -> df^T w at each tensor), from one graph; df along v by two backwards."""
    nothing: list[Tensor | None] = [None] * len(at)
    if not f.requires_grad:
        return (lambda directions: torch.zeros_like(f)), (lambda w: nothing)
    # J^T w is linear in w, so J is the same at all w; but torch's logcumsumexp has no derivative at 0, nor one below a
    # softmax at equal numbers: w is random, of order 1, and the same for all samples, as it may be as large as f
    w = 0.5 + torch.rand(f.shape[1:], generator=torch.Generator().manual_seed(0), dtype=f.dtype).to(f.device)
    dummy = w.expand(f.shape).requires_grad_()
    rows = torch.autograd.grad(f, at, dummy, create_graph=True, allow_unused=True)
    require_second_derivative(rows)

    def times(directions: list[Tensor]) -> Tensor:
        (out,) = derivative_along(rows, [dummy], directions)
        return torch.zeros_like(f) if out is None else out

    def transposed_times(w: Tensor) -> list[Tensor | None]:
        return list(torch.autograd.grad(f, at, w, retain_graph=True, allow_unused=True))

    return times, transposed_times


@final
class GaussNewton(_Squared):
    """The Gauss-Newton matrix (1/mass) sum_i J_i^T C_i J_i; C_i is the output Hessian.

    >>> import torch, flatlens as fl
    >>> data = torch.ones(4, 3), torch.zeros(4, 2)
    >>> problem = fl.Problem(torch.nn.Linear(3, 2), "half_squared_error", data, dtype=torch.float64)
    >>> G = fl.curvature.GaussNewton(problem).matrix()
    >>> round(float(G.trace()), 9)  # two outputs, |x|^2 = 3, and the biases
    8.0
    """

    def _between(self, f: Tensor, y: object, number: int) -> Callable[[Tensor], Tensor]:
        return self.problem.loss.output_hessian_product(f, y)


@final
class Fisher(_Squared):
    """The Fisher matrix of the model's own predictions, or the empirical one.

    The `kind` is "exact": the expectation over targets drawn from the model, in closed form (the Gauss-Newton matrix
    for plain cross-entropy and squared errors); "sampled": the mean over `draws` targets per sample, the same in every
    product; or "empirical": (1/mass) sum_i mass_i g_i g_i^T with the data's own targets, g_i the gradient of sample i's
    loss.

    >>> import torch, flatlens as fl
    >>> data = torch.ones(4, 3), torch.zeros(4, 2)
    >>> problem = fl.Problem(torch.nn.Linear(3, 2), "half_squared_error", data, dtype=torch.float64)
    >>> F = fl.curvature.Fisher(problem, kind="empirical")
    >>> F.size
    8
    """

    def __init__(
        self,
        problem: Problem,
        parameters: str | Iterable[str] | None = None,
        *,
        kind: Literal["exact", "sampled", "empirical"] = "exact",
        draws: int = 1,
        generator: torch.Generator | None = None,
        model: nn.Module | None = None,
    ) -> None:
        if kind not in ("exact", "sampled", "empirical"):
            raise BadInput("expected 'exact', 'sampled' or 'empirical'", argument="kind", value=kind, call="Fisher")
        if not (isinstance(draws, int) and draws >= 1):
            raise BadInput("expected a whole number, at least 1", argument="draws", value=draws, call="Fisher")
        super().__init__(problem, parameters, model=model)
        self.kind, self.draws = kind, draws
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        self._seed = int(torch.randint(2**40, (), generator=generator))

    def _between(self, f: Tensor, y: object, number: int) -> Callable[[Tensor], Tensor]:
        loss = self.problem.loss
        if self.kind == "exact":
            return loss.fisher(f, y)
        if self.kind == "sampled":  # a batch built again draws the same targets
            generator = torch.Generator().manual_seed(self._seed + number)
            s = loss.draw_slopes(f, y, self.draws, generator) / self.draws**0.5
        else:
            weight = loss.mass(f, y)
            s = slopes(self.problem, f, y).to(torch.float64) * self.problem.mass
            s = torch.where(weight[:, None] > 0, s / weight.clamp(min=1e-300).sqrt()[:, None], 0.0)[:, None]
        return lambda u: (s.mT @ (s @ u.to(s.dtype)[..., None]))[..., 0]


_OfChunk: TypeAlias = tuple[int, VectorProduct, VectorProduct]
"""The number of samples of a chunk, and v -> J v and w -> J^T w."""


def _require_shape(what: str, got: Tensor, shape: tuple[int, ...]) -> None:
    if got.shape != shape:
        raise BadInput(f"{what}: expected shape {shape}, got {tuple(got.shape)}")


@final
class ParameterJacobian:
    """The Jacobian df/dtheta of all samples, (n N) x P.

    >>> import torch, flatlens as fl
    >>> data = torch.ones(4, 3), torch.zeros(4, 2)
    >>> problem = fl.Problem(torch.nn.Linear(3, 2), "half_squared_error", data, dtype=torch.float64)
    >>> J = fl.curvature.ParameterJacobian(problem)
    >>> J.transposed_times(torch.ones(4, 2, dtype=torch.float64)).shape
    torch.Size([8])
    """

    def __init__(
        self, problem: Problem, parameters: str | Iterable[str] | None = None, *, model: nn.Module | None = None
    ) -> None:
        self.problem = problem.as_asked()
        self.model = problem.measured() if model is None else model
        self.space = space_of(problem, self.model, parameters)
        self.products = 0
        self._graphs: Graphs[_OfChunk] = Graphs(problem, self.model, self.space.tensors)

    def _open(self, batch: Batch, number: int) -> _OfChunk:
        f, _ = self.problem.run_chunk(self.model, batch, number)
        return (len(f), *jacobian_products(f, self.space))

    def times(self, v: Tensor) -> Tensor:
        """Return J v, (n, N), for v (P,)."""
        _require_shape("ParameterJacobian.times(v)", v, (self.space.size,))
        self.products += 1
        v = v.to(self.space.device, self.space.dtype)
        return torch.cat([forward(v).detach() for _, forward, _ in self._graphs.made_by(self._open)])

    def transposed_times(self, w: Tensor) -> Tensor:
        """Return J^T w, (P,), for w (n, N)."""
        _require_shape("ParameterJacobian.transposed_times(w)", w, (self.problem.n, self.problem.outputs))
        self.products += 1
        w = w.to(self.space.device, self.space.dtype)
        total, start = torch.zeros(self.space.size, dtype=w.dtype, device=w.device), 0
        for n, _, backward in self._graphs.made_by(self._open):
            total += backward(w[start : start + n])
            start += n
        return total


@final
class InputJacobian:
    """The Jacobians df_i/dx_i of all samples: a block-diagonal matrix of n blocks N x M.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(3, 2, dtype=torch.float64)
    >>> data = (torch.ones(4, 3, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64))
    >>> problem = fl.Problem(net, "half_squared_error", data)
    >>> J = fl.curvature.InputJacobian(problem)
    >>> v = torch.ones(4, 3, dtype=torch.float64)
    >>> torch.allclose(J.times(v), v @ net.weight.T)
    True
    """

    def __init__(self, problem: Problem, *, model: nn.Module | None = None) -> None:
        if problem.coupled:
            coupled = " samples depend on each other, so there is no Jacobian per sample"
            what, remedy = ("with ", Give("batchnorm", "train"), coupled), ("use ", Give("batchnorm", "eval"))
            raise BadInput(what, remedy=remedy, call="InputJacobian")
        self.problem = problem.as_asked()
        self.model = problem.measured() if model is None else model
        self.products = 0
        self._graphs: Graphs[_OfChunk] = Graphs(problem, self.model, [])

    def _open(self, batch: Batch, number: int) -> _OfChunk:
        _, inputs, f, _ = run_recorded(self.problem, self.model, batch)
        if not inputs:
            raise BadInput(
                "InputJacobian(...): the inputs are not floating numbers and there is no embedding: there is nothing "
                "to differentiate with respect to"
            )
        n, widths = len(f), [x[0].numel() for x in inputs]
        times, transposed_times = derivative_of(f, inputs)

        def forward(v: Tensor) -> Tensor:
            _require_shape("InputJacobian.times(v): a batch of vectors", v, (n, sum(widths)))
            parts = torch.split(v, widths, dim=1)
            return times([part.reshape(x.shape) for part, x in zip(parts, inputs, strict=True)])

        def backward(w: Tensor) -> Tensor:
            _require_shape("InputJacobian.transposed_times(w): a batch of vectors", w, tuple(f.shape))
            back = zip(transposed_times(w), inputs, strict=True)
            return torch.cat([(torch.zeros_like(x) if g is None else g).reshape(n, -1) for g, x in back], 1)

        return n, forward, backward

    def times(self, v: Tensor) -> Tensor:
        """Return J_i v_i of every sample, (n, N), for v (n, M)."""
        return self._each(v, 0)

    def transposed_times(self, w: Tensor) -> Tensor:
        """Return J_i^T w_i of every sample, (n, M), for w (n, N)."""
        return self._each(w, 1)

    def _each(self, vectors: Tensor, side: Literal[0, 1]) -> Tensor:
        if len(vectors) != self.problem.n:
            raise BadInput(f"InputJacobian: expected {self.problem.n} vectors, one a sample, got {len(vectors)}")
        vectors = vectors.to(self.problem.dtype)
        parts, start = [], 0
        for n, *products in self._graphs.made_by(self._open):
            parts.append(products[side](vectors[start : start + n]).detach())
            start += n
        self.products += 1
        return torch.cat(parts)
