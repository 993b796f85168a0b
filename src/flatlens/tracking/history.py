"""The history of a tracker: one row per number."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pandas as pd

from flatlens.column import Column
from flatlens.curvature.optimiser_geometry import WITH_EDGE, Edge
from flatlens.errors import BadFolder, BadInput, one_line
from flatlens.estimate import Report, undefined
from flatlens.files import csv_of, unescaped, write_whole

TYPES = {
    "step": "int64",
    "lr": "float64",
    "edge": "float64",
    "measure": "str",
    "layer": "str",
    "value": "float64",
    "stderr": "float64",
    "kind": "str",
    "seconds": "float64",
    "products": "int64",
    "note": "str",
}
_Row = list[int | float | str]


class History:
    """The rows of the history, and how many measurements were skipped."""

    def __init__(self) -> None:
        self._rows: list[_Row] = []
        self._skipped = 0

    def add(self, step: int, report: Report, edge: Edge) -> None:
        """Add every estimate of a report."""
        for (measure, layer), e in report.items():
            beside = edge.beside(Column.parse(measure).name)
            row: _Row = [step, edge.lr, beside, measure, layer or "", e.value, e.stderr, e.kind, e.seconds]
            why = edge.note if Column.parse(measure).name in WITH_EDGE and math.isnan(beside) else ""
            note = e.note if why in e.note else "; ".join(filter(None, [e.note, f"no edge: {why}"]))
            self._rows.append([*row, e.products, note])

    @property
    def latest(self) -> int:
        """The last step with rows; -1 if there is none."""
        return int(self._rows[-1][0]) if self._rows else -1

    def skip(self, step: int, measures: list[str], edge: Edge, why: str) -> None:
        """Add one row for each measure that was due and skipped."""
        self._skipped += 1
        self.add(step, Report({(measure, None): undefined(why) for measure in measures}, {}), edge)

    @property
    def moments(self) -> int:
        """Return the number of steps that were due, measured or skipped."""
        return len({row[0] for row in self._rows})

    def frame(self) -> pd.DataFrame:
        """Return the tidy table; `attrs` says whether the same run would give it again."""
        table = pd.DataFrame(self._rows, columns=list(TYPES)).astype(TYPES)
        note = f"{self._skipped} of {self.moments} due measurements were skipped to keep within the budget of wall time"
        table.attrs = {"reproducible": not self._skipped, "note": note if self._skipped else ""}
        return table

    def state(self) -> dict[str, Any]:
        """Return the history as lists, strings and numbers."""
        return {"rows": [list(row) for row in self._rows], "columns": list(TYPES), "skipped": self._skipped}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`."""
        if state["columns"] != list(TYPES):
            raise BadInput(
                f"Tracker.load_state_dict(...): the saved history has other columns ({', '.join(state['columns'])}): "
                f"was it saved by another version?"
            )
        measure = list(TYPES).index("measure")
        rows = [[*row[:measure], str(Column.parse(row[measure])), *row[measure + 1 :]] for row in state["rows"]]
        self._rows, self._skipped = rows, int(state["skipped"])


def save_history(table: pd.DataFrame, path: str | os.PathLike[str]) -> Path:
    """Write a CSV file, whole or not at all, without the seconds: the same run gives the same bytes.

    Raises:
        BadFolder: it cannot be written.
    """
    try:
        return write_whole(Path(path), csv_of(table.drop(columns="seconds")))
    except (OSError, TypeError, ValueError) as error:  # TypeError and ValueError: not a path
        raise BadFolder(f"Tracker.save({str(path)!r}): the file cannot be written ({error})") from error


def load_history(path: Path) -> pd.DataFrame:
    """Return the table that `save_history` wrote; its seconds are NaN.

    Raises:
        BadFolder: the file is damaged.
    """
    types = {name: kind for name, kind in TYPES.items() if name != "seconds"}
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
        if list(table.columns) != list(types):
            raise ValueError(f"its columns are {', '.join(map(str, table.columns))}")
        numbers = [name for name, kind in types.items() if kind != "str"]
        table[numbers] = table[numbers].replace("", "nan")
        table = table.map(unescaped).astype(types)
        table["measure"] = [str(Column.parse(name)) for name in table["measure"]]
    except (OSError, ValueError) as error:
        raise BadFolder(f"the history {str(path)!r} is damaged: {one_line(error)}") from error
    return table.assign(seconds=math.nan)[list(TYPES)]
