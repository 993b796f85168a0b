"""What `measures=` asks for: presets and names; the summary, its budget, and no number twice."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens.data import digits
from flatlens.errors import BadInput, UnknownName
from flatlens.experiments import Study
from flatlens.experiments.network import measure_network
from flatlens.measures import MEASURES, pipeline
from flatlens.measures.definition import SUMMARY, asked_for


def made(activation: type[nn.Module] = nn.ReLU, width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    inner = nn.Linear(6, width), activation(), nn.Linear(width, width), activation()
    return nn.Sequential(*inner, nn.Linear(width, 3)).double()


def samples(n: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=generator).double(), torch.randint(3, (n,), generator=generator)


def lens(activation: type[nn.Module] = nn.ReLU, n: int = 20, width: int = 8) -> fl.Lens:
    return fl.Lens(fl.Problem(made(activation, width), "cross_entropy", samples(n), test=samples(9, seed=2)))


def answers(report: fl.Report) -> list[str]:
    return [row for row, layer in report if layer is None]


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_the_summary_is_one_number_of_each_of_its_measures(activation: type[nn.Module]) -> None:
    report, named = fl.measure(lens(activation)), fl.measure(lens(activation), ["relative_flatness_ggn", "mls"])
    assert sorted(answers(report)) == sorted(SUMMARY)
    assert {row for row, layer in report if layer is not None} <= {row.partition(".")[0] for row in SUMMARY}
    assert report["relative_flatness_ggn.sum"].value == named["relative_flatness_ggn.sum"].value
    assert report["mls", "2"].value == named["mls", "2"].value
    assert all(estimate.kind != "undefined" for estimate in report.values())
    assert report.about["passes"] == 1


def test_the_flatness_of_the_summary_is_that_of_no_unit_of_a_layer() -> None:
    row = "relative_flatness_ggn.sum"
    net = made()
    before = fl.measure(net, "cross_entropy", samples(20))[row]
    with torch.no_grad():
        net[0].weight *= 4
        net[0].bias *= 4
        net[2].weight /= 4
    assert fl.measure(net, "cross_entropy", samples(20))[row].value == pytest.approx(before.value, rel=1e-9)


def test_presets_are_sets_of_measures() -> None:
    everything = {key for key, one in MEASURES.items() if not one.by_name}
    assert set(MEASURES) - everything == {"local_learning_coefficient"}
    found = {preset: {one.key for one in asked_for(preset).measures} for preset in ("summary", "pass", "all")}
    assert found["all"] == everything
    assert found["summary"] - found["pass"] == {"sharpness", "hessian_trace"}
    assert all(not MEASURES[name].on_request for name in found["pass"])
    families = {one.card.family for one in MEASURES.values()}
    assert set.union(*({one.key for one in asked_for(f"family:{name}").measures} for name in families)) == everything
    assert [one.key for one in asked_for("sharpness").measures] == ["sharpness"]
    assert asked_for(["pass"]) == asked_for("pass")
    assert "test_loss" not in {one.key for one in asked_for("all", held_out=False).measures}


@pytest.mark.parametrize(
    ("asked", "error", "told"),
    [
        ("sumary", UnknownName, "unknown measure 'sumary': did you mean summary"),
        ("sharpnes", UnknownName, "unknown measure 'sharpnes': did you mean sharpness"),
        ("family:flatnes", UnknownName, "unknown family 'flatnes': did you mean flatness"),
        ("familly:flatness", UnknownName, "unknown measure 'familly:flatness'"),
        (
            ["pass", "sharpness"],
            BadInput,
            "a preset cannot be combined with names: give it alone, or name every measure",
        ),
        (["mls", "family:flatness"], BadInput, "a preset cannot be combined with names"),
    ],
)
def test_an_unknown_preset_is_one_line(asked: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told) as raised:
        fl.measure(lens(), asked)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("preset", ["summary", "pass", "family:flatness", "family:sharpness", "family:normalised"])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_no_number_is_there_twice(activation: type[nn.Module], preset: str) -> None:
    """Two measures have the same number on no network in general; single layers and parts may share one."""
    report = fl.measure(lens(activation), preset)
    last = {"relative_flatness"} if activation is nn.Tanh else set()  # the last layer's; the others' differ
    values = [report[row].value for row in answers(report) if "." not in row and row not in last]
    values = [value for value in values if math.isfinite(value)]
    assert len({float(f"{value:.9g}") for value in values}) == len(values)


def test_a_repeated_measure_is_in_the_note_of_the_other_and_found_by_its_name() -> None:
    report = fl.measure(lens(), "pass")
    same = ["relative_flatness", "neuron_flatness", "parameter_jacobian_frobenius", "hessian_trace"]
    for name, other in zip(
        same, ["relative_flatness_ggn", "neuron_flatness_ggn", "interpolation_sharpness", "ggn_trace"], strict=True
    ):
        assert report[name] is report[other]
        assert report[name, "2"] is report[other, "2"]
        assert f"{other} = {name} here" in report[other].note
        assert name not in answers(report)
    named = fl.measure(lens(), same)
    assert answers(named)[0] == "relative_flatness"
    assert [named[name].value for name in same] == pytest.approx([report[name].value for name in same], rel=1e-9)


def test_below_smooth_activations_the_gauss_newton_part_says_so() -> None:
    report = fl.measure(lens(nn.Tanh), "pass")
    assert "the Gauss-Newton part of relative_flatness; the whole takes" in report["relative_flatness_ggn"].note
    with pytest.raises(UnknownName, match=r'has no \'relative_flatness\': fl.measure\(lens, \["relative_flatness"\]\)'):
        report["relative_flatness"]


def test_what_was_not_run_has_no_row() -> None:
    report = fl.measure(lens(nn.Tanh), "pass")
    assert "kappa_trace" not in report
    assert [layer for row, layer in report if row == "kappa_trace"] == ["4"]
    for key, told in {
        ("kappa_trace", None): "this report has no 'kappa_trace'",
        ("kappa_trace", "0"): "this report has no value of 'kappa_trace' at '0'",
    }.items():
        with pytest.raises(UnknownName, match=rf'{told}: fl.measure\(lens, \["kappa_trace"\]\) computes it'):
            report[key]
    with pytest.raises(UnknownName, match=r'fl.measure\(lens, \["relative_flatness_ggn"\]\) computes it'):
        fl.measure(lens())["relative_flatness"]  # the summary has the sum over layers
    assert fl.measure(lens(nn.Tanh), "kappa_trace")["kappa_trace"].kind == "exact"
    some = fl.measure(lens(nn.Tanh), "kappa_trace", layers="2")
    assert [layer for row, layer in some if row == "kappa_trace"] == ["2", "4"]


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_one_call_is_a_lens_on_a_problem(activation: type[nn.Module]) -> None:
    data, test = samples(20), samples(9, seed=2)
    one = fl.measure(made(activation), "cross_entropy", data, test=test)
    other = fl.measure(lens(activation))
    assert {key: e.value for key, e in one.items()} == {key: e.value for key, e in other.items()}
    named = fl.measure(made(activation), "cross_entropy", data, measures=["mls", "loss"])
    assert named.measures() == fl.measure(lens(activation), measures=["mls", "loss"]).measures() == ["mls", "loss"]
    told = {"pixels": data[0], "labels": data[1]}
    fed = fl.measure(made(), "cross_entropy", told, forward=lambda m, b: (m(b["pixels"]), b["labels"]), measures="loss")
    assert fed["loss"].value == pytest.approx(fl.measure(made(), "cross_entropy", data, measures="loss")["loss"].value)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: fl.measure(lens(), "cross_entropy"), "a Lens has its loss: leave it out, or give the network"),
        (lambda: fl.measure(lens(), ["mls"], measures=["loss"]), "a Lens has its loss"),
        (lambda: fl.measure(lens(), None, samples(3)), r"measure\(data=...\): a Lens has its loss, data and forward"),
        (lambda: fl.measure(lens(), test=samples(3)), r"measure\(test=...\): a Lens has"),
        (lambda: fl.measure(made()), 'loss is missing for Sequential: measure(model, "cross_entropy", (x, y))'),
        (lambda: fl.measure(made(), "mse"), "data is missing for Sequential"),
        (lambda: fl.measure(lens().problem), r"got Problem: .*measure\(Lens\(problem\)\)"),
        (lambda: fl.measure(made(), "mes", samples(3)), "unknown loss 'mes': did you mean mse"),
    ],
)
def test_a_wrong_call_is_one_line(call: Any, told: str) -> None:
    with pytest.raises(BadInput) as raised:
        call()
    assert "\n" not in str(raised.value)
    with pytest.raises(BadInput, match=told if "(model," not in told else "loss is missing for Sequential"):
        call()


def test_beyond_the_budget_few_products_are_taken_and_the_rows_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sharpness stays a lower bound, the trace's interval is wider; by name, both run in full."""
    whole = fl.measure(lens(nn.Tanh, 200, 40), ["sharpness(rtol=1e-6)", "hessian_trace(exact=True)"])
    largest, trace = whole["sharpness(rtol=1e-06)"].value, whole["hessian_trace(exact=True)"].value
    monkeypatch.setattr(pipeline, "BUDGET", 1.0)
    report, named = (
        fl.measure(lens(nn.Tanh, 200, 40)),
        fl.measure(lens(nn.Tanh, 200, 40), ["sharpness", "hessian_trace"]),
    )
    assert report["sharpness"].products <= 6
    assert report["sharpness"].kind == "lower bound"
    assert 0.5 * largest < report["sharpness"].value <= largest * (1 + 1e-9)
    assert "before the tolerance was reached; by name, the search runs to its tolerance" in report["sharpness"].note
    assert named["sharpness"].products > report["sharpness"].products
    assert report["hessian_trace"].products == 4
    assert "4 probes" in report["hessian_trace"].note
    assert abs(report["hessian_trace"].value - trace) < 3 * 1.96 * report["hessian_trace"].stderr
    assert named["hessian_trace"].products == 16
    again = fl.measure(lens(nn.Tanh, 200, 40))
    assert [again[row].value for row in SUMMARY] == [report[row].value for row in SUMMARY]  # no time decides


