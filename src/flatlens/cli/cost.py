"""The expected time and memory of work on a network, from trials on a few samples before it starts.

Memory is measured for this process, within its container, or on a CUDA device.
"""

from __future__ import annotations

import ctypes
import gc
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, final

from flatlens.cli.terminal import note
from flatlens.errors import BadInput, FlatlensError, TooLong
from flatlens.progress import in_words
from flatlens.progress_bar import DELAY

if TYPE_CHECKING:
    import torch

    from flatlens.measures import Lens


GROUP = Path("/sys/fs/cgroup")


class Meter(Protocol):
    """Bytes of memory on one device; None where they cannot be read."""

    def used(self) -> int | None:
        """Return the memory in use now."""

    def peak(self) -> int | None:
        """Return the largest memory in use since `begin`, or since the process started."""

    def begin(self) -> bool:
        """Reset the peak and give freed memory back; return whether this is possible here."""

    def left(self) -> int | None:
        """Return the memory that is still free."""


def meter(device: torch.device) -> Meter:
    """Return the meter of a device."""
    return OfCuda(device) if device.type == "cuda" else OfProcess()


@final
class OfProcess:
    """Resident memory as Linux counts it; None on other systems."""

    def used(self) -> int | None:
        """Return VmRSS."""
        return _field("/proc/self/status", "VmRSS")

    def peak(self) -> int | None:
        """Return VmHWM, which `begin` resets."""
        return _field("/proc/self/status", "VmHWM")

    def begin(self) -> bool:
        """Return whether the kernel lets a process reset its peak.

        The C library keeps freed memory and uses it for the next allocations, which would then not be counted: it is
        returned to the system first.
        """
        gc.collect()
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
            return True
        return False

    def left(self) -> int | None:
        """Return the free memory of the machine, or of the container if that is less."""
        free = [_field("/proc/meminfo", "MemAvailable"), _of_group()]
        return min((one for one in free if one is not None), default=None)


