"""The expected time, memory and products of a measurement, from trials on a few samples before it starts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, TypeVar, final

import pandas as pd
import torch

from flatlens.curvature import Hessian
from flatlens.curvature.operators import memory_of_graphs
from flatlens.errors import FlatlensError
from flatlens.estimate import Report
from flatlens.grams.data_pass import chunk_size
from flatlens.grams.plan import Plan, Weight
from flatlens.grams.weight_jacobians import euclidean
from flatlens.measures import Lens, Measure, measure
from flatlens.memory import Meter, in_gib, meter
from flatlens.operations.operator_norm import SearchedNorm
from flatlens.problem import Problem
from flatlens.problem.batches import FORWARD_CHUNK
from flatlens.problem.data import FEW, Data
from flatlens.problem.eval_context import device_of
from flatlens.problem.inspection import probed_together
from flatlens.problem.ranks import ALONE
from flatlens.progress import count_of, in_words, no_progress

FIRST, TRIAL = 2, FEW
"""Number of samples of the first two trials, of which one warms up, and of the last: doubled while that is quick."""

_T = TypeVar("_T")
OF_A_PLAN = 4  #: copies of the derivatives at all places that a plan holds for each sample: 3.4 to 5.3
SHARE = 8  #: a trial takes at most this part of the samples
OF_AN_OUTPUT = 12 * 8
"""Bytes of each sample's output: losses, their derivatives and combinations hold about a dozen float64 copies."""

