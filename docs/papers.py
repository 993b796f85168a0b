"""The tables and pictures in docs/papers/*.md, from the stored tables of the experiments; reproductions.py writes them.

Each page is written by hand, but for the lines between `<!-- results -->` and `<!-- end -->`, which this replaces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import atlas
import gap

from flatlens.papers import EXPERIMENTS
from flatlens.papers.figures import BANDS, FIGURES, PaperFigure
from flatlens.papers.reproduction import Reproduction
from flatlens.papers.summary import Row, rows_of
from flatlens.progress import by_key

_SENTENCE = re.compile(r"(?<=\.) (?=[^a-z])")
FOLDER = Path(__file__).parent / "papers"
BEGIN, END = "<!-- results -->", "<!-- end -->"
ALL = "index"
"""Name of the page over all papers; the others are called as their paper."""
SETTINGS = "settings"
"""Name of the page of all settings."""
ATLAS = "../atlas.md"
LEGEND = (
    "\\*: significant after Benjamini and Hochberg's correction over all rows. *Desk scale*: the papers' data and "
    "networks, made smaller ([sizes](../reproducing.md#four-scales)). *Units*: networks that share random draws, such "
    f"as a seed, count as one. {atlas.N_IS} The files “How each row was weighed” in the [atlas](../atlas.md) say which "
    "statistic each value is."
)
"""What the marks of `main_claims` mean."""


def of_paper(paper: str, found: list[Reproduction], rows: list[list[Row]]) -> Iterator[str]:
    """Yield the main claims with their outcomes, the counts of all rows, and the pictures."""
    own = [(one, mine) for one, mine in zip(found, rows, strict=True) if one.experiment.paper == paper]
    ran = {one.experiment.id for one, _ in own}
    yield from atlas.outcomes([(one, row) for one, mine in own for row in mine if _is_main(row)], ATLAS)
    for experiment in EXPERIMENTS.values():
        if experiment.paper == paper and experiment.id not in ran:
            for prediction in filter(lambda each: each.headline, experiment.predictions):
                yield f"Not yet run: {experiment.id}, {prediction.says} (“{prediction.quote}”, {prediction.source})."
                yield ""
    yield from atlas.kinds([row for _, mine in own for row in mine])
    yield f"[Every setting as printed, as coded by the authors, and here]({SETTINGS}.md)."
    yield ""
    yield from _figures(paper, [one for one, _ in own])


def settings() -> Iterator[str]:
    """Yield a table for each experiment: settings as printed, as coded by the authors, and here."""
    for paper, compared in by_key((one.paper, one) for one in EXPERIMENTS.values() if one.protocol).items():
        yield f"## {paper}"
        yield ""
        yield compared[0].code
        yield ""
        for experiment in compared:
            heading, *rows = experiment.protocol_table
            yield f"### {experiment.id}"
            yield ""
            yield from atlas.head(*heading)
            yield from (atlas.line(*row) for row in rows)
            yield ""


def main_claims(found: list[Reproduction], rows: list[list[Row]]) -> Iterator[str]:
    """Yield the main claims of all papers with their outcomes; folded below, what their authors could object.

    The atlas says how each is weighed; `settings` has the settings as printed, as coded and here.
    """
    objections, before = list[str](), ""
    yield LEGEND
    yield ""
    yield from atlas.head("paper", "main claim", "outcome", "value, 95% interval", "n, units",
                          "would its authors accept it?", numbers=("n, units",))  # fmt: skip
    for one, mine in sorted(zip(found, rows, strict=True), key=lambda each: each[0].experiment.paper):
        paper = one.experiment.paper
        for row in filter(_is_main, mine):
            prediction, statistic = row.outcome.prediction, row.outcome.statistic
            yield atlas.line(
                f"[{paper}]({paper}.md)",
                f"{atlas.link(one, ATLAS)}: {prediction.says}",
                row.in_short,
                atlas.value_of(statistic),
                statistic.size,
                prediction.accepted,
            )
            said = f"{prediction.says} *{prediction.accepted}.* {_beyond(before, prediction.objections)}"
            objections.append(f"- **{atlas.name_of(one)}**: {said}")
            before = prediction.objections
    yield ""
    yield from atlas.folded(
        "Would its authors accept it? What differs, and what other readings show", [*objections, ""]
    )


def _beyond(before: str, text: str) -> str:
    """Return a text; sentences with which another one also begins are said once.

    >>> _beyond("One. Two. Three.", "One. Two. Four.")
    'The same differences as for the claim before. Four.'
    """
    former, sentences = (_SENTENCE.split(one) for one in (before, text))
    alike = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(former, sentences, strict=False))))
    return " ".join(["The same differences as for the claim before.", *sentences[alike:]]) if alike else text


def _is_main(row: Row) -> bool:
    return row.outcome.prediction.headline


def _figures(paper: str, own: list[Reproduction]) -> Iterator[str]:
    """Yield by experiment each picture that stands for figures of the paper, and which figures are not drawn."""
    yield "### Figures"
    yield ""
    yield f"[What each figure of the paper shows]({ATLAS}#each-figure-and-table-of-the-papers). {BANDS}, except where"
    yield "the text beside a picture names others."
    yield ""
    drawn = set()
    for one in own:
        counterparts: dict[str, list[PaperFigure]] = {}  # in the paper's order of figures
        for figure in FIGURES:
            if figure.paper == paper and figure.experiment == one.experiment.id:
                for plot in figure.among(one.plots):
                    counterparts.setdefault(plot.name, []).append(figure)
        drawn |= {figure.name for figures in counterparts.values() for figure in figures}
        plots = [plot for name in counterparts for plot in one.plots if plot.name == name]
        captions = [re.sub(rf"{BANDS}[.;] ?(\w?)", lambda m: m[1].upper(), plot.caption) for plot in plots]
        common = captions[0] if len(set(captions)) == 1 else ""
        if plots:
            yield f"{atlas.link(one, ATLAS)}. {common}".rstrip()
            yield ""
        for plot, caption in zip(plots, captions, strict=True):
            yield f"**{plot.title}**. {'' if common else caption}".rstrip()
            yield ""
            yield f"![{plot.title.partition(':')[0]}](../{atlas.picture(one, plot)})"
            yield ""
    missing = by_key(
        (_undrawn(figure, own) if figure.experiment else figure.remark, figure.name)
        for figure in FIGURES
        if figure.paper == paper and figure.name not in drawn
    )
    if missing:
        said = [f"{', '.join(names)} ({why})" for why, names in missing.items()]
        yield f"Not drawn here: {'; '.join(said)}."
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
    pages = {ALL: lambda: over_all(found, rows), SETTINGS: settings}
    for path in sorted(FOLDER.glob("*.md")):
        lines = pages[path.stem]() if path.stem in pages else of_paper(path.stem, found, rows)
        path.write_text(refresh(path.read_text(), lines))
