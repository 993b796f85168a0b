"""Eigenvalues of the Hessian where they are known with pen and paper."""

from __future__ import annotations

import pytest
import torch
from linear import A, linear, measured
from torch import nn

import flatlens as fl


@pytest.mark.parametrize("key", ["sharpness", "ggn_norm"])
def test_a_linear_networks_hessian_has_the_second_moments_of_its_inputs(key: str) -> None:
    """H = I (x) X^T X / n, and so is its Gauss-Newton part: each eigenvalue once per output."""
    found = measured(f"{key}(rtol=1e-8)")[f"{key}(rtol=1e-08)"]
    assert found.value == pytest.approx(float(torch.linalg.eigvalsh(A)[-1]), rel=1e-7)
    assert found.products > 0


def test_several_eigenvalues_at_both_ends() -> None:
    one = fl.measures.MEASURES["sharpness"](top_k=3, bottom_k=2, rtol=1e-8)
    values = torch.linalg.eigvalsh(A)
    truth = [values[2], values[2], values[1], values[0], values[0]]
    found = measured(one)[one.key].arrays["eigenvalues"]
    assert found.tolist() == pytest.approx([float(v) for v in truth], rel=1e-6)


def test_sharpness_of_a_layer_and_in_units_of_its_weight() -> None:
    report, largest = measured("layer_sharpness(rtol=1e-8)"), float(torch.linalg.eigvalsh(A)[-1])
    key = "layer_sharpness(rtol=1e-08)"
    assert report[key, "0"].value == pytest.approx(largest, rel=1e-7)
    size = float(linear()[0].weight.detach().square().sum())
    assert report[f"{key}.kappa", "0"].value == pytest.approx(size * largest, rel=1e-7)


def test_rows_of_a_linear_network_have_the_same_block() -> None:
    """sum_s ||w_s||^2 lmax(H_ss), every H_ss = X^T X / n."""
    found = measured("maximal_relative_flatness(rtol=1e-8)")["maximal_relative_flatness(rtol=1e-08)"]
    truth = float(linear()[0].weight.detach().square().sum() * torch.linalg.eigvalsh(A)[-1])
    assert found.value == pytest.approx(truth, rel=1e-7)


def test_outliers_align_where_the_network_is_linear_and_not_where_it_bends() -> None:
    """H = GN for a linear network; a gap that the residuals cover leaves the spaces unknown."""
    key = "ggn_norm(top_k=2, rtol=1e-08, alignment=True)"
    report = measured(key)
    assert report[f"{key}.alignment"].value == pytest.approx(1, rel=1e-6)
    assert report[f"{key}.difference"].value == pytest.approx(0, abs=1e-7)
    odd = measured("ggn_norm(top_k=1, rtol=1e-08, alignment=True)")["ggn_norm(rtol=1e-08, alignment=True).alignment"]
    assert (odd.kind, odd.note[:20]) == ("undefined", "eigenvalues 1 and 2 ")  # each occurs twice


def test_the_error_of_an_alignment_covers_a_coarse_search() -> None:
    """Against searches to 1e-9, at a tolerance that leaves the vectors visibly wrong."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double(), torch.randn(40, 6).double()
    lens = fl.Lens(fl.Problem(net, "mse", (x, torch.randn(40, 3).double())))
    name = "ggn_norm(top_k=3, rtol={}, alignment=True)"
    fine = fl.measure(lens, name.format(1e-9))[f"{name.format(1e-09)}.alignment"]
    coarse = fl.measure(fl.Lens(lens.problem), name.format(0.02))[f"{name.format(0.02)}.alignment"]
    assert abs(coarse.value - fine.value) > 1e-7
    assert abs(coarse.value - fine.value) <= 1.96 * coarse.stderr
    assert fine.value < 0.999


def told(note: str) -> float:
    """The residual that a note on several searches tells, as a share of the value."""
    return float(note.partition("to a residual of ")[2].partition(" of its size")[0])


@pytest.mark.parametrize("name", ["layer_sharpness", "layer_factors"])
def test_the_note_on_several_searches_tells_what_they_reached(name: str) -> None:
    """Float32 cannot reach 1e-9."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net, x = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 2)), torch.randn(60, 30)
    report = fl.measure(fl.Lens(fl.Problem(net, "mse", (x, torch.zeros(60, 2)))), [f"{name}(rtol=1e-9)"])
    key = f"{name}(rtol=1e-09)"
    reached = max(float(report[key, at].arrays["residuals"][0]) / report[key, at].value for at in ("0", "2"))
    assert reached > 1e-7
    assert told(report[key].note) == pytest.approx(reached, rel=0.5)  # it has one digit


@pytest.mark.parametrize("layer", [nn.Linear(201, 2), nn.Conv1d(1, 2, 201)])
def test_the_note_on_rows_tells_what_their_searches_reached(layer: nn.Module) -> None:
    """A search has four products at least, and they reach more than half."""
    x = torch.randn(30, 201, generator=torch.Generator().manual_seed(0))
    net = nn.Sequential(layer) if isinstance(layer, nn.Linear) else nn.Sequential(layer, nn.Flatten())
    data = x if isinstance(layer, nn.Linear) else x[:, None]
    report = fl.measure(
        fl.Lens(fl.Problem(net, "half_squared_error", (data, torch.zeros(30, 2)))),
        ["maximal_relative_flatness(rtol=0.9)"],
    )
    for key in ("maximal_relative_flatness(rtol=0.9)", "maximal_relative_flatness(rtol=0.9).sum"):
        assert 0 < told(report[key].note) < 0.6


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_rows_of_a_transposed_convolution_are_output_channels_within_their_group(groups: int) -> None:
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(4, 8, 2, stride=2, groups=groups)
    net = nn.Sequential(layer, nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)).double()
    x, y = torch.randn(5, 4, 3, 3).double(), torch.randint(0, 3, (5,))
    found = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), "maximal_relative_flatness(rtol=1e-8)")
    (g,) = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), layer.weight, create_graph=True)
    H = torch.stack([torch.autograd.grad(v, layer.weight, retain_graph=True)[0] for v in g.flatten()])
    inputs, outputs = 4 // groups, 8 // groups
    at = torch.arange(layer.weight.numel()).reshape(groups, inputs, outputs, -1).transpose(1, 2).reshape(8, -1)
    w, H = layer.weight.detach().flatten(), H.flatten(1)
    truth = sum(float(w[row].square().sum() * torch.linalg.eigvalsh(H[row][:, row])[-1]) for row in at)
    assert found["maximal_relative_flatness(rtol=1e-08)", "0"].value == pytest.approx(truth, rel=1e-6)
