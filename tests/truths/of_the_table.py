"""The modules of the table of operations: `SETTINGS` has the arguments of classes that need some."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flatlens.operations.table import OPERATIONS, Operation

SETTINGS: dict[type[nn.Module], tuple[Any, ...]] = {
    nn.Threshold: (0.1, 2.0), nn.Unflatten: (1, (2, 3)), nn.PixelShuffle: (2,), nn.PixelUnshuffle: (2,),
    nn.ChannelShuffle: (2,), nn.Linear: (6, 3), nn.BatchNorm1d: (6,), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (4,),
    **{getattr(nn, f"{name}{d}d"): (4, 2, 2) for name in ("Conv", "ConvTranspose") for d in (1, 2, 3)},
    **{getattr(nn, f"{name}{d}d"): (2,) for name in ("AvgPool", "MaxPool", "AdaptiveAvgPool", "AdaptiveMaxPool")
       for d in (1, 2, 3)},
}  # fmt: skip


def modules(one: Operation) -> list[type[nn.Module]]:
    return [getattr(nn, name) for name in one.called.split() if hasattr(nn, name)]


def made(module: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    net = module(*SETTINGS.get(module, ())).double().eval()
    if hasattr(net, "running_var"):
        net.running_mean.normal_()
        net.running_var.uniform_(0.5, 2.0)
    return net


ACTIVATIONS = [made(module) for one in OPERATIONS if one.activation is not None for module in modules(one)]
"""An activation of each entry that has one."""
