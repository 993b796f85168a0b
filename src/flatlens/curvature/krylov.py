"""Eigenvalues of a symmetric matrix A known by its products, with residuals: Lanczos, and a warm start from old pairs.

Lanczos has full reorthogonalisation: in each step A Q = Q T + r e_last^T with Q orthonormal. So a Ritz pair (theta, Q
s) has the residual ||A Q s - theta Q s|| = ||r|| |s_last|, and an eigenvalue lies within it of theta. Searches stop
on residuals: a power iteration that stops when its value changes little is 1 to 10% off.

For a matrix that has changed a little since its leading eigenpairs were found, `recall` takes fewer products. The old
pairs give a model of the matrix: exact on the directions multiplied so far, as remembered elsewhere. Each product is
taken along the model's current eigenvector. Residuals are those of the matrix itself, so a poor model costs products,
but the result is an eigenvalue all the same; it is the largest one because the first direction has a component along
every eigenvector.

>>> A = torch.diag(torch.tensor([5.0, 2.0, -1.0, 0.0, 0.0, 0.0], dtype=torch.float64))
>>> old = Remembered(torch.tensor([5.1, 1.9], dtype=torch.float64), torch.eye(2, 6, dtype=torch.float64))
>>> found = recall(lambda v: A @ v, old, torch.ones(6, dtype=torch.float64))
>>> round(found.largest, 5), found.converged
(5.0, True)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flatlens.errors import Give, Overflows
from flatlens.estimate import Progress
from flatlens.progress import SEARCH, expected_of_search

VectorProduct = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Remembered:
    """Ritz pairs for a later search, when the matrix has changed a little; the pairs asked for come first."""

    values: Tensor  #: (m,) float64
    vectors: Tensor  #: (m, P), orthonormal


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    """Ritz values and vectors at the ends of a spectrum: the largest, descending, then the smallest, ascending.

    >>> import torch, flatlens as fl
    >>> data = torch.ones(4, 3), torch.zeros(4, 2)
    >>> problem = fl.Problem(torch.nn.Linear(3, 2), "half_squared_error", data, dtype=torch.float64)
    >>> pairs = fl.curvature.eigenpairs(fl.curvature.Hessian(problem), top_k=2)
    >>> [round(float(value), 9) for value in pairs.values]  # 1 + |x|^2, for each of the two outputs
    [4.0, 4.0]
    """

    values: Tensor  #: (k,) float64; the first is a lower bound of the largest eigenvalue
    vectors: Tensor  #: (k, P), rows of length 1
    residuals: Tensor  #: (k,) float64; an eigenvalue lies within the residual of each value
    products: int  #: matrix-vector products used
    converged: bool  #: whether every residual met the tolerance and, of several values, no other one was left
    exact: bool  #: whether the basis spans an invariant subspace, so that the only error is rounding
    remembered: Remembered | None = None  #: pairs for the next search to begin with
    above: float = math.inf  #: with probability 95%, no eigenvalue exceeds the first value by more than this
    others: float = math.inf  #: of several: with probability 99.9%, no other eigenvalue (or its size) exceeds this
    next: float = math.nan  #: of several: the next Ritz value, a lower bound of `others`; NaN if there is none

    @property
    def largest(self) -> float:
        """Return the largest eigenvalue found."""
        return float(self.values[0])


def relative_residual(residual: float, value: float) -> float:
    """Return a residual as a share of its value's size; inf if the value is 0 and the residual is not."""
    return abs(residual / value) if value else math.inf if residual else 0.0


FIRST_SHARE = 0.6  #: the first residual must fall to this share of the tolerance
CHANCE = 0.05  #: probability, over the random start, that the bound on what a search missed is wrong


def unseen(theta: Tensor, betas: Tensor, size: int, share: float, chance: float = CHANCE) -> float:
    """Return how far above the largest of k Ritz values an eigenvalue may lie, with probability 1 - `chance`.

    `theta` has the Ritz values, ascending, `betas` the lengths of the residuals after each step. Let u be the first
    eigenvector, m its eigenvalue, and c = <u, q_1> its component in the start. The basis vectors are q_{j+1} =
    p_j(A) q_1 with p_j(x) = (x - theta_1) ... (x - theta_j) / (beta_1 ... beta_j), over the Ritz values of j steps. So
    <u, q_{k+1}> = c p_k(m), and as q_{k+1} has length 1,

        |c| (m - theta_1) ... (m - theta_k) <= beta_1 ... beta_k.

    This holds with the same c at all steps: a search may look at its bound before it stops. A start that is uniform on
    the sphere has a component c with a density of at most sqrt(size / 2 pi), so |c| is below `chance` sqrt(pi / 2 size)
    with at most the probability `chance`. If only the share `share` of the start is random, and independent of the
    rest, it is 1 / share times that: the fixed part only shifts c. Kuczynski and Wozniakowski (1992) bound the same
    event for the worst spectrum with a given range; van Dorsselaer, Hochstenbach and van der Vorst (2000) by the
    search's own polynomials, as here.
    """
    if share <= 0 or len(theta) < 1:
        return math.inf
    if float(betas[-1]) == 0:
        return 0.0
    total = float(betas.log().sum()) + 0.5 * math.log(2 * size / math.pi) - math.log(share * chance)
    below = theta.max() - theta
    low, high = 0.0, math.exp(min(total / len(theta), 700.0))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if float((below + middle).log().sum()) > total else (middle, high)
    return high


