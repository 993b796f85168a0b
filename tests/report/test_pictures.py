"""Charts from Python: each draws the numbers that its table holds."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import altair as alt
import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens.errors import BadInput


@pytest.fixture
def problem() -> fl.Problem:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    return fl.Problem(net, "cross_entropy", (torch.randn(8, 3), torch.arange(8) % 2))


def drawn(chart: object) -> list[dict[str, object]]:
    """The rows of all data in a chart."""
    return [row for rows in chart.to_dict()["datasets"].values() for row in rows]


def test_a_report_is_drawn_as_a_map_of_its_layers(problem: fl.Problem) -> None:
    report = fl.measure(fl.Lens(problem), ["mls", "relative_flatness"])
    rows = {(row["measure"], row["layer"]): row["value"] for row in drawn(report.plot())}
    assert rows == {(m, at): e.value for (m, at), e in report.items() if at is not None}
    with pytest.raises(BadInput, match="no measure has values at two layers"):
        fl.measure(fl.Lens(problem), "loss").plot()


def test_a_comparison_is_drawn_as_ranks(problem: fl.Problem) -> None:
    other = problem.with_changes(copy.deepcopy(problem.model))
    comparison = fl.compare({"a": fl.Lens(problem), "b": fl.Lens(other)}, ["mls", "relative_flatness"])
    assert {(row["measure"], row["model"]) for row in drawn(comparison.plot())} == {
        (m, n) for m in comparison.measures for n in "ab"
    }


def test_a_tracker_is_drawn_through_training(problem: fl.Problem) -> None:
    tracker = fl.Tracker(problem, "loss", every=1, live=False)
    for step in range(3):
        tracker.step(step)
    assert [row["step"] for row in drawn(tracker.plot())] == [0, 1, 2]


def test_a_saved_chart_and_one_in_a_notebook_need_no_network(problem: fl.Problem, tmp_path: Path) -> None:
    tracker = fl.Tracker(problem, "loss", every=1, live=False)
    tracker.step(0)
    chart = tracker.plot()
    chart.properties(title="t").save(tmp_path / "chart.html")
    shown = chart.properties(title="</script>")._repr_mimebundle_()["text/html"]
    for html in (tmp_path / "chart.html").read_text(), shown:
        assert "vegaEmbed" in html
        assert not re.search(
            r"""<(script|link|img)[^>]*(src|href)=["']?(https?:)?//|@import|url\(["']?(https?:)?//""", html
        )
    assert shown.count("</script>") == 1
    chart.save(tmp_path / "chart.svg")
    chart.save(tmp_path / "chart.json")
    assert isinstance(chart, alt.ConcatChart)
    with alt.renderers.enable("json"):
        assert "application/json" in chart._repr_mimebundle_()[0]


def test_a_problem_says_what_it_holds(problem: fl.Problem) -> None:
    told = "Problem: Sequential of 54 parameters, cross_entropy, 8 samples, 2 outputs"
    assert repr(problem) == told
    assert repr(problem.with_changes(test=(torch.randn(2, 3), torch.zeros(2).long()))) == f"{told}, held-out data"