@final
class OfCuda:
    """Memory of one CUDA device, as torch allocates it."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device, self._cuda = device, torch.cuda

    def used(self) -> int | None:
        """Return the memory in tensors."""
        return self._cuda.memory_allocated(self._device)

    def peak(self) -> int | None:
        """Return the largest memory in tensors."""
        return self._cuda.max_memory_allocated(self._device)

    def begin(self) -> bool:
        """Reset the peak, after freeing tensors that only a reference cycle keeps."""
        gc.collect()
        self._cuda.reset_peak_memory_stats(self._device)
        return True

    def left(self) -> int | None:
        """Return the free memory of the device plus what torch has reserved and does not use."""
        free, _ = self._cuda.mem_get_info(self._device)
        return int(free) + self._cuda.memory_reserved(self._device) - self._cuda.memory_allocated(self._device)


def _field(file: str, name: str) -> int | None:
    """Return the number of a line such as `VmRSS:   1234 kB`, in bytes."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path(file).read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def _of_group() -> int | None:
    """Return the memory that a container (cgroup v2) may still take; cached file pages count as free."""
    with suppress(OSError, ValueError):
        most = int((GROUP / "memory.max").read_text())  # "max" is no number: no limit
        now = int((GROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (GROUP / "memory.stat").read_text().splitlines())
        return most - now + int(stat.get("inactive_file", 0))
    return None


def in_gib(size: float) -> str:
    """Return a size in GiB, in words.

    >>> in_gib(3 * 2**30), in_gib(50 * 2**20)
    ('3 GiB', '0.049 GiB')
    """
    return f"{size / 2**30:.2g} GiB" if size < 100 * 2**30 else f"{size / 2**30:.0f} GiB"


FIRST, TRIAL = 2, 64
"""Number of samples of the first trial, which also warms up, and of the last: doubled from 8 on while that is quick."""

SHARE = 8  #: a trial takes at most this part of the samples
OF_AN_OUTPUT = 12 * 8
"""Bytes of each sample's output: losses, their derivatives and combinations hold about a dozen float64 copies."""

QUICK = 2.0  #: a trial of fewer seconds is followed by a longer one


@dataclass(frozen=True)
class MeasurementCost:
    """The expected time and memory of some work; bytes, None if unknown."""

    seconds: float | None
    peak: float | None  #: the largest memory of the whole process
    least: float | None  #: the peak with one sample at a time
    more: float | None  #: the peak minus the memory in use now
    left: float | None  #: the free memory


def announce(lens: Lens, work: Callable[[Lens], object], *, times: int = 1, anyway: bool = False) -> MeasurementCost:
    """Announce long work before it starts: its size, its time and its memory.

    The trials leave in `lens` what does not depend on the samples (its plan, the weights' norms).

    Raises:
        BadInput: the work does not fit in memory, or a trial of it would take too long, and not `anyway`.
    """
    problem, cost = lens.problem, _by_rule(lens)
    if not anyway:
        _require_room(lens, cost)
    if problem.n < SHARE * FIRST:
        return cost
    try:
        cost = trials(lens, work)
    except TooLong as error:
        if not anyway:
            raise
        takes = error.what[0] if isinstance(error.what, tuple) else error.what  # without the limit
        note(f"on a few of the samples, {error.but(what=takes, remedy='')}")
        return cost
    except FlatlensError:  # a few samples may all have ignored labels, or be too few for batch statistics
        return cost
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
    memory += "" if cost.left is None or not memory else f" ({in_gib(cost.left)} are free)"
    note(f"{networks}{size}, {passes}{shared}: about {in_words(cost.seconds * times)}{memory}")
    return cost


@dataclass(frozen=True)
class _Trial:
    """The time and memory of work on a few samples; bytes, None if unknown."""

    n: int
    seconds: float
    grown: float | None  #: the peak minus the memory in use before
    results: int  #: memory of what the work keeps


def trials(lens: Lens, work: Callable[[Lens], object]) -> MeasurementCost:
    """Return the cost of work, extrapolated from trials on a few samples, and on more while that is quick."""
    gauge = _gauge(lens)
    before = gauge.peak()
    done: list[_Trial] = []
    most = min(TRIAL, lens.problem.n // SHARE)
    count = FIRST
    while True:
        few = _few(lens, count)
        begun, used, start = gauge.begin(), gauge.used(), time.monotonic()
        found = work(few)
        seconds, peak = time.monotonic() - start, gauge.peak()
        grown = None if not begun or peak is None or used is None else float(max(0, peak - used))
        last = _Trial(few.problem.n, seconds, grown, _held(few, found))
        done.append(last)
        enough = len(done) > 1 and (last.seconds > QUICK or count >= most)
        if enough or last.seconds * lens.problem.n / last.n < DELAY:
            break
        count = min(most, 8 if len(done) == 1 else 2 * count)
        del few, found  # the next trial's memory is counted without them
    gauge.begin()
    cost = _extrapolated(lens, done, gauge)
    return cost if cost.peak is None else replace(cost, peak=max(cost.peak, before or 0))


def _held(lens: Lens, found: object) -> int:
    from flatlens.estimate import Report

    kept = [*lens.per_sample([]).values(), *lens.residuals.values()]
    if isinstance(found, Report):
        kept += [tensor for e in found.values() for tensor in (e.samples, *e.arrays.values()) if tensor is not None]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in kept}.values())


def _few(lens: Lens, count: int) -> Lens:
    """Return a lens on the first samples that shares what is known about the network."""
    import flatlens as fl
    from flatlens.problem.ranks import ALONE

    some = next(lens.problem.data.chunks(count))
    few = lens.problem.with_changes(data=some, test=None, batchnorm="eval", ghost_batch=None, ranks=ALONE)
    found = fl.Lens(few, outputs=lens.probes or "exact", attention_heads=lens.attention_heads)
    found.plan = lens.plan  # with the norms of its weights, once known
    return found


