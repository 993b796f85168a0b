"""The tables and pictures in docs/papers/*.md, from the stored tables of the experiments: `python docs/papers.py`.

Each page is written by hand, but for the lines between `<!-- results -->` and `<!-- end -->`, which this replaces. Run
`python docs/atlas.py > docs/atlas.md` before: it draws the pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import atlas
import numpy as np
import pandas as pd

from flatlens.experiments.quantities import GAP
from flatlens.experiments.result import StudyResult
from flatlens.experiments.vary import TOGETHER, last_field, split_values
from flatlens.papers.figures import FIGURES
from flatlens.papers.reproduce import Reproduction
from flatlens.papers.summary import DISCOVERY, SURVIVES, Row, rows_of
from flatlens.report.words import what_was_run
from flatlens.statistics import Statistic, benjamini_hochberg
from flatlens.statistics.relations import relate_within

FOLDER = Path(__file__).parent / "papers"
BEGIN, END = "<!-- results -->", "<!-- end -->"
ALL = "index"
"""Name of the page over all papers; the others are called as their paper."""
ATLAS = "../atlas.md"


def of_paper(paper: str, found: list[Reproduction], rows: list[list[Row]]) -> Iterator[str]:
    """Yield the main claims with their outcomes, the counts of all rows, and each figure with its counterpart."""
    own = [(one, mine) for one, mine in zip(found, rows, strict=True) if one.experiment.paper == paper]
    yield atlas.line("main claim, in the paper's words", "here", "decided", "value, 95% interval", "n")
    yield atlas.line("---", "---", "---", "---", "---:")
    for one, mine in own:
        for row in mine:
            if row.outcome.prediction.headline:
                yield _main_claim(one, row)
    yield ""
    yield "Of all rows, by kind:"
    yield ""
    yield from atlas.kinds([row for _, mine in own for row in mine])
    yield from _figures(paper, [one for one, _ in own])


def _main_claim(one: Reproduction, row: Row) -> str:
    prediction, statistic = row.outcome.prediction, row.outcome.statistic
    said = f"“{prediction.quote}” ({prediction.source})"
    value = atlas.both(statistic.in_words, statistic.beside)
    return atlas.line(said, f"{atlas.link(one, ATLAS)}: {prediction.says}", row.marked, value, statistic.size)


def _figures(paper: str, own: list[Reproduction]) -> Iterator[str]:
    """Yield each picture once, under the names of all figures of the paper that it stands for."""
    for one in own:
        shown = [(figure, plot) for figure in FIGURES
                 if figure.paper == paper and figure.experiment == one.experiment.id
                 for plot in figure.among(one.plots)]  # fmt: skip
        for plot, pairs in groupby(sorted(shown, key=lambda pair: pair[1].name), key=lambda pair: pair[1]):
            figures = [figure for figure, _ in pairs]
            yield f"**{', '.join(figure.name for figure in figures)}.** The paper shows {figures[0].shows}."
            yield f"Here ({atlas.link(one, ATLAS)}): {plot.title}. {plot.caption}"
            yield ""
            yield f"![{plot.title}](../{atlas.picture(one, plot)})"
            yield ""


@dataclass(frozen=True)
class Relation:
    """How a measure goes with the gap among the networks of one study."""

    measure: str
    where: str  #: link to the experiment, and the study's name
    overall: Statistic  #: rank correlation over all networks
    within: Statistic | None  #: Pearson's r among networks of equal settings; None where nothing but the seed differs


def over_all(found: list[Reproduction]) -> Iterator[str]:
    """Yield counts for each measure, a table of each measure with the gap in each population, and what was run."""
    relations = [
        each for one in found for name, result in one.results.items() for each in _relations(one, name, result)
    ]
    rates = benjamini_hochberg(np.array([each.overall.p for each in relations]))
    yield from _counts(relations)
    yield "Each population:"
    yield ""
    yield atlas.line(
        "measure", "networks", "rank correlation with the gap", "within equal settings", "n", "goes with the gap"
    )
    yield atlas.line("---", "---", "---", "---", "---:", "---")
    for each, rate in sorted(zip(relations, rates, strict=True), key=lambda pair: (pair[0].measure, pair[0].where)):
        yield atlas.line(
            each.measure, each.where, each.overall.in_words, each.within.in_words if each.within else "",
            each.overall.size, f"{_sign(each.overall)}{f' {SURVIVES}' * bool(rate <= DISCOVERY)}",
        )  # fmt: skip
    yield ""
    survives = f"A sign with {SURVIVES} survives Benjamini and Hochberg's correction at {DISCOVERY:.0%} over them."
    yield f"{len(relations)} rows. {survives}"
    yield ""
    yield "The networks:"
    yield ""
    for one in found:
        for name, result in one.results.items():
            if not result.gap_correlations.empty:
                yield f"- {_where(one, name)}: {what_was_run(result)}"
    yield ""


def _counts(relations: list[Relation]) -> Iterator[str]:
    """Yield in how many populations a measure goes with the gap, overall and within equal settings."""
    signs = ("+", "−", "?")
    yield atlas.line("measure", "populations", *signs, *(f"within equal settings: {sign}" for sign in signs))
    yield atlas.line("---", *["---:"] * 7)
    by_measure = sorted(relations, key=lambda each: each.measure)
    for measure, group in groupby(by_measure, key=lambda each: each.measure):
        mine = list(group)
        overall = [_sign(each.overall) for each in mine]
        within = [_sign(each.within) for each in mine if each.within]
        yield atlas.line(measure, len(mine), *(found.count(sign) for found in (overall, within) for sign in signs))
    yield ""


def _relations(one: Reproduction, name: str, result: StudyResult) -> Iterator[Relation]:
    known = result.gap_correlations
    within = _within(result)
    for _, row in known[(known["coefficient"] == "Spearman rho") & (known["n"] > 0)].iterrows():
        n, units = int(row["n"]), int(row["units"])
        overall = Statistic("rho", row["value"], n, row["low"], row["high"], row["p"], units=units, unit="unit")
        yield Relation(row["quantity"], _where(one, name), overall, within.get(row["quantity"]))


def _within(result: StudyResult) -> Mapping[str, Statistic]:
    """Return, by measure, r with the gap once the means of each group of equal settings are taken off."""
    settings = {name: table for name in result.varied if (table := _without_seeds(result.networks, name)) is not None}
    used = result.values["included"].astype(bool)
    if not settings or GAP.name not in result.values:
        return {}
    group = pd.DataFrame(settings).agg(" ".join, axis=1)[used]
    measures = [quantity.name for quantity in result.quantities if quantity.name in result.values]
    table = relate_within(result.values[measures][used], GAP.name, {"settings": group}, result.networks["seed"][used])
    return {
        row["x"]: Statistic("r", row["pearson"], int(row["n"]), row["pearson_low"], row["pearson_high"])
        for _, row in table.iterrows()
    }


def _without_seeds(networks: pd.DataFrame, name: str) -> pd.Series | None:
    """Return a varied setting in words, of several that vary together those but seeds; None if there is no other."""
    kept = [i for i, field in enumerate(name.split(TOGETHER)) if last_field(field) != "seed"]
    if not kept or TOGETHER not in name:
        return networks[name].astype(str) if kept else None
    return networks[name].map(lambda values: str([split_values(values)[i] for i in kept]))


def _sign(statistic: Statistic) -> str:
    """Return the sign of a correlation whose interval excludes 0."""
    return "+" if statistic.low > 0 else "−" if statistic.high < 0 else "?"  # NaN, too


def _where(one: Reproduction, name: str) -> str:
    return f"{atlas.link(one, ATLAS)}, {name.replace('_', ' ')}"


def refresh(page: str, lines: Iterator[str]) -> str:
    """Return the page with other lines between its marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return "\n".join([head + BEGIN, "", *lines, END + tail])


def main() -> None:
    """Weigh the stored tables, and write the results into every page."""
    found, _ = atlas.apart(atlas.load_all())
    rows = rows_of(found)
    for path in sorted(FOLDER.glob("*.md")):
        lines = over_all(found) if path.stem == ALL else of_paper(path.stem, found, rows)
        path.write_text(refresh(path.read_text(), lines))


if __name__ == "__main__":
    main()
