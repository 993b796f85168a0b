"""The direction of a measure: for most, a small value means flat or compressed; for some it is not known."""

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
"""The meaning of a small value, by family. For norms and the sample's own properties there is none."""
NEITHER = frozenset({"interpolation_gap", "gradient_noise_scale"})  # a difference of traces; no curvature
RISK_FAMILY = "generalisation"  #: the family of quantities that one would like to predict: shown, but not ranked


def direction(card: Card) -> str:
    """Return the meaning of a small value, "flat" or "compressed"; "" if not known.

    >>> from flatlens.measures import MEASURES
    >>> [direction(MEASURES[name].card) for name in ("ggn_trace", "mls", "weight_norm")]
    ['flat', 'compressed', '']
    """
    return "" if card.name in NEITHER else SMALL.get(card.family, "")
