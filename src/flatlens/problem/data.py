"""Data, always read in the same order with the same values, in chunks of any size."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, TypeAlias, cast, final

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flatlens.errors import BadData, typed_line
from flatlens.problem.batches import (
    BATCH_OF,
    as_pair,
    collated,
    counts_samples,
    in_tensors,
    is_dicts,
    loader_of,
    picked,
    ready_made,
)
from flatlens.problem.loaders import fixed_order, kept, random_kept, read, seed_torch
from flatlens.problem.ranks import ALONE, Ranks
from flatlens.problem.shards import in_one_piece

Batch: TypeAlias = Any
"""The batches of a loader: usually (x, y); any nesting of tensors whose first axis counts samples."""

FORWARD_CHUNK = 512
"""Samples of a forward pass without a graph: with 1024, LeNet takes 1.5 times as long, with 256 small networks do."""

CHOICE = "choice of samples"
"""The fact of a loader that differs between processes where each gets its own part of the data."""

MOST_IN_BATCH = 2**32
"""More samples than any batch has: the number of a chunk is the batch's number times this, plus its first sample."""


def size(batch: Batch) -> int:
    """Return the number of samples in a batch."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim > 0]
    if not leaves:
        raise BadData(
            f"Problem(data=...): a batch must consist of tensors whose first axis is the samples, got "
            f"{type(batch).__name__}"
        )
    return len(leaves[0])


def take(batch: Batch, start: int, stop: int) -> Batch:
    """Return samples [start, stop) of a batch; entries that do not count samples stay whole."""
    return batch if start == 0 and stop >= size(batch) else select(batch, slice(start, stop))


def spaced(batch: Batch, most: int) -> Batch:
    """Return at most `most` samples, evenly spaced over a batch."""
    n = size(batch)
    return batch if n <= most else select(batch, torch.linspace(0, n - 1, most).round().long())


def select(batch: Batch, samples: slice | Tensor) -> Batch:
    """Return some samples of a batch; entries that do not count samples stay whole."""
    return picked(batch, samples, size(batch), (list,))


def joined(batches: list[Batch]) -> Batch:
    """Return batches of equal structure joined into one."""
    if len(batches) == 1:
        return batches[0]

    def cat(*leaves: Any) -> Any:
        if isinstance(leaves[0], list):
            return [one for each in leaves for one in each]
        return torch.cat(leaves) if isinstance(leaves[0], Tensor) and leaves[0].ndim > 0 else leaves[0]

    return tree_map(cat, batches[0], *batches[1:], is_leaf=lambda part: isinstance(part, list))


def move(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    """Return a copy of the batch on a device, floating tensors in the model's dtype.

    A copy, as a model may write to it.
    """

    def to(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().to(device, dtype if leaf.is_floating_point() else leaf.dtype, copy=True)

    return tree_map(to, batch)


def checksum(tensor: Tensor, start: int = 0) -> int:
    """Return the checksum of a tensor's bytes, continued from `start`; of a sharded tensor, of this rank's part."""
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    flat = dense.cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data, start)


def finite(tensor: Tensor) -> bool:
    """Return whether no entry is NaN or inf.

    A finite sum proves it with one read from the device; only if the sum is not finite is each entry checked.
    """
    if bool(in_one_piece(tensor.sum()).isfinite()):  # of all processes' parts: all have to decide alike
        return True
    return bool(in_one_piece(tensor.isfinite().all()))


def require_dense(batch: Batch, where: str) -> None:
    """Refuse tensors without values, or in a form that cannot be split into samples."""
    for leaf in tree_leaves(batch):
        if not isinstance(leaf, Tensor):
            continue
        if leaf.is_meta:
            raise BadData(f"Problem({where}): a tensor on the meta device has no values: give the data itself")
        if leaf.layout != torch.strided or leaf.is_nested or leaf.is_quantized:
            form = "nested" if leaf.is_nested else "quantised" if leaf.is_quantized else "sparse"
            mend = {"nested": "to_padded_tensor(0.0)", "quantised": "dequantize()", "sparse": "to_dense()"}[form]
            raise BadData(f"Problem({where}): a {form} tensor cannot be split into samples: convert it with {mend}")
        if leaf.is_floating_point() and leaf.element_size() == 1:
            raise BadData(f"Problem({where}): torch cannot compute with {leaf.dtype}: convert it with .float()")


def require_finite(batch: Batch, given: str) -> None:
    """Refuse NaN and inf and name the first bad sample; `given` names the data in the error."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and not finite(leaf):
            bad = (~torch.isfinite(leaf)).reshape(len(leaf), -1).any(1) if leaf.ndim else torch.tensor([True])
            raise BadData(
                f"{given}: {int(bad.sum())} of {len(bad)} samples contain NaN or inf, the first at index "
                f"{int(bad.nonzero()[0])} of this batch: repair or remove them"
            )


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
        self.labelled = False  #: whether the batches read so far came as dicts with labels
        self._drops = source.batch_size if isinstance(source, DataLoader) and source.drop_last else None
        self._source, tensors = _open(source, where)
        self._tensors = self._read(tensors) if isinstance(tensors, Mapping) else tensors
        self._prints: dict[int, tuple[int, int]] = {}  #: checksum and samples, by the batch's number
        self._held: dict[Ranks, int] = {}  #: samples of a complete reading, by rank
        self._readings = 0

    @cached_property
    def told(self) -> str:
        """Return the data in words: shapes and checksum of tensors, the type of anything else."""
        if self._tensors is None:
            return "; ".join([f"batches of a {type(self._source).__name__}", *self.remarks])
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
            return {"shapes": shapes, "values": self.told}
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
            if all(len(leaf) == size(piece) for piece in pieces for leaf in tree_leaves(piece) if _has_axis(leaf)):
                pieces = [joined(pieces)]
        some = Data(DataLoader(cast(Dataset[Any], pieces), batch_size=None, collate_fn=ready_made), self.where)
        some.labelled = self.labelled
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
                batch = self._read(tuple(raw) if isinstance(raw, list) else raw)
                require_dense(batch, self.where)
                held += self._require_same(number, batch)
                yield number, batch
        self.counted(held, ranks)  # not reached when the caller stops early

    def _read(self, raw: Any) -> Batch:
        """Return a batch of the source in the form that is measured."""
        batch = _plain(raw)
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
                f"Problem({self.where}): the data has {n} samples now, and had {known} when first read: is it a "
                f"stream? Measure a fixed copy of the data"
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
                f"Problem({self.where}): batch {number} {how} when read again: does the dataset augment or add "
                f"noise, or is it a stream? Measure a fixed copy of the data"
            )
        return n


