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
from flatlens.papers.summary import by_chance, counted_by_kind, of_papers, rows_of
from flatlens.report import prose
from flatlens.report.figures.figure import MODES, Figure, ordered_colours
from flatlens.report.figures.plots import DRAWN_COLOURS, plot_figure
from flatlens.report.page import PAGE, drawing_page, write_figures

if TYPE_CHECKING:
    from flatlens.papers.reproduction import Reproduction


def write_atlas(
    found: Sequence[Reproduction], out: Path, folders: Sequence[Path], *, progress: Progress | None = None
) -> list[Path]:
    """Write `out/report.html`, and the figures of each experiment into `figures/` in its folder below `out`.

    Return the files written, the page first.
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
    rows: list[dict[str, Any]] = [
        {
            "found": one,
            "experiment": one.experiment,
            "answer": answer_of_claims([one]) if len(found) > 1 else (),
            "differs": one.experiment.differs.get(one.scale, ()),
            "protocol": one.experiment.protocol_table if one.scale == "desk" else (),
            "predicted": predicted,
            "counts": Counter(row.decided for row in of_papers(predicted)),
            "figures": figures,
            "place": "" if place == "." else f"{place}/",
        }
        for one, predicted, figures, place in zip(found, summary, drawn, places, strict=True)
    ]
    every = [row for each in summary for row in each]
    experiments = [one.experiment for one in found]
    claims = [prediction.source for experiment in experiments for prediction in experiment.predictions]
    only = experiments[0]
    return drawing_page(
        "atlas",
        {
            f"{one.id}-{figure.name}-{i}": spec
            for one, figures in zip(experiments, drawn, strict=True)
            for figure in figures
            for i, spec in enumerate(figure.panel_specs)
        },
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
