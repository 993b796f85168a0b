"""Operator norms of linear layers: the largest singular value of x -> W x."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy.linalg import eigh_tridiagonal
from torch import Tensor
from torch.linalg import vector_norm

from flatlens.operations.layers import Adapter, LinearLayer, layer_of, matrix

_TINY = 64  #: up to this many inputs or outputs, the operator is written out as a matrix
CHECKED = 15  #: products between two checks of convergence
_MOST = 5000  #: largest number of products; a norm that has not converged by then is a lower bound
_EPS = torch.finfo(torch.float64).eps


def kernel_norm(module: LinearLayer) -> float:
    """Return ||W||_2 of the weight as a matrix; a kernel is read as (out, in/groups * k * k), block by block.

    >>> layer = torch.nn.Conv1d(1, 1, 2, bias=False)
    >>> _ = torch.nn.init.ones_(layer.weight)
    >>> round(kernel_norm(layer) ** 2, 9)
    2.0
    """
    return blocks_norm(matrix(module).detach().to(torch.float64))


def blocks_norm(W: Tensor) -> float:
    """Return ||W||_2 of a block-diagonal matrix with blocks W (g, d, m), float64."""
    return max(_matrix_norm(block) for block in W)


def _matrix_norm(W: Tensor) -> float:
    """Return ||W||_2: by a decomposition if W is small, else by Lanczos on the smaller side."""
    top = float(W.abs().max()) if W.numel() else 0.0
    if min(W.shape) <= _TINY or top == 0 or not math.isfinite(top):
        return float(torch.linalg.matrix_norm(W, 2)) if W.numel() else 0.0
    W = W / top if W.shape[0] > W.shape[1] else W.T / top
    return top * _largest_root(lambda v: W.T @ (W @ v), W[0], 1e-10)


def operator_norm(module: LinearLayer, size: torch.Size | tuple[int, ...], rtol: float = 1e-10) -> float:
    """Return ||A||_2 of the layer's map x -> A x (no bias) on one input of shape `size`, (C, spatial...).

    For a dense layer it is ||W||_2, whatever the size. For a convolution it takes stride, padding, dilation and groups
    into account: Lanczos on the smaller of A^T A and A A^T, from a fixed start, where A^T is the vector-Jacobian
    product of A. Lanczos stops when the residual of sigma^2 is below `rtol` sigma^2, or after `_MOST` products.
    Then a singular value lies within half of the residual; it is the largest one unless the start is orthogonal to its
    vector. The result is never above the norm, except for rounding.

    >>> layer = torch.nn.Conv1d(1, 1, 2, padding="same", padding_mode="circular", bias=False)
    >>> _ = torch.nn.init.ones_(layer.weight)
    >>> round(operator_norm(layer, (1, 99)), 9)  # constants are doubled
    2.0
    """
    return map_norm(layer_of(module), module.weight.detach(), size, rtol)


def map_norm(adapter: Adapter, weight: Tensor, size: torch.Size | tuple[int, ...], rtol: float = 1e-10) -> float:
    """Return ||A||_2 of a layer given as its geometry and its weight, as `operator_norm` does."""
    weight = weight.to(torch.float64)
    if adapter.token_wise:
        return blocks_norm(adapter.matrix(weight))
    with torch.inference_mode(False), torch.enable_grad():
        top = float(weight.abs().max())
        if top == 0:
            return 0.0
        weight = weight / top  # so that squares of sigma do not overflow or underflow

        def forward(x: Tensor) -> Tensor:
            return adapter.apply(x, weight)  # without hooks, in float64, with the layer's own padding

        return top * _largest_singular_value(forward, weight.new_zeros(1, *size, requires_grad=True), rtol)


def _largest_singular_value(forward: Callable[[Tensor], Tensor], x: Tensor, rtol: float) -> float:
    """Return ||A||_2 of the linear map `forward`, on tensors of x's shape."""
    y = forward(x)

    def backward(v: Tensor) -> Tensor:
        return torch.autograd.grad(y, x, v, retain_graph=True)[0]

    small, there, again = (x, forward, backward) if x.numel() <= y.numel() else (y, backward, forward)
    n, shape = small.numel(), small.shape
    if n <= _TINY:
        units = torch.eye(n, dtype=x.dtype, device=x.device)
        rows = [there(unit.reshape(shape)).flatten() for unit in units]
        return float(torch.linalg.matrix_norm(torch.stack(rows), 2))

    return _largest_root(lambda v: again(there(v)), small, rtol)


def _largest_root(gram: Callable[[Tensor], Tensor], like: Tensor, rtol: float) -> float:
    """Return the root of the largest eigenvalue of A^T A, a matrix known by its products with tensors of one shape.

    Lanczos with its recurrence of three vectors. Other vectors are not kept orthogonal to these, so values are found
    more than once, but every value found is right to rounding (Paige 1976).
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
        if len(diagonal) % CHECKED == 0 or beta <= _EPS * diagonal[0]:
            top, last = _top(diagonal, beside)
            if beta * last <= rtol * top or len(diagonal) >= _MOST:
                return math.sqrt(top)
        beside.append(beta)
        v = w / beta


def _top(diagonal: list[float], beside: list[float]) -> tuple[float, float]:
    """Return the largest eigenvalue of a tridiagonal matrix, and the absolute value of its eigenvector's last entry."""
    k = len(diagonal)
    values, vectors = eigh_tridiagonal(diagonal, beside, select="i", select_range=(k - 1, k - 1))
    return max(0.0, float(values[0])), abs(float(vectors[-1, 0]))
