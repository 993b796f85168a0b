"""Linear layers as the canonical pair (phi, z) of z = W phi + b at positions p: one adapter for each type of layer.

    phi  (n, g, m, P)   features, what the weight multiplies: m entries per group, at P positions
    z    (n, g, d, P)   the layer's output: d rows per group

    Dense                  P = 1, or the tokens of a token-wise layer; g = 1
    Convolution            one position per output pixel, m = in/g * kernel; the kernel is read as g diagonal blocks
    TransposedConvolution  the same, over the input with zeros between its entries, and with the kernel mirrored

An adapter knows only the geometry. It is given weights and features: those of a module (`adapter_of`), or those that
autograd saved for one operation (`operations.parameter_uses`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LinearLayer: TypeAlias = (
    nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
)
_PLAIN = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class Adapter(ABC):
    """The geometry of z = W phi + b."""

    groups: int  #: g, the number of diagonal blocks of the weight
    kernel: tuple[int, ...]  #: sizes of the kernel; empty for a dense layer
    token_wise = False  #: whether the layer maps the last axis of its input, and nothing else

    @abstractmethod
    def matrix(self, weight: Tensor) -> Tensor:
        """Return the stored weight as W, (g, d, m)."""

    @abstractmethod
    def as_stored(self, W: Tensor, like: torch.Size) -> Tensor:
        """Return matrices (..., g, d, m) in the stored shape (..., *like)."""

    @abstractmethod
    def patches(self, x: Tensor, n: int) -> Tensor:
        """Return phi, (n, g, m, P), from the layer's input; its axis 0 counts samples, maybe folded with others."""

    @abstractmethod
    def by_position(self, z: Tensor, n: int) -> Tensor:
        """Return a tensor of the output's shape (n*w, ...) as (n, g, d, P)."""

    @abstractmethod
    def apply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the layer's linear map of x, without its bias."""

    def features(self, W: Tensor) -> int:
        """Return the number of features that feed the layer: entries of the last axis, or channels; W is (g, d, m)."""
        return self.groups * W.shape[2] // torch.Size(self.kernel).numel()

    def per_feature(self, values: Tensor) -> Tensor:
        """Return one value per feature, repeated over the kernel: (g, m)."""
        return values.repeat_interleave(torch.Size(self.kernel).numel()).reshape(self.groups, -1)


