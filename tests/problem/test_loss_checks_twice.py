"""Losses without a second derivative: what needs none is measured, what needs one is undefined with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import module_of
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

import flatlens as fl
from flatlens.problem.loss_checks import require_twice
from flatlens.problem.losses import as_loss

G = torch.Generator().manual_seed(0)
X, Y = torch.randn(6, 3, generator=G).double(), torch.randn(6, 2, generator=G).double()
NEEDS_NONE = ["loss", "mls", "interpolation_sharpness", "weight_norm", "output_norm"]
NEEDS_ONE = ["ggn_trace", "hessian_trace", "sharpness", "relative_flatness", "normalized_sharpness"]


def network(outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, outputs)).double()


class Squared(torch.autograd.Function):
    """The squared distance, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, f: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(f, y)
        return (f - y).square().sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        f, y = ctx.saved_tensors
        return 2 * (f - y) * g[:, None], None


def once(f: Tensor, y: Tensor) -> Tensor:
    found: Tensor = Squared.apply(f, y)
    return found


HIDING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "alone": once,
    "scaled": lambda f, y: 3 * once(f, y),
    "below a curved function": lambda f, y: once(f.tanh(), y),
    "above one": lambda f, y: (1 + once(f, y)).log(),
    "beside another": lambda f, y: once(f, y) + f.exp().sum(1),
    "its mean": lambda f, y: once(f, y).mean(),
    "in one output": lambda f, y: once(f[:, :1], y[:, :1]) + f[:, 1],
    "a gradient that is given": lambda f, y: (f * (f.exp() - y).detach()).sum(1),
}
WITHOUT: dict[str, tuple[Any, Tensor]] = {
    "multi margin": (nn.MultiMarginLoss(weight=torch.tensor([1.0, 2.0]).double()), torch.tensor([0, 1, 1, 0, 1, 0])),
    "multi margin, squared": (nn.MultiMarginLoss(p=2), torch.tensor([0, 1, 1, 0, 1, 0])),
    "multi label margin": (F.multilabel_margin_loss, torch.tensor([[1, -1]]).repeat(6, 1)),
} | {name: (loss, Y) for name, loss in HIDING.items()}


@pytest.mark.parametrize("name", WITHOUT)
def test_what_needs_no_second_derivative_is_measured(name: str) -> None:
    loss, y = WITHOUT[name]
    net = network()
    report = fl.measure(fl.Lens(fl.Problem(net, loss, (X, y))), [*NEEDS_NONE, *NEEDS_ONE])
    assert report["loss"].value == pytest.approx(float(loss(net(X), y).detach().mean()), rel=1e-12)
    plain = fl.measure(fl.Lens(fl.Problem(net, "mse", (X, Y))), NEEDS_NONE)
    for key in NEEDS_NONE[1:]:
        assert report[key].value == pytest.approx(plain[key].value, rel=1e-12), key
    for key in NEEDS_ONE:
        assert report[key].kind == "undefined", key
        assert report[key].note.startswith("Problem(loss=...): the loss"), key
    assert all(row.kind == "undefined" or row.value == row.value for row in fl.measure(fl.Lens(fl.Problem(
        net, loss, (X, y))), "pass").values())  # fmt: skip
    verdicts = fl.check_bounds(fl.Lens(fl.Problem(net, loss, (X, y))))
    assert {one.status for one in verdicts} == {"holds", "not applicable"}


def test_a_sketch_and_an_operator_refuse_it_too() -> None:
    problem = fl.Problem(network(5), lambda f, y: once(f[:, :2], y), (X, Y))
    report = fl.measure(fl.Lens(problem, outputs=3), ["ggn_trace", "interpolation_sharpness"])
    assert report["ggn_trace"].kind == "undefined"
    assert report["interpolation_sharpness"].kind == "estimate"
    for operator in (fl.curvature.Hessian, fl.curvature.GaussNewton):
        with pytest.raises(fl.FlatlensError, match="is not that of differences"):
            operator(problem)(torch.ones(sum(p.numel() for p in problem.model.parameters())).double())


SMOOTH: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squared": lambda f, y: (f - y).square().sum(1),
    "hinge": lambda f, y: (1 - f * y).relu().sum(1),
    "squared hinge": lambda f, y: (1 - f * y).relu().square().sum(1),
    "absolute": lambda f, y: (f - y).abs().sum(1),
    "linear": lambda f, y: (f * y).sum(1),
    "Huber": lambda f, y: F.huber_loss(f, y, reduction="none", delta=0.3).sum(1),
    "a weight that is cut off": lambda f, y: ((f - y).square() * (f - y).exp().detach()).sum(1),
    "cubes of the distance": lambda f, y: (f - y).abs().pow(3).sum(1),
    "nearly exact": lambda f, y: (f - y).square().sum(1) * 1e-12,
    "float32 inside": lambda f, y: (f.float() - y.float()).square().sum(1).double(),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_a_loss_with_kinks_or_without_curvature_hides_nothing(name: str) -> None:
    """At any outputs: drawn ones of several sizes, and those exactly on a kink."""
    draw = torch.Generator().manual_seed(1)
    for f in (Y, torch.zeros(6, 2).double(), *(torch.randn(6, 2, generator=draw).double() * 10**k for k in (-6, 0, 3))):
        loss = as_loss(SMOOTH[name])
        require_twice(loss, f, Y)
        assert not loss.no_curvature


def test_a_network_that_returns_its_losses_is_told_why_gauss_newton_numbers_are_zero() -> None:
    """Whatever makes the losses; its Hessian is that of the whole."""
    for own in SMOOTH.values():

        def losses(own: Any) -> nn.Module:
            def forward(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
                found: Tensor = own(net.inside(x), y)
                return found

            return module_of(forward, inside=network())

        problem = fl.Problem(losses(own), lambda f, _: f, ((X, Y), torch.zeros(6)))
        ggn = fl.measure(fl.Lens(problem), ["ggn_trace"])["ggn_trace"]
        assert ggn.value == 0
        assert "the loss is linear in the outputs: the network returns its loss; return" in ggn.note
