"""Figures as files and as JSON, the templates of all pages, and the page of a study.

A page is one HTML file that needs no network, with its figures and their data beside it.
"""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import files as package_files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatlens.bounds import Bound
from flatlens.column import Column
from flatlens.errors import needs
from flatlens.estimate import Progress
from flatlens.experiments.narrative import closest
from flatlens.experiments.overrides import IDENTITY
from flatlens.experiments.store import digest_of, read_derived, write_derived
from flatlens.files import csv_of, write_whole
from flatlens.measures import Card, catalogue
from flatlens.progress import beside, by_key
from flatlens.report import blocks, prose
from flatlens.report.cards import MOVES, card_of, invariances_of, spelling
from flatlens.report.figures import GAP_PANELS, Figure, Grid, study_figures
from flatlens.report.figures.figure import MODES, in_page, level_colours, theme
from flatlens.report.figures.offline import bundle
from flatlens.report.figures.plots import crossed
from flatlens.report.frames import NOT_MEASURES, measures_of, spoken
from flatlens.report.screen import Abouts, head_of_page
from flatlens.statistics.group_differences import SIGNIFICANCE
from flatlens.training import REACHED

with needs("study", "a page"):
    import vl_convert
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

if TYPE_CHECKING:
    from flatlens.experiments import StudyResult

PAGE = "report.html"
TABLES = ("table.csv", "relations.csv", "gap.csv", "differences.csv", "study.json")
"""Files that the study writes, which the page links where they are."""


def svg_of(figure: Figure, colours: int = 1) -> str:
    """Return the picture as the text of an SVG file, in light colours; `colours` as for `theme`."""
    return _svg(figure.spec, colours)


def _svg(spec: Mapping[str, Any], colours: int = 1) -> str:
    text = json.dumps({"$schema": "https://vega.github.io/schema/vega-lite/v6.json", **spec})
    svg: str = vl_convert.vegalite_to_svg(text, config=theme("light", colours), allowed_base_urls=[])
    return svg


def write_figures(drawn: Sequence[tuple[Figure, Path]], colours: int, progress: Progress | None = None) -> list[Path]:
    """Write `folder/<name>.svg`, `.pdf`, `.png` and `.csv` of every figure: the picture three times, and its data."""
    written = []
    for done, (figure, folder) in enumerate(drawn):
        if progress:
            progress("drawing figures", done, len(drawn))
        folder.mkdir(parents=True, exist_ok=True)
        svg = svg_of(figure, colours)
        # two pixels a point are sharp on a phone and in print; a picture of hundreds of panels has fewer, as it must
        # not take gigabytes
        sides = [float(svg.split(f' {side}="', 1)[1].split('"', 1)[0]) for side in ("width", "height")]
        scale = min(2, 6000 / max(*sides, 1.0))
        pdf, png = vl_convert.svg_to_pdf(svg), vl_convert.svg_to_png(svg, scale=scale)
        contents: dict[str, bytes | str] = {"svg": svg, "pdf": pdf, "png": png, "csv": csv_of(figure.data)}
        written += [write_whole(folder / f"{figure.name}.{kind}", content) for kind, content in contents.items()]
    return written


