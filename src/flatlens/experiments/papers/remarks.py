"""What several experiments have to say of how they differ from their papers, and names that they share."""

from __future__ import annotations

from flatlens.experiments.settings import Axis

QUICK = "Far too short and small for the effects: only to see that it runs."
COEFFICIENT = "The paper does not say which correlation it gives: Pearson's here."

SUMMED = "generalisation_gap(convention='summed_x5')"
"""The gap as both papers of Petzka et al. compute it."""
MOVED = "layerwise"
"""The reparametrisation that their networks are measured after once more."""
WEAK = 0.3
"""What "very weak" or "does not correlate" is taken to be at most."""
STRONG = 0.7
"""What "strongly" is taken to be at least, as App. C of reparam2019 has it."""


def trials(count: int) -> Axis:
    """One seed a trial, for the sample, the network and the order of its batches."""
    return Axis("data.seed+model.seed+training.seed", tuple((seed, seed, seed) for seed in range(count)))
