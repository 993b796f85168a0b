"""How much a linear layer can stretch its input: the largest singular value of x -> W x."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy.linalg import eigh_tridiagonal
from torch import Tensor
from torch.linalg import vector_norm

from flatlens.operations.layers import Adapter, LinearLayer, layer_of, matrix

TINY = 64  #: up to so many inputs or outputs the operator is written out as a matrix
CHECKED = 15  #: products from one look at how near it is to the next
MOST = 5000  #: products at most; a norm not found by then is a lower bound
EPS = torch.finfo(torch.float64).eps


def kernel_norm(module: LinearLayer) -> float:
    """||W||_2 of the weight as a matrix; a convolution's kernel is read as (out, in/groups * k * k), block by block.

    >>> layer = torch.nn.Conv1d(1, 1, 2, bias=False)
    >>> _ = torch.nn.init.ones_(layer.weight)
    >>> round(kernel_norm(layer) ** 2, 9)
    2.0
    """
    return blocks_norm(matrix(module).detach().to(torch.float64))


def blocks_norm(W: Tensor) -> float:
    """||W||_2 of a block-diagonal matrix with blocks W (g, d, m), float64."""
    return max(_matrix_norm(block) for block in W)


def _matrix_norm(W: Tensor) -> float:
    """||W||_2: from a decomposition of small ones, else by Lanczos on the smaller side."""
    top = float(W.abs().max()) if W.numel() else 0.0
    if min(W.shape) <= TINY or top == 0 or not math.isfinite(top):
        return float(torch.linalg.matrix_norm(W, 2)) if W.numel() else 0.0
    W = W / top if W.shape[0] > W.shape[1] else W.T / top
    return top * _largest_root(lambda v: W.T @ (W @ v), W[0], 1e-10)


def operator_norm(module: LinearLayer, size: torch.Size | tuple[int, ...], tolerance: float = 1e-10) -> float:
    """||A||_2 of the map x -> A x (no bias) that the layer applies to one input of shape `size`, (C, spatial...).

    A dense layer's is ||W||_2, whatever the size. A convolution's takes stride, padding, dilation and groups into
    account: Lanczos on the smaller of A^T A and A A^T, from a fixed start, with A^T the vector-Jacobian product of A.
    It stops when the residual of sigma^2 is below `tolerance` sigma^2: a singular value lies within half of that, the
    largest one unless the start is blind to it, or after `MOST` products. The result is never above the norm, but for
    rounding.

    >>> layer = torch.nn.Conv1d(1, 1, 2, padding="same", padding_mode="circular", bias=False)
    >>> _ = torch.nn.init.ones_(layer.weight)
    >>> round(operator_norm(layer, (1, 99)), 9)  # constants are doubled
    2.0
    """
    return map_norm(layer_of(module), module.weight.detach(), size, tolerance)


def map_norm(adapter: Adapter, weight: Tensor, size: torch.Size | tuple[int, ...], tolerance: float = 1e-10) -> float:
    """The same of a layer known by its geometry and its weight."""
    weight = weight.to(torch.float64)
    if adapter.token_wise:
        return blocks_norm(adapter.matrix(weight))
    with torch.inference_mode(False), torch.enable_grad():
        top = float(weight.abs().max())
        if top == 0:
            return 0.0
        weight = weight / top  # so that squares of sigma neither overflow nor vanish

        def forward(x: Tensor) -> Tensor:
            return adapter.apply(x, weight)  # past hooks, in float64, with the layer's own padding

        return top * _largest_singular_value(forward, weight.new_zeros(1, *size, requires_grad=True), tolerance)


def _largest_singular_value(forward: Callable[[Tensor], Tensor], x: Tensor, tolerance: float) -> float:
    """||A||_2 of the linear map `forward`, on tensors of x's shape."""
    y = forward(x)

    def backward(v: Tensor) -> Tensor:
        return torch.autograd.grad(y, x, v, retain_graph=True)[0]

    small, there, again = (x, forward, backward) if x.numel() <= y.numel() else (y, backward, forward)
    n, shape = small.numel(), small.shape
    if n <= TINY:
        units = torch.eye(n, dtype=x.dtype, device=x.device)
        rows = [there(unit.reshape(shape)).flatten() for unit in units]
        return float(torch.linalg.matrix_norm(torch.stack(rows), 2))

    return _largest_root(lambda v: again(there(v)), small, tolerance)


def _largest_root(gram: Callable[[Tensor], Tensor], like: Tensor, tolerance: float) -> float:
    """The root of the largest eigenvalue of a matrix A^T A known by its products with tensors of one shape.

    Lanczos by its recurrence of three vectors: others are not held orthogonal to them, so that values are found more
    than once, but those that are found are right to rounding (Paige 1976).
    """
    shape, n = like.shape, like.numel()
    v = torch.from_numpy(np.random.default_rng(0).standard_normal(n)).to(like.device)
    v, before, beta = v / vector_norm(v), torch.zeros_like(v), 0.0
    diagonal: list[float] = []
    beside: list[float] = []
    while True:
        w = gram(v.reshape(shape)).flatten().sub_(before, alpha=beta)
        diagonal.append(float(v.dot(w)))
        w.sub_(v, alpha=diagonal[-1])
        before, beta = v, float(vector_norm(w))
        if len(diagonal) % CHECKED == 0 or beta <= EPS * diagonal[0]:
            top, last = _top(diagonal, beside)
            if beta * last <= tolerance * top or len(diagonal) >= MOST:
                return math.sqrt(top)
        beside.append(beta)
        v = w / beta


def _top(diagonal: list[float], beside: list[float]) -> tuple[float, float]:
    """The largest eigenvalue of a tridiagonal matrix, and the size of its vector's last entry."""
    k = len(diagonal)
    values, vectors = eigh_tridiagonal(diagonal, beside, select="i", select_range=(k - 1, k - 1))
    return max(0.0, float(values[0])), abs(float(vectors[-1, 0]))
