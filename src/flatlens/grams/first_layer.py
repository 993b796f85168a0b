"""The input side of the layer that reads the network's input: nobody below needs the slope, so autograd is not asked.

dense layer         G = J W W^T J^T = (J T^T)(J T^T)^T,  T^T T = W W^T: a product with min(d, m) columns, not m
convolution         a transposed convolution of stride 1 is a convolution with the flipped kernel, and that is
                    several times faster on processors for a few input channels
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatlens.grams.contract import gram, pieces, quadratic
from flatlens.grams.layout import Weight
from flatlens.problem import LinearLayer


def knows_its_input(weight: Weight) -> bool:
    """Whether `input_gram` covers the layer."""
    return len(weight.calls) == 1 and (weight.dense or _flips(weight.module))


def input_gram(weight: Weight, J: Tensor, out: torch.Size) -> Tensor:
    """G of the layer, (n, N, N), from J: (n, N, d) of a dense one, (n, N, 1, d, P) of a convolution onto `out`."""
    if weight.dense:
        return weight.matrix.gram_below(J)
    return torch.cat([gram(rows) for rows in _transposed(weight.module, J, out)])


def input_squares(weight: Weight, J: Tensor, out: torch.Size) -> Tensor:
    """||df/dx_p||^2 of each input entry p, (n, M), from the same J."""
    if weight.dense:
        return quadratic(None, weight.matrix.below(J))
    return torch.cat([quadratic(None, rows) for rows in _transposed(weight.module, J, out)])


def _flips(module: LinearLayer) -> bool:
    """Stride 1, one group, zero padding of a stated size that the kernel reaches over."""
    return (
        isinstance(module, nn.Conv2d)
        and module.groups == 1
        and module.stride == (1, 1)
        and module.padding_mode == "zeros"
        and isinstance(module.padding, tuple)
        and all(p >= 0 for p in _padding(module))
    )


def _padding(module: nn.Conv2d) -> list[int]:
    assert isinstance(module.padding, tuple)
    sides: Iterable[tuple[int, int, int]] = zip(module.dilation, module.kernel_size, module.padding, strict=True)
    return [d * (k - 1) - p for d, k, p in sides]


def _transposed(module: LinearLayer, J: Tensor, out: torch.Size) -> Iterator[Tensor]:
    """W^T J of some samples at a time, (n', N, M), the convolution taken as a matrix."""
    assert isinstance(module, nn.Conv2d)
    kernel = module.weight.detach().flip(2, 3).transpose(0, 1).contiguous()
    n, N, _, d = J.shape[:4]
    for piece in pieces(n, 16 * J[0].numel()):
        z = J[piece].reshape(-1, d, *out)
        rows = F.conv2d(z, kernel, padding=_padding(module), dilation=module.dilation)
        yield rows.reshape(-1, N, rows[0].numel())
