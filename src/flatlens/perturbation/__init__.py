"""The network at other weights, other features, and other labels."""

from flatlens.perturbation.features import noise, smallest_feature_matrix
from flatlens.perturbation.known_labels import feature_change, label_change, moved_risk
from flatlens.perturbation.labels import LabelTerms, label_change_terms
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
