"""What a loss may depend on beside the outputs (its targets, the same each time.

No weight), and whether it is twice differentiable.

Curvature is taken in the outputs: what a loss adds by another path to the weights would be left out. Some kernels of
torch (CTC, multi-margin) have no second derivative, and say so. A gradient of the user's own that is marked
`once_differentiable`, or computed from values that autograd does not follow, has none and says nothing: the loss then
looks linear in the outputs. Differences of slopes, on a few samples, tell.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

from flatlens.errors import BadLoss, one_line, out_of_memory
from flatlens.operations.graph import Graph
from flatlens.problem.batches import picked
from flatlens.problem.loss import Loss
from flatlens.problem.row_layout import Heads, Shaped, Tokens

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
                f"the loss depends on the weights beside the outputs ({name}): return what it needs as an output of "
                "the network, detach() the targets, and leave penalties on weights out",
                value=loss,
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


MOST_OUTPUTS = 2**22  #: outputs on which it is looked for: slopes of many more would not fit in memory
_STEPS = (1e-4, 4e-4, -1e-4, -4e-4)
"""Steps of the outputs, relative to a sample's largest output: two to each side, as at a kink all four differ."""
_APART = 0.05  #: smallest difference from autograd's second derivative, relative to the larger of both, that counts
_AGREE = 0.2  #: largest spread of the differences over the steps, relative to their distance from autograd's
_MEND = "write it as a function of plain operations, (outputs, targets) -> losses of shape (n,)"


def require_twice(loss: Loss, f: Tensor, y: Any) -> None:
    """Let the loss say why it has no second derivative at outputs like these, if it has none."""
    if loss.closed or loss.no_curvature:
        return
    f = f.detach().to(torch.float64)
    u, w = (torch.rand(f.shape, generator=torch.Generator().manual_seed(seed)).to(f) + 0.5 for seed in (0, 1))
    try:
        product = loss.output_hessian_product(f, y)(u)
    except Exception as error:  # a loss of the user's own may raise anything
        if not out_of_memory(error):
            why = one_line(error, 160)
            _withhold(loss, f"the loss cannot be differentiated as often as is needed ({why}): {_MEND}")
        return
    with suppress(Exception):  # it does not take other outputs
        if _hidden(loss, f, y, u, w, (product * w).sum(1)):
            own = _slope(loss, f, y)[1]
            runs = f" (it runs {', '.join(own)})" if own else ""
            _withhold(loss, f"the loss's second derivative{runs} is not that of differences: {_MEND}")


def _withhold(loss: Loss, why: str) -> None:
    """Let a loss, and those that it is made of, say why there is no second derivative."""
    loss.no_curvature = str(BadLoss(why))
    each = getattr(loss, "each", [])
    for part in each if isinstance(each, list) else [each]:
        _withhold(part, why)


def _hidden(loss: Loss, f: Tensor, y: Any, u: Tensor, w: Tensor, known: Tensor) -> bool:
    """Return whether the losses have another second derivative than autograd's, w^T C u = `known`, (n,).

    What detach() leaves out of a second derivative on purpose is not hidden.
    """
    here, own = _slope(loss, f, y)
    if not own and bool(known.any()):
        return False
    size = f.abs().amax(1)
    size = torch.where(size > 0, size, 1.0)
    rows = [((_slope(loss, f + h * size[:, None] * u, y)[0] - here) * w).sum(1) / (h * size) for h in _STEPS]
    found = torch.stack(rows)
    off = (found.mean(0) - known).abs()
    rounding = torch.finfo(f.dtype).eps * (here.abs() * w).sum(1) / (_STEPS[0] * size)
    alike = found.amax(0) - found.amin(0) <= _AGREE * off
    apart = (off > _APART * torch.maximum(found.mean(0).abs(), known.abs())) & (off > 100 * rounding)
    return bool((alike & apart).any())


def _slope(loss: Loss, f: Tensor, y: Any) -> tuple[Tensor, list[str]]:
    """Return (the losses' slopes in the outputs (n, N), the user's own functions that are differentiated)."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = f.clone().requires_grad_()
        of = loss.values(leaf, y).sum()
        (slope,) = torch.autograd.grad(of, leaf, retain_graph=True, materialize_grads=True)
    own = {type(node).__name__ for node in Graph(of).nodes if isinstance(node, BackwardCFunction)}
    return slope, sorted(own)