def length(v: Tensor) -> float:
    """Return ||v||, with squares in float64: in float32 they overflow and underflow early."""
    return float(torch.linalg.vector_norm(v, dtype=torch.float64))


def overflow(dtype: torch.dtype, what: str = "a curvature product") -> Overflows:
    """Return the error for a product, or `what`, that is not finite."""
    double = dtype == torch.float64
    mend = "scale the weights or the inputs down" if double else (Give("dtype", torch.float64), " may help")
    return Overflows(f"{what} overflows {dtype}", remedy=mend)


def finite_gradient(gradient: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a gradient by parameter; raise Overflows for one that is not finite."""
    # a sum is not finite if a term is not; it may overflow, too
    if not all(bool(part.sum().isfinite()) or bool(part.isfinite().all()) for part in gradient.values()):
        raise overflow(dtype, "the gradient")
    return dict(gradient)


class Krylov:
    """An orthonormal basis, the rows of Q, that grows by one vector per product, and T = Q A Q^T."""

    def __init__(self, apply: VectorProduct, start: Tensor, most: int) -> None:
        self.apply = apply
        self.Q = start.new_empty(min(most, len(start)), len(start))
        self.T = torch.zeros(len(self.Q), len(self.Q), dtype=torch.float64)
        self.steps = 0
        self.products = 0
        self.beta = 0.0  #: ||r||
        self._next = start / length(start)
        self.locked = 0  #: the first basis vectors are Ritz vectors of earlier searches...
        self._left = start.new_empty(0, len(start))  #: ...and A takes them out of the basis along these vectors...
        self._parts = torch.zeros(0, 0, dtype=torch.float64)  #: ...by these multiples, (locked, searches)

    def extend(self) -> None:
        """Take one product: add the next basis vector, and its row and column of T."""
        j = self.steps
        self.Q[j] = self._next
        self._left.addr_(self._left @ self._next, self._next, alpha=-1)
        w = self.apply(self._next)
        self.products += 1
        h = torch.zeros(j + 1, dtype=torch.float64)
        scale = length(w)
        if not math.isfinite(scale):
            raise overflow(w.dtype)
        for _ in range(2):  # one pass leaves rounding errors after cancellation; two passes are enough
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
        """Return whether the basis has no room left."""
        return self.steps == len(self.Q)

    def ritz(self, block: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return (values ascending, coefficients as columns, residuals) of the basis vectors from number `block` on."""
        theta, S = torch.linalg.eigh(self.T[block : self.steps, block : self.steps])
        return theta, S, self.beta * S[-1].abs()

    def newest(self) -> tuple[Tensor, float]:
        """Return (T of the newest search, ||r||)."""
        return self.T[self.locked : self.steps, self.locked : self.steps], self.beta

    def limit(self, share: float) -> float:
        """Return the bound on all eigenvalues by `unseen`; inf while it is further away than all Ritz values."""
        theta, _, _ = self.ritz()
        betas = torch.cat([self.T.diagonal(1)[: self.steps - 1], self.T.new_tensor([self.beta])])
        reach = unseen(theta, betas, self.Q.shape[1], share)
        return float(theta[-1]) + reach if reach <= float(theta[-1] - theta[0]) else math.inf

    def unkept(self) -> Iterator[tuple[Tensor, float]]:
        """Go on with the newest search without its vectors, as `unseen` needs none; yield `newest`'s T and ||r||."""
        (T, beta), before, q = self.newest(), self.Q[-1], self._next
        while True:
            w = self.apply(q)
            self.products += 1
            alpha = float(q @ w)
            w = w - alpha * q - beta * before
            w = w - (self.Q @ w) @ self.Q
            T = torch.nn.functional.pad(T, (0, 1, 0, 1))
            T[-1, -1], T[-1, -2], T[-2, -1] = alpha, beta, beta
            before, beta = q, length(w)
            if not math.isfinite(beta):
                raise overflow(w.dtype)
            beta = 0.0 if beta <= 100 * torch.finfo(w.dtype).eps * float(T.abs().max()) else beta
            q = w / (beta or 1.0)
            yield T, beta

    def all_ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same of the whole basis, where earlier searches have left residuals, too."""
        theta, S, _ = self.ritz()
        along = torch.cat([S[: self.locked].T @ self._parts, self.beta * S[-1][:, None]], 1)
        rows, newest = self._left, self._next
        across = (rows @ newest)[:, None]
        between = torch.cat(
            [torch.cat([rows @ rows.T, across], 1), torch.cat([across.T, (newest @ newest).view(1, 1)], 1)]
        )
        between = between.to("cpu", torch.float64)
        return theta, S, ((along @ between) * along).sum(1).clamp(min=0).sqrt()

    def lock(self, keep: Tensor) -> None:
        """Keep only the Ritz vectors of these columns of the whole basis, and where A takes them out of it."""
        _, S, _ = self.ritz()
        self._parts = torch.cat([S[: self.locked, keep].T @ self._parts, self.beta * S[-1, keep][:, None]], 1)
        self._left = torch.cat([self._left, self._next[None]])
        if len(self._left) > len(keep) + 1:  # the same multiples of fewer vectors: as many as are locked
            U, sizes, V = torch.linalg.svd(self._parts, full_matrices=False)
            self._parts, self._left = U * sizes, V.to(self._left) @ self._left
        self.compress(keep)
        self.locked = len(keep)

    def coupling(self) -> Tensor:
        """Return R R^T, (locked, locked), where R is what A takes out of the locked vectors' space."""
        return self._parts @ (self._left @ self._left.T).to("cpu", torch.float64) @ self._parts.T

    def residual(self, place: int) -> Tensor:
        """Return the residual vector of a locked vector."""
        return self._parts[place].to(self._left) @ self._left

    def vectors(self, S: Tensor) -> Tensor:
        """Return the Ritz vectors, (k, P), whose coefficients are the columns of S."""
        return S.T.to(self.Q) @ self.Q[: self.steps]

    def continue_with(self, fresh: Callable[[], Tensor]) -> bool:
        """Continue an invariant basis with a new vector orthogonal to it; return False if the basis spans all."""
        for _ in range(4):  # a vector drawn before lies in the basis: draw another
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
        """Keep only the Ritz vectors of these columns (thick restart); the next vector stays the same."""
        theta, S, _ = self.ritz()
        kept = self.vectors(S[:, keep])
        self.Q[: len(keep)] = kept
        self.T.zero_()
        self.T[: len(keep), : len(keep)] = torch.diag(theta[keep])
        self.steps = len(keep)


def usable(start: Tensor) -> bool:
    """Return whether a vector can start a search."""
    return bool(torch.isfinite(start).all()) and length(start) > 0


def drawn(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return a normal random vector of the shape, dtype and device of another."""
    return torch.randn(len(like), generator=generator, dtype=torch.float64).to(like)


def remembered(
    theta: Tensor, vectors: Callable[[Tensor], Tensor], S: Tensor, keep: int, top_k: int, bottom_k: int = 0
) -> Remembered:
    """Return `keep` pairs: those asked for, then the next largest."""
    kept = ends_of(len(theta), top_k, bottom_k).tolist()
    kept += [i for i in range(len(theta) - 1, -1, -1) if i not in kept][: max(keep - len(kept), 0)]
    return Remembered(theta[kept], vectors(S[:, kept]))


@dataclass(frozen=True)
class StoppingRule:
    """The number of eigenvalues asked for at both ends, the residuals allowed, and whether a basis has reached them."""

    top_k: int
    bottom_k: int
    rtol: float

    def met(self, krylov: Krylov, block: int, aim: float = 1.0) -> bool:
        """Return whether the basis from number `block` on has all that is asked for, with the residuals allowed."""
        theta, _, residuals = krylov.ritz(block)
        ends = ends_of(len(theta), self.top_k, self.bottom_k)
        allowed = self.allowed(theta, krylov.Q.dtype, aim)
        return len(ends) == self.top_k + self.bottom_k and bool((residuals[ends] <= allowed).all())

    def allowed(self, theta: Tensor, dtype: torch.dtype, aim: float = 1.0) -> Tensor:
        """Return the largest residual allowed for each eigenvalue; for the first one, `aim` times that."""
        scale = float(theta.abs().max())
        allowed = self.rtol * theta[ends_of(len(theta), self.top_k, self.bottom_k)].abs()
        allowed[self.top_k :] = self.rtol * scale
        allowed[:1] *= aim
        return allowed.clamp(min=100 * torch.finfo(dtype).eps * scale)

    def settled(self, krylov: Krylov, block: int) -> bool:
        """Return whether the newest block has grown enough, and has found all eigenvalues by itself."""
        # a start near any eigenvector has a small residual at once, even if another eigenvalue is larger
        least = min(self.top_k + self.bottom_k + 3, krylov.Q.shape[1] - block)
        return krylov.steps - block >= least and (block == 0 or self.met(krylov, block, FIRST_SHARE))

    def cannot_improve(self, krylov: Krylov, block: int) -> bool:
        """Return whether the newest invariant block, begun at random, has no eigenvalue beyond those found."""
        theta, _, _ = krylov.ritz()
        if len(theta) < self.top_k + self.bottom_k:
            return False
        if block == 0:  # it holds every eigenvalue
            return True
        newest, _, _ = krylov.ritz(block)
        slack = 1e-9 * float(theta.abs().max())
        above = self.top_k == 0 or float(newest[-1]) <= float(theta[-self.top_k]) + slack
        return above and (self.bottom_k == 0 or float(newest[0]) >= float(theta[self.bottom_k - 1]) - slack)


def ends_of(count: int, top_k: int, bottom_k: int) -> Tensor:
    """Return the positions of the largest values, descending, then of the smallest, ascending; none twice."""
    top_k = min(top_k, count)
    bottom_k = min(bottom_k, count - top_k)
    return torch.tensor([*range(count - 1, count - 1 - top_k, -1), *range(bottom_k)], dtype=torch.long)


RUNNERS_UP = 0.1  #: weight of the next pairs in the first direction: the first residual shows if one leads now
RANDOM_SHARE = 0.1  #: weight of a random vector in the first direction, for an eigenvector that is not remembered


def recall(
    apply: VectorProduct,
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
    wanted, old = StoppingRule(top_k, 0, rtol), known.vectors.to(fresh)
    start = mixed_start(known, top_k, fresh)
    Q = W = start.new_empty(0, len(start))  # A Q = W
    direction = start / length(start)
    while True:
        w = apply(direction)
        if not bool(torch.isfinite(w).all()):
            raise overflow(w.dtype)
        Q, W = torch.cat([Q, direction[None]]), torch.cat([W, w[None]])
        if progress is not None:
            progress(SEARCH, len(W), expected_of_search(len(W), most))
        # the Ritz pairs of the basis, and their residuals A Q s - theta Q s, (k, P)
        theta, S = _eigh(Q @ W.T)
        ends = ends_of(len(theta), top_k, 0)
        found = S[:, ends].T.to(Q) @ Q
        residuals = S[:, ends].T.to(W) @ W - theta[ends][:, None].to(Q) * found
        lengths = torch.tensor([length(r) for r in residuals], dtype=torch.float64)
        met = lengths <= wanted.allowed(theta, fresh.dtype, FIRST_SHARE)
        unmet = int(met.cumprod(0).sum())  # position of the first unmet pair; `top_k` if all are met
        # the model, on Q, the old vectors and a residual: A on Q, as remembered beside it
        rows = torch.cat([Q, old, residuals[min(unmet, len(ends) - 1)][None]])
        basis: Tensor = torch.linalg.qr(rows.T).Q.T  # of dependent rows: random
        basis[: len(Q)] = Q
        outside = basis[len(Q) :]
        across, overlap = W @ outside.T, outside @ old.T
        beside = (overlap * known.values.to(overlap)) @ overlap.T
        whole = torch.cat([torch.cat([Q @ W.T, across], 1), torch.cat([across.T, beside], 1)])
        values, coefficients = _eigh(whole)
        if (unmet == top_k and len(W) > top_k) or len(W) >= min(most, len(fresh)):
            break
        # next, the part of the model's first unmet vector outside the basis; no cancellation can occur
        target = ends_of(len(values), top_k, 0)[min(unmet, top_k - 1)]
        v = coefficients[:, target][len(Q) :].to(basis) @ outside
        v = fresh if length(v) == 0 else v / length(v)
        for _ in range(2):
            v = v - (Q @ v) @ Q
        direction = v / length(v)

    if progress is not None:
        progress(SEARCH, len(W), len(W))

    def combine(columns: Tensor) -> Tensor:
        return columns.T.to(basis) @ basis

    converged = len(W) > top_k and bool((lengths <= wanted.allowed(theta, fresh.dtype)).all()) and len(ends) == top_k
    handed_on = remembered(values, combine, coefficients, keep, top_k) if keep else None
    return Eigenpairs(theta[ends], found, lengths, len(W), converged, False, handed_on)


def mixed_start(known: Remembered, wanted: int, fresh: Tensor) -> Tensor:
    """Return the first direction, (P,): the `wanted` leading vectors, a little of the next, and a random vector."""
    size = known.values.abs() / known.values.abs().max().clamp(min=1e-300)
    weight = torch.where(torch.arange(len(size)) < wanted, 1.0, RUNNERS_UP * size)
    return weight.to(fresh) @ known.vectors.to(fresh) + RANDOM_SHARE * fresh / length(fresh)


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    matrix = matrix.to("cpu", torch.float64)
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    return values, vectors
