"""Batches as people bring them: dicts with labels, lists of dicts, samples of different lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, default_collate

from flatlens.errors import BadData

LABELS = ("labels", "label", "label_ids")
"""The names under which a dict holds targets; transformers' own Trainer knows the same."""

_NUMBERS = "biufc"
"""The kinds of NumPy's numbers; an array of text stays as it is."""

BATCH_OF = 256
"""Samples of a batch that flatlens makes itself."""


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
    first = rows[0]
    if _is_batch(first):
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


def collated(samples: list[Any], where: str = "data=...") -> Any:
    """Return samples as one batch: torch's collate, but dicts may hold lists of numbers of different lengths."""
    if not all(isinstance(sample, Mapping) for sample in samples):
        return default_collate(samples)
    first = samples[0]
    for number, sample in enumerate(samples):
        if set(sample) != set(first):
            raise BadData(f"Problem({where}): sample {number} has the entries {sorted(sample)}, not {sorted(first)}")
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
    """Return every entry as a tensor; token ids that are padded get an attention mask if they have none."""
    found = {key: stacked(key, each, where) for key, each in rows.items()}
    lengths = [len(ids) for ids in rows.get("input_ids", []) if ids.ndim]
    if len(set(lengths)) > 1 and "attention_mask" not in rows:
        at = torch.arange(max(lengths))
        found["attention_mask"] = (at < torch.tensor(lengths)[:, None]).long()
    return found


def stacked(name: str, rows: list[Tensor], where: str = "data=...") -> Tensor:
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
            f"Problem({where}): {name!r} has the shapes {shapes[0]} and {shapes[-1]}: bring them to one shape, or "
            f"give a DataLoader whose collate_fn returns them as a list"
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
    sizes = {len(leaf) if leaf.ndim else 0 for leaf in tree_leaves(dict(row)) if isinstance(leaf, Tensor)}
    return len(sizes) == 1 and 0 not in sizes


def _axes(value: Any) -> int:
    """Return the number of axes of nested lists or of an array."""
    if hasattr(value, "ndim"):
        return int(value.ndim)
    return 1 + _axes(value[0]) if isinstance(value, list | tuple) and value else int(isinstance(value, list | tuple))


def _is_number(value: Any) -> bool:
    """Return whether a value is a number, an array, or nested lists of numbers."""
    if isinstance(value, Tensor | np.ndarray | np.generic | bool | int | float):
        return True
    return isinstance(value, list | tuple) and bool(value) and all(_is_number(part) for part in value[:2])


def _is_joined(rows: list[Any]) -> bool:
    """Return whether a list becomes a tensor: of numbers, or of token ids; other tensors keep their sizes."""
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(rows)):
        return _is_number(rows)
    return all(isinstance(row, Tensor) and row.ndim <= (not row.is_floating_point()) for row in rows)


def _tensor(value: Any, where: str) -> Tensor:
    try:
        found: Tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadData(f"Problem({where}): a {type(value).__name__} is no tensor ({error}): give numbers") from error
    return found