def test_the_defaults_of_searches_and_probes_are_coarser_than_those_of_studies() -> None:
    net = made(nn.Tanh, 40)
    report = fl.measure(net, "cross_entropy", samples(300), measures=["sharpness", "hessian_trace"])
    fine = fl.measure(
        net, "cross_entropy", samples(300), measures=["sharpness(rtol=0.001)", "hessian_trace(rtol=0.01)"]
    )
    settings = replace(
        Study.digits("smoke").networks()[0], measures=("sharpness", "hessian_trace"), samples=None, dtype="float64"
    )
    split = replace(digits(train=10), x=samples(300)[0], y=samples(300)[1], test_x=samples(5)[0], test_y=samples(5)[1])
    settings = replace(settings, training=replace(settings.training, loss="cross_entropy"))
    studied = measure_network(net, split, settings)
    tracked = fl.Tracker(fl.Problem(net, "cross_entropy", samples(300)), ["sharpness", "hessian_trace"], 1, live=False)
    tracker = tracked.step(0)
    assert tracker is not None
    top = fine["sharpness(rtol=0.001)"]
    for kept in (studied, tracker):
        assert kept["sharpness"].value == pytest.approx(top.value, rel=1e-6)
        assert float(kept["sharpness"].arrays["residuals"][0]) <= 1e-3 * top.value
        assert kept["hessian_trace"].stderr <= 0.02 * abs(kept["hessian_trace"].value)
    assert report["sharpness"].products < top.products == studied["sharpness"].products
    assert report["hessian_trace"].products == 16 < studied["hessian_trace"].products


def test_a_study_names_its_measures_as_before() -> None:
    """Keys from before the defaults of `measure` changed."""
    network = Study.digits("smoke").networks()[0]
    assert network.key == "e07eb59ab576"
    asked = ("sharpness", "hessian_trace", "adaptive_sharpness", "sharpness(rtol=0.01)")
    assert replace(network, measures=asked).key == "8edcb1a236f8"
