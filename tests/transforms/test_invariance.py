"""The table of invariances: every cell as declared, both ways; rounding, searches and errors allowed for."""

from __future__ import annotations

import math

import pytest
import torch

import flatlens as fl
from flatlens.errors import BadInput, StaleLens, UnknownName
from flatlens.estimate import Estimate, undefined
from flatlens.measures import MEASURES
from flatlens.measures.definition import in_preset
from flatlens.transforms import TRANSFORMS
from flatlens.transforms.invariance import CELL_COLUMNS, cell_of

REQUESTED = [
    "sharpness(rtol=1e-11)", "ggn_norm(rtol=1e-11)", "hessian_trace", "layer_sharpness(rtol=1e-11)",
    "adaptive_sharpness", "interpolation_gap", "maximal_relative_flatness(rtol=1e-11)", "average_sharpness",
    "relative_flatness(normalized='std')", "worst_sharpness(adaptive=True)",
]  # fmt: skip


@pytest.fixture(scope="module")
def table():
    from networks import network

    net, x, y = network("mlp-relu", n=40)
    return fl.check_invariance(fl.Lens(fl.Problem(net, "cross_entropy", (x, y), test=(x[:9], y[:9]))))


def test_every_default_cell_agrees_both_ways(table):
    assert [cell for cell in table if cell.unchanged != cell.declared] == []
    assert all(cell.agrees for cell in table)
    assert table.disagreeing == []
    default = [one.key for one in MEASURES.values() if in_preset(one, "pass")]
    for move in ("layerwise", "neuronwise", "permutation", "feature_normalization"):
        assert [name for name in default if (name, move) not in {(c.measure, c.transform) for c in table}] == []


def test_the_frame_has_the_columns_and_one_row_a_cell(table):
    frame = table.frame()
    assert list(frame.columns) == CELL_COLUMNS
    assert len(frame) == len(table) == len(frame.drop_duplicates(["measure", "transform"]))
    row = frame[(frame.measure == "ggn_trace") & (frame["transform"] == "layerwise")].iloc[0]
    assert row.change == pytest.approx(row.after / row.before - 1)
    assert "ggn_trace" in repr(table)
    assert "<table" in table._repr_html_()


def test_what_does_not_apply_is_listed_with_the_reason(table):
    of_attention = {"query_key_basis", "value_output_basis", "head_permutation"}
    assert set(table.left_out) == of_attention | {
        "batchnorm_folding", "batchnorm_scale", "norm_folding", "norm_scale", "gate_scale"
    }  # fmt: skip
    assert {table.left_out[name].replace(" of several heads", "") for name in of_attention} == {"no attention is found"}
    assert "no BatchNorm" in table.left_out["batchnorm_scale"]
    assert set(table.moved) == {"layerwise", "neuronwise", "permutation", "feature_normalization"}
    assert all(one.difference < 1e-10 and one.links for one in table.moved.values())
    with pytest.raises(UnknownName, match="batchnorm_scale does not apply to this network: the network has no"):
        table["mls", "batchnorm_scale"]
    with pytest.raises(UnknownName, match="did you mean mls"):
        table["mlss", "layerwise"]


@pytest.mark.parametrize("network", ["cnn", "fx-residual", "tokens", "mlp-tanh", "residual"])
def test_no_cell_disagrees_on_other_networks(problem_of, network):
    report = fl.check_invariance(fl.Lens(problem_of(network)))
    assert report.disagreeing == []
    assert {*report.moved, *report.left_out} == {one.name for one in TRANSFORMS.values() if one.default}
    assert report["mls", next(iter(report.moved))].unchanged
    if "batchnorm_folding" in report.moved:
        assert report["mls", "batchnorm_folding"].agrees
        assert report["ggn_trace", "batchnorm_folding"].declared is None


def test_measures_of_products_and_draws(problem_of):
    report = fl.check_invariance(
        fl.Lens(problem_of("mlp-relu", 30)), REQUESTED, ["layerwise", "neuronwise", "permutation"]
    )
    assert [cell for cell in report if cell.unchanged != cell.declared] == []
    assert report["average_sharpness", "permutation"].stderr > 0
    assert report["average_sharpness", "layerwise"].change == pytest.approx(
        0, abs=1e-9
    )  # the same draws on either side


def test_random_combinations_of_outputs_are_the_same_on_either_side(problem_of):
    lens = fl.Lens(problem_of("mlp-relu", 30), outputs=2)
    report = fl.check_invariance(lens, ["ggn_trace", "relative_flatness_ggn", "mls"], "layerwise")
    assert [cell.agrees for cell in report if cell.agrees is not None].count(False) == 0
    assert report["relative_flatness_ggn", "layerwise"].change == pytest.approx(0, abs=1e-9)
    assert report["ggn_trace", "layerwise"].change > 1


