"""What a loss may depend on beside the outputs: its targets, the same each time; and no weight.

Curvature is taken in the outputs: what a loss adds by another path to the weights would be left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from flatlens.errors import BadLoss
from flatlens.problem.batches import picked
from flatlens.problem.heads import Heads
from flatlens.problem.sequences import Tokens
from flatlens.problem.shapes import Shaped

_COARSEST = 0.05  #: largest difference, relative to the largest entry, that is called rounding: half types round much


def require_no_weights(loss: str, values: Tensor, weights: list[tuple[str, Tensor]]) -> None:
    """Refuse losses that lead to a weight in autograd's graph; `values` are those of outputs without a graph.

    A derivative that is 0 at these weights is refused, too, unless it is constant: a penalty has none at its minimum,
    and is curved there.
    """
    if not weights or not values.requires_grad:
        return
    of = [weight for _, weight in weights]
    slopes = torch.autograd.grad(values.sum(), of, create_graph=True, allow_unused=True)
    for (name, _), slope in zip(weights, slopes, strict=True):
        if slope is not None and (slope.requires_grad or bool(slope.any())):
            raise BadLoss(
                f"Problem(loss={loss}): the loss depends on the weights beside the outputs ({name}): return what it "
                f"needs as an output of the network, detach() the targets, and leave penalties on weights out"
            )


def same_targets(once: Any, again: Any, roundings: float, rows: Tensor | None = None, n: int = 0) -> bool:
    """Return whether targets of the same batch are the same; with `rows`, `again` has those of some of its n samples.

    Numbers may differ by some roundings of single precision, in which a teacher may compute them.
    """
    ours, theirs = (tree_leaves(one) for one in (_of_samples(once, rows, n), _of_samples(again)))
    return len(ours) == len(theirs) and all(_same(a, b, roundings) for a, b in zip(ours, theirs, strict=True))


def _of_samples(y: Any, rows: Tensor | None = None, n: int = 0) -> Any:
    """Return targets as the user gave them, with the mask of counted tokens if there is one; of all samples or some."""
    given = (y.targets, y.counted) if isinstance(y, Tokens) else y.targets if isinstance(y, Heads | Shaped) else y
    return given if rows is None else picked(given, rows, n)


def _same(one: Any, other: Any, roundings: float) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return isinstance(one, Tensor) == isinstance(other, Tensor)
    if one.ndim != other.ndim or one.shape[:1] != other.shape[:1]:
        return False
    both = tuple(slice(min(sizes)) for sizes in zip(one.shape, other.shape, strict=True))  # some fill up each batch
    one, other = one.detach()[both], other.detach()[both].to(one)
    if not one.is_floating_point() or one.numel() == 0:
        return torch.equal(one, other)
    scale = float(one.abs().nan_to_num(0.0, 0.0, 0.0).max())
    eps = max(torch.finfo(one.dtype).eps, torch.finfo(torch.float32).eps)
    return torch.allclose(one, other, rtol=0.0, atol=min(_COARSEST, roundings * eps) * scale, equal_nan=True)
