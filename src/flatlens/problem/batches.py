"""Batches: the forms in which people bring them, and their samples, selected, joined, moved and checked.

Lists and tuples in a batch hold the several inputs of every sample, or one item for each sample, of its own size.
Both look alike where a batch of two samples has a list of two tensors with two rows each. Such a list is read as the
first batch of the data that leaves no doubt has it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, default_collate

from flatlens.errors import BadData
from flatlens.problem.ranks import in_one_piece

Batch: TypeAlias = Any
"""The batches of a loader: usually (x, y); tensors whose first axis counts samples, lists of one item each."""

LABELS = ("labels", "label", "label_ids")  #: names of targets in a dict; transformers' own Trainer knows the same
_NUMBERS = "biufc"  #: the kinds of NumPy's numbers; an array of text stays as it is
BATCH_OF = 256  #: samples of a batch that flatlens makes itself
FORWARD_CHUNK = 512
"""Samples of a forward pass without a graph: with 1024, LeNet takes 1.5 times as long, with 256 small networks do."""

# Dicts and lists of dicts, as people bring them


def as_pair(batch: Any) -> Any:
    """Return a dict with labels as the pair (the other entries, labels); any other batch unchanged.

    >>> as_pair({"input_ids": 1, "labels": 2})
    ({'input_ids': 1}, 2)
    """
    if not isinstance(batch, Mapping):
        return batch
    name = next((name for name in LABELS if name in batch), None)
    return batch if name is None else ({key: value for key, value in batch.items() if key != name}, batch[name])


def in_tensors(batch: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a batch whose lists and arrays of numbers are tensors, rows of different lengths padded (`stacked`).

    A list of floating tensors stays one: what they are padded with could count.
    """
    arrays = {key: value for key, value in batch.items() if isinstance(value, np.ndarray)}
    found = dict(batch) | {key: _tensor(each, where) for key, each in arrays.items() if each.dtype.kind in _NUMBERS}
    listed = {key: value for key, value in batch.items() if isinstance(value, list) and value and _is_joined(value)}
    if not listed:
        return found
    return found | _padded({key: [_tensor(row, where) for row in rows] for key, rows in listed.items()}, where)


def loader_of(rows: Sequence[Mapping[str, Any]], where: str) -> DataLoader[Any]:
    """Return a loader of dicts: of samples, collated and padded, or of batches as they are."""
    if _is_batch(rows[0]):
        return DataLoader(rows, batch_size=None, collate_fn=ready_made)  # type: ignore[arg-type]
    return DataLoader(rows, batch_size=BATCH_OF, collate_fn=partial(collated, where=where))  # type: ignore[arg-type]


def is_dicts(source: Any) -> bool:
    """Return whether this is a list of dicts, or a data set of them that is not torch's; not a pair (x, y)."""
    if isinstance(source, str | tuple | Mapping | Tensor | np.ndarray):
        return False
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__") and len(source)):
        return False
    try:
        first, last = source[0], source[len(source) - 1]
    except Exception:  # something that is not indexed by numbers
        return False
    return isinstance(first, Mapping) and isinstance(last, Mapping) and set(first) == set(last)


def collated(samples: list[Any], where: str = "data") -> Any:
    """Return samples as one batch: torch's collate, but dicts may hold lists of numbers of different lengths."""
    if not all(isinstance(sample, Mapping) for sample in samples):
        return default_collate(samples)
    first = samples[0]
    for number, sample in enumerate(samples):
        if set(sample) != set(first):
            raise BadData(f"sample {number} has the entries {sorted(sample)}, not {sorted(first)}", argument=where)
    numbers = {key: [_tensor(s[key], where) for s in samples] for key in first if _is_number(first[key])}
    others = {key: [s[key] for s in samples] for key in first if key not in numbers}
    return others | _padded(numbers, where)


def ready_made(batch: Any) -> Any:
    """Return a ready batch as it is: the collate for batches that need none."""
    return batch


def counts_samples(leaf: Any, n: int) -> bool:
    """Return whether this is a tensor with one row for each of n samples."""
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == n


