"""Leaving no trace: the model is put in eval mode while it is measured, and everything is put back after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Eval mode, gradients on, attention differentiable twice; mode, buffers and RNG are restored, also after an error.

    `.grad` is never touched: everything inside uses `torch.autograd.grad`.

    >>> net = nn.Dropout(0.5)
    >>> with measuring(net):
    ...     net.training
    False
    >>> net.training
    True
    """
    modes = [(module, module.training, dict(module._buffers)) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone(), buffer._version) for buffer in model.buffers()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    fast_attention = torch.backends.mha.get_fastpath_enabled()
    try:
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)  # it fires no hooks and has no derivative
        with (
            torch.random.fork_rng(devices),
            torch.inference_mode(False),
            torch.enable_grad(),
            sdpa_kernel(SDPBackend.MATH),
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_attention)
        for module, mode, held in modes:
            module.training = mode
            module._buffers.clear()
            module._buffers.update(held)  # forward() may put another tensor in a buffer's place
        with torch.no_grad():
            for buffer, before, version in buffers:
                if buffer._version != version:
                    buffer.copy_(before)
