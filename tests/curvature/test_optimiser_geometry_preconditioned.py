"""The Hessian between the roots of an optimiser's preconditioner, against a dense eigensolver and literal steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import reduce

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


def in_groups(kind: type, lrs: tuple[float, float], second: dict[str, object] | None = None, **settings: float) -> Made:
    """A first layer and a second one with their own learning rates, and other settings of their own."""
    return lambda net: kind(
        [{"params": net[0].parameters(), "lr": lrs[0]}, {"params": net[2].parameters(), "lr": lrs[1]} | (second or {})],
        **settings,
    )


def of_package(package: str, name: str, **settings: object) -> Made:
    """An optimiser of a package that flatlens does not need, in training mode."""

    def make(net: nn.Module) -> torch.optim.Optimizer:
        made = getattr(pytest.importorskip(package), name)(net.parameters(), **settings)
        getattr(made, "train", lambda: None)()
        return made

    return make


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
    "sgd, nesterov": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.8, nesterov=True),
    "sgd, momenta": in_groups(torch.optim.SGD, (0.1, 0.05), {"momentum": 0.9, "nesterov": True}, momentum=0.5),
    "adam, betas": in_groups(torch.optim.Adam, (0.01, 0.02), {"betas": (0.5, 0.9)}, weight_decay=0.1),
    "nadam": lambda net: torch.optim.NAdam(net.parameters(), lr=0.01),
    "nadam with decay": lambda net: torch.optim.NAdam(
        net.parameters(), lr=0.01, weight_decay=3.0, decoupled_weight_decay=True, momentum_decay=0.02
    ),
    "radam": lambda net: torch.optim.RAdam(net.parameters(), lr=0.01, betas=(0.8, 0.9), weight_decay=0.1),
    "radam, young": lambda net: torch.optim.RAdam(net.parameters(), lr=0.01, betas=(0.8, 0.9999)),
    "adamax": lambda net: torch.optim.Adamax(net.parameters(), lr=0.01, weight_decay=0.1),
    "adadelta": lambda net: torch.optim.Adadelta(net.parameters(), lr=0.5, weight_decay=0.1),
    "asgd": lambda net: torch.optim.ASGD(net.parameters(), lr=0.1, lambd=0.5, weight_decay=0.1),
    "schedule-free sgd": of_package("schedulefree", "SGDScheduleFree", lr=0.5, weight_decay=0.3, warmup_steps=50),
    "schedule-free adam": of_package("schedulefree", "AdamWScheduleFree", lr=0.01, weight_decay=3.0, r=1.0),
    "schedule-free radam": of_package("schedulefree", "RAdamScheduleFree", lr=0.01, betas=(0.8, 0.99)),
    "schedule-free sgd, 2": of_package("pytorch_optimizer", "ScheduleFreeSGD", lr=0.5, momentum=0.7),
    "schedule-free adam, 2": of_package("pytorch_optimizer", "ScheduleFreeAdamW", lr=0.01, decoupling_c=3),
    "schedule-free radam, 2": of_package("pytorch_optimizer", "ScheduleFreeRAdam", lr=0.01, betas=(0.8, 0.99)),
    "adabelief": of_package("pytorch_optimizer", "AdaBelief", lr=0.01, weight_decay=0.1, eps=1e-9),
    "adan": of_package("pytorch_optimizer", "Adan", lr=0.01, weight_decay=3.0),
    "adan, decoupled": of_package("pytorch_optimizer", "Adan", lr=0.01, weight_decay=3.0, weight_decouple=True),
    "ademamix": of_package("pytorch_optimizer", "AdEMAMix", lr=0.01, alpha=5.0, betas=(0.9, 0.999, 0.99)),
    "yogi": of_package("pytorch_optimizer", "Yogi", lr=0.01, weight_decay=0.5, fixed_decay=True),
    "soap": of_package("pytorch_optimizer", "SOAP", lr=0.01, weight_decay=3.0, precondition_frequency=7),
    "soap, 1d": of_package("pytorch_optimizer", "SOAP", lr=0.01, precondition_1d=True, max_precondition_dim=5),
    "shampoo": of_package("pytorch_optimizer", "Shampoo", lr=0.01, weight_decay=0.1),
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


def literal_preconditioner(net: nn.Module, optimiser: torch.optim.Optimizer) -> tuple[Tensor, Tensor]:
    """P and D as matrices; a Kronecker product of the axes holds the axes of a whole parameter."""
    found = preconditioner_of(optimiser, net)
    blocks = []
    for name, p in net.named_parameters():
        sides = found.axes.get(name, [None] * p.ndim)
        Q = reduce(
            torch.kron,
            [
                torch.eye(n).double() if side is None else side.contiguous()
                for side, n in zip(sides, p.shape, strict=True)
            ],
        )
        blocks.append(Q @ found.divisor[name].flatten().diag() @ Q.T)
    D = torch.cat([torch.full((p.numel(),), found.decay[name], dtype=p.dtype) for name, p in net.named_parameters()])
    return torch.block_diag(*blocks), D.diag()


def generalised(H: Tensor, P: Tensor) -> tuple[Tensor, Tensor]:
    """The eigenvalues of P^-1 H, and its eigenvectors in columns."""
    L = torch.linalg.cholesky(P)
    half = torch.linalg.solve_triangular(L, torch.eye(len(P), dtype=P.dtype), upper=False)
    values, vectors = torch.linalg.eigh(half @ H @ half.T)
    return values, half.T @ vectors


def largest(net: nn.Module, optimiser: torch.optim.Optimizer, H: Tensor) -> float:
    """The largest eigenvalue of P^-1/2 (H + D) P^-1/2, by a dense solver."""
    P, D = literal_preconditioner(net, optimiser)
    return float(generalised(H + D, P)[0][-1])


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
def test_steps_with_a_frozen_state_grow_beyond_the_edge_alone(name: str) -> None:
    """The optimiser's own steps, on a quadratic whose preconditioned sharpness is .1% below the edge, or above."""
    net, optimiser, _ = trained(OPTIMISERS[name])
    values, vectors = torch.linalg.eigh(literal_hessian(net))
    H = (vectors * values.clamp(min=0)) @ vectors.T  # negative curvature grows under any optimiser
    P, D = literal_preconditioner(net, optimiser)
    edge = edge_of(optimiser).value
    for share, grows in ((0.999, False), (1.001, True)):
        low, high = 0.0, 1e6
        for _ in range(60):  # the largest eigenvalue is convex in the factor, but not linear where there is decay
            middle = (low + high) / 2
            below = float(generalised(middle * H + D, P)[0][-1]) < share * edge
            low, high = (middle, high) if below else (low, middle)
        along = generalised(low * H + D, P)[1][:, -1]
        assert (growth_on(low * H, along, *trained_and_frozen(OPTIMISERS[name])) > 1) == grows


