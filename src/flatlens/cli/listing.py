"""`flatlens list`: what there is to ask for."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from flatlens.cli.output import Flag, note, show, show_json
from flatlens.cli.study import STUDIES

SURVIVES = """
survives: the transforms of the weights that leave the number alone; all of them leave the network's function alone"""


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
        show(
            _measures(rows),
            SURVIVES,
        )
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
    from rich.markup import escape
    from rich.table import Table

    table = Table("name", "meaning", "survives", "source", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        survives = ", ".join(sorted(row["invariant_under"])) or "none"
        table.add_row(*(escape(str(cell)) for cell in (row["name"], row["meaning"], survives, row["source"])))
    return table


def _experiments(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table("name", "meaning", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(row["name"], row["meaning"])
    return table