def _extrapolated(lens: Lens, done: list[_Trial], gauge: Meter) -> MeasurementCost:
    first, last, n = done[0], done[-1], lens.problem.n
    whole, tried = chunk(lens, n), chunk(lens, last.n)
    cost = _by_rule(lens)
    if len(done) > 1:
        # The first trial warms up and allocates what is kept: its time is not used. Some of the time of a chunk depends
        # on its number of samples, some does not (the more, the larger the weights). So for a trial smaller than a
        # chunk the ratio of times lies between the ratio of samples and that of chunks: their geometric mean is taken.
        times = math.sqrt(n / last.n * math.ceil(n / whole) / math.ceil(last.n / tried))
        cost = replace(cost, seconds=last.seconds * times / lens.problem.ranks.size)
    used = gauge.used()
    if last.grown is None or used is None:
        return cost
    slope = _slope(lens, first, last)
    results = max(0, last.results - first.results) / max(1, last.n - first.n)
    more = last.grown + slope * (whole - tried) + results * (n - last.n)
    return replace(cost, peak=used + more, least=used + max(0.0, more - slope * (whole - 1)), more=more)


def _slope(lens: Lens, first: _Trial, last: _Trial) -> float:
    """Return the bytes of one more sample in a chunk, the larger of two numbers.

    The plan counts what outlives a chunk, which a trial of one chunk does not show. A trial counts searches and the
    loss, which the plan does not know.
    """
    apart = chunk(lens, last.n) - chunk(lens, first.n)
    return max(((last.grown or 0.0) - (first.grown or 0.0)) / apart if apart else 0.0, _per_sample(lens))


def _by_rule(lens: Lens) -> MeasurementCost:
    """Return the memory by the plan of the pass: output Jacobians and Grams of a chunk, and the weights in float64."""
    gauge = _gauge(lens)
    fixed = 8.0 * sum(p.numel() for p in lens.problem.model.parameters())
    more = fixed + _per_sample(lens) * chunk(lens, lens.problem.n)
    used = gauge.used()
    if used is None:
        return MeasurementCost(None, None, None, more, gauge.left())
    return MeasurementCost(None, used + more, used + fixed + _per_sample(lens), more, gauge.left())


def chunk(lens: Lens, n: int) -> int:
    """Return how many of `n` samples a pass takes together."""
    from flatlens.grams.data_pass import PASS_CHUNK

    return min(n, PASS_CHUNK, lens.plan.samples_at_once(lens.problem.memory, _rows(lens)))


def _per_sample(lens: Lens) -> float:
    return float(lens.plan.bytes_per_sample(_rows(lens)) + OF_AN_OUTPUT * lens.problem.outputs)


def _rows(lens: Lens) -> int:
    return lens.problem.outputs if lens.probes is None else 2


def _gauge(lens: Lens) -> Meter:
    from flatlens.problem.eval_context import device_of

    return meter(device_of(lens.problem.model))


def _require_room(lens: Lens, cost: MeasurementCost) -> None:
    if cost.more is None or cost.left is None or cost.more <= cost.left:
        return
    advice = []
    spared = (cost.peak or 0.0) - (cost.least or 0.0)
    if cost.more - spared <= cost.left:
        fits = max(1.0, 0.5 * (cost.left - (cost.more - spared)))
        advice.append(f"--memory {max(1, int(fits / 2**20))}MiB takes fewer samples at a time")
    if lens.probes is None and lens.problem.outputs > 2:
        few = min(16, lens.problem.outputs - 1)
        advice.append(f"--outputs {few} takes random combinations of the {lens.problem.outputs} outputs")
    advice.append("--parameters NAMES measures a part of the network; --anyway starts it although memory may run out")
    raise BadInput(
        f"memory: this needs about {in_gib(cost.more)} more, but only {in_gib(cost.left)} are free: {'; '.join(advice)}"
    )
