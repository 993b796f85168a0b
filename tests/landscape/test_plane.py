"""Every point of a plane is the loss there; directions are as defined; the quadratic ends where a formula says."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from literal_curvature import LOSSES, flat_parameters, hessian_of, with_parameters
from networks_between import drawn, fitted, samples
from torch import nn

import flatlens as fl
from flatlens.errors import BadInput, UnknownName
from flatlens.landscape.plane import by_filter
from flatlens.perturbation import Elsewhere

X, Y = samples(30)


def trained(seed: int = 0, widths: tuple[int, ...] = (4, 6, 3)) -> nn.Module:
    return fitted(drawn(widths, seed, nn.Tanh), X, Y, 60)


def problem(net: nn.Module) -> fl.Problem:
    return fl.Problem(net, "cross_entropy", (X, Y))


def loss_at(net: nn.Module, theta: torch.Tensor) -> float:
    with torch.no_grad():
        return float(LOSSES["cross_entropy"](with_parameters(net, theta, X), Y).mean())


def test_every_point_is_the_loss_there() -> None:
    net = trained()
    found = fl.plane(problem(net), points=5, progress=False)
    H = hessian_of(net, lambda f: LOSSES["cross_entropy"](f, Y).mean(), X)
    values, vectors = torch.linalg.eigh(H)
    theta = flat_parameters(net)
    assert [one.second for one in found.slices] == pytest.approx(values[[-1, -2]].tolist(), rel=1e-3)
    # the signs of eigenvectors are free: the first slice tells them
    signs = []
    for one, v in zip(found.slices, (vectors[:, -1], vectors[:, -2]), strict=True):
        ahead = [loss_at(net, theta + s * float(one.x[-1]) * v) for s in (1, -1)]
        signs.append((1 if abs(ahead[0] - float(one.loss[-1])) < abs(ahead[1] - float(one.loss[-1])) else -1) * v)
    for i, x in enumerate(found.x.tolist()):
        for j, y in enumerate(found.y.tolist()):
            assert float(found.loss[i, j]) == pytest.approx(loss_at(net, theta + x * signs[0] + y * signs[1]), rel=0.02)
    assert float(found.loss[2, 2]) == pytest.approx(loss_at(net, theta), rel=1e-14)


def test_random_directions_have_the_norm_of_each_filter() -> None:
    net = (
        nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)).double().eval()
    )
    x = torch.randn(8, 1, 3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    of = fl.Problem(net, "cross_entropy", (x, torch.arange(8) % 2))
    space = Elsewhere(of)
    d = space.space.named(by_filter(space, torch.Generator().manual_seed(0)))
    for name, p in net.named_parameters():
        if p.ndim > 1:
            assert torch.allclose(d[name].flatten(1).norm(dim=1), p.flatten(1).norm(dim=1), rtol=1e-12)
        else:
            assert not d[name].any()
    # every point is the loss of the network at those weights, with its running statistics
    found = fl.plane(of, "random", points=3, generator=torch.Generator().manual_seed(0), progress=False)
    moved = copy.deepcopy(net)
    with torch.no_grad():
        for name, p in moved.named_parameters():
            p.add_(d[name])  # the first direction, drawn first
        truth = float(nn.functional.cross_entropy(moved(x), torch.arange(8) % 2))
    assert float(found.loss[2, 1]) == pytest.approx(truth, rel=1e-12)


def test_the_axes_of_a_trajectory_are_its_principal_components() -> None:
    net, theta = trained(), flat_parameters(trained())
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(5, len(theta), generator=generator, dtype=torch.float64)
    checkpoints = []
    for row in rows:
        other = copy.deepcopy(net)
        nn.utils.vector_to_parameters(theta + row, other.parameters())
        checkpoints.append(other)
    found = fl.plane(problem(net), checkpoints, points=3, progress=False)
    left, values, right = torch.linalg.svd(rows, full_matrices=False)
    at = found.trajectory
    assert at is not None
    assert torch.allclose(at[:, :2].abs(), (left * values)[:, :2].abs(), rtol=1e-9)
    off = (rows - (rows @ right[:2].T) @ right[:2]).norm(dim=1)
    assert torch.allclose(at[:, 2], off, rtol=1e-9)
    by_dict = fl.plane(problem(net), [one.state_dict() for one in checkpoints], points=3, progress=False)
    assert torch.equal(by_dict.loss, found.loss)


class Cubic(nn.Module):
    """One weight w, whose output is w^2 / 2 + c w^3 at each sample."""

    def __init__(self, c: float) -> None:
        super().__init__()
        self.w, self.v = (nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))
        self.c = c

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.w**2 / 2 + self.c * self.w**3 + self.v**2 / 4)


def plain(f: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return f[:, 0]


def test_the_quadratic_of_a_cubic_ends_where_its_third_order_is_the_share() -> None:
    ones = torch.ones(4, 1, dtype=torch.float64)
    found = fl.plane(fl.Problem(Cubic(0.25), plain, (ones, ones)), points=3, rtol=0.1, progress=False)
    steep, shallow = found.slices
    # |c w^3| = share w^2 / 2 at w = share / (2 c)
    for good, bad in steep.holds:
        assert good <= 0.2 + 1e-12
        assert bad >= 0.2 - 1e-12
        assert bad / good < 1.01
    assert steep.second == pytest.approx(1.0)
    assert [bad for _, bad in shallow.holds] == [math.inf, math.inf]  # along v it is a quadratic
    assert "to a distance of at least" in found.answer[0]
    assert found.answer[0].startswith("The quadratic holds along the eigenvector of 1 to a distance of 0.2, where")


def test_equal_eigenvalues_give_two_names() -> None:
    net, x = nn.Linear(2, 1, bias=False, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    found = fl.plane(fl.Problem(net, "half_squared_error", (x, x[:, :1])), points=3, progress=False)
    assert [one.name for one in found.slices] == ["first eigenvector of 0.5", "second eigenvector of 0.5"]
    rows = found.slice_frame().groupby("direction")
    assert rows["x"].nunique().eq(rows.size()).all()


def test_the_bracket_holds_the_end_that_a_dense_scan_sees() -> None:
    net = trained(1)
    found = fl.plane(problem(net), points=3, generator=torch.Generator().manual_seed(0), directions="random",
                     progress=False)  # fmt: skip
    d = by_filter(Elsewhere(problem(net)), torch.Generator().manual_seed(0))
    theta, one = flat_parameters(net), found.slices[0]
    H = hessian_of(net, lambda f: LOSSES["cross_entropy"](f, Y).mean(), X)
    assert one.second == pytest.approx(float(d @ H @ d), rel=1e-9)
    for sign, (good, bad) in zip((-1, 1), one.holds, strict=True):
        scan = torch.linspace(0.05, 1.0, 96, dtype=torch.float64) * bad * 1.05
        rests = [
            abs(loss_at(net, theta + sign * x * d) - loss_at(net, theta) - sign * x * one.first - x**2 * one.second / 2)
            / max(x**2 * abs(one.second) / 2, 0.01 * loss_at(net, theta))
            for x in scan.tolist()
        ]
        first = next(x for x, rest in zip(scan.tolist(), rests, strict=True) if rest > 0.1)
        assert good * 0.98 <= first <= bad * 1.02
        assert one.length == pytest.approx(float(d.norm()))


def test_nothing_is_changed_and_results_are_saved(tmp_path: Path) -> None:
    net = trained()
    before = copy.deepcopy(net.state_dict())
    found = fl.plane(problem(net), points=3, progress=False)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    found.save(tmp_path / "plane.safetensors")
    again = fl.LossPlane.load(tmp_path / "plane.safetensors")
    assert again.frame().equals(found.frame())
    assert again.table().equals(found.table())
    assert again.slice_frame().equals(found.slice_frame())
    assert again.answer == found.answer


@pytest.mark.parametrize(
    ("directions", "options", "told"),
    [
        ("eigenvector", {}, "unknown kind of directions 'eigenvector': did you mean eigenvectors"),
        ("random", {"points": 2}, "at least 3"),
        ("random", {"rtol": 0.0}, "positive"),
        ("random", {"extent": math.nan}, "positive"),
        ([1], {}, "at least two checkpoints"),
        ([{}, {}], {}, "checkpoint 0 has no finite '0.weight'"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(directions: object, options: dict[str, float], told: str) -> None:
    with pytest.raises((BadInput, UnknownName), match=told) as refused:
        fl.plane(problem(drawn((4, 6, 3), 0)), directions, progress=False, **options)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)


def test_checkpoints_on_one_line_have_no_plane() -> None:
    net = drawn((4, 6, 3), 0)
    ahead = {name: 2 * value for name, value in net.state_dict().items()}
    with pytest.raises(BadInput, match="lie on one line"):
        fl.plane(problem(net), [ahead, {name: 3 * value for name, value in net.state_dict().items()}], progress=False)
