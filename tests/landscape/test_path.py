"""The loss between two networks against the line written out; matching finds permuted copies; nothing is changed."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from networks_between import barrier, between, drawn, fitted, losses, samples
from torch import nn
from torch.nn import functional as F

import flatlens as fl
from flatlens.errors import BadInput, UnknownName
from flatlens.landscape.certificate import MovingChain
from flatlens.landscape.curve import Curve
from flatlens.landscape.matching import match

X, Y = samples()


def problem(net: nn.Module, **options: object) -> fl.Problem:
    return fl.Problem(net, "cross_entropy", (X, Y), **options)  # type: ignore[arg-type]


@torch.no_grad()
def at(a: nn.Module, b: nn.Module, t: float) -> float:
    """The loss at one point of the line."""
    return float(F.cross_entropy(between(a, b, t)(X), Y))


def shuffled(net: nn.Module, seed: int = 3) -> nn.Module:
    """The same function with its neurons in another order."""
    return fl.transforms.permutation.apply(problem(net), torch.Generator().manual_seed(seed)).model


@pytest.mark.parametrize("act", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("widths", [(4, 8, 3), (4, 6, 6, 6, 3)])
@pytest.mark.parametrize("steps", [0, 60])
def test_the_interval_covers_a_dense_scan(act: type[nn.Module], widths: tuple[int, ...], steps: int) -> None:
    a, b = drawn(widths, 0, act), drawn(widths, 1, act)
    if steps:
        a, b = fitted(a, X, Y, steps), fitted(b, X, Y, steps)
    way = fl.path(problem(a), b, points=9, progress=False)["line"]
    dense = losses(a, b, X, Y, 401)
    assert way.low <= barrier(dense) + 1e-12 + 1e-3 * barrier(dense)  # a scan may step over the maximum
    assert barrier(dense) <= way.high + 1e-12
    assert way.high - way.low <= max(0.06 * way.high, 0.003)
    assert way.unproved == ""
    for t, loss in zip(way.t, way.loss, strict=True):
        assert float(loss) == pytest.approx(at(a, b, float(t)), rel=1e-12)


def rates(a: nn.Module, b: nn.Module, t: torch.Tensor) -> torch.Tensor:
    """The derivative of the loss along the line at each t, by autograd through the weights."""
    found = []
    for at_t in t:
        s = at_t.clone().requires_grad_()
        pairs = zip(a.named_parameters(), b.parameters(), strict=True)
        moved = {name: (1 - s) * p.detach() + s * q.detach() for (name, p), q in pairs}
        found.append(torch.autograd.grad(F.cross_entropy(torch.func.functional_call(a, moved, (X,)), Y), s)[0])
    return torch.stack(found)


@pytest.mark.parametrize("act", [nn.ReLU, nn.Tanh, nn.GELU])
def test_the_proof_bounds_every_derivative_and_is_tight(act: type[nn.Module]) -> None:
    a, b = fitted(drawn((4, 7, 5, 3), 0, act), X, Y, 60), fitted(drawn((4, 7, 5, 3), 1, act), X, Y, 60)
    chain = MovingChain.of(problem(a), a, b, between(a, b, 0.5))
    for u, v in ((0.0, 0.25), (0.4, 0.45), (0.7, 0.7001)):
        low, high = chain.slopes(u, v)
        inside = rates(a, b, torch.linspace(u, v, 33, dtype=torch.float64))
        assert low <= float(inside.min())
        assert float(inside.max()) <= high
    assert high - low < 0.02 * max(abs(low), abs(high), 0.1)


def test_a_proof_that_would_take_too_long_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = drawn((4, 8, 3), 0), drawn((4, 8, 3), 1)
    proof = fl.path(problem(a), b, points=5, progress=False)["line"]
    monkeypatch.setattr("flatlens.landscape.certificate._WORK", 1.0)
    way = fl.path(problem(a), b, points=5, progress=False)["line"]
    assert (proof.unproved, way.unproved) == ("", "interval arithmetic on all samples would take too long")
    assert way.low <= proof.high
    assert proof.low <= way.high


class Residual(nn.Module):
    """A layer added to its input."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner, self.out = drawn((4, 6, 4), seed), nn.Linear(4, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x + self.inner(x))


@pytest.mark.parametrize(("kind", "why"), [("residual", "joins branches"), ("BatchNorm", "BatchNorm in eval mode")])
def test_what_is_no_chain_is_not_proved_and_says_so(kind: str, why: str) -> None:
    a, data = (Residual(0), (X, Y)) if kind == "residual" else (Convolutions(0).double(), images())
    other = copy.deepcopy(a)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.1)
    found = fl.path(fl.Problem(a, "cross_entropy", data), other, points=3, progress=False)
    assert why in found["line"].unproved
    assert "not proved" in found.answer[1]
    assert why in " ".join(found.about["notes"])


