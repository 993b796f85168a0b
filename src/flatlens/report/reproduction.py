"""The page of an experiment, and the atlas of many: figures, claims with outcomes, settings, differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatlens.estimate import Progress
from flatlens.files import write_whole
from flatlens.papers.experiment import MARKS, WEAK
from flatlens.papers.reproduction import HALVES, IN_WORDS, answer_of_claims
from flatlens.papers.summary import Row, by_chance, counted_by_kind, of_papers, rows_of
from flatlens.report import prose
from flatlens.report.figures.figure import MODES, Figure, ordered_colours
from flatlens.report.figures.plots import plot_figure
from flatlens.report.page import PAGE, drawing_page, write_figures

if TYPE_CHECKING:
    from flatlens.papers.reproduction import Reproduction

DRAWN_COLOURS = 4  #: number of colours for lines and marks without an order


def write_atlas(
    found: Sequence[Reproduction], out: Path, folders: Sequence[Path], *, progress: Progress | None = None
) -> list[Path]:
    """Write `out/report.html`, and the figures of each experiment into its folder's `figures/`.

    Args:
        found: the experiments, one for its own page.
        out: where the page goes.
        folders: where each experiment's runs are, below `out`.
        progress: called once a figure.

    Returns:
        The files written, the page first.
    """
    drawn = [[plot_figure(plot, one.results) for plot in one.plots] for one in found]
    for folder in folders:
        (folder / "figures").mkdir(parents=True, exist_ok=True)
    files = [(figure, at / "figures") for figures, at in zip(drawn, folders, strict=True) for figure in figures]
    written = write_figures(files, DRAWN_COLOURS, progress)
    places = [folder.relative_to(out).as_posix() for folder in folders]
    page = write_whole(Path(out) / PAGE, atlas_html(found, drawn, places))
    if progress:
        progress("drawing figures", len(files), len(files))
    return [page, *written]


def atlas_html(found: Sequence[Reproduction], drawn: Sequence[Sequence[Figure]], places: Sequence[str]) -> str:
    """Return the page's text; `places` are the experiments' folders as the page links them."""
    summary = rows_of(found)
    rows = [
        _row(one, predicted, figures, "" if place == "." else f"{place}/", several=len(found) > 1)
        for one, predicted, figures, place in zip(found, summary, drawn, places, strict=True)
    ]
    every = [row for each in summary for row in each]
    experiments = [one.experiment for one in found]
    claims = [prediction.source for experiment in experiments for prediction in experiment.predictions]
    only = experiments[0]
    return drawing_page(
        "atlas",
        {slot: spec for row in rows for slot, spec in row["specs"].items()},
        DRAWN_COLOURS,
        title=f"{only.id}: {only.title}" if len(found) == 1 else "Atlas: the papers' figures and claims, reproduced",
        answer=answer_of_claims(found),
        kinds=counted_by_kind(every),
        chance=by_chance(every),
        marks=MARKS,
        weak=WEAK,
        rows=rows,
        again=IN_WORDS,
        halves=HALVES,
        papers=prose.cited([*(experiment.reproduces for experiment in experiments), *claims]),
        swatches={mode: ordered_colours(DRAWN_COLOURS, mode) for mode in MODES},
    )


def _row(
    one: Reproduction, predicted: Sequence[Row], figures: Sequence[Figure], place: str, *, several: bool
) -> dict[str, Any]:
    slots = {f"{one.experiment.id}-{f.name}-{i}": spec for f in figures for i, spec in enumerate(f.panel_specs)}
    return {
        "experiment": one.experiment,
        "scale": one.scale,
        "answer": answer_of_claims([one]) if several else (),
        "differs": one.experiment.differs.get(one.scale, ()),
        "protocol": one.experiment.protocol_table if one.scale == "desk" else (),
        "predicted": predicted,
        "again": bool(one.again),
        "halves": bool(one.halves),
        "networks": one.networks,
        "counts": Counter(row.decided for row in of_papers(predicted)),
        "studies": [_study(name, one, place) for name in one.results],
        "unfinished": one.unfinished,
        "figures": figures,
        "place": place,
        "specs": slots,
    }


def _study(name: str, one: Reproduction, place: str) -> dict[str, Any]:
    result = one.results[name]
    return {
        "name": name,
        "place": f"{place}{name}/",
        "run": prose.what_was_run(result),
        "excluded": len(result.excluded),
        "failed": len(result.failed),
        "followed": len(result.histories) > 0,
        "versions": result.versions,
    }
