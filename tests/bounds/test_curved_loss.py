"""The bounds under cross-entropy and the logistic loss, beside their literal definitions, and at smoothed labels."""

from __future__ import annotations

import pytest
import torch
from builders import chain, normal
from literal_bounds import layers, slopes
from torch import Tensor, nn
from torch.func import hessian, vmap

import flatlens as fl

A = 0.2  #: label smoothing
LABELS = torch.tensor([0, 2, 1, 1, 0, 2])


def smoothed_loss(f: Tensor, q: Tensor) -> Tensor:
    """Cross-entropy of one sample; for one output the logistic loss."""
    if len(f) == 1:
        return -(q * nn.functional.logsigmoid(f) + (1 - q) * nn.functional.logsigmoid(-f)).sum()
    return -(q * f.log_softmax(0)).sum()


def problem(outputs: int, seed: int = 1) -> tuple[fl.Lens, nn.Sequential, Tensor, Tensor, str]:
    net, x = chain([4, 5, outputs], seed), normal(6, 4, seed=2)
    y = LABELS % max(2, outputs)
    loss = f"{'logistic' if outputs == 1 else 'cross_entropy'}(label_smoothing={A})"
    hot = y[:, None].double() if outputs == 1 else nn.functional.one_hot(y, outputs).double()
    return fl.Lens(fl.Problem(net, loss, (x, y))), net, x, (1 - A) * hot + A / max(2, outputs), loss


@pytest.mark.parametrize("outputs", [1, 2, 3])
def test_every_side_is_its_literal_definition(outputs: int) -> None:
    lens, net, x, q, _ = problem(outputs)
    C = vmap(hessian(smoothed_loss))(net(x).detach(), q)
    P = torch.eye(outputs).double() - (1 / outputs if outputs > 1 else 0)
    r = outputs - (outputs > 1)
    c = float(torch.linalg.eigvalsh(C)[:, -r].min())
    seen, J = layers(net, x), torch.cat([*slopes(net, x).values()], 2)
    trace = float(torch.einsum("nij,nip,njp->n", C, J, J).mean())
    ratios = {name: s.W2**2 / s.norm**2 for name, s in seen.items()}
    spectral = {name: torch.linalg.matrix_norm(P @ s.dx, 2).mean() for name, s in seen.items()}
    volume = torch.linalg.svdvals(P @ seen["0"].dx)[:, :r].prod(1).mean()
    bound = (ratios["0"] ** r).sum().sqrt() / 6 * (6 * trace / c / r) ** (r / 2)
    truth = {
        ("sharpness", None): ((P @ J).square().sum((1, 2)).mean(), trace / c),
        ("", "0"): (spectral["0"], (ratios["0"].mean() * trace / c).sqrt()),
        ("nmls", None): (sum(spectral.values()), (sum(v.mean() for v in ratios.values()) * trace / c).sqrt()),
        ("volume", "0"): (volume.log(), bound.log()),
    }
    report = fl.check_bounds(lens, "curved_loss_bound")
    assert len(report) == len(truth)
    for (part, layer), (left, right) in truth.items():
        row = report.of(f"curved_loss_bound.{part}".rstrip("."), layer)
        assert (row.lhs, row.rhs) == (pytest.approx(float(left), rel=1e-9), pytest.approx(float(right), rel=1e-9))
        assert row.status == "holds"


@pytest.mark.parametrize("outputs", [1, 2, 3])
def test_at_the_minimum_of_smoothed_labels_the_trace_is_c_times_sharpness(outputs: int) -> None:
    """sigma(f) = q: c is the note's number, and for one output Tr H = c S, as Eq. 3 has for the squared error."""
    net, x = nn.Linear(8, outputs).double(), normal(6, 8, seed=2)
    q = problem(outputs)[3]
    goal = q.logit() if outputs == 1 else q.log()
    with torch.no_grad():
        solved = torch.linalg.lstsq(torch.cat([x, torch.ones(6, 1).double()], 1), goal).solution
        net.weight.copy_(solved[:-1].T)
        net.bias.copy_(solved[-1])
    lens = fl.Lens(fl.Problem(net, problem(outputs)[4], (x, LABELS % max(2, outputs))))
    report = fl.measure(lens, ["hessian_trace", "interpolation_sharpness", "loss"])
    row = fl.check_bounds(lens, "curved_loss_bound").of("curved_loss_bound.sharpness")
    c = {1: A * (2 - A) / 4, 2: A * (2 - A) / 2, 3: A / 3}[outputs]
    assert row.note == f"c = {c:.3g}, {c:.3g} at the minimum"
    assert report["hessian_trace"].value / c == pytest.approx(row.rhs, rel=1e-6)
    if outputs == 1:
        assert report["hessian_trace"].value == pytest.approx(c * report["interpolation_sharpness"].value, rel=1e-6)
        assert row.tightness == pytest.approx(1, rel=1e-6)


def test_without_smoothing_the_bound_says_nothing_as_the_loss_falls() -> None:
    """The curvature of a sure softmax is 0, as section 2 says; smoothing keeps it."""
    tight = []
    for size in (1.0, 8.0):
        net = nn.Linear(4, 2, bias=False).double()
        x = torch.eye(4).double()
        with torch.no_grad():
            net.weight.copy_(size * torch.tensor([[1.0, -1, 1, -3], [-1, 1, -1, 3]]))
        lens = fl.Lens(fl.Problem(net, "cross_entropy", (x, torch.tensor([0, 1, 0, 1]))))
        tight.append(fl.check_bounds(lens, "curved_loss_bound").of("curved_loss_bound", "").tightness)
    assert tight[1] < 1e-3 * tight[0]


def test_no_row_is_violated_on_random_networks() -> None:
    for seed in range(20):
        for outputs in (1, 2, 3):
            assert not fl.check_bounds(problem(outputs, seed)[0], "curved_loss_bound").violated
    lens = fl.Lens(fl.Problem(chain([4, 5, 3], 1), "half_squared_error", (normal(6, 4), normal(6, 3))))
    curved = fl.check_bounds(lens, ["curved_loss_bound", "mls_chain"])  # C = I: the paper's own
    assert curved.of("curved_loss_bound", "0").rhs == pytest.approx(curved.of("mls_chain", "0").rhs, rel=1e-12)
