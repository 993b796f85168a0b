"""Sharpness in units of the weights themselves, invariant to some or all rescalings of the network.

The minimisation behind normalised sharpness, with a certificate of how far from the minimum it stopped:

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
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import LinearOperator, cg
from torch import Tensor
from torch.nn.functional import threshold

from flatlens.errors import BadInput
from flatlens.grams import LayerGrams, Weight
from flatlens.grams.weight_jacobians import pieces
from flatlens.measures.definition import (
    LAYERWISE,
    PERMUTATION,
    UNITS_AND_ORDER,
    Measure,
    Reduced,
    per_sample,
    require_positive,
)
from flatlens.measures.notes import STOPPED

EPS = torch.finfo(torch.float64).eps
DIRECT = 2048  #: largest number of rows for a direct solution of the Newton system; larger ones use conjugate gradients
NEARLY = 1e-9  #: relative gap; below it, the search stops if five sweeps bring no progress: rounding is the limit
_FAR = 1e150  #: u and v stay within 1 / _FAR and _FAR, so that no product overflows

normalised = partial(
    per_sample,
    family="normalised",
    unit="loss",
    place="weight",
    sketched="probes",
    cost="one pass, per-sample gradients of shared weights",
    invariant_under=UNITS_AND_ORDER,
)
of_weight_jacobian = partial(normalised, needs={"K"}, cost="one pass, operator norms")
of_diagonal = partial(normalised, needs={"C", "diagonal"}, total=True)  # of the Gauss-Newton matrix


@normalised(
    id="M12",
    symbol=r"S_{adaptive}^{GN}",
    source="compression Lemma E.2",
    place="parameters",
    needs={"C", "adaptive"},
)
def adaptive_sharpness_ggn(g: LayerGrams) -> Tensor:
    """Curvature along each parameter in units of its value, Gauss-Newton part, summed over parameters.

    It is mean_i sum_j theta_j^2 ||C_i^(1/2) df_i/dtheta_j||^2 over all measured parameters, biases and norms included.
    In the lemma C = I. An entry of a convolution's kernel is one parameter: its positions are summed before squaring.
    """
    return g.adaptive


def _by_norm(traces: Tensor, weight: Weight, measure: Measure) -> Reduced:
    root = float(traces.mean().clamp(min=0)) ** 0.5
    if measure.option("frobenius"):
        return Reduced(float(weight.matrix.W.square().sum().sqrt()) * root, None)
    norm, converged = weight.searched_spectral_norm
    return Reduced(norm * root, None) if converged else Reduced(norm * root, None, STOPPED, "lower bound")


@of_weight_jacobian(
    id="M13",
    symbol=r"\sum_l \|W_l\|_2 \sqrt{S(W_l)}",
    source="compression Eq. 35",
    unit="output",
    finish=_by_norm,
    invariant_under={LAYERWISE, PERMUTATION},
)
def matrix_normalized_sharpness(g: LayerGrams, *, frobenius: bool = False) -> Tensor:
    """Matrix-normalised sharpness: sum_l ||W_l||_2 sqrt(mean_i ||df_i/dW_l||_F^2), of the weights alone.

    ||W_l||_2 of a convolution is the norm of its operator, as the bounds need it. The published inequality, that the
    value bounds sum_l xbar_l MLS_l with xbar_l = (mean_i 1/||x_l,i||^2)^(-1/2), can fail for shared weights.
    `frobenius=True` takes ||W_l||_F of the stored kernel instead.
    """
    return g.K_weight.diagonal(dim1=1, dim2=2).sum(1)


def _balanced(diagonal: Tensor, weight: Weight, measure: Measure) -> Reduced:
    """Return the minimum of Eq. 36, for each group's block."""
    lam = measure.option("lam")
    require_positive(lam=lam)
    assert isinstance(lam, int | float)
    if float(diagonal.min()) < 0:
        return Reduced(math.nan, None, "the loss is not convex in the outputs: entries of H are negative", "undefined")
    W = weight.matrix.W.cpu()
    blocks = diagonal.cpu().reshape(W.shape)
    found = [balance(h, w.square() / 4) for h, w in zip(blocks, W, strict=True)]  # lam only divides
    value, gap = sum(b.value for b in found) / lam, sum(b.gap for b in found) / lam
    arrays = {
        "sigma": torch.cat([b.u for b in found]).sqrt() / math.sqrt(lam),
        "sigma_prime": torch.cat([b.v for b in found]).sqrt(),
        "gap": torch.tensor([gap], dtype=torch.float64),
    }
    certified = gap <= 1e-9 * value or value == 0
    note = "" if certified else f"at most {gap:.1g} above the minimum"
    return Reduced(value, None, note, "exact" if certified else "upper bound", arrays=arrays)


