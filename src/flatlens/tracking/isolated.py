"""A context that isolates a measurement from the training around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from flatlens.problem.loaders import random_kept


@contextmanager
def isolated(model: nn.Module) -> Iterator[None]:
    """Turn gradients on and autocast off inside; restore every global random state afterwards.

    Trainers call their hooks under no_grad, inference mode or autocast; a dataset may draw from Python's or numpy's
    generator when read. The problem itself restores everything else (mode, buffers).
    """
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    kinds = sorted({p.device.type for p in model.parameters()} | {"cpu"})
    with ExitStack() as stack:
        stack.enter_context(random_kept(devices))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
