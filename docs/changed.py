"""The outcomes that changed since the first atlas: `python docs/reproductions.py`.

tables/earlier.json has the rows of that page, each with the row that has taken its place, if one has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import atlas

from flatlens.papers.experiment import with_mark
from flatlens.papers.reproduction import Reproduction
from flatlens.papers.summary import Row, rows_of

INTRODUCTION = """\
# Outcomes that changed

The first [atlas](atlas.md) drew its intervals as if all networks were independent, decided after one run, and weighed
some sentences that no paper says. This page lists each of its outcomes that is no longer the same, at laptop scale (at
desk scale where an experiment has run there alone), and why. *Decided* is what two runs agree on, over independent
units ([how](reproducing.md#outcomes)). The experiments themselves have changed, too: most have more networks, with a
start of their own each.
"""


def page(
    earlier: list[Mapping[str, Any]], rows: Mapping[str, list[Row]], links: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str]:
    """Yield the page's lines: the rows that changed, those that are gone, and a count.

    `rows` and `links`, to the atlas, are by experiment.
    """
    yield INTRODUCTION
    replaced = [one for one in earlier if one["now"] is not None]
    gone = [one for one in earlier if one["now"] is None]
    present = [(one, _present(one, rows)) for one in replaced if one["experiment"] in rows]
    changed = [(one, row) for one, row in present if row.decided != one["outcome"]]
    same = len(present) - len(changed)
    waiting = sorted({one["experiment"] for one in earlier} - set(rows), key=lambda name: int(name[1:]))
    yield f"Of {len(earlier)} outcomes {same} are the same, {len(changed)} changed, and {len(gone)} rows are gone."
    if waiting:
        yield f"The others wait for new runs of {', '.join(waiting)}: they stand at the end, and decide nothing."
    yield from _head("Changed", "what is said now", "was", "value then", "decided", "value now", "n", "why")
    for one, row in changed:
        found, name = row.outcome.statistic, one["experiment"]
        yield atlas.line(
            links.get(name, f"[{name}](atlas.md#{name.lower()})"), row.outcome.prediction.says,
            with_mark(one["outcome"]), one["value"], row.marked, found.in_words, found.size, _why(one, row),
        )  # fmt: skip
    yield from _head("Gone", "what was said", "was", "why")
    for one in gone:
        yield atlas.line(one["experiment"], one["says"], with_mark(one["outcome"]), one["why"])
    if waiting:
        yield from _head("Not yet run again", "what was said", "was", "value then")
        for one in replaced:
            if one["experiment"] in waiting:
                yield atlas.line(one["experiment"], one["says"], with_mark(one["outcome"]), one["value"])


def _head(title: str, *columns: str) -> Iterator[str]:
    """Yield a section's title and the head of its table, whose first column has the experiments."""
    yield from ("", f"## {title}", "")
    yield from atlas.head("", *columns, numbers=("n",))


def _present(one: Mapping[str, Any], rows: Mapping[str, list[Row]]) -> Row:
    return next(row for row in rows[one["experiment"]] if row.outcome.prediction.says == one["now"])


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


def text(stored: list[Reproduction]) -> str:
    """Return the whole page."""
    earlier = json.loads((atlas.HERE / atlas.TABLES / "earlier.json").read_text())
    both = {one.experiment.id: one for scale in ("smoke", "desk", "laptop") for one in stored if one.scale == scale}
    links = {}
    for one in atlas.apart(stored)[0]:  # its section also has the rows at laptop scale, where there are some
        name, link = one.experiment.id, atlas.link(one, "atlas.md")
        links[name] = link if both[name].scale != "laptop" else link.replace(atlas.name_of(one), name, 1)
    rows = dict(zip(both, rows_of(list(both.values())), strict=True))
    return "\n".join(page(earlier, rows, links)) + "\n"
