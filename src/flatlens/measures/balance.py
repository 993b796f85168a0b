"""The minimisation behind normalised sharpness, with a certificate of how far from the minimum it stopped.

    F(u, v) = sum_ij h_ij u_i v_j + w_ij / (u_i v_j)  over positive u (d,) and v (m,);  h, w (d, m), not negative

F is convex in a = log u and b = log v; the problem is known as matrix balancing. Let p_ij = h_ij u_i v_j and
q_ij = w_ij / (u_i v_j). The gradient consists of the row sums and the column sums of p - q. The Hessian is the
Laplacian of the bipartite graph with edge weights p + q.

The infimum is not always attained. Build a directed graph of the rows and columns: h_ij > 0 is an edge from row i to
column j, and w_ij > 0 an edge from column j to row i. Number its strongly connected blocks in topological order.

- Between blocks, all entries tend to 0 together: subtract T times the block's number from each row's log u, and add T
  times the block's number to each column's log v. Entries within blocks do not change; an entry between two blocks
  falls at least as fast as exp(-T).
- Within a block, each edge lies on a cycle. So some entry grows without bound in every direction except (u c, v / c),
  which changes nothing, and the minimum is attained.

So inf F is the sum of the blocks' minima. A dead unit (a row or column that is all zero in h or in w) is a block
without entries and adds 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import LinearOperator, cg
from torch import Tensor

from flatlens.errors import BadInput
from flatlens.measures.balance_gap import EPS, gap_at_rest, gap_of_step

DIRECT = 2048  #: largest number of rows for a direct solution of the Newton system; larger ones use conjugate gradients
NEARLY = 1e-9  #: relative gap; below it, the search stops if five sweeps bring no progress: rounding is the limit
FAR = 1e150  #: u and v stay within 1 / FAR and FAR, so that no product overflows


@dataclass(frozen=True, eq=False)
class Balance:
    """A point near the infimum of F, with a certified distance to it."""

    value: float  #: F at (u, v), over the entries within blocks: an upper bound of inf F
    gap: float  #: certificate: value - inf F <= gap
    u: Tensor  #: (d,), unique up to one factor per block; arbitrary outside blocks
    v: Tensor  #: (m,), unique up to the inverse factors
    sweeps: int  #: rounds of half steps, the later ones with a Newton step where half steps are slow


def balance(h: Tensor, w: Tensor, rtol: float = 1e-12, most: int = 100) -> Balance:
    """Minimise F until gap <= rtol * value, or as far as rounding or `most` sweeps allow.

    Return the point and its gap.

    In Tsuzuku et al. (2019) and compression Eq. 36, h is the Hessian's diagonal, w = W^2 / (4 lambda^2), u = sigma^2
    and v = sigma'^2. An entry below 1e-300 times the largest of its matrix counts as 0.

    >>> round(balance(torch.tensor([[4.0]]), torch.tensor([[9.0]])).value, 12)  # 2 sqrt(h w)
    12.0
    """
    h, w = _checked(h, w)
    if h.shape[0] > h.shape[1]:  # solve for the smaller side
        turned = balance(h.T, w.T, rtol, most)
        return Balance(turned.value, turned.gap, turned.v, turned.u, turned.sweeps)
    u, v = h.new_ones(h.shape[0]), h.new_ones(h.shape[1])
    rows, columns = ((a > 0) & (b > 0) for a, b in zip(_sums(h), _sums(w), strict=True))
    if not (rows.all() and columns.all()):
        h, w = h[rows][:, columns], w[rows][:, columns]
    top_h, top_w = (float(x.max()) or 1.0 if x.numel() else 1.0 for x in (h, w))
    h, w, roots = _within_blocks(h / top_h, w / top_w)
    if not len(roots):
        return Balance(0.0, 0.0, u, v, 0)
    value, gap, inner_u, inner_v, sweeps = _minimised(h, w, roots, rtol, most)
    scale, stretch = math.sqrt(top_h) * math.sqrt(top_w), (top_w**0.25 / top_h**0.25)
    u[rows], v[columns] = inner_u * stretch, inner_v * stretch
    return Balance(scale * value, scale * value * gap, u, v, sweeps)


def _sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of the rows and of the columns."""
    return x @ x.new_ones(x.shape[1]), x.new_ones(len(x)) @ x


