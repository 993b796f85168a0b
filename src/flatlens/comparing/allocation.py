"""Which layer gets which scheme: exactly by sums, by exchanges of measured losses, or the largest group.

A choice is a number for each layer: the place of its option among the layer's options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from flatlens.errors import BadInput
from flatlens.estimate import Progress

_TRIED = 6  #: exchanges that are measured before a round ends without one
_ROUNDS = 12  #: largest number of exchanges


class LayerOption(NamedTuple):
    """An option of a layer: its size and the rise that it costs."""

    size: int  #: bits
    rise: float  #: of the loss, the layer alone


Allocation = tuple[int, ...]


def allocated(options: Sequence[Sequence[LayerOption]], room: int) -> Allocation:
    """Return the choice with the smallest sum of rises whose sizes fit in `room` bits: a knapsack, solved exactly.

    >>> allocated([[LayerOption(32, 0.0), LayerOption(4, 0.5)], [LayerOption(32, 0.0), LayerOption(4, 0.1)]], 40)
    (0, 1)

    Raises:
        BadInput: Not even the smallest options fit.
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


def exchanged(
    options: Sequence[Sequence[LayerOption]],
    room: int,
    start: Allocation,
    rise_of: Callable[[Allocation], float],
    progress: Progress,
) -> tuple[Allocation, int]:
    """Return a choice whose measured rise no promising exchange lowers, and the number of exchanges that led there.

    Each round measures every change of one layer beside the others as they are. The sum of two such differences says
    which exchanges are promising: of one layer or of two, within the room. The first that lowers the measured rise is
    kept.
    """
    known = {start: rise_of(start)}

    def measured(choice: Allocation) -> float:
        if choice not in known:
            known[choice] = rise_of(choice)
        return known[choice]

    best, size = start, sum(of[at].size for of, at in zip(options, start, strict=True))
    for turn in range(_ROUNDS):
        # every change of one layer: its difference beside the others as they are, and how the size grows
        single: list[tuple[float, int, int, int]] = []
        for layer, of in enumerate(options):
            progress("exchanges", turn * len(options) + layer, _ROUNDS * len(options))
            for at, one in enumerate(of):
                if at != best[layer]:
                    gain = measured(_with(best, (layer, at))) - known[best]
                    single.append((gain, one.size - of[best[layer]].size, layer, at))
        # exchanges within the room that should lower the rise, the most promising ones first
        pairs = (pair for pair in combinations(single, 2) if pair[0][2] != pair[1][2])
        promising = sorted(
            (sum(one[0] for one in some), [one[2:] for one in some])
            for some in (*((one,) for one in single), *pairs)
            if sum(one[0] for one in some) < 0 and size + sum(one[1] for one in some) <= room
        )
        tried = (_with(best, *changes) for _, changes in promising[:_TRIED])
        better = next((choice for choice in tried if measured(choice) < known[best]), None)
        if better is None:
            return best, turn
        best, size = better, sum(of[at].size for of, at in zip(options, better, strict=True))
    return best, _ROUNDS


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
