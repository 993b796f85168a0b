"""The Jacobian in small parameters, which act entry by entry: biases, scales and shifts of norms, expanded tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from flatlens.grams.rows import Rows
from flatlens.operations.reads import Entrywise, GraphOperation


def entrywise_jacobian(operation: GraphOperation, rows: Rows, J: Tensor, factor: Tensor | None) -> Tensor:
    """Return df/dtheta through one operation, (n, N, size) float64, from the output Jacobian J at its output.

    J is (n, N, d) or (n, N, g, d, P) if theta is the bias of a product, else (n, N, w, other axes). `factor` is the
    factor of theta, samples in front; None for 1.
    """
    if not isinstance(operation, Entrywise):
        return (J if J.ndim == 3 else J.sum(4).flatten(2)).to(torch.float64)
    n, N = J.shape[:2]
    if factor is not None:
        J = J * factor.reshape(n, -1, *factor.shape[1:])[:, None].to(J)
    kept = [size for axis, size in enumerate(operation.broadcast) if axis != rows.axis]
    repeated = [3 + axis for axis, size in enumerate(kept) if size == 1]
    return J.sum([2, *repeated]).reshape(n, N, -1).to(torch.float64)
