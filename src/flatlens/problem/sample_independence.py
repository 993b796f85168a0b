"""A check that a loss takes each sample separately, at the outputs where it is measured.

The losses of a batch are compared with those of parts of it: values, derivatives, and products with the second
derivative. With J_ij = dl_i / df_j and weights r, row j of d(sum_i r_i l_i) / df is sum_i r_i J_ij. It equals r_j
times the row of the plain sum exactly where sum_i (r_i - r_j) J_ij = 0. For random r that is, almost surely, where J
is diagonal. A loss that couples samples through their targets, or through detached outputs, changes values. These are
compared over parts that separate any two samples at least once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flatlens.errors import BadLoss, LossFailed
from flatlens.problem.batches import picked
from flatlens.problem.causes import draws
from flatlens.user_code import said

Losses: TypeAlias = Callable[[Tensor, Any], Tensor]
"""Maps outputs (n, N) and targets to losses, (n,)."""

ENTRIES = 2**22
"""Outputs compared at a time: the derivatives of many more would not fit in memory beside the network's own."""
BASE = 8
"""Parts of one division. More parts mean more calls; fewer parts need more divisions to separate all pairs."""
_ORDERS = ("loss", "derivative of the loss", "second derivative of the loss")
MEND = "return losses of shape (n,), each computed from that sample's outputs and target alone"
AS_ONE = "to a loss that compares samples, as a contrastive one does, give each batch as one sample (docs/recipes.md)"


def require_apart(name: str, losses: Losses, f: Tensor, y: Any) -> None:
    """Refuse a loss that couples the samples of a batch; `name` is its name in the error."""
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
    """A batch whose losses are computed as a whole, and then in parts."""

    name: str
    losses: Losses
    f: Tensor
    y: Any
    u: Tensor  #: direction in each sample's outputs, along which first derivatives are differentiated
    draw: torch.Generator

    def require_apart(self, together: Tensor) -> None:
        """Compare the whole batch with `together`, its losses in a larger batch, and with parts of itself."""
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

    def _require_reliable(self) -> None:
        again = self.losses(self.f, self.y).detach()
        apart = float((self.whole[0] - again).abs().max())
        if apart > 1e4 * torch.finfo(again.dtype).eps * float(again.abs().max()):
            cause = "it keeps a state between calls, such as a counter or a running mean"
            if draws(lambda: self.losses(self.f, self.y).detach(), torch.equal):
                cause = "it draws random numbers"
            raise BadLoss(
                f"the loss gave different values for the same batch twice (max difference {apart:.2g})",
                value=self.name,
                remedy=f"{cause}: {MEND}",
            )

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
    """Return the largest absolute entry of each row, (n,)."""
    return rows.abs() if rows.ndim == 1 else rows.abs().amax(1)


def _divisions(n: int, draw: torch.Generator) -> Iterator[tuple[list[Tensor], bool]]:
    """Yield divisions of n rows into parts, each with whether to compare derivatives.

    The first division is the two ends alone, the second two halves. The further ones together separate any two rows.
    """
    yield [torch.tensor([0]), torch.tensor([n - 1])], True
    code, step = torch.randperm(n, generator=draw), 1
    yield [rows for side in (0, 1) if len(rows := (code % 2 == side).nonzero()[:, 0])], True
    while step < n:
        digit = code // step % BASE
        yield [rows for value in range(BASE) if len(rows := (digit == value).nonzero()[:, 0])], False
        step *= BASE
