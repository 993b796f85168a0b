"""The tables and pictures in docs/papers/*.md, from the stored tables of the experiments: `python docs/papers.py`.

Each page is written by hand, but for the lines between `<!-- results -->` and `<!-- end -->`, which this replaces. Run
`python docs/atlas.py > docs/atlas.md` before: it draws the pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import atlas
import numpy as np
import pandas as pd
from scipy.stats import t as student

from flatlens.experiments.quantities import GAP
from flatlens.experiments.result import StudyResult
from flatlens.experiments.tables import kinds_of, without_seeds
from flatlens.papers import EXPERIMENTS
from flatlens.papers.evidence import Table, correlated, independent, studied
from flatlens.papers.experiment import Outcome, Prediction, Results
from flatlens.papers.figures import FIGURES, PaperFigure
from flatlens.papers.reparam2019 import lenets
from flatlens.papers.reproduction import Reproduction
from flatlens.papers.summary import DISCOVERY, SURVIVES, Row, rows_of
from flatlens.report.prose import what_was_run
from flatlens.statistics import Statistic, benjamini_hochberg
from flatlens.statistics.inference import MOST_GROUPS
from flatlens.statistics.relations import relate_within

FOLDER = Path(__file__).parent / "papers"
BEGIN, END = "<!-- results -->", "<!-- end -->"
ALL = "index"
"""Name of the page over all papers; the others are called as their paper."""
ATLAS = "../atlas.md"
FEW_CASES = 4
ONE_NAME = {"Jacobian norm of softmax": "Jacobian norm, softmaxed"}
"""What one quantity is called in some studies, and on the page over all papers."""


def of_paper(paper: str, found: list[Reproduction], rows: list[list[Row]]) -> Iterator[str]:
    """Yield the main claims with their outcomes, the counts of all rows, and each figure with its counterpart."""
    own = [(one, mine) for one, mine in zip(found, rows, strict=True) if one.experiment.paper == paper]
    ran = {one.experiment.id for one, _ in own}
    yield from atlas.head(
        "main claim, in the paper's words",
        "prediction",
        "kind",
        "outcome",
        "value, 95% interval",
        "second run, or halves",
        "networks, units",
        numbers=("networks, units",),
    )
    for one, mine in own:
        yield from (_main_claim(one, row) for row in mine if row.outcome.prediction.headline)
    for experiment in EXPERIMENTS.values():
        if experiment.paper == paper and experiment.id not in ran:
            for prediction in filter(lambda each: each.headline, experiment.predictions):
                here = f"{experiment.id}: {prediction.says}"
                yield atlas.line(_said(prediction), here, prediction.kind, "not yet run", "", "", "")
    yield ""
    yield "Of all rows, by kind:"
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


def _main_claim(one: Reproduction, row: Row) -> str:
    prediction, statistic = row.outcome.prediction, row.outcome.statistic
    here = f"{atlas.link(one, ATLAS)}: {prediction.says} {prediction.reason}".rstrip()
    value = atlas.both(f"{row.outcome.tested_as}: {statistic.in_words}", _beside(row.outcome))
    again = f"{row.again.marked} {row.again.statistic.in_words}" if row.again else ""
    if row.halves:
        again = " and ".join(half.statistic.in_words for half in row.halves) + ", each half of the units"
    decided = atlas.both(row.marked, row.would_decide(one.hours))
    return atlas.line(_said(prediction), here, prediction.kind, decided, value, again, statistic.size)


def _beside(outcome: Outcome) -> str:
    """Return what stands beside the value; of more than four cases, how many are on the predicted side."""
    statistic, prediction = outcome.statistic, outcome.prediction
    values = [part.value for part in statistic.parts.values()]
    if len(values) <= FEW_CASES:
        return statistic.beside
    held = sum(value > prediction.than if prediction.side == "above" else value < prediction.than for value in values)
    said = f"{held} of {len(values)} cases are {prediction.side} {prediction.than:g}: each is in the atlas"
    return "; ".join(part for part in (replace(statistic, parts={}).beside, said) if part)


def _said(prediction: Prediction) -> str:
    return f"“{prediction.quote}” ({prediction.source})"


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


@dataclass(frozen=True)
class Relation:
    """How a measure goes with the gap among the networks of one study, in each of its runs."""

    measure: str
    where: str  #: link to the experiment, and the study's name
    overall: tuple[Statistic, ...]  #: rank correlation over all networks, of each run
    within: tuple[Statistic, ...]
    """Pearson's r among networks of equal settings, of each run; empty where nothing but the seed differs."""


def over_all(found: list[Reproduction]) -> Iterator[str]:
    """Yield counts for each measure, a table of each measure with the gap in each population, and what was run."""
    relations = [each for one in found for name in one.results for kind in _kinds(one, name) for each in
                 _relations(*kind, name)]  # fmt: skip
    relations.sort(key=lambda each: (each.measure, each.where))
    rates = benjamini_hochberg(np.array([_p(runs) for each in relations for runs in (each.overall, each.within)]))
    yield from _counts(relations)
    yield "Each population:"
    yield ""
    yield from atlas.head("measure", "population", "networks, units", "rank correlation with the gap", "second run",
                          "goes with the gap", "within equal settings", "second run", "goes with the gap",
                          numbers=("networks, units",))  # fmt: skip
    for each, (overall, within) in zip(relations, rates.reshape(-1, 2), strict=True):
        yield atlas.line(each.measure, each.where, each.overall[0].size, *_cells(each.overall, overall),
                         *_cells(each.within, within))  # fmt: skip
    yield ""
    survives = (
        f"A sign with {SURVIVES} survives Benjamini and Hochberg's correction at {DISCOVERY:.0%} over both columns."
    )
    yield f"{len(relations)} rows. {survives}"
    yield ""
    yield "The networks:"
    yield ""
    for one in found:
        for name, result in one.results.items():
            if not result.gap_correlations.empty:
                yield f"- {_where(one, name)}: {what_was_run(result)}"
    yield ""


