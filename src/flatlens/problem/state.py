"""Leaving no trace: the model is put in eval mode while it is measured, and everything is put back after."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from flatlens.problem.data import checksum
from flatlens.problem.plain import (
    plain_embeddings,
    plain_hardsigmoid,
    plain_norms,
    plain_parametrizations,
    plain_weight_norms,
)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Every module is put back in its own mode, train or eval, after."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def measuring(model: nn.Module, *, batch_statistics: bool = False, tf32: bool = False) -> Iterator[None]:
    """Puts the model in eval mode, with gradients on, and all of it back in place after, also after an error.

    What torch differentiates wrongly, or once only, is computed by plain operations (`problem.plain`; attention, too).

    Float32 is float32, whatever autocast this is called under. On CUDA TF32, which torch convolves in by default and
    which keeps 10 of its 23 bits, is off but with `tf32`.
    With `batch_statistics` every BatchNorm normalises by the batch it is handed, as in training, and keeps no count.

    `.grad` is never touched: everything inside uses `torch.autograd.grad`.

    >>> net = nn.Dropout(0.5)
    >>> with measuring(net):
    ...     net.training
    False
    >>> net.training
    True
    """
    held = [(module, dict(module._buffers)) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone(), buffer._version) for buffer in model.buffers()]
    norms = [(module, module.track_running_stats) for module in model.modules() if isinstance(module, _BatchNorm)]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    fast_attention = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # it fires no hooks and has no derivative
        with (
            modes_kept(model),
            torch.random.fork_rng(devices),
            torch.inference_mode(False),
            torch.enable_grad(),
            sdpa_kernel(SDPBackend.MATH),
            torch.autocast(device_of(model).type, enabled=False),
            _tf32(tf32),
            plain_embeddings(model),
            plain_weight_norms(model),
            plain_norms(model),
            plain_hardsigmoid(),
            plain_parametrizations(),
        ):
            model.eval()
            for norm, _ in norms if batch_statistics else []:  # running statistics are neither used nor moved
                norm.training, norm.track_running_stats = True, False
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_attention)
        for module, own in held:
            module._buffers.clear()
            module._buffers.update(own)  # forward() may put another tensor in a buffer's place
        for norm, tracked in norms:
            norm.track_running_stats = tracked
        with torch.no_grad():
            for buffer, before, version in buffers:
                if buffer._version != version:
                    buffer.copy_(before)


def device_of(model: nn.Module) -> torch.device:
    """Where its first parameter is."""
    return next(model.parameters(), torch.empty(0)).device


@contextmanager
def _tf32(on: bool) -> Iterator[None]:
    """By whichever of torch's two interfaces was used before: it refuses to have them mixed."""
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    switches: list[tuple[Any, str, object]] = [(matmul, "allow_tf32", on), (cudnn, "allow_tf32", on)]
    try:
        before = [getattr(place, name) for place, name, _ in switches]
    except RuntimeError:
        how = "tf32" if on else "ieee"
        switches = [(matmul, "fp32_precision", how), (cudnn.conv, "fp32_precision", how)]
        before = [getattr(place, name) for place, name, _ in switches]
    try:
        for place, name, wanted in switches:
            setattr(place, name, wanted)
        yield
    finally:
        for (place, name, _), was in zip(switches, before, strict=True):
            setattr(place, name, was)


@contextmanager
def differentiable(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Frozen parameters can be asked for their gradient in here, too."""
    frozen = [p for p in parameters if not p.requires_grad and p.is_floating_point()]
    try:
        for p in frozen:
            p.requires_grad_()
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


def fingerprint(p: Tensor) -> tuple[int, ...]:
    """What tells that a parameter was changed: its identity, version and freezing, and its values, for writing to
    `.data` bumps no version."""
    return id(p), p.data_ptr(), p._version, p.requires_grad, checksum(p)
