"""Checks of a loss: a mean over separate samples, of outputs and targets alone, that has two derivatives.

*Samples apart.* The losses of a batch are compared with those of parts of it: values, derivatives, and products with
the second derivative. With J_ij = dl_i / df_j and weights r, row j of d(sum_i r_i l_i) / df is sum_i r_i J_ij. It
equals r_j times the row of the plain sum exactly where sum_i (r_i - r_j) J_ij = 0. For random r that is, almost
surely, where J is diagonal. A loss that couples samples through their targets, or through detached outputs, changes
values. These are compared over parts that separate any two samples at least once. A loss that is one
number for a batch has to be the mean of what it is for single samples (`_require_mean`).

*Outputs alone.* Curvature is taken in the outputs: what a loss adds by another path to the weights would be left out.

*Two derivatives.* Some kernels of torch (CTC, multi-margin) have no second derivative, and say so. A gradient of the
user's own that is marked `once_differentiable`, or computed from values that autograd does not follow, has none and
says nothing: the loss then looks linear in the outputs. Differences of slopes, on a few samples, tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

from flatlens.errors import BadLoss, LossFailed, one_line, out_of_memory
from flatlens.operations.graph import Graph
from flatlens.problem.batches import picked
from flatlens.problem.diagnosis import is_random
from flatlens.problem.loss import Loss
from flatlens.problem.losses import CustomLoss, samples_of
from flatlens.problem.row_layout import OfForm, OfRows, RowLayout
from flatlens.user_code import said

Losses: TypeAlias = Callable[[Tensor, Any], Tensor]  #: maps outputs (n, N) and targets to losses, (n,)

ENTRIES = 2**22
"""Outputs compared at a time: the derivatives of many more would not fit in memory beside the network's own."""
BASE = 8  #: parts of one division. More parts mean more calls; fewer parts need more divisions to separate all pairs
_ORDERS = ("loss", "derivative of the loss", "second derivative of the loss")
MEND = "return losses of shape (n,), each computed from that sample's outputs and target alone"
AS_ONE = "to a loss that compares samples, as a contrastive one does, give each batch as one sample (docs/recipes.md)"


def require_apart(loss: Loss, f: Tensor, y: Any) -> None:
    """Refuse a loss that couples samples; of rows that couples rows, since C has no entries between them."""
    if isinstance(loss, OfRows):
        for part in loss.parts(f, y):
            if part.counted is None:
                require_apart(part.loss, part.rows, part.targets)
            elif not part.loss.apart and bool((counted := part.counted.flatten()).any()):  # rows are copied
                require_apart(part.loss, part.rows[counted], part.targets[counted])
    elif isinstance(loss, CustomLoss) and loss.singly:
        _require_mean(loss, f, y)
    elif isinstance(loss, OfForm) and isinstance(loss.each, CustomLoss) and loss.each.singly:
        _require_mean(loss.each, y.form(f), y.targets)
    elif isinstance(loss, OfForm):
        _require_parts_alike(loss.name, lambda f, some: loss.values(f, replace(y, targets=some)), f, y.targets)
    elif not loss.apart:
        _require_parts_alike(loss.name, loss.values, f, y)


