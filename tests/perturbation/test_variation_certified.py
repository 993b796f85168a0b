"""The certified bound on the change of the Jacobian: above all that is found, and tight where it can be."""

from __future__ import annotations

import math

import of_the_table
import pytest
import torch
from builders import mlp, normal, seeded
from networks import module_of
from torch import Tensor, nn
from torch.nn import functional as F

import flatlens as fl
from flatlens.operations.table import operation_of
from flatlens.perturbation.inputs import Refused
from flatlens.perturbation.variation import certified_variation, found_variation, read_chain

ACTIVATIONS = (
    *of_the_table.ACTIVATIONS,
    nn.LeakyReLU(0.2), nn.Hardtanh(-0.7, 0.4), nn.ELU(0.3),
)  # fmt: skip


def problem_of(net: nn.Module, x: Tensor) -> fl.Problem:
    net, x = net.to(torch.float64).eval(), x.to(torch.float64)
    return fl.Problem(net, "mse", (x, torch.zeros(len(x), net(x).shape[1], dtype=torch.float64)))


def upper(problem: fl.Problem, delta: float) -> Tensor:
    return certified_variation(problem, problem.model, delta)


def lower(problem: fl.Problem, delta: float) -> Tensor:
    return found_variation(problem, problem.model, delta, restarts=4, steps=8, generator=seeded(0))


def cnn(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.AvgPool2d(2), nn.Dropout(0.3),
        nn.Conv2d(3, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3), nn.Sigmoid(),
    )  # fmt: skip
    with torch.no_grad():
        net[1].running_mean.normal_()
        net[1].running_var.uniform_(0.5, 2)
    return net


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("act", ACTIVATIONS, ids=repr)
def test_nothing_found_is_above_it(act: nn.Module, depth: int) -> None:
    for seed, inputs in enumerate((1, 3, 30)):
        problem = problem_of(mlp((inputs, *depth * [10], 3), lambda: act, seed), 2 * normal(4, inputs, seed=seed))
        for delta in (0.05, 2.0):
            found, bound = lower(problem, delta), upper(problem, delta)
            assert bool((found <= bound).all()), (inputs, delta)


def test_of_convolutions() -> None:
    for seed in range(2):
        problem = problem_of(cnn(seed), normal(3, 1, 6, 6, seed=seed))
        for delta in (0.01, 0.3, 2.0):
            found, bound = lower(problem, delta), upper(problem, delta)
            assert bool((found <= bound).all())
        assert bool((upper(problem, 0.01) < 25 * lower(problem, 0.01)).all())


@pytest.mark.parametrize(("x", "delta"), [(0.0, 0.3), (0.2, 0.5), (1.5, 0.4)])
def test_exact_for_one_neuron(x: float, delta: float) -> None:
    """f = 2 tanh(3x): the slope's range over the interval itself."""
    net = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1))
    with torch.no_grad():
        net[0].weight.fill_(3.0)
        net[0].bias.zero_()
        net[2].weight.fill_(2.0)
    far, near = abs(x) + delta, max(0.0, abs(x) - delta)
    expected = 6 / math.cosh(3 * near) ** 2 - 6 / math.cosh(3 * far) ** 2
    bound = float(upper(problem_of(net, torch.tensor([[x]], dtype=torch.float64)), delta))
    assert bound == pytest.approx(expected, rel=1e-9)
    assert bound >= expected


