"""Remarks that several experiments share on how they differ from their papers, and names that they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flatlens.experiments.settings import Axis

SMOKE_ONLY = "Far too short and small for the effects: only to see that it runs."
FEW_SEEDS = (
    "Five seeds are five independent units, and fewer than six give no interval and no verdict: of claims about these "
    "networks only the values are shown."
)
ONE_DRAW = (
    "All networks have the same images: intervals are of starts and orders of batches, not of the draw of images."
)
COEFFICIENT = "The paper does not say which correlation it gives: Pearson's here."

SUMMED_GAP = "generalisation_gap(convention='summed_x5')"
"""The gap as both papers of Petzka et al. compute it."""
MOVED = "layerwise"
"""The reparametrisation after which their networks are measured again."""
MOVED_NEURONS = "neuronwise"
"""The second one: single neurons."""
LEAST_CHANGE = 1e-6
"""Largest |log(after / before)| of a number that does not change but for rounding."""
LEAST_CHANGE_SEARCHED = 1e-3
"""The same of an eigenvalue, which is found to a residual of a thousandth."""
WEAK = 0.3
"""Largest |r| that counts as "weak" or "does not correlate": below it, less than a tenth of the variance is shared."""
VERY_WEAK = 0.2
WEAK_BY_EVANS = "The paper names no largest value; Evans (1996) calls an |r| below 0.2 very weak."
STRONG = 0.7
"""Smallest r that counts as "strongly", as in App. C of reparam2019."""


def seed_axis(count: int) -> Axis:
    """Return the axis of `count` seeds; one seed sets the sample, the network and the order of its batches."""
    return Axis("data.seed+model.seed+training.seed", tuple((seed, seed, seed) for seed in range(count)))


def own_seeds(name: str, values: Sequence[tuple[Any, ...]], count: int) -> Axis:
    """Return the axis of `count` networks of each setting, every network with a seed of its own.

    So no two networks share initial weights or the order of batches.

    >>> own_seeds("batch_size+lr", [(4, 0.1), (8, 0.2)], 2).values
    ((4, 0.1, 0), (4, 0.1, 1), (8, 0.2, 2), (8, 0.2, 3))
    """
    each = ((*value, number * count + seed) for number, value in enumerate(values) for seed in range(count))
    return Axis(f"{name}+seed", tuple(each))
