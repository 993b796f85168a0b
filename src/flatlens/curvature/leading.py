"""The leading eigenvalues of a symmetric matrix: one at each end by one search, several with their multiplicities.

One Krylov basis has each eigenvalue once. Several eigenvalues take further searches, each from a random vector
orthogonal to the pairs found, and the last one bounds what is left (`with_multiplicity`).

>>> A = torch.diag(torch.tensor([5.0, 2.0, -1.0], dtype=torch.float64))
>>> pairs = lanczos(lambda v: A @ v, torch.ones(3, dtype=torch.float64), top_k=1, bottom_k=1)
>>> [round(float(v), 6) for v in pairs.values], pairs.exact
([5.0, -1.0], True)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flatlens.curvature.krylov import (
    Apply,
    Eigenpairs,
    Krylov,
    StoppingRule,
    drawn,
    ends_of,
    remembered,
    search,
    unseen,
    usable,
)
from flatlens.deprecated_names import renamed
from flatlens.estimate import Progress
from flatlens.progress import SEARCH, expected_of_search

LEFT_CHANCE = 1e-3  #: probability, over the random starts, that an eigenvalue is left beside several
SLACK = 0.01  #: of several values: the share of the range by which another one may exceed the last
_SEED = 2_718_281_828  #: of further random vectors: a start drawn with the same seed would be the same vector


@renamed(top="top_k", bottom="bottom_k", tolerance="rtol")
def lanczos(
    apply: Apply,
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

    Several values, at an end or by size, come with their multiplicities, as `_complete` describes; they are `converged`
    only if no other one is left, up to `slack` times the range of the spectrum.

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
    return search(apply, start, StoppingRule(top_k, bottom_k, rtol), most, room, keep, random, generator, progress)


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
    apply: Apply,
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
    """Return the positions of the Ritz pairs to lock: those asked for, then sharp ones, from both ends inwards.

    A search that `restarts` also keeps the next two at each end, to go on from.
    """
    distance = torch.stack([theta.abs(), *((theta - sign * last).abs() for sign, last, _ in ends)]).amin(0)
    sharp, kept = residuals <= _SHARP * distance, places.tolist()
    for inwards in (range(len(theta) - 1, -1, -1), range(len(theta))):
        others = [i for i in inwards if i not in kept]
        for number, i in enumerate(others):
            if len(kept) >= room // 2 or not (sharp[i] or (restarts and number < 2)):
                break
            kept.append(i)
    return torch.tensor(kept, dtype=torch.long)
