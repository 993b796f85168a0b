"""The few tensor contractions from which all Gram matrices are made, accumulated in float64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SCRATCH_BYTES = 2**23  #: bytes of scratch memory of a contraction; more would not fit in the cache
CACHE_BYTES = 2**21  #: bytes of a Jacobian widened to float64 at a time on a CPU: it stays in one core's cache
DEVICE_BYTES = 2**26  #: the same on other devices, where many small products cost more time to launch than to compute


def gram(A: Tensor) -> Tensor:
    """Return A A^T of each sample, (n, N, N), accumulated in float64, for A of shape (n, N, ...).

    >>> gram(torch.tensor([[[3.0, 4.0]]]))
    tensor([[[25.]]], dtype=torch.float64)
    """
    A = A.flatten(2)
    n, N, M = A.shape
    if n > 1 and A.stride(0) == 0:  # all samples share one matrix
        return gram(A[:1]).expand(n, N, N)
    if A.dtype == torch.float64:
        return A @ A.mT
    K = A.new_empty(n, N, N, dtype=torch.float64)
    cuts = list(pieces(n, N * M * 8, CACHE_BYTES if A.device.type == "cpu" else DEVICE_BYTES))
    scratch = A.new_empty(cuts[0].stop if cuts else 0, N, M, dtype=torch.float64)
    for piece in cuts:
        wide = scratch[: piece.stop - piece.start].copy_(A[piece])
        torch.bmm(wide, wide.mT, out=K[piece])
    return K


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
    flat = A.flatten(2)
    out = A.new_empty(len(A), flat.shape[2], dtype=torch.float64)
    for piece in pieces(len(A), 32 * flat[0].numel()):  # so that the product stays in the cache
        rows = flat[piece].to(torch.float64)
        torch.sum(rows * rows if C is None else (C[piece] @ rows).mul_(rows), dim=1, out=out[piece])
    return out.reshape(len(A), *A.shape[2:])


def pieces(n: int, bytes_each: int, within: int = SCRATCH_BYTES) -> Iterator[slice]:
    """Yield slices of n samples, so that `bytes_each` per sample stay within `within` bytes.

    >>> [piece.stop - piece.start for piece in pieces(5, SCRATCH_BYTES // 2)]
    [2, 2, 1]
    """
    most = max(1, within // max(1, bytes_each))
    for start in range(0, n, most):
        yield slice(start, min(start + most, n))
