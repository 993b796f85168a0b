"""The gallery of reproductions, from their folders: `python docs/atlas.py runs/atlas > docs/atlas.md`.

`runs/atlas` is the folder of `flatlens reproduce all --again --out runs/atlas`, with a folder an experiment; one that
was run at paper scale, too, has a second folder, X12-paper. The pictures go to docs/images/atlas/, one an experiment.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import vl_convert

from flatlens.papers import EXPERIMENTS
from flatlens.papers.predictions import MARKS, Prediction
from flatlens.papers.reproduce import Reproduction, is_reproduction, load_reproduction
from flatlens.papers.rerun import IN_WORDS
from flatlens.papers.summary import Row, by_chance, counted_by_kind, rows_of
from flatlens.report.words import what_was_run

HERE = Path(__file__).parent
PICTURES = Path("images") / "atlas"
WIDTH = 1100
"""Pixels of a picture, at most."""

INTRODUCTION = f"""\
# Atlas: what came of the papers' figures and claims

Experiments at laptop scale, run to the end by `flatlens reproduce all --again --out runs/atlas`, and at paper scale
what needs no more than a laptop; the page is made from the folders (`python docs/atlas.py runs/atlas > docs/atlas.md`).
A row is *reproduced* where the whole 95% interval of its statistic lies on the side that the paper predicts, *not
reproduced* where all of it lies on the other, else *inconclusive*; it is decided where two runs agree ({IN_WORDS}).
Intervals are over independent units, such as seeds, whose number stands beside that of the networks; fewer than 6
decide nothing ([how predictions are weighed](reproducing.md#outcomes), [error rates](sizes.md)). A *theorem* checks
the code, a *claim* is quoted, a *reading* is ours, a *number* is printed; main claims are bold. What laptop scale
changes is said below each title: an outcome is about that data and size.
"""


def page(found: list[Reproduction]) -> str:
    """The whole page as Markdown."""
    rows = rows_of(found)
    every = [row for each in rows for row in each]
    sections = [line for one, mine in zip(found, rows, strict=True) for line in _section(one, mine)]
    return "\n".join(
        [INTRODUCTION, *_missing(found), *_kinds(every), *_glance(found, rows), *sections, *_versions(found)]
    )


def _kinds(rows: list[Row]) -> Iterator[str]:
    yield by_chance(rows)
    yield ""
    yield _row("kind", *MARKS)
    yield _row("---", *["---:"] * len(MARKS))
    for kind, counts in counted_by_kind(rows).items():
        yield _row(kind, *counts.values())
    yield ""


def _missing(found: list[Reproduction]) -> Iterator[str]:
    there = {one.experiment.id for one in found}
    if missing := [name for name in EXPERIMENTS if name not in there]:
        yield f"Not yet run to the end at this scale: {', '.join(missing)}."
        yield ""
    if once := [one.experiment.id for one in found if not one.again and one.scale == "laptop"]:
        yield f"Not yet run twice: {', '.join(once)}."
        yield ""


def _glance(found: list[Reproduction], rows: list[list[Row]]) -> Iterator[str]:
    yield _row("", "experiment", "source", "networks", *MARKS)
    yield _row("---", "---", "---", "---:", *["---:"] * len(MARKS))
    for one, mine in zip(found, rows, strict=True):
        link = f"[{_name(one)}](#{_name(one).lower().replace(' ', '-')})"
        counts = [sum(row.decided == conclusion for row in mine) for conclusion in MARKS]
        yield _row(link, one.experiment.title, one.experiment.reproduces, one.networks, *counts)
    yield ""


def _section(one: Reproduction, rows: list[Row]) -> Iterator[str]:
    yield f"## {_name(one)}"
    yield ""
    yield f"**{one.experiment.title}** ({one.experiment.reproduces})."
    yield " ".join(what_was_run(result) for result in one.results.values())
    yield "What differs from the paper: " + " ".join(one.experiment.differs[one.scale])
    yield ""
    second = ("re-run",) * bool(one.again)
    yield _row("what the paper says", "kind", "decided", "here", *second, "value, 95% interval", "n")
    yield _row("---", "---", "---", "---", *["---"] * len(second), "---", "---:")
    for row in rows:
        outcome, again = row.outcome, row.again
        runs = [f"{again.marked} {again.statistic.in_words}"] if again else []
        statistic = outcome.statistic
        yield _row(_said(outcome.prediction), outcome.prediction.kind, row.marked, outcome.marked, *runs,
                   statistic.in_words, statistic.size)  # fmt: skip
    yield ""
    if one.plots:
        yield f"![{one.plots[0].title}]({(PICTURES / _file(one)).as_posix()})"
        yield ""
        yield f"{one.plots[0].title}. {one.plots[0].caption}"
        yield ""


def _said(prediction: Prediction) -> str:
    says = f"**{prediction.says}**" if prediction.headline else prediction.says
    quote = f': "{prediction.quote}"' if prediction.quote else ""
    return f"{says} ({prediction.source}{quote}){f' {prediction.reason}' if prediction.reason else ''}"


def _name(one: Reproduction) -> str:
    return one.experiment.id if one.scale == "laptop" else f"{one.experiment.id} at {one.scale} scale"


def _file(one: Reproduction) -> str:
    return f"{_name(one).replace(' ', '_')}.png"


def _versions(found: list[Reproduction]) -> Iterator[str]:
    seen = {", ".join(f"{k} {v}" for k, v in r.versions.items()) for one in found for r in one.results.values()}
    yield f"Computed with {'; and '.join(sorted(seen))}."
    yield ""


def _row(*cells: object) -> str:
    plain = [str(cell).replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(plain)} |"


def draw(one: Reproduction, folder: Path, into: Path) -> None:
    """The first figure of an experiment, small."""
    if not one.plots:
        return
    svg = (folder / "figures" / f"{one.plots[0].name}.svg").read_text(encoding="utf-8")
    width = float(svg[: svg.index(">")].split(' width="', 1)[1].split('"', 1)[0])
    into.mkdir(parents=True, exist_ok=True)
    (into / _file(one)).write_bytes(vl_convert.svg_to_png(svg, scale=min(1.5, WIDTH / width)))


def main(runs: Path) -> None:
    """Write the page to the standard output and the pictures beside it."""
    named = [runs / f"{name}{scale}" for name in EXPERIMENTS for scale in ("", "-paper")]
    folders = [folder for folder in named if is_reproduction(folder)]
    found = [load_reproduction(folder) for folder in folders]
    for one, folder in zip(found, folders, strict=True):
        draw(one, folder, HERE / PICTURES)
    sys.stdout.write(page(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
