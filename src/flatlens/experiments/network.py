"""One network of a study: train and measure it, which is what a worker does, and estimate how long all of them take."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path

import torch
from torch import nn

from flatlens.bounds import check_bounds
from flatlens.column import Column
from flatlens.data import DataSettings, Split, UserData, default_root
from flatlens.distributions import RULES
from flatlens.errors import BadWeights
from flatlens.estimate import Estimate, Key, Progress, Report
from flatlens.experiments.runner import one_by_one, traceback_in
from flatlens.experiments.settings import NetworkSettings, Study
from flatlens.experiments.store import Record, Store, versions
from flatlens.files import contents_of
from flatlens.measures import Lens, Measure, Run, about, named
from flatlens.measures.definition import RISK_FAMILY
from flatlens.measures.pipeline import measure_with
from flatlens.models.weights import load_weights
from flatlens.operations.layers import is_linear
from flatlens.problem import Problem, measuring
from flatlens.problem.eval_context import copy_of
from flatlens.progress import Watch, no_progress
from flatlens.settings_json import digest
from flatlens.tracking import Tracker
from flatlens.training import SGD, Ridge, TrainedElsewhere, Training, TrainingResult, Until, train
from flatlens.training.stack import Member, train_together
from flatlens.transforms.definition import TRANSFORMS


def measure_network(model: nn.Module, split: Split, settings: NetworkSettings) -> Report:
    """Measure a network on the training data, with weights and data converted to `settings.dtype`.

    Loss, accuracy and gap use all data, other measures `settings.samples` samples. The side of a bound has a row
    "mls_chain.lhs"; a measure of the transformed network, "relative_flatness@layerwise". If the data's distribution is
    known, the covering radius is computed by every rule: "jacobian_generalisation.rhs@tight".
    """
    problem = _problem(copy_of(model, "measuring").to(getattr(torch, settings.dtype)), split, settings)
    found, lens = _measured(problem, settings)
    # both sides of the bounds; where the law of the inputs is known, by each rule for the radius
    law, target = split.distribution, split.target
    assume = () if law is None else ("iid_samples",)
    rules = RULES[:1] if law is None else RULES
    for rule in rules if settings.bounds else ():
        other = "" if rule == RULES[0] else rule
        for verdict in check_bounds(
            lens, settings.bounds, assume=assume, distribution=law, target=target, rule=rule, progress=no_progress
        ):
            note = verdict.status + (f": {verdict.assumption}" if verdict.assumption else "")
            lhs = Estimate(verdict.lhs, source=verdict.source, note=note)
            bound = Column.parse(verdict.bound)
            found[bound.of_side("lhs", other).row, verdict.layer] = lhs
            found[bound.of_side("rhs", other).row, verdict.layer] = replace(lhs, value=verdict.rhs)
    # the same after each transform
    own = int(digest((settings.data, settings.model, settings.training)), 16)  # networks of one seed move differently
    for name in settings.moved:
        generator = torch.Generator().manual_seed(own)
        moved = TRANSFORMS[name].apply(problem, generator).problem
        after, _ = _measured(moved, settings)
        found |= {(Column.of(row).after(name).row, layer): e for (row, layer), e in after.items()}
    return Report(found, about(lens))


def _measured(problem: Problem, settings: NetworkSettings) -> tuple[dict[Key, Estimate], Lens]:
    if settings.samples is None:
        lens = Lens(problem)
        return dict(_quietly(lens, list(settings.measures)).items()), lens
    lens = Lens(problem.subset(settings.samples, torch.Generator().manual_seed(settings.data.seed)))
    chosen = named(settings.measures)
    risk = [one for one in chosen if one.card.family == RISK_FAMILY]
    rest = [one for one in chosen if one.card.family != RISK_FAMILY]
    parts = [_quietly(seen, mine) for seen, mine in ((lens, rest), (Lens(problem), risk)) if mine]
    return {key: e for part in parts for key, e in part.items()}, lens


def _quietly(lens: Lens, measures: list[Measure] | list[str]) -> Report:  # a study has its own limits and progress
    run = Run(torch.Generator().manual_seed(0), Watch(no_progress, math.inf), thorough=True)
    return measure_with(lens, measures, run)


def tracker_of(model: nn.Module, split: Split, settings: NetworkSettings) -> Tracker | None:
    """Return the tracker of the training, in the training's dtype; None if nothing is followed."""
    if (followed := settings.followed) is None:
        return None
    problem = _problem(model, split, settings)
    every = followed.every if isinstance(followed.every, int) else list(followed.every)
    assert settings.training.seed is not None  # the settings of a training here have one
    seed = settings.training.seed
    # a trajectory has the steps that the study names: the last step is in the table of networks
    return Tracker(problem, followed.measures, every, samples=followed.samples, seed=seed, live=False, last=False)


