"""Frozen parameters count in no measure of parameters, and the note names what was left out."""

from __future__ import annotations

import pytest
import torch
from networks import module_of
from torch import nn

import flatlens as fl
from flatlens.measures.notes import left_out

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double(), torch.arange(6) % 3
WEIGHTED = [name for name, m in fl.measures.MEASURES.items() if getattr(m, "place", "") == "weight"]
MOVED = ["feature_robustness", "locally_constant_labels", "representativeness"]
OF_LAYERS = ["layer_sharpness", "maximal_relative_flatness", "layer_factors"]


def network(frozen: list[str]) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    for name, p in net.named_parameters():
        p.requires_grad_(name.partition(".")[0] not in frozen)
    return net


def measured(frozen: list[str], **options) -> fl.Report:
    problem = fl.Problem(network(frozen), "cross_entropy", (X, Y), **options)
    names = [*WEIGHTED, *OF_LAYERS, "interpolation_sharpness", "hessian_trace(exact=True)", "mls"]
    return fl.measure(fl.Lens(problem), names)


def layers(report: fl.Report, name: str) -> dict[str, float]:
    return {layer: e.value for (measure, layer), e in report.items() if measure == name and layer is not None}


@pytest.mark.parametrize("name", [*WEIGHTED, *OF_LAYERS])
def test_only_trained_layers_have_rows_and_count_in_sums(name) -> None:
    whole, part = measured([]), measured(["0"])
    assert set(layers(whole, name)) == {"0", "2", "4"}
    kept = layers(part, name)
    assert set(kept) == {"2", "4"}
    for layer, value in kept.items():
        assert value == pytest.approx(layers(whole, name)[layer], rel=1e-6)
    total = f"{name}.sum" if (f"{name}.sum", None) in part else name
    assert part[total].value == pytest.approx(sum(kept.values()), rel=1e-6)
    if name in WEIGHTED:
        assert "1 frozen layers left out" in part[total].note
        assert "frozen" not in whole[total].note


def test_all_measures_them_again() -> None:
    whole, part = measured([]), measured(["0", "4"], parameters="all")
    for key, estimate in whole.items():
        assert part[key].value == pytest.approx(estimate.value, rel=1e-9), key


def test_the_last_layer_is_the_last_trained_one_and_named() -> None:
    whole, part = measured([]), measured(["4"])
    assert part["relative_flatness"].value == pytest.approx(whole["relative_flatness", "2"].value)
    for name in ("relative_flatness", "maximal_relative_flatness"):
        assert part[name].note == "of 2: 4 is frozen"
        assert not whole[name].note
    at_frozen = fl.measure(fl.Lens(fl.Problem(network(["4"]), "cross_entropy", (X, Y))), MOVED)
    assert all(at_frozen[name].note.endswith("of 4, which is frozen") for name in MOVED)


def test_one_of_several_output_layers_is_named() -> None:
    def forward(net: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = net.body(x).tanh()
        return {"a": net.a(h), "b": net.b(h)}

    torch.manual_seed(0)
    net = module_of(forward, body=(4, 5), a=(5, 3), b=(5, 2)).double()
    problem = fl.Problem(net, {"a": "cross_entropy", "b": "mse"}, (X, {"a": Y, "b": X[:, :2]}))
    names = ["relative_flatness", "maximal_relative_flatness", "feature_robustness"]
    report = fl.measure(fl.Lens(problem), names)
    assert all(report[name].note == "of b, one of several output layers" for name in names)
    assert not report["relative_flatness.sum"].note


def test_all_frozen_is_undefined_with_the_way_out() -> None:
    part = measured(["0", "2", "4"])
    for name in WEIGHTED:
        assert part[name].kind == "undefined"
        assert "parameters='all'" in part[name].note
    assert part["interpolation_sharpness"].kind == "undefined"
    assert part["mls"].value > 0


def test_the_note_names_three_matrices_and_counts_the_others() -> None:
    """Weights outside the given layers; vectors (biases) are never named."""
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    one = fl.Lens(fl.Problem(net, "mse", (torch.ones(3, 2), torch.ones(3, 2))))
    assert left_out(one, ["4"]) == "excluded (not requested): 0.weight, 1.weight, 2.weight and 1 more"
    assert left_out(one, ["0", "1", "2", "3", "4"]) == ""


def test_the_last_layer_may_be_a_matrix_that_is_no_layers() -> None:
    torch.manual_seed(0)
    net = module_of(
        lambda net, x: torch.einsum("ni,oi->no", net.a(x).relu(), net.w),
        a=nn.Linear(3, 4),
        w=nn.Parameter(torch.randn(2, 4)),
    ).double()
    problem = fl.Problem(net, "cross_entropy", (torch.randn(5, 3).double(), torch.arange(5) % 2))
    note = fl.measure(fl.Lens(problem), ["relative_flatness"])["relative_flatness"].note
    assert note.startswith("of a; excluded")
    assert note.endswith(": w")


def cut_off(how: str) -> nn.Module:
    """A head behind layers of which some are cut off from autograd, and a table, and matrices that nothing uses."""

    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if how == "no_grad":
            with torch.no_grad():
                z = net.below(x)
        elif how == "detach":
            z = net.below(x).detach()
        elif how == "inference copy":
            z = nn.functional.linear(x, net.below.weight.data, net.below.bias.data)
        else:
            z = net.below(x)
        return net.head(torch.tanh(z)) + net.table(torch.arange(len(x), device=x.device) * 0)

    return module_of(
        forward, below=nn.Linear(4, 5), head=nn.Linear(5, 3), unused=nn.Linear(2, 2), table=nn.Embedding(3, 3)
    )


@pytest.mark.parametrize("how", ["no_grad", "detach", "inference copy", "used"])
def test_the_reason_why_a_matrix_is_left_out_was_looked_at(how: str) -> None:
    torch.manual_seed(0)
    problem = fl.Problem(cut_off(how).double(), "cross_entropy", (X, Y))
    lens = fl.Lens(problem)
    note = left_out(lens, lens.plan.weights)
    counted = how in ("used", "detach")  # a call that the pass sees makes it a layer
    cut = ["unused.weight"] if counted else ["below.weight", "unused.weight"]
    no_derivative = "the outputs have no derivative with respect to them: unused, inside no_grad(), or detached"
    assert note == (
        f"excluded ({no_derivative}): {', '.join(cut)}; excluded (not the weight of a linear layer): table.weight"
    )
    assert fl.measure(lens, "weight_norm")["weight_norm"].note == note