@of_diagonal(
    id="M14",
    symbol=r"S_{norm}",
    source="compression Eq. 36",
    unit="sqrt loss",
    finish=_balanced,
    cost="one pass, per-sample gradients of shared weights; a convex minimisation per layer",
)
def normalized_sharpness(g: LayerGrams, *, lam: float = 1.0) -> Tensor:
    """Normalised sharpness: the trace in units of each row's and column's best scale, summed over layers.

    The value of a layer is the minimum of sum_ij H_ij (s_i s'_j)^2 + W_ij^2 / (4 lam^2 (s_i s'_j)^2) over positive s
    and s'. `arrays` has the minimising s and s' as `sigma` and `sigma_prime`.

    H is the diagonal of the layer's Gauss-Newton matrix. It is not negative if the loss is convex in the outputs; for
    other losses an H with a negative entry leaves the value undefined. In piecewise-linear networks it equals the
    diagonal of the Hessian. For a shared weight, positions are summed before squaring. The problem is convex in the
    logarithms of s and s'. `arrays["gap"]` is a certificate: the value is above the minimum by at most this. Dead rows
    and columns contribute 0. `lam` divides the value and `gap`, and its root divides `sigma`; nothing else changes.
    """
    return g.linear.diagonal()


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

    In Tsuzuku et al. (2019) and compression Eq. 36, h is the Hessian's diagonal, w = W^2 / (4 lambda^2), u = sigma^2
    and v = sigma'^2. An entry below 1e-300 times the largest of its matrix counts as 0.
    """
    if h.ndim != 2 or h.shape != w.shape:
        raise BadInput(f"balance(h, w): expected two matrices of one shape, got {(*h.shape,)} and {(*w.shape,)}")
    for name, x in (("h", h), ("w", w)):
        low, high = map(float, x.aminmax()) if x.numel() else (0.0, 0.0)
        if not (low >= 0 and high < math.inf):
            raise BadInput(f"balance({name}=): entries must be finite and not negative; found {low:g} to {high:g}")
    h, w = h.detach().to(torch.float64), w.detach().to(torch.float64)
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
    """Return (u, v, sweeps) after half steps in turn, as long as each pair of them halves the slopes."""
    # a pair takes four products of a matrix and a vector, a hundredth of a Newton step; most layers need ten pairs
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


def _within_blocks(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return h and w without the entries between blocks, and one row of each block that has entries."""
    if not h.numel():
        return h, w, torch.zeros(0, dtype=torch.long, device=h.device)
    live = [(a > 0) & (b > 0) for a, b in zip(_sums(h), _sums(w), strict=True)]
    start = live[0].nonzero()[: int(live[1].any()), 0]
    # the usual case is one block: all rows and columns are reachable from the first row, and lead to it
    for out, home in ((h, w), (w, h)):
        rows, more = h.new_zeros(0), torch.zeros_like(h[:, 0]).index_fill(0, start, 1.0)
        while not torch.equal(more, rows):
            rows, columns = more, (more @ out > 0).to(h.dtype)
            more = ((home @ columns > 0) | (rows > 0)).to(h.dtype)
        live += [rows > 0, columns > 0]
    if all(bool(each.all()) for each in live):
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


def _half_step(h: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Return the u that minimises F for this v: sqrt(sum_j w_ij / v_j / sum_j h_ij v_j), or 1 where F ignores u_i."""
    return _balancing(h @ v, w @ (1 / v))


def _balancing(there: Tensor, back: Tensor) -> Tensor:
    """Return the u with u * there = back / u."""
    return (back.sqrt() / there.sqrt()).nan_to_num(1.0, posinf=_FAR).clamp(1 / _FAR, _FAR)


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
        return a.clamp(1 / _FAR, _FAR), b.clamp(1 / _FAR, _FAR)

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
        # y, clipped where p or q is 0, and sum KL(P | p) + KL(Q | q), with P - Q = y and P Q = p q
        a, b = _above_tiny(p[piece]), _above_tiny(q[piece])
        y = (a + b).mul_(alpha[piece, None] + beta).add_(a).sub_(b)
        if min(a.min(), b.min()) == 0:
            y = y.where(a > 0, y.clamp(max=0)).where(b > 0, y.clamp(min=0)).where((a > 0) | (b > 0), 0.0)
        mean, up = a.sqrt().mul_(b.sqrt()), y > 0
        large = y.hypot(2 * mean).add_(y.abs()).div_(2)
        small = (mean / large).mul_(mean).where(large > 0, 0.0)
        gap += _kl(large.where(up, small), a) + _kl(small.where(up, large), b)
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
