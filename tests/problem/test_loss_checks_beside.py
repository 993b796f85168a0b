"""A loss that leads to weights beside the outputs, or whose targets change, is refused; any other is measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import cross_entropy as each
from networks import module_of
from torch import Tensor, nn
from torch.nn import functional as F

import flatlens as fl
from flatlens.errors import BadData, BadLoss
from flatlens.problem.loss_checks import same_targets

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)).double()
Y = torch.arange(12) % 3
WEIGHTS = "the loss depends on the weights beside the outputs"


def mixture() -> nn.Module:
    """A mixture of experts that keeps their shares, and what a loss of them needs."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        shares = net.gate(x).softmax(1)
        net.aux = shares.square().sum(1)
        return torch.stack([shares[:, k, None] * expert(x) for k, expert in enumerate(net.experts)]).sum(0)

    return module_of(forward, gate=(4, 2), experts=nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]))


@pytest.fixture
def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


@pytest.fixture
def experts() -> nn.Module:
    torch.manual_seed(0)
    return mixture().double()


def squares(net: nn.Module) -> Any:
    return sum(p.square().sum() for p in net.parameters())


@pytest.mark.parametrize("at_minimum", [False, True])
def test_a_penalty_on_weights(net: nn.Sequential, at_minimum: bool) -> None:
    """Also where its slope is zero: its curvature is not."""
    start = [p.detach().clone() * at_minimum for p in net.parameters()]

    def penalised(f: Tensor, y: Tensor) -> Any:
        return each(f, y) + 0.05 * sum((p - q).square().sum() for p, q in zip(net.parameters(), start, strict=True))

    with pytest.raises(BadLoss, match=rf"{WEIGHTS} \(0.weight\): return what it needs as an output"):
        fl.Problem(net, penalised, (X, Y))


def test_a_penalty_in_a_module_of_a_network_in_another_dtype(net: nn.Sequential) -> None:
    penalised = module_of(lambda loss, f, y: F.cross_entropy(f, y) + 0.05 * squares(net))
    with pytest.raises(BadLoss, match=WEIGHTS):
        fl.Problem(net.float(), penalised, (X, Y), dtype=torch.float64)


def test_a_penalty_of_frozen_weights_counts_where_they_are_measured(net: nn.Sequential) -> None:
    net[0].requires_grad_(False)

    def penalised(f: Tensor, y: Tensor) -> Any:
        return each(f, y) + 0.05 * squares(net[0])

    assert fl.Problem(net, penalised, (X, Y)).n == 12
    with pytest.raises(BadLoss, match=WEIGHTS):
        fl.Problem(net, penalised, (X, Y), parameters="all")
    assert not net[0].weight.requires_grad


def test_a_penalty_in_one_rare_chunk_alone(net: nn.Sequential) -> None:
    def penalised(f: Tensor, y: Tensor) -> Any:
        return each(f, y) + (0.05 * squares(net) if bool((y == 2).any()) else 0.0)

    x, y = X.repeat(100, 1), Y.clamp(max=1).repeat(100)
    assert fl.Problem(net, penalised, (x, y)).n == 1200
    y[1100] = 2
    with pytest.raises(BadLoss, match=WEIGHTS):
        fl.Problem(net, penalised, (x, y))


def test_what_the_network_keeps_of_a_pass(experts: nn.Module) -> None:
    for loss in (lambda f, y: each(f, y) + experts.aux, lambda f, y: each(f, y) + 0.1 * experts.aux.mean()):
        with pytest.raises(BadLoss, match=rf"{WEIGHTS} \(gate.weight\)"):
            fl.Problem(experts, loss, (X, Y))


def test_what_a_hook_keeps_of_a_pass(net: nn.Sequential) -> None:
    kept: dict[str, Tensor] = {}
    net[1].register_forward_hook(lambda module, x, h: kept.update(h=h))
    with pytest.raises(BadLoss, match=WEIGHTS):
        fl.Problem(net, lambda f, y: each(f, y) + 0.1 * kept["h"].abs().mean(), (X, Y))


