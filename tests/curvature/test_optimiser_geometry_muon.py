"""The largest curvature over Muon's ball, against closed forms, brute force and torch's own Muon."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens.curvature import Hessian
from flatlens.curvature.optimiser_geometry import ball_of, climb_in_ball, corner, dual_norm

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")


def quadratic(rows: int = 2, columns: int = 2, samples: int = 40) -> tuple[nn.Module, fl.Problem]:
    """A linear network under the half squared error: <D, H D> = mean_i ||D x_i||^2."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Linear(columns, rows, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(torch.randn(rows, columns, generator=generator, dtype=torch.float64))
    x = torch.randn(samples, columns, generator=generator, dtype=torch.float64) @ torch.diag(
        torch.arange(1.0, columns + 1, dtype=torch.float64)
    )
    return net, fl.Problem(net, "half_squared_error", (x, torch.zeros(samples, rows, dtype=torch.float64)))


def test_a_linear_network_has_a_closed_form() -> None:
    """With as many rows as columns D may be orthogonal: <D, H D> = tr(x x^T) / n, and no D of norm 1 has more."""
    net, problem = quadratic()
    optimiser = torch.optim.Muon(net.parameters(), lr=0.1)
    found = fl.measure(fl.Lens(problem, optimiser=optimiser), "preconditioned_sharpness")
    H = Hessian(problem).matrix()
    gradient = (H @ net.weight.detach().flatten()).reshape(2, 2)
    expected = float(H.trace()) / 2 / float(torch.linalg.svdvals(gradient).sum())
    assert found["preconditioned_sharpness"].value == pytest.approx(expected, rel=1e-6)
    assert found["preconditioned_sharpness"].kind == "lower bound"


def test_climbs_reach_what_a_dense_grid_finds() -> None:
    """All rotations and reflections of the plane, in steps of a thousandth, are the corners of the ball."""
    generator = torch.Generator().manual_seed(3)
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 2, bias=False)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(2, 2, generator=generator, dtype=torch.float64))
    x = torch.randn(20, 2, generator=generator, dtype=torch.float64)
    problem = fl.Problem(
        net, "half_squared_error", (x, torch.zeros(20, 2, dtype=torch.float64)), parameters=["0.weight"]
    )
    operator = Hessian(problem)
    H = operator.matrix()
    angles = torch.linspace(0, 2 * math.pi, 6284, dtype=torch.float64)
    c, s = angles.cos(), angles.sin()
    corners = torch.cat([torch.stack([c, -s, s, c], 1), torch.stack([c, s, s, -c], 1)])
    best = float(((corners @ H) * corners).sum(1).max())
    drawn = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    value = float(climb_in_ball(operator, {"0.weight": 1.0}, drawn).max())
    assert value == pytest.approx(best, rel=1e-3) or value > best  # an inner point may be higher


def test_the_corner_and_the_dual_norm_belong_together() -> None:
    G = {"a": torch.randn(3, 5, dtype=torch.float64), "b": torch.randn(4, 2, dtype=torch.float64)}
    radius = {"a": 0.5, "b": 2.0}
    D = corner(G, radius)
    assert sum(float((G[name] * D[name]).sum()) for name in G) == pytest.approx(dual_norm(G, radius))
    assert all(float(torch.linalg.matrix_norm(D[name], 2)) == pytest.approx(s) for name, s in radius.items())


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_the_radius_is_that_of_torch_s_own_step(adjust: str) -> None:
    """Torch's Newton-Schulz iteration leaves singular values between 0.7 and 1.2."""
    net = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))
    optimiser = torch.optim.Muon(net.parameters(), lr=0.1, weight_decay=0.0, adjust_lr_fn=adjust)
    before = [p.detach().clone() for p in net.parameters()]
    net(torch.randn(50, 8)).square().mean().backward()
    optimiser.step()
    for (name, p), old in zip(net.named_parameters(), before, strict=True):
        moved = float(torch.linalg.matrix_norm((old - p.detach()) / 0.1, 2))
        assert 0.68 < moved / ball_of(optimiser, net)[name] < 1.25


def test_steps_shorter_than_the_edge_lower_a_quadratic_and_this_one_is_reached() -> None:
    """A step along the corner of the gradient: 2 / (value) is a step that is sure to be safe."""
    net, problem = quadratic(3, 3)
    optimiser = torch.optim.Muon(net.parameters(), lr=0.1, momentum=0.0, weight_decay=0.0)
    value = fl.measure(fl.Lens(problem, optimiser=optimiser), "preconditioned_sharpness")[
        "preconditioned_sharpness"
    ].value
    H = Hessian(problem).matrix()
    gradient = (H @ net.weight.detach().flatten()).reshape(3, 3)
    D = corner({"weight": gradient}, ball_of(optimiser, net))["weight"].flatten()
    rise = [float(-lr * gradient.flatten() @ D + lr**2 / 2 * D @ H @ D) for lr in (1.99 / value, 2.01 / value)]
    assert rise[0] < 0
    assert rise[1] > rise[0]


def test_parameters_of_other_optimisers_are_left_out() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    problem = fl.Problem(net, "cross_entropy", (torch.randn(10, 4), torch.arange(10) % 2))
    optimiser = torch.optim.Muon([net[0].weight], lr=0.02)
    found = fl.measure(fl.Lens(problem, optimiser=optimiser), "preconditioned_sharpness")["preconditioned_sharpness"]
    assert found.value > 0
    other = torch.optim.Muon([nn.Parameter(torch.ones(2, 2))])
    assert (
        "holds none"
        in fl.measure(fl.Lens(problem, optimiser=other), "preconditioned_sharpness")["preconditioned_sharpness"].note
    )
