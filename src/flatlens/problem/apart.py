"""A check that a loss takes each sample alone, at the outputs where it is measured.

The losses of a batch are compared with those of parts of it: values, slopes and products with the second derivative.
With J_ij = dl_i / df_j and weights r, row j of d(sum_i r_i l_i) / df is sum_i r_i J_ij. It is r_j times the plain sum's
where sum_i (r_i - r_j) J_ij = 0: where J has nothing beside its diagonal, but for unlucky draws of r. What couples
samples through their targets, or through detached outputs, moves values: any two samples are in different parts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from flatlens.errors import BadLoss, LossFailed
from flatlens.userfile import said

Losses: TypeAlias = Callable[[Tensor, Any], Tensor]
"""From outputs (n, N) and targets to the losses, (n,)."""

ENTRIES = 2**22
"""Outputs that are looked at together: derivatives of many more would not fit beside the network's own."""
BASE = 8
"""Parts into which values are divided at a time: many are many calls, few take more turns to tell all pairs apart."""
ORDERS = ("loss", "slope of the loss", "second derivative of the loss")
MEND = "return losses of shape (n,), each of a sample's own outputs and target alone"


def require_apart(name: str, losses: Losses, f: Tensor, y: Any) -> None:
    """Refuse losses that couple the samples of a batch; the error calls them by `name`."""
    f, draw = f.detach().to(torch.float64), torch.Generator().manual_seed(len(f))
    with torch.enable_grad():
        together = losses(f.clone().requires_grad_(), y)
    if not together.requires_grad:
        raise BadLoss(
            f"Problem(loss={name}): the losses of {len(f)} samples have no derivative in the outputs: a differentiable "
            f"loss is needed, without argmax, comparison or detach()"
        )
    try:
        for rows in torch.split(torch.arange(len(f)), max(2, ENTRIES // max(1, f[0].numel()))):
            at = rows.to(f.device)
            u = torch.rand(len(rows), f.shape[1], generator=draw).to(f) - 0.5
            _Batch(name, losses, f[at], picked(y, rows, len(f)), u, draw).require_apart(together.detach()[at])
    except LossFailed as error:
        cause = error.__cause__ or error
        raise BadLoss(
            f"Problem(loss={name}): the loss takes a batch of {len(f)} samples, but fails on parts of it "
            f"({said(cause)}): {MEND}"
        ) from cause


@dataclass(eq=False)
class _Batch:
    """Samples whose losses are asked for together, and then in parts."""

    name: str
    losses: Losses
    f: Tensor
    y: Any
    u: Tensor  #: a direction for each sample's outputs, along which slopes are differentiated
    draw: torch.Generator

    def require_apart(self, together: Tensor) -> None:
        """Compare with what was found `together` with other samples, if there are any, and with parts of these."""
        self._require_reliable()
        self._require_same([together], torch.arange(len(self.f)))
        for parts, derivatives in _divisions(len(self.f), self.draw):
            found = []
            for rows in parts:
                at, y = rows.to(self.f.device), picked(self.y, rows, len(self.f))
                if derivatives:
                    found.append(_orders(self.losses, self.f[at], y, self.u[at], self._weights(len(rows))))
                else:
                    found.append([self.losses(self.f[at], y).detach().reshape(len(rows))])
            # of a loss that is differentiable once, some parts may be linear, and have a second derivative all the same
            self._require_same([torch.cat(each) for each in zip(*found, strict=False)], torch.cat(parts))

    @cached_property
    def whole(self) -> list[Tensor]:
        """Return the batch's result."""
        return _orders(self.losses, self.f, self.y, self.u, self.weights)

    @cached_property
    def weights(self) -> Tensor:
        """Those of its samples."""
        return self._weights(len(self.f))

    @cached_property
    def rounding(self) -> list[Tensor]:
        """What the outputs' last digits make of each sample's numbers, and of most samples', (n,)."""
        eps = torch.finfo(self.whole[0].dtype).eps
        moved = self.f * (1 + 4 * eps * self.u)
        other = _orders(self.losses, moved, self.y, self.u, self.weights)
        noise = [_largest(one - two) for one, two in zip(self.whole, other, strict=True)]
        return [100 * (a + a.nanmedian() + eps * _largest(one)) for a, one in zip(noise, self.whole, strict=True)]

    def _weights(self, n: int) -> Tensor:
        """Factors that round nothing, different ones of a few samples."""
        return 2.0 ** (torch.randperm(n, generator=self.draw) % 9 - 4)

    def _require_reliable(self) -> None:
        again = self.losses(self.f, self.y).detach()
        apart = float((self.whole[0] - again).abs().max())
        if apart > 1e4 * torch.finfo(again.dtype).eps * float(again.abs().max()):
            raise BadLoss(
                f"Problem(loss={self.name}): the loss gave different values for the same batch twice (max difference "
                f"{apart:.2g}): does it draw random numbers, or keep a running mean?"
            )

    def _require_same(self, found: list[Tensor], rows: Tensor) -> None:
        """Refuse other numbers of these rows than the whole batch gives, where it gives finite ones."""
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
                    f"Problem(loss={self.name}): the {ORDERS[order]} of a sample depends on the other samples of its "
                    f"batch ({a:.6g} among some, {b:.6g} among others): is there a count or a normalisation over the "
                    f"batch? {MEND[0].upper()}{MEND[1:]}"
                )


def _orders(losses: Losses, f: Tensor, y: Any, u: Tensor, r: Tensor) -> list[Tensor]:
    """The losses; the rows of d(sum_i r_i l_i) / df, over r_i; those of its derivative along u, if there is one."""
    with torch.enable_grad():
        leaf = f.clone().requires_grad_()
        values = losses(leaf, y)
        if not values.requires_grad:  # none of these samples counts
            return [values.detach(), torch.zeros_like(f), torch.zeros_like(f)]
        total = (r.to(values) * values).sum()
        (slope,) = torch.autograd.grad(total, leaf, create_graph=True, materialize_grads=True)
        rows = [slope]
        if not slope.requires_grad:  # linear in the outputs
            rows.append(torch.zeros_like(f))
        else:
            with suppress(RuntimeError):  # differentiable once: no measure gets a second derivative of it
                rows += torch.autograd.grad(slope, leaf, u, materialize_grads=True)
    return [values.detach().reshape(len(f)), *(row.detach() / r.to(f)[:, None] for row in rows)]


def _largest(rows: Tensor) -> Tensor:
    """The largest entry of each row, (n,)."""
    return rows.abs() if rows.ndim == 1 else rows.abs().amax(1)


def _divisions(n: int, draw: torch.Generator) -> Iterator[tuple[list[Tensor], bool]]:
    """Parts of n rows, and whether derivatives are to be compared: the ends alone; two halves; then such parts, turn by
    turn, that any two rows are in different ones once."""
    yield [torch.tensor([0]), torch.tensor([n - 1])], True
    code, step = torch.randperm(n, generator=draw), 1
    yield [rows for side in (0, 1) if len(rows := (code % 2 == side).nonzero()[:, 0])], True
    while step < n:
        digit = code // step % BASE
        yield [rows for value in range(BASE) if len(rows := (digit == value).nonzero()[:, 0])], False
        step *= BASE


def picked(y: Any, samples: Tensor, n: int) -> Any:
    """The targets of some of n samples; what does not count samples is kept whole."""

    def counts(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == n

    def lists(part: Any) -> bool:
        """Return whether it is a list of one thing a sample, of whatever kind."""
        return isinstance(part, list | tuple) and len(part) == n and not any(map(counts, part))

    def cut(part: Any) -> Any:
        if lists(part):
            return [part[i] for i in samples.tolist()]
        return part[samples.to(part.device)] if counts(part) else part

    return tree_map(cut, y, is_leaf=lists)
