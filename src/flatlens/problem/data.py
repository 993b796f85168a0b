"""Data, always read in the same order with the same values, in chunks of any size.

Data as people bring it is opened as tensors or as a loader. A loader is read in a fixed order, with its random
numbers kept, and its exceptions become one line that names the sample.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from itertools import islice
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from flatlens.errors import BadData, typed_line
from flatlens.problem.batches import (
    BATCH_OF,
    FORWARD_CHUNK,
    Batch,
    alike_in_form,
    as_pair,
    checksum,
    collated,
    form_shown,
    in_tensors,
    is_dicts,
    is_samples,
    joined,
    loader_of,
    plain,
    ready_made,
    require_dense,
    select,
    size,
    take,
    tensors_in,
    unlisted,
)
from flatlens.problem.ranks import ALONE, Ranks
from flatlens.progress import count_of
from flatlens.user_code import load, said, users_code

CHOICE = "choice of samples"
"""The fact of a loader that differs between processes where each gets its own part of the data."""

MOST_IN_BATCH = 2**32
"""More samples than any batch has: the number of a chunk is the batch's number times this, plus its first sample."""

FEW = 64  #: the largest number of samples that `Data.first` gives

# Random states

_LOCK = threading.Lock()
_keepers: list[tuple[int, tuple[Any, ...]]] = []
"""By context that keeps the random states: its thread, and the states that it restores."""


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
    """Return what `file.py:NAME` names; random numbers that it draws are seeded with 0, whoever imports it first."""
    with seeded(0):
        return load(spec, argument)


# Loaders, read in a fixed order


def read(loader: DataLoader[Any], ranks: Ranks, where: str) -> Iterator[tuple[int, Any]]:
    """Yield a rank's batches with their numbers; batches of other ranks are not loaded if a sampler picks samples."""
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
        if not loader.persistent_workers:
            return loader
        # workers that persist serve one reader at a time: the reading of this loader must not end the user's own
        drawn = {} if isinstance(loader.dataset, IterableDataset) else {"sampler": loader.sampler}
        return _like(loader, batch_size=loader.batch_size, drop_last=loader.drop_last, **drawn)
    batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 256
    with random_kept(), kept(loader), _sampling(where):
        if loader.batch_size is None:
            picked = sorted(index for batch in loader.batch_sampler for index in batch)
        else:
            picked = sorted(loader.sampler)
    return _like(loader, batch_sampler=[picked[at : at + batch_size] for at in range(0, len(picked), batch_size)])


def _like(loader: DataLoader[Any], **picking: Any) -> DataLoader[Any]:
    return DataLoader(
        loader.dataset,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        **picking,
    )


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
    with users_code(lambda line: BadData(f"its sampler failed ({line})", argument=where)):
        yield


def _guarded(loader: DataLoader[Any], where: str) -> Iterator[Any]:
    batches, end, turn = None, object(), 0
    while True:
        with users_code(lambda line: BadData(f"{_culprit(loader, turn, line)}", argument=where)):  # noqa: B023
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


# Data as people bring it


def open_source(source: Any, where: str) -> tuple[DataLoader[Any] | None, Batch | None]:
    """Return (loader, None) or (None, tensors)."""
    if isinstance(source, TensorDataset):
        require_dense(source.tensors, where)
        return None, source.tensors
    if isinstance(source, DataLoader):
        return fixed_order(source, where), None
    if isinstance(source, Dataset):
        return DataLoader(source, batch_size=BATCH_OF, collate_fn=partial(collated, where=where)), None
    if isinstance(source, Tensor | np.ndarray):
        require_dense(x := _as_tensors(source, where), where)
        return None, x
    if is_dicts(source):
        return loader_of(source, where), None
    _require_no_batches(source, where)
    if isinstance(source, Sequence) and not isinstance(source, str) and len(source) == 2:
        x, y = (_as_tensors(part, where) for part in source)
        require_dense((x, y), where)
        n = size(x)
        if isinstance(y, Tensor) and (y.ndim == 0 or len(y) != n):
            raise BadData(
                f"x has {count_of(n, 'sample')} and y {len(y) if y.ndim else 'a single number'}: give as many of each",
                argument=where,
            )
        return None, (x, y)
    if isinstance(source, Mapping):
        require_dense(tensors := in_tensors(plain(source), where), where)
        return None, tensors
    if hasattr(source, "x") and hasattr(source, "y"):
        return open_source((source.x, source.y), where)
    raise BadData(
        "expected a pair (x, y), a dict with labels, a list of dicts, a Dataset or a DataLoader, got "
        f"{type(source).__name__}",
        argument=where,
    )


