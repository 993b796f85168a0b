"""Where Theorems 4.3, 5.1 and 6.1 of sharpening do not speak: no convexity, no law, no chain of layers, no target."""

from __future__ import annotations

import math

import pytest
import torch
from builders import mlp, seeded
from networks import module_of
from torch import Tensor, nn

import flatlens as fl
from flatlens.bounds import BoundsReport, Target, check_bounds
from flatlens.distributions import (
    Cube,
    Distribution,
    GaussianMixture,
    Sphere,
    empirical_covering_radius,
    lipschitz_product,
)
from flatlens.errors import BadInput, UnknownName

ROWS = ("lipschitz_bound", "jacobian_growth", "jacobian_generalisation")


def checked(net: nn.Module, law: Distribution, x: Tensor, y: Tensor, loss: object, **more: object) -> BoundsReport:
    more.setdefault("bounds", ROWS)
    lens = fl.Lens(fl.Problem(net, loss, (x, y)))  # type: ignore[arg-type]
    return check_bounds(lens, distribution=law, assume={"iid_samples"}, **more)  # type: ignore[arg-type]


# Without convexity


def test_a_gap_in_the_support_refutes_theorem_4_3() -> None:
    """Flat within delta of all data, steep between."""
    net = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1, bias=False)).double()
    with torch.no_grad():
        net[0].weight.fill_(1.0)
        net[0].bias.copy_(torch.tensor([-0.45, -0.55]))
        net[2].weight.copy_(torch.tensor([[10.0, -10.0]]))
    x = torch.cat([torch.linspace(0, 0.4, 11), torch.linspace(0.6, 1, 11)])[:, None].double()
    lens = fl.Lens(fl.Problem(net, "mse", (x, net(x).detach())))
    row = check_bounds(lens, "lipschitz_bound", delta=0.04).of("lipschitz_bound")
    assert row.status == "not applicable"
    assert "convex_support" in row.assumption
    assert row.lhs == pytest.approx(5)
    assert row.rhs == pytest.approx(0, abs=1e-9)
    untrue = check_bounds(lens, "lipschitz_bound", delta=0.04, assume={"convex_support"})
    assert untrue.of("lipschitz_bound").status == "violated"


def angle() -> nn.Module:
    """The angle of a point of the plane; it jumps at pi, where the arc is open."""
    return module_of(
        lambda net, x: net.scale * torch.atan2(x[:, 1:], x[:, :1]),
        scale=nn.Parameter(torch.ones(1, dtype=torch.float64)),
    )


def test_an_arc_refutes_theorem_4_3() -> None:
    opening, delta = 0.3, 0.02
    angles = torch.linspace(-math.pi + opening / 2, math.pi - opening / 2, 300, dtype=torch.float64)
    x = torch.stack([angles.cos(), angles.sin()], 1)
    report = check_bounds(fl.Lens(fl.Problem(angle(), "mse", (x, angles[:, None]))), "lipschitz_bound", delta=delta)
    assert report.of("lipschitz_bound").status == "not applicable"  # atan2 is no chain of layers
    row = report.of("lipschitz_bound.searched")
    assert row.lhs == pytest.approx((2 * math.pi - opening) / (2 * math.sin(opening / 2)), rel=1e-3)  # 20
    assert row.lhs == pytest.approx(20, abs=0.1)
    assert row.rhs == pytest.approx(1.04, abs=0.002)
    assert delta > (angles[1] - angles[0]) / 2  # so that the balls cover the arc
    assert delta < math.sin(opening / 2)  # and none reaches the jump


# What is not applicable, and refused


