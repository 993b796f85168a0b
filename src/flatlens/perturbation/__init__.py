"""The network at other weights, other features, and other labels."""

from flatlens.perturbation.features import (
    LabelTerms,
    feature_change,
    label_change,
    label_change_terms,
    moved_risk,
    noise,
    smallest_feature_matrix,
)
from flatlens.perturbation.weights import Elsewhere

__all__ = [
    "Elsewhere",
    "LabelTerms",
    "feature_change",
    "label_change",
    "label_change_terms",
    "moved_risk",
    "noise",
    "smallest_feature_matrix",
]