def _problem(model: nn.Module, split: Split, settings: NetworkSettings) -> Problem:
    dtype = next(model.parameters()).dtype
    return Problem(
        model,
        loss=settings.training.objective.measured(),
        data=(_in_dtype(split.x, dtype), split.y),
        test=(_in_dtype(split.test_x, dtype), split.test_y) if len(split.test_x) else None,
    )


def _in_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if x.is_floating_point() else x


_kept: dict[tuple[DataSettings | UserData, Path], Split] = {}


@dataclass(frozen=True)
class ComputeInto:
    """The task of a worker: compute networks and keep them in the store. Picklable."""

    store: Store
    tell: bool = False  #: whether it notes in the folder how far the training is, for who watches
    together: int = 1  #: number of networks of a pack that are trained in a stack at a time; 1: each alone

    def __call__(self, settings: NetworkSettings) -> None:
        """Compute a network, unless it is stored already, by a worker that died later or by another process."""
        self.store.require_seen()
        if self.store.folder(settings.key).is_dir():
            return
        save = self.store.checkpoint(settings.key)
        with self.store.progress_file(settings.key) if self.tell else nullcontext() as progress:
            record = compute(settings, save=save, progress=progress)
        self.store.write(record)

    def several(self, pack: Sequence[NetworkSettings]) -> list[str]:
        """Compute a pack; of each the traceback of what went wrong, "" where nothing did."""
        self.store.require_seen()
        if self.together == 1 or any(isinstance(one.training, TrainedElsewhere) for one in pack):
            return one_by_one(self, pack)
        traces = [""] * len(pack)
        begun: list[tuple[int, Split, Member, ExitStack]] = []  # as `train_together` numbers them

        def members() -> Iterator[Member]:
            for place, settings in enumerate(pack):
                if self.store.folder(settings.key).is_dir():
                    continue
                with traceback_in(traces, place):
                    note = ExitStack()
                    progress = note.enter_context(self.store.progress_file(settings.key)) if self.tell else None
                    split, member = _member(settings, self.store.checkpoint(settings.key), progress)
                    begun.append((place, split, member, note))
                    yield member

        with one_thread():
            try:
                for ended in train_together(members(), self.together):
                    place, split, member, note = begun[ended.number]
                    note.close()
                    with traceback_in(traces, place):
                        if ended.error is not None:
                            raise ended.error
                        assert ended.result is not None
                        why = ended.why_alone
                        self.store.write(_record(pack[place], split, member, ended.result, ended.seconds, why))
            finally:
                for _, _, _, note in begun:
                    note.close()
        return traces


def compute(settings: NetworkSettings, save: Path | None = None, progress: Progress | None = None) -> Record:
    """Train and measure a network, on one thread: same settings, versions and machine, same digits.

    A training that lasts leaves its checkpoints at `save`, and goes on from there.
    """
    with one_thread():
        if isinstance(training := settings.training, TrainedElsewhere):
            split, model, file = _data(settings.data), settings.model.build(), Path(training.weights)
            if contents_of(file) != training.contents:
                raise BadWeights(
                    f"{file} was changed since the study began", remedy="put it back, or begin another study"
                )
            load_weights(model, file)
            member = Member(model, split.train, Training(SGD(1.0), max_steps=0, loss=training.loss))
            found = TrainingResult("trained elsewhere", 0, 0.0, nan, nan, {})
            return _record(settings, split, member, found, 0.0)
        split, one = _member(settings, save, progress)
        start = time.perf_counter()
        trained = train(one.model, one.data, one.settings, test=one.test, watch=one.watch, save=save, progress=progress)
        return _record(settings, split, one, trained, time.perf_counter() - start)


def _member(settings: NetworkSettings, save: Path | None, progress: Progress | None) -> tuple[Split, Member]:
    split = _data(settings.data)
    model = settings.model.build()
    watch = tracker_of(model, split, settings)
    assert isinstance(settings.training, Training)
    return split, Member(model, split.train, settings.training, split.held_out, watch, save, progress)


def _record(
    settings: NetworkSettings, split: Split, one: Member, trained: TrainingResult, seconds: float, why_alone: str = ""
) -> Record:
    model, start = one.model, time.perf_counter()
    report = Report({}, {}) if trained.outcome == "diverged" else measure_network(model, split, settings)
    result = {
        "samples": len(split.x),
        "outcome": trained.outcome,
        "steps": trained.steps,
        "loss": _or_none(trained.loss),
        "accuracy": _or_none(trained.accuracy) if trained.outcome == "trained elsewhere" else trained.accuracy,
        "layers": [name for name, module in model.named_modules() if is_linear(module)],
        "versions": versions(),
        "seconds_training": seconds,
        "seconds_measuring": time.perf_counter() - start,
        "trained_alone": why_alone,
    }
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    curves = dict(trained.curves)
    if split.x.shape[1:] == (1,) == split.y.shape[1:]:  # the graph of a network from R to R
        with measuring(model), torch.no_grad():
            curves |= {"input": split.test_x.flatten(), "output": model(split.test_x).flatten()}
    history = one.watch.history if isinstance(one.watch, Tracker) else None
    return Record(settings, result, curves, weights, report, history)


