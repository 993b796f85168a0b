from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from importlib import import_module

import altair as alt
import numpy as np
import pandas as pd
import pytest
import vl_convert

from flatlens.bounds import BoundsReport, Verdict
from flatlens.progress import SideOutputFailed
from flatlens.report.bounds import write_bounds_page
from flatlens.report.figures import (
    gap_forest,
    gap_panels,
    layer_profiles,
    scatter_matrix,
    study_figures,
    training_curves,
)
from flatlens.report.figures.figure import MODES, NOT_KNOWN_GREY, Grid, log_axis, ordered_colours, theme
from flatlens.report.figures.measured import tightness_figure
from flatlens.report.page import svg_of

FIGURES = [gap_forest, gap_panels, scatter_matrix, layer_profiles, training_curves]


def text_of(drawing) -> str:
    return json.dumps(drawing.to_dict(), ensure_ascii=False)


@pytest.mark.parametrize("draw", FIGURES)
def test_every_chart_is_valid_and_compiles(draw, smoke):
    figure = draw(smoke)
    assert figure.caption
    for drawing in (figure.whole, *figure.panels):
        drawing.to_dict(validate=True)
    for spec in (figure.spec, *figure.panel_specs):
        vl_convert.vegalite_to_vega(json.dumps({**spec, "config": theme("dark", 2)}))


def test_the_page_order_and_names(smoke):
    names = [figure.name for figure in study_figures(smoke)]
    assert names == ["correlations_with_gap", "against_gap", "scatter_matrix", "layer_profiles", "training_curves"]


def test_a_panel_a_measure_with_its_coefficients(laptop):
    figure = gap_panels(laptop)
    assert len(figure.panels) == 8
    first_layer = text_of(figure.panels[6])
    assert "relative flatness, first layer" in first_layer
    assert "r = 1.00 [0.90, 1.00]" in first_layer


def test_excluded_networks_are_hollow_and_said(laptop):
    figure = gap_panels(laptop)
    assert "hollow" in figure.caption
    marks = figure.panels[0].to_dict()["layer"][1]["encoding"]
    assert marks["fillOpacity"]["condition"] == {"test": "datum.included", "value": 0.75}
    assert marks["fillOpacity"]["value"] == 0.0
    assert [
        row["included"] for rows in figure.panels[0].to_dict()["datasets"].values() for row in rows if "key" in row
    ].count(False) == 1


@pytest.mark.parametrize("draw", [gap_panels, gap_forest, scatter_matrix])
def test_a_caption_speaks_of_intervals_where_there_are_some(draw, smoke):
    none = smoke.relations.assign(pearson_low=np.nan, pearson_high=np.nan, kendall_low=np.nan, kendall_high=np.nan)
    within = smoke.within.assign(pearson_low=np.nan, pearson_high=np.nan)
    assert "95% interval" in draw(smoke).caption
    caption = draw(replace(smoke, relations=none, within=within)).caption
    assert "interval" not in caption
    assert "bar" not in caption


def test_a_caption_speaks_of_what_is_left_out_where_something_is(smoke, laptop):
    for draw, word in ((gap_panels, "hollow"), (scatter_matrix, "hollow"), (layer_profiles, "dashed if left out")):
        assert word in draw(laptop).caption
        assert word not in draw(smoke).caption


def test_the_forest_speaks_of_networks_trained_alike_where_it_shows_them(smoke):
    assert "trained alike" in gap_forest(smoke).caption
    assert "trained alike" not in gap_forest(replace(smoke, within=smoke.within[:0])).caption


def test_the_line_ignores_the_excluded(make_result):
    result = make_result(excluded=8)
    values = result.values.copy()
    values.loc[~values["included"], "MLS"] = 1e6  # far outside
    panel = gap_panels(replace(result, values=values)).panels[1].to_dict()
    ends = next(rows for rows in panel["datasets"].values() if len(rows) == 2)
    assert max(row["x"] for row in ends) < 100


