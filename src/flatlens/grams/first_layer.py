"""The input side of the layer that reads the network's input, computed faster than by autograd.

dense layer         G = J W W^T J^T = (J T^T)(J T^T)^T,  T^T T = W W^T: a product with min(d, m) columns, not m
convolution         a transposed convolution of stride 1 is a convolution with the flipped kernel, which is several
                    times faster on CPUs for a few input channels
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from flatlens.grams.contractions import RowProduct, pieces, row_products
from flatlens.grams.layout import Weight
from flatlens.operations.layers import Adapter, Convolution


def input_side_follows(weight: Weight) -> bool:
    """Return whether `input_products` can compute the layer's input side."""
    return weight.pure and len(weight.calls) == 1 and (weight.dense or _by_flipped_kernel(weight.adapter))


def input_products(
    weight: Weight, J: Tensor, out: torch.Size, wanted: Sequence[RowProduct], x: Tensor
) -> dict[RowProduct, Tensor]:
    """Return the `row_products` of the Jacobian at the layer's input x: "gram" is G, "squares" are ||df/dx_p||^2.

    J is (n, N, d) for a dense layer, (n, N, 1, d, P) for a convolution with output size `out`.
    """
    if weight.dense and list(wanted) == ["gram"]:
        return {"gram": weight.matrix.gram_at_input(J)}
    if weight.dense:
        return row_products(weight.matrix.at_input(J), wanted, x=x)
    parts = [row_products(rows, wanted, x=x[piece]) for piece, rows in _transposed(weight, J, out)]
    return {what: torch.cat([part[what] for part in parts]) for what in wanted}


def _by_flipped_kernel(adapter: Adapter) -> bool:
    """Return whether it is a 2D convolution with stride 1, one group, and zero padding smaller than its kernel."""
    return (
        isinstance(adapter, Convolution)
        and len(adapter.kernel) == 2
        and adapter.groups == 1
        and adapter.stride == (1, 1)
        and adapter.mode == "constant"
        and adapter.pad[::2] == adapter.pad[1::2]
        and all(p >= 0 for p in _padding(adapter))
    )


def _padding(adapter: Convolution) -> list[int]:
    sides = zip(adapter.dilation, adapter.kernel, adapter.pad[::-2], strict=True)
    return [d * (k - 1) - p for d, k, p in sides]


def _transposed(weight: Weight, J: Tensor, out: torch.Size) -> Iterator[tuple[slice, Tensor]]:
    """Yield a few samples at a time and their W^T J, (n', N, M), where the matrix W is the convolution."""
    adapter = weight.adapter
    assert isinstance(adapter, Convolution)
    kernel = weight.value.flip(2, 3).transpose(0, 1).contiguous()
    n, N, _, d = J.shape[:4]
    for piece in pieces(n, 16 * J[0].numel()):
        z = J[piece].reshape(-1, d, *out)
        rows = F.conv2d(z, kernel, padding=_padding(adapter), dilation=adapter.dilation)
        yield piece, rows.reshape(-1, N, rows[0].numel())
