"""Which way a measure points: for most a small value means flat, or compressed; for some nothing is known."""

from __future__ import annotations

from flatlens.measures import Card

SMALL = {
    "sharpness": "flat",
    "flatness": "flat",
    "normalised": "flat",
    "hessian": "flat",
    "perturbation": "flat",
    "sensitivity": "compressed",
    "compression": "compressed",
}
"""By family, what a small value means. Norms and the sample's own properties mean neither."""
NEITHER = frozenset({"interpolation_gap"})  # how far two traces are apart, of either sign
RISK = "generalisation"  #: the family of what one would like to predict: shown beside, not ranked


def direction(card: Card) -> str:
    """What a small value means, "flat" or "compressed"; "" where that is not known.

    >>> from flatlens.measures import MEASURES
    >>> [direction(MEASURES[name].card) for name in ("ggn_trace", "mls", "weight_norm")]
    ['flat', 'compressed', '']
    """
    return "" if card.name in NEITHER else SMALL.get(card.family, "")