def picked(batch: Any, samples: slice | Tensor, n: int, one_each: Callable[[Any], bool] | None = None) -> Any:
    """Return the part of a batch that belongs to some of its n samples; entries that do not count samples stay whole.

    `one_each` says whether a part has one item for each sample. As a default, a list of n items has, unless every item
    is itself a tensor of n rows; a tuple of n items only if no item is such a tensor.
    """

    def has_one_each(part: Any) -> bool:
        if not isinstance(part, list | tuple) or len(part) != n:
            return False
        return not (all if isinstance(part, list) else any)(counts_samples(item, n) for item in part)

    one_each = one_each or has_one_each

    def cut(part: Any) -> Any:
        if one_each(part):
            return part[samples] if isinstance(samples, slice) else [part[i] for i in samples.tolist()]
        if not counts_samples(part, n):
            return part
        return part[samples if isinstance(samples, slice) else samples.to(part.device)]

    return tree_map(cut, batch, is_leaf=one_each)


def _padded(rows: dict[str, list[Tensor]], where: str) -> dict[str, Tensor]:
    found = {key: stacked(key, each, where) for key, each in rows.items()}
    # token ids that are padded get an attention mask if they have none
    lengths = [len(ids) for ids in rows.get("input_ids", []) if ids.ndim]
    if len(set(lengths)) > 1 and "attention_mask" not in rows:
        found["attention_mask"] = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return found


def stacked(name: str, rows: list[Tensor], where: str = "data") -> Tensor:
    """Return one sample per row, padded at the end to the longest: with -100 for whole-number labels, else with 0.

    >>> stacked("labels", [torch.tensor([1]), torch.tensor([2, 3])])
    tensor([[   1, -100],
            [   2,    3]])
    """
    if len({row.shape for row in rows}) == 1:
        return torch.stack(rows)
    if len({row.shape[1:] for row in rows}) > 1 or not all(row.ndim for row in rows):
        shapes = sorted({tuple(row.shape) for row in rows})
        raise BadData(
            f"{name!r} has the shapes {shapes[0]} and {shapes[-1]}",
            argument=where,
            remedy="bring them to one shape, or give a DataLoader whose collate_fn returns them as a list",
        )
    fill = -100 if name in LABELS and not rows[0].is_floating_point() else 0
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


def _is_batch(row: Mapping[str, Any]) -> bool:
    """Return whether a dict holds several samples: labels or token ids have one axis more than those of one sample."""
    label = next((row[name] for name in LABELS if name in row), None)
    if label is not None and _axes(label) == 0:
        return False
    if "input_ids" in row:
        return _axes(row["input_ids"]) > 1
    sizes = {len(leaf) if leaf.ndim else 0 for leaf in tensors_in(dict(row))}
    return len(sizes) == 1 and 0 not in sizes


def _axes(value: Any) -> int:
    if hasattr(value, "ndim"):
        return int(value.ndim)
    return 1 + _axes(value[0]) if isinstance(value, list | tuple) and value else int(isinstance(value, list | tuple))


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray | np.generic | bool | int | float):
        return True
    return isinstance(value, list | tuple) and bool(value) and all(_is_number(part) for part in value[:2])


def _is_joined(rows: list[Any]) -> bool:
    """Return whether a list becomes a tensor: of numbers, or of token ids; other tensors keep their sizes."""
    if not tensors_in(rows):
        return _is_number(rows)
    return all(isinstance(row, Tensor) and row.ndim <= (not row.is_floating_point()) for row in rows)


def _tensor(value: Any, where: str) -> Tensor:
    try:
        found: Tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadData(f"a {type(value).__name__} is not a tensor ({error}): give numbers", argument=where) from error
    return found


# The samples of a batch


def size(batch: Batch) -> int:
    """Return the number of samples in a batch."""
    n = row_count(batch)
    if n is None:
        lists = filter(is_list, tree_leaves(batch, is_leaf=is_list))
        n = next((len(part) for part in lists if tensors_in(part)), None)
    if n is None:
        raise BadData(
            f"a batch must consist of tensors whose first axis is the samples, got {type(batch).__name__}",
            argument="data",
        )
    return n