def _cells(runs: tuple[Statistic, ...], rate: float) -> tuple[str, str, str]:
    """Return the correlation of the first run, that of the second, and the sign on which they agree."""
    words = [run.in_words for run in runs]
    first, second = (*words, "", "")[:2]
    return first, second, f"{_sign(runs)}{f' {SURVIVES}' * bool(rate <= DISCOVERY)}"


def _counts(relations: list[Relation]) -> Iterator[str]:
    """Yield in how many populations a measure goes with the gap, overall and within equal settings."""
    signs = ("+", "−", "?")
    numbers = ("populations", *signs, *(f"within equal settings: {sign}" for sign in signs))
    yield from atlas.head("measure", *numbers, numbers=numbers)
    for measure, group in groupby(relations, key=lambda each: each.measure):
        mine = list(group)
        overall = [_sign(each.overall) for each in mine]
        within = [_sign(each.within) for each in mine if each.within]
        yield atlas.line(measure, len(mine), *(found.count(sign) for found in (overall, within) for sign in signs))
    yield ""


def _kinds(one: Reproduction, name: str) -> Iterator[tuple[Reproduction, str]]:
    """Yield an experiment with the networks of each kind in a study, and the kind in words, "" if there is one."""
    kinds = kinds_of(one.results[name].networks)
    if kinds.nunique() == 1:
        yield one, ""
        return
    for kind in dict.fromkeys(kinds):
        results, second = (
            {name: _only(runs[name], kind)} if name in runs else {} for runs in (one.results, one.second)
        )
        yield replace(one, results=results, second=second), kind


def _only(result: StudyResult, kind: str) -> StudyResult:
    keys = set(result.networks.loc[kinds_of(result.networks) == kind, "key"])
    networks, values = (
        table[table["key"].isin(keys)].reset_index(drop=True) for table in (result.networks, result.values)
    )
    return replace(result, networks=networks, values=values)


def _relations(one: Reproduction, kind: str, name: str) -> Iterator[Relation]:
    runs = [results[name] for results in (one.results, one.second) if name in results]
    known = runs[0].gap_correlations
    within = [_within(run) for run in runs]
    ranks = known[(known["coefficient"] == "Spearman rho") & (known["n"] > 0)]
    for measure in ranks["quantity"].unique():
        overall = correlated(_in_units(one, name), measure, GAP.name, "spearman")
        yield Relation(
            ONE_NAME.get(measure, measure),
            f"{_where(one, name)} {kind}".strip(),
            tuple(overall({name: run}) for run in runs),
            tuple(each[measure] for each in within if measure in each),
        )


def _in_units(one: Reproduction, name: str) -> Table:
    """Return the networks of a study with their units: those of X14 are four schemes, as in its own rows."""
    if one.experiment.id != "X14":
        return studied(name)

    def found(results: Results) -> pd.DataFrame:
        init = lenets(results).set_index("key")["init"]
        return studied(name)(results).assign(scheme=lambda table: table["key"].map(init))

    return independent(found, "scheme")


def _within(result: StudyResult) -> Mapping[str, Statistic]:
    """Return, by measure, r with the gap once the means of each group of equal settings are taken off."""
    settings = without_seeds(result.networks, result.varied)
    used = result.values["included"].astype(bool)
    if settings.empty or GAP.name not in result.values:
        return {}
    group = settings.agg(" ".join, axis=1)[used]
    measures = [quantity.name for quantity in result.quantities if quantity.name in result.values]
    table = relate_within(result.values[measures][used], GAP.name, {"settings": group}, result.networks["seed"][used])
    return {
        row["x"]: Statistic("r", row["pearson"], int(row["n"]), row["pearson_low"], row["pearson_high"],
                            _p_of(row), units=int(row["units"]))
        for _, row in table.iterrows()
    }  # fmt: skip


def _p_of(row: pd.Series) -> float:
    """Return the two-sided p of a correlation, from its interval: Student's t on Fisher's scale."""
    low, value, high = np.arctanh(row[["pearson_low", "pearson", "pearson_high"]].to_numpy(dtype=float))
    degrees = min(int(row["units"]), MOST_GROUPS) - 1
    return float(2 * student.sf(abs(value) / ((high - low) / 2) * student.ppf(0.975, degrees), degrees))


def _sign(runs: tuple[Statistic, ...]) -> str:
    """Return the sign of a correlation whose interval excludes 0 in each run; empty where there is no run."""
    signs = {"+" if run.low > 0 else "−" if run.high < 0 else "?" for run in runs}  # NaN is "?", too
    return signs.pop() if len(signs) == 1 else "?" if signs else ""


def _p(runs: tuple[Statistic, ...]) -> float:
    """Return the largest p of the runs, if their signs agree; else 1. NaN where there is no run, or one has no p."""
    if not runs:
        return np.nan
    return float(np.max([run.p for run in runs])) if _sign(runs) != "?" else 1.0


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
