"""Hidden representations: dx^l/dx beside the explicit Jacobian of the network below each layer."""

from __future__ import annotations

import pytest
import torch
from builders import chain, normal
from networks import network
from torch import Tensor, nn
from torch.func import jacrev, vmap

import flatlens as fl

KEY = "representation_mls"


def below(net: nn.Module, layer: str, x: Tensor) -> Tensor:
    """dx^l/dx, (n, m, M), through a hook on the layer, sample by sample."""

    def read(one: Tensor) -> Tensor:
        seen = []
        handle = net.get_submodule(layer).register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten()))
        net(one[None])
        handle.remove()
        return seen[0]

    return torch.stack([torch.autograd.functional.jacobian(read, one).reshape(-1, one.numel()) for one in x])


@pytest.mark.parametrize("name", ["mlp-relu", "mlp-tanh", "cnn-tanh", "residual", "attention"])
def test_norm_volume_and_dimension_are_those_of_the_explicit_jacobian(name: str) -> None:
    net, x, y = network(name)
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), [KEY])
    layers = [at for key, at in report if key == KEY and at is not None]
    assert layers
    for layer in layers:
        J = below(net, layer, x)
        s = torch.linalg.svdvals(J)
        assert report[KEY, layer].value == pytest.approx(float(s[:, 0].mean()), rel=1e-10)
        dimension = s.square().sum(1) ** 2 / s.pow(4).sum(1)
        assert report[f"{KEY}.dimension", layer].value == pytest.approx(float(dimension.mean()), rel=1e-9)
        small = J @ J.mT if J.shape[1] < J.shape[2] else J.mT @ J
        full = s[:, -1] > 1e-12 * s[:, 0]
        found = report[f"{KEY}.log_volume", layer]
        if bool(full.any()):
            assert found.value == pytest.approx(float(torch.logdet(small)[full].mean()) / 2, rel=1e-6)
        assert (found.kind == "undefined") == (not bool(full.any()))
    assert report[KEY].value == report[KEY, layers[-1]].value


def test_the_output_follows_the_input_through_every_representation() -> None:
    """||df/dx|| <= ||df/dx^l|| ||dx^l/dx|| for each sample, and below the last linear layer df/dx = W dx^l/dx."""
    net, x = chain([4, 6, 5, 3], 2), normal(7, 4, seed=1)
    lens = fl.Lens(fl.Problem(net, "half_squared_error", (x, normal(7, 3))))
    report = fl.measure(lens, ["mls", KEY])
    for layer in ("2", "4"):
        product = report["mls", layer].samples * report[KEY, layer].samples
        assert bool((report["mls"].samples <= product * (1 + 1e-12)).all())
    through = net[4].weight.detach() @ below(net, "4", x)
    assert torch.allclose(torch.linalg.matrix_norm(through, 2), report["mls"].samples, rtol=1e-10)


def test_the_largest_of_many_features_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, y = network("mlp-tanh")
    problem = fl.Problem(net, "cross_entropy", (x, y))
    exact = fl.measure(fl.Lens(problem), [KEY])
    monkeypatch.setattr("flatlens.measures.sensitivity.FEATURES", 3)
    found = fl.measure(fl.Lens(problem), [f"{KEY}(rtol=1e-9)"])
    assert found[f"{KEY}(rtol=1e-09)"].value == pytest.approx(exact[KEY].value, rel=1e-6)
    assert found[f"{KEY}(rtol=1e-09).dimension"].kind == "undefined"


def test_a_wide_layer_has_the_volume_that_definition_3_1_prints() -> None:
    """det(df^T df): of the three largest, and of all singular values of a 6 x 4 matrix."""
    net, x = chain([4, 6, 3], 3), normal(5, 4, seed=1)
    lens = fl.Lens(fl.Problem(net, "half_squared_error", (x, normal(5, 3))))
    J = vmap(jacrev(net[:2]))(x)
    J = J.detach()
    s = torch.linalg.svdvals(J)
    for key, truth in ((KEY, torch.logdet(J.mT @ J) / 2), (f"{KEY}(top_k=3)", s[:, :3].log().sum(1))):
        assert fl.measure(lens, [key])[f"{key}.log_volume"].value == pytest.approx(float(truth.mean()), rel=1e-9)


def test_a_network_of_one_layer_has_no_hidden_representation() -> None:
    lens = fl.Lens(fl.Problem(nn.Linear(3, 2), "mse", (torch.ones(4, 3), torch.zeros(4, 2))))
    assert fl.measure(lens, [KEY])[KEY].note.startswith("no layer reads a representation")
