"""The expected time, memory and products of a measurement, from trials on a few samples before it starts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, final

import pandas as pd
import torch

from flatlens.estimate import Report
from flatlens.grams.data_pass import PASS_CHUNK
from flatlens.measures import Lens, Measure, measure
from flatlens.memory import Meter, in_gib, meter
from flatlens.problem import Problem
from flatlens.problem.eval_context import device_of
from flatlens.problem.ranks import ALONE
from flatlens.progress import count_of, in_words, no_progress

FIRST, TRIAL = 2, 64
"""Number of samples of the first two trials, of which one warms up, and of the last: doubled while that is quick."""

SHARE = 8  #: a trial takes at most this part of the samples
OF_AN_OUTPUT = 12 * 8
"""Bytes of each sample's output: losses, their derivatives and combinations hold about a dozen float64 copies."""

QUICK, LONG = 2.0, 20.0  #: a trial of fewer seconds is followed by a larger one; after two of more, no other follows
PASS, REST = "the pass", "the rest"  #: what the time goes to beside the measures


@final
@dataclass(frozen=True, repr=False)
class Cost:
    """The expected time, memory and products of a measurement on this machine, under its present load.

    >>> Cost(90.0, 1.5 * 2**30, 12, {"mls": (90.0, 12)})
    about 2 min, in about 1.5 GiB of memory; 12 curvature products
    """

    seconds: float  #: the time until the report is there
    memory: float  #: the peak of the whole process, in bytes; NaN where it cannot be read
    products: int  #: curvature products over all the data
    measures: Mapping[str, tuple[float, int]]  #: seconds and products of each measure, and of the pass that they share
    free: float = math.nan  #: the free memory, in bytes
    size: str = ""  #: parameters, samples and backward passes, in words

    def frame(self) -> pd.DataFrame:
        """Return a row for each measure: measure, seconds, products; the most expensive first."""
        rows = [(name, seconds, products) for name, (seconds, products) in self.measures.items()]
        table = pd.DataFrame(rows, columns=["measure", "seconds", "products"])
        return table.sort_values("seconds", ascending=False, ignore_index=True)

    def __repr__(self) -> str:
        memory = "" if math.isnan(self.memory) else f", in about {in_gib(self.memory)} of memory"
        memory += "" if math.isnan(self.free) or not memory else f" ({in_gib(self.free)} are free)"
        products = f"; {count_of(self.products, 'curvature product')}" if self.products else ""
        return f"{f'about {in_words(self.seconds)}' if self.seconds >= 1 else 'less than 1 s'}{memory}{products}"


def cost(
    network: Lens | torch.nn.Module,
    loss: Any = None,
    data: Any = None,
    *,
    measures: str | Measure | Iterable[str | Measure] | None = None,
    layers: str | Iterable[str] | None = None,
    outputs: Literal["exact"] | int | None = None,
) -> Cost:
    """Return what `measure` with the same arguments is expected to take, from trials on at most 64 samples.

    On an MLP, LeNet-5 and a small transformer it was 1.1 to 1.6 times the time that was then taken, beside other work.

    Args:
        network: A `Lens`, or a model with its loss and data as for `Problem`.
        loss: The loss, for a model.
        data: The data, for a model.
        measures: As for `measure`.
        layers: As for `measure`.
        outputs: As for `Lens`, for a model.

    Raises:
        TooLong: even on two samples it takes more than ten minutes.

    >>> import flatlens as fl
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    >>> expected = fl.cost(net, "mse", (torch.randn(100, 3), torch.zeros(100, 2)), measures=["mls", "sharpness"])
    >>> expected.seconds < 60, expected.products > 2, list(expected.frame()["measure"].sort_values())
    (True, True, ['mls', 'sharpness', 'the pass', 'the rest'])
    """
    lens = network if isinstance(network, Lens) else Lens(Problem(network, loss, data), outputs=outputs)
    work = partial(measure, measures=measures, layers=layers, progress=no_progress)
    return forecast(lens, work, whole=True).cost(lens)


@dataclass(frozen=True)
class Forecast:
    """The expected time and memory of some work; bytes, None if unknown."""

    peak: float | None  #: the largest memory of the whole process
    least: float | None  #: the peak with one sample at a time
    more: float | None  #: the peak minus the memory in use now
    left: float | None  #: the free memory
    parts: Mapping[str, float] = field(default_factory=dict)  #: seconds of each part of the work
    once: float = 0.0  #: seconds that the first trial took longer, which a second work on the same lens does not take
    products: Mapping[str, int] = field(default_factory=dict)  #: curvature products of each measure
    in_all: int = 0  #: all curvature products

    @property
    def seconds(self) -> float | None:
        """All seconds."""
        return sum(self.parts.values()) if self.parts else None

    def cost(self, lens: Lens, times: int = 1) -> Cost:
        """Return the cost of so many such works."""
        measures = {name: (times * took, times * self.products.get(name, 0)) for name, took in self.parts.items()}
        peak, left = (math.nan if size is None else size for size in (self.peak, self.left))
        seconds = self.once + times * (self.seconds or 0.0)
        return Cost(seconds, peak, times * self.in_all, measures, left, size_of(lens, times))


