"""Samples of a batch: their number, some of them, batches joined, moved and checked."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from flatlens.errors import BadData
from flatlens.problem.batches import picked
from flatlens.problem.shards import in_one_piece

Batch: TypeAlias = Any
"""The batches of a loader: usually (x, y); tensors whose first axis counts samples, lists of one item each."""

FORWARD_CHUNK = 512
"""Samples of a forward pass without a graph: with 1024, LeNet takes 1.5 times as long, with 256 small networks do."""


def size(batch: Batch) -> int:
    """Return the number of samples in a batch."""
    n = row_count(batch)
    if n is None:
        lists = filter(is_list, tree_leaves(batch, is_leaf=is_list))
        n = next((len(part) for part in lists if any(isinstance(leaf, Tensor) for leaf in tree_leaves(part))), None)
    if n is None:
        raise BadData(
            f"Problem(data=...): a batch must consist of tensors whose first axis is the samples, got "
            f"{type(batch).__name__}"
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
    for part in tree_leaves(batch, is_leaf=is_list):
        if isinstance(part, Tensor) and _has_hole(part):
            bad = (~torch.isfinite(part)).reshape(len(part), -1).any(1).tolist() if part.ndim else [True]
        elif not isinstance(part, list) or not any(bad := [any(map(_has_hole, tree_leaves(one))) for one in part]):
            continue
        missing = isinstance(part, Tensor) and not bool(part.isinf().any()) and _is_target(part, batch)
        mend = (
            "if NaN marks missing targets, give a mask as a second target, (y.nan_to_num(), ~y.isnan()), to a function "
            "of (outputs, (targets, mask)) (docs/recipes.md); else repair them" if missing else "repair or remove them"
        )  # fmt: skip
        raise BadData(
            f"{given}: {sum(bad)} of {len(bad)} samples contain NaN or inf, the first at index {bad.index(True)} of "
            f"this batch: {mend}"
        )


def _is_target(part: Tensor, batch: Batch) -> bool:
    """Return whether a tensor of a batch stands beside its inputs."""
    return isinstance(batch, tuple) and any(part is one for one in tree_leaves(batch[1:]))


def _has_hole(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and not finite(leaf)