def test_the_generator_decides_and_the_model_is_left(problem_of):
    problem = problem_of("cnn")
    before = [p.clone() for p in problem.model.parameters()]
    lens = fl.Lens(problem)
    a, b, c = (
        fl.check_invariance(lens, "ggn_trace", "neuronwise", generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert a[0].after == b[0].after != c[0].after
    lens.require_fresh()
    assert all(torch.equal(p, q) for p, q in zip(before, problem.model.parameters(), strict=True))
    assert all(p.grad is None for p in problem.model.parameters())


def test_float32_is_looser(problem_of):
    net = problem_of("cnn").model.float()
    report = fl.check_invariance(
        fl.Lens(fl.Problem(net, "cross_entropy", (torch.randn(20, 1, 6, 6), torch.arange(20) % 3)))
    )
    assert report.disagreeing == []
    assert max(one.difference for one in report.moved.values()) < 1e-4


def test_progress_is_told(problem_of):
    told = []
    fl.check_invariance(
        fl.Lens(problem_of("mlp-relu")), "mls", progress=lambda what, done, total: told.append((what, done, total))
    )
    assert ("transforms", 4, 4) in told


STAYS, MOVES = MEASURES["mls"], MEASURES["ggn_trace"]
EXACT, WIDE = Estimate(1.0), Estimate(1.0, 0.1, "estimate")


@pytest.mark.parametrize(
    ("one", "a", "b", "unchanged", "agrees"),
    [
        (STAYS, EXACT, Estimate(1 + 1e-7), True, True),
        (STAYS, EXACT, Estimate(1 + 1e-5), False, False),
        (MOVES, EXACT, Estimate(2.0), False, True),
        (MOVES, EXACT, EXACT, True, None),  # nothing follows from one network
        (STAYS, WIDE, Estimate(1.5, 0.1, "estimate"), True, True),  # 3.5 standard errors
        (STAYS, WIDE, Estimate(1.6, 0.1, "estimate"), False, False),
        (STAYS, EXACT, Estimate(1.0009, kind="lower bound"), True, True),
        (STAYS, EXACT, Estimate(1.02, kind="lower bound"), None, None),  # may have stopped short
        (STAYS, EXACT, Estimate(1.2, kind="lower bound"), False, False),
        (MOVES, EXACT, Estimate(1.02, kind="lower bound"), False, True),
        (STAYS, Estimate(0.0), Estimate(0.0), True, True),
        (STAYS, Estimate(-math.inf), Estimate(-math.inf), True, True),
        (MOVES, Estimate(math.inf), EXACT, False, True),
        (MOVES, EXACT, Estimate(-math.inf, kind="lower bound"), False, True),
        (MEASURES["weight_norm"], EXACT, Estimate(math.inf), False, True),
        (STAYS, Estimate(1e-17), Estimate(-1e-17), True, True),  # of a number that is 0
        (MOVES, Estimate(1e-17), Estimate(1e-19), False, True),
        (STAYS, EXACT, undefined("gone"), None, False),
        (MOVES, EXACT, undefined("gone"), None, None),
        (STAYS, undefined("never"), undefined("never"), None, None),
    ],
)
def test_what_counts_as_unchanged(one, a, b, unchanged, agrees):
    cell = cell_of(TRANSFORMS["layerwise"], one, one.key, a, b, torch.float64)
    assert (cell.unchanged, cell.agrees) == (unchanged, agrees)
    assert any(word in cell.note for word in ("gone", "never", "undecided")) == (unchanged is None)


def test_a_wrong_declaration_is_reported(problem_of):
    from dataclasses import replace

    wrong = replace(MOVES, card=replace(MOVES.card, invariant_under=frozenset({"layerwise", "permutation"})))
    report = fl.check_invariance(fl.Lens(problem_of("mlp-relu")), [wrong], ["layerwise", "permutation"])
    assert {(cell.measure, cell.transform) for cell in report.disagreeing} >= {("ggn_trace", "layerwise")}
    assert all(cell.transform == "layerwise" for cell in report.disagreeing)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"measures": "mlss"}, "unknown measure 'mlss': did you mean mls"),
        ({"transforms": "layer-wise"}, "unknown transform 'layer-wise': did you mean layerwise"),
        ({"transforms": []}, r"at least one of layerwise, neuronwise"),
        ({"transforms": [3]}, "or Transform objects, got 3"),
    ],
)
def test_bad_input_is_one_line(problem_of, options, words):
    lens = fl.Lens(problem_of("mlp-relu"))
    with pytest.raises(BadInput, match=words) as error:
        fl.check_invariance(lens, **options)
    assert "\n" not in str(error.value)


def test_a_lens_is_needed_and_a_fresh_one(problem_of):
    problem = problem_of("mlp-relu")
    with pytest.raises(BadInput, match=r"expected a Lens, got Problem: check_invariance\(Lens\(problem\)\)"):
        fl.check_invariance(problem)
    lens = fl.Lens(problem)
    with torch.no_grad():
        problem.model[0].weight.mul_(2)
    with pytest.raises(StaleLens):
        fl.check_invariance(lens)