def _minimised(h: Tensor, w: Tensor, roots: Tensor, rtol: float, most: int) -> tuple[float, float, Tensor, Tensor, int]:
    """Return F, its relative gap, u, v and the sweeps: half steps as long as they are quick, then Newton steps."""
    u, v, before = _in_turn(h, w, rtol, most - 1)
    if before:
        value, gap = gap_at_rest(h, w, u, v, roots)
        if gap <= rtol:
            return value, gap, u, v, before
    gaps: list[float] = []
    while True:
        u = _half_step(h, w, v)
        v = _half_step(h.T, w.T, u)
        p, q = (h * u[:, None]).mul_(v), (w / u[:, None]).div_(v)
        value = float(p.sum() + q.sum())
        alpha, beta, decrement = _newton(p, q)
        last = before + len(gaps) + 1 >= most
        if decrement > max(NEARLY, 10 * rtol) * value and not last:  # the decrement is about twice the gap
            gaps.append(min(1.0, decrement / value))
        else:
            enough = math.inf if last else max(rtol, NEARLY)
            gaps.append(gap_of_step(p.div_(value), q.div_(value), alpha, beta, roots, enough))
        stuck = len(gaps) > 5 and NEARLY > gaps[-1] > gaps[-6] / 2
        if stuck or gaps[-1] <= rtol or last:
            return value, gaps[-1], u, v, before + len(gaps)
        u, v = _moved(h, w, u, v, alpha, beta)


def _in_turn(h: Tensor, w: Tensor, rtol: float, most: int) -> tuple[Tensor, Tensor, int]:
    """Return (u, v, sweeps) after half steps in turn, as long as each pair of them halves the slopes.

    A pair takes four products of a matrix and a vector, a hundredth of a Newton step; most layers need some ten pairs.
    """
    u, v, left = h.new_ones(len(h)), h.new_ones(h.shape[1]), math.inf
    there, back = h @ v, w @ (1 / v)
    for sweep in range(1, most + 1):
        u = _balancing(there, back)
        v = _half_step(h.T, w.T, u)
        there, back = h @ v, w @ (1 / v)
        p, q = u * there, back / u  # sums of rows; those of columns are equal now
        slope = float((p - q).abs().sum() / (p + q).sum())
        if slope <= rtol / 200 or not slope <= left / 2:
            return u, v, sweep
        left = slope
    return u, v, max(most, 0)


