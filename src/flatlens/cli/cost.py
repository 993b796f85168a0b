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

OF_AN_OUTPUT = 12 * 8
"""Bytes of each sample's outputs: losses, their slopes and the combinations hold some dozen copies in float64."""

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


def announce(lens: Lens, work: Callable[[Lens], object], *, times: int = 1, anyway: bool = False) -> Cost:
    """Before work that lasts: what it consists of, how long it takes and in how much memory.

    The trials leave in `lens` what does not depend on the samples (its layout, the weights' norms).

    Raises:
        BadInput: it does not fit in memory, unless `anyway`.
    """
    problem, cost = lens.problem, _by_rule(lens)
    if not anyway:
        _require_room(lens, cost)
    if problem.n < SHARE * FIRST:
        return cost
    cost = trials(lens, work)
    if not anyway:
        _require_room(lens, cost)
    if cost.seconds is None or cost.seconds * times < DELAY:
        return cost
    size = f"{sum(p.numel() for p in problem.model.parameters()):,} parameters, {problem.n:,} samples"
    passes = f"1 forward and {problem.outputs} backward passes"
    if lens.probes is not None:
        passes = f"{lens.probes} random combinations in place of {problem.outputs} outputs"
    networks = f"{times} measurements of " if times > 1 else ""
    shared = "" if problem.ranks.size == 1 else f", shared by {problem.ranks.size} processes"
    memory = "" if cost.peak is None else f", in about {in_gib(cost.peak)} of memory{' each' * bool(shared)}"
    memory += "" if cost.left is None or not memory else f" ({in_gib(cost.left)} are left beside what is taken now)"
    note(f"{networks}{size}, {passes}{shared}: about {in_words(cost.seconds * times)}{memory}")
    return cost


@dataclass(frozen=True)
class _Trial:
    """What work on a few samples took; in bytes, and None where it cannot be told."""

    n: int
    seconds: float
    grown: float | None  #: at the peak, over what was taken before
    results: int  #: what is left of it


def trials(lens: Lens, work: Callable[[Lens], object]) -> Cost:
    """Work on a few samples, then on more of them while that is quick; time and memory follow lines through these."""
    gauge = _gauge(lens)
    before = gauge.peak()
    done: list[_Trial] = []
    most = min(TRIAL, lens.problem.n // SHARE)
    count = FIRST
    while True:
        last = _tried(_few(lens, count), work, gauge)
        done.append(last)
        enough = len(done) > 1 and (last.seconds > QUICK or count >= most)
        if enough or last.seconds * lens.problem.n / last.n < DELAY:
            break
        count = min(most, 8 if len(done) == 1 else 2 * count)
    gauge.begin()
    cost = _extrapolated(lens, done, gauge)
    return cost if cost.peak is None else replace(cost, peak=max(cost.peak, before or 0))


def _tried(few: Lens, work: Callable[[Lens], object], gauge: Meter) -> _Trial:
    begun, used, start = gauge.begin(), gauge.used(), time.monotonic()
    found = work(few)
    seconds, peak = time.monotonic() - start, gauge.peak()
    grown = None if not begun or peak is None or used is None else float(max(0, peak - used))
    return _Trial(few.problem.n, seconds, grown, _held(few, found))


def _held(lens: Lens, found: object) -> int:
    """Bytes of the values per sample that a lens and a report keep."""
    from flatlens.estimate import Report

    kept = [*lens.per_sample([]).values(), *lens.residuals.values()]
    if isinstance(found, Report):
        kept += [tensor for e in found.values() for tensor in (e.samples, *e.arrays.values()) if tensor is not None]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in kept}.values())


def _few(lens: Lens, count: int) -> Lens:
    """A lens on the first samples, which shares what was found about the network."""
    import flatlens as fl
    from flatlens.problem.ranks import ALONE

    some = next(lens.problem.data.chunks(count))
    few = lens.problem.with_changes(data=some, test=None, batchnorm="eval", ghost_batch=None, ranks=ALONE)
    found = fl.Lens(few, outputs=lens.probes or "exact")
    found.layout = lens.layout  # with the norms of its weights, once they are known
    return found


def _extrapolated(lens: Lens, done: list[_Trial], gauge: Meter) -> Cost:
    first, last, n = done[0], done[-1], lens.problem.n
    cost = _by_rule(lens)
    if len(done) > 1:
        # the first trial warms up and pays for what is kept: it says nothing of the time
        cost = replace(cost, seconds=last.seconds * _times(lens, last.n) / lens.problem.ranks.size)
    used = gauge.used()
    if last.grown is None or used is None:
        return cost
    results = max(0, last.results - first.results) / max(1, last.n - first.n)
    whole, tried = chunk(lens, n), chunk(lens, last.n)
    more = last.grown + _slope(lens, first, last) * (whole - tried) + results * (n - last.n)
    least = more - _slope(lens, first, last) * (whole - 1)
    return replace(cost, peak=used + more, least=used + max(0.0, least), more=more)


def _slope(lens: Lens, first: _Trial, last: _Trial) -> float:
    """Return the bytes of one more sample in a chunk.

    The larger of two: the plan counts what outlives a chunk, which one trial of one chunk does not show, and knows
    nothing of searches and of the loss, which a trial does.
    """
    apart = chunk(lens, last.n) - chunk(lens, first.n)
    tried = ((last.grown or 0.0) - (first.grown or 0.0)) / apart if apart else 0.0
    return max(tried, _per_sample(lens))


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
    return float(lens.layout.bytes_per_sample(_rows(lens)) + OF_AN_OUTPUT * lens.problem.outputs)


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
