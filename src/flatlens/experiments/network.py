"""Train and measure one network of a study: what a worker does."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from math import nan
from pathlib import Path

import torch

from flatlens.data import DataSettings, Split, UserData, default_root
from flatlens.errors import BadFolder, BadWeights
from flatlens.estimate import Progress, Report
from flatlens.experiments.measuring import graph_of, measure_network, tracker_of
from flatlens.experiments.settings import NetworkSettings
from flatlens.experiments.store import Record, Store
from flatlens.experiments.versions import versions
from flatlens.files import contents_of
from flatlens.models.checkpoints import load_weights
from flatlens.operations.layers import is_linear
from flatlens.tracking import Tracker
from flatlens.training import SGD, TrainedElsewhere, Training, TrainingResult, train
from flatlens.training.stack import Member, train_together

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
            return _Pack(self, pack).singly()
        return _Pack(self, pack).traces()


class _Pack:
    """Networks that are computed together: each is kept in the store as soon as its training is over."""

    def __init__(self, task: ComputeInto, pack: Sequence[NetworkSettings]) -> None:
        self.task, self.store, self.pack = task, task.store, pack
        self.traced = [""] * len(pack)
        self.begun: list[tuple[int, Split, Member, ExitStack]] = []  # as `train_together` numbers them

    def singly(self) -> list[str]:
        """Compute each network alone, one after the other; return their tracebacks."""
        for place, settings in enumerate(self.pack):
            with self._traced(place):
                self.task(settings)
        return self.traced

    def traces(self) -> list[str]:
        """Compute the networks, as a stack where they can be one; return their tracebacks."""
        with one_thread():
            try:
                for ended in train_together(self._members(), self.task.together):
                    place, split, member, note = self.begun[ended.number]
                    note.close()
                    with self._traced(place):
                        if ended.error is not None:
                            raise ended.error
                        assert ended.result is not None
                        why = ended.why_alone
                        record = _record(self.pack[place], split, member, ended.result, ended.seconds, why)
                        self.store.write(record)
            finally:
                for _, _, _, note in self.begun:
                    note.close()
        return self.traced

    def _members(self) -> Iterator[Member]:
        for place, settings in enumerate(self.pack):
            if self.store.folder(settings.key).is_dir():
                continue
            with self._traced(place):
                note = ExitStack()
                progress = note.enter_context(self.store.progress_file(settings.key)) if self.task.tell else None
                split, member = _member(settings, self.store.checkpoint(settings.key), progress)
                self.begun.append((place, split, member, note))
                yield member

    @contextmanager
    def _traced(self, place: int) -> Iterator[None]:
        """Record an error for its network; the others continue."""
        try:
            yield
        except BadFolder:
            raise
        except (Exception, SystemExit):
            self.traced[place] = traceback.format_exc()


def compute(settings: NetworkSettings, save: Path | None = None, progress: Progress | None = None) -> Record:
    """Train and measure a network, on one thread: same settings, versions and machine, same digits.

    Args:
        settings: which network.
        save: where a training that lasts leaves its checkpoints, and goes on from.
        progress: called with ("training steps", done, total).
    """
    with one_thread():
        if isinstance(settings.training, TrainedElsewhere):
            return _read(settings, settings.training)
        split, one = _member(settings, save, progress)
        start = time.perf_counter()
        trained = train(one.model, one.data, one.settings, test=one.test, watch=one.watch, save=save, progress=progress)
        return _record(settings, split, one, trained, time.perf_counter() - start)


def _read(settings: NetworkSettings, training: TrainedElsewhere) -> Record:
    """Measure a network that was trained elsewhere."""
    split, model, file = _data(settings.data), settings.model.build(), Path(training.weights)
    if contents_of(file) != training.contents:
        raise BadWeights(f"weights: {file} was changed since the study began: put it back, or begin another study")
    load_weights(model, file)
    member = Member(model, split.train, Training(SGD(1.0), max_steps=0, loss=training.loss))
    trained = TrainingResult("trained elsewhere", 0, 0.0, nan, nan, {})
    return _record(settings, split, member, trained, 0.0)


def _member(settings: NetworkSettings, save: Path | None, progress: Progress | None) -> tuple[Split, Member]:
    split = _data(settings.data)
    model = settings.model.build()
    watch = tracker_of(model, split, settings)
    assert isinstance(settings.training, Training)
    return split, Member(model, split.train, settings.training, split.held_out, watch, save, progress)


def _record(
    settings: NetworkSettings, split: Split, one: Member, trained: TrainingResult, seconds: float, why_alone: str = ""
) -> Record:
    """Measure a trained network: all that is kept of it."""
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
    curves = {**trained.curves, **graph_of(model, split)}
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
