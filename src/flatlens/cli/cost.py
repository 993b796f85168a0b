"""The expected time and memory of long work: announced before it, or printed in its place with `--dry-run`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from flatlens.cli.terminal import note, show, show_json
from flatlens.errors import BadInput, FlatlensError, TooLong
from flatlens.memory import in_gib
from flatlens.progress_bar import DELAY

if TYPE_CHECKING:
    from flatlens.forecast import Cost, Forecast
    from flatlens.measures import Lens


_P = ParamSpec("_P")
_T = TypeVar("_T")


def announce(lens: Lens, work: Callable[[Lens], object], *, times: int = 1, anyway: bool = False) -> Forecast:
    """Announce long work before it starts: its size, its time and its memory.

    Raises:
        BadInput: the work does not fit in memory, or a trial of it would take too long, and not `anyway`.
    """
    from flatlens.forecast import FIRST, SHARE, by_rule, forecast

    expected = by_rule(lens)
    if not anyway:
        _require_room(lens, expected)
    if lens.problem.n < SHARE * FIRST:
        return expected
    try:
        expected = forecast(lens, work, short=DELAY)
    except TooLong as error:
        if not anyway:
            raise
        takes = error.what[0] if isinstance(error.what, tuple) else error.what  # without the limit
        note(f"on a few of the samples, {error.but(what=takes, remedy='')}")
        return expected
    except FlatlensError:  # a few samples may all have ignored labels, or be too few for batch statistics
        return expected
    if not anyway:
        _require_room(lens, expected)
    if (expected.seconds or 0.0) * times >= DELAY:
        found = expected.cost(lens, times)
        each = " each" * (lens.problem.ranks.size > 1)
        note(f"{found.size}: {repr(found).replace(' of memory', f' of memory{each}')}")
    return expected


class DryRun(Exception):
    """The end of a command with --dry-run, from within its work: `show` prints the cost, as JSON or as text."""

    def __init__(self, show: Callable[[bool], int]) -> None:
        self.show = show


def or_cost(command: Callable[_P, _T]) -> Callable[_P, _T | int]:
    """Return a command that shows what its work costs where this is all that is asked for."""

    @wraps(command)
    def either(*given: _P.args, **options: _P.kwargs) -> _T | int:
        try:
            return command(*given, **options)
        except DryRun as end:
            return end.show(bool(options.get("as_json")))

    return either


def foretold(lens: Lens, work: Callable[[Lens], object], *, times: int = 1) -> Cost:
    """Return what the work costs, without doing it on more than a few samples."""
    from flatlens.forecast import forecast

    found = forecast(lens, work, whole=True).cost(lens, times)
    return found if lens.problem.ranks.size == 1 else replace(found, work=f"{found.work}; memory of each process")


def show_cost(cost: Cost, as_json: bool) -> int:
    """Print the cost in place of the work: the answer, what it depends on, and what it goes to."""
    answer = cost.answer
    if as_json:
        told = {"seconds": cost.seconds, "memory": cost.memory, "free": cost.free, "products": cost.products}
        show_json({"answer": [answer], **told, "size": cost.size, "measures": cost.frame().to_dict("records")})
        return 0
    from flatlens.report.screen import Fitted

    table = Fitted("By measure", names=["measure"], values=["seconds", "products"])
    for row in cost.frame().to_dict("records"):
        table.row(row["measure"], f"{row['seconds']:.2g}", str(row["products"]))
    free = "" if math.isnan(cost.free) else f"{in_gib(cost.free)} of memory is free. "
    show(answer, f"{free}Only trials on a few samples were run.", table)
    return 0


def _require_room(lens: Lens, expected: Forecast) -> None:
    if expected.more is None or expected.left is None or expected.more <= expected.left:
        return
    advice = []
    spared = (expected.peak or 0.0) - (expected.least or 0.0)
    if expected.more - spared <= expected.left:
        fits = max(1.0, 0.5 * (expected.left - (expected.more - spared)))
        advice.append(f"--memory {max(1, int(fits / 2**20))}MiB takes fewer samples at a time")
    if lens.probes is None and lens.problem.outputs > 2:
        few = min(16, lens.problem.outputs - 1)
        advice.append(f"--outputs {few} takes random combinations of the {lens.problem.outputs} outputs")
    advice.append("--parameters NAMES measures a part of the network; --anyway starts it although memory may run out")
    raise BadInput(
        f"memory: this needs about {in_gib(expected.more)} more, but only {in_gib(expected.left)} is free: "
        f"{'; '.join(advice)}"
    )