def test_the_matrix_is_square_and_brushed_as_one(laptop):
    spec = scatter_matrix(laptop).whole.to_dict()
    assert spec["columns"] == 9
    assert len(spec["concat"]) == 81
    (brush,) = spec["params"]
    assert brush["select"] == {"type": "interval", "resolve": "global"}
    assert len(brush["views"]) == 36
    named = {cell["name"] for cell in spec["concat"] if "name" in cell}
    assert named == set(brush["views"])


def test_the_matrix_shows_coefficients_above_the_diagonal(laptop):
    cells = scatter_matrix(laptop).whole.to_dict()["concat"]
    assert cells[7]["mark"]["type"] == "text"  # the gap's row, the first layer's column: r = 1
    assert cells[7]["view"]["fillOpacity"] == 0.6
    assert cells[9]["mark"]["type"] == "point"


def test_each_axis_of_the_matrix_has_two_ticks_and_its_names_fit(laptop):
    cells = scatter_matrix(laptop).whole.to_dict()["concat"]
    drawn = [cell for cell in cells if cell.get("mark", {}).get("type") == "point"]
    for cell in drawn:
        for channel in ("x", "y"):
            low, high = cell["encoding"][channel]["scale"]["domain"]
            first, last = cell["encoding"][channel]["axis"]["values"]
            assert low < first < last < high
            assert last - first > 0.25 * (high - low)
    titles = [line for cell in drawn for line in cell["encoding"]["x"]["axis"]["title"] or ()]
    assert titles
    assert max(map(len, titles)) <= 14  # "generalisation" is not broken


def test_layers_run_in_execution_order_and_log_only_where_positive(laptop):
    mls, _, log_volume = (panel.to_dict() for panel in layer_profiles(laptop).panels)
    assert mls["layer"][0]["encoding"]["x"]["sort"] == ["fc1", "fc2", "fc3", "fc4"]
    assert mls["layer"][0]["encoding"]["y"]["scale"]["type"] == "log"
    assert log_volume["layer"][0]["encoding"]["y"]["scale"].get("type") is None


def test_a_panel_a_batch_size_with_the_bound(laptop):
    figure = training_curves(laptop)
    assert [panel.to_dict()["title"] for panel in figure.panels] == ["batch size 4", "batch size 16", "batch size 64"]
    assert "0.002" in figure.caption
    assert '"loss": 0.002' in text_of(figure.panels[0])


STRANGE = ["constant columns", "missing columns", "one network", "all excluded", "no layers or curves", "no network",
           "no quantities"]  # fmt: skip


@pytest.mark.parametrize("name", STRANGE)
def test_nothing_undefined_stops_a_figure(name, strange_figures):
    for figure in strange_figures[name]:
        svg = vl_convert.vegalite_to_svg(json.dumps(figure.spec), vl_version="6.4", config=theme("light", 2))
        assert svg.startswith("<svg"), figure.name
        assert "NaN" not in svg, figure.name


def unknown_settings(result, rows):
    """The study with the learning rates and batch sizes of these rows missing."""
    tables = {}
    for name in ("networks", "values", "layers"):
        table = getattr(result, name).astype({"lr": float, "batch_size": float})
        missing = table["key"].isin(result.networks["key"][rows])
        tables[name] = table.assign(lr=table["lr"].mask(missing), batch_size=table["batch_size"].mask(missing))
    return replace(result, **tables)


@pytest.mark.parametrize("draw", [gap_panels, scatter_matrix, layer_profiles])
def test_a_network_without_a_setting_is_drawn_in_grey(draw, smoke):
    svg = svg_of(draw(unknown_settings(smoke, slice(0, 2))), 2)
    assert NOT_KNOWN_GREY in svg
    assert ">not known<" in svg
    assert not re.search(r">\d+\.0<", re.sub(r"<g[^>]*role-axis-label.*?</g>", "", svg))
    assert 'fill="null"' not in svg


@pytest.mark.parametrize(("draw", "marks"), [(gap_panels, 8), (scatter_matrix, 8), (layer_profiles, 4)])
def test_with_no_setting_known_every_network_has_one_colour_and_there_is_no_legend(draw, marks, smoke):
    svg = svg_of(draw(unknown_settings(smoke, slice(None))), 0)
    assert svg.count(ordered_colours(1, "light")[0]) >= marks
    assert "not known" not in re.sub(r' aria-label="[^"]*"', "", svg)
    assert "learning rate<" not in svg


