"""Hessian products by differences of gradients, beside explicit double backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from networks import applied, elementwise, module_of
from torch import Tensor, nn

import flatlens as fl
from flatlens.curvature import Hessian
from flatlens.errors import NotDifferentiable
from flatlens.perturbation.weights import By, Landscape, ShardedHessian

DIFFERENCES: By = "central differences of gradients"


def problem(dtype: torch.dtype) -> fl.Problem:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
    return fl.Problem(net, "cross_entropy", (torch.randn(30, 5, dtype=dtype), torch.arange(30) % 3))


@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-8), (torch.float32, 2e-3)])
def test_products_are_those_of_double_backward_within_the_stated_error(dtype: torch.dtype, within: float) -> None:
    one = problem(dtype)
    H = Hessian(problem(torch.float64)).matrix()
    before = [p.detach().clone() for p in one.model.parameters()]
    differenced = ShardedHessian(Landscape(one), by=DIFFERENCES)
    for seed in range(4):
        v = torch.randn(len(H), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        found, error = differenced.with_error(v)
        wanted = H @ v if dtype == torch.float64 else explicit(one) @ v
        assert float((found - wanted).norm()) <= within * float(wanted.norm())
        assert float((found - wanted).norm()) <= 3 * float(error.norm())
        assert float(error.norm()) <= 10 * within * float(wanted.norm())
    assert differenced.products == 4
    assert all(torch.equal(a, p) for a, p in zip(before, one.model.parameters(), strict=True))


def explicit(one: fl.Problem) -> Tensor:
    """The Hessian at a problem's very weights, in float64."""
    net = problem(torch.float64).model
    net.load_state_dict({name: value.double() for name, value in one.model.state_dict().items()})
    torch.manual_seed(0)
    nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    x = torch.randn(30, 5).double()
    return Hessian(fl.Problem(net, "cross_entropy", (x, torch.arange(30) % 3))).matrix()


@pytest.mark.parametrize("by", [DIFFERENCES, "double backward", None])
def test_both_sides_are_scaled_and_shifted(by: By | None) -> None:
    one = problem(torch.float64)
    H = Hessian(one).matrix()
    root, shift = torch.linspace(0, 2, len(H), dtype=torch.float64), torch.linspace(1, 3, len(H), dtype=torch.float64)
    A = ShardedHessian(Landscape(one), root, shift, by=by)
    v = torch.randn(len(H), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.allclose(A(v), root * (H @ (root * v)) + shift * v, rtol=1e-7, atol=1e-9)
    assert float(A(torch.zeros_like(v)).norm()) == 0


# x^3 / 6, whose second derivative is not x.
WrongTwice = elementwise("WrongTwice", lambda x: x**3 / 6, lambda x: x.detach() ** 2 / 2)


def cubic(function: Callable[[Tensor], Tensor]) -> nn.Module:
    return module_of(lambda net, x: function(x @ net.w.T), w=nn.Parameter(torch.tensor([[1.0, 2.0, 3.0]]).double()))


def broken(x: Tensor) -> Tensor:
    z = x**2
    if z.requires_grad:
        z.register_hook(lambda slope: slope.detach())
    return z


@pytest.mark.parametrize(("function", "by"), [
    (lambda z: z**3 / 6, "double backward"), (WrongTwice.apply, DIFFERENCES), (broken, DIFFERENCES),
])  # fmt: skip
def test_a_wrong_double_backward_is_not_used(function: Callable[[Tensor], Tensor], by: By) -> None:
    x = torch.randn(10, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one = fl.Problem(cubic(function), "mse", (x, torch.zeros(10, 1, dtype=torch.float64)))
    H = ShardedHessian(Landscape(one))
    assert H.by == by
    w = one.model.w.detach().clone().requires_grad_()
    plain = (lambda z: z**2) if function is broken else (lambda z: z**3 / 6)
    wanted = torch.autograd.functional.hessian(lambda w: plain(x @ w.T).square().mean(), w).reshape(3, 3)
    v = torch.tensor([0.3, -1.0, 0.5], dtype=torch.float64)
    assert torch.allclose(H(v), wanted @ v, rtol=1e-7)


# A ReLU whose backward has no derivative; autograd would leave it out of a second derivative.
Kinked = elementwise("Kinked", torch.relu, lambda x: x > 0, once=True)


def wide(activation: nn.Module, samples: int) -> fl.Problem:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 64), activation, nn.Linear(64, 5))
    return fl.Problem(net, "half_squared_error", (torch.randn(samples, 4), torch.randn(samples, 5)))


def test_kinks_among_many_samples_leave_double_backward_alone() -> None:
    H = ShardedHessian(Landscape(wide(nn.ReLU(), 20_000)))
    assert H.by == "double backward"
    wanted, v = Hessian(wide(nn.ReLU(), 20_000)), torch.randn(H.size, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(H(v).float(), wanted(v), rtol=1e-3, atol=1e-4 * float(wanted(v).norm()))


@pytest.mark.parametrize("activation", [applied(Kinked.apply), nn.Sequential(applied(Kinked.apply), nn.ReLU())])
def test_neither_way_is_used_where_gradients_jump(activation: nn.Module) -> None:
    one = wide(activation, 2000)
    for _ in range(2):  # the second time from what is known of the problem
        with pytest.raises(NotDifferentiable, match="gradient jumps"):
            ShardedHessian(Landscape(one))


def test_only_torch_s_own_operations_may_stand_unchecked() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4096), nn.ReLU(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 2))
    few = (torch.randn(8, 4), torch.randn(8, 2))
    assert ShardedHessian(Landscape(fl.Problem(net, "mse", few))).by == "double backward"
    net.append(cubic(WrongTwice.apply).float())
    net[-1].w = nn.Parameter(torch.ones(1, 2))
    with pytest.raises(NotDifferentiable):
        ShardedHessian(Landscape(fl.Problem(net, "mse", (few[0], few[1][:, :1]))))
