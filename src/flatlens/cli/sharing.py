"""Several processes that share one measurement under `torchrun`: they meet, one prints, and they end together."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from flatlens.cli.output import visible
from flatlens.errors import BadInput, LostRank, one_line

if TYPE_CHECKING:
    from types import FrameType

    from torch._C._distributed_c10d import Store

    from flatlens.problem.ranks import Ranks

SHARED = ("measure",)
"""The commands whose work can be shared."""

_store: Store | None = None
"""The store at which the processes meet; torchrun itself holds it, so that it outlives them."""


def launched() -> bool:
    """Return whether torchrun started this process among others."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def ranks() -> Ranks:
    """Return the processes that share the work; this one alone without torchrun."""
    from flatlens.problem.ranks import ALONE, Ranks

    return Ranks.joined() if launched() else ALONE


@contextmanager
def together(arguments: Sequence[str]) -> Iterator[None]:
    """Wait for all processes before a command, and silence all but the first during it."""
    if not launched():
        yield
        return
    from torch import distributed as dist
    from torch.distributed.rendezvous import rendezvous

    from flatlens.problem.ranks import Ranks

    global _store
    _store, *_ = next(rendezvous("env://"))
    signal.signal(signal.SIGTERM, _ended)  # torchrun sends SIGTERM to the others when one has failed
    me = Ranks.joined(_store)
    if arguments[:1] and arguments[0] not in SHARED:
        raise BadInput(f"torchrun: `flatlens {arguments[0]}` cannot use several processes: run it without torchrun")
    with ExitStack() as stack:
        if me.rank:
            nowhere = stack.enter_context(Path(os.devnull).open("w"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        yield
    dist.destroy_process_group()


def _ended(number: int, frame: FrameType | None) -> Never:
    from flatlens.problem.ranks import GONE

    raise LostRank(GONE)


def first_to_speak() -> bool:
    """Return whether no process has said yet why it ends."""
    try:
        return _store is None or _store.add("flatlens/said", 1) == 1
    except RuntimeError:  # the store is gone, too
        return True


def local(device: str) -> Any:
    """Return the torch device of that name; with several processes on one machine, each has its own CUDA device."""
    import torch

    try:
        found = torch.device(device)
        if found.type == "cuda" and found.index is None and launched():
            found = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if found.type == "meta":
            raise RuntimeError("tensors have no values there")
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, ValueError, OverflowError) as error:
        raise BadInput(f"--device {device}: it cannot be used here ({one_line(error, 120)})") from error
    return found


def speak(message: str) -> None:
    """Print one line on the true stderr, once for all processes."""
    if first_to_speak():
        print(f"flatlens: {visible(message)}", file=sys.__stderr__ if launched() else sys.stderr, flush=True)
