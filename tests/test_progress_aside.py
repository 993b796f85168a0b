"""Side outputs that fail: one warning, and the work goes on."""

from __future__ import annotations

import errno
import warnings

import pytest

from flatlens.progress import Aside, SideOutputFailed

FULL = OSError(errno.ENOSPC, "No space left on device")
FAILURES = [FULL, ValueError("I/O operation on closed file"), BrokenPipeError(), MemoryError(), KeyError("key")]


@pytest.mark.parametrize("error", FAILURES, ids=repr)
def test_the_first_failure_is_told_and_each_moment_is_tried(error: Exception) -> None:
    fails, tried = [False, True, True, False], []

    def log(number: int) -> None:
        tried.append(number)
        if fails[number]:
            raise error

    aside = Aside("the log", log)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert [aside(number) for number in range(4)] == [not one for one in fails]
    assert tried == [0, 1, 2, 3]
    assert [one.category for one in told] == [SideOutputFailed]
    assert type(error).__name__ in str(told[0].message)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_what_stops_the_work_stops_it(error: BaseException) -> None:
    def log() -> None:
        raise error

    with pytest.raises(type(error)):
        Aside("the log", log)()
