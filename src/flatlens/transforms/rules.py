"""Rules for each operation between two layers: which feature each entry of a tensor belongs to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flatlens.operations.layers import LinearLayer
from flatlens.operations.table import ARITHMETIC, Effect, Operation


def effect(found: Operation | None, rest: tuple[Any, ...], options: dict[str, Any]) -> tuple[Effect | None, bool]:
    """Return what an operation does to its first argument (None: unknown), and whether it is positively homogeneous."""
    if found is None:
        return None, False
    if found.name in ARITHMETIC and not options and len(rest) == 1 and isinstance(rest[0], int | float):
        return "each", found.name in ARITHMETIC[2:] and rest[0] > 0
    return found.effect, found.homogeneous


def moved(
    ids: Tensor, found: Operation, what: Any, rest: tuple[Any, ...], options: dict[str, Any], out: Tensor
) -> Tensor | None:
    """Return the feature of each entry of the output from those of the input, int64; None if an entry mixes several.

    The operation is `found`, run by `what`, a module, a function or a method's name; `rest` and `options` are its
    arguments after the input.
    """
    done, _ = effect(found, rest, options)
    if done in ("identity", "each"):
        return ids.reshape(out.shape)
    if done == "window":
        return _pooled(ids, found.axes, out)
    if done == "average":
        axes = {name: options[name] for name in ("dim", "keepdim") if name in options}
        low, high = (torch.as_tensor(pick(*rest, **axes)) for pick in (ids.amin, ids.amax))
        return low if low.shape == out.shape and torch.equal(low, high) else None
    if done == "shape":
        if isinstance(what, nn.Module):
            return torch.as_tensor(what(ids))
        name = what if isinstance(what, str) else what.__name__
        return torch.as_tensor(getattr(ids, "reshape" if name == "view" else name)(*rest, **options))
    return None


def _pooled(ids: Tensor, axes: int, out: Tensor) -> Tensor | None:
    """Return the feature of each entry after a pool; None if a window spans several features."""
    if out.ndim != ids.ndim or ids.ndim <= axes:
        return None
    corner = ids
    for axis in range(ids.ndim - axes, ids.ndim):
        corner = corner.narrow(axis, 0, 1)
    return corner.expand(out.shape) if bool((ids == corner).all()) else None


def given(module: LinearLayer, out: Tensor) -> Tensor:
    """Return the feature of each entry of a linear layer's output."""
    axis = feature_axis(module, out)
    order = torch.arange(out.shape[axis])
    return order.reshape(-1, *(1,) * (out.ndim - 1 - axis)).expand(out.shape)


def read(module: nn.Module, ids: Tensor) -> Tensor | None:
    """Return the feature of each input of a layer, or each channel of a norm; None if it reads several as one."""
    rows = ids.movedim(feature_axis(module, ids), -1)
    first = rows[(0,) * (rows.ndim - 1)]
    return first.clone() if bool((rows == first).all()) else None


def feature_axis(module: nn.Module, x: Tensor) -> int:
    """Return the axis of neurons or channels; convolutions may have no sample axis.

    >>> feature_axis(nn.Conv2d(1, 2, 3), torch.ones(5, 1, 8, 8)), feature_axis(nn.Linear(8, 2), torch.ones(5, 3, 8))
    (1, 2)
    """
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return x.ndim - 1 - len(module.kernel_size)
    return x.ndim - 1 if isinstance(module, nn.Linear) else 1
