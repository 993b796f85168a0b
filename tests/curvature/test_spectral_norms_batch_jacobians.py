"""Norms of whole batches' Jacobians, against explicit Jacobians of the batch as one function."""

from __future__ import annotations

import pytest
import torch
from networks import network
from torch import Tensor, nn
from torch.func import functional_call

import flatlens as fl
from flatlens.measures import batch_jacobian_norm, layer_factors

TIGHT = {"rtol": 1e-9}


def normed(n: int = 12) -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(6)
    net = nn.Sequential(
        nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
    ).double()
    for module in net:
        if isinstance(module, nn.BatchNorm1d):
            nn.init.normal_(module.weight)
            module.running_var.fill_(2.0)
    return net.eval(), torch.randn(n, 5).double(), torch.randint(3, (n,))


def in_training(net: nn.Sequential, x: Tensor, first: int = 0) -> Tensor:
    """The network's modules from `first` on, with the moments of the batch, without running statistics."""
    for module in net[first:]:
        if isinstance(module, nn.BatchNorm1d):
            off = x - x.mean(0)
            x = off / (off.square().mean(0) + module.eps).sqrt() * module.weight + module.bias
        else:
            x = module(x)
    return x


def norm(of, x: Tensor) -> float:
    J = torch.func.jacrev(of)(x)
    return float(torch.linalg.matrix_norm(J.detach().reshape(J.shape[0] * J.shape[1], -1), 2))


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("size", [4, 12])
def test_the_norm_is_that_of_the_batch_as_one_function(size: int, softmax: bool) -> None:
    net, x, y = normed()
    of = lambda one: in_training(net, one).softmax(1) if softmax else in_training(net, one)  # noqa: E731
    truth = max(norm(of, x[k : k + size]) for k in range(0, 12, size))
    asked = batch_jacobian_norm(batch_statistics=size, softmax=softmax, **TIGHT)
    lens = fl.Lens(fl.Problem(net, "cross_entropy", (x, y)))
    assert fl.measure(lens, asked)[asked.key].value == pytest.approx(truth, rel=1e-7)
    coupled = fl.Lens(fl.Problem(net, "cross_entropy", (x, y), batchnorm="train", ghost_batch=size))
    plain = batch_jacobian_norm(softmax=softmax, **TIGHT)
    assert fl.measure(coupled, plain)[plain.key].value == pytest.approx(truth, rel=1e-7)
    assert fl.measure(lens, plain)[plain.key].value != pytest.approx(truth, rel=1e-2)


@pytest.mark.parametrize("name", ["mlp-tanh", "cnn-relu-inplace", "attention"])
def test_in_eval_mode_it_is_the_largest_over_samples(name: str) -> None:
    net, x, y = network(name, n=7)
    lens = fl.Lens(fl.Problem(net, "cross_entropy", (x, y)))
    asked = batch_jacobian_norm(**TIGHT)
    report = fl.measure(lens, [asked, "jacobian_norm"])
    assert report[asked.key].value == pytest.approx(report["jacobian_norm"].value, rel=1e-7)


@pytest.mark.parametrize("size", [4, 12])
def test_factors_in_train_mode_are_those_of_the_batch(size: int) -> None:
    net, x, y = normed()
    asked = layer_factors(batch_statistics=size, **TIGHT)
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), asked)
    parts = [x[k : k + size] for k in range(0, 12, size)]
    f = torch.cat([in_training(net, part) for part in parts]).detach()
    p = f.softmax(1)
    C = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    curvature = float(torch.linalg.eigvalsh(C)[:, -1].max()) / 12
    assert report[f"{asked.key}.loss_curvature"].value == pytest.approx(curvature**0.5, rel=1e-9)
    for layer in (0, 3, 5):
        features, blocks, above = [], torch.zeros(()), 0.0
        for k, part in enumerate(parts):
            phi = in_training(net[:layer], part).detach() if layer else part
            features.append(phi)
            z = net[layer](phi).detach()
            above = max(above, norm(lambda one, layer=layer: in_training(net, one, layer + 1), z))

            def outputs(W: Tensor, phi: Tensor = phi, layer: int = layer) -> Tensor:
                return in_training(net, functional_call(net[layer], {"weight": W}, (phi,)), layer + 1)

            D = torch.func.jacrev(outputs)(net[layer].weight.detach()).flatten(2)
            blocks = blocks + torch.einsum("nka,nkl,nlb->ab", D, C[k * size : (k + 1) * size], D) / 12
        truth = {
            "": float(torch.linalg.eigvalsh(blocks)[-1]),
            "features": float(torch.linalg.matrix_norm(torch.cat(features), 2)),
            "jacobian": above,
        }
        found = {part: report[f"{asked.key}.{part}" if part else asked.key, str(layer)].value for part in truth}
        assert found == pytest.approx(truth, rel=1e-6)
        assert found[""] <= curvature * found["features"] ** 2 * found["jacobian"] ** 2 * (1 + 1e-9)