def test_what_is_missing_is_named() -> None:
    net, x = mlp((2, 5, 2), nn.Tanh), Cube(2).sample(20, seeded(0))
    lens = fl.Lens(fl.Problem(net, "mse", (x, net(x).detach())))
    for told in check_bounds(lens, ROWS):
        assert told.status == "not applicable"
    assert "distribution=" in check_bounds(lens, "lipschitz_bound").of("lipschitz_bound").assumption
    undeclared = check_bounds(lens, ROWS, distribution=Cube(2), target=Target(net))
    assert undeclared.of("jacobian_generalisation").assumption.startswith("iid_samples")
    assert "target=" in check_bounds(lens, ROWS, distribution=Cube(2)).of("jacobian_generalisation").assumption
    normal = GaussianMixture(torch.zeros(1, 2), torch.eye(2)[None], torch.ones(1))
    assert "unbounded" in check_bounds(lens, ROWS, distribution=normal).of("lipschitz_bound").assumption
    assert (
        check_bounds(lens, ROWS, distribution=Sphere(1))
        .of("lipschitz_bound")
        .assumption.startswith("samples_in_support")
    )
    with pytest.raises(BadInput, match="entries"):
        check_bounds(lens, ROWS, distribution=Cube(3))
    with pytest.raises(BadInput, match="delta"):
        check_bounds(lens, ROWS, delta=0.0)
    assert not {row.bound.partition(".")[0] for row in check_bounds(lens)} & {*ROWS, "batchnorm_limit"}


def test_an_unknown_distribution_has_an_approximation_from_held_out_data() -> None:
    """Each term written out: a linear network, whose Jacobian does not vary."""
    W = torch.tensor([[1.0, -2.0]]).double()
    net = torch.nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(W)
    x, fresh = Cube(2).sample(40, seeded(0)), Cube(2).sample(30, seeded(1))
    y, labels = x @ W.T + 0.1 * x[:, :1].sin(), fresh @ W.T + 0.1 * fresh[:, :1].sin()
    lens = fl.Lens(fl.Problem(net, "mse", (x, y), test=(fresh, labels)))
    row = check_bounds(lens, "jacobian_generalisation").of("jacobian_generalisation.empirical")
    delta = empirical_covering_radius(x, fresh).value
    every, told = torch.cat([x, fresh]), torch.cat([y, labels])
    L = float(((told - told.T).abs() / (every[:, None] - every).norm(dim=2).fill_diagonal_(math.inf)).max())
    off = (0.1 * every[:, 0].sin()).abs()
    assert row.lhs == pytest.approx(float(off[40:].mean()), rel=1e-9)
    assert row.rhs == pytest.approx(delta * (L + float(W.norm())) + float(off[:40].max()), rel=1e-6)
    assert row.status == "not applicable"
    assert row.assumption.startswith("known_distribution: delta and the Lipschitz constant")
    assert "an approximation" in row.note
    assert "intrinsic dimension" in row.note
    declared = check_bounds(lens, "jacobian_generalisation", delta=0.5, target=Target(net, lipschitz=3.0))
    row = declared.of("jacobian_generalisation.empirical")
    assert row.rhs == pytest.approx(0.5 * (3 + float(W.norm())) + float(off[:40].max()), rel=1e-6)
    few = fl.Lens(fl.Problem(net, "mse", (x, y), test=(fresh[:3], labels[:3])))
    assert "at least 6 held-out" in check_bounds(few, "jacobian_generalisation")[0].assumption
    other = fl.Lens(fl.Problem(net, "huber", (x, y), test=(fresh, labels)))
    assert check_bounds(other, "jacobian_generalisation")[0].assumption.startswith("squared_error")


def test_targets_that_are_missed_or_steeper_than_declared() -> None:
    net, x = mlp((2, 5, 2), nn.Tanh), Cube(2).sample(20, seeded(0))
    f = net(x).detach()
    off = Target(lambda y: net(y) + 0.5, lipschitz_product(net, (2,)))
    report = checked(net, Cube(2), x, f, "mse", target=off)
    row, mended = report.of("jacobian_generalisation"), report.of("jacobian_generalisation.corrected")
    assert row.status == "not applicable"
    assert row.assumption.startswith("interpolation")
    assert mended.status == "holds"
    assert mended.rhs - row.rhs == pytest.approx(math.sqrt(0.5))
    assert mended.lhs == pytest.approx(math.sqrt(0.5))
    steep = checked(net, Cube(2), x, f, "mse", target=Target(net, lipschitz=1e-3))
    assert steep.of("jacobian_generalisation").assumption.startswith("target_lipschitz")
    assert "vacuous" in report.of("jacobian_generalisation").note
    many = Cube(1).sample(4000, seeded(0))
    flat = mlp((1, 5, 2), nn.Tanh, seed=2)
    told = checked(flat, Cube(1), many, flat(many).detach(), "mse", target=Target(flat), bounds=ROWS[2])
    assert "vacuous" not in told.of("jacobian_generalisation").note
    with pytest.raises(BadInput, match="lipschitz"):
        Target(lambda y: y)


