"""What a layer's Hessian has beyond its Gauss-Newton part: the curvature of the network itself, weighted by the loss's
slope, summed over directions V = T_r (x) e_t.

    relative flatness = mean_i tr(C_i R_i) + mean_i sum_V <dl_i/df, d2 f_i(W + eps V) / deps2>,   T^T T = W W^T
    Tr H_l            = mean_i tr(C_i K_i) + the same sum with T = I

A weight used in one call is perturbed through its pre-activation, where sum_t needs only min(m, P) directions:
min(d, m) double backwards for a dense layer. A weight used in several calls is perturbed itself, since a later call
sees what an earlier one changed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_map

from flatlens.grams.layout import Layout, Weight
from flatlens.grams.leftover import Runner, slow_batching_is_fine
from flatlens.grams.record import run_recorded
from flatlens.problem import Batch, Problem, measuring
from flatlens.problem.layers import by_position, by_sample, patches

TOGETHER = 16  #: directions differentiated in one batched call


def curvature_along_weight(
    problem: Problem,
    model: nn.Module,
    layout: Layout,
    layer: str,
    T: Tensor,
    scale: Tensor | None = None,
) -> tuple[Tensor, int]:
    """sum_V <dl_i/df, d2 f_i/dV2> over V = T_r (x) e_t / scale_t, (n,) float64, and how many products it took.

    T is (g, rows, d), scale (g, m).
    """
    weight = layout.weights[layer]
    most = max(1, min(64, problem.memory // (TOGETHER * layout.bytes_per_sample)))
    parts, products = [], 0
    with measuring(model):
        for raw in problem.data.chunks(most):
            batch = problem.place(raw)
            along = _along_preactivation if len(weight.calls) == 1 else _along_weight
            with slow_batching_is_fine():
                part, products = along(problem, model, layout, weight, batch, T, scale)
            parts.append(part.to(torch.float64).detach())
    return torch.cat(parts), products


def _slope(problem: Problem, f: Tensor, y: object) -> Tensor:
    """dl_i/df, (n, N), of the scaled losses."""
    leaf = f.detach().to(torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(problem.loss.values(leaf, y).sum(), leaf)
    return (slope * problem.n / problem.mass).to(f.dtype)


def _along_preactivation(
    problem: Problem, model: nn.Module, layout: Layout, weight: Weight, batch: Batch, T: Tensor, scale: Tensor | None
) -> tuple[Tensor, int]:
    tape, _, f, y = run_recorded(problem, model, batch)
    n, call, axis = len(f), tape.linear[weight.layer], layout.batch_axis[weight.layer]
    (slope,) = torch.autograd.grad((_slope(problem, f, y) * f).sum(), call.z, create_graph=True)
    if not slope.requires_grad:
        return f.new_zeros(n), 0
    slope = by_position(weight.module, by_sample(slope, axis), n)
    phi = patches(weight.module, by_sample(call.x.detach(), axis), n)
    phi = phi if scale is None else phi / scale[..., None].to(phi.dtype)
    E = torch.linalg.qr(phi, mode="r").R  # E^T E = phi^T phi, (n, g, min(m, P), P)
    total, products = f.new_zeros(n), 0
    for U in _blocks(T.to(f.dtype), E):
        (HU,) = torch.autograd.grad(slope, call.z, U, retain_graph=True, is_grads_batched=True)
        rows = torch.stack([by_position(weight.module, by_sample(h, axis), n) for h in HU])
        total, products = total + (U * rows).sum((0, 2, 3, 4)), products + len(U)
    return total, products


def _blocks(T: Tensor, E: Tensor) -> Iterator[Tensor]:
    """All directions T_r (x) E_s of each group, a few at a time: (k, n, g, d, P)."""
    g, rank, d = T.shape
    n, _, spans, P = E.shape
    block: list[Tensor] = []
    for group in range(g):
        for r in range(rank):
            for s in range(spans):
                U = T.new_zeros(n, g, d, P)
                U[:, group] = T[group, r, :, None] * E[:, group, s, None, :]
                block.append(U)
                if len(block) == TOGETHER:
                    yield torch.stack(block)
                    block = []
    if block:
        yield torch.stack(block)


def _along_weight(
    problem: Problem, model: nn.Module, layout: Layout, weight: Weight, batch: Batch, T: Tensor, scale: Tensor | None
) -> tuple[Tensor, int]:
    f, y = problem.run(model, batch)
    slopes = _slope(problem, f, y)
    runner, name = Runner(problem, model), f"model.{weight.layer.partition(':')[0]}.weight"
    W, n = weight.module.weight.detach(), len(f)
    batch = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, batch)

    def bend(sample: Batch, slope: Tensor, V: Tensor) -> Tensor:
        single = tree_map(lambda leaf: leaf[None] if isinstance(leaf, Tensor) else leaf, sample)

        def along(eps: Tensor) -> Tensor:
            outputs: Tensor = functional_call(runner, {name: W + eps * V}, (single,))[0]
            return (slope * outputs).sum()

        result: Tensor = grad(grad(along))(W.new_zeros(()))
        return result

    counted = tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == n else None, batch)
    over_samples = vmap(vmap(bend, in_dims=(None, None, 0)), in_dims=(counted, 0, None))
    total, products = f.new_zeros(n).detach(), 0
    for V in _weight_directions(T.to(W.dtype), W, scale):
        total, products = total + over_samples(batch, slopes, V).sum(1), products + len(V)
    return total, products


def _weight_directions(T: Tensor, W: Tensor, scale: Tensor | None) -> Iterator[Tensor]:
    """T_r (x) e_t / scale_t, shaped as the weight, a row r at a time: (m, *W.shape)."""
    g, rank, d = T.shape
    m = W[0].numel()
    for group in range(g):
        columns = torch.eye(m, dtype=W.dtype, device=W.device)
        if scale is not None:
            columns = columns / scale[group].to(W.dtype)
        for r in range(rank):
            V = W.new_zeros(m, g, d, m)
            V[:, group] = T[group, r, None, :, None] * columns[:, None, :]
            yield V.reshape(m, *W.shape)
