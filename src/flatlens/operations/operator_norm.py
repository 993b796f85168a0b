"""Operator norms of linear layers: the largest singular value of x -> W x."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal
from torch import Tensor
from torch.linalg import vector_norm

from flatlens.operations.layers import Adapter, LinearLayer, layer_of

_TINY = 64  #: up to this many inputs or outputs, the operator is written out as a matrix
CHECKED = 15  #: products between two checks of convergence
_MOST = 5000  #: largest number of products; a norm that has not converged by then is a lower bound
_EPS = torch.finfo(torch.float64).eps
_SQUARED = 512  #: up to this many columns, their Gram matrix takes less time than some sixty products
_ROUGHLY_SQUARED = 1024  #: the same in float32, beside a few products in float64
_ROUGHLY = 1e-6  #: relative residual that a search in float32 reaches
_CORRECTED = 1e-4  #: share of a residual that a correction in float32 leaves
_ROUGH_PRODUCTS = 150  #: largest number of products of a search or correction in float32
_KEPT = 2**24  #: largest number of entries of the vectors that such a search keeps
_LARGE = 2**16  #: entries of a kernel from which on a product in float32 is several times as fast


class SearchedNorm(NamedTuple):
    """A spectral norm, and whether its search met the tolerance."""

    value: float
    converged: bool = True  #: if not, the value is a lower bound


def largest_norm(norms: Iterable[SearchedNorm]) -> SearchedNorm:
    """Return the largest of some norms: a lower bound if one of them is."""
    values, converged = zip(*norms, strict=True)
    return SearchedNorm(max(values), all(converged))


def blocks_norm(W: Tensor) -> SearchedNorm:
    """Return ||W||_2 of a block-diagonal matrix with blocks W (g, d, m), float64."""
    return largest_norm(_matrix_norm(block) for block in W)


def _matrix_norm(W: Tensor) -> SearchedNorm:
    """Return ||W||_2: by a decomposition if W is small, else by Lanczos (in float32 if large) on the smaller side."""
    top = float(W.abs().max()) if W.numel() else 0.0
    if min(W.shape) <= _TINY or top == 0 or not math.isfinite(top):
        return SearchedNorm(float(torch.linalg.matrix_norm(W, 2)) if W.numel() else 0.0)
    W = W / top if W.shape[0] > W.shape[1] else W.T / top
    if W.shape[1] <= _SQUARED:
        G = W.T @ W
        return _times(top, _largest_root(lambda v: G @ v, W[0], 1e-10))
    narrow = W.to(torch.float32)
    squared = narrow.T @ narrow if W.shape[1] <= _ROUGHLY_SQUARED else None

    def rough(v: Tensor) -> Tensor:
        return narrow.T @ (narrow @ v) if squared is None else squared @ v

    return _times(top, searched_norm(lambda v: W.T @ (W @ v), rough, W[0], 1e-10))


def _times(factor: float, norm: SearchedNorm) -> SearchedNorm:
    return SearchedNorm(factor * norm.value, norm.converged)


def operator_norm(module: LinearLayer, size: torch.Size | tuple[int, ...]) -> SearchedNorm:
    """Return ||A||_2 of the layer's map x -> A x (no bias) on one input of shape `size`, (C, spatial...).

    For a dense layer it is ||W||_2, whatever the size. For a convolution it takes stride, padding, dilation and groups
    into account: Lanczos on the smaller of A^T A and A A^T, from a fixed start, where A^T is the vector-Jacobian
    product of A. Lanczos stops when the residual of sigma^2 is below 1e-10 sigma^2, or after `_MOST` products. A
    singular value lies within half of the residual; it is the largest one unless the start is orthogonal to its vector.
    The result is never above the norm, except for rounding. For large kernels the vector is searched in float32 and
    corrected in float64, to the same residual.

    >>> layer = torch.nn.Conv1d(1, 1, 2, padding="same", padding_mode="circular", bias=False)
    >>> _ = torch.nn.init.ones_(layer.weight)
    >>> round(operator_norm(layer, (1, 99)).value, 9)  # constants are doubled
    2.0
    """
    return map_norm(layer_of(module), module.weight.detach(), size, 1e-10)


def map_norm(adapter: Adapter, weight: Tensor, size: torch.Size | tuple[int, ...], rtol: float) -> SearchedNorm:
    """Return ||A||_2 of a layer given as its geometry and weight, as `operator_norm` does, to the residual `rtol`."""
    weight = weight.to(torch.float64)
    if adapter.token_wise:
        return blocks_norm(adapter.matrix(weight))
    with torch.inference_mode(False), torch.enable_grad():
        top = float(weight.abs().max())
        if top == 0:
            return SearchedNorm(0.0)
        weight = weight / top  # so that squares of sigma do not overflow or underflow

        there, again, small = _both_ways(adapter, weight, size)
        n = small.numel()
        if n <= _TINY:
            units = torch.eye(n, dtype=small.dtype, device=small.device)
            rows = [there(unit.reshape(small.shape)).flatten() for unit in units]
            return SearchedNorm(top * float(torch.linalg.matrix_norm(torch.stack(rows), 2)))
        if (A := _written_out(adapter, weight, size)) is not None:
            return _times(top, _matrix_norm(A))
        if weight.numel() <= _LARGE:
            return _times(top, _largest_root(lambda v: again(there(v)), small, rtol))
        there32, again32, _ = _both_ways(adapter, weight.to(torch.float32), size)
        return _times(top, searched_norm(lambda v: again(there(v)), lambda v: again32(there32(v)), small, rtol))


_Product: TypeAlias = Callable[[Tensor], Tensor]


def _both_ways(
    adapter: Adapter, weight: Tensor, size: torch.Size | tuple[int, ...]
) -> tuple[_Product, _Product, Tensor]:
    """Return A and A^T, or A^T and A, and a tensor of the first one's argument: the smaller side."""
    x = weight.new_zeros(1, *size, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        return adapter.apply(x, weight)  # without hooks, with the layer's own padding

    y = forward(x)

    def backward(v: Tensor) -> Tensor:
        return torch.autograd.grad(y, x, v, retain_graph=True)[0]

    return (forward, backward, x.detach()) if x.numel() <= y.numel() else (backward, forward, y.detach())


def _written_out(adapter: Adapter, weight: Tensor, size: torch.Size | tuple[int, ...]) -> Tensor | None:
    """The map as a matrix, (inputs, outputs), where it has at most twice the weight's entries (most of it padding)."""
    n, W = math.prod(size), adapter.matrix(weight)
    if adapter.groups != 1 or n > 2 * W.shape[2]:
        return None
    numbers = torch.arange(1, n + 1, dtype=weight.dtype, device=weight.device).reshape(1, *size)
    read = adapter.patches(numbers, 1)[0, 0].long()  # number of the input that each window reads, 0 for padding
    d, P = W.shape[1], read.shape[1]
    if d * P * n > 2 * W.numel():
        return None
    A = W.new_zeros(P, n + 1, d)
    for position, numbers_read in enumerate(read.T):
        inside = numbers_read > 0
        A[position].index_add_(0, numbers_read[inside], W[0].T[inside])
    return A[:, 1:].transpose(0, 1).reshape(n, -1)


def searched_norm(gram: _Product, rough: _Product, like: Tensor, rtol: float) -> SearchedNorm:
    """Return the root of the largest eigenvalue of A^T A, by products in float32 (`rough`) and few in float64 (`gram`).

    Lanczos in float32 finds the vector v roughly. Corrections follow: t with (A^T A - theta) t = -r, where r is the
    residual of v, as accurate as float32 allows; then the best mixture of v and t. Residuals are those of products in
    float64. Should corrections stop helping, Lanczos in float64 goes on from v.
    """
    shape = like.shape
    rough_start = torch.from_numpy(np.random.default_rng(0).standard_normal(like.numel()))
    v = _krylov(rough, rough_start.to(like), shape, None)
    v = v / vector_norm(v)
    w = gram(v.reshape(shape)).flatten()
    before = math.inf
    while True:
        theta = float(v.dot(w))
        r = w - theta * v
        size = float(vector_norm(r))
        if size <= rtol * theta:
            return SearchedNorm(math.sqrt(theta))
        if not size <= before / 3:
            return _largest_root(gram, like, rtol, v)
        before = size
        t = _krylov(rough, r, shape, theta)
        t = t - v * v.dot(t)
        if not vector_norm(t) > 0:
            return _largest_root(gram, like, rtol, v)
        t = t / vector_norm(t)
        mapped = gram(t.reshape(shape)).flatten()
        between = float(v.dot(mapped))
        _, mixtures = np.linalg.eigh(np.array([[theta, between], [between, float(t.dot(mapped))]]))
        a, b = map(float, mixtures[:, 1])
        v, w = a * v + b * t, a * w + b * mapped


def _krylov(rough: _Product, start: Tensor, shape: torch.Size, theta: float | None) -> Tensor:
    """Return the vector of M's largest eigenvalue, or with `theta` the t of (M - theta) t = -start, by Lanczos."""
    n, length = start.numel(), float(vector_norm(start))
    most = max(CHECKED, min(_ROUGH_PRODUCTS, _KEPT // n))
    v = (start / length).to(torch.float32)
    basis, diagonal, beside = [v], list[float](), list[float]()
    while True:
        w = rough(v.reshape(shape)).flatten()
        if beside:
            w = w.sub_(basis[-2], alpha=beside[-1])
        diagonal.append(float(v.dot(w)))
        w.sub_(v, alpha=diagonal[-1])
        beta = float(vector_norm(w))
        last = len(diagonal) >= most or beta <= 1e-7 * diagonal[0]
        if last or len(diagonal) % (5 if theta is None else CHECKED) == 0:
            if theta is None:
                top, coefficients = _top(diagonal, beside)
                left = beta * abs(float(coefficients[-1])) / max(top, 1e-300)
            else:
                coefficients, left = _solution(diagonal, beside, beta, theta)
            if last or left <= (_ROUGHLY if theta is None else _CORRECTED):
                break
        beside.append(beta)
        v = w / beta
        basis.append(v)
    found = torch.stack(basis).T.to(torch.float32) @ torch.from_numpy(coefficients).to(v)
    return length * found.to(torch.float64)


def _solution(diagonal: list[float], beside: list[float], beta: float, theta: float) -> tuple[NDArray[Any], float]:
    """Return the y of smallest residual in (T - theta) y = -e_1, with T one row longer than wide, and its residual."""
    k = len(diagonal)
    T = np.zeros((k + 1, k))
    T[:k] = np.diag(np.array(diagonal) - theta) + np.diag(beside, 1) + np.diag(beside, -1)
    T[k, k - 1] = beta
    right = np.zeros(k + 1)
    right[0] = -1.0
    y = np.asarray(np.linalg.lstsq(T, right, rcond=None)[0], dtype=np.float64)
    return y, float(np.linalg.norm(T @ y - right))


def _largest_root(gram: _Product, like: Tensor, rtol: float, start: Tensor | None = None) -> SearchedNorm:
    """Return the root of the largest eigenvalue of A^T A, a matrix known by its products with tensors of one shape.

    Lanczos with its recurrence of three vectors. Other vectors are not kept orthogonal to these, so values are found
    more than once, but every value found is right to rounding (Paige 1976).
    """
    shape, n = like.shape, like.numel()
    v = torch.from_numpy(np.random.default_rng(0).standard_normal(n)).to(like.device) if start is None else start
    v, before, beta = v / vector_norm(v), torch.zeros_like(v), 0.0
    diagonal: list[float] = []
    beside: list[float] = []
    while True:
        w = gram(v.reshape(shape)).flatten().sub_(before, alpha=beta)
        diagonal.append(float(v.dot(w)))
        w.sub_(v, alpha=diagonal[-1])
        before, beta = v, float(vector_norm(w))
        if len(diagonal) % CHECKED == 0 or beta <= _EPS * diagonal[0]:
            top, vector = _top(diagonal, beside)
            converged = beta * abs(float(vector[-1])) <= rtol * top
            if converged or len(diagonal) >= _MOST:
                return SearchedNorm(math.sqrt(top), converged)
        beside.append(beta)
        v = w / beta


def _top(diagonal: list[float], beside: list[float]) -> tuple[float, NDArray[Any]]:
    """Return the largest eigenvalue of a tridiagonal matrix, at least 0, and its eigenvector."""
    k = len(diagonal)
    values, vectors = eigh_tridiagonal(diagonal, beside, select="i", select_range=(k - 1, k - 1))
    return max(0.0, float(values[0])), np.asarray(vectors[:, 0], dtype=np.float64)