ADAPTIVE = {
    "exp_avg_sq": lambda group: group["betas"][2 if "previous_grad" in group["of"] else 1],
    "max_exp_avg_sq": lambda group: 1.0,
    "exp_avg_var": lambda group: group["betas"][1],
    "exp_inf": lambda group: group["betas"][1],
    "square_avg": lambda group: group.get("alpha", group.get("rho")),
    "grad_avg": lambda group: group["alpha"],
}
"""Moments, and the factor by which a step without a gradient shrinks them."""
BUFFERS = "exp_avg", "momentum_buffer", "exp_avg_diff", "exp_avg_slow", "previous_grad"
FIXED = "Q", "sum", "acc_delta", "eta", "mu"  #: as the last step left them
Frozen = tuple[list[dict[str, object]], list[dict[str, object]]]


def trained_and_frozen(make: Made) -> tuple[nn.Module, torch.optim.Optimizer, Frozen]:
    """A network after 25 steps, and what its last step began with: groups, and the state of each parameter.

    The moments in it are such that a step without a gradient gives what the last step left.
    """
    net, before, _ = trained(make, 24)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in before.param_groups]
    counters = [copy.deepcopy(dict(before.state[p])) for p in net.parameters()]
    net, optimiser, _ = trained(make, 25)
    states = []
    for group in optimiser.param_groups:
        for p in group["params"]:
            now, kept = optimiser.state[p], {}
            for key, value in now.items():
                if key in ADAPTIVE:
                    shrinks = 1.0 if type(optimiser).__name__ == "Yogi" else ADAPTIVE[key]({**group, "of": now})
                    extra = group["eps"] if key == "exp_avg_var" else 0.0  # AdaBelief adds it in each step
                    kept[key] = (value - extra) / shrinks
                elif key in FIXED or (key == "step" and isinstance(optimiser, torch.optim.Adagrad)):
                    kept[key] = copy.deepcopy(value)
                elif key not in BUFFERS and key != "z" and not (torch.is_tensor(value) and value.ndim):
                    kept[key] = counters[len(states)].get(key)
            states.append(kept)
    return net, optimiser, (groups, states)


def growth_on(H: Tensor, along: Tensor, net: nn.Module, optimiser: torch.optim.Optimizer, frozen: Frozen) -> float:
    """By how much the steps grow, from the middle of a run on 0.5 theta^T H theta to its end.

    Theta begins along a vector, and so small that squares of its gradients vanish beside the moments.
    """
    (groups, states), steps = frozen, 300
    parameters = list(net.parameters())
    sizes = [p.numel() for p in parameters]
    with torch.no_grad():
        for p, part in zip(parameters, torch.split(1e-14 * along / along.norm(), sizes), strict=True):
            p.copy_(part.reshape(p.shape))
            for key in BUFFERS:
                if torch.is_tensor(optimiser.state[p].get(key)):
                    optimiser.state[p][key].zero_()
            if "z" in optimiser.state[p]:
                optimiser.state[p]["z"].copy_(p)
    lengths, last = [], torch.cat([p.detach().flatten() for p in parameters])
    for _ in range(steps):
        for p, part in zip(parameters, torch.split(H @ last, sizes), strict=True):
            p.grad = part.reshape(p.shape).clone()
        for group, kept in zip(optimiser.param_groups, groups, strict=True):
            group.update(kept)
        for p, kept in zip(parameters, states, strict=True):
            optimiser.state[p].update({k: v.clone() if torch.is_tensor(v) else v for k, v in kept.items()})
        optimiser.step()
        theta = torch.cat([p.detach().flatten() for p in parameters])
        lengths.append(float((theta - last).norm()))
        last = theta
        if lengths[-1] > 1e4 * lengths[0]:  # its squares would no longer vanish
            break
    return lengths[-1] / lengths[len(lengths) // 2]


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
        (lambda net: torch.optim.Rprop(net.parameters()), "Rprop steps by signs"),
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
