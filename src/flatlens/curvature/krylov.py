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

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flatlens.estimate import Progress

Apply = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    """Ritz values and vectors at the ends of a spectrum; the top ones descending, then the bottom ones ascending."""

    values: Tensor  #: (k,) float64; the first is a lower bound of the largest eigenvalue
    vectors: Tensor  #: (k, P), of length 1
    residuals: Tensor  #: (k,) float64: an eigenvalue lies within it of each value
    products: int  #: matrix-vector products used
    converged: bool  #: whether every residual met the tolerance
    exact: bool  #: whether the basis spans everything the matrix can reach, so that only rounding is left

    @property
    def largest(self) -> float:
        """The largest eigenvalue."""
        return float(self.values[0])


class Krylov:
    """An orthonormal basis that grows by one product at a time, and the matrix seen in it."""

    def __init__(self, apply: Apply, start: Tensor, most: int) -> None:
        self.apply = apply
        self.Q = start.new_empty(min(most, len(start)), len(start))
        self.T = torch.zeros(len(self.Q), len(self.Q), dtype=torch.float64)
        self.steps = 0
        self.products = 0
        self.beta = 0.0  #: ||r||
        self._next = start / start.norm()

    def extend(self) -> None:
        """One product: the next basis vector, and its row and column of T."""
        j = self.steps
        self.Q[j] = self._next
        w = self.apply(self._next)
        self.products += 1
        h = torch.zeros(j + 1, dtype=torch.float64)
        scale = float(w.norm())
        for _ in range(2):  # once leaves what rounding makes of cancellation; twice is enough
            step = self.Q[: j + 1] @ w
            w = w - step @ self.Q[: j + 1]
            h += step.to("cpu", torch.float64)
        self.T[: j + 1, j] = self.T[j, : j + 1] = h
        self.steps = j + 1
        self.beta = float(w.norm())
        tiny = 10 * torch.finfo(w.dtype).eps * max(scale, float(self.T[: j + 1, : j + 1].abs().max()))
        if self.beta <= tiny:
            self.beta = 0.0
        else:
            self._next = w / self.beta

    @property
    def full(self) -> bool:
        """Whether the basis has no room left."""
        return self.steps == len(self.Q)

    def ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """(values ascending, coefficients as columns, residuals)."""
        theta, S = torch.linalg.eigh(self.T[: self.steps, : self.steps])
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
            size = float(v.norm())
            for _ in range(2):
                v = v - (self.Q[: self.steps] @ v) @ self.Q[: self.steps]
            left = float(v.norm())
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
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> Eigenpairs:
    """The `top` largest and `bottom` smallest eigenvalues, to residuals of `tolerance` times their size.

    `most` products at most; `room` basis vectors at a time (restarted thickly beyond). The bottom ones' residuals are
    measured against the largest eigenvalue in size, since they may be zero. A start vector that misses part of the
    spectrum shows when the basis closes on itself: it is then continued from a random vector, until what is found
    cannot be improved, so that repeated eigenvalues are found as often as they occur.
    """
    generator = torch.Generator().manual_seed(0) if generator is None else generator

    def fresh() -> Tensor:
        return torch.randn(len(start), generator=generator, dtype=torch.float64).to(start)

    usable = bool(torch.isfinite(start).all()) and float(start.norm()) > 0
    wanted = min(top + bottom, len(start))
    krylov = Krylov(apply, start if usable else fresh(), max(room, 2 * wanted + 4))
    block, block_is_random, closed = 0, not usable, False
    while krylov.products < most:
        krylov.extend()
        theta, S, residuals = krylov.ritz()
        ends = _ends(len(theta), top, bottom)
        if progress is not None:
            progress("curvature products", krylov.products, most)
        if krylov.beta == 0:  # the basis is closed under A: all its Ritz pairs are eigenpairs
            newest = torch.linalg.eigvalsh(krylov.T[block : krylov.steps, block : krylov.steps])
            enough = len(ends) == wanted and block_is_random and _cannot_improve(newest, theta, top, bottom)
            block, block_is_random = krylov.steps, True
            if enough or krylov.full or not krylov.turn(fresh):
                closed = enough or krylov.steps == len(start)
                break
        elif len(ends) == wanted and bool((residuals[ends] <= _allowed(theta, ends, top, tolerance, start)).all()):
            break
        elif krylov.full:
            krylov.compress(_ends(len(theta), min(top + 3, len(theta) // 2), min(bottom + 1, len(theta) // 2)))
            block = 0
    theta, S, residuals = krylov.ritz()
    ends = _ends(len(theta), top, bottom)
    met = bool((residuals[ends] <= _allowed(theta, ends, top, tolerance, start)).all())
    return Eigenpairs(
        theta[ends], krylov.vectors(S[:, ends]), residuals[ends], krylov.products, met and len(ends) == wanted, closed
    )


def _ends(count: int, top: int, bottom: int) -> Tensor:
    """Positions of the largest values, descending, then of the smallest, ascending; none twice."""
    top = min(top, count)
    bottom = min(bottom, count - top)
    return torch.tensor([*range(count - 1, count - 1 - top, -1), *range(bottom)], dtype=torch.long)


def _allowed(theta: Tensor, ends: Tensor, top: int, tolerance: float, start: Tensor) -> Tensor:
    """The residual each value may have."""
    scale = float(theta.abs().max())
    allowed = tolerance * theta[ends].abs()
    allowed[top:] = tolerance * scale
    return allowed.clamp(min=100 * torch.finfo(start.dtype).eps * scale)


def _cannot_improve(newest: Tensor, theta: Tensor, top: int, bottom: int) -> bool:
    """Whether the newest closed block, begun at random outside the older ones, holds nothing beyond what is found."""
    slack = 1e-9 * float(theta.abs().max())
    above = top == 0 or len(newest) == len(theta) or float(newest[-1]) <= float(theta[-min(top, len(theta))]) + slack
    below = bottom == 0 or len(newest) == len(theta) or float(newest[0]) >= float(theta[bottom - 1]) - slack
    return above and below and (len(newest) < len(theta) or (top <= 1 and bottom <= 1))
