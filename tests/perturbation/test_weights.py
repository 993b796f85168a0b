"""The network at other weights: what comes out, and that nothing is written to it."""

from __future__ import annotations

import pytest
import torch
from benchmarks.precision import InHalf
from builders import normal
from networks import NETWORKS, network
from torch import Tensor, nn

import flatlens as fl
from flatlens.perturbation import Elsewhere
from flatlens.perturbation.weights import Landscape


@pytest.mark.parametrize("name", NETWORKS)
def test_losses_and_slopes_elsewhere_are_those_of_a_network_with_these_weights(name: str) -> None:
    net, x, y = network(name, n=9)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    elsewhere = Elsewhere(problem)
    versions = [p._version for p in net.parameters()]
    theta = (
        elsewhere.here + 0.1 * torch.randn(elsewhere.space.size, generator=torch.Generator().manual_seed(1)).double()
    )
    found = elsewhere.outcomes(theta)
    risk, slope = elsewhere.slope(theta, elsewhere.chunks(), problem.mass)
    assert [p._version for p in net.parameters()] == versions

    with torch.no_grad():
        for name_of, value in elsewhere.space.named(theta).items():
            net.get_parameter(name_of).copy_(value)
    truth = nn.functional.cross_entropy(net(x), y, reduction="none")
    torch.testing.assert_close(found.losses, truth.detach(), rtol=1e-10, atol=1e-12)
    assert risk == pytest.approx(float(truth.mean()), rel=1e-10)
    gradient = torch.autograd.grad(truth.mean(), list(net.parameters()), allow_unused=True)
    torch.testing.assert_close(
        slope, elsewhere.space.flat(dict(zip(elsewhere.space.parameters, gradient, strict=True)))
    )


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_walk_leaves_the_parameters_and_ends_at_a_network_with_these_weights(name: str, in_place: bool) -> None:
    net, x, y = network(name, n=9)
    options = {"forward": lambda _, batch: (net(batch[0]), batch[1])} if in_place else {}  # runs the network itself
    landscape = Landscape(fl.Problem(net, "cross_entropy", (x, y), **options))
    assert (landscape.model is net) == in_place
    kept = {name_of: p.detach().clone() for name_of, p in net.named_parameters()}
    memory = [p.data_ptr() for p in landscape.model.parameters()]
    direction = {name_of: normal(*p.shape, seed=1) for name_of, p in net.named_parameters()}
    with landscape.walk(direction) as move:
        move(-0.1)
        assert in_place or [p.data_ptr() for p in landscape.model.parameters()] == memory
        risk, slope = landscape.risk(), landscape.summed_gradient()
    assert [p.data_ptr() for p in landscape.model.parameters()] == memory
    assert all(torch.equal(p, kept[name_of]) for name_of, p in net.named_parameters())

    with torch.no_grad():
        for name_of, p in net.named_parameters():
            p.add_(direction[name_of], alpha=0.1)
    truth = nn.functional.cross_entropy(net(x), y)
    gradient = torch.autograd.grad(truth, list(net.parameters()), allow_unused=True, materialize_grads=True)
    assert risk == pytest.approx(float(truth), rel=1e-10)
    torch.testing.assert_close(slope, torch.cat([g.flatten() for g in gradient]), rtol=1e-9, atol=1e-12)


def test_groups_are_cut_and_weighed_as_the_risk_does() -> None:
    net, x, y = network("mlp-tanh", n=12)
    y[3] = -100
    problem = fl.Problem(net, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])), (x, y))
    elsewhere = Elsewhere(problem)
    groups = list(problem.data.in_batches_of(5))
    masses = [elsewhere.mass(group) for group in groups]
    assert sum(masses) == pytest.approx(problem.mass) == elsewhere.mass(None)
    parts = [elsewhere.slope(elsewhere.here, elsewhere.chunks(g), m)[0] for g, m in zip(groups, masses, strict=True)]
    whole = sum(p * m for p, m in zip(parts, masses, strict=True)) / problem.mass
    assert whole == pytest.approx(elsewhere.outcomes(elsewhere.here).risk)


def test_memory_bounds_the_chunks() -> None:
    net, x, y = network("mlp-tanh", n=64)
    small = Elsewhere(fl.Problem(net, "cross_entropy", (x, y), memory=20_000))
    large = Elsewhere(fl.Problem(net, "cross_entropy", (x, y)))
    assert len(list(small.chunks())) > len(list(large.chunks())) == 1
    for one in (small, large):
        assert one.slope(one.here, one.chunks(), 64.0)[0] == pytest.approx(one.outcomes(one.here).risk)


class Short(nn.Linear):
    """A layer that computes in a shorter dtype, in a kernel of its own."""

    short = torch.bfloat16

    def forward(self, x: Tensor) -> Tensor:
        return InHalf.apply(x, self.weight, self.short) + self.bias  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("short", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(3))
def test_intervals_cover_what_shorter_dtypes_inside_round(short: torch.dtype, dtype: torch.dtype, seed: int) -> None:
    x, y = normal(30, 4, seed=seed).to(dtype), torch.arange(30) % 3
    plain = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).to(dtype)
    rounding = nn.Sequential(Short(4, 16), nn.ReLU(), Short(16, 3)).to(dtype)
    for layer in (rounding[0], rounding[2]):
        layer.short = short
    for p, q in zip(plain.parameters(), rounding.parameters(), strict=True):
        p.data = normal(*p.shape, seed=seed + 7).to(dtype) / 2
        q.data = p.data.clone()
    asked = ["critical_sharpness", "average_sharpness(probes=4)", "worst_sharpness(rho=1e-3, steps=4)", "ggn_trace"]
    for rate in (0.1, 1e-3, 1e-5):
        found = []
        for net in (plain, rounding):
            lens = fl.Lens(fl.Problem(net, "cross_entropy", (x, y)), optimiser=torch.optim.SGD(net.parameters(), rate))
            found.append(fl.measure(lens, asked))
        truth, rounded = ([report[name] for name in asked] for report in found)
        for exact, one in zip(truth[:2], rounded[:2], strict=True):
            assert one.kind == "estimate" or one.kind == "undefined"
            if one.kind == "estimate":
                assert abs(one.value - exact.value) <= 3 * 1.96 * (one.stderr + 0.01 * exact.value)
        assert rounded[2].kind == "undefined" or rounded[2].value <= 1.02 * truth[2].value
        assert "float16 inside" in rounded[3].note  # bfloat16 may stand for float16
        assert "inside" not in truth[3].note