def test_the_slope_is_the_derivative_along_the_line() -> None:
    a, b = drawn((4, 8, 3), 0, nn.Tanh), drawn((4, 8, 3), 1, nn.Tanh)
    way = fl.path(problem(a), b, points=5, progress=False)["line"]
    for t, slope in zip(way.t, way.slope, strict=True):
        ahead, behind = (at(a, b, float(t) + h) for h in (1e-5, -1e-5))
        assert float(slope) == pytest.approx((ahead - behind) / 2e-5, abs=1e-7)


def test_the_error_is_that_of_a_mean_over_samples() -> None:
    a, b = fitted(drawn((4, 8, 3), 0), X, Y), fitted(drawn((4, 8, 3), 1), X, Y)
    way = fl.path(problem(a), b, points=9, progress=False)["line"]
    with torch.no_grad():
        top, first, last = (F.cross_entropy(between(a, b, t)(X), Y, reduction="none") for t in (way.at, 0.0, 1.0))
    each = top - (1 - way.at) * first - way.at * last
    assert way.barrier.value == pytest.approx(float(each.mean()), rel=1e-9)
    assert way.barrier.stderr == pytest.approx(float(each.std()) / 60**0.5 * 2.001 / 1.96, rel=1e-3)


@pytest.mark.parametrize("widths", [(4, 8, 3), (4, 7, 6, 5, 6, 3)])
def test_a_permuted_copy_is_recovered_exactly(widths: tuple[int, ...]) -> None:
    net = drawn(widths, 0)
    twin = shuffled(net)
    assert not torch.equal(twin[0].weight, net[0].weight)
    found = fl.path(problem(net), twin, match_neurons=True, points=5, progress=False)
    assert found["line"].barrier.value > 0
    way = found["matched line"]
    assert (way.low, way.barrier.value, way.high, way.barrier.stderr) == (0.0, 0.0, 0.0, 0.0)
    assert found.about["distance"] == 0.0
    assert found.joined is True
    assert "the weights are the same along the line after matching neurons" in found.answer[0]