def size_of(lens: Lens, times: int = 1) -> str:
    """Return in words how large a measurement is, or `times` such measurements."""
    problem = lens.problem
    parameters = sum(p.numel() for p in problem.model.parameters())
    size = f"{parameters:,} parameter{'s' * (parameters != 1)}, {problem.n:,} sample{'s' * (problem.n != 1)}"
    passes = f"1 forward and {problem.outputs} backward pass{'es' * (problem.outputs != 1)}"
    if lens.probes is not None:
        passes = f"{count_of(lens.probes, 'random combination')} in place of {problem.outputs} outputs"
    networks = f"{times} measurements of " if times > 1 else ""
    shared = "" if problem.ranks.size == 1 else f", shared by {problem.ranks.size} processes"
    return f"{networks}{size}, {passes}{shared}"


@dataclass(frozen=True)
class _Trial:
    """The time and memory of work on a few samples; bytes, None if unknown."""

    n: int
    own: float  #: seconds of a processor
    parts: dict[str, float]  #: seconds
    products: dict[str, int]
    in_all: int
    grown: float | None  #: the peak minus the memory in use before
    results: int  #: memory of what the work keeps

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def forecast(lens: Lens, work: Callable[[Lens], object], *, short: float = 0.0, whole: bool = False) -> Forecast:
    """Return the expected cost of work, extrapolated from trials on a few samples, and on more while that is quick.

    The trials leave in `lens` what does not depend on the samples (its layout, the weights' norms).

    Args:
        lens: The network; its number of samples is that of the work.
        work: Takes a lens.
        short: Work of fewer seconds is not looked at any longer.
        whole: Whether to count what the trials have done once for all.

    Raises:
        TooLong: a trial would take too long.
    """
    gauge = _gauge(lens)
    before, n = gauge.peak(), lens.problem.n
    most = min(TRIAL, n // SHARE) if n >= SHARE * FIRST else max(1, n // 2)
    count, done = min(FIRST, most), list[_Trial]()
    while True:
        done.append(_tried(lens, work, count, gauge))
        last = done[-1]
        if last.seconds * n / last.n < short or (len(done) > 1 and (last.n >= most or _enough(done))):
            break
        # the second trial is as large as the first, which warms up; a slow one is doubled once
        grown = 2 * count if last.seconds > QUICK else max(8, 2 * count)
        count = count if len(done) == 1 else min(most, grown)
    gauge.begin()
    return _extrapolated(lens, _evened(done), gauge, before or 0, whole)


def _enough(done: list[_Trial]) -> bool:
    return done[-1].seconds > (QUICK if len(done) > 2 else LONG)


def _tried(lens: Lens, work: Callable[[Lens], object], count: int, gauge: Meter) -> _Trial:
    few = _few(lens, count)
    begun, used, start, busy = gauge.begin(), gauge.used(), time.monotonic(), time.process_time()
    found = work(few)
    seconds, own, peak = time.monotonic() - start, time.process_time() - busy, gauge.peak()
    grown = None if not begun or peak is None or used is None else float(max(0, peak - used))
    parts, products = {REST: seconds}, dict[str, int]()
    if isinstance(found, Report):
        rows = found.frame()
        parts = {PASS: sum(found.about.get("seconds", {}).values())}
        parts |= {str(name): float(took) for name, took in rows.groupby("measure", sort=False)["seconds"].sum().items()}
        parts = {name: took for name, took in parts.items() if took}
        parts[REST] = max(0.0, seconds - sum(parts.values()))
        most = rows[rows["layer"] == ""].groupby("measure")["products"].max()
        products = {str(name): int(number) for name, number in most.items()}
    return _Trial(few.problem.n, own, parts, products, few.products, grown, _held(few, found))


def _held(lens: Lens, found: object) -> int:
    kept = [*lens.per_sample([]).values(), *lens.residuals.values()]
    if isinstance(found, Report):
        kept += [tensor for e in found.values() for tensor in (e.samples, *e.arrays.values()) if tensor is not None]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in kept}.values())


