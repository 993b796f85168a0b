"""The certificate of a balance: an upper bound of how far F is above its infimum (see `balance`).

Entries are p_ij = h_ij u_i v_j and q_ij = w_ij / (u_i v_j), divided by F, so that they sum to 1.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import threshold

from flatlens.grams.contractions import pieces

EPS = torch.finfo(torch.float64).eps


def gap_of_step(p: Tensor, q: Tensor, alpha: Tensor, beta: Tensor, roots: Tensor, enough: float) -> float:
    """Return an upper bound of (F - inf F) / F, where the entries of p + q sum to 1.

    If the first part of the bound already exceeds `enough`, the second part is left out.

    First part. At the minimum each p has become p e^t and each q has become q e^-t, with t_ij = x_i - z_j, where x is
    the change of a and z minus the change of b. For any y, p e^t + q e^-t >= y t + min_s (p e^s + q e^-s - y s). This
    minimum is reached where P = p e^s and Q = q e^-s satisfy P - Q = y. So F - min F <= sum KL(P | p) + KL(Q | q) - sum
    y t, a formula without cancellation.

    Second part. For y = p - q + (p + q) (alpha + beta), from the Newton step, all row and column sums are 0, and so is
    sum y t. In practice the sums are not quite 0: rounding remains, and where p or q is 0 the entry of y is clipped to
    the sign that this allows. The remainders are multiplied by upper bounds of |x_i| and |z_j|, and added.
    """
    gap, rows, columns, sizes = 4 * EPS, [], torch.zeros_like(p[0]), torch.zeros_like(p[0])
    for piece in pieces(len(p), 4 * p[0].numel() * p.element_size()):  # about a dozen temporaries stay in the cache
        more, y = _divergence(p[piece], q[piece], alpha[piece], beta)
        gap += more
        rows.append(y.sum(1).abs() + 4 * EPS * y.abs().sum(1))
        columns += y.sum(0)
        sizes += y.abs().sum(0)
    if gap <= enough:
        there, back = (_above_tiny(x).log_().neg_() for x in (p, q))
        far = [_reach(there, back, roots), _reach(back, there, roots)]
        for left, (x, z) in zip(
            (torch.cat(rows), columns.abs() + 4 * EPS * sizes), zip(*far, strict=True), strict=True
        ):
            gap += float((left * x.maximum(z)).where(left > 0, 0.0).sum())
    return gap if gap <= 1 else 1.0  # F itself bounds the gap (also if this is NaN), because inf F >= 0


def _above_tiny(x: Tensor) -> Tensor:
    """Return x with 0 for entries so small that ratios with them overflow; the certificate stays valid."""
    return threshold(x, 1e-290, 0.0)


def _divergence(p: Tensor, q: Tensor, alpha: Tensor, beta: Tensor) -> tuple[float, Tensor]:
    """Return sum KL(P | p) + KL(Q | q) over the given rows, and y: see `gap_of_step`."""
    p, q = _above_tiny(p), _above_tiny(q)
    y = (p + q).mul_(alpha[:, None] + beta).add_(p).sub_(q)
    if min(p.min(), q.min()) == 0:
        y = y.where(p > 0, y.clamp(max=0)).where(q > 0, y.clamp(min=0)).where((p > 0) | (q > 0), 0.0)
    mean = p.sqrt().mul_(q.sqrt())
    large = y.hypot(2 * mean).add_(y.abs()).div_(2)
    small = (mean / large).mul_(mean).where(large > 0, 0.0)
    up = y > 0
    return _kl(large.where(up, small), p) + _kl(small.where(up, large), q), y


def _kl(P: Tensor, p: Tensor) -> float:
    """Return sum P log(P / p) - P + p, accurate for P near p; terms with p = 0 count 0, as P is 0 there."""
    off = (P / p).sub_(1).where(p > 0, 0.0)
    return float(torch.special.xlog1py(1 + off, off).sub_(off).mul_(p).sum())


def _reach(there: Tensor, back: Tensor, roots: Tensor) -> tuple[Tensor, Tensor]:
    """Return bounds of x_i and z_j with x_i - z_j <= there_ij, z_j - x_i <= back_ij and x = 0 at the roots.

    Each bound is a sum along a path from a root; any path that reaches the row or column gives a valid bound. At a
    minimum no entry exceeds F, so that t <= -log p and -t <= -log q: `there` and `back` hold these limits.
    """
    x = there.new_full((len(there),), math.inf).index_fill(0, roots, 0.0)
    while True:
        z = (x[:, None] + back).amin(0)
        new = (z + there).amin(1).minimum(x)
        if torch.equal(new.isfinite(), x.isfinite()):
            return x, z
        x = new


def gap_at_rest(h: Tensor, w: Tensor, u: Tensor, v: Tensor, roots: Tensor) -> tuple[float, float]:
    """Return F and an upper bound of (F - inf F) / F, for a point where row and column sums of p - q are nearly 0.

    It is the bound of `gap_of_step` for y = p - q: there P = p and Q = q, and only the remainders count. The bounds of
    |x_i| and |z_j| are those of `_reach` with sums in place of the largest entries, as -log max_j e_j <= log m - log
    sum_j e_j. So products of a matrix and a vector are enough.
    """
    value = u @ (h @ v) + (1 / u) @ (w @ (1 / v))
    p, q = (h, u / value, v), (w, 1 / u / value, 1 / v)
    ones = (torch.ones_like(u), torch.ones_like(v))
    both = [[_times(e, ones[1 - side], side) for e in (p, q)] for side in (0, 1)]
    far = [_reach_by_sums(p, q, roots), _reach_by_sums(q, p, roots)]
    gap = 4 * EPS
    for (a, b), x, z in zip(both, *far, strict=True):
        gap += float((((a - b).abs() + 4 * EPS * (a + b)) * x.maximum(z)).sum())
    return float(value), gap if gap <= 1 else 1.0  # also where it is NaN


_Entries: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""A matrix, and factors of its rows and of its columns."""


def _times(entries: _Entries, x: Tensor, side: int) -> Tensor:
    """Return entries x, one number for each row, or with side 1 x entries, one for each column."""
    matrix, rows, columns = entries
    return columns * ((rows * x) @ matrix) if side else rows * (matrix @ (columns * x))


def _reach_by_sums(there: _Entries, back: _Entries, roots: Tensor) -> list[Tensor]:
    """Return bounds of x_i and z_j as `_reach` does, from p and q themselves; infinite where the sums underflow."""
    x = torch.zeros_like(there[1]).index_fill_(0, roots, 1.0)  # exp of minus the bound, as `z`
    while True:
        z = _times(back, x, 1) / len(x)
        new = x.maximum(_times(there, z, 0) / len(z))
        if torch.equal(new > 0, x > 0):
            return [-x.log(), -z.log()]
        x = new
