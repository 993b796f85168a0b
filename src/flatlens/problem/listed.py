"""Lists and tuples in a batch: the several inputs of every sample, or one item for each sample, of its own size.

Both look alike where a batch of two samples has a list of two tensors with two rows each. Such a list is read as the
first batch of the data that leaves no doubt has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils._pytree import tree_leaves

from flatlens.problem.batches import counts_samples
from flatlens.problem.samples import Batch, row_count

_Verdict: TypeAlias = Callable[[type], bool | None]
"""Whether a list or a tuple in doubt holds one item for each sample, as other batches show; None if none does."""


def plain(batch: Batch, verdict: _Verdict = lambda _: False) -> Batch:
    """Return the batch in the form that is split: dicts, tuples of parts, and lists with one item for each sample.

    >>> plain({"boxes": (1, 2)}), plain(([], []))
    ({'boxes': (1, 2)}, ([], []))
    """
    if type(batch) is list:
        return batch
    n = _samples(batch, verdict)

    def formed(part: Any) -> Any:
        if isinstance(part, Mapping):
            return {key: formed(value) for key, value in part.items()}
        if type(part) not in (list, tuple):
            return part
        if part is not batch and _holds_samples(part, n, verdict):
            return list(part)
        split = type(part) is tuple or (part and all(_counting(part, n)))
        return tuple(formed(item) for item in part) if split else part

    return formed(batch)


def is_samples(raw: Any) -> bool:
    """Return whether a batch is a list of its samples, dicts or tuples, as a collate_fn may leave them."""
    if type(raw) is not list or not raw or not isinstance(raw[0], tuple | Mapping) or not alike_in_form(raw):
        return False
    if isinstance(raw[0], Mapping):
        return all(set(item) == set(raw[0]) for item in raw)
    return all(map(alike_in_form, zip(*raw, strict=True))) and not all(map(alike_in_form, raw))


def form_shown(batch: Batch) -> bool | None:
    """Return whether the lists of a batch hold one item for each sample; None if it leaves that open."""
    n = row_count(batch, (Mapping,))
    if n is None:
        return _uneven(batch) or None
    found = (_shown(part, n) for part in _sequences(batch))
    return next((verdict for verdict in found if verdict is not None), None)


def _shown(part: Any, n: int) -> bool | None:
    """Return the same of one list or tuple, and of those inside it."""
    if not isinstance(part, list | tuple) or not _tensors(part):
        return None
    if (one_each := _one_each(part, n)) is not False:
        return one_each
    if all(counts_samples(item, n) for item in part):
        return False
    return next((verdict for item in part if (verdict := _shown(item, n)) is not None), None)


def _samples(batch: Batch, verdict: _Verdict) -> int:
    """Return the number of samples of a batch whose lists are not told apart yet; 0 if it has no tensors."""
    n = row_count(batch, (Mapping,))
    sequences = _sequences(batch)
    if n is None and sequences and (_uneven(batch) or verdict(type(sequences[0]))):
        return len(next((part for part in sequences if _ragged(part)), sequences[0]))
    return n or row_count(batch, (Mapping, tuple, list)) or 0


def _holds_samples(part: Sequence[Any], n: int, verdict: _Verdict) -> bool:
    """Return whether a list or tuple has one item for each of n samples."""
    one_each = _one_each(part, n)
    if one_each is None and (one_each := verdict(type(part))) is None:
        return not all(_counting(part, n))
    return one_each


def _one_each(part: Sequence[Any], n: int) -> bool | None:
    """Return the same; None if its tensors could also be inputs of n samples, of which a tuple may have others, too."""
    if len(part) != n or (isinstance(part, tuple) and not alike_in_form(part)):
        return False
    return None if (any if isinstance(part, tuple) else all)(_counting(part, n)) else True


def _counting(part: Any, n: int) -> list[bool]:
    """Return for each item whether it has n rows, or n items of one kind; torch lists lists of rows, too."""

    def counts(item: Any) -> bool:
        if not isinstance(item, list | tuple):
            return counts_samples(item, n)
        return (len(item) == n and alike_in_form(item)) or (type(item) is list and all(_counting(item, n)))

    return [counts(item) for item in part]


def _uneven(batch: Batch) -> bool:
    """Return whether the lists of a batch without any other tensors cannot be inputs of its samples."""
    sequences = _sequences(batch)
    if any(_ragged(part) for part in sequences):
        return True
    lengths = {len(leaf) for part in sequences for leaf in _tensors(part)}
    numbers = any(type(part) in (list, tuple) and part and not _tensors(part) for part in _parts(batch))
    equal = len({len(part) for part in _parts(batch) if isinstance(part, list | tuple)}) == 1
    return equal and (len(lengths) > 1 or numbers) and all(map(alike_in_form, sequences))


def _ragged(part: Sequence[Any]) -> bool:
    """Return whether all items are of one kind, but of different lengths, or not tensors."""
    if not alike_in_form(part):
        return False
    return not all(isinstance(item, Tensor) for item in part) or len({len(leaf) for leaf in _tensors(part)}) > 1


def alike_in_form(part: Sequence[Any]) -> bool:
    """Return whether all items are of one kind: tensors of one dtype and number of axes, or tuples of one length."""

    def kind(item: Any) -> object:
        if hasattr(item, "ndim"):
            return str(item.dtype), item.ndim
        if isinstance(item, tuple | list):
            return isinstance(item, tuple), len(item)
        return Mapping if isinstance(item, Mapping) else None

    return len(set(map(kind, part))) == 1


def _sequences(batch: Batch) -> list[Sequence[Any]]:
    """Return the lists and tuples of tensors in a batch, the outer ones of several."""
    return [part for part in _parts(batch) if type(part) in (list, tuple) and _tensors(part)]


def _parts(batch: Batch) -> Iterator[Any]:
    """Yield the parts of a batch, and those of its dicts."""
    for part in batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ():
        yield part
        if isinstance(part, Mapping):
            yield from _parts(part)


def _tensors(part: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(part) if isinstance(leaf, Tensor) and leaf.ndim > 0]
