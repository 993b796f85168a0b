"""Random draws: bootstrap resamples and permutations of networks."""

from __future__ import annotations

import itertools
import math
from typing import TypeAlias

import numpy as np
from numpy.random import MT19937, Generator, RandomState
from numpy.typing import NDArray

from flatlens.statistics.coefficients import Array, GroupNumbers

Seed: TypeAlias = int | Generator
EVERY_ORDER = math.factorial(7)
"""Largest number of orders that are all taken, instead of some at random."""


def generator(seed: Seed) -> Generator:
    """Return the generator given, or a new one with the seed given.

    It is a Mersenne twister, seeded as its authors and torch seed it, so that `resamples` draws the same 32-bit numbers
    as `torch.randint`.
    """
    if isinstance(seed, Generator):
        return seed
    bits = MT19937()
    bits.state = RandomState(seed).get_state(legacy=False)  # type: ignore[assignment]  # the stubs lack this type
    return Generator(bits)


def resamples(n: int, seed: Seed, number: int) -> Array:
    """Return the counts of `number` bootstrap samples of n points, (number, n).

    >>> resamples(3, 0, 2).sum(1)
    array([3., 3.])
    """
    # the remainder makes small numbers more likely, by the share n / 2^32 at most
    drawn = generator(seed).integers(2**32, size=(number, n), dtype=np.uint32) % max(n, 1)
    where = drawn.astype(np.int64) + n * np.arange(number)[:, None]
    return np.bincount(where.ravel(), minlength=number * n).reshape(number, n).astype(np.float64)


def is_every(n: int, groups: GroupNumbers | None = None) -> bool:
    """Return whether `permutations` returns every order: there are at most 5040, as of 7 points.

    >>> is_every(7), is_every(8), is_every(8, np.array([0, 0, 0, 0, 1, 1, 1, 1]))
    (True, False, True)
    """
    sizes = [n] if groups is None else np.bincount(groups).tolist()
    return sum(math.lgamma(size + 1) for size in sizes) <= math.log(EVERY_ORDER) + 1e-9


def permutations(n: int, seed: Seed, number: int, groups: GroupNumbers | None = None) -> NDArray[np.int64]:
    """Return `number` random orders of n points, (number, n); with `groups`, orders within each group alone.

    Where `is_every`, all orders but the points' own are returned instead, unless `number` is 0: then p is exact.

    >>> len(permutations(4, 0, 9)), len(permutations(9, 0, 9))
    (23, 9)
    >>> orders = permutations(4, 0, 9, np.array([0, 1, 0, 1]))
    >>> set(orders[:, 0].tolist()), set(orders[:, 1].tolist())
    ({0, 2}, {1, 3})
    """
    if number and is_every(n, groups):
        return _every_order(n, np.zeros(n, dtype=np.int64) if groups is None else groups)[1:]
    drawn = generator(seed).random((number, n))
    if groups is None:
        return np.argsort(drawn, axis=1)
    found = np.empty((number, n), dtype=np.int64)
    found[:, np.argsort(groups, kind="stable")] = np.argsort(drawn + groups, axis=1)
    return found


def _every_order(n: int, groups: GroupNumbers) -> NDArray[np.int64]:
    """Return every order within the groups, the points' own first."""
    places = [np.flatnonzero(groups == group) for group in range(1 + max(groups, default=0))]
    found = []
    for orders in itertools.product(*map(itertools.permutations, places)):
        order = np.arange(n)
        for place, moved in zip(places, orders, strict=True):
            order[place] = moved
        found.append(order)
    return np.array(found, dtype=np.int64).reshape(len(found), n)
