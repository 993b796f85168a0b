"""Random draws: bootstrap resamples and permutations of networks."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.random import MT19937, Generator, RandomState
from numpy.typing import NDArray

from flatlens.statistics.coefficients import Array, GroupNumbers

Seed: TypeAlias = int | Generator


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


def permutations(n: int, seed: Seed, number: int, groups: GroupNumbers | None = None) -> NDArray[np.int64]:
    """Return `number` random orders of n points, (number, n); with `groups`, orders within each group alone.

    >>> orders = permutations(4, 0, 9, np.array([0, 1, 0, 1]))
    >>> set(orders[:, 0].tolist()), set(orders[:, 1].tolist())
    ({0, 2}, {1, 3})
    """
    drawn = generator(seed).random((number, n))
    if groups is None:
        return np.argsort(drawn, axis=1)
    found = np.empty((number, n), dtype=np.int64)
    found[:, np.argsort(groups, kind="stable")] = np.argsort(drawn + groups, axis=1)
    return found
