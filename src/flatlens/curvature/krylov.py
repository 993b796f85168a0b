"""Lanczos with full reorthogonalisation: eigenvalues of a symmetric matrix known by its products, with residuals.

In each step A Q = Q T + r e_last^T with Q orthonormal, so a Ritz pair (theta, Q s) misses being an eigenpair by
||A Q s - theta Q s|| = ||r|| |s_last|: an eigenvalue lies that close to theta. Nothing stops on a value that merely
stopped moving, as power iterations do, 1 to 10 % too early.

>>> A = torch.diag(torch.tensor([5.0, 2.0, -1.0], dtype=torch.float64))
>>> pairs = lanczos(lambda v: A @ v, torch.ones(3, dtype=torch.float64), top=1, bottom=1)
>>> [round(float(v), 6) for v in pairs.values], pairs.exact
([5.0, -1.0], True)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flatlens.errors import Overflows
from flatlens.estimate import Progress

Apply = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Remembered:
    """Ritz pairs that a search leaves for one at a later moment of the same matrix, the wanted ones first."""

    values: Tensor  #: (m,) float64
    vectors: Tensor  #: (m, P), orthonormal


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    """Ritz values and vectors at the ends of a spectrum; the top ones descending, then the bottom ones ascending."""

    values: Tensor  #: (k,) float64; the first is a lower bound of the largest eigenvalue
    vectors: Tensor  #: (k, P), of length 1
    residuals: Tensor  #: (k,) float64: an eigenvalue lies within it of each value
    products: int  #: matrix-vector products used
    converged: bool  #: whether every residual met the tolerance
    exact: bool  #: whether the basis spans everything the matrix can reach, so that only rounding is left
    remembered: Remembered | None = None  #: what the next search may begin with
    above: float = math.inf  #: how far above the first value an eigenvalue may lie, but for a chance of 5%

    @property
    def largest(self) -> float:
        """The largest eigenvalue."""
        return float(self.values[0])


FIRST_SHARE = 0.6  #: share of the tolerance that the first residual is brought down to
CHANCE = 0.05  #: that a bound on what a search missed fails, over its random start


def unseen(theta: Tensor, size: int, share: float) -> float:
    """How far above the largest of k Ritz values an eigenvalue may lie, but for a chance of `CHANCE` over the start.

    Kuczynski and Wozniakowski (1992), Theorem 4.2: from a start uniform on the sphere in P dimensions, k steps of
    Lanczos miss the largest eigenvalue by e of the spectrum's range with a chance of 1.648 sqrt(P) exp(-sqrt(e) (2k-1))
    at most. Of a start of which `share` is random, independent of the rest, the chance is 1 / share of that at most,
    since what is fixed can only move the random part's component away from 0. Both ends count, for the range is known
    from the Ritz values alone; and every k, for the search itself decided where to stop: a share 1 / (k (k + 1)) each.
    inf where too few steps were made to say anything.
    """
    k = len(theta)
    if share <= 0 or k < 1:
        return math.inf
    chance = CHANCE / 2 / (k * (k + 1))
    missed = (math.log(1.648 * size**0.5 / (share * chance)) / (2 * k - 1)) ** 2
    return missed / (1 - 2 * missed) * float(theta.max() - theta.min()) if missed < 0.5 else math.inf


def length(v: Tensor) -> float:
    """||v||, its squares in float64: those of a float32 vector over- and underflow early."""
    return float(torch.linalg.vector_norm(v, dtype=torch.float64))


def overflow(dtype: torch.dtype) -> Overflows:
    """The error of a product that is not finite."""
    mend = "dtype=torch.float64 may mend it" if dtype != torch.float64 else "are weights or inputs scaled wildly?"
    return Overflows(f"a curvature product overflows {dtype}: {mend}")


class Krylov:
    """An orthonormal basis that grows by one product at a time, and the matrix seen in it."""

    def __init__(self, apply: Apply, start: Tensor, most: int) -> None:
        self.apply = apply
        self.Q = start.new_empty(min(most, len(start)), len(start))
        self.T = torch.zeros(len(self.Q), len(self.Q), dtype=torch.float64)
        self.steps = 0
        self.products = 0
        self.beta = 0.0  #: ||r||
        self._next = start / length(start)

    def extend(self) -> None:
        """One product: the next basis vector, and its row and column of T."""
        j = self.steps
        self.Q[j] = self._next
        w = self.apply(self._next)
        self.products += 1
        h = torch.zeros(j + 1, dtype=torch.float64)
        scale = length(w)
        if not math.isfinite(scale):
            raise overflow(w.dtype)
        for _ in range(2):  # once leaves what rounding makes of cancellation; twice is enough
            step = self.Q[: j + 1] @ w
            w = w - step @ self.Q[: j + 1]
            h += step.to("cpu", torch.float64)
        self.T[: j + 1, j] = self.T[j, : j + 1] = h
        self.steps = j + 1
        self.beta = length(w)
        tiny = 100 * torch.finfo(w.dtype).eps * max(scale, float(self.T[: j + 1, : j + 1].abs().max()))
        if self.beta <= tiny:
            self.beta = 0.0
        else:
            self._next = w / self.beta

    @property
    def full(self) -> bool:
        """Whether the basis has no room left."""
        return self.steps == len(self.Q)

    def ritz(self, block: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """(values ascending, coefficients as columns, residuals), of the basis from `block` on."""
        theta, S = torch.linalg.eigh(self.T[block : self.steps, block : self.steps])
        return theta, S, self.beta * S[-1].abs()

    def vectors(self, S: Tensor) -> Tensor:
        """Ritz vectors, (k, P), of columns S."""
        return S.T.to(self.Q) @ self.Q[: self.steps]

    def turn(self, fresh: Callable[[], Tensor]) -> bool:
        """Go on from a new vector orthogonal to the basis, after it has closed; False if it spans everything."""
        for _ in range(4):  # one drawn before lies in the basis
            if self.steps == self.Q.shape[1]:
                return False
            v = fresh()
            size = length(v)
            for _ in range(2):
                v = v - (self.Q[: self.steps] @ v) @ self.Q[: self.steps]
            left = length(v)
            if left > 1e-4 * size:
                self._next = v / left
                return True
        return False

    def compress(self, keep: Tensor) -> None:
        """Make room: keep the Ritz vectors of these columns (thick restart); the next vector stays as it was."""
        theta, S, _ = self.ritz()
        kept = self.vectors(S[:, keep])
        self.Q[: len(keep)] = kept
        self.T.zero_()
        self.T[: len(keep), : len(keep)] = torch.diag(theta[keep])
        self.steps = len(keep)


def lanczos(
    apply: Apply,
    start: Tensor,
    *,
    top: int = 1,
    bottom: int = 0,
    tolerance: float = 1e-3,
    most: int = 300,
    room: int = 300,
    keep: int = 0,
    random: float = 0.0,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> Eigenpairs:
    """The `top` largest and `bottom` smallest eigenvalues, to residuals of `tolerance` times their size.

    The first residual is brought down to `FIRST_SHARE` of that, where products are left: two eigenvectors mixed have a residual
    of at most half of their gap, so that at the tolerance itself those apart by twice as much often look like one.

    `most` products at most; `room` basis vectors at a time (restarted thickly beyond); `keep` Ritz pairs are handed on
    as `remembered`; `random` is the share of the start that was drawn, without which nothing bounds what it misses
    (`unseen`). The bottom ones' residuals are measured against the largest eigenvalue in size, since they may be zero.
    Where the basis closes on itself it is continued from a random vector until what is found cannot be improved: a
    start that misses part of the spectrum does no harm then, and repeated eigenvalues are found as often as they occur.
    A basis that never closes sees a repeated eigenvalue once, or again through rounding.
    """
    generator = torch.Generator().manual_seed(0) if generator is None else generator

    def fresh() -> Tensor:
        return torch.randn(len(start), generator=generator, dtype=torch.float64).to(start)

    usable = bool(torch.isfinite(start).all()) and length(start) > 0
    wanted = StoppingRule(min(top, len(start)), min(bottom, len(start) - min(top, len(start))), tolerance)
    krylov = Krylov(apply, start if usable else fresh(), max(room, 2 * (top + bottom) + 4))
    block, block_is_random, closed = 0, not usable, False
    grown: Tensor | None = None  # the Ritz values of what grew from the start, before anything was dropped or added
    while krylov.products < most:
        krylov.extend()
        if progress is not None:
            progress("curvature products", krylov.products, most)
        if krylov.beta == 0:  # the basis is closed under A: all its Ritz pairs are eigenpairs
            enough = block_is_random and wanted.cannot_improve(krylov, block)
            grown = krylov.ritz()[0] if grown is None else grown
            block, block_is_random = krylov.steps, True
            if enough or krylov.full or not krylov.turn(fresh):
                closed = enough or krylov.steps == len(start)
                break
        elif wanted.met(krylov, 0, FIRST_SHARE) and wanted.settled(krylov, block):
            break
        elif krylov.full and krylov.products < most:  # a basis just compressed has no residuals yet
            theta, _, _ = krylov.ritz()
            grown = theta if grown is None else grown
            half = len(theta) // 2
            krylov.compress(ends_of(len(theta), min(top + 3, half), min(bottom + 1, half)))
            block = 0
    theta, S, residuals = krylov.ritz()
    ends = ends_of(len(theta), top, bottom)
    return Eigenpairs(
        theta[ends],
        krylov.vectors(S[:, ends]),
        residuals[ends],
        krylov.products,
        wanted.met(krylov, 0),
        closed,
        remembered(theta, krylov.vectors, S, keep, top, bottom) if keep else None,
        unseen(theta if grown is None else grown, len(start), random if usable else 1.0),
    )


def remembered(
    theta: Tensor, vectors: Callable[[Tensor], Tensor], S: Tensor, keep: int, top: int, bottom: int = 0
) -> Remembered:
    """The wanted pairs, then what comes next to them at the top, `keep` in all."""
    kept = ends_of(len(theta), top, bottom).tolist()
    kept += [i for i in range(len(theta) - 1, -1, -1) if i not in kept][: max(keep - len(kept), 0)]
    return Remembered(theta[kept], vectors(S[:, kept]))


@dataclass(frozen=True)
class StoppingRule:
    """What a search is for, and whether it has it."""

    top: int
    bottom: int
    tolerance: float

    def met(self, krylov: Krylov, block: int, aim: float = 1.0) -> bool:
        """Whether the basis from `block` on has that many ends, each to its residual."""
        theta, _, residuals = krylov.ritz(block)
        ends = ends_of(len(theta), self.top, self.bottom)
        allowed = self.allowed(theta, krylov.Q.dtype, aim)
        return len(ends) == self.top + self.bottom and bool((residuals[ends] <= allowed).all())

    def allowed(self, theta: Tensor, dtype: torch.dtype, aim: float = 1.0) -> Tensor:
        """The residual that each end may have, the first one a share of it."""
        scale = float(theta.abs().max())
        allowed = self.tolerance * theta[ends_of(len(theta), self.top, self.bottom)].abs()
        allowed[self.top :] = self.tolerance * scale
        allowed[:1] *= aim
        return allowed.clamp(min=100 * torch.finfo(dtype).eps * scale)

    def settled(self, krylov: Krylov, block: int) -> bool:
        """Whether the block begun last has gone some way, and found as many ends itself.

        A start at or near an eigenvector has a small residual at once, whichever it is.
        """
        least = min(self.top + self.bottom + 3, krylov.Q.shape[1] - block)
        return krylov.steps - block >= least and (block == 0 or self.met(krylov, block, FIRST_SHARE))

    def cannot_improve(self, krylov: Krylov, block: int) -> bool:
        """Whether the closed block begun at random outside the older ones holds nothing beyond what is found."""
        theta, _, _ = krylov.ritz()
        if len(theta) < self.top + self.bottom:
            return False
        if block == 0:  # it has seen every eigenvalue, but each once
            return self.top <= 1 and self.bottom <= 1
        newest, _, _ = krylov.ritz(block)
        slack = 1e-9 * float(theta.abs().max())
        above = self.top == 0 or float(newest[-1]) <= float(theta[-self.top]) + slack
        return above and (self.bottom == 0 or float(newest[0]) >= float(theta[self.bottom - 1]) - slack)


def ends_of(count: int, top: int, bottom: int) -> Tensor:
    """Positions of the largest values, descending, then of the smallest, ascending; none twice."""
    top = min(top, count)
    bottom = min(bottom, count - top)
    return torch.tensor([*range(count - 1, count - 1 - top, -1), *range(bottom)], dtype=torch.long)
