"""The local learning coefficient of networks: quadrature, what is refused, and what is said."""

from __future__ import annotations

import math

import pytest
import torch
from benchmarks.learning_coefficient import Model, by_quadrature
from torch import nn

import flatlens as fl
from flatlens.errors import BadOption

QUICK = "local_learning_coefficient(draws=150, burn_in=50, leapfrogs=2)"
ROW = fl.measures.named(QUICK)[0].key


class Power(nn.Module):
    """f(x) = w^k x, one parameter."""

    def __init__(self, w: float, k: int) -> None:
        super().__init__()
        self.w, self.k = nn.Parameter(torch.tensor(w, dtype=torch.float64)), k

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w**self.k * x


def measured(net: nn.Module, target: float = 0.0, n: int = 100, measure: str = QUICK, seed: int = 1) -> fl.Report:
    x = torch.ones(n, 1, dtype=torch.float64)
    problem = fl.Problem(net, "half_squared_error", (x, target * x))
    return fl.measure(fl.Lens(problem), measure, generator=torch.Generator().manual_seed(seed), progress=False)


def test_it_is_the_posterior_s_mean_by_quadrature_and_leaves_the_network() -> None:
    net = Power(0.0, 2)
    found = measured(net)
    truth = by_quadrature(Model(lambda w: w[:, 0] ** 4 / 2, 1, 1 / 4), 100 / math.log(100), 1.0)
    assert found[ROW].value == pytest.approx(truth, abs=3 * found[ROW].stderr)
    assert found[ROW].kind == "estimate"
    assert 0 < found[ROW].stderr < 0.15
    assert found[f"{ROW}.fall"].value == pytest.approx(0.0, abs=1e-12)
    assert found[ROW].arrays["draws"].shape == (4, 150)
    assert net.w.item() == 0.0
    assert net.w.grad is None
    assert found[ROW].value == measured(net)[ROW].value != measured(net, seed=2)[ROW].value


def test_weights_beside_the_minimum_are_said_not_to_be_one() -> None:
    """f = w x, target 0, w* = 1: the descent finds w = gamma / (n beta + gamma), and the loss of w* is 1/2."""
    found = measured(Power(1.0, 1))
    strength = 100 / math.log(100)
    mode = 1 / (strength + 1)
    assert found[f"{ROW}.fall"].value == pytest.approx(strength * (1 - mode**2) / 2, rel=1e-6)
    assert "the weights are not a minimum: a descent lowers the loss by 0.5" in found[ROW].note
    assert found[ROW].value < 0


class Wells(nn.Module):
    """height (w^2 - 1)^2 + a slope: w* > 0 is the higher of two minima."""

    def __init__(self, w: float, height: float) -> None:
        super().__init__()
        self.w, self.height = nn.Parameter(torch.tensor(w, dtype=torch.float64)), height

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.height * (self.w**2 - 1).square() + 0.3 * (self.w + 1.2)).sqrt() * x


@pytest.mark.parametrize(
    ("w", "height", "why"),
    [
        (0.96, 1.0, "the chains disagree"),  # some have crossed the barrier
        (0.786, 0.25, "the chains left the basin"),  # all
    ],
)
def test_chains_that_disagree_or_leave_the_basin_have_no_value(w: float, height: float, why: str) -> None:
    found = measured(Wells(w, height), measure=QUICK.replace(")", ", beta=0.2, gamma=0.01)"))
    row = next(name for name in found.measures() if not name.endswith(".fall"))
    assert found[row].kind == "undefined"
    assert found[row].note.startswith(why)


def test_one_sample_has_no_beta() -> None:
    assert measured(Power(0.0, 1), n=1)[ROW].note.startswith("beta = 1 / log n needs at least two samples")


@pytest.mark.parametrize("option", ["gamma=0", "chains=1", "draws=5", "leapfrogs=0", "burn_in=0", "beta=-1",
                                    "gradients=500", "gradients=2000, draws=50"])  # fmt: skip
def test_options_that_cannot_be_used(option: str) -> None:
    with pytest.raises(BadOption, match=option.partition("=")[0]):
        measured(Power(0.0, 1), measure=f"local_learning_coefficient({option})")


def test_a_budget_of_gradients_is_kept_and_counted() -> None:
    """The chains of 800 gradients, 4 in a transition of one of them: 50 transitions each, of which 12 burn in."""

    class Counted(Power):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            type(self).calls += torch.is_grad_enabled()
            return super().forward(x)

    spelled = "local_learning_coefficient(gradients=800, leapfrogs=4)"
    net, row = Counted(0.0, 1), fl.measures.named(spelled)[0].key
    lens = fl.Lens(fl.Problem(net, "half_squared_error", (torch.ones(50, 1).double(), torch.zeros(50, 1).double())))
    before = net.calls
    found = fl.measure(lens, spelled, progress=False)[row]
    taken = int(found.note.rpartition(" gradients")[0].rpartition(" ")[2].replace(",", ""))
    assert found.arrays["draws"].shape == (4, 38)
    assert 800 <= taken <= 800 + 100 * 5 + 4 * 60
    assert taken <= net.calls - before <= taken + 20  # the lens itself takes a few
    same = measured(Power(0.0, 1), measure="local_learning_coefficient(gradients=2000)")
    also = measured(Power(0.0, 1), measure="local_learning_coefficient(draws=75, burn_in=25)")
    assert next(iter(same.values())).value == next(iter(also.values())).value


def test_the_cost_of_a_budget_is_told_before() -> None:
    net, x = Power(0.0, 1), torch.ones(50, 1, dtype=torch.float64)
    lens = fl.Lens(fl.Problem(net, "half_squared_error", (x, 0 * x)))
    small, large = (fl.cost(lens, measures=f"local_learning_coefficient(gradients={n})") for n in (1_000, 400_000))
    assert large.seconds > 20 * small.seconds > 0  # 267 times the gradients


def test_it_follows_a_training() -> None:
    net = Power(0.5, 1)
    x = torch.ones(50, 1, dtype=torch.float64)
    problem = fl.Problem(net, "half_squared_error", (x, 0 * x))
    optimiser = torch.optim.SGD(net.parameters(), lr=0.5)
    budget = "local_learning_coefficient(gradients=1600, leapfrogs=2)"
    with fl.Tracker(problem, budget, every=20, live=False) as tracker:
        for step in range(21):
            tracker.step(step)
            loss = net(x).square().mean() / 2
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    history = tracker.history[tracker.history["measure"] == tracker.history["measure"].iloc[0]].set_index("step")
    assert "not a minimum" in history.loc[0, "note"]
    assert "not a minimum" not in history.loc[20, "note"]
    assert history.loc[20, "value"] == pytest.approx(0.5, abs=0.25)
