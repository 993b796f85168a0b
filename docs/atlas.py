"""The gallery of reproductions, docs/atlas.md, and its pictures in docs/images/atlas/; reproductions.py writes both."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from compact import compact, small_png

from flatlens.errors import BadFolder
from flatlens.measures.definition import PAPERS
from flatlens.papers import EXPERIMENTS
from flatlens.papers.experiment import MARKS, SCALES, WEAK, Outcome, Plot
from flatlens.papers.figures import FIGURES, PaperFigure
from flatlens.papers.reproduction import (
    IN_WORDS,
    Reproduction,
    archive_name,
    is_reproduction,
    load_archive,
    load_reproduction,
    save_archive,
)
from flatlens.papers.summary import Row, by_chance, counted_by_kind, no_theorems, rows_of
from flatlens.progress import count_of
from flatlens.report.figures.plots import plot_figure
from flatlens.report.page import svg_of
from flatlens.report.prose import what_was_run
from flatlens.report.reproduction import DRAWN_COLOURS
from flatlens.statistics import Statistic

HERE = Path(__file__).parent
TABLES = Path("tables")
PICTURES = Path("images") / "atlas"
FEW_CASES = 4  #: cases whose values are all shown
LARGEST, MOST = 60_000, 4_000_000
"""Bytes of one picture, and of all of them, at most."""
FIGURES_SAID = """\
Every figure and table of the four papers, with the picture here that has its panels and its lines. Axes are
logarithmic where the paper says so; where it does not say, those of positive values over more than a decade are.
Curves are means, and bands one standard deviation to either side, as in the first two papers; those of Fig. 3 and 4 of
relative2021, which say nothing of theirs, are 95% intervals."""

INTRODUCTION = f"""\
# Atlas: what came of the papers' figures and claims

Experiments at laptop scale, run to the end by `flatlens reproduce all --again --out runs/atlas`; and at desk scale, on
the papers' own data, those that have run there, with their laptop outcome beside. Their tables are kept in
[docs/tables](tables): `python docs/reproductions.py` weighs and draws all that is here again, without training, in some
minutes.

How to read a row:

- *Reproduced*: the whole 95% interval of the statistic lies on the side of the number that the paper predicts (the
  column *statistic* names both). *Not reproduced*: all of it lies on the other side. *At most weak*: neither, and the
  whole interval of a correlation lies between -{WEAK:g} and {WEAK:g}; of several cases that should all be on the side,
  that of one. *Depends on the reading*: reproduced in one way to read the text, and not in another. Else *open*.
- Beside a Pearson correlation that of ranks has to agree; a claim about all cases needs each of them; where one
  of several cases decides, its p is corrected for their number after Holm. A row that these leave open says so: "ranks
  do not agree", "another case is open", "not after Holm's correction".
- *Decided*: a second run comes to the same conclusion ({IN_WORDS}); at desk scale, both halves of the units lie on its
  side. Of an open row it says how many times the units would decide it, and how long they would take, if the value
  stays where it is: an interval's width falls with the root of the number of units.
