import math

import altair as alt
import pandas as pd
import pytest

from flatlens.report.figures import tracked_figure, tracked_frame
from flatlens.report.page import write_figures


def history(lr=0.1, steps=(0, 10, 20)):
    rows = [
        {"step": step, "lr": lr, "edge": 2 / lr, "measure": measure, "layer": layer, "value": value * (step + 1),
         "stderr": stderr, "kind": kind, "seconds": 0.1, "products": 3, "note": ""}
        for step in steps
        for measure, layer, value, stderr, kind in [
            ("sharpness", "", 1.0, 0.0, "lower bound"),
            ("hessian_trace", "", 5.0, 0.5, "estimate"),
            ("mls", "fc1", 7.0, 0.0, "exact"),
            ("network_volume", "", math.nan, 0.0, "undefined"),
        ]
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_the_data_are_the_networks_numbers_with_intervals_and_the_edge_beside_the_sharpness():
    data = tracked_frame({"a": history(0.1), "b": history(0.2, (0, 5))})
    assert list(data.groupby("run")["step"].max()) == [20, 5]
    assert set(data["measure"]) == {"sharpness", "hessian_trace"}
    trace = data[data["measure"] == "hessian_trace"].iloc[0]
    assert (trace["low"], trace["high"]) == (pytest.approx(5 - 0.98), pytest.approx(5 + 0.98))
    assert math.isnan(trace["edge"])
    assert list(data[data["measure"] == "sharpness"].groupby("run")["edge"].first()) == [20, 10]


def test_a_measure_with_options_keeps_its_edge():
    data = tracked_frame({"a": history().replace("sharpness", "sharpness(rtol=0.01)")})
    assert data[data["measure"] == "sharpness(rtol=0.01)"]["edge"].notna().all()


def test_the_figure_has_a_panel_a_measure_and_can_be_drawn(tmp_path):
    figure = tracked_figure({"a": history(0.1), "b": history(0.2)})
    assert len(figure.panels) == 2
    alt.ConcatChart.from_dict(figure.whole.to_dict())
    files = write_figures([(figure, tmp_path)], 2)
    assert {p.suffix for p in files} == {".svg", ".png", ".pdf", ".csv"}
    svg = (tmp_path / "tracked.svg").read_text()
    for word in ("sharpness", "hessian_trace", "step", "stroke-dasharray"):
        assert word in svg


@pytest.mark.parametrize(("factor", "kind"), [(1.0, None), (0.01, "log"), (100.0, "log"), (-0.01, "symlog")])
def test_a_sharpness_and_its_edge_are_both_seen(factor, kind):
    """Near each other on a linear axis; else one that flattens neither."""
    rows = history()[lambda rows: rows["measure"] == "sharpness"]
    (panel,) = tracked_figure({"a": rows.assign(value=rows["value"] * factor)}).panel_specs
    line, dashed = panel["layer"]
    assert line["encoding"]["y"]["scale"].get("type") == kind
    assert dashed["mark"]["strokeDash"]
    assert "edge of stability" in panel["title"]["subtitle"]
    assert ("log scale" in panel["title"]["subtitle"]) is (kind == "log")


def test_an_undefined_step_breaks_the_line_and_parts_have_no_panel():
    """Two values with eleven undefined ones between them are two points, not a trend."""
    at = list(range(0, 130, 10))
    noise = [1000.0, *[math.nan] * 11, 1800.0]
    rows = [
        {"step": step, "lr": 0.1, "edge": 20.0, "measure": f"gradient_noise_scale{part}", "layer": "", "value": value,
         "stderr": math.nan, "kind": "undefined" if math.isnan(value) else "lower bound", "note": ""}
        for part, values in (("", noise), (".covariance", [1.0] * 13)) for step, value in zip(at, values, strict=True)
    ]  # fmt: skip
    figure = tracked_figure({"a": pd.DataFrame(rows)})
    (panel,) = figure.panel_specs
    assert panel["title"] == {"text": "gradient_noise_scale", "subtitle": "log scale"}
    assert panel["layer"][0]["mark"]["point"]
    assert panel["layer"][0]["mark"]["invalid"] == "break-paths-show-domains"
    assert figure.data.groupby("measure")["value"].agg(lambda values: values.isna().sum()).tolist() == [11, 0]


def test_options_stand_below_the_name_and_a_band_below_zero_needs_a_linear_axis():
    rows = history()[lambda rows: rows["measure"] == "hessian_trace"]
    for stderr, kind in ((0.5, "log"), (5.0, None)):  # 5 +- 9.8: a log axis has no place for its lower end
        wide = rows.assign(stderr=stderr).replace("hessian_trace", "eigenspace(top_k=3)")
        (panel,) = tracked_figure({"a": wide}).panel_specs
        _, line = panel["layer"]  # above its band
        assert line["encoding"]["y"]["scale"].get("type") == kind
        said = ["top_k=3", "log scale"] if kind else "top_k=3"
        assert panel["title"] == {"text": "eigenspace", "subtitle": said}


def test_one_measurement_is_a_point_below_its_edge():
    (panel,) = tracked_figure({"a": history(steps=(0,)).iloc[:1]}).panel_specs
    point, edge = panel["layer"]
    assert point["mark"]["point"]
    assert edge["mark"]["type"] == "rule"


def test_a_caption_speaks_of_the_bands_and_the_edge_that_are_drawn():
    every = tracked_figure({"a": history()}).caption
    assert "Bands" in every
    assert "edge" in every
    loss = history()[lambda rows: rows["measure"] == "hessian_trace"].replace({"hessian_trace": "loss"})
    assert tracked_figure(dict.fromkeys("ab", loss.assign(stderr=0.0))).caption == "One line a run."
    assert tracked_figure({"a": loss.assign(stderr=0.0)}).caption == ""


@pytest.mark.parametrize("histories", [{}, {"a": history().iloc[:0]}])
def test_nothing_measured_is_said(histories):
    figure = tracked_figure(histories)
    assert "nothing was measured" in str(figure.spec)
