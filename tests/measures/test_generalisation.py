"""The gap's conventions, and the loss beyond its least value, against torch's own losses."""

from __future__ import annotations

import math

import pytest
import torch
from builders import chain, normal
from scipy.stats import binom
from torch import nn

import flatlens as fl
from flatlens.curvature.probes import mean_of_forms
from flatlens.measures.generalisation import held_out_risk, share_right
from flatlens.problem.forward import Outcomes

X = normal(8, 3, seed=3)


def test_gap_conventions() -> None:
    net = chain([3, 2], 5, bias=False)
    y = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])
    problem = fl.Problem(net, "cross_entropy", (X, y), test=(2 * X[:5], y[:5]))
    lens = fl.Lens(problem)
    keys = [
        "generalisation_gap",
        *(f"generalisation_gap(convention='{c}')" for c in ("absolute", "summed_x5", "accuracy")),
    ]
    report = fl.measure(lens, [*keys, "loss", "test_loss", "accuracy", "test_accuracy"])
    train = nn.functional.cross_entropy(net(X), y, reduction="none").detach()
    test = nn.functional.cross_entropy(net(2 * X[:5]), y[:5], reduction="none").detach()
    assert report["loss"].value == pytest.approx(float(train.mean()))
    assert report["test_loss"].stderr == pytest.approx(float(mean_of_forms(test.double())[1]))
    signed = float(test.mean() - train.mean())
    assert report[keys[0]].value == pytest.approx(signed)
    assert report[keys[1]].value == pytest.approx(abs(signed))
    assert report[keys[2]].value == pytest.approx(float(5 * test.sum() - train.sum()))
    hits = (net(X).argmax(1) == y).double().mean() - (net(2 * X[:5]).argmax(1) == y[:5]).double().mean()
    assert report[keys[3]].value == pytest.approx(float(hits))
    alone = fl.Lens(fl.Problem(net, "cross_entropy", (X, y)))
    assert "test=" in fl.measure(alone, ["generalisation_gap"])["generalisation_gap"].note
    assert "generalisation_gap" not in fl.measure(alone, "pass").measures()


def test_the_excess_of_a_smoothed_loss_is_what_training_can_take_away() -> None:
    """Outputs that meet the smoothed labels leave their entropy and nothing else; hard labels have none."""
    p = torch.tensor([0.8, 0.1, 0.1], dtype=torch.float64)  # (1 - 0.3) 1 + 0.3/3, 0.3/3, 0.3/3
    net = nn.Linear(3, 3, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(torch.stack([p.roll(k).log() for k in range(3)], 1))
    x, y = torch.eye(3, dtype=torch.float64), torch.arange(3)
    smoothed = fl.measure(
        fl.Lens(fl.Problem(net, nn.CrossEntropyLoss(label_smoothing=0.3), (x, y))), ["loss", "loss(excess=True)"]
    )
    assert smoothed["loss"].value == pytest.approx(-float((p * p.log()).sum()))
    assert smoothed["loss(excess=True)"].value == pytest.approx(0.0, abs=1e-12)
    hard = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), ["loss", "loss(excess=True)"])
    assert hard["loss(excess=True)"].value == hard["loss"].value == pytest.approx(-math.log(0.8))
    weighted = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]).double(), label_smoothing=0.3)
    problem = fl.Problem(net, weighted, (x, y))
    report = fl.measure(fl.Lens(problem), ["loss", "loss(excess=True)"])
    least = float(problem.loss.least(x, y).sum() / 6)  # divided by the labels' weights, as torch divides the loss
    assert report["loss(excess=True)"].value == pytest.approx(report["loss"].value - least)
    own = fl.Problem(net, lambda f, y: f.square().sum(1), (x, y))
    assert fl.measure(fl.Lens(own), "loss(excess=True)")["loss(excess=True)"].kind == "undefined"


def test_one_held_out_sample_has_no_error() -> None:
    net = nn.Linear(3, 2)
    train, test = ((torch.randn(n, 3), torch.zeros(n, dtype=torch.long)) for n in (5, 1))
    report = fl.measure(
        fl.Lens(fl.Problem(net, "cross_entropy", train, test=test)), ["test_loss", "generalisation_gap"]
    )
    for name in ("test_loss", "generalisation_gap"):
        assert report[name].kind == "undefined"
        assert report[name].note.endswith("on one held-out sample: an error needs two")


@pytest.mark.parametrize("n", [2, 5, 10, 50])
@pytest.mark.parametrize("share", [0.5, 0.83, 0.97])
def test_the_accuracys_interval_covers_the_expected_share(n: int, share: float) -> None:
    """The exact probability of the interval to hold it, over all numbers of samples that are right."""
    covered = 0.0
    for right in range(n + 1):
        correct = torch.tensor([1.0] * right + [0.0] * (n - right), dtype=torch.float64)
        found = share_right(Outcomes(correct, correct), held_out=True)
        if abs(found.value - share) <= 1.96 * found.stderr + 1e-12:
            covered += float(binom.pmf(right, n, share))
    assert covered >= 0.95


def test_ignored_samples_do_not_count_in_the_accuracys_error() -> None:
    few, ignored = torch.tensor([1.0, 0.0, 1.0]).double(), torch.tensor([1.0, float("nan"), 0.0, 1.0]).double()
    assert (
        share_right(Outcomes(few, few), held_out=True).stderr
        == share_right(Outcomes(ignored, ignored), held_out=True).stderr
    )


def test_the_error_of_a_weighted_risk_is_that_of_a_ratio() -> None:
    """Products of weight and loss that are all alike have no spread; the risk, their sum over the weights', has."""
    generator = torch.Generator().manual_seed(0)
    weights, losses = torch.tensor([1.0, 4.0]).double(), torch.tensor([4.0, 1.0]).double()
    truth, found = 8 / 5, []  # both kinds are as frequent
    for _ in range(300):
        kind = torch.randint(2, (40,), generator=generator)
        mean = weights[kind].mean()
        held_out = Outcomes(losses[kind] * weights[kind] / mean, None, weights[kind] / mean)
        risk = held_out_risk(held_out)
        found.append(abs(risk.value - truth) <= 1.96 * risk.stderr)
    assert sum(found) / len(found) == pytest.approx(0.96, abs=0.03)


def test_the_weights_of_held_out_samples_are_those_of_the_loss() -> None:
    net, y = chain([3, 2], 5), torch.tensor([0, 1, 0, 1, 1])
    weighted = nn.CrossEntropyLoss(torch.tensor([1.0, 3.0], dtype=X.dtype))
    lens = fl.Lens(fl.Problem(net, weighted, (X[:5], y), test=(X[:5], y)))
    test = lens.outcomes("test")
    assert test.weights is not None
    assert test.weights.tolist() == pytest.approx([5 / 11, 15 / 11, 5 / 11, 15 / 11, 15 / 11])
    assert test.risk == pytest.approx(float(weighted(net(X[:5]), y).detach()))
