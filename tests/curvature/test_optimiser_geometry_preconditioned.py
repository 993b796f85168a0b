"""The Hessian between the roots of an optimiser's preconditioner, against a dense eigensolver and literal steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import flatlens as fl
from flatlens.curvature.optimiser_geometry import PreconditionedHessian, preconditioner_of
from flatlens.errors import BadInput
from flatlens.tracking import edge_of

Made = Callable[[nn.Module], torch.optim.Optimizer]


def net_and_data(seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    x = torch.randn(30, 5, generator=generator, dtype=torch.float64)
    return net, x, torch.arange(30) % 3


def in_groups(kind: type, lrs: tuple[float, float], **settings: float) -> Made:
    """A first layer and a second one with their own learning rates."""
    return lambda net: kind(
        [{"params": net[0].parameters(), "lr": lrs[0]}, {"params": net[2].parameters(), "lr": lrs[1]}], **settings
    )


OPTIMISERS: dict[str, Made] = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    "sgd in groups": in_groups(torch.optim.SGD, (0.1, 0.02)),
    "sgd in groups, with decay": in_groups(torch.optim.SGD, (0.1, 0.02), weight_decay=0.3),
    "adam": lambda net: torch.optim.Adam(net.parameters(), lr=0.01),
    "adam, fused": lambda net: torch.optim.Adam(net.parameters(), lr=0.01, fused=True),
    "amsgrad": lambda net: torch.optim.Adam(net.parameters(), lr=0.01, amsgrad=True, betas=(0.5, 0.9)),
    "adam with decay": lambda net: torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=0.1),
    "adamw in groups": in_groups(torch.optim.AdamW, (0.01, 0.03), weight_decay=2.0),
    "rmsprop": lambda net: torch.optim.RMSprop(net.parameters(), lr=0.01),
    "rmsprop, centred": lambda net: torch.optim.RMSprop(net.parameters(), lr=0.01, centered=True, momentum=0.8),
    "adagrad": lambda net: torch.optim.Adagrad(net.parameters(), lr=0.05, lr_decay=0.01),
}


def trained(make: Made, steps: int = 25) -> tuple[nn.Module, torch.optim.Optimizer, fl.Problem]:
    net, x, y = net_and_data()
    optimiser = make(net)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()
    return net, optimiser, fl.Problem(net, "cross_entropy", (x, y))


def literal_hessian(net: nn.Module) -> Tensor:
    """The Hessian of the risk by double backward, row by row."""
    _, x, y = net_and_data()
    parameters = list(net.parameters())
    grads = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), parameters, create_graph=True)
    rows = [torch.autograd.grad(one, parameters, retain_graph=True) for one in torch.cat([g.flatten() for g in grads])]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def largest(net: nn.Module, optimiser: torch.optim.Optimizer, H: Tensor) -> float:
    """The largest eigenvalue of P^-1/2 (H + D) P^-1/2, by a dense solver."""
    found = preconditioner_of(optimiser, net)
    P = torch.cat([found.divisor[name].flatten() for name, _ in net.named_parameters()])
    D = torch.cat([torch.full((p.numel(),), found.decay[name], dtype=p.dtype) for name, p in net.named_parameters()])
    return float(torch.linalg.eigvalsh((H + D.diag()) / (P[:, None] * P).sqrt())[-1])


@pytest.mark.parametrize("name", OPTIMISERS)
def test_the_sharpness_is_that_of_a_dense_eigensolver(name: str) -> None:
    net, optimiser, problem = trained(OPTIMISERS[name])
    truth = largest(net, optimiser, literal_hessian(net))
    lens = fl.Lens(problem, optimiser=optimiser)
    report = fl.measure(lens, ["preconditioned_sharpness(rtol=1e-6)", "preconditioned_sharpness"])
    assert report["preconditioned_sharpness(rtol=1e-06)"].value == pytest.approx(truth, rel=1e-5)
    usual = report["preconditioned_sharpness"]
    assert usual.value == pytest.approx(truth, rel=0.01)
    assert 0 < usual.products < 60


@pytest.mark.parametrize("name", OPTIMISERS)
def test_steps_with_frozen_divisors_grow_beyond_the_edge_alone(name: str) -> None:
    """Torch's own steps on a quadratic whose preconditioned sharpness is a little below the edge, or above."""
    net, optimiser, _ = trained(OPTIMISERS[name])
    values, vectors = torch.linalg.eigh(literal_hessian(net))
    H = (vectors * values.clamp(min=0)) @ vectors.T  # negative curvature grows under any optimiser
    edge = edge_of(optimiser)
    shift = float(edge.of == "sharpness") * optimiser.param_groups[0]["weight_decay"]
    for share, grows in ((0.97, False), (1.03, True)):
        low, high = 0.0, 1e6
        for _ in range(60):  # the largest eigenvalue is convex in the factor, but not linear where there is decay
            middle = (low + high) / 2
            below = largest(net, optimiser, middle * H) < share * (edge.value + shift) - shift
            low, high = (middle, high) if below else (low, middle)
        assert grows_on(low * H, net, optimiser) == grows


