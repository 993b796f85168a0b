"""Loaders and data sets read in a fixed order; their exceptions as one line that names the sample."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from flatlens.errors import BadData
from flatlens.problem.ranks import Ranks
from flatlens.userfile import load, said, users_code

_LOCK = threading.Lock()
_keepers: list[tuple[int, tuple[Any, ...]]] = []
"""By context that keeps the random states: its thread, and the states that it restores."""


def read(loader: DataLoader[Any], ranks: Ranks, where: str) -> Iterator[tuple[int, Any]]:
    """Yield a rank's batches with their numbers; a batch of another rank is not loaded if a sampler picks its samples.

    Raises:
        BadData: the user's code raised; `where` names the data in the error.
    """
    sampler = loader.batch_sampler
    if ranks.size == 1 or sampler is None or isinstance(loader.dataset, IterableDataset):
        yield from ((number, raw) for number, raw in enumerate(_guarded(loader, where)) if ranks.takes(number))
        return
    with _sampling(where):
        mine = {number: list(picked) for number, picked in enumerate(sampler) if ranks.takes(number)}
    yield from zip(mine, _guarded(_like(loader, batch_sampler=list(mine.values())), where), strict=True)


def fixed_order(loader: DataLoader[Any], where: str) -> DataLoader[Any]:
    """Return a loader of the same samples and collate, in index order; a sampler's choice is drawn once and kept."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:  # the latter: batches ready made
        return _apart(loader)
    batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 256
    with random_kept(), kept(loader), _sampling(where):
        if loader.batch_size is None:
            picked = sorted(index for batch in loader.batch_sampler for index in batch)
        else:
            picked = sorted(loader.sampler)
    return _like(loader, batch_sampler=[picked[at : at + batch_size] for at in range(0, len(picked), batch_size)])


def _apart(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader whose reading does not end another one's: workers that persist serve one reader at a time."""
    if not loader.persistent_workers:
        return loader
    drawn = {} if isinstance(loader.dataset, IterableDataset) else {"sampler": loader.sampler}
    return _like(loader, batch_size=loader.batch_size, drop_last=loader.drop_last, **drawn)


def _like(loader: DataLoader[Any], **picking: Any) -> DataLoader[Any]:
    """Return a loader of the same data set, collate and workers, which picks its samples otherwise."""
    return DataLoader(
        loader.dataset,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        **picking,
    )


@contextmanager
def random_kept(devices: Sequence[int] | None = None) -> Iterator[None]:
    """Restore the global random states of torch (on these CUDA devices, or all), NumPy and Python afterwards.

    Where contexts of several threads overlap, the last one restores what the first one met (on CUDA, each its own).
    """
    here = threading.get_ident()
    with _LOCK:
        met = next((states for thread, states in _keepers if thread != here), None)
        mine = here, met or (torch.get_rng_state(), random.getstate(), np.random.get_state())
        _keepers.append(mine)
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        with _LOCK:
            _keepers[:] = [one for one in _keepers if one is not mine]
            if all(thread == here for thread, _ in _keepers):
                torch.set_rng_state(mine[1][0])
                random.setstate(mine[1][1])
                np.random.set_state(mine[1][2])


def seed_torch(seed: int) -> None:
    """Seed torch's global random numbers.

    Without an accelerator only those of the processor: `torch.manual_seed` would also keep the call, with a stack trace
    that takes 2 ms, for devices that may start later.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global random numbers of torch, NumPy and Python inside this context; restore them afterwards."""
    with random_kept():
        seed_torch(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        yield


def load_seeded(spec: str, argument: str) -> Any:
    """Return what `file.py:NAME` names; random numbers that the file draws while it is imported are seeded with 0.

    A process imports a file once, for the network or for the data: whoever comes first must not matter.
    """
    with seeded(0):
        return load(spec, argument)


@contextmanager
def kept(loader: DataLoader[Any]) -> Iterator[None]:
    """Restore the generators of the loader and of its samplers afterwards."""
    batches = loader.batch_sampler
    holders = loader, loader.sampler, batches, getattr(batches, "sampler", None)
    generators = {id(g): g for g in (getattr(one, "generator", None) for one in holders) if g is not None}
    states = [(g, g.get_state()) for g in generators.values() if isinstance(g, torch.Generator)]
    try:
        yield
    finally:
        for g, state in states:
            g.set_state(state)


@contextmanager
def _sampling(where: str) -> Iterator[None]:
    with users_code(lambda line: BadData(f"Problem({where}): its sampler failed ({line})")):
        yield


def _guarded(loader: DataLoader[Any], where: str) -> Iterator[Any]:
    """Yield the loader's batches; an exception while reading one names the sample."""
    batches, end, turn = None, object(), 0
    while True:
        with users_code(lambda line: BadData(f"Problem({where}): {_culprit(loader, turn, line)}")):  # noqa: B023
            batches = iter(loader) if batches is None else batches
            batch = next(batches, end)
        if batch is end:
            return
        yield batch
        turn += 1


def _culprit(loader: DataLoader[Any], turn: int, line: str) -> str:
    """Return which sample of a batch cannot be read, found one by one; `line` is the batch's own exception."""
    # a sample that ended a worker process would end this one, too
    lost = "exited unexpectedly" in line or "killed by signal" in line
    if loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset) or lost:
        return f"batch {turn} cannot be read ({line})"
    dataset, first = loader.dataset, None
    try:
        indices = next(islice(loader.batch_sampler, turn, None), [])
    except (Exception, SystemExit):
        return f"batch {turn} cannot be read ({line})"
    for index in indices:
        try:
            form = _form(dataset[index])
        except (Exception, SystemExit) as error:
            return f"sample {index} cannot be read ({said(error)})"
        first = first or (index, form)
        if form != first[1]:
            return (
                f"samples {first[0]} and {index} do not go into one batch, of shapes {first[1]} and {form} ({line}): "
                f"bring them to one shape, or give a DataLoader whose collate_fn pads them or returns them as a list"
            )
    which = f", of samples {indices[0]} to {indices[-1]}," if indices else ""
    return f"the collate of batch {turn}{which} failed ({line})"


def _form(sample: Any) -> str:
    """Return a description of a sample: the shapes of tensors and arrays, the types of everything else.

    >>> _form((torch.zeros(2, 3), {"mask": [1.0]}))
    '(2, 3), float'
    """
    return ", ".join(str(tuple(x.shape)) if hasattr(x, "shape") else type(x).__name__ for x in tree_leaves(sample))
