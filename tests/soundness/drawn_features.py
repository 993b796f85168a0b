"""Stages for one kind of features: norms, tokens, signals and pictures."""

from __future__ import annotations

import torch
from drawn_layers import ChannelNorm, Same2d, Standardised2d
from drawn_stages import Factory, Kit, Stage, rare
from torch import nn
from torch.nn.utils import parametrizations


def _after(k: Kit, norm: nn.Module) -> Stage:
    return Stage(lambda s, h, x: s.act(s.norm(s.a(h))), a=k.layer(), norm=norm, act=k.act())


def _even(k: Kit) -> int:
    """Groups of the channels that come out."""
    return 2 if k.o % 2 == 0 and k.o > 2 and k.pick % 2 else 1


NORMS_OF_ROWS: dict[str, Factory] = {  # vectors and tokens
    "layer norm": lambda k: _after(k, nn.LayerNorm(k.o)),
    "rms norm": lambda k: _after(k, nn.RMSNorm(k.o, eps=1e-3)),
    "layer norm twice": lambda k: Stage(
        lambda s, h, x: s.norm(s.a(s.norm(h))), a=nn.Linear(k.i, k.i), norm=nn.LayerNorm(k.i)
    ) if k.i == k.o else _after(k, nn.LayerNorm(k.o, bias=False)),
    "a rare layer norm": lambda k: Stage(
        lambda s, h, x: (lambda z: torch.where(rare(z, x), s.norm(z), z))(s.a(h)), a=k.layer(), norm=nn.LayerNorm(k.o)
    ),
    "norm's weight, bare": lambda k: Stage(
        lambda s, h, x: s.norm(s.a(h)) + rare(h, x) * s.norm.weight, a=k.layer(), norm=nn.LayerNorm(k.o)
    ),
}  # fmt: skip

NORMS_OF_VECTORS: dict[str, Factory] = {
    "group norm": lambda k: _after(k, nn.GroupNorm(_even(k), k.o)),
    "batch norm": lambda k: _after(k, nn.BatchNorm1d(k.o)),
    "prelu by channel": lambda k: _after(k, nn.PReLU(k.o)),
}

NORMS_OF_CHANNELS: dict[str, Factory] = {
    "group norm": lambda k: _after(k, nn.GroupNorm(_even(k), k.o)),
    "batch norm": lambda k: _after(k, (nn.BatchNorm1d if k.dims == 1 else nn.BatchNorm2d)(k.o)),
    "prelu by channel": lambda k: _after(k, nn.PReLU(k.o)),
    "channel norm": lambda k: _after(k, ChannelNorm(k.o)),
    "instance norm": lambda k: _after(k, (nn.InstanceNorm1d if k.dims == 1 else nn.InstanceNorm2d)(k.o, affine=True)),
}


def _convolution(k: Kit, **options: object) -> nn.Module:
    return (nn.Conv1d if k.dims == 1 else nn.Conv2d)(k.i, k.o, **options)


def _transposed(k: Kit, **options: object) -> nn.Module:
    return (nn.ConvTranspose1d if k.dims == 1 else nn.ConvTranspose2d)(k.i, k.o, **options)


def _groups(k: Kit) -> int:
    return 2 if k.i % 2 == 0 == k.o % 2 else 1


def _of(k: Kit, layer: nn.Module) -> Stage:
    return Stage(lambda s, h, x: s.act(s.a(h)), a=layer, act=k.act())


def _mode(k: Kit) -> str:
    return k.one_of("circular", "reflect")


CONVOLUTIONS: dict[str, Factory] = {
    "grouped": lambda k: _of(k, _convolution(k, kernel_size=3, padding=1, groups=_groups(k))),
    "strided": lambda k: _of(k, _convolution(k, kernel_size=2, stride=2, padding=1)),
    "wrapped": lambda k: _of(k, _convolution(k, kernel_size=3, padding=1, padding_mode=_mode(k))),
    "same": lambda k: _of(k, _convolution(k, kernel_size=2, padding="same", padding_mode="replicate")),
    "dilated": lambda k: _of(k, _convolution(k, kernel_size=2, padding=1, dilation=2, bias=False)),
    "transposed": lambda k: _of(k, _transposed(k, kernel_size=2, stride=k.one_of(1, 2), padding=1)),
    "transposed in groups": lambda k: _of(k, _transposed(k, kernel_size=3, padding=1, groups=_groups(k))),
    "pooled": lambda k: Stage(
        lambda s, h, x: s.pool(s.act(s.a(h))),
        a=k.layer(), act=k.act(), pool=(nn.MaxPool1d if k.dims == 1 else nn.MaxPool2d)(2, 1),
    ),
    "pointwise": lambda k: _of(k, _convolution(k, kernel_size=1)),
    "weight norm": lambda k: _of(k, parametrizations.weight_norm(_convolution(k, kernel_size=2, padding=1))),
}  # fmt: skip

PICTURES: dict[str, Factory] = {
    "padded inside": lambda k: _of(k, Same2d(k.i, k.o, k.one_of(2, 3))),
    "standardised": lambda k: _of(k, Standardised2d(k.i, k.o, 3, padding=1)),
}
