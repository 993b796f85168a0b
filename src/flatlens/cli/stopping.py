"""Ctrl-C and SIGTERM: one line, and the process ends within two seconds, whatever it is doing.

Python runs a signal's handler between two of its own instructions, so a long call into torch delays it. Therefore the
signal itself wakes a thread, which ends the process if the handler could not. Nothing is lost: files that are not yet
complete have temporary names.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE = 1.2
"""Seconds in which a command may end by itself; then the process is ended."""

_grace = GRACE
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
    before = [signal.signal(number, _interrupt) for number in SIGNALS]
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(read,), daemon=True).start()
    try:
        yield
    finally:
        if not _received:
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


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _received
    if not _received:  # only once: a second signal must not interrupt the clean-up
        _received = number
        raise KeyboardInterrupt


def _watch(read: int) -> None:
    while content := os.read(read, 1):
        if content[0] in SIGNALS:
            time.sleep(_grace)
            _end(content[0])
    os.close(read)


def _end(number: int) -> NoReturn:
    with suppress(OSError):
        if os.isatty(2):
            os.write(2, b"\r\x1b[?25h")  # a bar hides the cursor
        if not _said.is_set():
            os.write(2, b"flatlens: stopped\n")
    _end_workers()
    os._exit(128 + number)


def _end_workers() -> None:
    """End loky's tracker, which would complain about leftovers, and remove these: semaphores with our process id."""
    tracker = sys.modules.get("loky.backend.resource_tracker")
    process = getattr(getattr(tracker, "_resource_tracker", None), "_pid", None)
    if process is None:
        return
    with suppress(OSError):
        os.kill(process, signal.SIGKILL)
    for semaphore in Path("/dev/shm").glob(f"sem.loky-{os.getpid()}-*"):
        with suppress(OSError):
            semaphore.unlink()
