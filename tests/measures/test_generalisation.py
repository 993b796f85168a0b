"""The gap's conventions, and the loss beyond its least value, against torch's own losses."""

from __future__ import annotations

import math

import pytest
import torch
from builders import chain, normal
from torch import nn

import flatlens as fl

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
    assert report["test_loss"].stderr == pytest.approx(float(test.std()) / math.sqrt(5))
    signed = float(test.mean() - train.mean())
    assert report[keys[0]].value == pytest.approx(signed)
    assert report[keys[1]].value == pytest.approx(abs(signed))
    assert report[keys[2]].value == pytest.approx(float(5 * test.sum() - train.sum()))
    hits = (net(X).argmax(1) == y).double().mean() - (net(2 * X[:5]).argmax(1) == y[:5]).double().mean()
    assert report[keys[3]].value == pytest.approx(float(hits))
    alone = fl.Lens(fl.Problem(net, "cross_entropy", (X, y)))
    assert "test=" in fl.measure(alone, ["generalisation_gap"])["generalisation_gap"].note
    assert "generalisation_gap" not in fl.measure(alone).measures()


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