def _open(source: Any, where: str) -> tuple[DataLoader[Any] | None, Batch | None]:
    """Return (loader, None) or (None, tensors)."""
    if isinstance(source, TensorDataset):
        require_dense(source.tensors, where)
        return None, source.tensors
    if isinstance(source, DataLoader):
        return fixed_order(source, where), None
    if isinstance(source, Dataset):
        return DataLoader(source, batch_size=BATCH_OF, collate_fn=partial(collated, where=where)), None
    if is_dicts(source):
        return loader_of(source, where), None
    if isinstance(source, Sequence) and not isinstance(source, str) and len(source) == 2:
        x, y = (_as_tensors(part, where) for part in source)
        require_dense((x, y), where)
        n = size(x)
        if isinstance(y, Tensor) and (y.ndim == 0 or len(y) != n):
            raise BadData(
                f"Problem({where}): x has {n} samples and y {len(y) if y.ndim else 'a single number'}: give as many of "
                f"each"
            )
        return None, (x, y)
    if isinstance(source, Mapping):
        require_dense(tensors := in_tensors(_plain(source), where), where)
        return None, tensors
    if hasattr(source, "x") and hasattr(source, "y"):
        return _open((source.x, source.y), where)
    raise BadData(
        f"Problem({where}): a pair (x, y), a dict with labels, a list of dicts, a Dataset or a DataLoader is needed, "
        f"got {type(source).__name__}"
    )


def _length(loader: DataLoader[Any] | None) -> int | None:
    """Return the number of samples of a loader's data set, if it tells."""
    dataset = None if loader is None else loader.dataset
    return len(dataset) if isinstance(dataset, Sized) else None


def _plain(batch: Batch, n: int = 0) -> Batch:
    """Return the batch with the mappings of tokenizers as dicts, so that their tensors are found and split."""
    if isinstance(batch, Mapping):
        return {key: _plain(value, n) for key, value in batch.items()}
    n = n or next((len(leaf) for leaf in tree_leaves(batch) if _has_axis(leaf)), 0)
    inputs = type(batch) is list and all(counts_samples(part, n) for part in batch)
    if type(batch) is tuple or inputs:  # a loader makes a list of the inputs of a sample
        return tuple(_plain(part, n) for part in batch)
    return batch


def _has_axis(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def _as_tensors(part: Any, where: str) -> Any:
    """Return a tensor or array as a tensor; a dict or tuple of inputs as it is."""
    if isinstance(part, Mapping | tuple):
        return _plain(part)
    try:
        if not hasattr(part, "__array__") or isinstance(part, Tensor):
            return torch.as_tensor(part)
        array = np.asarray(part)
        return torch.as_tensor(array if array.flags.writeable else array.copy())  # torch warns about read-only memory
    except Exception as error:  # an object of unknown type may raise anything
        raise BadData(
            f"Problem({where}): cannot read a {type(part).__name__} as a tensor ({typed_line(error, 200)}): give "
            f"tensors or arrays of numbers, samples first"
        ) from error
