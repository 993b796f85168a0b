"""A tracked training run, as a terminal screen and as a page: the answer, pictures, first and last values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from rich.console import Group, RenderableType
from rich.text import Text

from flatlens.curvature.optimiser_geometry import has_edge
from flatlens.errors import BadFolder
from flatlens.estimate import Estimate
from flatlens.progress import by_key, count_of
from flatlens.report.cards import number, with_error
from flatlens.report.screen import Fitted, remark
from flatlens.tracking.history import answer_of_run
from flatlens.version import __version__

HEADINGS = ("measure", "first", "last", "edge")
TITLE = "First and last values, ± 95%"
_MOST = 4  #: reasons for undefined numbers that a screen shows


def tracked_screen(history: pd.DataFrame) -> RenderableType:
    """Return the screen of `flatlens track`: the answer, and the first and last value of each measure."""
    table = Fitted(TITLE, names=HEADINGS[:1], values=HEADINGS[1:])
    for row in _rows(history):
        table.row(*row)
    missing = [remark("Undefined: ", f"{'; '.join(at)}: {why}") for why, at in _undefined(history).items()]
    return Group(
        *map(Text, answer_of_run(history)), Text(""), Text(_facts(history), style="bold"), table, *missing[:_MOST]
    )


def write_tracked_page(history: pd.DataFrame, path: Path) -> Path:
    """Write one HTML file that needs no network: the answer, a panel for each measure, first and last values."""
    from flatlens.report.figures import tracked_figure  # not above: the screen draws nothing
    from flatlens.report.page import write_page

    try:
        return write_page(
            "tracked",
            path,
            {},
            answer=answer_of_run(history),
            figures=[tracked_figure({"": history})],
            facts=_facts(history),
            table=TITLE,
            headings=HEADINGS,
            rows=list(_rows(history)),
            undefined=_undefined(history),
            version=__version__,
        )
    except OSError as error:
        raise BadFolder(f"{str(path)!r}: the page cannot be written ({error})") from error


def _facts(history: pd.DataFrame) -> str:
    if history.empty:
        return "nothing was measured"
    first, last = history["step"].min(), history["step"].max()
    at = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
    return f"{count_of(history['step'].nunique(), 'measurement')}, {at}"


def _rows(history: pd.DataFrame) -> Iterator[tuple[str, ...]]:
    known = history[(history["layer"] == "") & (history["kind"] != "undefined")]
    for measure, rows in known.groupby("measure", sort=False):
        first, last = rows.iloc[0], rows.iloc[-1]
        edge = number(last["edge"]) if last["edge"] > 0 and has_edge(str(measure)) else ""
        values = []
        for row in (first, last):
            stderr = row["stderr"] if row["stderr"] > 0 else 0.0  # a bound has none
            values.append(with_error(Estimate(row["value"], stderr, row["kind"]), number(row["value"])))
        yield str(measure), *values, edge


def _undefined(history: pd.DataFrame) -> dict[str, list[str]]:
    """Return the measures without a value at some steps, by reason."""
    missing = history[(history["layer"] == "") & (history["kind"] == "undefined")]
    found = Counter(zip(missing["note"], missing["measure"], strict=True))
    return by_key((note, f"{measure} at {count_of(times, 'step')}") for (note, measure), times in found.items())