def _require_no_batches(source: Any, where: str) -> None:
    """Refuse a list of batches or of samples: nothing in it says which of the two it holds."""
    if isinstance(source, Iterator):
        raise BadData(
            f"a {type(source).__name__} can be read only once: give DataLoader(list(data), batch_size=None) if each "
            f"item is a batch, DataLoader(list(data), batch_size={BATCH_OF}) if each is a sample",
            argument=where,
        )

    def may_be_batch(item: Any) -> bool:
        arrays = isinstance(item, list) and any(isinstance(part, Tensor | np.ndarray) for part in item)
        return arrays or isinstance(item, tuple) or as_pair(item) is not item

    if not isinstance(source, list | tuple) or not source or not all(map(may_be_batch, source)):
        return
    if isinstance(source, tuple) and len(source) == 2 and not _one_form(*source):
        return  # inputs and targets
    single = ", DataLoader([data], batch_size=None) if it is one batch of inputs and targets" * (len(source) == 2)
    raise BadData(
        f"a {type(source).__name__} of {len(source)} {type(source[0]).__name__}s may hold batches or samples",
        argument=where,
        remedy="give DataLoader(data, batch_size=None) if each item is a batch, "
        f"DataLoader(data, batch_size={BATCH_OF}) if each is a sample{single}",
    )


def _one_form(one: Any, other: Any) -> bool:
    """Return whether the parts of two items are alike but for their number of rows, and are not the same tensors."""
    if isinstance(one, Mapping) or isinstance(other, Mapping):
        return isinstance(one, Mapping) and isinstance(other, Mapping) and set(one) == set(other)
    if len(one) != len(other) or all(a is b for a, b in zip(one, other, strict=True)):
        return False
    pairs = zip(one, other, strict=True)
    return all(alike_in_form(pair) and len({getattr(part, "shape", ())[1:] for part in pair}) == 1 for pair in pairs)


def _as_tensors(part: Any, where: str) -> Any:
    if isinstance(part, Mapping | tuple):
        return plain(part)
    try:
        if not hasattr(part, "__array__") or isinstance(part, Tensor):
            return torch.as_tensor(part)
        array = np.asarray(part)
        return torch.as_tensor(array if array.flags.writeable else array.copy())  # torch warns about read-only memory
    except Exception as error:  # an object of unknown type may raise anything
        raise BadData(
            f"cannot read a {type(part).__name__} as a tensor ({typed_line(error, 200)}): give tensors or arrays of "
            "numbers, samples first; samples of several sizes are lists in a DataLoader's batches",
            argument=where,
        ) from error