def test_exact_for_independent_neurons() -> None:
    """Every neuron with a kink in the ball can switch on its own: diag(3, 4)."""
    net = nn.Sequential(nn.ReLU(), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        net[1].weight.copy_(torch.diag(torch.tensor([3.0, 4.0])))
    bound = upper(problem_of(net, torch.tensor([[0.1, 0.1], [0.1, 2.0], [2.0, 2.0]])), 1.0)
    assert bound.tolist() == pytest.approx([4.0, 3.0, 0.0], rel=1e-9)


def test_zero_where_nothing_varies() -> None:
    """Linear networks, and ReLU ones whose kinks all lie outside the ball: exactly 0."""
    linear = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Identity(), nn.BatchNorm1d(5), nn.Linear(5, 2))
    assert upper(problem_of(linear, normal(6, 3, 4)), 10.0).tolist() == [0.0] * 6
    problem = problem_of(mlp((3, 10, 10, 3), nn.ReLU), normal(40, 3))
    bound = upper(problem, 1e-3)
    assert 20 < int((bound == 0).sum()) < 41
    z = problem.model[0](normal(40, 3))  # type: ignore[operator, index]
    near = z.abs() <= 1e-3 * problem.model[0].weight.norm(dim=1)  # type: ignore[operator, index]
    assert bool((bound[near.any(1)] > 0).all())


def test_tight_in_small_balls() -> None:
    """As delta shrinks the ratio of bound to finding tends to a constant of the network: no slack of its own."""
    ratios = []
    for seed in range(5):
        problem = problem_of(mlp((4, 10, 10, 3), nn.Tanh, seed), normal(5, 4, seed=seed))
        pairs = [(upper(problem, delta), lower(problem, delta)) for delta in (1e-4, 1e-2)]
        ratios.append(torch.stack([bound / found for bound, found in pairs]))
    ratio = torch.cat(ratios, 1)
    assert bool((ratio >= 1).all())
    assert float(ratio.mean()) < 6
    assert torch.allclose(ratio[0], ratio[1], rtol=0.2)


def test_it_grows_with_the_ball_up_to_a_limit() -> None:
    problem = problem_of(mlp((3, 10, 10, 10, 3), nn.ReLU), normal(5, 3))
    bounds = torch.stack([upper(problem, delta) for delta in (0.01, 0.1, 1.0, 10.0, 1e4, 1e8)])
    assert bool((bounds.diff(dim=0) >= -1e-9).all())
    weights = [p.detach() for p in problem.model.parameters() if p.ndim == 2]
    product = math.prod(float(torch.linalg.matrix_norm(W, 2)) for W in weights)
    assert bool((bounds[-1] <= 2 * product * (1 + 1e-9)).all())


@pytest.mark.parametrize("act", ACTIVATIONS, ids=repr)
def test_values_and_slopes_over_an_interval(act: nn.Module) -> None:
    found = operation_of(act)
    assert found is not None
    known = found.activation_of(act)
    assert known is not None
    generator = torch.Generator().manual_seed(0)
    low = 4 * torch.randn(300, 1, generator=generator, dtype=torch.float64)
    high = low + 4 * torch.rand(300, 1, generator=generator, dtype=torch.float64) ** 3
    z = (low + (high - low) * torch.linspace(0, 1, 401, dtype=torch.float64)).requires_grad_()
    value = act(z)
    (slope,) = torch.autograd.grad(value.sum(), z)
    for (least, most), seen in ((known.values(low, high), value.detach()), (known.slopes(low, high), slope)):
        assert bool((least <= seen + 1e-14).all())
        assert bool((seen <= most + 1e-14).all())
        jump = 1.0 if seen is slope and known.slack == 0 else 0.05
        assert bool((seen.amin(1, keepdim=True) - least <= jump).all())
        assert bool((most - seen.amax(1, keepdim=True) <= jump).all())


def test_slopes_at_points() -> None:
    z = torch.linspace(-6, 6, 101, dtype=torch.float64).requires_grad_()
    for act in ACTIVATIONS:
        found = operation_of(act)
        assert found is not None
        known = found.activation_of(act)
        assert known is not None
        (slope,) = torch.autograd.grad(act(z).sum(), z)
        assert torch.allclose(known.slope(z.detach()), slope, rtol=1e-12, atol=1e-14), act
        assert torch.allclose(known.value(z.detach()), act(z.detach()), rtol=1e-8), act


