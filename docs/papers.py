"""The tables and pictures in docs/papers/*.md, from the stored tables of the experiments; reproductions.py writes them.

Each page is written by hand, but for the lines between `<!-- results -->` and `<!-- end -->`, which this replaces.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import atlas
import gap

from flatlens.papers import EXPERIMENTS
from flatlens.papers.figures import FIGURES, PaperFigure
from flatlens.papers.reproduction import Reproduction
from flatlens.papers.summary import Row, rows_of

FOLDER = Path(__file__).parent / "papers"
BEGIN, END = "<!-- results -->", "<!-- end -->"
ALL = "index"
"""Name of the page over all papers; the others are called as their paper."""
ATLAS = "../atlas.md"


def of_paper(paper: str, found: list[Reproduction], rows: list[list[Row]]) -> Iterator[str]:
    """Yield the main claims with their outcomes, the counts of all rows, and each figure with its counterpart."""
    own = [(one, mine) for one, mine in zip(found, rows, strict=True) if one.experiment.paper == paper]
    ran = {one.experiment.id for one, _ in own}
    yield from atlas.outcomes([(one, row, None) for one, mine in own for row in mine if _is_main(row)], ATLAS)
    for experiment in EXPERIMENTS.values():
        if experiment.paper == paper and experiment.id not in ran:
            for prediction in filter(lambda each: each.headline, experiment.predictions):
                yield f"Not yet run: {experiment.id}, {prediction.says} (“{prediction.quote}”, {prediction.source})."
                yield ""
    yield from atlas.kinds([row for _, mine in own for row in mine])
    yield from protocols(paper)
    yield from _figures(paper, [one for one, _ in own])


def protocols(paper: str) -> Iterator[str]:
    """Yield a table for each experiment of the paper: settings as printed, as coded by the authors, and here."""
    for experiment in EXPERIMENTS.values():
        if experiment.paper == paper and experiment.protocol:
            yield f"### {experiment.id}: as printed, as coded, ours"
            yield ""
            yield from atlas.head("setting", "as printed", "as coded", "ours")
            for row in experiment.protocol:
                yield atlas.line(row.what, row.printed, row.coded, row.ours)
            yield ""


def main_claims(found: list[Reproduction], rows: list[list[Row]]) -> Iterator[str]:
    """Yield the main claims of all papers with their outcomes, and what their authors could object.

    The papers' own pages say how each is weighed, and have the settings as printed, as coded and here.
    """
    yield from atlas.head("paper", "main claim", "outcome", "value, 95% interval", "networks, units",
                          "would its authors accept it?", numbers=("networks, units",))  # fmt: skip
    for one, mine in sorted(zip(found, rows, strict=True), key=lambda each: each[0].experiment.paper):
        paper = one.experiment.paper
        for row in filter(_is_main, mine):
            statistic = row.outcome.statistic
            yield atlas.line(f"[{paper}]({paper}.md)", f"{atlas.link(one, ATLAS)}: {row.outcome.prediction.says}",
                             row.in_short, atlas.value_of(statistic), statistic.size,
                             row.outcome.prediction.accepted)  # fmt: skip
    yield ""


def _is_main(row: Row) -> bool:
    return row.outcome.prediction.headline


def _figures(paper: str, own: list[Reproduction]) -> Iterator[str]:
    """Yield each picture once, with what each figure of the paper that it stands for shows; and what is not drawn."""
    drawn = set()
    for one in own:
        counterparts: dict[str, list[PaperFigure]] = {}  # in the paper's order of figures
        for figure in FIGURES:
            if figure.paper == paper and figure.experiment == one.experiment.id:
                for plot in figure.among(one.plots):
                    counterparts.setdefault(plot.name, []).append(figure)
        plots = {plot.name: plot for plot in one.plots}
        for name, figures in counterparts.items():
            plot = plots[name]
            drawn |= {figure.name for figure in figures}
            yield f"In the paper: {'; '.join(f'**{figure.name}**, {figure.shows}' for figure in figures)}."
            yield f"Here ({atlas.link(one, ATLAS)}): {plot.title}. {plot.caption}"
            yield ""
            yield f"![{plot.title}](../{atlas.picture(one, plot)})"
            yield ""
    missing = [figure for figure in FIGURES if figure.paper == paper and figure.name not in drawn]
    for figure in missing:
        why = _undrawn(figure, own) if figure.experiment else figure.remark
        yield f"Not drawn here: **{figure.name}**, {figure.shows} ({why})."
        yield ""


def _undrawn(figure: PaperFigure, own: list[Reproduction]) -> str:
    for one in own:
        if one.experiment.id == figure.experiment:
            return f"not a part of {figure.experiment} at {one.scale} scale"
    return f"{figure.experiment} has not been run yet"


def over_all(found: list[Reproduction], rows: list[list[Row]]) -> Iterator[str]:
    """Yield which measure correlates with the gap where what differs, and the main claims of all papers."""
    yield from gap.page(found, FOLDER)
    yield "## The papers' main claims"
    yield ""
    yield from main_claims(found, rows)


def refresh(page: str, lines: Iterator[str]) -> str:
    """Return the page with other lines between its marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return "\n".join([head + BEGIN, "", *lines, END + tail])


def write(found: list[Reproduction]) -> None:
    """Write the results of these experiments into every page; their pictures are drawn by then."""
    rows = rows_of(found)
    for path in sorted(FOLDER.glob("*.md")):
        lines = over_all(found, rows) if path.stem == ALL else of_paper(path.stem, found, rows)
        path.write_text(refresh(path.read_text(), lines))
