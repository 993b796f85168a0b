"""Remarks that several experiments share on how they differ from their papers, and names that they share."""

from __future__ import annotations

from flatlens.experiments.settings import Axis

SMOKE_ONLY = "Far too short and small for the effects: only to see that it runs."
COEFFICIENT = "The paper does not say which correlation it gives: Pearson's here."

SUMMED_GAP = "generalisation_gap(convention='summed_x5')"
"""The gap as both papers of Petzka et al. compute it."""
MOVED = "layerwise"
"""The reparametrisation after which their networks are measured again."""
WEAK = 0.3
"""Largest |r| that counts as "very weak" or "does not correlate"."""
STRONG = 0.7
"""Smallest r that counts as "strongly", as in App. C of reparam2019."""


def trial_axis(count: int) -> Axis:
    """Return the axis of `count` trials; one seed sets the sample, the network and the order of its batches."""
    return Axis("data.seed+model.seed+training.seed", tuple((seed, seed, seed) for seed in range(count)))
