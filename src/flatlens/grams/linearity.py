"""Where the outputs are (piecewise) affine in a layer's pre-activation: there the Hessian is its Gauss-Newton part.

Two witnesses must agree. The modules that ran after the layer are all of a kind known to be piecewise linear; and
the second derivative of a random combination of the outputs, along a random direction of the pre-activation, is
exactly zero on the trial samples, which exposes a curved function called outside any module.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatlens.grams.record import Tape
from flatlens.grams.twice import has_second_derivative
from flatlens.problem import is_linear

PIECEWISE_LINEAR = (
    nn.Identity, nn.Flatten, nn.Unflatten, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.Hardtanh, nn.Threshold,
    nn.Softshrink, nn.Hardshrink,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
    nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,  # in eval mode, as everything is here
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
    nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle,
    nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d,
    nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReplicationPad1d, nn.ReplicationPad2d, nn.Fold, nn.Unfold,
)  # fmt: skip


def affine_downstream(tape: Tape, total: Tensor, generator: torch.Generator) -> frozenset[str]:
    """The linear and norm calls at whose output the second derivative of `total`, a combination of outputs,
    vanishes."""
    candidates = [
        call
        for call in tape.calls()
        if all(isinstance(m, PIECEWISE_LINEAR) or is_linear(m) for m in tape.leaves[tape.before[call.key] :])
    ]
    if not candidates:
        return frozenset()
    try:
        slopes = torch.autograd.grad(total, [c.z for c in candidates], create_graph=True, allow_unused=True)
        if not has_second_derivative(slopes):
            return frozenset()
        flat = [slope is None or _flat(slope, c.z, generator) for slope, c in zip(slopes, candidates, strict=True)]
    except RuntimeError:  # an operation without a second derivative: nothing can be said
        return frozenset()
    return frozenset(call.key for call, is_flat in zip(candidates, flat, strict=True) if is_flat)


def _flat(slope: Tensor, z: Tensor, generator: torch.Generator) -> bool:
    """Whether the slope at z does not move with z, along a random direction."""
    if not slope.requires_grad:
        return True
    v = torch.randn(z.shape, generator=generator).to(z)
    (bend,) = torch.autograd.grad((v * slope).sum(), z, retain_graph=True, allow_unused=True)
    return bend is None or not bool(bend.any())