def _checked(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in float64; refuse different shapes, and entries that are negative or not finite."""
    if h.ndim != 2 or h.shape != w.shape:
        raise BadInput(f"balance(h, w): two matrices of one shape are needed, not {(*h.shape,)} and {(*w.shape,)}")
    for name, x in (("h", h), ("w", w)):
        low, high = map(float, x.aminmax()) if x.numel() else (0.0, 0.0)
        if not (low >= 0 and high < math.inf):
            raise BadInput(f"balance({name}=): entries must be finite and not negative; found {low:g} to {high:g}")
    return h.detach().to(torch.float64), w.detach().to(torch.float64)


def _within_blocks(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return h and w without the entries between blocks, and one row of each block that has entries."""
    if not h.numel():
        return h, w, torch.zeros(0, dtype=torch.long, device=h.device)
    live = [(a > 0) & (b > 0) for a, b in zip(_sums(h), _sums(w), strict=True)]
    start = live[0].nonzero()[: int(live[1].any()), 0]
    if all(bool(each.all()) for each in (*live, *_joined(h, w, start))):  # the usual case: one block
        return h, w, start
    there, back = h > 0, w > 0
    edges = [sparse.csr_array(x.cpu().numpy()) for x in (there, back.T)]
    graph = sparse.block_array([[None, edges[0]], [edges[1], None]], format="csr")
    labels = torch.from_numpy(connected_components(graph, connection="strong")[1]).to(h.device)
    rows, columns = labels[: len(h)], labels[len(h) :]
    inside = rows[:, None] == columns
    h, w = h * inside, w * inside
    filled = (h + w).sum(1).nonzero()[:, 0].flip(0)
    first = dict(zip(rows[filled].tolist(), filled.tolist(), strict=True))  # the last one set stays
    return h, w, torch.tensor(list(first.values()), dtype=torch.long, device=h.device)


def _joined(h: Tensor, w: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows and columns on a cycle through the rows `first`: reachable from them and leading to them."""
    both = []
    for out, home in ((h, w), (w, h)):
        rows = torch.zeros_like(h[:, 0]).index_fill(0, first, 1.0)
        while True:
            columns = (rows @ out > 0).to(h.dtype)
            more = ((home @ columns > 0) | (rows > 0)).to(h.dtype)
            if torch.equal(more, rows):
                both.append((rows > 0, columns > 0))
                break
            rows = more
    (a, b), (c, d) = both
    return a & c, b & d


def _half_step(h: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Return the u that minimises F for this v: sqrt(sum_j w_ij / v_j / sum_j h_ij v_j), or 1 where F ignores u_i."""
    return _balancing(h @ v, w @ (1 / v))


def _balancing(there: Tensor, back: Tensor) -> Tensor:
    """Return the u with u * there = back / u."""
    return (back.sqrt() / there.sqrt()).nan_to_num(1.0, posinf=FAR).clamp(1 / FAR, FAR)


def _newton(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return the Newton step (alpha, beta) in (log u, log v), and the Newton decrement: the slope of -F along the step.

    Near the minimum the decrement is twice the gap.

    Eliminating the columns leaves the matrix I - B B^T for the rows. B is p + q with each row and column divided by the
    square root of its sum. The matrix is singular: each block has the null vector (1, -1). A shift of the size of
    rounding makes it definite; the certificate includes the error of this shift.
    """
    sums = [(p.sum(axis), q.sum(axis)) for axis in (1, 0)]
    rows, columns = ((a + b).where(a + b > 0, 1.0).sqrt() for a, b in sums)
    B = (p + q).div_(rows[:, None]).div_(columns)
    slopes = [a - b for a, b in sums]
    down = slopes[1] / columns
    right = B @ down - slopes[0] / rows
    if len(B) > DIRECT:
        x = _conjugate_gradients(B, right)
    else:
        M = torch.eye(len(B), dtype=B.dtype, device=B.device) * (1 + 4 * len(B) * EPS) - B @ B.T
        factor, failed = torch.linalg.cholesky_ex(M)
        x = _conjugate_gradients(B, right) if failed else torch.cholesky_solve(right[:, None], factor)[:, 0]
    alpha, beta = x / rows, -(down + B.T @ x) / columns
    return alpha, beta, -float(slopes[0] @ alpha + slopes[1] @ beta)


def _conjugate_gradients(B: Tensor, right: Tensor) -> Tensor:
    """Return x with (I - B B^T) x = right, to nine digits, or as accurately as 300 products allow."""
    K = B.cpu().numpy()
    product = LinearOperator((len(K), len(K)), lambda x: x - K @ (x @ K), dtype=np.float64)
    return torch.from_numpy(cg(product, right.cpu().numpy(), rtol=1e-9, maxiter=300)[0]).to(B.device)


def _moved(h: Tensor, w: Tensor, u: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return the point along the Newton step where F stops falling, roughly: one full step if near the minimum."""

    def at(length: float) -> tuple[Tensor, Tensor]:
        a, b = u * (length * alpha).exp(), v * (length * beta).exp()
        return a.clamp(1 / FAR, FAR), b.clamp(1 / FAR, FAR)

    def slope(length: float) -> float:
        a, b = at(length)
        down = a * (h @ b) - (w @ (1 / b)) / a
        return float(alpha @ down + beta @ (b * (a @ h) - ((1 / a) @ w) / b))

    start, low, high, length = -slope(0.0), 0.0, math.inf, 1.0
    for _ in range(60):
        now = slope(length)
        if -0.2 * start <= now <= 0.1 * start:
            return at(length)
        low, high = (length, high) if now < 0 else (low, length)
        length = 2 * length if high == math.inf else (low + high) / 2
    return at(low)
