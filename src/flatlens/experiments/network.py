"""Train and measure one network of a study: what a worker does."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from flatlens.data import DataSettings, Split, default_root
from flatlens.estimate import Progress, Report
from flatlens.experiments.measuring import graph_of, measure_network, tracker_of
from flatlens.experiments.settings import NetworkSettings
from flatlens.experiments.store import Record, Store
from flatlens.experiments.versions import versions
from flatlens.problem import is_linear
from flatlens.training import train

_kept: dict[tuple[DataSettings, Path], Split] = {}


@dataclass(frozen=True)
class ComputeInto:
    """The task of a worker: compute a network and keep it in the store. Picklable."""

    store: Store
    tell: bool = False  #: whether it notes in the folder how far the training is, for who watches

    def __call__(self, settings: NetworkSettings) -> None:
        """Do it, unless it is there: its worker died when it had just been written, or another process was quicker."""
        self.store.require_seen()
        if self.store.folder(settings.key).is_dir():
            return
        save = self.store.checkpoint(settings.key)
        with self.store.noted(settings.key) if self.tell else nullcontext() as progress:
            record = compute(settings, save=save, progress=progress)
        self.store.write(record)


def compute(settings: NetworkSettings, save: Path | None = None, progress: Progress | None = None) -> Record:
    """Train and measure a network, on one thread: same settings, versions and machine, same digits.

    Args:
        settings: which network.
        save: where a training that lasts leaves its checkpoints, and goes on from.
        progress: called with ("training steps", done, total).
    """
    with _one_thread():
        split = _data(settings.data)
        model = settings.model.build()
        start = time.perf_counter()
        watch = tracker_of(model, split, settings)
        trained = train(
            model, split.train, settings.training, test=split.test, watch=watch, save=save, progress=progress
        )
        between = time.perf_counter()
        report = Report({}, {}) if trained.outcome == "diverged" else measure_network(model, split, settings)
        result = {
            "samples": len(split.x),
            "outcome": trained.outcome,
            "steps": trained.steps,
            "loss": _or_none(trained.loss),
            "accuracy": trained.accuracy,
            "layers": [name for name, module in model.named_modules() if is_linear(module)],
            "versions": versions(torch.get_num_threads()),
            "seconds_training": between - start,
            "seconds_measuring": time.perf_counter() - between,
        }
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    curves = {**trained.curves, **graph_of(model, split)}
    return Record(settings, result, curves, weights, report, None if watch is None else watch.history)


def _data(settings: DataSettings) -> Split:
    """The data, kept for this process's next network, which mostly has the same. Nothing may write to it."""
    key = settings, default_root()
    if (split := _kept.get(key)) is None:
        _kept.clear()  # first: large data would not fit twice
        split = _kept[key] = settings.load()
    return split


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
