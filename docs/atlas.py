"""The gallery of reproductions, docs/atlas.md, and its pictures in docs/images/atlas/; reproductions.py writes both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
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
    known_studies,
    load_archive,
    load_reproduction,
    save_archive,
)
from flatlens.papers.summary import Row, by_chance, counted_by_kind, of_papers, rows_of
from flatlens.progress import count_of
from flatlens.report.figures.plots import DRAWN_COLOURS, plot_figure
from flatlens.report.page import svg_of
from flatlens.report.prose import what_was_run
from flatlens.statistics import Statistic

HERE = Path(__file__).parent
TABLES = Path("tables")
PICTURES = Path("images") / "atlas"
CLAIMS = Path("claims")
FEW_CASES = 4  #: cases whose values are all shown
LARGEST, MOST = 60_000, 4_000_000
"""Bytes of one picture, and of all of them, at most."""
FIGURES_SAID = """\
Every figure and table of the four papers, with the picture here that has its panels and its lines. Axes are
logarithmic where the paper says so; where it does not say, those of positive values over more than a decade are.
Curves are means, and bands one standard deviation to either side, as in the first two papers; those of Fig. 3 and 4 of
relative2021, which say nothing of theirs, are 95% intervals."""

N_IS = (
    "*n*: networks, or pairs or series of them where these are compared. Of a claim about several cases, value and *n* "
    "are those of the case that decides."
)
INTRODUCTION = f"""\
# Atlas: outcomes of the papers' figures and claims

