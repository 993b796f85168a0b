"""The network at other weights, other features, and other labels."""

from flatlens.perturbation.features import feature_change
from flatlens.perturbation.labels import LabelTerms, label_change_terms
from flatlens.perturbation.weights import Elsewhere

__all__ = ["Elsewhere", "LabelTerms", "feature_change", "label_change_terms"]
