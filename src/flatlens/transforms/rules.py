"""What each operation between two layers does to features: acts on each by itself, keeps their scale, moves them.

Positively homogeneous: op(a x) = a op(x) for a > 0. Rescalings need that; a permutation only that every feature is
treated alike and by itself.
"""

from __future__ import annotations

import operator
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from flatlens.problem import LinearLayer

Effect: TypeAlias = Literal["homogeneous", "elementwise", "pooling", "shape", "average"]

HOMOGENEOUS = (
    nn.Identity, nn.ReLU, nn.LeakyReLU, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
    F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_", F.leaky_relu, F.leaky_relu_, F.dropout,
    operator.neg, torch.neg, "neg", torch.abs, "abs", "contiguous", "clone", torch.clone,
)  # fmt: skip
"""Dropout is, in eval mode."""
ELEMENTWISE = (
    nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.SELU, nn.CELU, nn.Softplus, nn.Softsign, nn.LogSigmoid,
    nn.ReLU6, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Hardshrink, nn.Softshrink, nn.Tanhshrink,
    torch.tanh, F.tanh, "tanh", "tanh_", torch.sigmoid, F.sigmoid, "sigmoid", "sigmoid_", F.gelu, F.silu, F.mish,
    F.elu, F.selu, F.celu, F.softplus, F.softsign, F.logsigmoid, F.relu6, F.hardtanh, F.hardswish, F.hardsigmoid,
    F.hardshrink, F.softshrink, F.tanhshrink, torch.exp, "exp", torch.square, "square", torch.sin, torch.cos,
    F.threshold,
)  # fmt: skip
SCALING = (operator.mul, operator.imul, operator.truediv, operator.itruediv, torch.mul, torch.div, "mul", "div")
SHIFTING = (operator.add, operator.iadd, operator.sub, operator.isub, torch.add, torch.sub, "add", "add_", "sub")
SHAPES = (
    nn.Flatten, nn.Unflatten, torch.flatten, "flatten", torch.reshape, "reshape", "view", torch.permute, "permute",
    torch.transpose, "transpose", torch.squeeze, "squeeze", torch.unsqueeze, "unsqueeze", torch.movedim, "movedim",
)  # fmt: skip
AVERAGES = (torch.mean, "mean", torch.sum, "sum", torch.amax, "amax")
POOLS: dict[Any, int] = {
    nn.MaxPool1d: 1, nn.MaxPool2d: 2, nn.MaxPool3d: 3, nn.AvgPool1d: 1, nn.AvgPool2d: 2, nn.AvgPool3d: 3,
    nn.AdaptiveAvgPool1d: 1, nn.AdaptiveAvgPool2d: 2, nn.AdaptiveAvgPool3d: 3,
    nn.AdaptiveMaxPool1d: 1, nn.AdaptiveMaxPool2d: 2, nn.AdaptiveMaxPool3d: 3,
    F.max_pool1d: 1, F.max_pool2d: 2, F.max_pool3d: 3, F.avg_pool1d: 1, F.avg_pool2d: 2, F.avg_pool3d: 3,
    F.adaptive_avg_pool1d: 1, F.adaptive_avg_pool2d: 2, F.adaptive_avg_pool3d: 3,
    F.adaptive_max_pool1d: 1, F.adaptive_max_pool2d: 2, F.adaptive_max_pool3d: 3,
}  # fmt: skip
"""Pools over windows of the last so many axes."""

LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def effect(kind: Any, arguments: tuple[Any, ...]) -> Effect | None:
    """What an operation, a module's type, a function or a method's name, does to its first argument; None: unknown.

    >>> effect(nn.ReLU, ()), effect(torch.tanh, ()), effect(nn.Softmax, ())
    ('homogeneous', 'elementwise', None)
    """
    if kind in HOMOGENEOUS:
        return "homogeneous"
    if kind in ELEMENTWISE:
        return "elementwise"
    if kind in POOLS:
        return "pooling"
    if kind in SHAPES:
        return "shape"
    if kind in AVERAGES:
        return "average"
    if len(arguments) == 2 and isinstance(arguments[1], int | float):  # by a number, not by another tensor
        return "homogeneous" if kind in SCALING and arguments[1] > 0 else "elementwise" if kind in _BY_NUMBER else None
    return None


_BY_NUMBER = (*SCALING, *SHIFTING)


def moved(ids: Tensor, kind: Any, what: Any, node: fx.Node, rest: tuple[Any, ...], out: Tensor) -> Tensor | None:
    """Which feature each entry of the output is of, from the same of the input; None where an entry is of several.

    Args:
        ids: The feature of every entry of the input, int64.
        kind: The operation's key: a module's type, a function, a method's name.
        what: The module, or the function.
        node: Its place in the graph; its keyword arguments.
        rest: Its positional arguments after the input.
        out: What it gives.
    """
    done = effect(kind, (ids, *rest))
    if done in ("homogeneous", "elementwise"):
        return ids.reshape(out.shape)
    if done == "pooling":
        return _pooled(ids, POOLS[kind], out)
    if done == "average":
        options: dict[str, Any] = {name: node.kwargs[name] for name in ("dim", "keepdim") if name in node.kwargs}
        low, high = (torch.as_tensor(pick(*rest, **options)) for pick in (ids.amin, ids.amax))
        return low if low.shape == out.shape and torch.equal(low, high) else None
    if done == "shape":
        if isinstance(what, nn.Module):
            return torch.as_tensor(what(ids))
        name = kind if isinstance(kind, str) else kind.__name__
        return torch.as_tensor(getattr(ids, "reshape" if name == "view" else name)(*rest, **node.kwargs))
    return None


def _pooled(ids: Tensor, axes: int, out: Tensor) -> Tensor | None:
    """Windows must lie within a feature."""
    if out.ndim != ids.ndim or ids.ndim <= axes:
        return None
    corner = ids
    for axis in range(ids.ndim - axes, ids.ndim):
        corner = corner.narrow(axis, 0, 1)
    return corner.expand(out.shape) if bool((ids == corner).all()) else None


def given(module: LinearLayer, out: Tensor) -> Tensor:
    """Which feature each entry of a linear layer's output is of."""
    axis = feature_axis(module, out)
    order = torch.arange(out.shape[axis])
    return order.reshape(-1, *(1,) * (out.ndim - 1 - axis)).expand(out.shape)


def read(module: nn.Module, ids: Tensor) -> Tensor | None:
    """Which feature each input of a layer, or each channel of a norm, is of; None where it reads several as one."""
    rows = ids.movedim(feature_axis(module, ids), -1)
    first = rows[(0,) * (rows.ndim - 1)]
    return first.clone() if bool((rows == first).all()) else None


def feature_axis(module: nn.Module, x: Tensor) -> int:
    """The axis of neurons or channels; convolutions may go without a sample axis.

    >>> feature_axis(nn.Conv2d(1, 2, 3), torch.ones(5, 1, 8, 8)), feature_axis(nn.Linear(8, 2), torch.ones(5, 3, 8))
    (1, 2)
    """
    if isinstance(module, nn.Linear):
        return x.ndim - 1
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return x.ndim - 1 - len(module.kernel_size)
    return 1
