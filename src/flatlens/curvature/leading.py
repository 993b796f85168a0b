"""The leading eigenvalues of a symmetric matrix: one at each end by one search, several with their multiplicities.

One Krylov basis has each eigenvalue once. Several eigenvalues take further searches, each from a random vector
orthogonal to the pairs found, and the last one bounds what is left (`with_multiplicity`).

`eigenspace` gives the space of the leading eigenvectors: what lies in it, and how far it is another one's. For the
projection P onto the space that was found, and P' onto the true one, Davis and Kahan's theorem gives
||sin Theta||_F <= ||A V^T - V^T diag(values)||_F / gap, the gap being that between the last value and the bound on all
others. A share of a vector changes by at most ||P - P'|| = ||sin Theta||, and tr(P Q), for a projection Q of rank r, by
at most the sum of the positive eigenvalues of P - P', which is at most sqrt(k) ||sin Theta||_F.

>>> A = torch.diag(torch.tensor([5.0, 2.0, -1.0], dtype=torch.float64))
>>> pairs = lanczos(lambda v: A @ v, torch.ones(3, dtype=torch.float64), top_k=1, bottom_k=1)
>>> [round(float(v), 6) for v in pairs.values], pairs.exact
([5.0, -1.0], True)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from flatlens.curvature.krylov import (
    FIRST_SHARE,
    Eigenpairs,
    Krylov,
    StoppingRule,
    VectorProduct,
    drawn,
    ends_of,
    remembered,
    unseen,
    usable,
)
from flatlens.curvature.operators import Operator
from flatlens.curvature.space import Space, module_of
from flatlens.deprecated_names import renamed
from flatlens.errors import BadInput
from flatlens.estimate import Estimate, Progress, undefined
from flatlens.memory import warn_of
from flatlens.progress import SEARCH, expected_of_search

LEFT_CHANCE = 1e-3  #: probability, over the random starts, that an eigenvalue is left beside several
SLACK = 0.01  #: of several values: the share of the range by which another one may exceed the last
_SEED = 2_718_281_828  #: of further random vectors: a start drawn with the same seed would be the same vector


@renamed(top="top_k", bottom="bottom_k", tolerance="rtol")
def lanczos(
    apply: VectorProduct,
    start: Tensor,
    *,
    top_k: int = 1,
    bottom_k: int = 0,
    rtol: float = 1e-3,
    most: int = 300,
    room: int = 300,
    keep: int = 0,
    random: float = 0.0,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> Eigenpairs:
    """Return the `top_k` largest and `bottom_k` smallest eigenvalues, to residuals of `rtol` times their size.

    The residuals of the smallest are compared with the largest eigenvalue in size, because they may be 0. While
    products are left, the first residual falls to `FIRST_SHARE` of the rtol: a mixture of two eigenvectors has a
    residual of at most half their gap, so at the tolerance itself two eigenvalues often pass for one.

    Several values at an end come with their multiplicities (`with_multiplicity`); they are `converged` only if no other
    one is left, up to `SLACK` times the range of the spectrum.

    If the basis becomes invariant, it is continued from a random vector until nothing better can be found. Then a start
    that misses part of the spectrum does no harm, and repeated eigenvalues are found with their multiplicity.

    Args:
        apply: v -> A v.
        start: The first vector, (P,).
        top_k: The number of largest eigenvalues.
        bottom_k: The number of smallest eigenvalues.
        rtol: The relative residual allowed.
        most: The largest number of products.
        room: The largest number of basis vectors; beyond it follows a thick restart.
        keep: The number of Ritz pairs returned as `remembered`.
        random: The share of `start` that was drawn at random; if 0, nothing bounds what the search missed (`unseen`).
        generator: Draws the random vectors, independent of `start`; if None, with a seed of their own.
        progress: Called after each product.
    """
    generator = torch.Generator().manual_seed(_SEED) if generator is None else generator
    room, top_k = max(room, 2 * (top_k + bottom_k) + 4), min(top_k, len(start))
    bottom_k = min(bottom_k, len(start) - top_k)
    if max(top_k, bottom_k) > 1:
        return with_multiplicity(
            apply, start, Wanted(top_k, bottom_k, rtol), most=most, room=room, keep=keep, random=random,
            generator=generator, progress=progress,
        )  # fmt: skip
    # a start that is 0, or not finite, is drawn: then chance alone decides what a search can miss
    wanted = StoppingRule(top_k, bottom_k, rtol)
    own = usable(start)
    krylov, share = Krylov(apply, start if own else drawn(start, generator), room), random if own else 1.0
    block, block_is_random, closed = 0, not own, False
    limit: float | None = None  # the bound on all eigenvalues, before the first restart or continuation
    # the basis grows until its pairs are good enough, restarts when it is full, and goes on when it is invariant
    while krylov.products < most:
        krylov.extend()
        if progress is not None:
            progress(SEARCH, krylov.products, expected_of_search(krylov.products, most))
        if krylov.beta == 0:  # the basis is invariant under A: all its Ritz pairs are eigenpairs
            enough = block_is_random and wanted.cannot_improve(krylov, block)
            limit = krylov.limit(share) if limit is None else limit
            block, block_is_random = krylov.steps, True
            if enough or krylov.full or not krylov.continue_with(lambda: drawn(start, generator)):
                closed = enough or krylov.steps == len(start)
                break
        elif wanted.met(krylov, 0, FIRST_SHARE) and wanted.settled(krylov, block):
            break
        elif krylov.full and krylov.products < most:  # a compressed basis has no residuals yet
            theta, _, _ = krylov.ritz()
            limit = krylov.limit(share) if limit is None else limit
            half = len(theta) // 2
            krylov.compress(ends_of(len(theta), min(top_k + 3, half), min(bottom_k + 1, half)))
            block = 0
    # the search ends before its largest number of products: its progress is told to be whole
    if progress is not None:
        progress(SEARCH, krylov.products, krylov.products)
    theta, S, residuals = krylov.ritz()
    ends = ends_of(len(theta), top_k, bottom_k)
    return Eigenpairs(
        theta[ends],
        krylov.vectors(S[:, ends]),
        residuals[ends],
        krylov.products,
        wanted.met(krylov, 0),
        closed,
        remembered(theta, krylov.vectors, S, keep, top_k, bottom_k) if keep else None,
        max(0.0, (krylov.limit(share) if limit is None else limit) - float(theta[-1])),
    )


_SHARP = 0.05  #: a pair is locked, too, if its residual is at most this share of its distance to those asked for
_MULTIPLET = 32  #: and 4 k: the number of values near the last one that are looked for


@dataclass(frozen=True)
class Wanted:
    """The eigenvalues asked for: the largest and the smallest, or the largest in size."""

    top_k: int
    bottom_k: int
    rtol: float
    slack: float = SLACK  #: share of the spectrum's range by which another eigenvalue may exceed the last one
    by_size: bool = False
    whole: bool = False  #: with all values within `rtol` of the last one, and without those that are 0

    @property
    def count(self) -> int:
        """Return their number, without those that `whole` adds."""
        return self.top_k + self.bottom_k

    def ends(self, theta: Tensor, floor: float) -> list[tuple[int, float, float]]:
        """Return (sign, last value, its tolerance) of each end; values times `sign` are larger further out."""
        scale = float(theta.abs().max())
        if self.by_size:
            last = float(theta.abs().sort(descending=True).values[self.top_k - 1])
            found = [(1, last, last), (-1, last, last)]
        else:
            last = float(theta[-self.top_k])
            found = [(1, last, abs(last))] + ([(-1, -float(theta[self.bottom_k - 1]), scale)] if self.bottom_k else [])
        return [
            (sign, 2 * floor if self.whole and abs(last) <= floor else last, max(self.rtol * of, floor))
            for sign, last, of in found
        ]

    def places(self, theta: Tensor, floor: float) -> Tensor:
        """Return the positions of the values asked for among ascending Ritz values, in the order of `Eigenpairs`."""
        if not self.whole:
            return ends_of(len(theta), self.top_k, self.bottom_k)
        out = torch.stack([sign * theta >= last - near for sign, last, near in self.ends(theta, floor)]).any(0)
        order = theta.abs().argsort(descending=True) if self.by_size else torch.arange(len(theta) - 1, -1, -1)
        return order[out[order]]

    def allowed(self, theta: Tensor, places: Tensor, floor: float) -> Tensor:
        """Return the largest residual of each; of the smallest relative to the largest, because they may be 0."""
        size = theta[places].abs()
        if self.bottom_k:
            size[self.top_k :] = theta.abs().max()
        return (self.rtol * size).clamp(min=floor)


@dataclass(frozen=True)
class _Outside:
    """A bound on one end of A's spectrum: V^T A V is diagonal for locked V, and all of A beside V is below an edge b.

    For m > b, A has at most as many eigenvalues above m as V^T A V + R^T R / (m - b) has, where R is what A takes out
    of V's space (by inertia: the Schur complement of A - m). It has at least as many as there are Ritz values above m.
    """

    locked: Tensor  #: (v,) the eigenvalues of V^T A V
    coupling: Tensor  #: (v, v) R^T R
    edge: float
    theta: Tensor  #: all Ritz values

    def above(self, m: float) -> Tensor:
        """Return upper bounds of all eigenvalues above m, for m > edge."""
        upper: Tensor = torch.linalg.eigvalsh(torch.diag(self.locked) + self.coupling / (m - self.edge))
        return upper[upper > m]

    def holds(self, m: float) -> bool:
        """Return whether no eigenvalue exceeds m but those that the Ritz values show."""
        return self.edge < m and len(self.above(m)) <= int((self.theta > m).sum())

    def bound(self, number: int, *tried: float) -> float:
        """Return a bound on A's eigenvalue of this number, 1 for the largest: the best of several m."""
        reach = max(float(self.theta.max()) - self.edge, 1e-3 * float(self.theta.max() - self.theta.min()))
        found = []
        for m in filter(self.edge.__lt__, [*(self.edge + reach * torch.logspace(-6, 0, 25)).tolist(), *tried]):
            upper = self.above(m)
            found.append(float(upper[-number]) if len(upper) >= number else m)
        return min(found, default=self.edge)


