"""What a linear layer is, and how its calls become the canonical pair (phi, z) of z = W phi + b at positions p.

    phi  (n, g, m, P)   what the weight multiplies: m entries per group, at P positions
    z    (n, g, d, P)   what comes out: d rows per group

A dense layer has P = 1 and g = 1; a token-wise linear has P tokens; a convolution has one position per output pixel,
m = in/g * k * k, and its kernel is read as g blocks of a block-diagonal matrix. transformers' Conv1D is a token-wise
linear that stores W transposed, (m, d).
"""

from __future__ import annotations

from typing import TypeAlias, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LinearLayer: TypeAlias = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
Norm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.LayerNorm | nn.GroupNorm
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm)


def is_linear(module: nn.Module) -> TypeGuard[LinearLayer]:
    """Whether the module computes z = W phi + b and nothing else."""
    return is_token_wise(module) or is_convolution(module)


def is_convolution(module: nn.Module) -> TypeGuard[nn.Conv1d | nn.Conv2d | nn.Conv3d]:
    """Whether it is one of torch's."""
    return isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)


def is_token_wise(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is a linear map of the last axis."""
    return isinstance(module, nn.Linear) or stores_transposed(module)


def stores_transposed(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D, known by its name, so that transformers is never imported."""
    return any((c.__name__, c.__module__) == ("Conv1D", "transformers.pytorch_utils") for c in type(module).__mro__)


def groups(module: LinearLayer) -> int:
    """g, the number of diagonal blocks of the weight."""
    return module.groups if is_convolution(module) else 1


def kernel_size(module: LinearLayer) -> int:
    """Entries of the kernel per input channel; 1 for Linear."""
    return torch.Size(module.kernel_size).numel() if is_convolution(module) else 1


def neurons(module: LinearLayer) -> int:
    """Rows of the weight, g d."""
    return module.weight.shape[1 if stores_transposed(module) else 0]


def matrix(module: LinearLayer, weight: Tensor | None = None) -> Tensor:
    """W as (g, d, m)."""
    weight = module.weight if weight is None else weight
    weight = weight.T if stores_transposed(module) else weight
    return weight.reshape(groups(module), weight.shape[0] // groups(module), -1)


def as_stored(module: LinearLayer, W: Tensor) -> Tensor:
    """Matrices (..., g, d, m) in the shape of the weight."""
    if stores_transposed(module):
        return W.flatten(-3, -2).mT
    return W.reshape(*W.shape[:-3], *module.weight.shape)


def patches(module: LinearLayer, x: Tensor, n: int) -> Tensor:
    """phi of one call, (n, g, m, P), from the layer's input with its samples on axis 0 (folded with others or not)."""
    if not is_convolution(module):
        return x.reshape(n, 1, -1, x.shape[-1]).transpose(2, 3)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = F.pad(x, module._reversed_padding_repeated_twice, mode=mode)
    columns = _unfolded(x, module.kernel_size, module.dilation, module.stride)  # (n*w, C K, P')
    columns = columns.reshape(n, -1, module.groups, columns.shape[1] // module.groups, columns.shape[2])
    return columns.permute(0, 2, 3, 1, 4).reshape(n, module.groups, columns.shape[3], -1)


def _unfolded(x: Tensor, kernel: tuple[int, ...], dilation: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """All windows of a padded input (n, C, size...) as columns, (n, C K, P)."""
    if len(kernel) == 1:
        return F.unfold(x[:, :, None], (1, *kernel), (1, *dilation), 0, (1, *stride))
    if len(kernel) == 2:
        return F.unfold(x, kernel, dilation, 0, stride)
    for axis, (reach, step) in enumerate(
        zip(kernel, stride, strict=True)
    ):  # torch unfolds no volumes: windows by views
        gap = dilation[axis]
        x = x.unfold(2 + axis, gap * (reach - 1) + 1, step)[..., ::gap]
    x = x.permute(0, 1, 5, 6, 7, 2, 3, 4)
    return x.reshape(len(x), -1, x.shape[5:].numel())


def by_sample(tensor: Tensor, axis: int) -> Tensor:
    """The tensor with its sample axis in front."""
    return tensor.movedim(axis, 0)


def by_position(module: LinearLayer, z: Tensor, n: int) -> Tensor:
    """Something of the output's shape (n*w, ...), as (n, g, d, P)."""
    if not is_convolution(module):
        return z.reshape(n, 1, -1, z.shape[-1]).transpose(2, 3)
    z = z.reshape(n, -1, module.groups, z.shape[1] // module.groups, z.shape[2:].numel())
    return z.permute(0, 2, 3, 1, 4).reshape(n, module.groups, z.shape[3], -1)


def features(module: LinearLayer) -> int:
    """The neurons feeding the layer: inputs of a Linear, channels of a convolution."""
    return module.in_channels if is_convolution(module) else matrix(module).shape[2]


def per_feature(module: LinearLayer, values: Tensor) -> Tensor:
    """One value per feature, repeated over the kernel: (g, m)."""
    return values.repeat_interleave(kernel_size(module)).reshape(groups(module), -1)


def normalised(module: nn.Module, x: Tensor) -> Tensor:
    """The input of a norm's affine map: xhat, of x's shape."""
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(x, module.normalized_shape, None, None, module.eps)
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(x, module.num_groups, None, None, module.eps)
    assert isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
    return F.batch_norm(x, module.running_mean, module.running_var, None, None, False, 0.0, module.eps)


def affine_gradient(module: nn.Module, slope: Tensor, n: int) -> Tensor:
    """Sum a (n, ...) array of slopes at a norm's output over all that shares one affine entry: (n, size)."""
    if isinstance(module, nn.LayerNorm):
        return slope.reshape(n, -1, torch.Size(module.normalized_shape).numel()).sum(1)
    return slope.reshape(n, slope.shape[1], -1).sum(2)
