"""Every measure by name, in the catalogue's order. A new one is added here."""

from __future__ import annotations

from collections.abc import Iterable

from flatlens.errors import BadInput
from flatlens.measures.card import Card, Measure, parse
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
from flatlens.measures.hessian import (
    ggn_norm,
    layer_sharpness,
    maximal_relative_flatness,
    sharpness,
    spectral_density,
)
from flatlens.measures.normalised import adaptive_sharpness_ggn, matrix_normalized_sharpness, normalized_sharpness
from flatlens.measures.norms import feature_norm, fisher_rao, output_norm, weight_norm
from flatlens.measures.perturbation import average_sharpness, pac_bayes_flatness, worst_sharpness
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

MEASURES: dict[str, Measure] = {
    measure.card.name: measure
    for measure in (
        interpolation_sharpness,
        ggn_trace,
        mls,
        nmls,
        jacobian_norm,
        local_volume,
        log_volume,
        network_volume,
        local_dimension,
        normalized_mls,
        input_invariant_mls,
        relative_flatness,
        relative_flatness_ggn,
        kappa_trace,
        neuron_flatness,
        neuron_flatness_ggn,
        adaptive_sharpness,
        adaptive_sharpness_ggn,
        matrix_normalized_sharpness,
        normalized_sharpness,
        fisher_rao,
        weight_norm,
        layer_factors,
        jacobian_frobenius,
        parameter_jacobian_frobenius,
        output_norm,
        feature_norm,
        sharpness,
        ggn_norm,
        hessian_trace,
        layer_sharpness,
        maximal_relative_flatness,
        spectral_density,
        interpolation_gap,
        average_sharpness,
        worst_sharpness,
        pac_bayes_flatness,
        feature_robustness,
        local_variation,
        mls_by_search,
        representativeness,
        locally_constant_labels,
        loss,
        accuracy,
        test_loss,
        test_accuracy,
        generalisation_gap,
    )
}

ONE_PASS = tuple(measure for measure in MEASURES.values() if measure.place not in ("network", "request"))


def comes_along(asked: Iterable[Measure]) -> list[Measure]:
    """The one-pass measures that read nothing of the pass beyond what those asked for read already."""
    asked = list(asked)
    keys, read = {measure.key for measure in asked}, frozenset({"C"}).union(*(measure.needs for measure in asked))
    return [measure for measure in ONE_PASS if measure.needs <= read and measure.key not in keys]


def catalogue() -> list[Card]:
    """The cards of all measures.

    >>> [card.name for card in catalogue()][:3]
    ['interpolation_sharpness', 'ggn_trace', 'mls']
    """
    return [measure.card for measure in MEASURES.values()]


def named(measures: str | Measure | Iterable[str | Measure]) -> list[Measure]:
    """Measures from names, spellings with options, or measures; one alone will do."""
    if not isinstance(measures, str | Measure | Iterable):
        raise BadInput(f"measure(...): names or measures are needed, got {measures!r}")
    measures = [measures] if isinstance(measures, str | Measure) else list(measures)
    for one in measures:
        if not isinstance(one, str | Measure):
            raise BadInput(f"measure(...): names or measures are needed, got {one!r}")
    return [measure if isinstance(measure, Measure) else parse(measure, MEASURES) for measure in measures]