def with_multiplicity(
    apply: VectorProduct,
    start: Tensor,
    wanted: Wanted,
    *,
    most: int,
    room: int,
    keep: int = 0,
    random: float = 0.0,
    generator: torch.Generator,
    progress: Progress | None = None,
) -> Eigenpairs:
    """Return the eigenvalues asked for as often as they occur, and a bound on all others; arguments as of `lanczos`.

    The first search runs until the Ritz pairs asked for have the residuals allowed. Each later one begins at a random
    vector orthogonal to the locked vectors: the pairs asked for, and others that are sharp, which cost no product. A
    search that finds more of what is asked for runs until the residuals are small, too, and locks it. One that finds
    none ends as soon as it bounds what is left, with a probability: it bounds A beside the locked vectors (`unseen`),
    and so the number of A's eigenvalues above any m beyond that (`_Outside`). With `whole`, m is just below the last
    value: no copy of it is left, and the gap below it is proved. If the next eigenvalue is too near for that, and
    without `whole`, m is the last value plus `slack` times the range.

    The j-th later search has the share 1 / (j (j + 1)) of the probability `LEFT_CHANCE`.
    """
    krylov = Krylov(apply, start if usable(start) else drawn(start, generator), room)
    turn, fresh, complete, above = 0, True, False, math.inf
    ends: list[tuple[int, float, float]] = []  # as they were when the present search began
    outside: dict[int, _Outside] = {}
    locked, coupling, unkept = torch.empty(0), torch.empty(0, 0), krylov.unkept()
    sought, total = False, 0.0  # whether a search without room saw a value that is not among those in the basis
    while True:
        # one product: the basis grows, or a search that has found nothing goes on without it
        without_room = krylov.full
        if without_room:
            own, beta = next(unkept)
        else:
            krylov.extend()
            own, beta = krylov.newest()
            theta, S, residuals = krylov.all_ritz()
            scale = float(theta.abs().max())
            floor = max(100 * torch.finfo(start.dtype).eps * scale, torch.finfo(start.dtype).tiny)
            enough, spans = len(theta) >= wanted.count, krylov.steps == len(start)
            places = wanted.places(theta, floor) if enough else torch.arange(len(theta) - 1, -1, -1)
            allowed = wanted.allowed(theta, places, floor)
        if progress is not None:
            progress(SEARCH, krylov.products, expected_of_search(krylov.products, most))
        # does this search find more? if not, does it prove that there is no more?
        values, coefficients = torch.linalg.eigh(own)
        within = 1 if wanted.whole else -1
        finds = not ends or any(float((sign * values).max()) > last - within * near for sign, last, near in ends)
        if fresh and not finds:
            chance, slack = LEFT_CHANCE / (turn * (turn + 1)), wanted.slack * float(theta[-1] - theta[0])
            betas, complete = torch.cat([own.diagonal(1), own.new_tensor([beta])]), True
            for sign, last, near in ends:
                first, far = int((sign * values).argmax()), last + max(slack, near)
                reach = unseen(sign * values, betas, len(start) - krylov.locked, 1.0, chance / len(ends))
                residual = beta * abs(float(coefficients[-1, first]))
                sharp = residual <= max(wanted.rtol * abs(float(values[first])), floor)
                of = _Outside(sign * locked, coupling, float(sign * values[first]) + reach, sign * theta)
                tried = [last - near] if wanted.whole else []
                tried += [far] if not wanted.whole or (sharp and reach <= slack) else []
                outside[sign], complete = of, complete and any(map(of.holds, tried))
        many = len(places) > min(4 * wanted.count + _MULTIPLET, room // 2)
        if complete or spans or many or krylov.products >= most:
            break
        # lock what was found; then search elsewhere, or along the worst residual, or, without room, on from here
        invariant, found = beta == 0, float(theta[places].abs().sum())
        small = krylov.beta * S[-1].abs() if fresh else residuals  # a new search cannot mend what an earlier one left
        done = enough and not without_room and bool((small[places] <= allowed).all())
        done = invariant or (done and (not sought or found > total))
        if invariant or ((finds or not fresh) and (done or krylov.full)):
            above = krylov.limit(random) - float(theta[-1]) if krylov.locked == 0 else above
            ends = wanted.ends(theta, floor) if enough else []
            kept = _kept(theta, residuals, places, ends, room, not done)
            excess = residuals[places] / allowed
            total = total if sought else found + max([near for *_, near in ends], default=0.0)
            fresh, sought = done and bool((excess <= 1).all()), not done and (sought or without_room)
            krylov.lock(kept)
            locked, coupling, unkept = theta[kept], krylov.coupling(), krylov.unkept()
            turn += fresh
            if fresh:
                krylov.continue_with(lambda: drawn(start, generator))
            elif done:
                krylov.continue_with(partial(krylov.residual, int(excess.argmax())))
    if progress is not None:
        progress(SEARCH, krylov.products, krylov.products)
    above = krylov.limit(random) - float(theta[-1]) if krylov.locked == 0 else above
    # what is left: the next Ritz value, and the bound on it
    rest = torch.ones(len(theta), dtype=torch.bool)
    rest[places] = False
    after = theta[rest].abs() if wanted.by_size else theta[rest]
    others = following = float(after.max()) if len(after) else math.nan
    if not spans and outside:
        beyond = {
            sign: outside[sign].bound(1 + int((sign * theta[places] >= last - near).sum()), last - near)
            for sign, last, near in ends
        }
        others = max(beyond.values()) if wanted.by_size else beyond[1]
        others, above = max(others, following), outside[1].bound(1) - float(theta[-1])
    elif not spans:
        others = math.inf
    met = len(theta) >= wanted.count and bool((residuals[places] <= allowed).all())
    return Eigenpairs(
        theta[places],
        krylov.vectors(S[:, places]),
        residuals[places],
        krylov.products,
        (complete or spans) and met,
        spans or (complete and beta == 0 and bool((residuals[places] <= floor).all())),
        remembered(theta, krylov.vectors, S, keep, wanted.top_k, wanted.bottom_k) if keep else None,
        0.0 if spans else max(0.0, above),
        others,
        following,
    )


def _kept(
    theta: Tensor, residuals: Tensor, places: Tensor, ends: list[tuple[int, float, float]], room: int, restarts: bool
) -> Tensor:
    """Return the Ritz pairs to lock: those asked for, sharp ones and, if it `restarts`, the next two at each end."""
    distance = torch.stack([theta.abs(), *((theta - sign * last).abs() for sign, last, _ in ends)]).amin(0)
    sharp, kept = residuals <= _SHARP * distance, places.tolist()
    for inwards in (range(len(theta) - 1, -1, -1), range(len(theta))):
        others = [i for i in inwards if i not in kept]
        for number, i in enumerate(others):
            if len(kept) >= room // 2 or not (sharp[i] or (restarts and number < 2)):
                break
            kept.append(i)
    return torch.tensor(kept, dtype=torch.long)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Eigenspace(Eigenpairs):
    """The k leading eigenvalues of an operator and their eigenvectors, each as often as it occurs.

    `converged` says that every residual met the tolerance and that, with probability 99.9%, no other eigenvalue exceeds
    `others`. Where `others` is below the last value, no further copy of it exists.

    >>> import torch, flatlens as fl
    >>> data = torch.eye(3), torch.zeros(3, 2)
    >>> H = fl.curvature.Hessian(fl.Problem(torch.nn.Linear(3, 2), "half_squared_error", data, dtype=torch.float64))
    >>> space = eigenspace(H, 1)
    >>> space.extended, [round(float(value), 6) for value in space.values]  # one for each output
    (True, [1.333333, 1.333333])
    >>> round(space.share({"bias": torch.ones(2)}).value, 6)
    0.75
    """

    k: int  #: the number asked for; `values` may have more, or fewer where the others are 0
    by: str  #: "value" or "size"
    space: Space  #: the parameters

    @property
    def extended(self) -> bool:
        """Return whether k cut a multiplet (values nearer than the tolerance), which the space has as a whole."""
        return len(self.values) > self.k

    @property
    def gaps(self) -> Tensor:
        """The distance of each value to the next, (k,); of the last one, to the next Ritz value outside."""
        order = self.values.abs() if self.by == "size" else self.values
        return order - torch.cat([order[1:], order.new_tensor([self.next])])

    @property
    def sine(self) -> float:
        """A bound on ||sin Theta||_F to the true space, with the probability of `others`; inf without a gap."""
        if not len(self.values):
            return 0.0
        last = float(self.values[-1])
        gap = (abs(last) if self.by == "size" else last) - self.others
        rounding = 100 * torch.finfo(self.vectors.dtype).eps * float(self.values.abs().max())
        if math.isnan(gap):  # the space is the whole one
            return 0.0
        return max(float(self.residuals.norm()), rounding) / gap if gap > 0 else math.inf

    def share(self, vector: Tensor | Mapping[str, Tensor]) -> Estimate:
        """Return the share of a vector's squared length inside the space: of a gradient, or of an update.

        Args:
            vector: A vector (P,), or a dict by parameter; a part that is missing is zero.
        """
        v = self.space.flat(vector) if isinstance(vector, Mapping) else vector
        if not (isinstance(v, Tensor) and v.shape == (self.space.size,)):
            got = tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__
            raise BadInput(f"expected shape ({self.space.size},), got {got}", argument="vector", call="share")
        v = v.to(self.vectors)
        whole = float(v.norm(dtype=torch.float64))
        if whole == 0:
            return undefined("the vector is zero")
        inside = float((self.vectors @ (v / whole)).norm(dtype=torch.float64)) ** 2
        return self._estimate(inside, self.sine)

    def overlap(self, other: Eigenspace) -> Estimate:
        """Return the mean squared cosine of the angles to another space, ||V W^T||_F^2 / k, k the smaller dimension."""
        if not isinstance(other, Eigenspace) or other.space.size != self.space.size:
            raise BadInput(f"expected an eigenspace of {self.space.size} parameters", argument="other", call="overlap")
        return self.overlap_with(other.vectors, other.sine)

    def overlap_with(self, vectors: Tensor, sine: float) -> Estimate:
        """Return the overlap with the space of orthonormal vectors, (m, P), whose own error is a `sine`."""
        k = min(len(self.values), len(vectors))
        if k == 0:
            return undefined("a space is empty")
        shared = float((self.vectors @ vectors.to(self.vectors).T).norm(dtype=torch.float64)) ** 2 / k
        error = (math.sqrt(len(self.values)) * self.sine + math.sqrt(len(vectors)) * sine) / k
        return self._estimate(shared, error)

    def by_layer(self) -> dict[str, Tensor]:
        """Return the share of each eigenvector in each layer, (k,) float64, by module; they add up to 1.

        In a multiplet, only the mean over its vectors is determined.
        """
        shares: dict[str, Tensor] = {}
        for name, part in self.space.named(self.vectors).items():
            layer = module_of(name)
            square = part.flatten(1).norm(dim=1, dtype=torch.float64).square().cpu()
            shares[layer] = shares.get(layer, 0) + square
        return shares

    def _estimate(self, value: float, error: float) -> Estimate:
        note = "" if error < 1 else "the gap after the last eigenvalue is not proved"
        return Estimate(min(value, 1.0), min(error, 1.0) / 1.96, "estimate", note=note, unit="share")

    def __repr__(self) -> str:
        what = "largest in size" if self.by == "size" else "largest"
        lines = [f"Eigenspace: the {len(self.values)} {what} eigenvalues"]
        if len(self.values):
            lines[0] += f", {self.values[0]:.6g} to {self.values[-1]:.6g}, residuals up to {self.residuals.max():.1g}"
        if self.extended:
            lines.append(f"k extended from {self.k}: it cut a multiplet")
        if len(self.values) < self.k:
            lines.append(f"of the {self.k} asked for, the others are 0")
        lines.append(f"no other one exceeds {self.others:.6g} (probability 99.9%)")
        lines.append("converged" if self.converged else "not converged")
        return "; ".join(lines) + f"; {self.products} products"


def eigenspace_memory(operator: Operator, k: int, *, most: int = 1000) -> int:
    """Return the bytes that `eigenspace` may take beside the network: an upper bound, known before it runs.

    A basis of up to a quarter of the problem's memory, at least 2 k + 8 vectors; half as many while it is reduced, or
    for residuals; some sixteen vectors of a product and its graph, whose samples take up to half of the problem's
    memory.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(3, 2, dtype=torch.float64)
    >>> data = (torch.ones(4, 3, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64))
    >>> H = fl.curvature.Hessian(fl.Problem(net, "half_squared_error", data, memory="1MB"))
    >>> eigenspace_memory(H, 2)  # 8 + 4 + 16 vectors of 64 bytes, and 500 kB of graphs
    501792
    """
    room = _room(operator, min(k, operator.size), most)
    vectors = min(room, operator.size) + min(room, operator.size) // 2 + 16
    return vectors * operator.size * operator.dtype.itemsize + operator.problem.memory // 2


def _room(operator: Operator, k: int, most: int) -> int:
    """Return the largest number of basis vectors: a quarter of the problem's memory, if that holds enough."""
    fit = operator.problem.memory // (4 * operator.size * operator.dtype.itemsize)
    return max(min(most, fit), 2 * k + 8)


def eigenspace(
    operator: Operator,
    k: int,
    *,
    by: Literal["value", "size"] = "value",
    rtol: float = 1e-4,
    slack: float = SLACK,
    most: int = 1000,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> Eigenspace:
    """Return the `k` leading eigenvalues of an operator and their eigenvectors, each as often as it occurs.

    Searches by Lanczos from random vectors orthogonal to the pairs found go on until one proves, with probability
    99.9%, that no eigenvalue is left (`flatlens.curvature.krylov.unseen`); all its products are counted. If k cuts a
    multiplet, values within `rtol` of each other, the space has the whole multiplet. Eigenvalues that are 0 up to
    rounding are left out.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(3, 2, dtype=torch.float64)
    >>> data = (torch.ones(4, 3, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64))
    >>> problem = fl.Problem(net, "half_squared_error", data)
    >>> eigenspace(fl.curvature.Hessian(problem), 5).values.round(decimals=6).tolist()  # the others are 0
    [4.0, 4.0]

    Args:
        operator: The symmetric matrix, by its products.
        k: The number of eigenvalues.
        by: "value": the largest; "size": the largest in absolute value.
        rtol: The largest residual over the eigenvalue.
        slack: The share of the spectrum's range by which an eigenvalue that is left may exceed the last one, where the
            next one is too near to prove a gap. A hundredth takes up to some 70 products.
        most: The largest number of products.
        generator: Draws the random numbers; seeded with 0 if None.
        progress: Called with (what, done, total).
    """
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    for what, value in (("k", k), ("most", most)):
        if not (isinstance(value, int) and value >= 1):
            raise BadInput("expected a whole number of at least 1", argument=what, value=value, call="eigenspace")
    for what, share in (("rtol", rtol), ("slack", slack)):
        if not (isinstance(share, int | float) and 0 < share < 1):
            raise BadInput("expected a number between 0 and 1", argument=what, value=share, call="eigenspace")
    if by not in ("value", "size"):
        raise BadInput("expected 'value' or 'size'", argument="by", value=by, call="eigenspace")
    k = min(k, operator.size)
    warn_of(eigenspace_memory(operator, k, most=most), operator.space.device, "eigenspace(...)")
    start = torch.randn(operator.size, generator=generator, dtype=torch.float64)
    pairs = with_multiplicity(
        operator,
        start.to(operator.space.device, operator.dtype),
        Wanted(k, 0, rtol, slack, by_size=by == "size", whole=True),
        most=most,
        room=_room(operator, k, most),
        random=1.0,
        generator=generator,
        progress=progress,
    )
    return Eigenspace(**vars(pairs), k=k, by=by, space=operator.space)
