"""An estimate is a number with an error; a report says how to get what it lacks; the main objects say what they are."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

import flatlens as fl
from flatlens.errors import UnknownName
from flatlens.estimate import Estimate, Report, undefined


def lens() -> fl.Lens:
    net = torch.nn.Linear(3, 1, dtype=torch.float64)
    return fl.Lens(fl.Problem(net, "mse", (torch.ones(4, 3).double(), torch.zeros(4, 1).double())))


def test_an_estimate_is_a_number_ordered_by_value_and_equal_to_itself_alone() -> None:
    small, large, lost = Estimate(1.0), Estimate(2.5, 0.1, "estimate"), undefined("no")
    assert float(large) == 2.5
    assert f"{large:.3f}" == "2.500"
    assert f"{large}" == repr(large)
    assert sorted([large, small]) == [small, large]
    assert [small < large, large > 2, small <= 1, small >= large, lost < small, lost >= small] == [True] * 3 + [
        False
    ] * 3
    assert Estimate(1.0) != small
    assert len({small, Estimate(1.0)}) == 2
    assert math.isnan(float(lost))
    with pytest.raises(TypeError):
        assert small < "2"


def test_the_standard_error_is_0_where_exact_and_missing_for_what_has_none() -> None:
    assert Estimate(1.0).stderr == replace(undefined("no"), kind="exact").stderr == 0
    assert Estimate(1.0, 0.5, "estimate").margin == pytest.approx(0.98)
    for kind in ("lower bound", "upper bound", "undefined"):
        found = Estimate(1.0, 0.5, kind)
        assert math.isnan(found.stderr)
        assert found.margin == 0
        assert "+-" not in repr(found)


def test_a_report_of_an_earlier_version_has_the_errors_of_this_one() -> None:
    row = {"measure": "sharpness", "layer": None, "value": 2.0, "stderr": 0.0, "kind": "lower bound"}
    assert math.isnan(Report._restored({"rows": [row], "about": {}}, {})["sharpness"].stderr)


def test_a_report_says_how_to_get_a_measure_that_it_lacks() -> None:
    report = fl.measure(lens(), ["mls", "weight_norm"])
    with pytest.raises(UnknownName) as told:
        report["sharpness"]
    assert str(told.value) == """this report has no 'sharpness': fl.measure(lens, ["sharpness"]) computes it"""
    with pytest.raises(UnknownName, match=r"fl.measure\(lens, \[\"local_volume\(top_k=1\)\"\]\) computes it"):
        report["local_volume(top_k=1)"]
    with pytest.raises(UnknownName, match="did you mean mls"):
        report["mlss"]
    with pytest.raises(UnknownName, match=r"did you mean weight_norm.spectral"):
        report["weight_norm.spectrum"]
    assert report.get("sharpness") is None


def test_lens_tracker_and_hessian_say_in_one_line_what_they_are() -> None:
    one = lens()
    fl.measure(one, ["mls", "sharpness"])
    assert repr(one) == (
        "Lens: Linear of 4 parameters, mse, 4 samples, 1 output; float64 on cpu; "
        f"1 pass, {one.products} products so far"
    )
    H = fl.curvature.Hessian(one.problem)
    H.matrix()
    assert repr(H) == (
        "Hessian: 4 x 4 of Linear of 4 parameters, mse, 4 samples, 1 output; float64 on cpu; 4 products so far"
    )
    tracker = fl.Tracker(one.problem, ["loss", "mls"], every=10, live=False)
    tracker.step(0)
    assert repr(tracker) == (
        "Tracker: loss, mls every 10 steps, of Linear of 4 parameters, mse, 4 samples, 1 output; 1 measurement so far"
    )


def test_a_part_that_a_report_lacks_says_how_to_get_it():
    report = Report({("weight_norm", None): Estimate(1.0)}, {})
    with pytest.raises(UnknownName, match=r'fl\.measure\(lens, \["weight_norm"\]\) computes it'):
        report["weight_norm.spectral"]


def test_an_answer_is_made_when_it_is_read() -> None:
    read: list[str] = []

    def answer(estimates: object, about: Mapping[str, object]) -> list[str]:
        read.append("once")
        return [f"{about['n']} samples."]

    report = Report({}, {"n": 3}, answer)
    assert not read
    assert report.answer == report.answer == ["3 samples."]
    assert read == ["once"]
