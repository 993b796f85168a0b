"""The leading eigenspace as a measure: against dense matrices, and from look to look."""

from __future__ import annotations

import pytest
import torch
from quadratic import gradient_and_hessian, linear
from torch import Tensor, nn

import flatlens as fl
from flatlens.comparing import forgetting_memory
from flatlens.curvature import Hessian, eigenspace_memory
from flatlens.curvature.leading import eigenspace
from flatlens.memory import OfProcess

NAME = "eigenspace(top_k=2)"


def leading(net: nn.Module, x: Tensor, y: Tensor, k: int = 2) -> tuple[Tensor, Tensor]:
    """(the gradient, the k leading eigenvectors as columns)."""
    g, H = gradient_and_hessian(net, x, y)
    return g, torch.linalg.eigh(H).eigenvectors[:, -k:]


def share(v: Tensor, V: Tensor) -> float:
    return float((V.T @ v).square().sum() / v.square().sum())


def test_the_tracker_follows_the_shares_and_the_overlap() -> None:
    net, x, y = linear(60)
    with torch.no_grad():
        net.weight[:, :3] *= 0.1
    problem = fl.Problem(net, "half_squared_error", (x, y))
    tracker = fl.Tracker(problem, NAME, every=1, live=False)
    g, V = leading(net, x, y)
    tracker.step(0)
    first = tracker.history.set_index("measure")
    assert first["value"][NAME] == pytest.approx(share(g, V), abs=2e-3)
    assert first["kind"][f"{NAME}.overlap"] == first["kind"][f"{NAME}.update"] == "undefined"
    assert "no earlier look" in first["note"][f"{NAME}.overlap"]
    before = torch.cat([p.detach().flatten() for p in net.parameters()])
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3), dtype=p.dtype))
    moved = torch.cat([p.detach().flatten() for p in net.parameters()]) - before
    tracker.step(1)
    then = tracker.history[tracker.history["step"] == 1].set_index("measure")
    assert then["value"][f"{NAME}.update"] == pytest.approx(share(moved, V), abs=2e-3)
    assert then["value"][f"{NAME}.overlap"] == pytest.approx(1.0, abs=1e-3)  # the Hessian is the same
    resumed = fl.Tracker(problem, NAME, every=1, live=False)
    resumed.load_state_dict(tracker.state_dict())
    resumed.step(2)
    assert resumed.history.iloc[-1]["kind"] == "estimate"


def test_the_overlap_falls_where_the_space_turns() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 4, generator=draw).double(), torch.randn(30, 2, generator=draw).double()
    problem = fl.Problem(net, "half_squared_error", (x, y))
    one = fl.Lens(problem)
    fl.measure(one, NAME)
    _, V = leading(net, x, y)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.5 * torch.randn(p.shape, generator=draw).double())
    found = fl.measure(fl.Lens(problem, after=one), NAME)[f"{NAME}.overlap"]
    _, W = leading(net, x, y)
    truth = float((V.T @ W).square().sum() / 2)
    assert truth < 0.95
    assert abs(found.value - truth) <= max(found.margin, 1e-3)


def test_memory_is_told_before_and_a_warning_comes_where_less_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, y = linear(20)
    problem = fl.Problem(net, "half_squared_error", (x, y))
    H = Hessian(problem)
    told = eigenspace_memory(H, 2), forgetting_memory(problem)
    assert all(problem.memory / 2 < size < problem.memory for size in told)
    monkeypatch.setattr("flatlens.memory.OfProcess.left", lambda meter: 1000)
    with pytest.warns(UserWarning, match=r"eigenspace\(...\) may take 0.5 GiB of memory, and .* is free"):
        eigenspace(H, 2)
    with pytest.warns(UserWarning, match=r"forgetting\(...\) may take"):
        fl.forgetting(problem, {name: 2 * p.detach() for name, p in net.named_parameters()})


LARGE = ("directional_sharpness", "batch_sharpness(samples=4, batches=2)", "worst_sharpness(restarts=1, steps=2)")


@pytest.mark.parametrize("name", LARGE)
def test_measures_of_training_take_no_more_than_they_tell(name: str) -> None:
    gauge = OfProcess()
    if not gauge.begin():
        pytest.skip("the peak of this process cannot be reset")
    for width in (10, 1000):  # the first one loads modules
        torch.manual_seed(0)
        hidden = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.GELU())]
        net = nn.Sequential(*hidden, nn.Linear(width, 3))
        problem = fl.Problem(net, "cross_entropy", (torch.randn(8, width), torch.arange(8) % 3), memory="1MB")
        tracker, adam = fl.Tracker(problem, name, live=False), torch.optim.AdamW(net.parameters())
        gauge.begin()
        used = gauge.used() or 0
        tracker.step(0, optimiser=adam)
        peak = (gauge.peak() or 0) - used
    assert tracker.memory is not None
    assert 2 * problem.bytes_of_weights < peak < tracker.memory


def test_a_tracker_tells_its_memory_before_and_warns_where_less_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(100, 100)
    problem = fl.Problem(net, "mse", (torch.ones(4, 100), torch.zeros(4, 100)), memory="10KB")
    one = problem.bytes_of_weights
    assert one == 4 * 10100
    assert fl.Tracker(problem, "worst_sharpness", live=False).memory == 24 * one + 10000
    both = fl.Tracker(problem, ["sharpness(top_k=2)", "critical_sharpness"], live=False)
    assert both.memory == (38 + 10) * one + 10000  # ten vectors for the next search
    assert fl.Tracker(problem, ["critical_sharpness", "mls"], live=False).memory is None
    monkeypatch.setattr("flatlens.memory.OfProcess.left", lambda meter: 1000)
    with pytest.warns(UserWarning, match=r"a measurement of this Tracker may take .* is free"):
        fl.Tracker(problem, "critical_sharpness", live=False)
