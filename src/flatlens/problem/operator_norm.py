"""How much a linear layer can stretch its input: the largest singular value of x -> W x."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor

from flatlens.problem.layers import LinearLayer, is_convolution, matrix

TINY = 64  #: up to so many inputs or outputs the operator is written out as a matrix
BASIS = 20  #: vectors that Lanczos holds at a time, before it restarts with the best of them


def kernel_norm(module: LinearLayer) -> float:
    """||W||_2 of the weight as a matrix; a convolution's kernel is read as (out, in/groups * k * k), block by block.

    >>> layer = torch.nn.Conv1d(1, 1, 2, bias=False)
    >>> _ = torch.nn.init.ones_(layer.weight)
    >>> round(kernel_norm(layer) ** 2, 9)
    2.0
    """
    return float(torch.linalg.matrix_norm(matrix(module).detach().to(torch.float64), 2).max())


def operator_norm(module: LinearLayer, size: torch.Size | tuple[int, ...], tolerance: float = 1e-10) -> float:
    """||A||_2 of the map x -> A x (no bias) that the layer applies to one input of shape `size`, (C, spatial...).

    A dense layer's is ||W||_2, whatever the size. A convolution's takes stride, padding, dilation and groups into
    account: Lanczos on the smaller of A^T A and A A^T, from a fixed start, with A^T the vector-Jacobian product of A.
    It stops when the residual of sigma^2 is below `tolerance` sigma^2: a singular value lies within half of that, the
    largest one unless the start is blind to it. The result is never above the norm, but for rounding.

    >>> layer = torch.nn.Conv1d(1, 1, 2, padding="same", padding_mode="circular", bias=False)
    >>> _ = torch.nn.init.ones_(layer.weight)
    >>> round(operator_norm(layer, (1, 99)), 9)  # constants are doubled
    2.0
    """
    if not is_convolution(module):
        return kernel_norm(module)
    with torch.inference_mode(False), torch.enable_grad():
        weight = module.weight.detach().to(torch.float64)
        top = float(weight.abs().max())
        if top == 0:
            return 0.0
        weight = weight / top  # so that squares of sigma neither overflow nor vanish

        def forward(x: Tensor) -> Tensor:
            z: Tensor = module._conv_forward(x, weight, None)  # past hooks, in float64, with the layer's own padding
            return z

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

    def gram(v: NDArray[np.float64]) -> NDArray[np.float64]:
        product = again(there(torch.from_numpy(v).to(x.device).reshape(shape)))
        return product.flatten().cpu().numpy().astype(np.float64, copy=False)

    start = np.random.default_rng(0).standard_normal(n)
    if not gram(start).any():  # nothing of the kernel is met by the input
        return 0.0
    square = eigsh(LinearOperator((n, n), gram, dtype=np.float64), k=1, v0=start, tol=tolerance, ncv=BASIS)[0]
    return math.sqrt(float(square[0]))
