"""Volumes and dimension of the image of a small ball where the Jacobian is a matrix written down."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from builders import lens_on
from linear import X, linear, measured
from networks import module_of
from torch import Tensor, nn

import flatlens as fl
from flatlens.errors import BadInput

VOLUMES = ["local_volume", "log_volume", "network_volume"]


def test_a_linear_network() -> None:
    """Volume s_1 s_2, its logarithm, and dimension (s_1^2 + s_2^2)^2 / (s_1^4 + s_2^4)."""
    s = torch.linalg.svdvals(linear()[0].weight.detach())
    report = measured("local_volume", "local_volume(top_k=1)", "log_volume", "network_volume", "local_dimension")
    assert report["local_volume"].value == pytest.approx(float(s.prod()))
    assert report["network_volume"].value == pytest.approx(float(s.prod()))
    assert report["local_volume(top_k=1)"].value == pytest.approx(float(s[0]))
    assert report["log_volume"].value == pytest.approx(math.log(float(s.prod())))
    truth = float(s.square().sum() ** 2 / s.pow(4).sum())
    assert report["local_dimension"].value == pytest.approx(truth)


def test_a_map_onto_a_line_has_no_volume_and_one_dimension() -> None:
    net = linear()
    with torch.no_grad():
        net[0].weight[1] = net[0].weight[0]
    report = fl.measure(lens_on(net, X), ["local_volume", "log_volume", "local_dimension", "local_volume(top_k=1)"])
    assert report["local_volume"].value == 0
    assert "rank-deficient" in report["local_volume"].note
    assert report["log_volume"].kind == "undefined"
    assert report["local_dimension"].value == pytest.approx(1.0)
    assert report["local_volume(top_k=1)"].value == pytest.approx(
        math.sqrt(2) * float(net[0].weight[0].detach().norm())
    )


@pytest.mark.parametrize("top_k", [0, 3, 1.5])
def test_no_more_directions_than_outputs(top_k: object) -> None:
    with pytest.raises(BadInput, match="between 1 and the number of outputs, 2"):
        measured(fl.measures.local_volume(top_k=top_k))


def ending(last: Callable[[Tensor], Tensor], scale: float) -> nn.Module:
    """A network 3-4-3 with a last function, certain of most of its samples."""
    torch.manual_seed(0)
    net = module_of(lambda net, x: last(net.body(x)), body=nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(scale)
        net.body[2].weight.mul_(2 * scale)
    return net


def behind(last: Callable[[Tensor], Tensor], scale: float, dtype: torch.dtype) -> tuple[fl.Lens, nn.Module, Tensor]:
    net, x = ending(last, scale).to(dtype), torch.randn(40, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    return fl.Lens(fl.Problem(net, "mse", (x, torch.zeros(40, 3, dtype=dtype)))), net, x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 3.0, 5.0])
@pytest.mark.parametrize("last", [nn.Softmax(1), nn.LogSoftmax(-1), lambda z: -2 * z.softmax(1).square()])
def test_behind_a_softmax_the_volume_is_0(last: Callable[[Tensor], Tensor], scale: float, dtype: torch.dtype) -> None:
    """1^T J = 0, or p^T J = 0: 1.8e-16 was a lower bound and -52 an exact logarithm once, both of rounding."""
    report = fl.measure(behind(last, scale, dtype)[0], VOLUMES)
    for key in (("local_volume", None), ("local_volume", "body.0"), ("network_volume", None)):
        assert (report[key].value, report[key].kind) == (0.0, "exact")
        assert "ends in a softmax" in report[key].note
    assert report["log_volume"].kind == "undefined"
    assert "ends in a softmax" in report["log_volume"].note


def test_behind_a_softmax_fewer_directions_have_a_volume() -> None:
    lens, net, x = behind(nn.Softmax(1), 1.0, torch.float64)
    J = torch.stack([torch.autograd.functional.jacobian(lambda o: net(o)[0], one[None])[:, 0] for one in x])
    truth = torch.linalg.svdvals(J)[:, :2].prod(1)
    found = fl.measure(lens, "local_volume(top_k=2)")["local_volume(top_k=2)"]
    assert found.kind == "exact"
    assert found.value == pytest.approx(float(truth.mean()), rel=1e-9)


def test_a_softmax_of_each_token_takes_a_direction_of_each() -> None:
    x = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(0)).double()
    net = module_of(lambda net, x: net.layer(x).log_softmax(2), layer=(4, 3)).double()
    problem = fl.Problem(net, "mse", (x, torch.zeros(5, 2, 3).double()))
    report = fl.measure(fl.Lens(problem), ["local_volume(top_k=4)", "local_volume(top_k=5)"])
    assert report["local_volume(top_k=4)"].value > 0
    assert report["local_volume(top_k=5)"].value == 0
    assert "softmax" in report["local_volume(top_k=5)"].note


def test_a_softmax_over_the_tokens_takes_no_direction_of_those_that_count() -> None:
    """As many tokens as classes; the masked one has its part of each softmax."""

    generator = torch.Generator().manual_seed(0)
    net = module_of(lambda net, x: net.layer(x).softmax(1), layer=(4, 3)).double()
    x = torch.randn(5, 3, 4, generator=generator).double()
    y = torch.randint(0, 3, (5, 3), generator=generator)
    y[:, 2] = -100
    problem = fl.Problem(net, "cross_entropy", (x, y), forward=lambda m, b: (m(b[0]), b[1], b[1] != -100))
    found = fl.measure(fl.Lens(problem), "local_volume")["local_volume"]
    J = [torch.autograd.functional.jacobian(lambda one: net(one[None])[0, :2].flatten(), one) for one in x]
    truth = torch.stack([torch.linalg.svdvals(each.flatten(1)).prod() for each in J]).mean()
    assert found.value == pytest.approx(float(truth), rel=1e-6)
    assert "softmax" not in found.note


@pytest.mark.parametrize(
    "last",
    [
        lambda z: z.softmax(1) + z.softmax(1),
        lambda z: z.exp() / z.exp().sum(1, keepdim=True),
        lambda z: z.softmax(1) @ torch.tensor([[1.0, 2, 0], [0, 1, 3], [2, 1, 1]]).to(z),
    ],
)
@pytest.mark.parametrize("scale", [4.0, 6.0])  # with 6 the squares of some derivatives are below float32
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_that_hides_the_rank_is_seen_where_derivatives_cancel(
    last: Callable[[Tensor], Tensor], scale: float, dtype: torch.dtype
) -> None:
    """No sample has full rank; of 40, 12 had one by rounding alone."""
    report = fl.measure(behind(last, scale, dtype)[0], VOLUMES)
    assert (report["local_volume"].value, report["local_volume"].kind) == (0.0, "lower bound")
    assert report["log_volume"].note == "every sample is rank-deficient within rounding"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_input_that_moves_only_rounding_hides_no_rank(dtype: torch.dtype) -> None:
    """The rounding of both inputs' Jacobians is held against the length of both."""

    def forward(net: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        one = (100 * b).sin().square() + (100 * b).cos().square()
        return net.layer(a) + 1e-6 * one

    net, x = module_of(forward, layer=linear()[0]).to(dtype), X[:6].to(dtype)
    b = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = fl.measure(fl.Lens(fl.Problem(net, "mse", ((x, b), torch.zeros(6, 2, dtype=dtype)))), "local_volume")
    s = torch.linalg.svdvals(net.layer.weight.detach())
    assert found["local_volume"].value == pytest.approx(float(s.prod()), rel=1e-5)
    assert "rank" not in found["local_volume"].note


def of_matrix(W: Tensor) -> fl.Report:
    net = nn.Linear(W.shape[1], W.shape[0], dtype=W.dtype)
    with torch.no_grad():
        net.weight.copy_(W)
    x = torch.randn(5, W.shape[1], generator=torch.Generator().manual_seed(0)).to(W)
    return fl.measure(lens_on(net, x), VOLUMES)


def test_a_volume_beyond_float64_is_told_by_its_logarithm() -> None:
    eye = torch.eye(6).double()
    small, large = of_matrix(1e-60 * eye), of_matrix(1e60 * eye)
    for name in ("local_volume", "network_volume"):
        assert (small[name].value, small[name].kind) == (0.0, "lower bound")
        assert "below float64, its logarithm is -828.931: see log_volume" in small[name].note
        assert large[name].kind == "undefined"
        assert "above float64, its logarithm is 828.931: see log_volume" in large[name].note
    for report, truth in ((small, -828.931), (large, 828.931)):
        assert report["log_volume"].kind == "exact"
        assert report["log_volume"].value == pytest.approx(truth, abs=1e-3)
    assert of_matrix(1e-155 * eye)["log_volume"].kind == "undefined"  # the squares in G lose their digits


@pytest.mark.parametrize("t", [7e-7, 9e-7, 1.3e-6])
def test_a_volume_near_the_tolerance_has_an_error(t: float) -> None:
    """det [[1, 1], [1, 1 + t]] = t, and its singular values are near 2 and t / 2: G has half of the digits."""
    W = torch.tensor([[1.0, 1.0], [1.0, 1.0 + t]]).double()
    W[1, 1] = 1 + t
    truth, report = float(W[1, 1]) - 1, of_matrix(W)
    for name in ("local_volume", "network_volume"):
        assert report[name].kind == "estimate"
        assert abs(report[name].value - truth) <= 1.96 * report[name].stderr < 0.02 * truth
        assert "its error is rounding" in report[name].note
    assert report["log_volume"].kind == "estimate"
    assert abs(report["log_volume"].value - math.log(truth)) <= 1.96 * report["log_volume"].stderr < 0.02
    assert of_matrix(torch.tensor([[1.0, 1.0], [1.0, 1.001]]).double())["log_volume"].stderr == 0


@pytest.mark.parametrize("seed", range(3))
def test_in_float32_the_error_covers_what_rounding_does(seed: int) -> None:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 3))
    x = torch.randn(30, 6)
    with torch.no_grad():
        net[4].weight[1] = net[4].weight[0] + 2e-4 * net[4].weight[1]
    lenses = (lens_on(net.to(dtype), x.to(dtype)) for dtype in (torch.float32, torch.float64))
    found, truth = (fl.measure(lens, "log_volume")["log_volume"] for lens in lenses)
    assert (found.kind, truth.kind) == ("estimate", "exact")
    assert 0 < abs(found.value - truth.value) <= 1.96 * found.stderr < 0.02


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_response_that_is_rounding_has_no_dimension(dtype: torch.dtype) -> None:
    """A layer that shifts all logits alike does not move their log-softmax: its G is rounding, and so its shape."""
    torch.manual_seed(1)
    net = shifted_logits().to(dtype)
    problem = fl.Problem(net, "half_squared_error", (torch.randn(30, 4).to(dtype), torch.randn(30, 3).to(dtype)))
    report = fl.measure(fl.Lens(problem), ["local_dimension"])
    for layer in ("a", "b"):
        assert report["local_dimension", layer].kind == "undefined"
        assert "rounding" in report["local_dimension", layer].note
    assert report["local_dimension", "c"].kind == "exact"
    assert not report["local_dimension", "c"].note


def shifted_logits() -> nn.Module:
    return module_of(
        lambda net, x: torch.log_softmax(net.c(x) + net.b(torch.tanh(net.a(x))), 1), a=(4, 5), b=(5, 1), c=(4, 3)
    )
