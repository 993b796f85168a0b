"""The figures of experiments: each kind of plot becomes a picture of its own data."""

from dataclasses import replace

import pandas as pd
import pytest

from flatlens.papers.experiment import Plot
from flatlens.report.figures.plots import crossed, plot_figure
from flatlens.report.page import svg_of

CURVES = pd.DataFrame(
    {"panel": ["a"] * 4 + ["b"] * 4, "x": [0, 10] * 4, "line": [0.1, 0.1, 0.2, 0.2] * 2,
     "y": [1.0, 2.0, 3.0, 4.0, -1.0, 2.0, 3.0, 4.0], "low": [0.5] * 4 + [-2.0] * 4, "high": 6.0}
)  # fmt: skip
SCATTER = pd.DataFrame(
    {"panel": "one", "x": [0.01, 1.0, 100.0], "y": [1.0, -2.0, 3.0], "group": ["g", "g", "h"],
     "key": ["a", "b", "c"]}
)  # fmt: skip
BARS = pd.DataFrame(
    {"panel": "one", "x": ["a", "a", "b", "b"], "group": ["g", "h"] * 2, "y": [0.5, -0.2, 0.1, 0.3],
     "low": [0.4, -0.3, float("nan"), 0.2], "high": [0.6, -0.1, float("nan"), 0.4]}
)  # fmt: skip
TABLE = pd.DataFrame(
    {"panel": ["one", "one", "two"], "row": ["norm", "norm", "norm"], "column": ["here", "paper", "here"],
     "text": ["1 ± 2", "3 ± 4", "5 ± 6"], "mean": [1.0, 3.0, 5.0]}
)  # fmt: skip
PLOTS = [
    Plot("curves", "Curves", "How to read it.", "curves", CURVES, "step", "learning rate", log_y=True),
    Plot("scatter", "Scatter", "How to read it.", "scatter", SCATTER, "x", "y", log_x=True),
    Plot("bars", "Bars", "How to read it.", "bars", BARS, "quantity", "r"),
    Plot("table", "Table", "How to read it.", "table", TABLE),
]


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.kind)
def test_it_is_a_valid_picture_with_its_panels_and_data(plot):
    figure = plot_figure(plot, {})
    assert figure.data is plot.data
    assert len(figure.panels) == (0 if plot.kind == "table" else plot.data["panel"].nunique())
    for drawing in (figure.whole, *figure.panels):
        drawing.to_dict(validate=True)
    svg = svg_of(figure)
    assert all(title in svg for title in set(plot.data["panel"]))


def axis(figure, panel, channel):
    spec = figure.panel_specs[panel]
    return next(layer["encoding"][channel] for layer in spec.get("layer", [spec]) if channel in layer["encoding"])


def test_axes_are_logarithmic_where_all_is_positive_over_decades():
    curves, scatter, *_ = (plot_figure(plot, {}) for plot in PLOTS)
    assert axis(curves, 0, "y")["scale"]["type"] == "log"
    assert "type" not in axis(curves, 1, "y")["scale"]
    assert axis(scatter, 0, "x")["scale"]["type"] == "log"
    across = plot_figure(replace(PLOTS[0], data=CURVES.assign(x=CURVES["x"] + 1), log_x=True), {})
    assert axis(across, 0, "x")["scale"]["type"] == "log"
    below = plot_figure(replace(PLOTS[0], data=CURVES[:4].assign(low=0.0)), {})
    assert "type" not in axis(below, 0, "y")["scale"]  # the band would not fit
    near = plot_figure(replace(PLOTS[0], data=CURVES[:4].assign(high=4.9)), {})
    assert "type" not in axis(near, 0, "y")["scale"]
    assert "type" not in axis(curves, 0, "x").get("scale", {})
    settings = plot_figure(replace(PLOTS[0], data=CURVES.assign(x=CURVES["x"] + 0.01), log_x=True), {})
    assert axis(settings, 0, "x")["scale"]["type"] == "log"
    linear = plot_figure(replace(PLOTS[1], data=SCATTER.assign(x=[0.0, 1.0, 2.0])), {})
    assert "type" not in axis(linear, 0, "x")["scale"]