def test_levels_end_with_the_one_that_is_not_known(smoke):
    grid = Grid.of(unknown_settings(smoke, slice(0, 2)))
    assert (grid.colours, grid.shapes) == ((0.05, 0.1, "not known"), (4, 16, "not known"))
    assert all(isinstance(level, int) for level in grid.shapes[:2])  # not 4.0, which the missing ones made of them
    assert grid.signs == ["circle", "square", "triangle-right"]


@pytest.mark.parametrize(
    ("tightness", "sides"), [((0.5, 1e-6, 1e3), ""), ((1e-7,), "left"), ((0.0, math.inf, 2e3), "left right")]
)
def test_a_claim_outside_the_axis_is_an_arrow_and_explained(tightness, sides):
    verdicts = [Verdict("own", None, 1.0, 1.0, 0.0, value, "holds", "", 0.0, "", "") for value in tightness]
    figure = tightness_figure(verdicts)
    assert {side for side in ("left", "right") if f"points to the {side}" in figure.caption} == set(sides.split())
    assert set(figure.data["beyond"]) - {""} == set(sides.split())
    shape = figure.spec["layer"][1]["encoding"]["shape"]
    assert [one["value"] for one in shape["condition"]] == ["triangle-left", "triangle-right"]
    assert svg_of(figure).startswith("<svg")


def test_an_infinite_value_leaves_an_axis_its_ticks():
    assert log_axis(pd.Series([1.0, 100.0, np.inf]), None).to_dict()["values"] == [1.0, 10.0, 100.0]


@pytest.mark.parametrize("mode", MODES)
def test_colours_are_told_apart_and_stand_out_from_the_page(mode):
    def luminance(colour: str) -> float:
        parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    lights = [luminance(colour) for colour in ordered_colours(4, mode)]
    assert lights == sorted(lights)  # even in grey the order is seen
    assert min(np.diff(lights)) > 0.02
    page = luminance("#ffffff" if mode == "light" else "#171b21")
    contrast = [(max(page, light) + 0.05) / (min(page, light) + 0.05) for light in lights]
    assert min(contrast) > 2.4


def test_a_picture_that_cannot_be_drawn_leaves_the_others(smoke, monkeypatch):
    def broken(*_: object) -> object:
        raise ValueError("Too many bins")

    names = [figure.name for figure in study_figures(smoke)]
    monkeypatch.setattr(import_module("flatlens.report.figures"), "scatter_matrix", broken)
    with pytest.warns(SideOutputFailed, match=r"the picture broken failed \(ValueError: Too many bins\)"):
        left = [figure.name for figure in study_figures(smoke)]
    assert left == [name for name in names if name != names[2]]


def test_a_picture_that_is_too_wide_for_a_phone_has_a_narrow_twin_without_empty_rows(tmp_path):
    about = {"model": "Net", "n": 2, "outputs": 1, "layers": ["fc"], "loss": "mse", "parameters": 2, "device": "cpu",
             "dtype": "float64", "versions": {"torch": "2.13"}}  # fmt: skip
    verdicts = BoundsReport([
        Verdict("linear_stability.a_long_name_of_a_bound", "fc", 1.0, 2.0, 1.0, 0.5, "holds", "", 0.0, "", ""),
        Verdict("without_a_number", None, 0.0, 0.0, 0.0, math.nan, "not applicable", "no value", 0.0, "", ""),
    ], about)  # fmt: skip
    figure = tightness_figure(verdicts)
    for wide, spec in zip((True, False), figure.drawn_apart, strict=True):
        svg = svg_of(replace(figure, whole=alt.LayerChart.from_dict(spec)))
        assert ("linear_stability.a_long_name_of_a_bound<" in svg) is wide
        assert ("linear_sta…_of_a_bound<" in svg) is not wide
        assert "without_a_number" not in svg
        assert ">violated<" not in svg
        assert float(re.search(r'width="([\d.]+)', svg)[1]) < (2000 if wide else 345)
    page = write_bounds_page(verdicts, tmp_path / "page.html").read_text()
    assert page.count('class="box drawing wide-screen"') == page.count('class="box drawing phone"') == 1
