"""Matrices of second derivatives of the risk, known by their products with vectors.

    Hessian       d2 L / dtheta2
    GaussNewton   (1/mass) sum_i J_i^T C_i J_i
    Residual      Hessian - GaussNewton: (1/mass) sum_i sum_k (dl_i/df_k) d2 f_ik / dtheta2
    Fisher        (1/mass) sum_i J_i^T F_i J_i, F_i = E[s s^T] with s the slope of the loss in the outputs, over targets
                  drawn from the model (exact or sampled), or with the data's own targets (empirical)

The matrices are over any named parameters; tied ones count once, unused ones give zeros. Sums run over all batches and
are divided once. A product takes and returns one vector (P,), k vectors (k, P), or a dict by parameter name. Each
vector counts as one product, whatever the number of batches. The first product also runs the check of
`curvature.symmetry` on a few samples; the products of the check are counted in `certificate.products`.

>>> from flatlens import Problem
>>> net = nn.Linear(2, 1, bias=False)
>>> problem = Problem(net, "half_squared_error", (torch.tensor([[3.0, 4.0]]), torch.zeros(1, 1)))
>>> Hessian(problem)(torch.tensor([1.0, 0.0]))  # x x^T
tensor([ 9., 12.])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar, final

import torch
from torch import Tensor, nn

from flatlens.curvature.graphs import Graphs
from flatlens.curvature.krylov import finite_gradient
from flatlens.curvature.space import Space, dot, space_of
from flatlens.curvature.symmetry import SymmetryCheck
from flatlens.errors import BadInput
from flatlens.grams.broken import clear_autograd_errors
from flatlens.grams.second_derivative import require_second_derivative
from flatlens.problem import Batch, Problem
from flatlens.problem.outcomes import slopes
from flatlens.problem.state import hook_failed
from flatlens.userfile import users_code

VectorProduct: TypeAlias = Callable[[Tensor], Tensor]
Vectors = TypeVar("Vectors", Tensor, Mapping[str, Tensor])


class Operator(ABC):
    """A symmetric matrix over named parameters, known by its products."""

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
            raise BadInput(f"{type(self).__name__}(v): a tensor or a dict of tensors is needed, got {got}")
        if vectors.ndim not in (1, 2) or vectors.shape[-1] != self.size:
            raise BadInput(
                f"{type(self).__name__}(v): v must be ({self.size},) or (k, {self.size}), got {tuple(vectors.shape)}"
            )
        with _differentiating():
            rows = vectors.reshape(-1, self.size).to(self.space.device, self.dtype, copy=vectors.is_inference())
            totals: list[Tensor] = []
            with self.problem.ranks.as_one():
                for product in self._graphs:
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
                for product in graphs:
                    total += product(v)
            return self.problem.ranks.total(total) * share

        return apply

    def _shared_graphs(self, every: int = 1) -> Graphs[VectorProduct]:
        """Return the graphs of this rank's part of the data, of every `every`-th sample."""
        return Graphs(self.problem, self.model, self.space.tensors, self._open, every, self.problem.ranks,
                      self._of)  # fmt: skip

    def _second_derivative(self, of: Tensor, batch: Batch) -> _Twice:
        """Return v -> (d2 of / dtheta2) v, checked to be symmetric."""
        rows = _gradients(of, self.space)
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
            raise BadInput(
                f"{type(self).__name__}.matrix(): {P:,} x {P:,} numbers take {_in_words(P * row)}, and "
                f"Problem(memory=...) allows {_in_words(memory)}: use products, or eigenpairs(); or choose fewer "
                f"parameters, or give the Problem more memory"
            )
        rows = torch.arange(P, device=self.space.device)
        whole = torch.empty(P, P, dtype=self.dtype, device=self.space.device)
        for some in torch.split(rows, max(1, memory // (4 * row))):
            whole[some] = self((some[:, None] == rows).to(self.dtype))
        return whole


def _in_words(size: int) -> str:
    """Return a number of bytes in words.

    >>> _in_words(139_293_168_400), _in_words(2**30), _in_words(800)
    ('139 GB', '1.07 GB', '800 bytes')
    """
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
        return _side_by_side(self._rows(list(self.space.named(v).values())), self.space)

    def share(self) -> tuple[float, dict[str, Tensor]]:
        """Return `of` and its gradient by parameter."""
        named = zip(self.space.parameters.items(), self.gradient, strict=True)
        return self.of, {name: p.new_zeros(p.shape) if row is None else row.detach() for (name, p), row in named}

    def quadratic(self, u: list[Tensor]) -> float:
        """Return u^T (d2 of / dtheta2) u, without a whole vector in memory."""
        pairs = [(one, row) for one, row in zip(u, self._rows(u), strict=True) if row is not None]
        return dot([one for one, _ in pairs], [row.to_dense() if row.is_sparse else row for _, row in pairs])

    def _rows(self, u: list[Tensor]) -> Sequence[Tensor | None]:
        live = [(g, one) for g, one in zip(self.gradient, u, strict=True) if g is not None and g.requires_grad]
        if not live:
            return [None] * len(u)
        rows, along = zip(*live, strict=True)
        return torch.autograd.grad(rows, self.space.tensors, along, retain_graph=True, allow_unused=True)


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


def _gradients(of: Tensor, space: Space) -> list[Tensor | None]:
    """Return d of / d theta with its own graph; None for a parameter that `of` does not depend on."""
    if not of.requires_grad:
        return [None] * len(space.tensors)
    rows: list[Tensor | None] = list(torch.autograd.grad(of, space.tensors, create_graph=True, allow_unused=True))
    require_second_derivative(rows)
    return rows


@final
class Hessian(Operator):
    """The Hessian of the risk. The graph of the gradient is kept, so a product costs one backward pass."""

    def risk_and_gradient(self) -> tuple[float, dict[str, Tensor]]:
        """Return the risk and its gradient by parameter, of the graphs that the next products go through."""
        with _differentiating():
            risk, gradient = self.space.total((graph.share() for graph in self._curved()), self.problem.ranks)
        return risk, finite_gradient({name: part.to(self.dtype) for name, part in gradient.items()}, self.dtype)

    def quadratic(self, direction: Mapping[str, Tensor]) -> float:
        """Return u^T H u for a direction u by parameter; a part that is missing is zero. It counts as one product."""
        u = [direction.get(name, p.new_zeros(())).to(p).expand(p.shape) for name, p in self.space.parameters.items()]
        with _differentiating(), self.problem.ranks.as_one():
            total = sum(graph.quadratic(u) for graph in self._curved())
        self.products += 1
        return float(self.problem.ranks.total(torch.tensor(total, dtype=torch.float64, device=self.space.device)))

    def _curved(self) -> Iterator[_Twice]:
        for graph in self._graphs:
            assert isinstance(graph, _Twice)
            yield graph

    def _open(self, batch: Batch, number: int) -> _Twice:
        self.problem.loss.require_curvature()
        f, y = self.problem.run_chunk(self.model, batch, number)
        risk = self.problem.loss.total(f, y) / self.problem.mass
        return self._second_derivative(risk, batch)


@final
class Residual(Operator):
    """The functional Hessian: Hessian minus Gauss-Newton matrix."""

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

        def product(v: Tensor) -> Tensor:
            return backward((between(forward(v)) / mass).to(f.dtype))  # not in place: it may be a constant zero

        return product

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
    dummy = _any_row(f).expand(f.shape).requires_grad_()  # the same row for all samples: it may be as large as f
    rows = torch.autograd.grad(f, at, dummy, create_graph=True, allow_unused=True)
    require_second_derivative(rows)

    def times(directions: list[Tensor]) -> Tensor:
        live = [(g, v) for g, v in zip(rows, directions, strict=True) if g is not None and g.requires_grad]
        if not live:
            return torch.zeros_like(f)
        along, onto = zip(*live, strict=True)
        (out,) = torch.autograd.grad(along, dummy, onto, retain_graph=True, allow_unused=True)
        return torch.zeros_like(f) if out is None else out

    def transposed_times(w: Tensor) -> list[Tensor | None]:
        return list(torch.autograd.grad(f, at, w, retain_graph=True, allow_unused=True))

    return times, transposed_times


def _any_row(f: Tensor) -> Tensor:
    """Return random numbers of order 1, one for each output, (N,): J^T w is linear in w, so J is the same at all w.

    At 0, torch's logcumsumexp has no derivative in w; at equal numbers, nor has one below a softmax.
    """
    return 0.5 + torch.rand(f.shape[1:], generator=torch.Generator().manual_seed(0), dtype=f.dtype).to(f.device)


@final
class GaussNewton(_Squared):
    """The Gauss-Newton matrix (1/mass) sum_i J_i^T C_i J_i; C_i is the output Hessian."""

    def _between(self, f: Tensor, y: object, number: int) -> Callable[[Tensor], Tensor]:
        return self.problem.loss.output_hessian_product(f, y)


@final
class Fisher(_Squared):
    """The Fisher matrix of the model's own predictions, or the empirical one.

    The `kind` is "exact": the expectation over targets drawn from the model, in closed form (the Gauss-Newton matrix
    for plain cross-entropy and squared errors); "sampled": the mean over `draws` targets per sample, the same in every
    product; or "empirical": (1/mass) sum_i mass_i g_i g_i^T with the data's own targets, g_i the gradient of sample i's
    loss.
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
            raise BadInput(f"Fisher(kind={kind!r}): 'exact', 'sampled' or 'empirical' is needed")
        if not (isinstance(draws, int) and draws >= 1):
            raise BadInput(f"Fisher(draws={draws!r}): a whole number, at least 1, is needed")
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
