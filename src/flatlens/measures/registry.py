"""Every measure by name, in the catalogue's order, and the reading of names.

A measure registers itself when its module is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from importlib import import_module

from flatlens.errors import BadInput, UnknownName
from flatlens.measures.card import MEASURE_MODULES, MEASURES, Card, Measure

for _module in MEASURE_MODULES:  # each registers its measures
    import_module(f"flatlens.measures.{_module}")

__all__ = ["MEASURES", "catalogue", "named"]


def catalogue() -> list[Card]:
    """Return the cards of all measures.

    >>> [card.name for card in catalogue()][:3]
    ['interpolation_sharpness', 'ggn_trace', 'mls']
    """
    return [measure.card for measure in MEASURES.values()]


def named(measures: str | Measure | Iterable[str | Measure]) -> list[Measure]:
    """Return measures from names, spellings with options, or measures; one alone is enough."""
    return MEASURES.named(measures, "measure(...)", _read)


def _read(spelling: str) -> Measure:
    """Return the measure that is spelled as on the command line: `mls`, `local_volume(top_k=3)`."""
    try:
        tree = ast.parse(spelling.strip(), mode="eval").body
        name = tree.func if isinstance(tree, ast.Call) else tree
        if not isinstance(name, ast.Name) or (isinstance(tree, ast.Call) and tree.args):
            raise ValueError(spelling)
        options = (
            {k.arg: ast.literal_eval(k.value) for k in tree.keywords if k.arg} if isinstance(tree, ast.Call) else {}
        )
    except (SyntaxError, ValueError) as error:
        meant = [word for word in spelling.replace("-", "_").split() if word in MEASURES]
        hint = f"; did you mean {', '.join(meant)}?" if meant else ""
        raise BadInput(
            f"measure {spelling!r}: write a name, or a name with options such as local_volume(top_k=3){hint}"
        ) from error
    if name.id not in MEASURES:
        raise UnknownName.among("measure", name.id, MEASURES)
    return MEASURES[name.id](**options)