Each experiment at the largest scale that has run: desk, with the papers' data, or laptop. `python
docs/reproductions.py` makes this page, its pictures and files from the tables in [docs/tables](tables) in some minutes,
without training.

- *Reproduced*: the whole 95% interval of the statistic lies on the side that the paper predicts. *Not reproduced*: all
  of it lies on the other side. *At most weak*: the whole interval of a correlation lies between -{WEAK:g} and {WEAK:g}.
  *Depends on the reading*: reproduced in one reading of the text, and not in another. Otherwise *open*.
- A correlation is decided only if that of ranks agrees, a claim about all cases only by all of them, and one about some
  case after Holm's correction.
- A row is decided only if its replication agrees: a second run ({IN_WORDS}) or,
  at desk scale, each half of the units.
- Intervals are over independent units, such as seeds; fewer than 6 decide nothing
  ([how predictions are weighed](reproducing.md#outcomes), [error rates](sizes.md)).
- {N_IS}
- A *theorem* is proved, and checks the code; a *claim* is a sentence of the paper; a *reading* is ours, with its
  reason; a *number* is printed in the paper; a *variation* is the sentence about networks of a protocol that neither
  the text nor the authors' code has. Main claims are bold.
"""
NOT_COUNTED = {"theorem": "of theorems, which check the code", "variation": "of protocols that no paper has"}
"""Why rows of a kind are no outcomes of a paper."""


def page(stored: list[Reproduction]) -> str:
    """Return the whole page as Markdown."""
    found, _ = apart(stored)
    rows = rows_of(found)
    every = [row for each in rows for row in each]
    sections = [text for one, mine in zip(found, rows, strict=True) for text in _section(one, mine)]
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
    yield "The papers' sentences, by kind. One that is reproduced by a row and not by another depends on the reading,"
    yield "or on the networks; else one with several rows counts once, as the row that is worst for it."
    each = Counter(row.outcome.prediction.kind for row in rows)
    said = [f"{count_of(each[kind], 'row')} {why}" for kind, why in NOT_COUNTED.items() if each[kind]]
    if said:
        yield f"Not counted: {'; '.join(said)}."
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
        yield line(link(one), one.experiment.title, one.experiment.reproduces, one.networks, *_counts(mine).values())
    yield ""


def _counts(rows: list[Row]) -> dict[str, int]:
    return {conclusion: sum(row.decided == conclusion for row in of_papers(rows)) for conclusion in MARKS}


def _figures(found: list[Reproduction]) -> Iterator[str]:
    """Yield the list of the papers' figures and tables, each with its counterpart."""
    yield "## Each figure and table of the papers"
    yield ""
    yield FIGURES_SAID
    yield ""
    for paper in dict.fromkeys(one.paper for one in FIGURES):
        yield from folded(f"{PAPERS[paper]} ({paper})", _figures_of(paper, found))


def _figures_of(paper: str, found: list[Reproduction]) -> Iterator[str]:
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


def _section(one: Reproduction, rows: list[Row]) -> Iterator[str]:
    """Yield one screen: counts, main claims and the first picture; the rest is folded, or a file."""
    experiment, plots = one.experiment, one.plots
    every = [(one, row) for row in rows]
    main = [(one, row) for row in rows if row.outcome.prediction.headline]
    yield f"## {experiment.id}"  # without the scale, so that links from other pages hold at every scale
    yield ""
    at = "" if one.scale == "laptop" else f", at {one.scale} scale"
    yield f"**{experiment.title}** ({experiment.reproduces}){at}: {count_of(one.networks, 'network')};"
    yield ", ".join(f"{count} {conclusion}" for conclusion, count in _counts(rows).items() if count) + "."
    yield f"[How each row was weighed]({file_of_claims(one)}), with the paper's words: a table to download."
    yield ""
    if main and len(main) < len(every):
        yield from outcomes(main)
    for plot in plots[:1]:
        yield from _drawn(one, plot)
    ran = [each for each in every if each[1].outcome.statistic.n]
    waiting = f", {len(every) - len(ran)} more wait for networks" * (len(ran) < len(every))
    yield from folded(f"{count_of(len(ran), 'row')}{waiting}", outcomes(ran))
    yield from folded("What was run, and what differs from the paper", _protocol(one))
    if plots[1:]:
        yield from folded(
            f"{count_of(len(plots) - 1, 'more picture')}", (s for plot in plots[1:] for s in _drawn(one, plot))
        )


def folded(summary: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield lines that a reader unfolds."""
    yield f"<details><summary>{summary}</summary>"
    yield ""
    yield from lines
    yield "</details>"
    yield ""


def _drawn(one: Reproduction, plot: Plot) -> Iterator[str]:
    yield f"![{plot.title}]({picture(one, plot)})"
    yield ""
    yield f"{plot.title}. {plot.caption}"
    yield ""


def _protocol(one: Reproduction) -> Iterator[str]:
    yield " ".join(what_was_run(result) for result in one.results.values())
    yield ""
    yield "What differs from the paper: " + " ".join(one.experiment.differs[one.scale])
    yield ""
    if one.experiment.protocol:
        yield f"[Every setting beside the paper's](papers/settings.md#{one.experiment.id.lower()})."
        yield ""


def outcomes(rows: Sequence[tuple[Reproduction, Row]], page: str | None = None) -> Iterator[str]:
    """Yield a table of claims with their outcomes, one fact a cell.

    Args:
        rows: the experiment of each claim, and its row.
        page: where the experiments are: each claim has a link to its own, and the papers' words are folded below; None
            in a table of one experiment.
    """
    said = ("claim", "kind", "outcome", "value, 95% interval", "n, units")
    yield from head(*said, numbers=said[-1:])
    for one, row in rows:
        prediction, statistic = row.outcome.prediction, row.outcome.statistic
        says = f"**{prediction.says}**" if prediction.headline and page is None else prediction.says
        here = says if page is None else f"{link(one, page)}: {says}"
        yield line(here, prediction.kind, row.in_short, value_of(statistic), statistic.size)
    yield ""
    if page is not None:
        yield from folded("The papers' words", [*(f"- {_quoted(row)}" for _, row in rows), ""])


def file_of_claims(one: Reproduction) -> str:
    """Return the path of the file that says how each claim of an experiment was weighed, from the page."""
    return (CLAIMS / f"{one.experiment.id}.csv").as_posix()


def write_claims(stored: list[Reproduction], into: Path) -> None:
    """Write a CSV for each experiment: every claim with the paper's words, its statistic and its replication."""
    found, laptops = apart(stored)
    into.mkdir(parents=True, exist_ok=True)
    for one, rows in zip(found, rows_of(found), strict=True):
        beside = laptops.get(name_of(one)) or [None] * len(rows)
        records = [_record(one, row, small) for row, small in zip(rows, beside, strict=True)]
        pd.DataFrame(records).to_csv(into / f"{one.experiment.id}.csv", index=False, lineterminator="\n")


def _record(one: Reproduction, row: Row, small: Row | None) -> dict[str, object]:
    """Return a claim with the paper's words, the statistic, what stands beside its value, and its replication."""
    outcome, again, statistic = row.outcome, row.again, row.outcome.statistic
    prediction = outcome.prediction
    halves = " and ".join(half.statistic.in_words for half in row.halves)
    return {
        "claim": prediction.says,
        "main claim": "yes" if prediction.headline else "no",
        "kind": prediction.kind,
        "outcome": row.in_short,
        "value, 95% interval": value_of(statistic),
        "n, units": statistic.size,
        "the paper's words": prediction.quote,
        "source": prediction.source,
        "why so": prediction.reason,
        "tested": prediction.value_is or outcome.tested_as,
        "values": _cases(outcome),
        "outcome of all units": outcome.marked if row.decided != outcome.conclusion else "",
        "open because": row.open_because,
        "second run": f"{again.marked} {again.statistic.in_words}, n = {again.statistic.size}" if again else "",
        "each half of the units": halves,
        "at laptop scale": f"{small.marked} {value_of(small.outcome.statistic)}" if small else "",
        "what would decide it": row.would_decide(one.hours(outcome)),
        "not run": prediction.not_run,
        "remark": statistic.why,
    }


def _quoted(row: Row) -> str:
    """Return the paper's words with their place, and the reason for a reading of ours."""
    prediction = row.outcome.prediction
    quote = f"“{prediction.quote}” " if prediction.quote else ""
    return " ".join(filter(None, [f"{quote}({prediction.source}).", prediction.reason, prediction.not_run]))


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
    """Write an archive of each experiment in `runs`: at laptop scale once both runs have ended, else study by study."""
    into.mkdir(parents=True, exist_ok=True)
    for folder in sorted(filter(is_reproduction, runs.iterdir())):
        try:
            found = load_reproduction(folder, ended=True)
        except BadFolder:  # stopped before one of its studies had ended
            continue
        experiment, scale = found.experiment, found.scale
        if scale == "laptop" and not (found.second and found.results.keys() == experiment.studies(scale).keys()):
            continue
        known = {} if scale == "laptop" else known_studies(experiment, scale, into)
        save_archive(replace(found, results={**known, **found.results}), into / archive_name(experiment.id, scale))


def load_all() -> list[Reproduction]:
    """Return all experiments whose tables are kept."""
    torch.set_num_threads(1)  # X16 draws thousands of small data sets again
    named = [HERE / TABLES / archive_name(name, scale) for name in EXPERIMENTS for scale in SCALES]
    return [load_archive(path) for path in named if path.is_file()]
