"""Networks inside torch's wrappers: torch.compile, DataParallel, DistributedDataParallel."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

_T = TypeVar("_T")


def unwrapped(model: _T) -> _T:
    """Return the network inside torch's wrappers, with its own names of layers; anything else unchanged.

    >>> net = nn.Linear(2, 1)
    >>> unwrapped(nn.DataParallel(net)) is net
    True
    """
    while isinstance(model, nn.Module):
        parallel = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
        inner = model._modules.get("module" if parallel else "_orig_mod")  # the latter: torch.compile's
        if inner is None or (not parallel and type(model).__name__ != "OptimizedModule"):
            break
        model = inner  # type: ignore[assignment]
    return model


@contextmanager
def eager() -> Iterator[None]:
    """Run what torch.compile has compiled as it is written.

    Compiled code calls no hooks and has no second derivative.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
