"""Networks inside torch's wrappers: torch.compile, DataParallel, DistributedDataParallel."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from flatlens.problem.plain import held_by_all, plain_control_flow

_T = TypeVar("_T")


def unwrapped(model: _T) -> _T:
    """Return the network inside torch's wrappers, with its own names of layers; anything else unchanged.

    >>> net = nn.Linear(2, 1)
    >>> unwrapped(nn.DataParallel(net)) is net
    True
    """
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif _is_compiled(model):
            model = model._orig_mod  # type: ignore[attr-defined]
        else:
            return model


def _is_compiled(model: object) -> bool:
    """Return whether torch.compile made this; without its module, whose import takes a second, nothing is compiled."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and isinstance(model, dynamo.OptimizedModule)


@contextmanager
def eager() -> Iterator[None]:
    """Run what torch.compile has compiled as it is written, and torch's control flow in Python.

    Compiled code calls no hooks and has no second derivative.
    """
    compiled = "torch._dynamo" in sys.modules  # else nothing is compiled
    as_written = partial(torch.compiler.set_stance, "force_eager")
    with plain_control_flow(), held_by_all("eager", as_written) if compiled else nullcontext():
        yield
