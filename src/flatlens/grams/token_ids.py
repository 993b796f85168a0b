"""Which axis of the numbers that an embedding reads is that of the samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sample_axis(read: Tensor, given: Sequence[Tensor]) -> tuple[int | None, bool]:
    """Return the axis of the samples in what an embedding reads, and whether this is sure; None: it reads no samples.

    `given` are the ids of the batch, samples in front. Numbers that do not come from them are positions, say. The axis
    follows from the shape. Where there are as many tokens as samples, or one sample, it follows from memory that the
    two share, or from equal values.

    >>> words = torch.tensor([[1, 2], [3, 4], [5, 0]])
    >>> sample_axis(words, [words]), sample_axis(words.T, [words]), sample_axis(torch.arange(2), [words])
    ((0, True), (1, True), (None, False))
    >>> square = torch.tensor([[1, 2], [3, 4]])
    >>> sample_axis(square.T.contiguous(), [square]), sample_axis(torch.arange(2), [square])
    ((1, True), (0, False))
    """
    if not given:
        return None, False
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
