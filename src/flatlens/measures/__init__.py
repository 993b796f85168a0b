"""The measures: each one short function with a card; `Lens` and `measure` run them."""

from flatlens.measures.card import FUNCTION, LAYERWISE, NEURONWISE, PERMUTATION, Card, Measure
from flatlens.measures.flatness import kappa_trace, relative_flatness, relative_flatness_ggn
from flatlens.measures.generalisation import accuracy, generalisation_gap, loss, test_accuracy, test_loss
from flatlens.measures.lens import Lens, Outcomes
from flatlens.measures.measure import measure
from flatlens.measures.registry import MEASURES, catalogue, named
from flatlens.measures.sensitivity import jacobian_norm, mls, nmls, normalized_mls
from flatlens.measures.sharpness import ggn_trace, interpolation_sharpness
from flatlens.measures.volume import local_dimension, local_volume, log_volume, network_volume

__all__ = [
    "FUNCTION",
    "LAYERWISE",
    "MEASURES",
    "NEURONWISE",
    "PERMUTATION",
    "Card",
    "Lens",
    "Measure",
    "Outcomes",
    "accuracy",
    "catalogue",
    "generalisation_gap",
    "ggn_trace",
    "interpolation_sharpness",
    "jacobian_norm",
    "kappa_trace",
    "local_dimension",
    "local_volume",
    "log_volume",
    "loss",
    "measure",
    "mls",
    "named",
    "network_volume",
    "nmls",
    "normalized_mls",
    "relative_flatness",
    "relative_flatness_ggn",
    "test_accuracy",
    "test_loss",
]
