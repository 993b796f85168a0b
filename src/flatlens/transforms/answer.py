"""The answer of a table of invariance: which numbers stay, which change most, how it is known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flatlens.column import Column
from flatlens.measures import MEASURES
from flatlens.measures.definition import RISK_FAMILY
from flatlens.progress import count_of, listed
from flatlens.transforms.cell import Applied, Cell

_MOST = 3  #: names that a sentence lists


def answer(
    cells: Sequence[Cell], moved: Mapping[str, Applied], left_out: Mapping[str, str], about: Mapping[str, Any]
) -> list[str]:
    """Return at most three sentences on what stayed and what changed.

    >>> answer([], {}, {"permutation": "no link is found"}, {})
    ['No function-preserving change of the weights applies to this network: no link is found.']
    """
    if not moved:
        reasons = "; ".join(dict.fromkeys(left_out.values()))
        return [f"No function-preserving change of the weights applies to this network: {reasons}."]
    wrong = [f"{cell.measure} under {cell.transform}" for cell in cells if cell.agrees is False]
    ours = "an error in flatlens or in a theorem: please report it"
    told = f"Not as declared: {listed(wrong, _MOST)}; {ours}." if wrong else ""
    return [sentence for sentence in (told, *_moves(cells, moved), _proof(cells, moved, about)) if sentence][:3]


def _moves(cells: Sequence[Cell], moved: Mapping[str, Applied]) -> list[str]:
    """Return which numbers stay under all transforms, and which change."""
    rows: dict[str, list[Cell]] = {}
    for cell in cells:
        rows.setdefault(cell.measure, []).append(cell)
    own = {name: each for name, each in rows.items() if _counts(name, rows)}
    # a number that stays here alone, and not in general, compares nothing
    stay = [name for name, each in own.items() if all(cell.unchanged and cell.declared is not False for cell in each)]
    change = [name for name, each in own.items() if any(cell.unchanged is False for cell in each)]
    plural = "" if len(moved) == 1 else "s"
    under = f"under {len(moved)} function-preserving change{plural} of the weights"
    if not own:
        return []
    found = [f"No number is invariant {under}."]
    if stay:
        which = f"{len(stay)} of {count_of(len(own), 'number')} {'is' if len(stay) == 1 else 'are'} invariant"
        found = [f"{which} {under}: networks can be compared by {listed(stay, _MOST)}."]
    if change:
        factors = {(cell.measure, cell.transform): _factor(cell) for name in change for cell in own[name]}
        worst = max(factors, key=lambda key: factors[key])
        by = f" by a factor of {factors[worst]:.3g}" if factors[worst] > 1 else ""
        which = f"{count_of(len(change), 'number')} change{'s' * (len(change) == 1)}, {worst[0]}{by} under {worst[1]}"
        found.append(f"{which}: do not compare networks by {'it' if len(change) == 1 else 'them'}.")
    return found


def _counts(name: str, rows: Mapping[str, object]) -> bool:
    """Return whether a number is one of the answer's: no risk, and no part of a measure that has a row."""
    column = Column.parse(name)
    risk = column.name in MEASURES and MEASURES[column.name].card.family == RISK_FAMILY
    return not risk and (not column.part or column.measure not in rows)


def _factor(cell: Cell) -> float:
    """Return by what factor a number changes, up or down; 1 where it stays, or where no factor says it."""
    if cell.unchanged is not False or not cell.before * cell.after > 0:
        return 1.0
    ratio = cell.after / cell.before
    return max(ratio, 1 / ratio) if math.isfinite(ratio) else 1.0


def _proof(cells: Sequence[Cell], moved: Mapping[str, Applied], about: Mapping[str, Any]) -> str:
    """Return how it is known that the function stayed, and whether numbers do what is declared."""
    samples = f"all {count_of(about['n'], 'sample')}" if "n" in about else "the data"
    proof = f"On {samples} the outputs differ by {max(done.difference for done in moved.values()):.1g} at most"
    checked = sum(cell.agrees is True for cell in cells)
    undecided = sum(cell.note.startswith("undecided") for cell in cells)
    parts = [
        proof,
        f"{count_of(checked, 'declaration')} could be checked, and hold{'s' * (checked == 1)}" if checked else "",
    ]
    parts.append(f"{undecided} cell{'s are' if undecided > 1 else ' is'} undecided" if undecided else "")
    return f"{'; '.join(filter(None, parts))}."