def test_a_matrix_is_that_of_its_study(smoke):
    figure = plot_figure(Plot("pairs", "Pairs", "", "matrix", pd.DataFrame(), study="mlp"), {"mlp": smoke})
    assert (figure.name, figure.title) == ("pairs", "Pairs")
    assert len(figure.data) == len(smoke.networks)


def test_a_line_to_hold_others_against_is_dashed_and_in_no_legend():
    data = CURVES.assign(line=["ours", "ours", "limit", "limit"] * 2)
    figure = plot_figure(replace(PLOTS[0], data=data, dashed=("limit",)), {})
    band, line, dashed = figure.panel_specs[0]["layer"]
    assert dashed["mark"]["strokeDash"]
    assert "color" not in dashed["encoding"]
    assert line["encoding"]["color"]["scale"]["domain"] == ["ours"]
    assert {row["line"] for row in figure.panel_specs[0]["datasets"][dashed["data"]["name"]]} == {"limit"}
    assert {row["line"] for row in figure.panel_specs[0]["datasets"][band["data"]["name"]]} == {"ours"}
    assert len(plot_figure(PLOTS[0], {}).panel_specs[0]["layer"]) == 2


def test_a_study_draws_itself_from_python(smoke):
    drawn = [row for rows in smoke.plot().to_dict()["datasets"].values() for row in rows if "key" in row]
    assert {row["key"] for row in drawn} == set(smoke.networks["key"])


def test_a_table_has_what_its_cells_say():
    svg = svg_of(plot_figure(PLOTS[-1], {}))
    assert all(text in svg for text in (*TABLE["text"], "norm", "here", "paper"))


def test_a_table_is_text_on_a_page_in_the_order_of_the_plot():
    assert plot_figure(PLOTS[-1], {}).layout == "table"
    data = pd.DataFrame({"panel": "one", "row": ["z", "z", "a"], "column": ["y", "b", "y"], "text": ["1", "2", "3"]})
    ((title, cells),) = crossed(data)
    assert title == "one"
    assert (list(cells.index), list(cells.columns)) == (["z", "a"], ["y", "b"])
    assert cells.to_numpy().tolist() == [["1", "2"], ["3", ""]]


def legend(figure):
    return next(layer["encoding"]["color"] for layer in figure.panel_specs[0]["layer"])


def test_lines_with_names_keep_their_order_and_numbers_are_sorted():
    named = plot_figure(replace(PLOTS[0], data=CURVES.assign(line=["z", "z", "a", "a"] * 2)), {})
    assert legend(named)["scale"]["domain"] == ["z", "a"]
    falling = plot_figure(replace(PLOTS[0], data=CURVES.assign(line=[0.2, 0.2, 0.1, 0.1] * 2)), {})
    assert legend(falling)["scale"]["domain"] == [0.1, 0.2]


def test_a_legend_has_as_many_columns_as_fit_above_a_panel():
    def columns(name):
        return legend(plot_figure(replace(PLOTS[0], data=CURVES.assign(line=name)), {}))["legend"]["columns"]

    assert [columns(name) for name in ("0.1", "bound, published", "approximated bound, delta = 0.1")] == [6, 2, 1]


def test_curves_of_a_group_have_titles_on_both_axes():
    """Of others `y` is what the lines are, and the panel names the quantity."""
    one = plot_figure(replace(PLOTS[0], y="error", group="mean of"), {})
    assert axis(one, 0, "y")["axis"]["title"] == "error"
    assert legend(one)["legend"]["title"] == "mean of"
    other = plot_figure(PLOTS[0], {})
    assert axis(other, 0, "y")["axis"]["title"] is None
    assert legend(other)["legend"]["title"] == "learning rate"


def test_nothing_to_draw_is_said():
    nothing = Plot("none", "None", "", "curves", CURVES[:0], "step", "")
    assert "no network" in svg_of(plot_figure(nothing, {}))
