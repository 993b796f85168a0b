"""Every measure by name, in the catalogue's order. A new one is added here."""

from __future__ import annotations

from collections.abc import Iterable

from flatlens.errors import BadInput
from flatlens.measures.card import Card, Measure, parse
from flatlens.measures.flatness import kappa_trace, relative_flatness, relative_flatness_ggn
from flatlens.measures.generalisation import accuracy, generalisation_gap, loss, test_accuracy, test_loss
from flatlens.measures.sensitivity import jacobian_norm, mls, nmls, normalized_mls
from flatlens.measures.sharpness import ggn_trace, interpolation_sharpness
from flatlens.measures.volume import local_dimension, local_volume, log_volume, network_volume

MEASURES: dict[str, Measure] = {
    measure.card.name: measure
    for measure in (
        interpolation_sharpness,
        ggn_trace,
        mls,
        nmls,
        jacobian_norm,
        normalized_mls,
        local_volume,
        log_volume,
        network_volume,
        local_dimension,
        relative_flatness,
        relative_flatness_ggn,
        kappa_trace,
        loss,
        accuracy,
        test_loss,
        test_accuracy,
        generalisation_gap,
    )
}

ONE_PASS = tuple(measure for measure in MEASURES.values() if measure.place != "network")


def catalogue() -> list[Card]:
    """The cards of all measures.

    >>> [card.name for card in catalogue()][:3]
    ['interpolation_sharpness', 'ggn_trace', 'mls']
    """
    return [measure.card for measure in MEASURES.values()]


def named(measures: str | Measure | Iterable[str | Measure]) -> list[Measure]:
    """Measures from names, spellings with options, or measures; one alone will do."""
    measures = [measures] if isinstance(measures, str | Measure) else list(measures)
    for one in measures:
        if not isinstance(one, str | Measure):
            raise BadInput(f"measure(...): names or measures are needed, got {one!r}")
    return [measure if isinstance(measure, Measure) else parse(measure, MEASURES) for measure in measures]