@final
@dataclass(frozen=True)
class Dense(Adapter):
    """A linear map of the last axis. With `transposed` the weight is stored as (m, d), as in transformers' Conv1D."""

    transposed: bool = False
    groups = 1
    kernel = ()
    token_wise = True

    def matrix(self, weight: Tensor) -> Tensor:
        """W, (1, d, m)."""
        return (weight.T if self.transposed else weight)[None]

    def as_stored(self, W: Tensor, like: torch.Size) -> Tensor:
        """Return W as (..., d, m), or as (..., m, d) where it is stored transposed."""
        return W.flatten(-3, -2).mT if self.transposed else W.flatten(-3, -2)

    def patches(self, x: Tensor, n: int) -> Tensor:
        """Return phi, (n, 1, m, tokens)."""
        return x.reshape(n, 1, -1, x.shape[-1]).transpose(2, 3)

    def by_position(self, z: Tensor, n: int) -> Tensor:
        """Return z as (n, 1, d, tokens)."""
        return z.reshape(n, 1, -1, z.shape[-1]).transpose(2, 3)

    def apply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return W x along the last axis."""
        return x @ weight if self.transposed else F.linear(x, weight)


@dataclass(frozen=True)
class _Windows(Adapter):
    """The common part of both kinds of convolution."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    pad: tuple[int, ...]  #: padding as F.pad takes it: two numbers for each axis, the last axis first
    dilation: tuple[int, ...]
    groups: int = 1

    def by_position(self, z: Tensor, n: int) -> Tensor:
        """Return z as (n, g, d, pixels)."""
        z = z.reshape(n, -1, self.groups, z.shape[1] // self.groups, z.shape[2:].numel())
        return z.permute(0, 2, 3, 1, 4).reshape(n, self.groups, z.shape[3], -1)

    def _windows(self, x: Tensor, n: int, stride: tuple[int, ...]) -> Tensor:
        # all windows as columns, (n*w, C K, P'); F.unfold takes no volumes: windows by views
        if len(self.kernel) == 1:
            columns = F.unfold(x[:, :, None], (1, *self.kernel), (1, *self.dilation), 0, (1, *stride))
        elif len(self.kernel) == 2:
            columns = F.unfold(x, self.kernel, self.dilation, 0, stride)
        else:
            for axis, (reach, step, gap) in enumerate(zip(self.kernel, stride, self.dilation, strict=True)):
                x = x.unfold(2 + axis, gap * (reach - 1) + 1, step)[..., ::gap]
            x = x.permute(0, 1, 5, 6, 7, 2, 3, 4)
            columns = x.reshape(len(x), -1, x.shape[5:].numel())
        columns = columns.reshape(n, -1, self.groups, columns.shape[1] // self.groups, columns.shape[2])
        return columns.permute(0, 2, 3, 1, 4).reshape(n, self.groups, columns.shape[3], -1)


@final
@dataclass(frozen=True)
class Convolution(_Windows):
    """A convolution in one, two or three dimensions."""

    mode: str = "constant"  #: padding mode of F.pad

    def matrix(self, weight: Tensor) -> Tensor:
        """Return the kernel as (g, out/g, in/g * kernel)."""
        return weight.reshape(self.groups, weight.shape[0] // self.groups, -1)

    def as_stored(self, W: Tensor, like: torch.Size) -> Tensor:
        """Return W as (..., out, in/g, *kernel)."""
        return W.reshape(*W.shape[:-3], *like)

    def patches(self, x: Tensor, n: int) -> Tensor:
        """Return the windows of the padded input."""
        return self._windows(F.pad(x, self.pad, mode=self.mode), n, self.stride)

    def apply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the convolution of the padded input."""
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(self.kernel) - 1]
        return convolve(
            F.pad(x, self.pad, mode=self.mode), weight, stride=self.stride, dilation=self.dilation, groups=self.groups
        )


@final
@dataclass(frozen=True)
class TransposedConvolution(_Windows):
    """The transpose of a convolution; `pad` crops its output, `extra` adds to the end of the output."""

    extra: tuple[int, ...] = ()

    def matrix(self, weight: Tensor) -> Tensor:
        """Return the mirrored kernel as (g, out/g, in/g * kernel), from (in, out/g, *kernel)."""
        mirrored = weight.flip(tuple(range(2, weight.ndim)))
        by_group = mirrored.reshape(self.groups, weight.shape[0] // self.groups, weight.shape[1], -1)
        return by_group.transpose(1, 2).flatten(2)

    def as_stored(self, W: Tensor, like: torch.Size) -> Tensor:
        """Return W as (..., in, out/g, *kernel)."""
        lead = W.shape[:-3]
        by_group = W.reshape(*lead, self.groups, like[1], like[0] // self.groups, -1).transpose(-3, -2)
        return by_group.reshape(*lead, *like).flip(tuple(range(-len(self.kernel), 0)))

    def patches(self, x: Tensor, n: int) -> Tensor:
        """Return the windows, with stride 1, of the input with `stride` - 1 zeros between its entries."""
        sizes = [s * (size - 1) + 1 for s, size in zip(self.stride, x.shape[2:], strict=True)]
        spread = x.new_zeros(*x.shape[:2], *sizes)
        every: tuple[Any, ...] = (..., *(slice(None, None, s) for s in self.stride))
        spread[every] = x
        reach = [d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True)]
        crop = self.pad[::-2]
        ends = [(r - c, r - c + e) for r, c, e in zip(reach, crop, self.extra, strict=True)]
        pad = [side for pair in reversed(ends) for side in pair]  # negative where the crop is larger: F.pad then crops
        return self._windows(F.pad(spread, pad), n, (1,) * len(self.kernel))

    def apply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the transposed convolution."""
        transpose = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(self.kernel) - 1]
        return transpose(
            x, weight, None, stride=self.stride, padding=self.pad[::-2], output_padding=self.extra,
            groups=self.groups, dilation=self.dilation,
        )  # fmt: skip


def both_sides(padding: tuple[int, ...]) -> tuple[int, ...]:
    """Return the same padding at both ends of each axis, as F.pad takes it.

    >>> both_sides((1, 2))
    (2, 2, 1, 1)
    """
    return tuple(side for size in reversed(padding) for side in (size, size))


def adapter_of(module: nn.Module) -> Adapter | None:
    """Return the geometry of a linear layer of torch or of transformers' Conv1D, None for any other module.

    A subclass counts as its base class: `operations.parameter_uses` checks whether its forward() does the same.
    """
    if not is_linear(module):
        return None
    if isinstance(module, _PLAIN):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        pad = tuple(module._reversed_padding_repeated_twice)
        return Convolution(module.kernel_size, module.stride, pad, module.dilation, module.groups, mode)
    if isinstance(module, TRANSPOSED):
        assert not isinstance(module.padding, str)
        return TransposedConvolution(
            module.kernel_size, module.stride, both_sides(module.padding), module.dilation, module.groups,
            module.output_padding,
        )  # fmt: skip
    return Dense(transposed=not isinstance(module, nn.Linear))


def layer_of(module: nn.Module) -> Adapter:
    """Return the geometry of a module that is known to be a linear layer."""
    found = adapter_of(module)
    assert found is not None
    return found


def is_linear(module: nn.Module) -> TypeGuard[LinearLayer]:
    """Return whether the module's type computes z = W phi + b and nothing else."""
    # transformers' Conv1D is known by its name, so that transformers is never imported
    conv1d = ("Conv1D", "transformers.pytorch_utils")
    return isinstance(module, (nn.Linear, *_PLAIN, *TRANSPOSED)) or any(
        (c.__name__, c.__module__) == conv1d for c in type(module).__mro__
    )
