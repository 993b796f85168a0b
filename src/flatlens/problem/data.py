"""Data, always read in the same order with the same values, in chunks of any size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from contextlib import suppress
from functools import cached_property
from typing import Any, cast, final

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from flatlens.errors import BadData
from flatlens.problem.batches import as_pair, in_tensors, ready_made
from flatlens.problem.listed import form_shown, is_samples, plain
from flatlens.problem.loaders import kept, random_kept, read, seed_torch
from flatlens.problem.opening import has_axis, open_source
from flatlens.problem.ranks import ALONE, Ranks
from flatlens.problem.samples import FORWARD_CHUNK, Batch, checksum, joined, require_dense, select, size, take, unlisted

CHOICE = "choice of samples"
"""The fact of a loader that differs between processes where each gets its own part of the data."""

MOST_IN_BATCH = 2**32
"""More samples than any batch has: the number of a chunk is the batch's number times this, plus its first sample."""


@final
class Data:
    """A fixed sequence of samples, read chunk by chunk.

    Tensors are split as requested. A dataset or loader is read in its own batches (its collate, its batch size) but in
    index order. Each batch gets a checksum on the first reading, and one that differs later (augmentation, noise) is
    refused.
    """

    def __init__(self, source: Any, where: str, paired: bool = True) -> None:
        self.where = where
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
    def told(self) -> str:
        """Return the data in words: shapes and checksum of tensors, the type of anything else; the remarks."""
        of = self._values if self._source is None else f"batches of a {type(self._source).__name__}"
        return "; ".join([of, *self.remarks, *self.notes])

    @property
    def notes(self) -> list[str]:
        """Return in words what changes the risk or the number of samples, and is easily not meant."""
        return [note for note in (self.hidden, self.reading, self._repeated) if note]

    @property
    def _repeated(self) -> str:
        """Return in words that all workers of a stream gave the same batches; empty if they did not."""
        loader, prints = self._source, [self._prints.get(number) for number in range(len(self._prints))]
        if loader is None or not isinstance(loader.dataset, IterableDataset) or loader.num_workers < 2:
            return ""
        turns = [prints[at : at + loader.num_workers] for at in range(0, len(prints), loader.num_workers)]
        if not turns or any(None in turn or len(turn) < loader.num_workers or len(set(turn)) > 1 for turn in turns):
            return ""
        return (
            f"the {loader.num_workers} workers gave the same batches, so each sample is there {loader.num_workers} "
            f"times: does the stream divide its samples by torch.utils.data.get_worker_info()?"
        )

    @cached_property
    def _values(self) -> str:
        """Return the shapes and the checksum of tensors."""
        leaves = [leaf for leaf in tree_leaves(self._tensors) if isinstance(leaf, Tensor)]
        total = 0
        for leaf in leaves:
            total = checksum(leaf, total)
        shapes = " and ".join(str(tuple(leaf.shape)) for leaf in leaves)
        return f"tensors of shape {shapes}, checksum {total:08x}"

    @cached_property
    def facts(self) -> dict[str, object]:
        """Return what has to be the same in all processes, by name; of a loader only its first batch is read."""
        if self._tensors is not None:
            shapes = [tuple(leaf.shape) for leaf in tree_leaves(self._tensors) if isinstance(leaf, Tensor)]
            return {"shapes": shapes, "values": self._values}
        first = next(self.chunks(FORWARD_CHUNK), None)
        return {
            "numbers of samples": _length(self._source),
            CHOICE: self._drawn,
            "first samples": [checksum(leaf) for leaf in tree_leaves(first) if isinstance(leaf, Tensor)],
        }

    @property
    def _drawn(self) -> list[Any]:
        """Return the indices of a loader's samples, as its sampler picks them."""
        batches = self._source.batch_sampler if isinstance(self._source, DataLoader) else None
        return [index for batch in batches for index in batch] if isinstance(batches, list) else []

    @property
    def remarks(self) -> list[str]:
        """Return in words which samples a loader repeats or leaves out, and which are measured though it drops them."""
        drawn, told = self._drawn, []
        if again := len(drawn) - len(set(drawn)):
            told.append(
                f"{again} of the {len(drawn)} samples are there again: the loader's sampler draws with replacement"
            )
        there = _length(self._source) or 0
        if drawn and (out := there - len(set(drawn))) > 0:
            told.append(f"{out} of the {there} samples are left out by the loader's sampler")
        if self._drops and (out := len(drawn) % self._drops):
            told.append(
                f"{out} of the {len(drawn)} samples are left out by the loader's drop_last=True, and are measured, too"
            )
        return told

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

    def picked(self, samples: Tensor) -> Data:
        """Return the chosen samples as Data held in memory.

        In the source's own batches where these cannot be joined.
        """
        first, pieces = 0, []
        for _, batch in self._batches():
            mine = samples[(first <= samples) & (samples < first + size(batch))].sort().values - first
            first += size(batch)
            if len(mine):
                pieces.append(select(batch, mine))
        with suppress(RuntimeError, ValueError):  # for example, batches padded to different lengths
            if all(len(leaf) == size(piece) for piece in pieces for leaf in unlisted(piece) if has_axis(leaf)):
                pieces = [joined(pieces)]
        some = Data(DataLoader(cast(Dataset[Any], pieces), batch_size=None, collate_fn=ready_made), self.where)
        some.labelled, some._ready = self.labelled, True
        return some

    def _batches(self, ranks: Ranks = ALONE) -> Iterator[tuple[int, Batch]]:
        """Yield a rank's batches of the source with their numbers."""
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
        """Return a loader's batch as a tuple of its parts; a list of samples as it is."""
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
        """Return a batch of the source in the form that is measured."""
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
                f"Problem({self.where}): the data has {n} samples now, and had {known} when first read, as a "
                f"stream has: measure a fixed copy of the data"
            )

    def _require_same(self, number: int, batch: Batch) -> int:
        """Return the number of samples in a batch; refuse a batch that differs from the first reading."""
        fingerprint, n = 0, size(batch)
        for leaf in tree_leaves(batch):
            if isinstance(leaf, Tensor):
                fingerprint = checksum(leaf, fingerprint)
        before, held = self._prints.setdefault(number, (fingerprint, n))
        if (before, held) != (fingerprint, n):
            how = f"has {n} samples instead of {held}" if n != held else "differs"
            raise BadData(
                f"Problem({self.where}): batch {number} {how} when read again, as augmentation, noise or a stream "
                f"make it: measure a fixed copy of the data"
            )
        return n


def _length(loader: DataLoader[Any] | None) -> int | None:
    """Return the number of samples of a loader's data set, if it tells."""
    dataset = None if loader is None else loader.dataset
    return len(dataset) if isinstance(dataset, Sized) else None
