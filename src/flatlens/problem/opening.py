"""Data as people bring it, opened as tensors or as a loader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flatlens.errors import BadData, typed_line
from flatlens.problem.batches import BATCH_OF, as_pair, collated, in_tensors, is_dicts, loader_of
from flatlens.problem.listed import alike_in_form, plain
from flatlens.problem.loaders import fixed_order
from flatlens.problem.samples import Batch, require_dense, size


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
                f"Problem({where}): x has {n} samples and y {len(y) if y.ndim else 'a single number'}: give as many of "
                f"each"
            )
        return None, (x, y)
    if isinstance(source, Mapping):
        require_dense(tensors := in_tensors(plain(source), where), where)
        return None, tensors
    if hasattr(source, "x") and hasattr(source, "y"):
        return open_source((source.x, source.y), where)
    raise BadData(
        f"Problem({where}): a pair (x, y), a dict with labels, a list of dicts, a Dataset or a DataLoader is needed, "
        f"got {type(source).__name__}"
    )


def _require_no_batches(source: Any, where: str) -> None:
    """Refuse a list of batches or of samples: nothing in it says which of the two it holds."""
    if isinstance(source, Iterator):
        raise BadData(
            f"Problem({where}): a {type(source).__name__} can be read only once: give DataLoader(list(data), "
            f"batch_size=None) if each item is a batch, DataLoader(list(data), batch_size={BATCH_OF}) if each is a "
            f"sample"
        )
    if not isinstance(source, list | tuple) or not source or not all(map(_may_be_batch, source)):
        return
    if isinstance(source, tuple) and len(source) == 2 and not _one_form(*source):
        return  # inputs and targets
    single = ", DataLoader([data], batch_size=None) if it is one batch of inputs and targets" * (len(source) == 2)
    raise BadData(
        f"Problem({where}): a {type(source).__name__} of {len(source)} {type(source[0]).__name__}s may hold batches or "
        f"samples: give DataLoader(data, batch_size=None) if each item is a batch, DataLoader(data, "
        f"batch_size={BATCH_OF}) if each is a sample{single}"
    )


def _may_be_batch(item: Any) -> bool:
    """Return whether an item is a tuple, a list that holds tensors or arrays, or a dict with labels."""
    if isinstance(item, list):
        return any(isinstance(part, Tensor | np.ndarray) for part in item)
    return isinstance(item, tuple) or as_pair(item) is not item


def _one_form(one: Any, other: Any) -> bool:
    """Return whether the parts of two items are alike but for their number of rows, and are not the same tensors."""
    if isinstance(one, Mapping) or isinstance(other, Mapping):
        return isinstance(one, Mapping) and isinstance(other, Mapping) and set(one) == set(other)
    if len(one) != len(other) or all(a is b for a, b in zip(one, other, strict=True)):
        return False
    pairs = zip(one, other, strict=True)
    return all(alike_in_form(pair) and len({getattr(part, "shape", ())[1:] for part in pair}) == 1 for pair in pairs)


def has_axis(leaf: Any) -> bool:
    """Return whether this is a tensor with axes: its first one counts samples."""
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def _as_tensors(part: Any, where: str) -> Any:
    """Return a tensor or array as a tensor; a dict or tuple of inputs as it is."""
    if isinstance(part, Mapping | tuple):
        return plain(part)
    try:
        if not hasattr(part, "__array__") or isinstance(part, Tensor):
            return torch.as_tensor(part)
        array = np.asarray(part)
        return torch.as_tensor(array if array.flags.writeable else array.copy())  # torch warns about read-only memory
    except Exception as error:  # an object of unknown type may raise anything
        raise BadData(
            f"Problem({where}): cannot read a {type(part).__name__} as a tensor ({typed_line(error, 200)}): give "
            f"tensors or arrays of numbers, samples first; samples of several sizes are lists in a DataLoader's batches"
        ) from error
