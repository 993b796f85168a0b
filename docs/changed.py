"""The outcomes that changed since the first atlas, counted in changed.md, listed in changed.csv.

tables/earlier.json has the rows of that atlas, each with the row that has taken its place, if one has;
`python docs/reproductions.py` writes both files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import atlas
import pandas as pd

from flatlens.papers.experiment import MARKS
from flatlens.papers.reproduction import Reproduction
from flatlens.papers.summary import Row, rows_of

INTRODUCTION = """\
# Outcomes that changed

The first [atlas](atlas.md) drew its intervals as if all networks were independent, decided after one run, and weighed
some sentences that no paper says. Since then most experiments have more networks, with a start of their own each. The
table compares each of its outcomes with what two runs agree on now, over independent units
([how](reproducing.md#outcomes)): at laptop scale, or at desk scale where an experiment has run there alone.
[changed.csv](changed.csv) lists each outcome that changed, with both values and the reason."""
GONE, WAITING = "gone", "not run again"
COLUMNS = ("experiment", "claim", "was", "value then", "decided", "value now", "n", "why")


def compared(earlier: list[Mapping[str, Any]], rows: Mapping[str, list[Row]]) -> pd.DataFrame:
    """Return each earlier outcome with the present one; `rows` are by experiment."""
    return pd.DataFrame([_compared(one, rows) for one in earlier], columns=COLUMNS)


def _compared(one: Mapping[str, Any], rows: Mapping[str, list[Row]]) -> tuple[str, ...]:
    then = one["experiment"], one["now"] or one["says"], one["outcome"], one["value"]
    if one["now"] is None or one["experiment"] not in rows:
        return *then, GONE if one["now"] is None else WAITING, "", "", one["why"]
    row = next(row for row in rows[one["experiment"]] if row.outcome.prediction.says == one["now"])
    return *then, row.decided, row.outcome.statistic.in_words, row.outcome.statistic.size, _why(one, row)


def page(table: pd.DataFrame) -> Iterator[str]:
    """Yield the page's lines: how many outcomes of each kind came to which."""
    yield INTRODUCTION
    yield ""
    count = pd.crosstab(table["was"], table["decided"])
    now = [name for name in (*MARKS, GONE, WAITING) if name in count]
    yield from atlas.head("was", *now, numbers=now)
    for was in (name for name in MARKS if name in count.index):
        yield atlas.line(was, *count.loc[was, now])
    same = int((table["was"] == table["decided"]).sum())
    yield ""
    yield f"Of {len(table)} outcomes {same} are the same."


def _why(one: Mapping[str, Any], row: Row) -> str:
    """Return what else the row weighs now, and what its two runs gave."""
    outcome, again = row.outcome, row.again
    if outcome.prediction.kind == "theorem" or again is None:
        runs = ""
    elif row.decided == outcome.conclusion != "open":
        runs = f"two runs agree, the second with {again.statistic.in_words}"
    elif outcome.conclusion == "open":
        units, ranks = outcome.statistic.size.rpartition(", ")[2], outcome.statistic.of_ranks
        runs = f"open over {units}{f', {ranks:.2f} of ranks' if ranks == ranks else ''}"
        runs = runs if one["outcome"] != "open" else ""
    else:
        runs = f"the second run is {again.conclusion}, {again.statistic.in_words}"
    return "; ".join(filter(None, (one["why"], runs)))


def write(stored: list[Reproduction]) -> None:
    """Write the page, and the table of what changed."""
    earlier = json.loads((atlas.HERE / atlas.TABLES / "earlier.json").read_text())
    both = {one.experiment.id: one for scale in ("smoke", "desk", "laptop") for one in stored if one.scale == scale}
    table = compared(earlier, dict(zip(both, rows_of(list(both.values())), strict=True)))
    (atlas.HERE / "changed.md").write_text("\n".join(page(table)) + "\n")
    table[table["was"] != table["decided"]].to_csv(atlas.HERE / "changed.csv", index=False)
