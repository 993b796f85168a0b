"""Eigenvalues of a matrix that has changed a little since its leading eigenpairs were found.

The old eigenpairs give a model of the matrix: exact on the directions multiplied so far, as remembered elsewhere. Each
product is taken along the model's current eigenvector. Residuals are those of the matrix itself, so a poor model costs
products, but the result is an eigenvalue all the same. As with Lanczos, it is the largest one because the first
direction has a component along every eigenvector. Without old pairs the search is Lanczos. It takes fewer products than
Lanczos from the old eigenvector: the new eigenvector lies mostly in the span of the old leading ones, and one product
and the old eigenvalues show where.

>>> A = torch.diag(torch.tensor([5.0, 2.0, -1.0, 0.0, 0.0, 0.0], dtype=torch.float64))
>>> old = Remembered(torch.tensor([5.1, 1.9], dtype=torch.float64), torch.eye(2, 6, dtype=torch.float64))
>>> found = recall(lambda v: A @ v, old, torch.ones(6, dtype=torch.float64))
>>> round(found.largest, 5), found.converged
(5.0, True)
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatlens.curvature.krylov import (
    FIRST_SHARE,
    Apply,
    Eigenpairs,
    Remembered,
    StoppingRule,
    ends_of,
    length,
    overflow,
    remembered,
)
from flatlens.estimate import Progress
from flatlens.progress import SEARCH

RUNNERS_UP = 0.1  #: weight of the next pairs in the first direction: the first residual shows if one leads now
RANDOM_SHARE = 0.1  #: weight of a random vector in the first direction, for an eigenvector that is not remembered


def recall(
    apply: Apply,
    known: Remembered,
    fresh: Tensor,
    *,
    top_k: int = 1,
    rtol: float = 1e-3,
    most: int = 300,
    keep: int = 0,
    progress: Progress | None = None,
) -> Eigenpairs:
    """Return the `top_k` largest eigenvalues, to the same residuals as `lanczos`.

    `known` holds pairs of the matrix at an earlier time; `fresh` is a random vector. The basis is not restarted: after
    `most` products the search ends, perhaps not `converged`. `keep` Ritz pairs are returned as `remembered`, from the
    model where the basis has too few.
    """
    wanted = StoppingRule(top_k, 0, rtol)
    model = _Model(known, mixed_start(known, top_k, fresh))
    while True:
        model.multiply(apply)
        if progress is not None:
            progress(SEARCH, len(model.W), most)
        theta, S = model.ritz()
        ends = ends_of(len(theta), top_k, 0)
        residuals = model.residuals(theta[ends], S[:, ends])
        lengths = torch.tensor([length(r) for r in residuals], dtype=torch.float64)
        met = lengths <= wanted.allowed(theta, fresh.dtype, FIRST_SHARE)
        unmet = int(met.cumprod(0).sum())  # position of the first unmet pair; `top_k` if all are met
        values, vectors, coefficients = model.spectrum(residuals[min(unmet, len(ends) - 1)])
        if (unmet == top_k and len(model.W) > top_k) or len(model.W) >= min(most, len(fresh)):
            break
        target = ends_of(len(values), top_k, 0)[min(unmet, top_k - 1)]
        model.set_next(vectors, coefficients[:, target], fresh)

    def combine(columns: Tensor) -> Tensor:
        return columns.T.to(vectors) @ vectors

    converged = (
        len(model.W) > top_k and bool((lengths <= wanted.allowed(theta, fresh.dtype)).all()) and len(ends) == top_k
    )
    handed_on = remembered(values, combine, coefficients, keep, top_k) if keep else None
    found = S[:, ends].T.to(model.Q) @ model.Q
    return Eigenpairs(theta[ends], found, lengths, len(model.W), converged, False, handed_on)


def mixed_start(known: Remembered, wanted: int, fresh: Tensor) -> Tensor:
    """Return the first direction, (P,): the `wanted` leading vectors, a little of the next, and a random vector."""
    size = known.values.abs() / known.values.abs().max().clamp(min=1e-300)
    weight = torch.where(torch.arange(len(size)) < wanted, 1.0, RUNNERS_UP * size)
    return weight.to(fresh) @ known.vectors.to(fresh) + RANDOM_SHARE * fresh / length(fresh)


class _Model:
    """A model of a symmetric matrix A: A Q = W on a basis Q, as remembered on the orthogonal complement."""

    def __init__(self, known: Remembered, start: Tensor) -> None:
        self.values, self.V = known.values, known.vectors.to(start)
        self.Q, self.W = start.new_empty(0, len(start)), start.new_empty(0, len(start))
        self._next = start / length(start)

    def multiply(self, apply: Apply) -> None:
        """Take one product: add the next basis vector, and its image."""
        w = apply(self._next)
        if not bool(torch.isfinite(w).all()):
            raise overflow(w.dtype)
        self.Q, self.W = torch.cat([self.Q, self._next[None]]), torch.cat([self.W, w[None]])

    def ritz(self) -> tuple[Tensor, Tensor]:
        """Return (values ascending, coefficients as columns) of the matrix in the basis."""
        return _eigh(self.Q @ self.W.T)

    def residuals(self, theta: Tensor, S: Tensor) -> Tensor:
        """Return A Q s - theta Q s of each pair, (k, P)."""
        return S.T.to(self.W) @ self.W - theta[:, None].to(self.Q) * (S.T.to(self.Q) @ self.Q)

    def spectrum(self, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (values ascending, basis (d, P), coefficients as columns) on Q, the old vectors and a residual."""
        k = len(self.Q)
        basis = torch.linalg.qr(torch.cat([self.Q, self.V, residual[None]]).T).Q.T  # dependent rows: random
        basis[:k] = self.Q
        outside = basis[k:]
        across, overlap = self.W @ outside.T, outside @ self.V.T
        old = (overlap * self.values.to(overlap)) @ overlap.T
        whole = torch.cat([torch.cat([self.Q @ self.W.T, across], 1), torch.cat([across.T, old], 1)])
        values, coefficients = _eigh(whole)
        return values, basis, coefficients

    def set_next(self, basis: Tensor, column: Tensor, fresh: Tensor) -> None:
        """Set the next direction to the part of a model's vector outside the basis; no cancellation can occur."""
        v = column[len(self.Q) :].to(basis) @ basis[len(self.Q) :]
        v = fresh if length(v) == 0 else v / length(v)
        for _ in range(2):
            v = v - (self.Q @ v) @ self.Q
        self._next = v / length(v)


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    matrix = matrix.to("cpu", torch.float64)
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    return values, vectors