def script_json(value: Any) -> str:
    r"""Return JSON that may stand inside a script element: no character in it can end the element or open a comment.

    >>> script_json({"name": "</script>"})
    '{"name":"\\u003c/script\\u003e"}'
    """

    def without_nan(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(k): without_nan(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [without_nan(v) for v in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    text = json.dumps(without_nan(value), separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


@lru_cache(maxsize=1)  # compiles the templates once
def environment() -> Environment:
    """Return the environment of the page templates, with the filters they use."""
    environment = Environment(
        loader=PackageLoader("flatlens.report"),
        autoescape=select_autoescape(["html", "j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = package_files("flatlens.report").joinpath("templates", "groups.js").read_text(encoding="utf-8")
    environment.globals["script"] = script  # the only one that a page of a single network or a comparison may run
    environment.globals["script_hash"] = f"sha256-{b64encode(sha256(script.encode()).digest()).decode()}"
    for function in (
        blocks.summed_up, blocks.by_reason, crossed, prose.shown, prose.exact, prose.breakable, prose.threshold,
        prose.coded, prose.quoted, prose.what_was_run,
    ):  # fmt: skip
        environment.filters[function.__name__] = function
    return environment


def write_page(
    template: str,
    path: Path,
    abouts: Abouts,
    *,
    answer: Sequence[str] = (),
    figures: Sequence[Figure] = (),
    cards: Mapping[str, Card | Bound] | None = None,
    **facts: Any,
) -> Path:
    """Write the page of networks or of a run: what was measured, the figures, what the names mean, the facts."""
    html = environment().get_template(f"{template}.html.j2").render(
        about=next(iter(abouts.values()), None),
        answer=answer,
        figures=[(figure, [in_page(_svg(spec)) for spec in figure.drawn_apart]) for figure in figures],
        cards=cards or {},
        papers=prose.cited(card.source for card in (cards or {}).values()),
        **head_of_page(abouts) | facts,
    )  # fmt: skip
    return write_whole(path, html)


def drawing_page(template: str, specs: Mapping[str, Any], colours: int, **facts: Any) -> str:
    """Return the text of a page that draws charts itself, from their Vega-Lite JSON by slot."""
    return environment().get_template(f"{template}.html.j2").render(
        specs=script_json(specs),
        themes=script_json({mode: theme(mode, colours) for mode in MODES}),
        bundle=bundle(),
        **facts,
    )  # fmt: skip


_DRAWN = "drawn.json"


def write_study_page(
    result: StudyResult, out: Path, *, again: bool = False, progress: Progress | None = None
) -> list[Path]:
    """Write `out/report.html` and `out/figures/`, and return the files, the page first.

    The same result gives the same page, byte for byte. What is there, and was drawn from the same result, stays as it
    is, unless it is asked for `again`.
    """
    progress, out = beside(progress), Path(out)
    tables = [name for name in TABLES if (out / name).exists()]
    of = digest_of(*vars(result).values(), tables, *map(version, ("altair", "vl-convert-python")))
    there = read_derived(out / _DRAWN, of)
    files = [out / name for name in (there or {}).get("files", ())]
    if there is not None and not again and all(map(Path.is_file, files)):
        return files
    (out / "figures").mkdir(parents=True, exist_ok=True)
    figures = study_figures(result)
    drawn = [(figure, out / "figures") for figure in figures]
    written = write_figures(drawn, Grid.of(result).known_colours, progress)
    page = write_whole(out / PAGE, study_html(result, figures, catalogue(), tables))
    files = [page, *written]
    write_derived(out / _DRAWN, of, {"files": [file.relative_to(out).as_posix() for file in files]})
    if progress:
        progress("drawing figures", len(figures), len(figures))
    return files


def study_html(
    result: StudyResult, figures: Sequence[Figure], cards: Sequence[Card], tables: Sequence[str] = TABLES
) -> str:
    """Return the page's text; `tables` are the files beside it that it may link."""
    grid, networks = Grid.of(result), result.networks
    names = [q.name for q in measures_of(result)]
    best = closest(names, result.gap_correlations)
    panels = next((f for f in figures if f.name == GAP_PANELS and len(f.panels) == len(names)), None)
    # the correlations with the gap by kind, measure and coefficient: sure if the interval excludes zero
    against: dict[str, dict[str, dict[str, dict[Any, Any]]]] = {}
    sure = (result.gap_correlations["low"] > 0) | (result.gap_correlations["high"] < 0)
    for row in result.gap_correlations.assign(sure=sure).to_dict("records"):
        against.setdefault(row["kind"], {}).setdefault(row["quantity"], {})[row["coefficient"]] = row
    # the differences by axis of words, those that decide first: sure where Holm's p is below 5%
    table = result.differences.sort_values("decides", ascending=False, kind="stable")
    differences = by_key(
        (row["setting"], row) for row in table.assign(sure=table["p_holm"] < SIGNIFICANCE).to_dict("records")
    )
    # a value of one layer is hidden until the reader shows its column
    columns = [
        {"name": name, "by_layer": Column.parse(name).layer is not None, "numeric": networks[name].dtype.kind in "iuf"}
        for name in map(str, networks.columns)
    ]
    measured: list[dict[str, Any]] = [
        {"name": name, "meaning": card.meaning, "source": card.source, "invariance": invariances_of(name, card)}
        for name in dict.fromkeys(map(spelling, map(str, networks.columns)))
        if (card := card_of(name, cards)) and name not in NOT_MEASURES
    ]
    return drawing_page(
        "study",
        {f"{f.name}-{i}": spec for f in figures for i, spec in enumerate(f.panel_specs)},
        grid.known_colours,
        title=f"Flatness, compression and generalisation: {result.settings.get('name', 'study')}",
        summary=prose.what_was_run(result),
        answer=result.answer,
        picture=None if best is None or panels is None else f"{GAP_PANELS}-{names.index(best)}",
        findings=result.findings,
        caveats=prose.caveats(result),
        figures=figures,
        grid=grid,
        reached=REACHED,
        searched=[name for name in dict.fromkeys([*IDENTITY[1:], *result.varied]) if name in networks],
        spoken=spoken,
        swatches={mode: level_colours(grid.known_colours, mode) for mode in MODES},
        shapes=[prose.SIGNS_OF_SHAPES[shape] for shape in grid.signs],
        against=against,
        differences=differences,
        measures=measured,
        moves=[in_words for _, _, in_words in MOVES],
        papers=prose.cited(row["source"] for row in measured),
        columns=columns,
        rows=networks[[c["name"] for c in columns]].to_dict("records"),
        settings=prose.flatten(result.settings),
        versions=result.versions,
        excluded=result.excluded,
        failed=result.failed,
        tables=tables,
    )