def _few(lens: Lens, count: int) -> Lens:
    """Return a lens on the first samples that shares what is known about the network."""
    some = next(lens.problem.data.chunks(count))
    few = lens.problem.with_changes(data=some, test=None, batchnorm="eval", ghost_batch=None, ranks=ALONE)
    found = Lens(few, outputs=lens.probes or "exact", attention_heads=lens.attention_heads)
    found.plan = lens.plan  # with the norms of its weights, once known
    # a limited search takes as many products as on the whole data, of which it starts on the same share
    found.product_size, found.samples = lens.product_size, lens.samples
    return found


def _evened(done: list[_Trial]) -> list[_Trial]:
    """Return the trials as if each had had the same share of a processor: other work comes and goes between them."""
    share = sum(one.own for one in done) / max(sum(one.seconds for one in done), 1e-9)
    if not all(one.own > 0 for one in done):
        return done
    scales = [one.own / (share * max(one.seconds, 1e-9)) for one in done]
    return [
        replace(one, parts={name: scale * took for name, took in one.parts.items()})
        for one, scale in zip(done, scales, strict=True)
    ]


def _extrapolated(lens: Lens, done: list[_Trial], gauge: Meter, before: float, whole: bool) -> Forecast:
    first, last, n = done[0], done[-1], lens.problem.n
    parts = {}
    for name, took in last.parts.items():
        points = [(trial.n, trial.parts.get(name, 0.0)) for trial in done[1:]] or [(last.n, took)]
        shared = name == PASS or PASS not in last.parts  # of the rest, what no sample adds to comes once
        parts[name] = seconds_of(points, n, chunk(lens, n) if shared else n) / lens.problem.ranks.size
    once = max(0.0, first.seconds - done[1].seconds) if whole and len(done) > 1 else 0.0
    found = by_rule(lens)
    peak, least, more, used = found.peak, found.least, found.more, gauge.used()
    if last.grown is not None and used is not None:
        together, tried = chunk(lens, n), chunk(lens, last.n)
        slope = _slope(lens, first, last)
        results = max(0, last.results - first.results) / max(1, last.n - first.n)
        more = last.grown + slope * (together - tried) + results * (n - last.n)
        peak, least = used + more, used + max(0.0, more - slope * (together - 1))
    peak = None if peak is None else max(peak, before)
    return Forecast(peak, least, more, found.left, parts, once, last.products, last.in_all)


def seconds_of(points: list[tuple[int, float]], n: int, together: int) -> float:
    """Return the time of n samples in chunks of so many, from (samples, seconds) of trials of one chunk each.

    The line through the last two points is the time of a sample and what is left with none. Of the latter, some comes
    once and some with each chunk (the more, the larger the weights): it is counted by the geometric mean.

    >>> seconds_of([(8, 1.8), (16, 2.6)], 1000, 250), seconds_of([(2, 3.0)], 100, 250)
    (102.0, 150.0)
    """
    (m, took), (fewer, less) = points[-1], points[-2] if len(points) > 1 else (0, 0.0)
    each = took / m if fewer == m else min(max(0.0, (took - less) / (m - fewer)), took / m)
    return each * n + (took - each * m) * math.sqrt(math.ceil(n / together))


def _slope(lens: Lens, first: _Trial, last: _Trial) -> float:
    """Return the bytes of one more sample in a chunk, the larger of two numbers.

    The plan counts what outlives a chunk, which a trial of one chunk does not show. A trial counts searches and the
    loss, which the plan does not know.
    """
    apart = chunk(lens, last.n) - chunk(lens, first.n)
    return max(((last.grown or 0.0) - (first.grown or 0.0)) / apart if apart else 0.0, _per_sample(lens))


def by_rule(lens: Lens) -> Forecast:
    """Return the memory by the plan of the pass: output Jacobians and Grams of a chunk, and the weights in float64."""
    gauge = _gauge(lens)
    fixed = 8.0 * sum(p.numel() for p in lens.problem.model.parameters())
    more = fixed + _per_sample(lens) * chunk(lens, lens.problem.n)
    used = gauge.used()
    if used is None:
        return Forecast(None, None, more, gauge.left())
    return Forecast(used + more, used + fixed + _per_sample(lens), more, gauge.left())


def chunk(lens: Lens, n: int) -> int:
    """Return how many of `n` samples a pass takes together."""
    return min(n, PASS_CHUNK, lens.plan.samples_at_once(lens.problem.memory, _rows(lens)))


def _per_sample(lens: Lens) -> float:
    return float(lens.plan.bytes_per_sample(_rows(lens)) + OF_AN_OUTPUT * lens.problem.outputs)


def _rows(lens: Lens) -> int:
    return lens.problem.outputs if lens.probes is None else 2


def _gauge(lens: Lens) -> Meter:
    return meter(device_of(lens.problem.model))