def own(way: str) -> nn.Module:
    """A forward written by hand, in one of several ways."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        x = (x - net.mean) / 2.0
        h = net.conv(x)
        if way == "functions":
            h = F.dropout(F.leaky_relu(h, 0.1), 0.5, net.training)
            return net.fc(torch.tanh(h.view(h.size(0), -1)))
        if way == "methods":
            return net.fc(h.relu().reshape(h.shape[0], -1))
        h = F.relu(h).flatten(1)
        if way == "residual":
            h = h + F.relu(net.same(h))
        elif way == "gate":
            h = h * torch.sigmoid(h)
        elif way == "square":
            h = h * h
        elif way == "inverse":
            h = 1.0 / (h + 1.0)
        elif way == "norm":
            h = F.layer_norm(h, (8,))
        elif way == "branch":
            h = h if bool((h >= 0).all()) else -h
        return net.fc(h)

    return module_of(forward, conv=nn.Conv2d(1, 2, 3), fc=(8, 3), same=(8, 8), mean=torch.tensor(0.3))


@pytest.mark.parametrize("way", ["functions", "methods"])
def test_hand_written_chains(way: str) -> None:
    torch.manual_seed(0)
    problem = problem_of(own(way), normal(5, 1, 4, 4))
    chain = read_chain(problem, problem.model)
    x = normal(5, 1, 4, 4, seed=3)
    assert torch.allclose(chain(x.flatten(1)), problem.model(x), rtol=1e-12)
    assert bool((lower(problem, 0.3) <= upper(problem, 0.3)).all())


@pytest.mark.parametrize(
    ("way", "named"),
    [("residual", "add"), ("gate", "mul"), ("square", "mul"), ("inverse", "truediv"), ("norm", "layer_norm"),
     ("branch", "trace|symbol")],
)  # fmt: skip
def test_what_is_no_chain_is_named(way: str, named: str) -> None:
    problem = problem_of(own(way), normal(5, 1, 4, 4))
    with pytest.raises(Refused, match=named) as caught:
        upper(problem, 0.1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layer", "named"),
    [(nn.MaxPool1d(2), "MaxPool1d"), (nn.LayerNorm(4), "LayerNorm"), (nn.GELU("tanh"), "GELU"),
     (nn.LeakyReLU(-1.0), "LeakyReLU"), (nn.Softmax(1), "Softmax")],
    ids=lambda value: str(value),
)  # fmt: skip
def test_what_is_no_bounded_layer_is_named(layer: nn.Module, named: str) -> None:
    net = nn.Sequential(nn.Linear(3, 4), layer)
    problem = problem_of(net, normal(5, 3))
    with pytest.raises(Refused, match=named):
        upper(problem, 0.1)


def test_what_is_too_large_is_refused() -> None:
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 2)).double()
    problem = fl.Problem(net, "mse", (normal(2, 1, 16, 16), torch.zeros(2, 2)), memory="4MB")
    with pytest.raises(Refused, match="memory"):
        upper(problem, 0.1)


def test_a_hook_is_noticed() -> None:
    """A layer that does not do what its type says."""
    net = mlp((3, 10, 3), nn.ReLU)
    net[0].register_forward_hook(lambda module, args, z: z.abs())
    with pytest.raises(Refused, match="other outputs"):
        upper(problem_of(net, normal(5, 3)), 0.1)


def test_the_model_is_left_alone() -> None:
    net = cnn(0).double().train()
    before = {name: t.clone() for name, t in net.state_dict().items()}
    problem = fl.Problem(net, "mse", (normal(3, 1, 6, 6), torch.zeros(3, 3)))
    lens = fl.Lens(problem)
    upper(problem, 0.1)
    lens.require_fresh()
    assert net.training
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert not any(module._forward_hooks for module in net.modules())


def test_in_float64_of_a_float32_network() -> None:
    net = mlp((3, 10, 10, 3), nn.Tanh).float()
    single = fl.Problem(net, "mse", (normal(4, 3).float(), torch.zeros(4, 3)))
    double = fl.Problem(net, "mse", (normal(4, 3).float(), torch.zeros(4, 3)), dtype=torch.float64)
    bounds = certified_variation(single, single.measured(), 0.1), certified_variation(double, double.measured(), 0.1)
    assert bounds[0].dtype == torch.float64
    assert torch.equal(*bounds)