def row_count(batch: Batch, opened: tuple[type, ...] = (Mapping, tuple)) -> int | None:
    """Return the length of the first tensor with axes, the outermost before those inside parts of these types."""
    parts: list[Any] = [*batch] if isinstance(batch, tuple) else [batch]
    while parts:
        for part in parts:
            if isinstance(part, Tensor) and part.ndim > 0:
                return len(part)
        inside: list[Any] = [part for part in parts if isinstance(part, opened)]
        parts = [one for part in inside for one in (part.values() if isinstance(part, Mapping) else part)]
    return None


def is_list(part: Any) -> bool:
    """Return whether this has one item for each sample (`listed.plain` makes tuples of all other lists of tensors)."""
    return isinstance(part, list)


def has_lists(batch: Batch) -> bool:
    """Return whether a batch has lists with one item for each sample."""
    return any(map(is_list, tree_leaves(batch, is_leaf=is_list)))


def unlisted(batch: Batch) -> list[Tensor]:
    """Return the tensors of a batch that are not in such a list."""
    return [leaf for leaf in tree_leaves(batch, is_leaf=is_list) if isinstance(leaf, Tensor)]


def take(batch: Batch, start: int, stop: int) -> Batch:
    """Return samples [start, stop) of a batch; entries that do not count samples stay whole."""
    return batch if start == 0 and stop >= size(batch) else select(batch, slice(start, stop))


def spaced(batch: Batch, most: int) -> Batch:
    """Return at most `most` samples, evenly spaced over a batch."""
    n = size(batch)
    return batch if n <= most else select(batch, torch.linspace(0, n - 1, most).round().long())


def select(batch: Batch, samples: slice | Tensor) -> Batch:
    """Return some samples of a batch; entries that do not count samples stay whole."""
    n = size(batch)
    return picked(batch, samples, n, lambda part: is_list(part) and len(part) == n)


def joined(batches: list[Batch]) -> Batch:
    """Return batches of equal structure joined into one."""
    if len(batches) == 1:
        return batches[0]

    def cat(*leaves: Any) -> Any:
        if isinstance(leaves[0], list):
            return [one for each in leaves for one in each]
        return torch.cat(leaves) if isinstance(leaves[0], Tensor) and leaves[0].ndim > 0 else leaves[0]

    return tree_map(cat, batches[0], *batches[1:], is_leaf=is_list)


