"""The history of a tracker, one row per number; and its answer: edge of stability, loss, noise of the gradients."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from flatlens.column import Column
from flatlens.curvature.optimiser_geometry import WITH_EDGE, Edge, has_edge
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
NO_EDGE = "no edge: "  #: before the reason, in a note
SKIPPED = "skipped"  #: the first word of the note of a measurement that was due and skipped


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
            why = edge.note if has_edge(measure) and math.isnan(beside) else ""
            note = e.note if why in e.note else "; ".join(filter(None, [e.note, f"{NO_EDGE}{why}"]))
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
        at = list(TYPES).index("measure")
        self._rows = [[*row[:at], str(Column.parse(row[at])), *row[at + 1 :]] for row in state["rows"]]
        self._skipped = int(state["skipped"])


def save_history(table: pd.DataFrame, path: str | os.PathLike[str]) -> Path:
    """Write a CSV file, whole or not at all, without the seconds: the same run gives the same bytes."""
    try:
        return write_whole(Path(path), csv_of(table.drop(columns="seconds")))
    except (OSError, TypeError, ValueError) as error:  # TypeError and ValueError: not a path
        raise BadFolder(f"Tracker.save({str(path)!r}): the file cannot be written ({error})") from error


def load_history(path: Path) -> pd.DataFrame:
    """Return the table that `save_history` wrote; its seconds are NaN."""
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


AT_EDGE = 0.9  #: least ratio of a sharpness to its edge at which a run counts as at the edge
ABOVE_EDGE = 1.2  #: ratio from which it is above it


def answer_of_run(history: pd.DataFrame) -> list[str]:
    """Return the answer to a history: the edge of stability, the loss, and the noise of gradients.

    >>> rows = [{"step": s, "measure": "sharpness", "layer": "", "value": v, "stderr": 0.0, "kind": "lower bound",
    ...          "lr": 0.1, "edge": 20.0, "note": ""} for s, v in ((0, 5.0), (100, 21.0), (200, 20.2))]
    >>> answer_of_run(pd.DataFrame(rows))[0]
    'Training has been at its edge of stability since step 100: since then sharpness is 1.03 times the edge.'
    """
    columns = [Column.parse(name) for name in history["measure"]]
    named = history.assign(name=["" if one.part else one.name for one in columns])
    known = named[(named["layer"] == "") & (named["name"] != "") & (named["kind"] != "undefined")]
    by = {str(name): rows for name, rows in known.groupby("name", sort=False)}
    told = []
    # since when nothing could be measured, as after a divergence; skipped measurements are none
    tried = named[~named["note"].str.startswith(SKIPPED)]
    measured = tried.loc[tried["kind"] != "undefined", "step"].max()  # NaN if there is none
    lost = tried[~(tried["step"] <= measured)]
    if len(lost) and (why := lost["note"].iloc[0]):
        told.append(f"Nothing could be measured since step {lost['step'].iloc[0]:,}: {why}.")
    told.append(_of_edge(by, named))
    # how far the loss came
    losses = by.get("loss", pd.DataFrame())
    if len(losses) > 1:
        (first, *_, last), steps = losses["value"], int(losses["step"].iloc[-1] - losses["step"].iloc[0])
        verb = "fell" if last < first else "rose" if last > first else "is the same:"
        told.append(f"The loss {verb} from {first:.3g} to {last:.3g} in {steps:,} steps.")
    # the batches in which the gradient's noise is as large as the gradient; a lower bound of 0 says nothing
    if (noise := by.get("gradient_noise_scale")) is not None:
        row, batch = noise.iloc[-1], history.attrs.get("batch_size")
        says = f"noise scale is not known ({row['note']})"
        if row["value"] > 0:
            least = "at least " if row["kind"] == "lower bound" else ""
            says = f"noise is as large as the gradient in batches of {least}{_in_words(float(row['value']))} samples"
        own = "" if batch is None else f"; training takes batches of {batch:,}"
        told.append(f"At step {int(row['step']):,} the gradient's {says}{own}.")
    return told


def _of_edge(by: Mapping[str, pd.DataFrame], history: pd.DataFrame) -> str:
    beside = {name: rows[rows["edge"] > 0] for name, rows in by.items() if name in WITH_EDGE}
    # the first of the measures with an edge, in the order of WITH_EDGE: several may be there
    name = next((one for one in WITH_EDGE if len(beside.get(one, ()))), None)
    if name is None:
        notes = history.loc[history["name"].isin(WITH_EDGE), "note"].str.rpartition(NO_EDGE)
        why = next(filter(None, (after for _, found, after in notes.itertuples(index=False) if found)), "")
        todo = f"track one of {', '.join(WITH_EDGE)}, and give the optimiser to step"
        return f"No edge of stability is known: {why or todo}."
    rows = beside[name]
    ratio = (rows["value"] / rows["edge"]).set_axis(rows["step"])
    above = ratio.index[ratio >= 1]
    if not len(above):
        at = f"{name} is at most {_times(ratio.max())} times the edge, at step {ratio.index[int(ratio.argmax())]:,}"
        return f"Training has not come to its edge of stability: {at}."
    first, now, median = above[0], float(ratio.iloc[-1]), float(ratio.loc[above[0] :].median())
    if now >= AT_EDGE:
        since = f"since step {first:,}: since then {name} is {_times(median)} times the edge"
        return f"Training has been {'above' if median > ABOVE_EDGE else 'at'} its edge of stability {since}."
    came = f"came to its edge of stability at step {first:,}"
    if first == ratio.index[0]:
        came = f"began above its edge of stability, at {_times(ratio.iloc[0])} times the edge"
    return f"Training {came}; {name} is now {_times(now)} times the edge."


def _times(ratio: float) -> str:
    return _in_words(ratio) if ratio >= 100 else f"{ratio:.2f}" if ratio >= 0.01 else f"{ratio:.1g}"


def _in_words(value: float) -> str:
    """Return a size in words: two digits, no exponent below a million."""
    return f"{float(f'{value:.2g}'):,.0f}" if value < 1e6 else f"{value:.2g}"