def grows_on(H: Tensor, net: nn.Module, optimiser: torch.optim.Optimizer, steps: int = 700) -> bool:
    """Whether |theta| is larger after many steps on 0.5 theta^T H theta.

    Theta is so small that squares of its gradients vanish beside the mean squares, whose own decay is undone.
    """
    parameters, generator = list(net.parameters()), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in parameters:
            p.copy_(1e-12 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    kept = {}
    for p in parameters:
        state, group = optimiser.state[p], optimiser.param_groups[0]
        for mean in ("exp_avg", "momentum_buffer"):
            if state.get(mean) is not None:
                state[mean].zero_()
        decay = {
            "exp_avg_sq": group.get("betas", (0, 1))[1],
            **dict.fromkeys(("square_avg", "grad_avg"), group.get("alpha")),
        }
        kept[p] = {k: state[k] / decay[k] for k in decay if k in state}
        if "step" in state:
            kept[p]["step"] = state["step"] - float(type(optimiser) is not torch.optim.Adagrad)
    start = torch.cat([p.detach().flatten() for p in parameters]).norm()
    for _ in range(steps):
        theta = torch.cat([p.detach().flatten() for p in parameters])
        for p, part in zip(parameters, torch.split(H @ theta, [p.numel() for p in parameters]), strict=True):
            p.grad = part.reshape(p.shape).clone()
            for name, value in kept[p].items():
                optimiser.state[p][name].copy_(value)
        optimiser.step()
        if float(theta.norm()) > 10 * float(start):
            return True
    return float(theta.norm()) > float(start)


def test_the_operator_is_that_of_its_definition() -> None:
    net, optimiser, problem = trained(OPTIMISERS["adam with decay"])
    operator = PreconditionedHessian(problem, preconditioner_of(optimiser, net))
    A = operator.matrix()
    assert torch.allclose(A, A.T, atol=1e-9 * float(A.abs().max()))
    assert float(torch.linalg.eigvalsh(A)[-1]) == pytest.approx(largest(net, optimiser, literal_hessian(net)), rel=1e-9)
    problem = problem.with_changes(parameters=["2.weight"])
    part = PreconditionedHessian(problem, preconditioner_of(optimiser, net)).matrix()
    assert torch.allclose(part, A[36:54, 36:54])


def test_parameters_that_the_optimiser_does_not_move_are_left_out() -> None:
    net, x, y = net_and_data()
    optimiser = torch.optim.Adam(net[2].parameters())
    problem = fl.Problem(net, "cross_entropy", (x, y))
    before = fl.measure(fl.Lens(problem, optimiser=optimiser), "preconditioned_sharpness")["preconditioned_sharpness"]
    assert before.kind == "undefined"
    assert "has not stepped yet" in before.note
    nn.functional.cross_entropy(net(x), y).backward()
    optimiser.step()
    assert list(preconditioner_of(optimiser, net).divisor) == ["2.weight", "2.bias"]
    lens = fl.Lens(problem, optimiser=optimiser)
    assert fl.measure(lens, "preconditioned_sharpness")["preconditioned_sharpness"].value > 0
    frozen = fl.Lens(fl.Problem(net, "cross_entropy", (x, y), parameters=["0.weight"]), optimiser=optimiser)
    assert "moves none" in fl.measure(frozen, "preconditioned_sharpness")["preconditioned_sharpness"].note


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda net: torch.optim.Adadelta(net.parameters()), "no preconditioner for Adadelta"),
        (lambda net: torch.optim.SGD(net.parameters(), lr=0.1, maximize=True), "maximises the loss"),
        (lambda net: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), "holds none of the network's"),
    ],
)
def test_optimisers_without_a_preconditioner_say_why(make: Made, said: str) -> None:
    net, x, y = net_and_data()
    optimiser = make(net)
    with pytest.raises(BadInput, match=said):
        preconditioner_of(optimiser, net)
    lens = fl.Lens(fl.Problem(net, "cross_entropy", (x, y)), optimiser=optimiser)
    assert said in fl.measure(lens, "preconditioned_sharpness")["preconditioned_sharpness"].note


def test_a_lens_without_an_optimiser_says_what_is_missing() -> None:
    net, x, y = net_and_data()
    problem = fl.Problem(net, "cross_entropy", (x, y))
    found = fl.measure(fl.Lens(problem), "preconditioned_sharpness")["preconditioned_sharpness"]
    assert "Lens(problem, optimiser=...)" in found.note
    with pytest.raises(BadInput, match="optimiser="):
        fl.Lens(problem, optimiser="adam")


def test_plain_descent_has_the_sharpness_itself() -> None:
    _, optimiser, problem = trained(OPTIMISERS["sgd"])
    report = fl.measure(fl.Lens(problem, optimiser=optimiser), ["sharpness", "preconditioned_sharpness"])
    assert report["preconditioned_sharpness"].value == pytest.approx(report["sharpness"].value, rel=2e-3)