def move(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    """Return a copy of the batch, to which a model may write, on a device; floating tensors in the model's dtype."""

    def to(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().to(device, dtype if leaf.is_floating_point() else leaf.dtype, copy=True)

    return tree_map(to, batch)


def tensors_in(batch: Batch) -> list[Tensor]:
    """Return all tensors of a batch, those in lists, too."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def checksum(*tensors: Tensor, start: int = 0) -> int:
    """Return the checksum of tensors' bytes, continued from `start`; of a sharded tensor, of this rank's part."""
    for tensor in tensors:
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
        whole = dense.cpu().contiguous()
        flat = whole.as_strided((whole.numel(),), (1,))  # one entry counts as contiguous at any stride
        start = zlib.crc32(flat.view(torch.uint8).numpy().data, start)
    return start


def finite(tensor: Tensor) -> bool:
    """Return whether no entry is NaN or inf; a finite sum proves it with one read from the device."""
    if bool(in_one_piece(tensor.sum()).isfinite()):  # of all processes' parts: all have to decide alike
        return True
    return bool(in_one_piece(tensor.isfinite().all()))


def require_dense(batch: Batch, where: str) -> None:
    """Refuse tensors without values, or in a form that cannot be split into samples."""
    for leaf in tensors_in(batch):
        if leaf.is_meta:
            raise BadData("a tensor on the meta device has no values", argument=where, remedy="give the data itself")
        if leaf.layout != torch.strided or leaf.is_nested or leaf.is_quantized:
            form = "nested" if leaf.is_nested else "quantised" if leaf.is_quantized else "sparse"
            mend = {"nested": "to_padded_tensor(0.0)", "quantised": "dequantize()", "sparse": "to_dense()"}[form]
            raise BadData(f"a {form} tensor cannot be split into samples: convert it with {mend}", argument=where)
        if leaf.is_floating_point() and leaf.element_size() == 1:
            raise BadData(f"torch cannot compute with {leaf.dtype}", argument=where, remedy="convert it with .float()")


def require_finite(batch: Batch, argument: str, call: str = "Problem") -> None:
    """Refuse NaN and inf in the data given as an argument, and name the first bad sample."""
    for part in tree_leaves(batch, is_leaf=is_list):
        if isinstance(part, Tensor) and _has_hole(part):
            bad = (~torch.isfinite(part)).reshape(len(part), -1).any(1).tolist() if part.ndim else [True]
        elif not isinstance(part, list) or not any(bad := [any(map(_has_hole, tree_leaves(one))) for one in part]):
            continue
        beside_inputs = isinstance(batch, tuple) and any(part is one for one in tree_leaves(batch[1:]))
        missing = beside_inputs and isinstance(part, Tensor) and not bool(part.isinf().any())
        mend = (
            "if NaN marks missing targets, give a mask as a second target, (y.nan_to_num(), ~y.isnan()), to a function "
            "of (outputs, (targets, mask)) (docs/recipes.md); else repair them" if missing else "repair or remove them"
        )  # fmt: skip
        raise BadData(
            f"{sum(bad)} of {len(bad)} samples contain NaN or inf, the first at index {bad.index(True)} of this batch",
            argument=argument,
            remedy=mend,
            call=call,
        )


def _has_hole(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and not finite(leaf)


# Lists and tuples: inputs of every sample, or one item for each sample

_Verdict: TypeAlias = Callable[[type], bool | None]
"""Whether a list or a tuple in doubt holds one item for each sample, as other batches show; None if none does."""


def plain(batch: Batch, verdict: _Verdict = lambda _: False) -> Batch:
    """Return the batch in the form that is split: dicts, tuples of parts, and lists with one item for each sample.

    >>> plain({"boxes": (1, 2)}), plain(([], []))
    ({'boxes': (1, 2)}, ([], []))
    """
    if type(batch) is list:
        return batch
    # the number of samples: lists that can be no inputs, or are none in other batches, count them
    n, sequences = row_count(batch, (Mapping,)), _sequences(batch)
    if n is None and sequences and (_uneven(batch) or verdict(type(sequences[0]))):
        n = len(next((part for part in sequences if _ragged(part)), sequences[0]))
    n = n or row_count(batch, (Mapping, tuple, list)) or 0

    return _formed(batch, n, verdict, whole=True)


def _formed(part: Any, n: int, verdict: _Verdict, whole: bool = False) -> Any:
    if isinstance(part, Mapping):
        return {key: _formed(value, n, verdict) for key, value in part.items()}
    if type(part) not in (list, tuple):
        return part
    if not whole and _holds_samples(part, n, verdict):
        return list(part)
    split = type(part) is tuple or (part and all(_counting(part, n)))
    return tuple(_formed(item, n, verdict) for item in part) if split else part


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
    if not isinstance(part, list | tuple) or not _tensors(part):
        return None
    if (one_each := _one_each(part, n)) is not False:
        return one_each
    if all(counts_samples(item, n) for item in part):
        return False
    return next((verdict for item in part if (verdict := _shown(item, n)) is not None), None)


def _holds_samples(part: Sequence[Any], n: int, verdict: _Verdict) -> bool:
    one_each = _one_each(part, n)
    if one_each is None and (one_each := verdict(type(part))) is None:
        return not all(_counting(part, n))
    return one_each


def _one_each(part: Sequence[Any], n: int) -> bool | None:
    """Return whether a part has an item for each of n samples; None if its items could be inputs of n samples, too."""
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
    return [part for part in _parts(batch) if type(part) in (list, tuple) and _tensors(part)]


def _parts(batch: Batch) -> Iterator[Any]:
    for part in batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ():
        yield part
        if isinstance(part, Mapping):
            yield from _parts(part)


def _tensors(part: Any) -> list[Tensor]:
    return [leaf for leaf in tensors_in(part) if leaf.ndim > 0]
