"""Threads that measure one network do so one after the other.

They have its data, and what is found out about it, in common; a network that is measured in place is itself changed for
a time. Networks that share a module or a parameter count as one. Other networks may be measured meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import count
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

_LOCK = threading.Lock()
_numbers = count()
_turns: Any = WeakIdKeyDictionary()
"""By module and parameter of the networks that were measured: their `_Turn`."""


class _Turn:
    """A lock that its own thread passes, and that any thread may end.

    An RLock would stay locked for ever where a generator inside, left by an exception, is ended by another thread.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)  #: turns are taken in this order, so that no two threads wait for each other
        self.lock = threading.Lock()
        self.thread: int | None = None  #: whose turn it is

    @contextmanager
    def held(self) -> Iterator[None]:
        if self.thread == threading.get_ident():
            yield
            return
        with self.lock:
            self.thread = threading.get_ident()
            try:
                yield
            finally:
                self.thread = None


def in_turn(model: nn.Module) -> AbstractContextManager[None]:
    """Wait until no other thread measures this network; contexts of one thread may be nested.

    >>> net = nn.Linear(2, 1)
    >>> with in_turn(net), in_turn(net):
    ...     pass
    """
    own = _turns.get(model)
    return nullcontext() if own is not None and own.thread == threading.get_ident() else _taken(model)


@contextmanager
def _taken(model: nn.Module) -> Iterator[None]:
    with ExitStack() as stack:
        for turn in _of(model):
            stack.enter_context(turn.held())
        yield


def turn_together(copied: nn.Module, model: nn.Module) -> None:
    """Let a copy of a network have its turns with the network."""
    turns = _of(model)
    with _LOCK:
        _turns[copied] = turns[0]


def _of(model: nn.Module) -> list[_Turn]:
    """Return the turns of a network: one, unless it joins networks that were measured before."""
    with _LOCK:
        parts = [*model.modules(), *model.parameters()]
        known = {turn.number: turn for part in parts if (turn := _turns.get(part)) is not None}
        turns = [known[number] for number in sorted(known)] or [_Turn()]
        for part in parts:
            _turns.setdefault(part, turns[0])
        return turns


def _begin_anew() -> None:
    """Forget the turns in a forked process: the threads that had them are not there."""
    global _LOCK
    _LOCK = threading.Lock()
    for turn in list(_turns.values()):
        turn.lock, turn.thread = threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