- Intervals are over independent units, such as seeds. Their number stands beside that of the networks; fewer than 6
  decide nothing ([how predictions are weighed](reproducing.md#outcomes), [error rates](sizes.md)).
- A *theorem* is proved, and checks the code; a *claim* is a sentence of the paper; a *reading* is ours, with its
  reason; a *number* is printed in the paper. Main claims are bold.
- What laptop scale changes is said below each title: an outcome is about that data and size.
"""


def page(stored: list[Reproduction]) -> str:
    """Return the whole page as Markdown."""
    found, laptops = apart(stored)
    rows = rows_of(found)
    every = [row for each in rows for row in each]
    sections = [text for one, mine in zip(found, rows, strict=True)
                for text in _section(one, mine, laptops.get(name_of(one), []))]  # fmt: skip
    return "\n".join(
        [
            INTRODUCTION,
            *_missing(found),
            by_chance(every),
            "",
            *kinds(every),
            *_glance(found, rows),
            *_figures(found),
            *sections,
            *_versions(found),
        ]
    )


def apart(stored: list[Reproduction]) -> tuple[list[Reproduction], dict[str, list[Row]]]:
    """Return those that have a section, and by their names the rows at laptop scale that stand beside those at desk."""
    desk = {one.experiment.id: name_of(one) for one in stored if one.scale == "desk"}
    beside = [one for one in stored if one.scale == "laptop" and one.experiment.id in desk]
    laptops = dict(zip((desk[one.experiment.id] for one in beside), rows_of(beside), strict=True))
    return [one for one in stored if not any(one is other for other in beside)], laptops


def kinds(rows: list[Row]) -> Iterator[str]:
    """Yield a table of how many sentences of each kind came to which conclusion."""
    yield "The papers' sentences, by kind. One with several rows counts once, as the row that is worst for it."
    theorems = len(rows) - len(no_theorems(rows))
    if theorems:
        yield f"{count_of(theorems, 'row')} of theorems, which check the code, are not counted."
    yield ""
    yield from head("kind", *MARKS, numbers=MARKS)
    for kind, counts in counted_by_kind(rows).items():
        yield line(kind, *counts.values())
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
    yield from head("", "experiment", "source", "networks", *MARKS, numbers=("networks", *MARKS))
    for one, mine in zip(found, rows, strict=True):
        counts = [sum(row.decided == conclusion for row in no_theorems(mine)) for conclusion in MARKS]
        yield line(link(one), one.experiment.title, one.experiment.reproduces, one.networks, *counts)
    yield ""


def _figures(found: list[Reproduction]) -> Iterator[str]:
    """Yield the list of the papers' figures and tables, each with its counterpart."""
    yield "## Each figure and table of the papers"
    yield ""
    yield FIGURES_SAID
    for paper in dict.fromkeys(one.paper for one in FIGURES):
        yield ""
        yield f"**{PAPERS[paper]}** ({paper})"
        yield ""
        yield from head("figure", "what the paper shows", "here", "remark")
        for one in FIGURES:
            if one.paper == paper:
                yield line(one.name, one.shows, _counterpart(one, found), one.remark)
    yield ""


def _counterpart(figure: PaperFigure, found: list[Reproduction]) -> str:
    """Return links to the experiments that draw a figure, and to its pictures."""
    links = []
    for one in found:
        if one.experiment.id == figure.experiment:
            pictures = [f"[picture]({picture(one, plot)})" for plot in figure.among(one.plots)]
            links.append(", ".join([link(one), *pictures]))
    return "; ".join(links) or (f"{figure.experiment}, not yet run" if figure.experiment else "none")


def link(one: Reproduction, page: str = "") -> str:
    """Return a link to an experiment's section, from this page or from another one, which gives the way to it."""
    return f"[{name_of(one)}]({page}#{one.experiment.id.lower()})"


def _section(one: Reproduction, rows: list[Row], laptop: list[Row]) -> Iterator[str]:
    yield f"## {one.experiment.id}"  # without the scale, so that links from other pages hold at every scale
    yield ""
    at = "" if one.scale == "laptop" else f"At {one.scale} scale. "
    yield f"{at}**{one.experiment.title}** ({one.experiment.reproduces})."
    yield " ".join(what_was_run(result) for result in one.results.values())
    yield "What differs from the paper: " + " ".join(one.experiment.differs[one.scale])
    yield ""
    beside = laptop or [None] * len(rows)
    yield from outcomes([(one, row, small) for row, small in zip(rows, beside, strict=True)])
    for plot in one.plots:
        yield f"![{plot.title}]({picture(one, plot)})"
        yield ""
        yield f"{plot.title}. {plot.caption}"
        yield ""


def outcomes(rows: Sequence[tuple[Reproduction, Row, Row | None]], page: str | None = None) -> Iterator[str]:
    """Yield a table of claims with their outcomes, one fact a cell, and below it, folded, the papers' words.

    Args:
        rows: the experiment of each claim, its row, and that at laptop scale where it stands beside.
        page: where the experiments are, with how each claim was weighed, to link each claim to its own; None in a
            table of one experiment.
    """
    said = ("", "claim", "kind", "outcome", "value, 95% interval", "networks, units")
    yield from head(*said, numbers=said[:1] + said[-1:])
    for number, (one, row, _) in enumerate(rows, 1):
        prediction, statistic = row.outcome.prediction, row.outcome.statistic
        says = f"**{prediction.says}**" if prediction.headline and page is None else prediction.says
        here = says if page is None else f"{link(one, page)}: {says}"
        yield line(
            number,
            here,
            prediction.kind,
            row.in_short,
            value_of(statistic),
            statistic.size,
        )
    yield ""
    weighed = ", and how each claim was weighed" if page is None else ""
    yield f"<details><summary>The papers' words{weighed}</summary>"
    yield ""
    yield from (
        f"{number}. {_weighed(*each) if page is None else _quoted(each[1])}" for number, each in enumerate(rows, 1)
    )
    yield ""
    yield "</details>"
    yield ""


def _weighed(one: Reproduction, row: Row, small: Row | None) -> str:
    """Return the paper's words, the statistic, what stands beside its value, and its replication."""
    outcome, again, statistic = row.outcome, row.again, row.outcome.statistic
    halves = " and ".join(half.statistic.in_words for half in row.halves)
    runs = {
        "Outcome of all units": outcome.marked if row.decided != outcome.conclusion else "",
        "Open because": row.open_because,
        "Second run": f"{again.marked} {again.statistic.in_words}, n = {again.statistic.size}" if again else "",
        "Each half of the units": halves,
        "At laptop scale": f"{small.marked} {small.outcome.statistic.in_words}" if small else "",
        "What would decide it": row.would_decide(one.hours),
    }
    said = [_quoted(row), f"{outcome.tested_as}: {_cases(outcome)}."]
    said += [f"{name}: {text}." for name, text in runs.items() if text]
    said += [f"{statistic.why}."] * bool(statistic.why)
    return " ".join(filter(None, said)).replace("..", ".")


def _quoted(row: Row) -> str:
    """Return the paper's words with their place, and the reason for a reading of ours."""
    prediction = row.outcome.prediction
    quote = f"“{prediction.quote}” " if prediction.quote else ""
    return f"{quote}({prediction.source}). {prediction.reason}".rstrip()


def _cases(outcome: Outcome) -> str:
    """Return the value with what stands beside it; of more than FEW_CASES, how many are on the predicted side."""
    statistic, prediction = outcome.statistic, outcome.prediction
    values = [part.value for part in statistic.parts.values()]
    if len(values) <= FEW_CASES:
        return both(statistic.in_words, statistic.beside)
    held = sum(value > prediction.than if prediction.side == "above" else value < prediction.than for value in values)
    said = f"{held} of {len(values)} cases are {prediction.side} {prediction.than:g}"
    return both(statistic.in_words, both(said, replace(statistic, parts={}).beside))


def value_of(statistic: Statistic) -> str:
    """Return the value with its interval; "not run" where no network has what the claim is about."""
    return statistic.in_words if statistic.n else "not run"


def name_of(one: Reproduction) -> str:
    """Return what links call an experiment: its identifier, and the scale where that is not laptop."""
    return one.experiment.id if one.scale == "laptop" else f"{one.experiment.id} at {one.scale} scale"


def _stem(one: Reproduction, plot: Plot) -> str:
    return f"{name_of(one)}-{plot.name}".replace(" ", "_")


def picture(one: Reproduction, plot: Plot) -> str:
    """Return the path of a figure's file, from the page; an SVG, unless only a PNG was small enough."""
    png = PICTURES / f"{_stem(one, plot)}.png"
    return (png if (HERE / png).is_file() else png.with_suffix(".svg")).as_posix()


def _versions(found: list[Reproduction]) -> Iterator[str]:
    seen = {", ".join(f"{k} {v}" for k, v in r.versions.items()) for one in found for r in one.results.values()}
    yield f"Computed with {'; and '.join(sorted(seen))}."
    yield ""


def both(first: str, second: str) -> str:
    """Return two texts for one cell, of which the second may be empty."""
    return f"{first}; {second}" if second else first


def line(*cells: object) -> str:
    """Return one row of a Markdown table."""
    plain = [str(cell).replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(plain)} |"


def head(*columns: str, numbers: Collection[str] = ()) -> Iterator[str]:
    """Yield the two lines above the rows of a Markdown table; the columns of `numbers` stand to the right."""
    yield line(*columns)
    yield line(*("---:" if column in numbers else "---" for column in columns))


def draw(found: list[Reproduction], into: Path) -> None:
    """Write every figure of every experiment: an SVG, or a PNG where that would be larger than LARGEST.

    Raises:
        BadFolder: together they take more than MOST.
    """
    into.mkdir(parents=True, exist_ok=True)
    kept = set()
    for one in found:
        for plot in one.plots:
            svg = compact(svg_of(plot_figure(plot, one.results), DRAWN_COLOURS))
            small = len(svg.encode()) <= LARGEST
            at = into / f"{_stem(one, plot)}.{'svg' if small else 'png'}"
            at.write_bytes(svg.encode() if small else small_png(svg, LARGEST))
            kept.add(at)
    for old in set(into.iterdir()) - kept:
        old.unlink()
    if (total := sum(at.stat().st_size for at in kept)) > MOST:
        raise BadFolder(f"the pictures take {total:,} bytes, more than the {MOST:,} that docs/ may hold: draw fewer")


def keep(runs: Path, into: Path) -> None:
    """Write an archive of each experiment in `runs` that has run to the end; twice, where its scale asks for that."""
    into.mkdir(parents=True, exist_ok=True)
    for folder in sorted(filter(is_reproduction, runs.iterdir())):
        try:
            found = load_reproduction(folder)
        except BadFolder:  # stopped before all of its studies had begun
            continue
        if not found.unfinished and (found.second or found.scale != "laptop"):
            save_archive(found, into / archive_name(found.experiment.id, found.scale))


def load_all() -> list[Reproduction]:
    """Return all experiments whose tables are kept."""
    torch.set_num_threads(1)  # X16 draws thousands of small data sets again
    named = [HERE / TABLES / archive_name(name, scale) for name in EXPERIMENTS for scale in SCALES]
    return [load_archive(path) for path in named if path.is_file()]