@final
class Data:
    """A fixed sequence of samples, read chunk by chunk.

    Tensors are split as requested. A dataset or loader is read in its own batches (its collate, its batch size) but in
    index order. Each batch gets a checksum on the first reading, and one that differs later (augmentation, noise) is
    refused.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(3, 2, dtype=torch.float64)
    >>> data = (torch.ones(4, 3, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64))
    >>> problem = fl.Problem(net, "half_squared_error", data)
    >>> [len(batch[0]) for batch in problem.data.chunks(3)]
    [3, 1]
    """

    def __init__(self, source: Any, where: str, paired: bool = True) -> None:
        self.where = where
        self.whole: Data | None = None  #: the data of which these are the first samples
        self._paired = paired  #: whether a dict with labels becomes a pair (inputs, labels)
        self._ready = False  #: whether the source's batches have the form that is measured
        self.hidden = ""  #: how many labelled tokens do not count, in words; found by `inspection`
        self.reading = ""  #: how outputs are read whose shapes have two meanings, in words; found by `inspection`
        self.labelled = False  #: whether the batches read so far came as dicts with labels
        self._drops = source.batch_size if isinstance(source, DataLoader) and source.drop_last else None
        self._source, tensors = open_source(source, where)
        self._tensors = self._read(tensors) if isinstance(tensors, Mapping) else tensors
        self._prints: dict[int, tuple[int, int]] = {}  #: checksum and samples, by the batch's number
        self._held: dict[Ranks, int] = {}  #: samples of a complete reading, by rank
        self._readings = 0

    @property
    def in_batches(self) -> bool:
        """Return whether a loader gives the data in batches of its own."""
        return self._source is not None

    @property
    def told(self) -> str:
        """Return the data in words: shapes and checksum of tensors, the type of anything else; the remarks."""
        of = self._values if self._source is None else f"batches of a {type(self._source).__name__}"
        return "; ".join([of, *self.remarks, *self.notes])

    @property
    def notes(self) -> list[str]:
        """Return in words what changes the risk or the number of samples, and is easily not meant."""
        notes = [note for note in (self.hidden, self.reading) if note]
        if self._source is None or not isinstance(self._source.dataset, IterableDataset):
            return notes
        # all workers of a stream may give the same batches
        workers, prints = self._source.num_workers, [self._prints.get(number) for number in range(len(self._prints))]
        turns = [prints[at : at + workers] for at in range(0, len(prints), max(1, workers))]
        if workers > 1 and turns and all(len(turn) == workers and {*turn} == {turn[0]} != {None} for turn in turns):
            notes.append(
                f"the {workers} workers gave the same batches, so each sample appears {workers} times: does the "
                f"stream divide its samples by torch.utils.data.get_worker_info()?"
            )
        return notes

    @cached_property
    def _values(self) -> str:
        shapes = " and ".join(str(tuple(leaf.shape)) for leaf in tensors_in(self._tensors))
        return f"tensors of shape {shapes}, checksum {checksum(*tensors_in(self._tensors)):08x}"

    @cached_property
    def facts(self) -> dict[str, object]:
        """Return what has to be the same in all processes, by name; of a loader only its first batch is read."""
        if self._tensors is not None:
            return {"shapes": [tuple(leaf.shape) for leaf in tensors_in(self._tensors)], "values": self._values}
        first = next(self.chunks(FORWARD_CHUNK), None)
        return {
            "numbers of samples": _length(self._source),
            CHOICE: self._drawn,
            "first samples": [checksum(leaf) for leaf in tensors_in(first)],
        }

    @property
    def _drawn(self) -> list[Any]:
        batches = self._source.batch_sampler if isinstance(self._source, DataLoader) else None
        return [index for batch in batches for index in batch] if isinstance(batches, list) else []

    @property
    def remarks(self) -> list[str]:
        """Return in words which samples a loader repeats or leaves out, and which are measured though it drops them."""
        if self._source is None:
            return []
        drawn, there = self._drawn, _length(self._source) or 0
        of_drawn = f"of the {len(drawn)} samples are"
        again, out = len(drawn) - len(set(drawn)), there - len(set(drawn)) if drawn else 0
        dropped = len(drawn) % self._drops if self._drops else 0
        told = [
            (again, f"{of_drawn} repeated: the loader's sampler draws with replacement"),
            (out, f"of the {there} samples are not drawn by the loader's sampler"),
            (
                dropped,
                f"of the {len(drawn)} samples are dropped in training (drop_last=True), but measured here",
            ),
        ]
        return [f"{count} {words}" for count, words in told if count > 0]

    def chunks(self, most: int) -> Iterator[Batch]:
        """Yield batches of at most `most` samples, in the data's order."""
        return (batch for _, batch in self.shared(most, ALONE))

    def shared(self, most: int, ranks: Ranks) -> Iterator[tuple[int, Batch]]:
        """Yield a rank's chunks, each with a number for its position in the data, the same for any number of ranks.

        For tensors, chunk i goes to rank i mod size. For loaders, batch i does; a rank does not load the other batches
        where the sampler tells their indices.
        """
        in_memory = self._tensors is not None
        for number, batch in self._batches(ALONE if in_memory else ranks):
            n = size(batch)
            for turn, start in enumerate(range(0, n, most)):
                if not in_memory or ranks.takes(turn):
                    yield number * MOST_IN_BATCH + start, take(batch, start, min(start + most, n))

    def in_batches_of(self, exactly: int) -> Iterator[Batch]:
        """Yield batches of one size, whatever the batches of the source; the last one may be smaller."""
        held: list[Batch] = []
        for _, piece in self._batches():
            held.append(piece)
            while sum(map(size, held)) >= exactly:
                whole = joined(held)
                yield take(whole, 0, exactly)
                held = [take(whole, exactly, size(whole))] if size(whole) > exactly else []
        if held:
            yield joined(held)

    @cached_property
    def count(self) -> int:
        """The number of samples, without running the network; the data is read where nothing else tells it."""
        if self._tensors is not None:
            return size(self._tensors)
        assert self._source is not None
        told = None if isinstance(self._source.dataset, IterableDataset) else self._source.batch_sampler
        known = _length(self._source) if told is not None else None
        return len(self._drawn) or known or sum(size(batch) for batch in self.chunks(FORWARD_CHUNK))

    def first(self, count: int) -> Data:
        """Return the first `count` samples, at most `FEW`, as Data held in memory; later batches are not read."""
        pieces, held = [], 0
        for batch in self._beginning:
            pieces.append(take(batch, 0, min(count - held, size(batch))))
            held += size(pieces[-1])
            if held == count:
                break
        some = self._in_memory(pieces)
        some.whole = self
        return some

    @cached_property
    def _beginning(self) -> list[Batch]:
        pieces, held = list[Batch](), 0
        for batch in self.chunks(FEW):
            pieces.append(batch)
            held += size(batch)
            if held >= FEW:
                break
        return pieces

    def picked(self, samples: Tensor) -> Data:
        """Return the chosen samples as Data held in memory, in the source's batches where these cannot be joined."""
        first, pieces = 0, []
        for _, batch in self._batches():
            mine = samples[(first <= samples) & (samples < first + size(batch))].sort().values - first
            first += size(batch)
            if len(mine):
                pieces.append(select(batch, mine))
        return self._in_memory(pieces)

    def _in_memory(self, pieces: list[Batch]) -> Data:
        with suppress(RuntimeError, ValueError):  # for example, batches padded to different lengths
            if all(len(leaf) == size(piece) for piece in pieces for leaf in unlisted(piece) if leaf.ndim > 0):
                pieces = [joined(pieces)]
        some = Data(DataLoader(cast(Dataset[Any], pieces), batch_size=None, collate_fn=ready_made), self.where)
        some.labelled, some._ready = self.labelled, True
        return some

    def _batches(self, ranks: Ranks = ALONE) -> Iterator[tuple[int, Batch]]:
        if self._tensors is not None:
            yield 0, self._tensors
            return
        assert self._source is not None
        self._readings += 1
        with random_kept(), kept(self._source):  # a loader draws a seed from the global generator
            seed_torch(self._readings)  # a new seed each time, so that random augmentation shows
            held = 0
            for number, raw in read(self._source, ranks, self.where):
                batch = self._read(self._opened(raw))
                require_dense(batch, self.where)
                held += self._require_same(number, batch)
                yield number, batch
        self.counted(held, ranks)  # not reached when the caller stops early

    def _opened(self, raw: Any) -> Any:
        if not isinstance(raw, list) or (self._collates and is_samples(raw)):
            return raw
        return tuple(raw)

    @property
    def _collates(self) -> bool:
        """Return whether the loader's batches may have lists of samples, which torch's own collate never makes."""
        return self._source is not None and self._source.collate_fn is not default_collate

    def _holds_samples(self, kind: type) -> bool | None:
        """Return whether a list or tuple that could also be inputs holds one item for each sample; None if unknown."""
        if not self._collates:
            return False
        return (kind is list and not self._paired) or None if self._lists is None else self._lists

    @cached_property
    def _lists(self) -> bool | None:
        """Return what the first batch shows that leaves no doubt; None if there is no such batch."""
        assert self._source is not None
        with random_kept(), kept(self._source):
            seed_torch(1)
            found = (form_shown(self._opened(raw)) for _, raw in read(self._source, ALONE, self.where))
            return next((verdict for verdict in found if verdict is not None), None)

    def _read(self, raw: Any) -> Batch:
        if self._ready:
            return raw
        batch = plain(raw, self._holds_samples)
        if not isinstance(batch, Mapping):
            return batch
        batch = in_tensors(batch, self.where)
        found = as_pair(batch) if self._paired else batch
        self.labelled = isinstance(found, tuple)
        return found

    def counted(self, n: int, ranks: Ranks = ALONE) -> None:
        """Refuse a number of samples that differs from the earlier reading's."""
        known = self._held.setdefault(ranks, n)
        if known != n:
            raise BadData(
                f"the data has {n} samples now and had {known} at first (a stream?)",
                argument=self.where,
                remedy="measure a fixed copy of the data",
            )

    def _require_same(self, number: int, batch: Batch) -> int:
        """Return the number of samples in a batch; refuse a batch that differs from the first reading."""
        fingerprint, n = checksum(*tensors_in(batch)), size(batch)
        before, held = self._prints.setdefault(number, (fingerprint, n))
        if (before, held) != (fingerprint, n):
            how = f"has {n} samples instead of {held}" if n != held else "differs"
            raise BadData(
                f"batch {number} {how} when read again (augmentation, noise or a stream?)",
                argument=self.where,
                remedy="measure a fixed copy of the data",
            )
        return n


def _length(loader: DataLoader[Any] | None) -> int | None:
    dataset = None if loader is None else loader.dataset
    return len(dataset) if isinstance(dataset, Sized) else None