def _require_mean(loss: CustomLoss, f: Any, y: Any) -> None:
    """Refuse a callable whose value for a batch is not the mean of its samples' own."""
    n = samples_of(f)
    draw = torch.Generator().manual_seed(n)
    alone = loss.values(f, y).detach()
    for size in sorted({n, -(-n // 2), min(n, 3), min(n, 2)}, reverse=True):
        rows = torch.randperm(n, generator=draw)[:size].sort().values
        batch = float(loss.called(picked(f, rows, n), picked(y, rows, n), size))
        mean = float(alone[rows.to(alone.device)].mean())
        if abs(batch - mean) > 1e3 * torch.finfo(alone.dtype).eps * float(alone.abs().max()):
            summed = abs(batch - size * mean) <= 1e-6 * abs(batch)
            how = "it is their sum" if summed else "samples have different weights, or influence each other"
            mend = "" if summed else f"; {AS_ONE}"
            raise BadLoss(
                f"the loss of {size} samples together is {batch:.6g}, the mean of their own losses is {mean:.6g} "
                f"({how}), but the risk is a mean over samples: return losses of shape (n,), one for each sample{mend}",
                value=loss.name,
            )


def _require_parts_alike(name: str, losses: Losses, f: Tensor, y: Any) -> None:
    """Refuse losses of a batch that differ from those of its parts; `name` is the loss's in the error."""
    f, draw = f.detach().to(torch.float64), torch.Generator().manual_seed(len(f))
    with torch.enable_grad():
        together = losses(f.clone().requires_grad_(), y)
    if not together.requires_grad:
        raise BadLoss(
            "the losses do not depend differentiably on the outputs",
            value=name,
            remedy="use a differentiable loss, without argmax, comparison or detach()",
        )
    try:
        for rows in torch.split(torch.arange(len(f)), max(2, ENTRIES // max(1, f[0].numel()))):
            at = rows.to(f.device)
            u = torch.rand(len(rows), f.shape[1], generator=draw).to(f) - 0.5
            _Batch(name, losses, f[at], picked(y, rows, len(f)), u, draw).require_apart(together.detach()[at])
    except LossFailed as error:
        cause = error.__cause__ or error
        raise BadLoss(
            f"the loss takes a batch of {len(f)} samples, but fails on parts of it ({said(cause)}): {MEND}; {AS_ONE}",
            value=name,
        ) from cause


@dataclass(eq=False)
class _Batch:
    name: str
    losses: Losses
    f: Tensor
    y: Any
    u: Tensor  #: direction in each sample's outputs, along which first derivatives are differentiated
    draw: torch.Generator

    def require_apart(self, together: Tensor) -> None:
        """Compare the whole batch with `together`, its losses in a larger batch, and with parts of itself."""
        again = self.losses(self.f, self.y).detach()
        off = float((self.whole[0] - again).abs().max())
        if off > 1e4 * torch.finfo(again.dtype).eps * float(again.abs().max()):
            cause = "it keeps a state between calls, such as a counter or a running mean"
            if is_random(lambda: self.losses(self.f, self.y).detach(), torch.equal):
                cause = "it draws random numbers"
            raise BadLoss(
                f"the loss gave different values for the same batch twice (max difference {off:.2g})",
                value=self.name,
                remedy=f"{cause}: {MEND}",
            )
        self._require_same([together], torch.arange(len(self.f)))
        for parts, derivatives in _divisions(len(self.f), self.draw):
            found = []
            for rows in parts:
                at, y = rows.to(self.f.device), picked(self.y, rows, len(self.f))
                if derivatives:
                    found.append(_orders(self.losses, self.f[at], y, self.u[at], self._weights(len(rows))))
                else:
                    found.append([self.losses(self.f[at], y).detach().reshape(len(rows))])
            # the loss of some parts may be linear although it has a second derivative elsewhere: `strict=False`
            self._require_same([torch.cat(each) for each in zip(*found, strict=False)], torch.cat(parts))

    @cached_property
    def whole(self) -> list[Tensor]:
        """Return the losses and derivatives of the whole batch."""
        return _orders(self.losses, self.f, self.y, self.u, self.weights)

    @cached_property
    def weights(self) -> Tensor:
        """Return the weights of its samples, (n,)."""
        return self._weights(len(self.f))

    @cached_property
    def rounding(self) -> list[Tensor]:
        """Return the tolerance for each sample's numbers, from rounding errors of the outputs, (n,) for each order."""
        eps = torch.finfo(self.whole[0].dtype).eps
        moved = self.f * (1 + 4 * eps * self.u)
        other = _orders(self.losses, moved, self.y, self.u, self.weights)
        noise = [_largest(one - two) for one, two in zip(self.whole, other, strict=True)]
        return [100 * (a + a.nanmedian() + eps * _largest(one)) for a, one in zip(noise, self.whole, strict=True)]

    def _weights(self, n: int) -> Tensor:
        """Return powers of 2 (their products round nothing) that differ for any few samples, (n,)."""
        return 2.0 ** (torch.randperm(n, generator=self.draw) % 9 - 4)

    def _require_same(self, found: list[Tensor], rows: Tensor) -> None:
        """Refuse numbers of these rows that differ from the whole batch's, where those are finite."""
        for order, (whole, alone) in enumerate(zip(self.whole, found, strict=False)):
            at = rows.to(alone.device)
            one = whole[at]
            apart = _largest(one - alone)
            differs = ~(apart == 0) & _largest(one).isfinite()
            if bool(differs.any()):
                differs &= ~(apart <= self.rounding[order][at])
            if bool(differs.any()):
                first = int(differs.nonzero()[0])
                pair = torch.stack([one[first].flatten(), alone[first].flatten()])
                a, b = pair[:, (pair[0] - pair[1]).abs().argmax()].tolist()
                raise BadLoss(
                    f"the {_ORDERS[order]} of a sample depends on the other samples of its batch ({a:.6g} among some, "
                    f"{b:.6g} among others): {MEND}; {AS_ONE}",
                    value=self.name,
                )


def _orders(losses: Losses, f: Tensor, y: Any, u: Tensor, r: Tensor) -> list[Tensor]:
    """Return the losses, the rows of d(sum_i r_i l_i) / df divided by r_i, and the derivative of these rows along u."""
    with torch.enable_grad():
        leaf = f.clone().requires_grad_()
        values = losses(leaf, y)
        if not values.requires_grad:  # no sample of these counts
            return [values.detach(), torch.zeros_like(f), torch.zeros_like(f)]
        total = (r.to(values) * values).sum()
        (slope,) = torch.autograd.grad(total, leaf, create_graph=True, materialize_grads=True)
        rows = [slope]
        if not slope.requires_grad:  # linear in the outputs
            rows.append(torch.zeros_like(f))
        else:
            with suppress(RuntimeError):  # differentiable once only: no measure uses a second derivative of it
                rows += torch.autograd.grad(slope, leaf, u, materialize_grads=True)
    return [values.detach().reshape(len(f)), *(row.detach() / r.to(f)[:, None] for row in rows)]


def _largest(rows: Tensor) -> Tensor:
    return rows.abs() if rows.ndim == 1 else rows.abs().amax(1)


def _divisions(n: int, draw: torch.Generator) -> Iterator[tuple[list[Tensor], bool]]:
    """Yield divisions of n rows that together separate any two, each with whether to compare derivatives."""
    yield [torch.tensor([0]), torch.tensor([n - 1])], True
    code, step = torch.randperm(n, generator=draw), 1
    yield [rows for side in (0, 1) if len(rows := (code % 2 == side).nonzero()[:, 0])], True
    while step < n:
        digit = code // step % BASE
        yield [rows for value in range(BASE) if len(rows := (digit == value).nonzero()[:, 0])], False
        step *= BASE


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
    """Return whether targets of a batch (or its `rows`) are the same, up to a few roundings of single precision."""
    ours, theirs = (tree_leaves(one) for one in (_of_samples(once, rows, n), _of_samples(again)))
    return len(ours) == len(theirs) and all(_same(a, b, roundings) for a, b in zip(ours, theirs, strict=True))


def _of_samples(y: Any, rows: Tensor | None = None, n: int = 0) -> Any:
    given = y
    if isinstance(y, RowLayout):
        given = y.targets if y.counted is None else (y.targets, y.counted)
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
            _withhold(loss, f"the loss cannot be differentiated often enough ({why}): {_MEND}")
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
    """Return whether the losses' second derivative along w is not autograd's `known`, (n,), detach() aside."""
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