class Convolutions(nn.Module):
    """Two convolutions with BatchNorms, then a linear layer that reads each channel at four places."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.c1, self.n1 = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
            self.c2, self.n2, self.out = nn.Conv2d(4, 5, 3, padding=1), nn.BatchNorm2d(5), nn.Linear(20, 3)
            for norm in (self.n1, self.n2):
                nn.init.uniform_(norm.weight, 0.5, 1.5)
                nn.init.normal_(norm.bias)
                norm.running_mean.normal_()
                norm.running_var.uniform_(0.5, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.n1(self.c1(x)))
        return self.out(F.max_pool2d(F.relu(self.n2(self.c2(x))), 2).flatten(1))


def images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(12, 1, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.arange(
        12
    ) % 3


def test_a_permuted_convolutional_network_with_batchnorm_is_recovered_exactly() -> None:
    net = Convolutions(0).double()
    of = fl.Problem(net, "cross_entropy", images())
    twin = fl.transforms.permutation.apply(of).model
    found = fl.path(of, twin, match_neurons=True, points=5, progress=False)
    assert not torch.equal(twin.c1.weight, net.c1.weight)
    assert found["line"].slope.abs().max() > 0.1
    assert found["matched line"].high == 0.0
    assert "of 9 neurons of 2 layers changed places" in found.about["notes"][1]


def test_batchnorms_statistics_are_those_of_the_data_at_every_point() -> None:
    a, b, (x, y) = Convolutions(0).double(), Convolutions(1).double(), images()
    found = fl.path(fl.Problem(a, "cross_entropy", (x, y)), b, points=5, progress=False)
    for t, loss in zip(found["line"].t, found["line"].loss, strict=True):
        net = between(a, b, float(t)).train()  # all samples in one batch
        assert float(loss) == pytest.approx(float(F.cross_entropy(net(x), y).detach()), rel=1e-9)
    assert "computed anew at every point, over all 12 samples" in found.about["notes"][0]


def test_independent_small_networks_are_not_joined_by_the_line() -> None:
    for seed in range(3):
        a, b = (fitted(drawn((4, 4, 3), 2 * seed + k), X, Y, 300) for k in (0, 1))
        found = fl.path(problem(a), b, points=9, progress=False)
        assert found["line"].joins is False
        assert found.answer[0].startswith("Not one basin: along the line the loss rises")


def test_a_curve_goes_around_the_barrier() -> None:
    a, b = (fitted(drawn((4, 16, 3), k), X, Y, 300) for k in (0, 1))
    found = fl.path(problem(a), b, bends=1, steps=150, lr=0.03, points=9, progress=False)
    assert found["curve"].high < 0.2 * found["line"].low
    assert float(found["curve"].loss[0]) == float(found["line"].loss[0])
    assert float(found["curve"].loss[-1]) == float(found["line"].loss[-1])


def test_a_curve_is_the_bezier_curve_of_its_points() -> None:
    points = tuple(torch.randn(4, generator=torch.Generator().manual_seed(k), dtype=torch.float64) for k in range(4))
    curve = Curve(points)
    t = 0.3
    literal = sum(c * t**j * (1 - t) ** (3 - j) * p for j, (c, p) in enumerate(zip((1, 3, 3, 1), points, strict=True)))
    assert torch.allclose(curve.at(t), literal, rtol=1e-14)
    assert torch.equal(curve.at(0.0), points[0])
    assert torch.equal(curve.at(1.0), points[-1])
    slope = (curve.at(t + 1e-6) - curve.at(t - 1e-6)) / 2e-6
    assert torch.allclose(curve.velocity(t), slope, rtol=1e-7)


def test_matching_brings_a_network_nearer_and_keeps_its_function() -> None:
    a, b = drawn((4, 8, 8, 3), 0), drawn((4, 8, 8, 3), 1)
    found = match(problem(b), a, b)
    assert torch.allclose(found.model(X), b(X), rtol=1e-12)

    def distance(net: nn.Module) -> float:
        return sum(
            float((p - q).detach().square().sum()) for p, q in zip(a.parameters(), net.parameters(), strict=True)
        )

    assert distance(found.model) < distance(b)
    # no exchange of two neurons of the first layer is nearer
    for i in range(8):
        for j in range(i):
            swapped = copy.deepcopy(found.model)
            order = torch.arange(8)
            order[[i, j]] = order[[j, i]]
            with torch.no_grad():
                for name in ("weight", "bias"):
                    getattr(swapped[0], name).copy_(getattr(found.model[0], name)[order])
                swapped[2].weight.copy_(found.model[2].weight[:, order])
            assert distance(swapped) >= distance(found.model) - 1e-12


def test_no_network_is_changed() -> None:
    a, b = Convolutions(0).double().train(), Convolutions(1).double()
    before = [copy.deepcopy(net.state_dict()) for net in (a, b)]
    fl.path(fl.Problem(a, "cross_entropy", images()), b, match_neurons=True, bends=1, steps=2, points=3, progress=False)
    for net, state in zip((a, b), before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
        assert all(p.grad is None for p in net.parameters())
    assert all(module.training for net in (a, b) for module in net.modules())


def test_every_way_to_give_the_other_network_is_the_same() -> None:
    a, b = drawn((4, 6, 3), 0), drawn((4, 6, 3), 1)
    tables = [
        fl.path(one, other, points=5, progress=False).frame()
        for one in (problem(a), fl.Lens(problem(a)))
        for other in (b, b.state_dict(), problem(b), fl.Lens(problem(b)))
    ]
    assert all(table.equals(tables[0]) for table in tables)


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    found = fl.path(problem(drawn((4, 6, 3), 0)), drawn((4, 6, 3), 1), points=5, progress=False)
    found.save(tmp_path / "path.safetensors")
    again = fl.LossPath.load(tmp_path / "path.safetensors")
    assert again.frame().equals(found.frame())
    assert again.table().equals(found.table())
    assert again.answer == found.answer
    assert "barrier" in repr(again)
    with pytest.raises(UnknownName, match="line"):
        again["lin"]


def broken() -> nn.Module:
    net = drawn((4, 6, 3), 1)
    with torch.no_grad():
        net[2].weight[0, 0] = float("nan")
    return net


BAD = {
    "other width": (
        lambda: drawn((4, 7, 3), 0),
        r"path\(b=...\): the shapes differ: '0.weight' has \(6, 4\) and \(7, 4\)",
    ),
    "other depth": (lambda: drawn((4, 6, 6, 3), 0), r"the architectures differ: only the second has '4.weight'"),
    "another function": (lambda: drawn((4, 6, 3), 0, nn.Tanh), "different functions of the same parameters"),
    "NaN": (broken, r"'2.weight' has entries that are NaN or inf"),
    "no network": (lambda: 3, "expected a network, a lens or values by name, got int"),
    "a part": (lambda: {"0.weight": torch.ones(6, 4)}, "only the first has '0.bias'"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_joined_is_refused_in_one_line(case: str) -> None:
    make, told = BAD[case]
    with pytest.raises(BadInput, match=told) as refused:
        fl.path(problem(drawn((4, 6, 3), 0)), make(), progress=False)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"bends": -1}, "at least 0"),
        ({"points": 2}, "at least 3"),
        ({"rtol": 0.0}, "positive"),
        ({"lr": -1.0}, "positive"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, float], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        fl.path(problem(drawn((4, 6, 3), 0)), drawn((4, 6, 3), 1), progress=False, **options)


def test_training_that_diverges_is_told() -> None:
    with pytest.raises(BadInput, match=r"path\(lr=1e\+200\): the training of the curve diverged at step \d+"):
        fl.path(problem(drawn((4, 6, 3), 0)), drawn((4, 6, 3), 1), bends=1, lr=1e200, points=3, progress=False)


def test_a_batchnorm_in_train_mode_keeps_its_ghost_batches() -> None:
    net, other = Convolutions(0).double(), Convolutions(1).double()
    of = fl.Problem(net, "cross_entropy", images(), batchnorm="train", ghost_batch=6)
    found = fl.path(of, other, match_neurons=True, points=3, progress=False)
    assert found.about["notes"][0] == "BatchNorm normalises over 6 samples at a time at every point"
