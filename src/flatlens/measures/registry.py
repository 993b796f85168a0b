"""Every measure by name, in the catalogue's order, and the reading of names.

A measure registers itself when its module is imported: a new module is added to the imports below.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping

from flatlens.errors import BadInput, UnknownName
from flatlens.measures import (
    densities,
    factors,
    flatness,
    gauss_newton,
    generalisation,
    hessian,
    normalised,
    norms,
    perturbation,
    robustness,
    sensitivity,
    traces,
    variation,
    volume,
)
from flatlens.measures.card import REGISTERED, Card, Measure

FAMILIES = (
    sensitivity, gauss_newton, volume, flatness, norms, factors, hessian, traces, normalised, perturbation,
    robustness, variation, densities, generalisation,
)  # fmt: skip
"""The modules of measures, in the order in which a row of the catalogue that holds several lists them."""


def _place(measure: Measure) -> tuple[int, int, int]:
    """Return where a measure stands: the letter of its row in the catalogue, the number, and its module."""
    row, home = measure.card.id, measure.compute.__module__
    modules = [module.__name__ for module in FAMILIES]
    return "MHPD".index(row[0]), int(row[1:]), modules.index(home)


MEASURES: dict[str, Measure] = {one.card.name: one for one in sorted(REGISTERED.values(), key=_place)}


def catalogue() -> list[Card]:
    """Return the cards of all measures.

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


def parse(spelling: str, known: Mapping[str, Measure]) -> Measure:
    """A measure from the way the command line spells it: `mls`, `local_volume(top_k=3)`."""
    try:
        tree = ast.parse(spelling.strip(), mode="eval").body
        name = tree.func if isinstance(tree, ast.Call) else tree
        if not isinstance(name, ast.Name) or (isinstance(tree, ast.Call) and tree.args):
            raise ValueError(spelling)
        options = (
            {k.arg: ast.literal_eval(k.value) for k in tree.keywords if k.arg} if isinstance(tree, ast.Call) else {}
        )
    except (SyntaxError, ValueError) as error:
        raise BadInput(
            f"measure {spelling!r}: write a name, or a name with options such as local_volume(top_k=3)"
        ) from error
    if name.id not in known:
        raise UnknownName.among("measure", name.id, known)
    return known[name.id](**options)
