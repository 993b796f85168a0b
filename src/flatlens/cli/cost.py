"""What work on a network will cost, in time and memory, told before it starts: from trials on a few of its samples."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flatlens.cli.bar import DELAY, in_words
from flatlens.cli.memory import Meter, in_gib, meter
from flatlens.cli.output import note
from flatlens.errors import BadInput

if TYPE_CHECKING:
    from flatlens.measures import Lens

FIRST, TRIAL = 2, 64
"""Samples of the first trial, which also warms up, and of the last one: doubled from 8 on while that is quick."""

SHARE = 8
"""A trial takes at most this part of the samples."""

QUICK = 2.0
"""Seconds within which a trial is followed by a longer one."""


@dataclass(frozen=True)
class Cost:
    """What a piece of work takes; in bytes, and None where it is not known."""

    seconds: float | None
    peak: float | None  #: of the whole process
    least: float | None  #: with one sample at a time
    more: float | None  #: than it has now, at the peak
    left: float | None  #: what may be taken besides


def announce(lens: Lens, work: Callable[[Lens], object], *, times: int = 1, anyway: bool = False) -> None:
    """Before work that lasts: what it consists of, how long it takes and in how much memory.

    The trials leave in `lens` what does not depend on the samples (its layout, the weights' norms).

    Raises:
        BadInput: it does not fit in memory, unless `anyway`.
    """
    problem = lens.problem
    if not anyway:
        _require_room(lens, _by_rule(lens))
    if problem.n < SHARE * FIRST:
        return
    cost = trials(lens, work)
    if not anyway:
        _require_room(lens, cost)
    if cost.seconds is None or cost.seconds * times < DELAY:
        return
    size = f"{sum(p.numel() for p in problem.model.parameters()):,} parameters, {problem.n:,} samples"
    passes = f"1 forward and {problem.outputs} backward passes"
    if lens.probes is not None:
        passes = f"{lens.probes} random combinations in place of {problem.outputs} outputs"
    networks = f"{times} measurements of " if times > 1 else ""
    shared = "" if problem.ranks.size == 1 else f", shared by {problem.ranks.size} processes"
    memory = "" if cost.peak is None else f", in about {in_gib(cost.peak)} of memory{' each' * bool(shared)}"
    memory += "" if cost.left is None or not memory else f" ({in_gib(cost.left)} are left beside what is taken now)"
    note(f"{networks}{size}, {passes}{shared}: about {in_words(cost.seconds * times)}{memory}")


def trials(lens: Lens, work: Callable[[Lens], object]) -> Cost:
    """Work on a few samples, then on more of them while that is quick; time and memory follow lines through these."""
    gauge = _gauge(lens)
    points: list[tuple[int, float, float | None]] = []
    most = min(TRIAL, lens.problem.n // SHARE)
    count = FIRST
    while True:
        few = _few(lens, count)
        gauge.begin()
        start = time.monotonic()
        work(few)
        seconds = time.monotonic() - start
        points.append((few.problem.n, seconds, gauge.peak()))
        if seconds * lens.problem.n / few.problem.n < DELAY or (len(points) > 1 and (seconds > QUICK or count >= most)):
            break
        count = min(most, 8 if len(points) == 1 else 2 * count)
    return _extrapolated(lens, points, gauge)


def _few(lens: Lens, count: int) -> Lens:
    """A lens on the first samples, which shares what was found about the network."""
    import flatlens as fl
    from flatlens.problem.ranks import ALONE

    some = next(lens.problem.data.chunks(count))
    few = lens.problem.with_changes(data=some, test=None, batchnorm="eval", ghost_batch=None, ranks=ALONE)
    found = fl.Lens(few, outputs=lens.probes or "exact")
    found.layout = lens.layout  # with the norms of its weights, once they are known
    return found


def _extrapolated(lens: Lens, points: list[tuple[int, float, float | None]], gauge: Meter) -> Cost:
    n, seconds, peak = points[-1]
    cost = _by_rule(lens)
    if len(points) > 1:
        # the first trial warms up and pays for what is kept: it says nothing of the time
        cost = replace(cost, seconds=seconds * _times(lens, n) / lens.problem.ranks.size)
    used = gauge.used()
    if peak is None or used is None:
        return cost
    whole, last, first = (chunk(lens, size) for size in (lens.problem.n, n, points[0][0]))
    slope = max(0.0, peak - (points[0][2] or peak)) / (last - first) if last > first else _per_sample(lens)
    most = peak + slope * (whole - last)
    return replace(cost, peak=most, least=max(float(used), most - slope * (whole - 1)), more=max(0.0, most - used))


def _times(lens: Lens, n: int) -> float:
    """How many times a trial on `n` samples goes into the work.

    Some of a chunk's time is for its samples, some for itself, the more the larger the weights: a trial smaller than a
    chunk lies between the ratio of samples and that of chunks, and is taken in the middle.
    """
    whole = lens.problem.n
    samples, chunks = (whole / n, math.ceil(whole / chunk(lens, whole)) / math.ceil(n / chunk(lens, n)))
    return math.sqrt(samples * chunks)


def _by_rule(lens: Lens) -> Cost:
    """Memory as the plan of the pass has it: slopes and Grams of a chunk, the weights once more in float64."""
    gauge = _gauge(lens)
    fixed = 8.0 * sum(p.numel() for p in lens.problem.model.parameters())
    more = fixed + _per_sample(lens) * chunk(lens, lens.problem.n)
    used = gauge.used()
    if used is None:
        return Cost(None, None, None, more, gauge.left())
    return Cost(None, used + more, used + fixed + _per_sample(lens), more, gauge.left())


def chunk(lens: Lens, n: int) -> int:
    """How many of `n` samples a pass looks at together."""
    from flatlens.grams.one_pass import PASS_CHUNK

    return min(n, PASS_CHUNK, lens.layout.samples_at_once(lens.problem.memory, _rows(lens)))


def _per_sample(lens: Lens) -> float:
    return float(lens.layout.bytes_per_sample(_rows(lens)))


def _rows(lens: Lens) -> int:
    return lens.problem.outputs if lens.probes is None else 2


def _gauge(lens: Lens) -> Meter:
    """Of the device that the network is on."""
    from flatlens.problem.state import device_of

    return meter(device_of(lens.problem.model))


def _require_room(lens: Lens, cost: Cost) -> None:
    """Refuse what will not fit, with what would make it fit."""
    if cost.more is None or cost.left is None or cost.more <= cost.left:
        return
    advice = []
    spared = (cost.peak or 0.0) - (cost.least or 0.0)
    if cost.more - spared <= cost.left:
        fits = max(1.0, 0.5 * (cost.left - (cost.more - spared)))
        advice.append(f"--memory {max(1, int(fits / 2**20))}MiB looks at fewer samples at a time")
    if lens.probes is None and lens.problem.outputs > 2:
        few = min(16, lens.problem.outputs - 1)
        advice.append(f"--outputs {few} takes random combinations of the {lens.problem.outputs} outputs")
    advice.append("--parameters a part of the network; --anyway tries all the same")
    raise BadInput(
        f"memory: this takes about {in_gib(cost.more)} more than now, and {in_gib(cost.left)} are left: "
        f"{'; '.join(advice)}"
    )
