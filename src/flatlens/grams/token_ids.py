"""Which axis of the numbers that an embedding reads is that of the samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor


def sample_axis(read: Tensor, given: Sequence[Tensor]) -> tuple[int | None, bool]:
    """Return the axis of the samples in what an embedding reads, and whether this is sure; None: it reads no samples.

    `given` are the ids of the batch, samples in front. An axis is sure if the numbers are those of the batch, by memory
    that the two share or by their values, or if only its length is the number of samples. Numbers without such an axis
    are positions, say. Ids of all samples in one row have the samples in front.

    >>> words = torch.tensor([[1, 2], [3, 4], [5, 0]])
    >>> sample_axis(words, [words]), sample_axis(words.T, [words]), sample_axis(torch.arange(2), [words])
    ((0, True), (1, True), (None, False))
    >>> square = torch.tensor([[1, 2], [3, 4]])
    >>> sample_axis(square.T.contiguous(), [square]), sample_axis(torch.arange(2), [square])
    ((1, True), (0, False))
    """
    if not given or is_functorch_wrapped_tensor(read):
        return None, False
    if read.ndim == 1 and any(
        ids.ndim > 1 and ids.numel() == len(read) and _same(read, ids.flatten()) for ids in given
    ):
        return 0, True
    n = len(given[0])
    axes = [axis for axis, length in enumerate(read.shape[:2]) if length == n]
    if not axes:
        return None, False
    if n > 1 and len(axes) == 1 and all(ids.ndim == 1 or ids.shape[1] != n for ids in given):
        return axes[0], True
    for ids in given:
        for axis in axes:
            if _same(read.movedim(axis, 0), ids):
                return axis, True
    return axes[0], False


def _same(read: Tensor, ids: Tensor) -> bool:
    """Return whether both are the same numbers, samples in front; of one column of the ids, whether it is a view."""
    if read.untyped_storage().data_ptr() == ids.untyped_storage().data_ptr():
        return read.stride(0) == ids.stride(0)
    return read.shape == ids.shape and torch.equal(read, ids)
