"""The measures: each one short function with a card; `Lens` and `measure` run them."""

from flatlens.measures.card import FUNCTION, LAYERWISE, NEURONWISE, PERMUTATION, Card, Measure
from flatlens.measures.factors import layer_factors
from flatlens.measures.flatness import (
    kappa_trace,
    neuron_flatness,
    neuron_flatness_ggn,
    relative_flatness,
    relative_flatness_ggn,
)
from flatlens.measures.gauss_newton import ggn_trace, interpolation_sharpness, parameter_jacobian_frobenius
from flatlens.measures.generalisation import accuracy, generalisation_gap, loss, test_accuracy, test_loss
from flatlens.measures.hessian import ggn_norm, layer_sharpness, maximal_relative_flatness, sharpness, spectral_density
from flatlens.measures.lens import Lens
from flatlens.measures.measure import about, measure
from flatlens.measures.normalised import adaptive_sharpness_ggn, matrix_normalized_sharpness, normalized_sharpness
from flatlens.measures.norms import feature_norm, fisher_rao, output_norm, weight_norm
from flatlens.measures.perturbation import average_sharpness, pac_bayes_flatness, worst_sharpness
from flatlens.measures.registry import MEASURES, catalogue, named
from flatlens.measures.representativeness import representativeness
from flatlens.measures.robustness import feature_robustness, locally_constant_labels
from flatlens.measures.sensitivity import (
    input_invariant_mls,
    jacobian_frobenius,
    jacobian_norm,
    mls,
    nmls,
    normalized_mls,
)
from flatlens.measures.traces import adaptive_sharpness, hessian_trace, interpolation_gap
from flatlens.measures.variation import local_variation, mls_by_search
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
    "about",
    "accuracy",
    "adaptive_sharpness",
    "adaptive_sharpness_ggn",
    "average_sharpness",
    "catalogue",
    "feature_norm",
    "feature_robustness",
    "fisher_rao",
    "generalisation_gap",
    "ggn_norm",
    "ggn_trace",
    "hessian_trace",
    "input_invariant_mls",
    "interpolation_gap",
    "interpolation_sharpness",
    "jacobian_frobenius",
    "jacobian_norm",
    "kappa_trace",
    "layer_factors",
    "layer_sharpness",
    "local_dimension",
    "local_variation",
    "local_volume",
    "locally_constant_labels",
    "log_volume",
    "loss",
    "matrix_normalized_sharpness",
    "maximal_relative_flatness",
    "measure",
    "mls",
    "mls_by_search",
    "named",
    "network_volume",
    "neuron_flatness",
    "neuron_flatness_ggn",
    "nmls",
    "normalized_mls",
    "normalized_sharpness",
    "output_norm",
    "pac_bayes_flatness",
    "parameter_jacobian_frobenius",
    "relative_flatness",
    "relative_flatness_ggn",
    "representativeness",
    "sharpness",
    "spectral_density",
    "test_accuracy",
    "test_loss",
    "weight_norm",
    "worst_sharpness",
]
