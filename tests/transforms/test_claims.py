"""What the papers claim of rescalings, row by row: reparam2019 Table 1, relative2021 Theorem 4."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flatlens as fl
from flatlens.transforms import TRANSFORMS
from flatlens.transforms.neurons import between_layers

TABLE_1 = {  # row -> (our name, one value per), and under which moves it stays
    "kappa^l": ("layer_sharpness(rtol=1e-11).kappa", "layer", {"layerwise"}),
    "kappa_tau^l": ("kappa_trace", "layer", {"layerwise"}),
    "kappa^max": ("layer_sharpness(rtol=1e-11).kappa_max", "network", {"layerwise"}),
    "kappa^Sigma": ("layer_sharpness(rtol=1e-11).kappa", "network", {"layerwise"}),
    "kappa_tau^max": ("kappa_trace.max", "network", {"layerwise"}),
    "kappa_tau^Sigma": ("kappa_trace", "network", {"layerwise"}),
    "rho^l": ("neuron_flatness.max", "layer", {"layerwise", "neuronwise"}),
    "rho_sigma^l": ("neuron_flatness", "layer", {"layerwise", "neuronwise"}),
    "rho^max": ("neuron_flatness.max", "network", {"layerwise", "neuronwise"}),
    "rho^Sigma": ("neuron_flatness", "network", {"layerwise", "neuronwise"}),
}
LAYERS = ("0", "2", "4")


def measured(problem: fl.Problem, name: str) -> fl.Report:
    return fl.measure(fl.Lens(problem), [name.rpartition(").")[0] + ")" if ")." in name else name.partition(".")[0]])


@pytest.mark.parametrize("move", ["layerwise", "neuronwise"])
@pytest.mark.parametrize("row", TABLE_1)
def test_table_1_of_reparam2019(problem_of, row, move):
    name, per, survives = TABLE_1[row]
    problem = problem_of("mlp-relu", 40)
    moved = TRANSFORMS[move].apply(problem).problem
    a, b = measured(problem, name), measured(moved, name)
    places = LAYERS if per == "layer" else (None,)
    stays = all(b[name, at].value == pytest.approx(a[name, at].value, rel=1e-8) for at in places)
    assert stays == (move in survives)


def test_the_table_speaks_of_the_rows_of_table_1(problem_of):
    names = sorted(
        {name.partition(".")[0] if ")." not in name else "layer_sharpness" for name, _, _ in TABLE_1.values()}
    )
    report = fl.check_invariance(fl.Lens(problem_of("mlp-relu", 40)), names)
    for name, per, survives in TABLE_1.values():
        if per == "network":
            for move in ("layerwise", "neuronwise"):
                cell = report[name.replace("(rtol=1e-11)", ""), move]
                assert (cell.declared, cell.unchanged, cell.agrees) == (move in survives, move in survives, True)


def test_layerwise_moves_the_trace_by_orders_of_magnitude_and_not_relative_flatness(problem_of):
    problem = problem_of("mlp-relu", 40)
    moved = TRANSFORMS["layerwise"].apply(problem)
    assert moved.difference < 1e-10
    names = ["ggn_trace", "hessian_trace", "relative_flatness"]
    a, b = (fl.measure(fl.Lens(one), names) for one in (problem, moved.problem))
    for name in ("ggn_trace", "hessian_trace"):
        assert b[name].value / a[name].value > 10
        assert b["ggn_trace", "4"].value / a["ggn_trace", "4"].value > 25  # a^2, of the features
    for key in ("relative_flatness", "relative_flatness.sum", "relative_flatness.max"):
        assert b[key].value == pytest.approx(a[key].value, rel=1e-8)
    for layer in LAYERS:
        assert b["relative_flatness", layer].value == pytest.approx(a["relative_flatness", layer].value, rel=1e-8)


def test_neuronwise_moves_relative_flatness_of_the_layer_that_reads_the_neurons_alone(problem_of):
    """Theorem 7 and the remark after it: only a rescaling of the features of layer l can move kappa^l."""
    problem = problem_of("mlp-relu", 40)
    first = replace(
        TRANSFORMS["neuronwise"],
        where=lambda wiring: replace(between_layers(wiring), links=between_layers(wiring).links[:1]),
    )
    a, b = (
        fl.measure(fl.Lens(one), ["relative_flatness"]) for one in (problem, first.apply(problem).problem)
    )  # fmt: skip
    change = {at: b["relative_flatness", at].value / a["relative_flatness", at].value - 1 for at in LAYERS}
    assert abs(change["0"]) < 1e-10
    assert abs(change["4"]) < 1e-10
    assert abs(change["2"]) > 1e-2


def test_theorem_4_holds_with_deviations_and_not_with_variances(problem_of):
    problem = problem_of("mlp-relu", 40)
    moved = TRANSFORMS["neuronwise"].apply(problem).problem
    names = {how: f"relative_flatness(normalized={how!r})" for how in ("std", "variance")}
    a, b = (fl.measure(fl.Lens(one), list(names.values())) for one in (problem, moved))
    assert b[names["std"]].value == pytest.approx(a[names["std"]].value, rel=1e-10)
    assert b[names["variance"]].value != pytest.approx(a[names["variance"]].value, rel=0.1)


@pytest.mark.parametrize(("name", "how"), [("", "std"), (".published", "variance")])
@pytest.mark.parametrize("network", ["mlp-relu", "cnn-1d", "cnn"])
def test_the_preprocessing_applied_is_the_option_of_relative_flatness(problem_of, network, name, how):
    problem = problem_of(network, 43)
    moved = TRANSFORMS[f"feature_normalization{name}"].apply(problem)
    option = f"relative_flatness(normalized={how!r})"
    before = fl.measure(fl.Lens(problem), [option])
    after = fl.measure(fl.Lens(moved.problem), ["relative_flatness"])
    layers = [link.rpartition(" -> ")[2] for link in moved.links]
    assert layers
    for layer in layers:
        if not before[option, layer].note:  # no constant features
            want = before[option, layer].value
            assert after["relative_flatness", layer].value == pytest.approx(want, rel=1e-10)
    assert any(not before[option, layer].note for layer in layers)


def test_the_preprocessing_chooses_one_of_all_rescaled_networks(problem_of):
    """Cor. 8: V removes the dependence on neuron-wise rescalings; as printed it does not."""
    problem = problem_of("mlp-relu", 40)
    scaled = TRANSFORMS["neuronwise"].apply(problem).problem
    for name, alike in (("feature_normalization", True), ("feature_normalization.published", False)):
        one, two = (TRANSFORMS[name].apply(each).model for each in (problem, scaled))
        same = all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(one.parameters(), two.parameters(), strict=True))
        assert same == alike


@pytest.mark.parametrize(("name", "power"), [("", 1), (".published", 2)])
def test_a_constant_feature_has_its_value_as_unit_and_dead_ones_are_counted(problem_of, name, power):
    net = problem_of("mlp-relu").model
    with torch.no_grad():
        net[0].weight[:2] = 0
        net[0].bias[:2] = torch.tensor([2.0, -1.0])  # one constant, one dead
    problem = fl.Problem(net, "cross_entropy", (torch.randn(40, 6).double(), torch.arange(40) % 3))
    moved = TRANSFORMS[f"feature_normalization{name}"].apply(problem)
    assert "1 features that 2 reads are 0 for all data" in moved.note
    want = torch.tensor([2.0 / 2.0**power, -1.0]).double()
    torch.testing.assert_close(moved.model[0].bias[:2], want)
    columns = moved.model[2].weight[:, :2] / net[2].weight[:, :2]  # rows have factors of their own
    torch.testing.assert_close(columns[:, 0] / columns[:, 1], torch.full((5,), 2.0**power).double())
    with torch.no_grad():
        net[2].weight[:, 1] = 0  # without the dead unit's weights, the option is the flatness of the moved network
    option = f"relative_flatness(normalized={('std', 'variance')[power - 1]!r})"
    whole = TRANSFORMS[f"feature_normalization{name}"].apply(problem).problem
    want = fl.measure(fl.Lens(problem), [option])[option, "2"].value
    assert fl.measure(fl.Lens(whole), ["relative_flatness"])["relative_flatness", "2"].value == pytest.approx(want)
