"""`flatlens list`: what there is to ask for."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from flatlens.cli.output import Flag, note, show, show_json
from flatlens.cli.study import STUDIES

KEY = (
    "\nlayer, neuron, order: does the number survive a layer-wise rescaling of the weights, a neuron-wise one, a "
    "permutation of the neurons? All three leave the network's function as it is."
)


def list_names(
    kind: Literal["measures", "transforms", "bounds", "experiments"],
    /,
    *,
    as_json: Annotated[bool, Flag, Parameter(name="--json")] = False,
) -> None:
    """List the measures, transforms, bounds or experiments.

    For example:

        flatlens list measures

    Args:
        kind: What to list.
        as_json: Print a JSON array.
    """
    rows = _rows(kind)
    if as_json:
        show_json(rows)
    elif not rows:
        note(f"this version has no {kind} yet")
    elif kind == "measures":
        show(_measures(rows), KEY, _papers())
    else:
        show(_experiments(rows))


def _rows(kind: str) -> list[dict[str, Any]]:
    if kind == "measures":
        import flatlens as fl

        return [asdict(card) for card in fl.catalogue()]
    if kind == "experiments":
        return [{"name": name, "meaning": meaning} for name, meaning in STUDIES.items()]
    return []


def _measures(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    from flatlens.report.cards import MOVES

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("measure", *(short for _, short, _ in MOVES), "meaning", "source"):
        table.add_column(heading, no_wrap=heading == "measure")
    for row in rows:
        survives = ["yes" if move in row["invariant_under"] else "no" for move, _, _ in MOVES]
        table.add_row(*(Text(cell) for cell in (row["name"], *survives, row["meaning"], row["source"])))
    return table


def _papers() -> str:
    from flatlens.measures.papers import PAPERS

    return "\nSources:\n" + "\n".join(f"  {key}: {paper}" for key, paper in PAPERS.items())


def _experiments(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table("name", "meaning", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(row["name"], row["meaning"])
    return table