@pytest.mark.parametrize("loss", ["mse", lambda f, y: (f - y).square().sum(1)])
def test_targets_that_the_network_computes(net: nn.Sequential, loss: Any) -> None:
    def bootstrapped(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return model(batch[0]), 0.9 * model(batch[1])

    def detached(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return model(batch[0]), 0.9 * model(batch[1]).detach()

    with pytest.raises(BadLoss, match=rf"{WEIGHTS}.*detach\(\) the targets"):
        fl.Problem(net, loss, (X, X.flip(0)), forward=bootstrapped)
    lens = fl.Lens(fl.Problem(net, loss, (X, X.flip(0)), forward=detached))
    parameters = list(net.parameters())
    f, y = detached(net, (X, X.flip(0)))
    risk = F.mse_loss(f, y) if loss == "mse" else loss(f, y).mean()
    slopes = torch.cat([s.flatten() for s in torch.autograd.grad(risk, parameters, create_graph=True)])
    rows = [torch.autograd.grad(s, parameters, retain_graph=True) for s in slopes]
    trace = sum(float(torch.cat([part.flatten() for part in row])[k]) for k, row in enumerate(rows))
    assert fl.measure(lens, "hessian_trace(exact=True)")["hessian_trace(exact=True)"].value == pytest.approx(trace)


def test_losses_without_a_path_to_weights_are_measured(net: nn.Sequential, experts: nn.Module) -> None:
    def inner(net: nn.Module, x: Tensor) -> Tensor:
        """Its outputs have a graph although none is asked for."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            found: Tensor = torch.autograd.grad(net.net(x).square().sum(), x, create_graph=True)[0]
            return found

    learned = module_of(lambda loss, f, y: loss.scale.exp() * each(f, y), scale=nn.Parameter(torch.zeros(())))
    assert fl.Problem(net, learned, (X, Y)).n == 12
    assert fl.Problem(net, lambda f, y: each(f, y) + 0 * sum(p.sum() for p in net.parameters()), (X, Y)).n == 12
    assert fl.Problem(experts, lambda f, y: each(f, y) + 0.1 * experts.aux.detach().mean(), (X, Y)).n == 12
    assert fl.Problem(module_of(inner, net=net), "mse", (X, X)).n == 12


def standardised(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    x, (y, gain) = batch
    return model(x), (y, (gain - gain.mean()) / gain.std())


def policy(f: Tensor, y: Any) -> Any:
    return each(f, y[0]) * y[1]


def test_targets_that_are_normalised_over_the_batch(net: nn.Sequential) -> None:
    gain = torch.arange(12.0).double()
    with pytest.raises(BadData, match="a sample's targets change with the other samples of its batch"):
        fl.Problem(net, policy, (X, (Y, gain)), forward=standardised)
    ready = standardised(net, (X, (Y, gain)))[1]
    assert fl.Problem(net, policy, (X, ready), forward=lambda model, batch: (model(batch[0]), batch[1])).n == 12


@pytest.mark.parametrize("training", [False, True])
def test_a_teacher_in_train_mode(net: nn.Sequential, training: bool) -> None:
    teacher = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).train(training)

    def taught(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return model(batch[0]), teacher(batch[0].float()).detach().double().softmax(1)

    if training:
        with pytest.raises(BadData, match=r"different targets for the same batch twice.*call eval"):
            fl.Problem(net, "cross_entropy", (X, Y), forward=taught)
    else:
        assert fl.Problem(net, "cross_entropy", (X, Y), forward=taught).n == 12


def test_same_targets() -> None:
    rows, y, some = torch.tensor([2, 0]), torch.tensor([1.0, torch.nan, torch.inf]), torch.tensor([torch.inf, 1.0])
    assert same_targets({"a": y, "b": (torch.arange(3), 0.5, "x")}, {"a": y, "b": (torch.arange(3), 0.5, "x")}, 100)
    assert same_targets({"a": y}, {"a": some}, 100, rows, 3)
    assert not same_targets({"a": y}, {"a": some.flip(0)}, 100, rows, 3)
    assert same_targets(torch.ones(2), torch.ones(2) + 1e-6, 100)
    assert not same_targets(torch.ones(2), torch.ones(2) + 1e-4, 100)
    assert same_targets(torch.tensor([[1, 2, -100], [3, -100, -100]]), torch.tensor([[3]]), 100, torch.tensor([1]), 2)
    assert not same_targets(torch.arange(3), torch.arange(2), 100)
    assert not same_targets(torch.arange(2), torch.arange(2).flip(0), 100)
