"""Which layer gets which scheme: exactly by sums, by exchanges of measured losses, or the largest group.

A choice is a number for each layer: the place of its option among the layer's options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from flatlens.errors import BadInput
from flatlens.estimate import Progress

_TRIED = 6  #: exchanges that are measured before a round ends without one
_ROUNDS = 12  #: rounds whose losses are measured at most, unless a number of trials is given


class LayerOption(NamedTuple):
    """An option of a layer: its size and the rise that it costs."""

    size: int  #: bits
    rise: float  #: of the loss, the layer alone


Allocation = tuple[int, ...]


def allocated(options: Sequence[Sequence[LayerOption]], room: int) -> Allocation:
    """Return the choice with the smallest sum of rises whose sizes fit in `room` bits: a knapsack, solved exactly.

    >>> allocated([[LayerOption(32, 0.0), LayerOption(4, 0.5)], [LayerOption(32, 0.0), LayerOption(4, 0.1)]], 40)
    (0, 1)
    """
    least = sum(min(one.size for one in of) for of in options)
    if least > room:
        raise BadInput("not even the smallest schemes fit", argument="budget", call="compression")
    # a variable, 0 or 1, for each option; sizes and rises as shares, for the solver's tolerances
    owners = np.repeat(np.arange(len(options)), [len(of) for of in options])
    rises, sizes = (np.array([one[part] for of in options for one in of], dtype=float) for part in (1, 0))
    once = LinearConstraint((owners == np.arange(len(options))[:, None]).astype(float), 1.0, 1.0)
    fits = LinearConstraint(sizes[None] / max(room, 1), -np.inf, 1.0)
    largest = float(np.abs(rises).max()) or 1.0
    found = milp(rises / largest, integrality=np.ones_like(rises), bounds=Bounds(0, 1), constraints=[once, fits],
                 options={"mip_rel_gap": 0.0})  # fmt: skip
    assert found.x is not None, found.message  # the smallest options fit
    return tuple(int(found.x[owners == layer].argmax()) for layer in range(len(options)))


class Exchanges(NamedTuple):
    """The choice after the exchanges, and what they took."""

    choice: Allocation
    made: int  #: exchanges that led there
    trials: int  #: losses that were measured
    ended: bool  #: whether no promising exchange is left; else the trials are used up


def exchanged(
    options: Sequence[Sequence[LayerOption]],
    room: int,
    start: Allocation,
    rise_of: Callable[[Allocation], float],
    progress: Progress,
    trials: int | None = None,
) -> Exchanges:
    """Improve a choice by exchanges of one layer or of two within the room, as long as the measured rise falls.

    A round measures every change of one layer beside the others as they are. The sum of two such differences says which
    exchanges are promising; the first that lowers the measured rise is kept, and the same differences rank the next,
    until none of the most promising lowers it. The next round measures them anew; one without an exchange is the last.
    Where `trials` do not suffice for a round, the layers with the largest differences alone come first.
    """
    known = {start: rise_of(start)}
    most = _ROUNDS * (sum(len(of) - 1 for of in options) + _TRIED) if trials is None else trials

    def measured(choice: Allocation, spare: int = 0) -> float:
        if choice not in known and len(known) + spare < most:
            known[choice] = rise_of(choice)
            progress("exchanges", len(known), most)
        return known.get(choice, math.inf)

    best, made = start, 0
    while True:
        # every change of one layer: its difference beside the others as they are
        changes = [(layer, at) for layer, of in enumerate(options) for at in range(len(of))]
        changes.sort(key=lambda one: -abs(options[one[0]][one[1]].rise - options[one[0]][best[one[0]]].rise))
        gains = {change: measured(_with(best, change), _TRIED) - known[best] for change in changes}
        before = made
        while better := next(
            (one for one in _promising(options, room, best, gains) if measured(one) < known[best]), None
        ):
            best, made = better, made + 1
        if made == before or len(known) >= most:
            tried = [_with(best, change) for change in changes] + _promising(options, room, best, gains)
            return Exchanges(best, made, len(known), made == before and all(choice in known for choice in tried))


def _promising(
    options: Sequence[Sequence[LayerOption]], room: int, best: Allocation, gains: Mapping[tuple[int, int], float]
) -> list[Allocation]:
    """Return the choices within the room that should lower the rise most, by the differences of one layer or of two."""
    size = sum(of[at].size for of, at in zip(options, best, strict=True))
    single = [
        (gain - gains[layer, best[layer]], options[layer][at].size - options[layer][best[layer]].size, (layer, at))
        for (layer, at), gain in gains.items()
        if at != best[layer] and gain < math.inf
    ]
    pairs = (pair for pair in combinations(single, 2) if pair[0][2][0] != pair[1][2][0])
    promising = sorted(
        (sum(one[0] for one in some), [one[2] for one in some])
        for some in (*((one,) for one in single), *pairs)
        if sum(one[0] for one in some) < 0 and size + sum(one[1] for one in some) <= room
    )
    return [_with(best, *changes) for _, changes in promising[:_TRIED]]


def _with(choice: Allocation, *changes: tuple[int, int]) -> Allocation:
    """Return a choice with other options of some layers."""
    changed = dict(changes)
    return tuple(changed.get(layer, at) for layer, at in enumerate(choice))


def largest_group(many: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number of the first layers, in an order, that fit; by bisection, so each answer was measured.

    >>> largest_group(10, lambda few: few <= 7)
    7
    """
    low, high = 0, many
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