def test_losses_without_a_divergence() -> None:
    net, x = mlp((2, 5, 3), nn.Tanh), Cube(2).sample(20, seeded(0))
    y = net(x).argmax(1)
    for loss in (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])), lambda f, _: f.square().sum(1)):
        row = checked(net, Cube(2), x, y, loss, bounds="jacobian_growth").of("jacobian_growth")
        assert row.assumption.startswith("quadratic_growth")
    y[0] = -100
    row = checked(net, Cube(2), x, y, "cross_entropy", bounds="jacobian_growth").of("jacobian_growth")
    assert row.assumption.startswith("all_labelled")


def test_networks_that_are_no_chain_or_have_no_points() -> None:
    words = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
    tokens = torch.randint(0, 5, (20, 2), generator=seeded(0))
    for row in check_bounds(fl.Lens(fl.Problem(words, "mse", (tokens, torch.zeros(20, 2)))), ROWS, delta=0.1):
        assert row.assumption.startswith("one_floating_input")
    residual = Residual()
    x = Cube(2).sample(20, seeded(0))
    report = checked(residual, Cube(2), x, residual(x).detach(), "mse", target=Target(residual, 100.0))
    for name in ("lipschitz_bound", "lipschitz_bound.remark", "jacobian_growth", "jacobian_generalisation"):
        assert report.of(name).assumption.startswith("certified_variation"), name
    searched = report.of("lipschitz_bound.searched")
    assert searched.status == "undecided"
    assert searched.lhs <= searched.rhs


def test_a_network_that_cannot_be_copied_loses_these_bounds_alone() -> None:
    net = Uncopyable()
    x = Cube(2).sample(20, seeded(0))
    report = checked(net, Cube(2), x, net(x).detach(), "half_squared_error", bounds=(*ROWS, "linear_stability"))
    assert report.of("linear_stability", "inner.0").status == "holds"
    for name in ("lipschitz_bound", "jacobian_growth", "jacobian_generalisation"):
        assert "cannot be copied (holds an open file)" in report.of(name).assumption, name


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp((2, 5, 2), nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def test_images_in_single_precision() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))
    x = Cube(9).sample(25, seeded(0)).reshape(25, 1, 3, 3).float()
    report = checked(net, Cube(9), x, net(x).detach(), "mse", target=Target(net))
    assert {row.status for row in report} == {"holds", "undecided"}
    assert report.of("jacobian_generalisation").lhs < 1e-6  # the target runs in single precision, too
    assert net.training
    assert next(net.parameters()).dtype == torch.float32


def test_the_radius_is_found_by_the_rule_that_is_asked_for() -> None:
    net = mlp((3, 5, 2), nn.Tanh)
    x = Sphere(2).sample(1000, seeded(0))
    y = net(x).detach()
    sides = {}
    for rule in ("exact", "published", "tight"):
        row = checked(net, Sphere(2), x, y, "mse", target=Target(net), rule=rule, bounds=ROWS[2]).of(ROWS[2])
        assert row.status == "holds"
        delta = Sphere(2).covering_radius(1000, 0.05, rule=rule).value
        assert f"delta = {delta:.4g}" in row.note
        sides[rule] = row.rhs
    assert sides["tight"] < sides["published"] < sides["exact"]
    few = checked(net, Sphere(2), x[:30], y[:30], "mse", target=Target(net), rule="published", bounds=ROWS[2])
    assert few.of(ROWS[2]).assumption.startswith("covering_radius: Eq. 7 needs")
    with pytest.raises(UnknownName, match="rule"):
        checked(net, Sphere(2), x, y, "mse", rule="loose")


class Uncopyable(Residual):
    def __deepcopy__(self, memo: dict[int, object]) -> Uncopyable:
        raise RuntimeError("holds an open file")
