"""Spectral norms of Jacobians and of the features of all samples, by products alone.

Of each sample's Jacobian, with many outputs: Lanczos runs on J J^T for all samples of a chunk at once; on J^T J where
the input has fewer entries than the output, as in a language model, whose output has one entry per token and word of
the vocabulary. A step computes J^T u by a backward pass, and J v by a backward pass through that one. Each sample's
Ritz value is a lower bound of lmax(J J^T), and an eigenvalue lies within its residual.

Of the Jacobian of a whole batch, which BatchNorm in train mode couples (sharpening A.1): there the outputs f(X) of a
batch are one function of all its inputs X, whose Jacobian has a block for every pair of samples. Between ghost
batches, and between samples where nothing couples them, there is nothing: the norm is the largest of theirs.

Of the matrices of all samples' features, which no sum of per-sample terms gives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from flatlens.curvature.krylov import VectorProduct
from flatlens.curvature.leading import lanczos
from flatlens.curvature.operators import bytes_saved, derivative_of
from flatlens.estimate import Progress
from flatlens.grams import LayerGrams, Plan, PlanBroken, features_read, require_told_apart
from flatlens.grams.plan import FRONT, Rows, coupled_places, coupled_samples_error
from flatlens.grams.record import run_recorded
from flatlens.grams.weight_jacobians import CACHE_BYTES, norm2, pieces, power_of_two
from flatlens.operations.operator_norm import SearchedNorm, searched_norm
from flatlens.problem import Problem
from flatlens.problem.batches import size
from flatlens.problem.eval_context import differentiable
from flatlens.problem.ranks import ALONE
from flatlens.problem.row_layout import onto_softmax, softmax_of, token_mask

_STEPS = 40  #: largest number of Lanczos steps
_CHUNK = 256  #: largest number of samples in a chunk
_TOGETHER = 64  #: samples of a batch's Jacobian where nothing couples them
CallOrInput = str | None  #: a call of a linear layer, or the network's input


@dataclass(frozen=True, eq=False)
class TopGrams:
    """The Gram matrices of one chunk at some places, known by their largest eigenvalue alone, with its residual."""

    number: int  #: the chunk's number in the data
    grams: dict[CallOrInput, LayerGrams]
    residuals: dict[CallOrInput, Tensor]  #: relative to the eigenvalues, (n,) each
    products: int  #: multiplications with J J^T, summed over places


def jacobian_norms(
    problem: Problem,
    model: nn.Module,
    plan: Plan,
    places: list[CallOrInput],
    *,
    softmax: bool,
    rtol: float,
    generator: torch.Generator,
    progress: Progress | None = None,
) -> Generator[TopGrams, None, None]:
    """Yield lmax(J_i J_i^T) of every sample, J_i the Jacobian of f or softmax(f), to `rtol` or the last step."""
    problem = problem.as_asked()
    probe = problem.place(problem.probes[0])
    seed = int(torch.randint(2**62, (), generator=generator))
    with problem.measuring(model), differentiable(model.parameters()):
        each = bytes_saved(model, size(probe), lambda: run_recorded(problem, model, probe))
        basis = 8 * _STEPS * min(problem.outputs, plan.activation_entries)
        # 3: the graph of the backward pass is about as large again
        most = max(1, min(_CHUNK, problem.memory // (3 * each + basis)))
        for number, raw in problem.shared(most, what="spectral norms", progress=progress):
            own = torch.Generator().manual_seed(seed + number)  # the same on whichever process has the chunk
            batch = problem.place(raw)
            tape, inputs, f, y = run_recorded(problem, model, batch)
            # the plan must hold for this chunk
            problem.require_as_seen(model, batch, number, f)
            plan.require_same(tape, inputs, batch)
            inputs = [inputs[number] for number in plan.inputs]
            # samples must not depend on each other, and must be on the axis that the plan says
            at = {f"x:{key}": tape.linear[key].x for key in places if key is not None}
            planned = {f"x:{key}": Rows(plan.batch_axis[key]) for key in places if key is not None}
            at |= {f"input:{k}": x for k, x in enumerate(inputs) if None in places}
            planned |= {f"input:{k}": FRONT for k in range(len(inputs)) if None in places}
            failing = coupled_places(f, at, planned, torch.Generator().manual_seed(0)) if at else []
            if any(name.startswith("input:") for name in failing):
                raise coupled_samples_error()
            if failing:
                raise PlanBroken([batch], failing)
            grams, residuals, products = {}, {}, 0
            for place in places:
                # the tensors to differentiate with respect to, and their values side by side, (n, M)
                if place is None:
                    to, in_front = inputs, True
                    x = torch.cat([plan.unpadded(x.detach(), tape).flatten(1) for x in inputs], 1)
                else:
                    call, axis = tape.linear[place], plan.batch_axis[place]
                    to, in_front = [call.x], axis == 0
                    x = plan.unpadded(call.read.movedim(axis, 0), tape).reshape(len(f), -1)
                apply, shape = squared_jacobian(f, to, softmax, token_mask(y), in_front)
                values, residual, steps = top_of_each(apply, shape, rtol, own)
                residuals[place] = residual / values.clamp(min=1e-300)
                products += steps
                # Gram matrices that hold one eigenvalue and no entries
                outputs = f.detach().to(torch.float64)
                empty = outputs.new_empty(len(f), 0, 0)
                grams[place] = LayerGrams(empty, outputs, problem.precision, x=x, x_norm2=norm2(x))
                name = "softmax_eigenvalues" if softmax else "eigenvalues"
                setattr(grams[place], name, values.to(f.device)[:, None])
            yield TopGrams(number, grams, residuals, products)


def squared_jacobian(
    f: Tensor, at: list[Tensor], softmax: bool, counted: Tensor | None, in_front: bool
) -> tuple[Callable[[Tensor], Tensor], torch.Size]:
    """Return (the product with P J J^T P, or J^T P P J if that is smaller, of each sample, its vectors' shape)."""
    # P is the Jacobian of softmax, or the identity; `in_front`: whether samples are on the first axis of `at`
    times, transposed = derivative_of(f, at)
    p = softmax_of(f.detach(), counted) if softmax else None

    def onto(u: Tensor) -> Tensor:
        return u if p is None else onto_softmax(p, u.to(p), counted)

    def back(u: Tensor) -> list[Tensor]:
        return [torch.zeros_like(x) if g is None else g for g, x in zip(transposed(u.to(f)), at, strict=True)]

    def apply(u: Tensor) -> Tensor:
        return onto(times(back(onto(u))).to(u))

    def from_inputs(v: Tensor) -> Tensor:
        parts = [part.reshape(x.shape).to(x) for part, x in zip(torch.split(v, widths, dim=1), at, strict=True)]
        return torch.cat([g.reshape(len(g), -1) for g in back(onto(onto(times(parts))))], 1)

    widths = [x[0].numel() for x in at]
    if in_front and all(len(x) == len(f) for x in at) and sum(widths) < f.shape[1]:
        return from_inputs, torch.Size((len(f), sum(widths)))
    return apply, f.shape


def top_of_each(
    apply: Callable[[Tensor], Tensor], shape: torch.Size, rtol: float, generator: torch.Generator
) -> tuple[Tensor, Tensor, int]:
    """Return (largest eigenvalues (n,), residuals (n,), steps) of n symmetric N x N matrices, by products (n, N)."""
    n, N = shape
    most = min(_STEPS, N)
    q = torch.randn(n, N, dtype=torch.float64, generator=generator)
    q = q / q.norm(dim=1, keepdim=True)
    Q, T = q.new_zeros(n, most, N), q.new_zeros(n, most, most)
    for j in range(most):
        Q[:, j] = q
        w = apply(q).to("cpu", torch.float64)
        for _ in range(2):
            h = (Q[:, : j + 1] @ w[..., None])[..., 0]
            w = w - (h[:, None] @ Q[:, : j + 1])[:, 0]
            T[:, : j + 1, j] += h
        T[:, j, :j] = T[:, :j, j]
        beta = w.norm(dim=1)
        theta, S = torch.linalg.eigh(T[:, : j + 1, : j + 1])
        top, residual = theta[:, -1].clamp(min=0), beta * S[:, -1, -1].abs()
        alive = beta > 1e-12 * theta.abs().amax(1).clamp(min=1e-300)  # else Ritz values are eigenvalues
        residual = torch.where(alive, residual, 0.0)
        if j >= 2 and bool((residual <= rtol * top).all()):
            break
        q = torch.where(alive[:, None], w / beta.clamp(min=1e-300)[:, None], 0.0)
    return top, residual, j + 1


@dataclass(frozen=True)
class JacobianNorm:
    """The largest norm over the batches, found by Lanczos."""

    value: float
    residual: float  #: residual of the value: an eigenvalue of J J^T has a root within about this of it
    exact: bool
    products: int


def batch_jacobians(
    problem: Problem,
    model: nn.Module,
    places: Sequence[str | None],
    *,
    softmax: bool,
    rtol: float,
    generator: torch.Generator,
    progress: Progress | None = None,
) -> dict[str | None, JacobianNorm]:
    """Return ||df(X)/dX||_2 for the network's input (None), or for the output of a linear layer's call, by its name."""
    problem = problem.as_asked()
    found = dict.fromkeys(places, JacobianNorm(0.0, 0.0, True, 0))
    with problem.measuring(model), differentiable(model.parameters()):
        for _, raw in problem.shared(_TOGETHER, ALONE, "Jacobians of batches", progress):
            tape, inputs, f, y = run_recorded(problem, model, problem.place(raw))
            for place, most in found.items():
                at = inputs if place is None else [tape.linear[place].z]
                of_all, shape = squared_jacobian(f, at, softmax, token_mask(y), in_front=False)

                def apply(u: Tensor, of_all: VectorProduct = of_all, shape: torch.Size = shape) -> Tensor:
                    return of_all(u.reshape(shape)).flatten()

                start = torch.randn(f.numel(), dtype=torch.float64, generator=generator).to(f.device)
                pairs = lanczos(apply, start, top_k=1, rtol=rtol)
                value = max(0.0, pairs.largest) ** 0.5
                residual = float(pairs.residuals[0]) / (2 * value) if value else 0.0
                if not value > most.value:
                    value, residual = most.value, most.residual
                exact, products = most.exact and pairs.exact, most.products + pairs.products
                found[place] = JacobianNorm(value, residual, exact, products)
    return found


SMALLEST, LARGEST = 64, 1024
"""Numbers of features between which X^T X is computed, of at least twice as many samples."""
CHUNK = 256  #: samples read at a time; features of one chunk, no fewer than its samples, take X X^T and no search
_UNDERFLOWN = 1e-30
"""Squares below it have lost digits in float32."""
_USUAL = 1e-10  #: features between this and its inverse have squares, and squares of these, in float32, too
_TOLERANCE = 1e-9  #: relative residual of the squared norm; its error is of the order of the residual squared: rounding


def feature_norms(
    problem: Problem, model: nn.Module, plan: Plan, groups: Mapping[str, Collection[str]] | None = None
) -> dict[str, SearchedNorm]:
    """Return ||X_l||_2 of the features X_l (n x M_l) of each linear call and each weight outside layers.

    All rows of a sample count as one: those that a network folds into the batch, too. With `groups`, the norms are
    those of several calls' features side by side; a group with a call whose features are not known is left out.

    From X X^T if the samples are few; else by Lanczos on X^T X, and if that is small beside X, its vector is found on a
    float32 copy and corrected. Features that do not fit in half the memory are computed again for each product.
    """
    # the features by chunk, as many as fit, and the largest number of them of each call
    kept, widths = list[dict[str, Tensor]](), dict[str, int]()
    held, complete = 0, True
    for part in _walk(problem, model, plan, check=not problem.coupled):
        widths |= {key: max(X.shape[1], widths.get(key, 0)) for key, X in part.items()}
        held += sum(X.numel() * X.element_size() for X in part.values())
        if kept and held > problem.memory // 2:
            kept, complete = kept[:1], False
        elif complete:
            kept.append(part)
    norms = {}
    for name, keys in (groups if groups is not None else {key: (key,) for key in widths}).items():
        if not keys or not widths.keys() >= {*keys}:  # a weight that acts in no product has no features
            continue
        each = [widths[key] for key in keys]
        width = sum(each)
        # the unit in which squares of features neither overflow nor underflow
        sizes = [float(power_of_two(part[key])) if bool(part[key].any()) else 0.0 for part in kept for key in keys]
        unit = max(1.0 if _USUAL < one < 1 / _USUAL else one for one in sizes) or 1.0

        # few samples: all eigenvalues of X X^T
        if complete and len(kept) == 1 and problem.n <= width:
            K = torch.stack([_between_samples(kept[0][key], unit) for key in keys]).sum(0)
            norms[name] = SearchedNorm(unit * float(torch.linalg.eigvalsh(K)[-1].clamp(min=0).sqrt()))
            continue

        # else a search, by products with X^T X in float64
        def apply(v: Tensor, keys: Collection[str] = keys, unit: float = unit, each: list[int] = each) -> Tensor:
            total = torch.zeros_like(v)
            mine, sums = (dict(zip(keys, torch.split(vector, each), strict=True)) for vector in (v, total))
            for part in kept if complete else _walk(problem, model, plan):
                m = {key: part[key].shape[1] for key in keys}  # a chunk of shorter sentences has the first tokens alone
                rows = len(part[next(iter(keys))])
                for piece in pieces(rows, 8 * sum(m.values()), CACHE_BYTES):  # read twice, so kept in the cache
                    wide = {key: _wide(part[key][piece], unit) for key in keys}
                    along = torch.stack([wide[key] @ mine[key][: m[key]] for key in keys]).sum(0)
                    for key in keys:
                        sums[key][: m[key]].addmv_(wide[key].T, along)
            return total

        start = torch.randn(width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        start = start.to(next(iter(kept[0].values())).device)
        G = None
        if complete and len(keys) == 1 and unit == 1.0:
            G = _squared([part[key] for part in kept for key in keys], width)
        if G is None:
            pairs = lanczos(apply, start, rtol=_TOLERANCE)
            norms[name] = SearchedNorm(unit * max(0.0, pairs.largest) ** 0.5, pairs.converged)
        else:  # which begins on the float32 copy of X^T X
            top = float(G.diagonal().max())  # vectors in units of it stay within float32
            rough, gram = partial(torch.mv, G.div_(top)), lambda v, apply=apply, top=top: apply(v).div_(top)
            found = searched_norm(gram, rough, start, _TOLERANCE)
            norms[name] = SearchedNorm((top * found.value**2) ** 0.5, found.converged)
    return norms


def _wide(X: Tensor, unit: float) -> Tensor:
    wide = X.to(torch.float64)
    return wide if unit == 1.0 else wide / unit


def _between_samples(X: Tensor, unit: float) -> Tensor:
    total = X.new_zeros(len(X), len(X), dtype=torch.float64)
    for piece in pieces(X.shape[1], 8 * len(X), CACHE_BYTES):
        wide = _wide(X[:, piece], unit)
        total.addmm_(wide, wide.T)
    return total


def _squared(parts: list[Tensor], width: int) -> Tensor | None:
    """Return X^T X of float32 features in float32, if it costs less than the products it saves."""
    n = sum(len(X) for X in parts)
    if not SMALLEST <= width <= min(LARGEST, n // 2) or any(X.dtype != torch.float32 for X in parts):
        return None
    total = parts[0].new_zeros(width, width)
    for X in parts:
        total[: X.shape[1], : X.shape[1]].addmm_(X.T, X)
    usable = bool(torch.isfinite(total).all()) and float(total.diagonal().max()) > _UNDERFLOWN
    return total if usable else None


def _walk(problem: Problem, model: nn.Module, plan: Plan, *, check: bool = False) -> Iterator[dict[str, Tensor]]:
    """Yield the features of linear calls and weights outside, (n, M_l), by chunk; `check`: rows are those planned."""
    # gradients stay on: the recorder skips only calls that the model itself runs under no_grad
    with problem.measuring(model), differentiable(model.parameters()):
        for raw in problem.batches(CHUNK):
            batch = problem.place(raw)
            tape, found = features_read(problem, model, plan, batch)
            n = size(batch)
            if check and any(len(found[key]) != n for key in tape.linear.keys() & found.keys()):
                require_told_apart(problem, model, plan, batch)
            yield {key: plan.unpadded(x, tape).reshape(n, -1) for key, x in found.items()}
