"""The life of the command's process: Ctrl-C and SIGTERM end it within two seconds, and torchrun starts several.

Processes that share one measurement meet at a store, one of them prints, and they end together.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Never

from flatlens.errors import BadInput, LostRank, one_line
from flatlens.progress import visible

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from flatlens.problem.ranks import Ranks


SIGNALS = (signal.SIGINT, signal.SIGTERM)
_grace = 1.2  #: seconds in which a command may end by itself; then the process is ended
_TRACKER_IN_SILENCE = "ignore::UserWarning:loky.backend.resource_tracker"
"""For the process that removes the semaphores of a command that was stopped, and says so on our stderr."""
_received = 0
_said = threading.Event()


@contextmanager
def stoppable() -> Iterator[None]:
    """Turn the first signal into a KeyboardInterrupt; end the process if that does not."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read, write = os.pipe()
    os.set_blocking(write, False)

    def interrupt(number: int, frame: FrameType | None) -> None:
        global _received
        if not _received:  # only once: a second signal must not interrupt the clean-up
            _received = number
            raise KeyboardInterrupt

    def watch() -> None:
        while content := os.read(read, 1):
            if content[0] not in SIGNALS:
                continue
            time.sleep(_grace)
            with suppress(OSError):
                if os.isatty(2):
                    os.write(2, b"\r\x1b[?25h")  # a bar hides the cursor
                if not _said.is_set():
                    os.write(2, b"flatlens: stopped\n")
            os._exit(128 + content[0])
        os.close(read)

    before = [signal.signal(number, interrupt) for number in SIGNALS]
    warned = os.environ.get("PYTHONWARNINGS", "")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [warned, _TRACKER_IN_SILENCE]))
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        if not _received:
            os.environ["PYTHONWARNINGS"] = warned
            signal.set_wakeup_fd(-1)
            os.close(write)
            for number, handler in zip(SIGNALS, before, strict=True):
                signal.signal(number, handler)


def stopped() -> int:
    """Return the exit status of a stopped command (130 by Ctrl-C, 143 by SIGTERM); record that it printed its line."""
    _said.set()
    return 128 + (_received or signal.SIGINT)


@contextmanager
def patient(seconds: float) -> Iterator[None]:
    """Give the process this many seconds to end: jobs on other machines have to be cancelled."""
    global _grace
    before, _grace = _grace, seconds
    try:
        yield
    finally:
        _grace = before


SHARED = ("measure",)  #: the commands whose work can be shared
JOIN = "--ranks"  #: the option that joins processes which another program than torchrun has started
HELP = ("--help", "-h", "--version")

SILENT, PATIENCE = 5.0, 300.0
"""Seconds of waiting for the other processes before a line says so, and before this one gives up."""

_store: Store | None = None
"""The store at which the processes meet; torchrun itself holds it, so that it outlives them."""


def launched() -> bool:
    """Return whether this process is one of several: torchrun started it, or --ranks says so.

    RANK and WORLD_SIZE alone say nothing: a job of Slurm, or a training, hands them on to all that it starts.
    """
    arguments = sys.argv[1:]
    if not arguments or set(HELP) & set(arguments):
        return False
    asked = JOIN in arguments or "TORCHELASTIC_RUN_ID" in os.environ
    return asked and _number("RANK") is not None and (_number("WORLD_SIZE") or 1) > 1


def _number(variable: str) -> int | None:
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else None


def ranks() -> Ranks:
    """Return the processes that share the work; this one alone without torchrun."""
    from flatlens.problem.ranks import ALONE, Ranks

    return Ranks.joined() if launched() else ALONE


@contextmanager
def together(arguments: Sequence[str]) -> Iterator[None]:
    """Wait for all processes before a command, and silence all but the first during it."""
    if not launched():
        if JOIN in arguments and None in (_number("RANK"), _number("WORLD_SIZE")) and not set(HELP) & set(arguments):
            raise BadInput(
                f"{JOIN} reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment: "
                f"leave {JOIN} out for a single process"
            )
        yield
        return
    from torch import distributed as dist

    me = _met()
    if arguments[:1] and arguments[0] not in SHARED:
        raise BadInput(f"torchrun: `flatlens {arguments[0]}` cannot use several processes: run it without torchrun")
    with ExitStack() as stack:
        if me.rank:
            nowhere = stack.enter_context(Path(os.devnull).open("w"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        yield
    dist.destroy_process_group()


def _met() -> Ranks:
    from torch.distributed.rendezvous import rendezvous

    from flatlens.problem.ranks import GONE, Ranks

    def ended(number: int, frame: FrameType | None) -> Never:
        raise LostRank(GONE)

    global _store
    rank, size, end = os.environ["RANK"], int(os.environ["WORLD_SIZE"]), time.monotonic() + PATIENCE
    waiting = f"process {rank} of {size} waits for the others, at most {PATIENCE:g} s: {SILENT:g} s so far"
    telling = threading.Timer(SILENT, lambda: print(f"flatlens: {waiting}", file=sys.__stderr__, flush=True))
    telling.daemon = True
    telling.start()
    try:
        _store, *_ = next(rendezvous("env://", timeout=timedelta(seconds=PATIENCE)))
        signal.signal(signal.SIGTERM, ended)  # torchrun sends SIGTERM to the others when one has failed
        _store.set(f"flatlens/here/{rank}", "")
        while not _store.check([f"flatlens/here/{other}" for other in range(size)]):
            if time.monotonic() > end:
                raise ValueError(f"they did not come within {PATIENCE:g} s")
            time.sleep(0.05)
    except (RuntimeError, ValueError) as error:
        raise LostRank(
            f"process {rank} of {size} did not meet the others ({one_line(error, 120)}): for a single process, remove "
            f"RANK, WORLD_SIZE and TORCHELASTIC_RUN_ID from the environment"
        ) from error
    finally:
        telling.cancel()
    return Ranks.joined(_store)


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
        raise BadInput(f"--device {device}: cannot be used here ({one_line(error, 120)})") from error
    return found


def speak(message: str) -> None:
    """Print one line on the true stderr, once for all processes."""
    try:
        first = _store is None or _store.add("flatlens/said", 1) == 1
    except RuntimeError:  # the store is gone, too
        first = True
    if first:
        print(f"flatlens: {visible(message)}", file=sys.__stderr__ if launched() else sys.stderr, flush=True)