QUICK, LONG = 2.0, 20.0  #: a trial of fewer seconds is followed by a larger one; after two of more, no other follows
SLOW = 0.05  #: seconds of a forward pass of one sample above which the only trial has this sample alone
PASS, REST, CHECKS = "the pass", "the rest", "the checks"  #: where time is spent besides the measures
NORMS = "the weights' norms"  #: of slow networks; else it is part of a measure
FORWARDS = 4, 16  #: samples of two forward passes that show the memory of a sample
FIRST_BATCH = 256  #: samples that the checks run twice more


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
    work: str = ""  #: how many numbers, of what and from what, in words

    @property
    def answer(self) -> str:
        """Time and memory of the work, in one sentence.

        >>> Cost(90.0, 1.5 * 2**30, 12, {}, work="3 numbers of 67 parameters on 40 samples: 1 forward pass").answer
        'about 2 min and 1.5 GiB for 3 numbers of 67 parameters on 40 samples: 1 forward pass, 12 curvature products'
        """
        memory = "" if math.isnan(self.memory) else f" and {in_gib(self.memory)}"
        products = f", {count_of(self.products, 'curvature product')}" if self.products else ""
        return f"{self._time}{memory} for {self.work}{products}"

    @property
    def _time(self) -> str:
        return f"about {in_words(self.seconds)}" if self.seconds >= 1 else "less than 1 s"

    def frame(self) -> pd.DataFrame:
        """Return a row for each measure: measure, seconds, products; the most expensive first."""
        rows = [(name, seconds, products) for name, (seconds, products) in self.measures.items()]
        table = pd.DataFrame(rows, columns=["measure", "seconds", "products"])
        return table.sort_values("seconds", ascending=False, ignore_index=True)

    def __repr__(self) -> str:
        memory = "" if math.isnan(self.memory) else f", in about {in_gib(self.memory)} of memory"
        memory += "" if math.isnan(self.free) or not memory else f" ({in_gib(self.free)} free)"
        products = f"; {count_of(self.products, 'curvature product')}" if self.products else ""
        return f"{self._time}{memory}{products}"


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

    For a model, the time includes making the `Problem`, which checks all samples; here it checks a few. On an MLP,
    LeNet-5 and a small transformer the cost was 0.9 to 1.4 times the time that was then taken, beside other work. A
    network that takes over 0.05 s for one sample has a trial on this sample alone.

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
    (True, True, ['mls', 'sharpness', 'the checks', 'the pass', 'the rest'])
    """
    if isinstance(network, Lens):
        lens = network
    else:
        lens = Lens(on_few(lambda some, _: Problem(network, loss, some), Data(data, "data")), outputs=outputs)
    work = partial(measure, measures=measures, layers=layers, progress=no_progress)
    return forecast(lens, work, whole=True).cost(lens)


def on_few(make: Callable[[Data, Data | None], Problem], data: Data, test: Data | None = None) -> Problem:
    """Return a problem on the first samples, whose forecast is that of all; on all where it cannot be made on a few."""
    for count in (FIRST, TRIAL) if data.count else ():
        with suppress(FlatlensError):  # the first samples may all have ignored labels; other errors come again
            return make(data.first(count), None if test is None else test.first(count))
    return make(data, test)


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
    numbers: int = 0  #: of the whole network

    @property
    def seconds(self) -> float | None:
        """All seconds."""
        return sum(self.parts.values()) if self.parts else None

    def cost(self, lens: Lens, times: int = 1) -> Cost:
        """Return the cost of this work done a number of times."""
        measures = {name: (times * took, times * self.products.get(name, 0)) for name, took in self.parts.items()}
        peak, left = (math.nan if size is None else size for size in (self.peak, self.left))
        seconds = self.once + times * (self.seconds or 0.0)
        work = f"{count_of(self.numbers, 'number')} of " if self.numbers else ""
        work = f"{f'{times} measurements of ' if times > 1 else ''}{work}{_parameters(lens)} on {_samples(lens)}"
        work = f"{work}: {_passes(lens)}"
        return Cost(seconds, peak, times * self.in_all, measures, left, size_of(lens, times), work)


def size_of(lens: Lens, times: int = 1) -> str:
    """Return in words how large a measurement is, or `times` such measurements."""
    networks = f"{times} measurements of " if times > 1 else ""
    ranks = lens.problem.ranks.size
    shared = "" if ranks == 1 else f", shared by {ranks} processes"
    return f"{networks}{_parameters(lens)}, {_samples(lens)}, {_passes(lens)}{shared}"


def _parameters(lens: Lens) -> str:
    count = sum(p.numel() for p in lens.problem.model.parameters())
    return f"{count:,} parameter{'s' * (count != 1)}"


def _samples(lens: Lens) -> str:
    return f"{_samples_of(lens):,} sample{'s' * (_samples_of(lens) != 1)}"


def _passes(lens: Lens) -> str:
    outputs = lens.problem.outputs
    if lens.probes is not None:
        return f"{count_of(lens.probes, 'random combination')} in place of {outputs} outputs"
    return f"1 forward and {outputs} backward pass{'es' * (outputs != 1)}"


def _samples_of(lens: Lens) -> int:
    """Return the number of samples of the work: of all the data where the problem was made on a few of them."""
    whole = lens.problem.data.whole
    return lens.problem.n if whole is None else whole.count


@dataclass(frozen=True)
class _Trial:
    """The time and memory of work on a few samples; bytes, None if unknown."""

    n: int
    took: float  #: seconds of the trial itself
    own: float  #: seconds of a processor
    parts: dict[str, float]  #: seconds of the whole work on these samples, some of which a trial only expects
    products: dict[str, int]
    in_all: int
    numbers: int
    grown: float | None  #: the peak minus the memory in use before
    results: int  #: memory of what the work keeps
    graphs: float = 0.0  #: bytes of the graphs that products on all samples keep, beyond those of the trial
    product: float = math.nan  #: seconds of a curvature product of one sample, of the only trial of a slow network

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def forecast(lens: Lens, work: Callable[[Lens], object], *, short: float = 0.0, whole: bool = False) -> Forecast:
    """Return the expected cost of work, extrapolated from trials on a few samples, and on more while that is quick.

    The trials leave in `lens` what does not depend on the samples (its layout, the weights' norms). Where its problem
    was made on the first of its samples, making it on all is part of the work. Work of fewer seconds than `short` is
    not looked at any longer. `whole`: whether to count what the trials have done once for all.
    """
    gauge, n = _gauge(lens), _samples_of(lens)
    before = float(gauge.peak() or 0)
    most = min(TRIAL, n // SHARE) if n >= SHARE * FIRST else max(1, n // 2)
    # fewer samples than the problem was made on were too few to make it
    least = 1 if lens.problem.data.whole is None else lens.problem.n
    most = max(most, least)
    count, done = min(max(FIRST, least), most), list[_Trial]()
    # one trial of one sample is enough of a slow network: its searches take a known number of products, and its
    # weights' norms as long as many samples
    slow = lens.problem.data.whole is not None and _run(lens, 1)[0].seconds > SLOW
    while not slow:
        done.append(_tried(lens, work, count, gauge))
        last = done[-1]
        enough = last.n >= most or last.took > (QUICK if len(done) > 2 else LONG)
        if last.seconds * n / last.n < short or (len(done) > 1 and enough):
            break
        # the second trial is as large as the first, which warms up; a slow one is doubled once
        grown = 2 * count if last.took > QUICK else max(8, 2 * count)
        count = count if len(done) == 1 else min(most, grown)
    if slow:
        count = 1 if least <= FIRST else least
        known, used = "plan" in vars(lens), gauge.used() or 0
        laid_out, plan = _weighed(lambda: lens.plan, gauge)
        if not known and laid_out.grown is not None:
            before = max(before, used + laid_out.grown + _on_more_probes(lens))
        named, weights = [one.name for one in fields(Weight)], plan.weights.items()
        unsearched = {at: _Unsearched(**{name: getattr(weight, name) for name in named}) for at, weight in weights}
        tried = replace(plan, weights=dict[str, Weight](unsearched))
        done.append(_tried(lens, work, count, gauge, tried))
        norms = _norms_of_each_form(plan, tried)
        return _extrapolated(lens, done, gauge, before, whole, norms)
    gauge.begin()
    # As if each trial had had the same share of a processor: other work comes and goes between them
    if all(one.own > 0 for one in done):
        share = sum(one.own for one in done) / max(sum(one.took for one in done), 1e-9)
        for number, one in enumerate(done):
            scale = one.own / (share * max(one.took, 1e-9))
            done[number] = replace(one, parts={name: scale * took for name, took in one.parts.items()})
    return _extrapolated(lens, done, gauge, before, whole)


def _run(lens: Lens, count: int, gauge: Meter | None = None) -> tuple[_Taken, object]:
    some = lens.problem.place(next((lens.problem.data.whole or lens.problem.data).first(count).chunks(count)))
    with lens.problem.measuring(lens.model), torch.no_grad():
        return _weighed(lambda: lens.problem.run(lens.model, some), gauge or _gauge(lens))


@dataclass(frozen=True, eq=False)
class _Unsearched(Weight):
    """A weight whose norms are not searched: in a trial its Frobenius norm stands for them."""

    @cached_property
    def searched_kernel_norm(self) -> SearchedNorm:
        return SearchedNorm(float(euclidean(self.value)))

    @cached_property
    def searched_spectral_norm(self) -> SearchedNorm:
        return SearchedNorm(float(euclidean(self.value)))


_NORMS = "searched_spectral_norm", "searched_kernel_norm"


def _on_more_probes(lens: Lens) -> float:
    """Return the bytes that the plan takes on the probes of all the data, beyond those that it takes on a few."""
    data, n = lens.problem.data, _samples_of(lens)
    more = probed_together(data.whole or data, n) - probed_together(data, lens.problem.n)
    return max(0, more) * OF_A_PLAN * lens.plan.jacobian_bytes


def _norms_of_each_form(plan: Plan, tried: Plan) -> float:
    """Return the seconds of the searches for norms that a trial has asked for: of one of each form, for all of it."""
    forms: dict[object, list[tuple[Weight, list[str]]]] = {}
    for name, weight in plan.weights.items():
        asked = [norm for norm in _NORMS if norm in vars(tried.weights[name])]
        linear = weight.linear_map
        if asked and linear is not None and not weight.part_of:
            forms.setdefault((weight.value.shape, *linear[1], type(linear[0]), *asked), []).append((weight, asked))
    seconds = 0.0
    for alike in forms.values():
        (first, asked), start = alike[0], time.monotonic()
        for norm in asked:
            getattr(first, norm)
        seconds += (time.monotonic() - start) * len(alike)
    return seconds


def _tried(lens: Lens, work: Callable[[Lens], object], count: int, gauge: Meter, tried: Plan | None = None) -> _Trial:
    checks, few = _weighed(lambda: _few(lens, count), gauge)
    if tried is not None:
        few.plan, few.rehearses = tried, True
    taken, found = _weighed(lambda: work(few), gauge)
    seconds, counts = taken.seconds, lens.problem.data.whole is not None
    # Seconds and products of each part
    parts, products, numbers = {REST: seconds}, dict[str, int](), 0
    if isinstance(found, Report):
        rows = found.frame()
        parts = {PASS: sum(found.about.get("seconds", {}).values())}
        parts |= {str(name): float(took) for name, took in rows.groupby("measure", sort=False)["seconds"].sum().items()}
        parts = {name: took for name, took in parts.items() if took}
        parts[REST] = max(0.0, seconds - sum(parts.values()))
        most = rows[rows["layer"] == ""].groupby("measure")["products"].max()
        products = {str(name): int(number) for name, number in most.items()}
        numbers = int((rows["layer"] == "").sum())
    parts |= {CHECKS: checks.seconds} if counts else {}
    took, own = seconds + counts * checks.seconds, taken.own + counts * checks.own
    # The memory of what the work keeps, and the time of a product with the Hessian for each sample
    kept = [*few.per_sample([]).values(), *few.residuals.values()]
    if isinstance(found, Report):
        kept += [tensor for e in found.values() for tensor in (e.samples, *e.arrays.values()) if tensor is not None]
    held, product = sum({tensor.data_ptr(): tensor.nbytes for tensor in kept}.values()), math.nan
    if few.rehearses and few.products:
        operator = Hessian(few.problem, model=few.model)
        times, v = operator.on_every(1), torch.ones(operator.size, dtype=operator.dtype, device=operator.space.device)
        product = _weighed(lambda: times(v), _gauge(few))[0].seconds / few.problem.n
    graphs = memory_of_graphs(few.problem, _samples_of(lens)) - memory_of_graphs(few.problem, few.problem.n)
    return _Trial(few.problem.n, took, own, parts, products, few.products, numbers, taken.grown, held, graphs, product)


class _Taken(NamedTuple):
    seconds: float
    own: float  #: seconds of a processor
    grown: float | None  #: the peak minus the memory in use before


def _weighed(work: Callable[[], _T], gauge: Meter) -> tuple[_Taken, _T]:
    begun, used, start, busy = gauge.begin(), gauge.used(), time.monotonic(), time.process_time()
    found = work()
    seconds, own, peak = time.monotonic() - start, time.process_time() - busy, gauge.peak()
    grown = None if not begun or peak is None or used is None else float(max(0, peak - used))
    return _Taken(seconds, own, grown), found


def _few(lens: Lens, count: int) -> Lens:
    """Return a lens on the first samples that shares what is known about the network."""
    some = (lens.problem.data.whole or lens.problem.data).first(count)
    few = lens.problem.with_changes(data=some, test=None, batchnorm="eval", ghost_batch=None, ranks=ALONE)
    found = Lens(few, outputs=lens.probes or "exact", attention_heads=lens.attention_heads)
    found.plan = lens.plan  # with the norms of its weights, once known
    # a limited search takes as many products as on the whole data, of which it starts on the same share
    found.product_size, found.samples = lens.product_size * _samples_of(lens) // lens.problem.n, _samples_of(lens)
    return found


def _extrapolated(
    lens: Lens, done: list[_Trial], gauge: Meter, before: float, whole: bool, norms: float = 0.0
) -> Forecast:
    # Seconds of each part
    first, last, n = done[0], done[-1], _samples_of(lens)
    parts = {}
    for name, took in last.parts.items():
        if name == CHECKS:
            held_out = lens.problem.test.whole if lens.problem.test is not None else None
            checked = _checked(n) + (0 if held_out is None else 2 * held_out.count)
            parts[name] = took / _checked(last.n) * checked / lens.problem.ranks.size
            continue
        if not math.isnan(last.product) and (last.products.get(name) or name == REST):
            # a search takes some time that no sample adds to
            parts[name] = took + last.products.get(name, 0) * last.product * (n - last.n) / lens.problem.ranks.size
            continue
        points = [(trial.n, trial.parts.get(name, 0.0)) for trial in done[1:]] or [(last.n, took)]
        shared = name == PASS or PASS not in last.parts  # of the rest, what no sample adds to comes once
        parts[name] = seconds_of(points, n, chunk(lens, n) if shared else n) / lens.problem.ranks.size
    once = max(0.0, first.seconds - done[1].seconds) if whole and len(done) > 1 else 0.0
    if norms:
        parts[NORMS] = norms
    # Memory: by rule, or from the trials
    found = by_rule(lens)
    peak, least, more, used = found.peak, found.least, found.more, gauge.used()
    if last.grown is not None and used is not None:
        together, tried = chunk(lens, n), chunk(lens, last.n)
        slope = _slope(lens, first, last)
        results = max(0, last.results - first.results) / max(1, last.n - first.n)
        more = last.grown + slope * (together - tried) + results * (n - last.n)
        least = used + max(0.0, more - slope * (together - 1))  # with a smaller memory: no graphs are kept
        more += last.graphs
        peak = used + more
    if CHECKS in parts and used is not None and peak is not None and least is not None:
        # the checks have chunks of their own, of which --memory says nothing: the bytes of one more sample in each
        few, many = (min(count, n) for count in FORWARDS)
        little, much = (_run(lens, count, gauge)[0].grown or 0.0 for count in (few, many))
        slope = (much - little) / (many - few) if many > few else much / many
        slope = max(0.0, min(slope, much / many))  # memory that is not given back makes a slope too large
        checks = slope * min(n, FORWARD_CHUNK)
        peak, least, more = max(peak, used + checks), max(least, used + checks), max(more or 0.0, checks)
    peak = None if peak is None else max(peak, before)
    return Forecast(peak, least, more, found.left, parts, once, last.products, last.in_all, last.numbers)


def _checked(n: int) -> int:
    """Return how many samples the checks of n samples run: the first batch twice, then all, and all in halves."""
    return 2 * min(n, FIRST_BATCH) + n * (1 + (n > 1)) + 4 * (n > 4)


def seconds_of(points: list[tuple[int, float]], n: int, together: int) -> float:
    """Return the time of n samples in chunks of `together`, from (samples, seconds) of trials of one chunk each.

    The line through the last two points is the time of a sample and what is left with none. Of the latter, some comes
    once and some with each chunk (the more, the larger the weights): it is counted by the geometric mean.
    """
    (m, took), (fewer, less) = points[-1], points[-2] if len(points) > 1 else (0, 0.0)
    each = took / m if fewer == m else min(max(0.0, (took - less) / (m - fewer)), took / m)
    return each * n + (took - each * m) * math.sqrt(math.ceil(n / together))


def _slope(lens: Lens, first: _Trial, last: _Trial) -> float:
    """Return the bytes of one more sample in a chunk."""
    # The plan counts what outlives a chunk, which a trial of one does not show; a trial counts searches and the loss
    apart = chunk(lens, last.n) - chunk(lens, first.n)
    return max(((last.grown or 0.0) - (first.grown or 0.0)) / apart if apart else 0.0, _per_sample(lens))


def by_rule(lens: Lens) -> Forecast:
    """Return the memory by the plan of the pass: output Jacobians and Grams of a chunk, and the weights in float64."""
    gauge, each = _gauge(lens), _per_sample(lens)
    fixed = 8.0 * sum(p.numel() for p in lens.problem.model.parameters())
    more, used, left = fixed + each * chunk(lens, _samples_of(lens)), gauge.used(), gauge.left()
    return Forecast(None, None, more, left) if used is None else Forecast(used + more, used + fixed + each, more, left)


def chunk(lens: Lens, n: int) -> int:
    """Return how many of `n` samples a pass takes together."""
    return min(n, chunk_size(lens.problem, lens.plan, _rows(lens)))


def _per_sample(lens: Lens) -> float:
    return float(lens.plan.bytes_per_sample(_rows(lens)) + OF_AN_OUTPUT * lens.problem.outputs)


def _rows(lens: Lens) -> int:
    return lens.problem.outputs if lens.probes is None else 2


def _gauge(lens: Lens) -> Meter:
    return meter(device_of(lens.problem.model))
