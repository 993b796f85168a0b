"""Spectral norms of Jacobians with many outputs, by products alone.

Lanczos runs on J J^T for all samples of a chunk at once; on J^T J where the input has fewer entries than the output, as
in a language model, whose output has one entry per token and word of the vocabulary. A step computes J^T u by a
backward pass, and J v by a backward pass through that one. Each sample's Ritz value is a lower bound of lmax(J J^T),
and an eigenvalue lies within its residual.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatlens.curvature.graphs import bytes_saved
from flatlens.curvature.operators import derivative_of
from flatlens.estimate import Progress
from flatlens.grams import LayerGrams, Layout, PlanBroken
from flatlens.grams.broken import samples_coupled
from flatlens.grams.contractions import norm2
from flatlens.grams.record import Tape, run_recorded
from flatlens.grams.rows import FRONT, Rows, coupled_places
from flatlens.operations.layers import by_sample
from flatlens.problem import Batch, Problem
from flatlens.problem.samples import size
from flatlens.problem.sequences import Tokens, onto_softmax, softmax_of
from flatlens.problem.state import differentiable

_STEPS = 40  #: largest number of Lanczos steps
_CHUNK = 256  #: largest number of samples in a chunk
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
    layout: Layout,
    places: list[CallOrInput],
    *,
    softmax: bool,
    rtol: float,
    generator: torch.Generator,
    progress: Progress | None = None,
) -> Generator[TopGrams, None, None]:
    """Yield lmax(J_i J_i^T) of every sample, J_i the Jacobian of f, or of softmax(f), with respect to some places.

    Residuals are at most `rtol` times the value, unless the steps run out.
    """
    problem = problem.as_asked()
    probe = problem.place(problem.probes[0])
    seed = int(torch.randint(2**62, (), generator=generator))
    with problem.measuring(model), differentiable(model.parameters()):
        each = bytes_saved(model, size(probe), lambda: run_recorded(problem, model, probe))
        basis = 8 * _STEPS * min(problem.outputs, layout.activation_entries)
        # 3: the graph of the backward pass is about as large again
        most = max(1, min(_CHUNK, problem.memory // (3 * each + basis)))
        for number, raw in problem.walked(most, "spectral norms", progress):
            own = torch.Generator().manual_seed(seed + number)  # the same on whichever process has the chunk
            batch = problem.place(raw)
            tape, inputs, f, y = run_recorded(problem, model, batch)
            problem.require_as_seen(model, batch, number, f)
            tokens = y if isinstance(y, Tokens) else None
            layout.require_same(tape, inputs, model, batch)
            inputs = [inputs[number] for number in layout.inputs]
            grams, residuals, products = {}, {}, 0
            _require_apart(tape, inputs, layout, places, f, batch)
            for place in places:
                at, x = _at(tape, inputs, layout, place, len(f))
                in_front = place is None or layout.batch_axis[place] == 0  # samples on the first axis of x
                apply, shape = squared_jacobian(f, at, softmax, tokens, in_front)
                values, residual, steps = top_of_each(apply, shape, rtol, own)
                residuals[place] = residual / values.clamp(min=1e-300)
                products += steps
                grams[place] = _with_top_alone(f, x, values.to(f.device), softmax, problem.precision)
            yield TopGrams(number, grams, residuals, products)


def _require_apart(
    tape: Tape, inputs: list[Tensor], layout: Layout, places: list[CallOrInput], f: Tensor, batch: Batch
) -> None:
    """Refuse samples that depend on each other; raise PlanBroken if samples are not on the axis that the plan says."""
    at = {f"x:{key}": tape.linear[key].x for key in places if key is not None}
    planned = {f"x:{key}": Rows(layout.batch_axis[key]) for key in places if key is not None}
    for number, x in enumerate(inputs if None in places else ()):
        at[f"input:{number}"], planned[f"input:{number}"] = x, FRONT
    failing = coupled_places(f, at, planned, torch.Generator().manual_seed(0)) if at else []
    if any(name.startswith("input:") for name in failing):
        raise samples_coupled()
    if failing:
        raise PlanBroken([batch], failing)


def _at(tape: Tape, inputs: list[Tensor], layout: Layout, place: CallOrInput, n: int) -> tuple[list[Tensor], Tensor]:
    """Return (the tensors to differentiate with respect to, their values side by side (n, M))."""
    if place is None:
        return inputs, torch.cat([layout.unpadded(x.detach(), tape).flatten(1) for x in inputs], 1)
    call = tape.linear[place]
    return [call.x], layout.unpadded(by_sample(call.read, layout.batch_axis[place]), tape).reshape(n, -1)


def squared_jacobian(
    f: Tensor, at: list[Tensor], softmax: bool, tokens: Tokens | None, in_front: bool
) -> tuple[Callable[[Tensor], Tensor], torch.Size]:
    """Return (the product with the matrix of each sample, the shape of its vectors).

    The matrix is P J J^T P on vectors (n, N), or J^T P P J on vectors (n, M) where M < N; P is the Jacobian of softmax,
    or the identity.
    """
    times, transposed = derivative_of(f, at)
    p = softmax_of(f.detach(), tokens) if softmax else None

    def onto(u: Tensor) -> Tensor:
        return u if p is None else onto_softmax(p, u.to(p), tokens)

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


def _with_top_alone(f: Tensor, x: Tensor, values: Tensor, softmax: bool, precision: float) -> LayerGrams:
    """Return Gram matrices that hold one eigenvalue and no entries."""
    outputs = f.detach().to(torch.float64)
    grams = LayerGrams(outputs.new_empty(len(f), 0, 0), outputs, precision, x=x, x_norm2=norm2(x))
    if softmax:
        grams.softmax_eigenvalues = values[:, None]
    else:
        grams.eigenvalues = values[:, None]
    return grams


def top_of_each(
    apply: Callable[[Tensor], Tensor], shape: torch.Size, rtol: float, generator: torch.Generator
) -> tuple[Tensor, Tensor, int]:
    """Return (largest eigenvalues (n,), residuals (n,), steps) of n symmetric N x N matrices, known by their products.

    `apply` multiplies one vector with each matrix, (n, N) -> (n, N).

    >>> A = torch.diag_embed(torch.tensor([[4.0, 1.0], [2.0, 3.0]], dtype=torch.float64))
    >>> generator = torch.Generator().manual_seed(0)
    >>> values, _, _ = top_of_each(lambda u: (A @ u[..., None])[..., 0], torch.Size([2, 2]), 1e-6, generator)
    >>> values.round(decimals=9).tolist()
    [4.0, 3.0]
    """
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
