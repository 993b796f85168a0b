"""The few tensor contractions from which all Gram matrices are made, accumulated in float64."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal, TypeAlias

import torch
from torch import Tensor

FEW_OUTPUTS = 32  #: with more, a root of C takes longer than what it saves
SCRATCH_BYTES = 2**23  #: bytes of scratch memory of a contraction; more would not fit in the cache
CACHE_BYTES = 2**21  #: bytes of a Jacobian widened to float64 at a time on a CPU: it stays in one core's cache
DEVICE_BYTES = 2**26  #: the same on other devices, where many small products cost more time to launch than to compute


RowProduct: TypeAlias = Literal["gram", "squares", "weighted", "along"]


def row_products(
    A: Tensor, wanted: Collection[RowProduct], C: Tensor | None = None, x: Tensor | None = None
) -> dict[RowProduct, Tensor]:
    """Return products of each sample's rows A, (n, N, M), in float64; the rows are widened once for all of them.

    "gram": A A^T, (n, N, N). "squares": sum_k A_k^2 of each entry, (n, M). "weighted": sum_kk' C_kk' A_k A_k', (n, M).
    "along": A x, (n, N), for x (n, M). With "gram" x is a row more of A, so that one product gives both.
    """
    A = A.detach()  # products written into memory have no derivative
    C, x = (None if v is None else v.detach() for v in (C, x))
    n, N, M = A.shape
    if n > 1 and A.stride(0) == 0 and set(wanted) <= {"gram", "squares"}:  # all samples share one matrix
        return {what: found.expand(n, *found.shape[1:]) for what, found in row_products(A[:1], wanted).items()}
    # The rows of a few samples at a time are widened, so that they stay in the cache.
    cuts = list(pieces(n, N * M * 8, CACHE_BYTES if A.device.type == "cpu" else DEVICE_BYTES))
    shapes: dict[RowProduct, tuple[int, ...]] = {"gram": (N, N), "squares": (M,), "weighted": (M,), "along": (N,)}
    out = {what: A.new_empty(n, *shapes[what], dtype=torch.float64) for what in wanted}
    joined = {"gram", "along"} <= out.keys()
    wide = A.new_empty(cuts[0].stop if cuts else 0, N + joined, M, dtype=torch.float64)
    scratch = torch.empty_like(wide[:, :N]) if out.keys() & {"squares", "weighted"} else wide
    for piece in cuts:
        held = piece.stop - piece.start
        rows = A[piece] if A.dtype == torch.float64 and not joined else wide[:held, :N].copy_(A[piece])
        if joined:
            assert x is not None
            wide[:held, N] = x[piece]
            products = torch.bmm(wide[:held], wide[:held].mT)
            out["gram"][piece], out["along"][piece] = products[:, :N, :N], products[:, :N, N]
        elif "gram" in out:
            torch.bmm(rows, rows.mT, out=out["gram"][piece])
        elif "along" in out:
            assert x is not None
            out["along"][piece] = (rows @ x[piece].to(torch.float64)[..., None])[..., 0]
        if "squares" in out:
            torch.sum(torch.mul(rows, rows, out=scratch[:held]), dim=1, out=out["squares"][piece])
        if "weighted" in out:
            assert C is not None
            torch.sum(torch.bmm(C[piece], rows, out=scratch[:held]).mul_(rows), dim=1, out=out["weighted"][piece])
    return out


def gram(A: Tensor) -> Tensor:
    """Return A A^T of each sample, (n, N, N), accumulated in float64, for A of shape (n, N, ...).

    >>> gram(torch.tensor([[[3.0, 4.0]]]))
    tensor([[[25.]]], dtype=torch.float64)
    """
    return row_products(A.flatten(2), ["gram"])["gram"]


def concatenated(parts: list[Tensor], dim: int) -> Tensor:
    """Return torch.cat of the parts, without a copy if there is only one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def norm2(x: Tensor) -> Tensor:
    """Return ||x_i||^2 of each sample, (n,), accumulated in float64.

    >>> norm2(torch.tensor([[3.0, 4.0]]))
    tensor([25.], dtype=torch.float64)
    """
    norms: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=torch.float64)
    return norms.square()


def trace(A: Tensor, B: Tensor) -> Tensor:
    """Return tr(A_i B_i), (n,), for symmetric matrices."""
    return (A * B).sum((1, 2))


def quadratic(C: Tensor | None, A: Tensor) -> Tensor:
    """Return sum_{k,k'} C_kk' A_k A_k' for each entry, (n, ...) float64, with A (n, N, ...); None stands for C = I."""
    what: RowProduct = "squares" if C is None else "weighted"
    return row_products(A.flatten(2), (what,), C)[what].reshape(len(A), *A.shape[2:])


def root_of(C: Tensor) -> Tensor:
    """Return R with R R^T = C, (n, N, N), for symmetric C without negative eigenvalues.

    Cholesky's elimination, column by column. A pivot within rounding of 0 gets no column: cross-entropy has one such.

    >>> root_of(torch.tensor([[[4.0, -4.0], [-4.0, 4.0]]], dtype=torch.float64))[0].tolist()
    [[2.0, 0.0], [-2.0, 0.0]]
    """
    N = C.shape[1]
    left, R = C, torch.zeros_like(C)
    nothing = 10 * N * torch.finfo(C.dtype).eps * C.diagonal(dim1=1, dim2=2)
    for k in range(N):
        pivot = left[:, k, k]
        there = pivot > nothing[:, k]
        R[:, k:, k] = left[:, k:, k] * torch.where(there, pivot.where(there, 1.0).rsqrt(), 0.0)[:, None]
        left = left - R[:, :, k, None] * R[:, None, :, k]
    return R


def pieces(n: int, bytes_each: int, within: int = SCRATCH_BYTES) -> Iterator[slice]:
    """Yield slices of n samples, so that `bytes_each` per sample stay within `within` bytes.

    >>> [piece.stop - piece.start for piece in pieces(5, SCRATCH_BYTES // 2)]
    [2, 2, 1]
    """
    most = max(1, within // max(1, bytes_each))
    for start in range(0, n, most):
        yield slice(start, min(start + most, n))