def _data(settings: DataSettings | UserData) -> Split:
    """Return the data, kept for this process's next network, which mostly uses the same; nothing may write to it."""
    key = settings, default_root()
    if (split := _kept.get(key)) is None:
        _kept.clear()  # first: large data would not fit twice
        split = _kept[key] = settings.load()
    return split


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread inside this context: the same digits whatever the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


WARM, TRIED = 3, 13
"""Steps of two trials, after a trial that is not counted; their difference cancels work that is done once."""
FOLD, CLEAR = 4, 0.5
"""The second trial's steps are multiplied by FOLD until it takes 1 + CLEAR times as long as the first: a look at all
data at the end takes as long as hundreds of steps, and so does what else the machine does."""


@dataclass(frozen=True)
class Cost:
    """Seconds on one thread; training counts all steps, although it may end earlier."""

    networks: int
    training: float
    measuring: float

    @property
    def seconds(self) -> float:
        """Seconds of training and measuring in one process."""
        return self.training + self.measuring

    @property
    def share(self) -> float:
        """The share of the seconds that training takes."""
        return self.training / self.seconds if self.seconds else 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.networks + other.networks, self.training + other.training, self.measuring + other.measuring)


def cost_of(studies: Iterable[Study], done: Collection[str] = ()) -> Cost:
    """Return the cost of the studies' networks that are not `done`, from the first of each, within a factor of 2."""
    total = Cost(0, 0.0, 0.0)
    for study in studies:
        if not (networks := [one for one in study.networks() if one.key not in done]):
            continue
        first = networks[0]
        unmeasured = replace(first, measures=("loss",), moved=())  # some measure for minutes
        _, (short, _, samples) = [_trial(unmeasured, WARM) for _ in range(2)]
        steps = [1 if _is_solved(one) else one.training.steps(samples) for one in networks]
        step = short if _is_solved(first) else _seconds_per_step(unmeasured, short, max(steps))
        measuring = len(networks) * _trial(first, WARM)[1]
        # measurements during training: at each of the steps listed, or at every k-th, the first included
        moments = 0
        for one, number in zip(networks, steps, strict=True):
            if one.followed is not None:
                every = one.followed.every
                moments += 1 + number // every if isinstance(every, int) else len(every)
        if moments:
            measuring += moments * _moment(first)
        total += Cost(len(networks), step * sum(steps), measuring)
    return total


class _OutOfTime(BaseException):  # no Exception, which would only end the report of progress
    pass


def tried(settings: NetworkSettings, most: float) -> Cost | None:
    """Return what one network takes, trained to its end and measured; None if this takes over `most` seconds."""
    begun = time.perf_counter()

    def within(what: str, done: int, total: int) -> None:
        if time.perf_counter() - begun > most:
            raise _OutOfTime

    try:
        result = compute(settings, progress=within).result
    except _OutOfTime:
        return None
    return Cost(1, result["seconds_training"], result["seconds_measuring"])


def _is_solved(settings: NetworkSettings) -> bool:  # a ridge regression: one step, whatever the settings give
    return isinstance(settings.training, Training) and isinstance(settings.training.optimiser, Ridge)


def _seconds_per_step(settings: NetworkSettings, short: float, most: int) -> float:
    """Return the seconds of a step; `short` are those of the first trial, `most` is the largest number of steps."""
    tried = TRIED
    while True:
        long = _trial(settings, tried)[0]
        if long > (1 + CLEAR) * short or tried >= most:
            break
        tried = min(FOLD * tried, most)
    return (long - short) / (tried - WARM) if long > short else long / tried  # noise: a step takes next to nothing


def _trial(settings: NetworkSettings, steps: int) -> tuple[float, float, int]:
    """Return the seconds of training this number of steps, the seconds of measuring, and the training samples."""
    assert isinstance(settings.training, Training)
    training = replace(settings.training, max_steps=steps, max_epochs=None, until=Until())
    result = compute(replace(settings, training=training, followed=None)).result
    return result["seconds_training"], result["seconds_measuring"], result["samples"]


def _moment(settings: NetworkSettings) -> float:
    """Return the seconds of one measurement during training: the second one, without the work that is done once."""
    assert settings.followed is not None
    followed = replace(settings.followed, every=1)
    tracker = tracker_of(settings.model.build(), settings.data.load(), replace(settings, followed=followed))
    assert tracker is not None
    tracker.step(0)
    start = time.perf_counter()
    tracker.step(1)
    return time.perf_counter() - start
