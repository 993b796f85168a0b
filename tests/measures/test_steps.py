"""Curvature along an optimiser's steps, against closed forms and literal definitions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
from networks import module_of
from quadratic import gradient_and_hessian, half_squared, linear
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

import flatlens as fl
from flatlens.errors import BadInput
from flatlens.perturbation.weights import _LINEAR, Landscape, next_update
from flatlens.training import ASAM, SAM, SGD, Training, train
from flatlens.training.optimisers import Ascent, SharpnessAware

Made = Callable[[nn.Module], torch.optim.Optimizer]


def flat(net: nn.Module, direction: dict[str, Tensor]) -> Tensor:
    return torch.cat([direction[name].flatten() for name, _ in net.named_parameters()])


OPTIMISERS: dict[str, Made] = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.01),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.003, momentum=0.9, weight_decay=0.01),
    "adam": lambda net: torch.optim.Adam(net.parameters(), lr=0.001),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.0005, weight_decay=0.1),
    "rmsprop": lambda net: torch.optim.RMSprop(net.parameters(), lr=0.002),
    "sgd, far too small": lambda net: torch.optim.SGD(net.parameters(), lr=1e-6),
    "sgd, too large": lambda net: torch.optim.SGD(net.parameters(), lr=30.0),
}


def started(name: str, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    net, x, y = linear()
    optimiser = OPTIMISERS[name](net)
    if "too" not in name:
        for _ in range(steps):
            optimiser.zero_grad()
            half_squared(net, x, y).backward()
            optimiser.step()
    return net, optimiser, x, y


@pytest.mark.parametrize("name", OPTIMISERS)
def test_critical_sharpness_on_a_quadratic(name: str) -> None:
    """D^T H D / <D, g>, from at most eight forwards."""
    net, optimiser, x, y = started(name)
    lens = fl.Lens(fl.Problem(net, "half_squared_error", (x, y)), optimiser=optimiser)
    g, H = gradient_and_hessian(net, x, y)
    D = flat(net, next_update(optimiser, net, lens.gradient))
    found = fl.measure(lens, "critical_sharpness")["critical_sharpness"]
    assert found.value == pytest.approx(float(D @ H @ D / (D @ g)), rel=0.01)
    assert found.kind == "estimate"
    assert 0 < found.stderr < 0.01 * found.value
    assert len(found.arrays["steps"]) <= 7
    if "too" not in name:
        assert len(found.arrays["steps"]) <= 3  # the second is exact, but a thousand times the first at most


def test_no_step_is_taken_along_a_gradient_of_zero() -> None:
    net, x, _ = linear()
    problem = fl.Problem(net, "half_squared_error", (x, net(x).detach()))
    stirred = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for weight in net.parameters():
        stirred.state[weight]["momentum_buffer"] = torch.ones_like(weight)
    for optimiser, says in ((None, "the direction is zero"), (stirred, "no slope along the next update")):
        found = fl.measure(fl.Lens(problem, optimiser=optimiser), "critical_sharpness")["critical_sharpness"]
        assert found.kind == "undefined"
        assert says in found.note


def test_a_compiled_network_in_training_has_the_sharpness_of_the_network_inside() -> None:
    """Its own steps stay compiled: the same weights with and without the tracker, and nothing is compiled again."""
    compilations = []

    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., object]:
        compilations.append(len(examples))
        return graph.forward

    def run(*, compiled: bool, tracked: bool) -> tuple[list[Tensor], list[float], int]:
        net, x, y = linear()
        whole: nn.Module = nn.Sequential(net, nn.Tanh(), nn.Linear(2, 2, bias=False).double())
        nn.init.eye_(whole[2].weight)
        model = torch.compile(whole, backend=backend) if compiled else whole
        optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
        names = ["critical_sharpness", "directional_sharpness"]
        tracker = fl.Tracker(fl.Problem(model, "half_squared_error", (x, y)), names, every=2, live=False)
        compilations.clear()
        for step in range(7):
            if tracked:
                tracker.step(step, optimiser=optimiser)
            optimiser.zero_grad()
            half_squared(model, x, y).backward()
            optimiser.step()
        values = [] if not tracked else tracker.history["value"].tolist()
        return [p.detach().clone() for p in whole.parameters()], values, len(compilations)

    torch._dynamo.reset()
    alone, _, before = run(compiled=True, tracked=False)
    torch._dynamo.reset()
    beside, found, after = run(compiled=True, tracked=True)
    assert before == after == 1
    assert all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True))
    _, wanted, never = run(compiled=False, tracked=True)
    assert never == 0
    assert len(found) == 8
    assert found == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_the_next_update_is_what_the_optimiser_does_next(name: str) -> None:
    net, optimiser, x, y = started(name)
    problem = fl.Problem(net, "half_squared_error", (x, y))
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    update = next_update(optimiser, net, Landscape(problem).risk_and_gradient()[1])
    assert all(torch.equal(before[name], p) for name, p in net.named_parameters())
    optimiser.zero_grad()
    half_squared(net, x, y).backward()
    optimiser.step()
    lr = optimiser.param_groups[0]["lr"]
    for name, p in net.named_parameters():
        assert torch.allclose((before[name] - p.detach()) / lr, update[name], rtol=1e-6, atol=1e-9)


def two_offsets() -> nn.Module:
    """a + b: autograd returns one tensor as the gradient in both."""
    net = module_of(lambda net, x: x + (net.a + net.b))
    net.a, net.b = (nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in "ab")
    return net


def test_a_gradient_over_several_chunks_is_the_sum_of_theirs() -> None:
    x = torch.randn(2500, 3, dtype=torch.float64)
    problem = fl.Problem(two_offsets(), "half_squared_error", (x, torch.zeros_like(x)))
    risk, gradient = Landscape(problem).risk_and_gradient()
    assert risk == pytest.approx(float(x.square().sum()) / 5000)
    for name in "ab":
        assert torch.allclose(gradient[name], x.mean(0), rtol=1e-12)


class WritesToGradients(torch.optim.SGD):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(2.0)
        super().step(closure)


@pytest.mark.parametrize("fused", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_gradients_in_any_layout_are_left_alone(fused: dict[str, bool]) -> None:
    """Nesterov's foreach writes to gradients; fused kernels read memory, and autograd expands or transposes some."""
    torch.manual_seed(0)
    net = bent()
    x, y = torch.randn(60, 5), torch.randn(60, 3)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, **fused)
    gradient = Landscape(fl.Problem(net, "half_squared_error", (x, y))).risk_and_gradient()[1]
    before, weights = ({name: part.clone() for name, part in of} for of in (gradient.items(), net.named_parameters()))
    update = next_update(optimiser, net, gradient)
    assert all(torch.equal(part, before[name]) for name, part in gradient.items())
    half_squared(net, x, y).backward()
    optimiser.step()
    for name, p in net.named_parameters():
        assert torch.allclose((weights[name] - p.detach()) / 0.1, update[name], rtol=1e-4, atol=1e-5)


def bent() -> nn.Module:
    """Its gradients are a transposed tensor and an expanded one."""
    return module_of(
        lambda net, x: nn.functional.linear(x, net.w.t()) + net.c.sum(),
        w=nn.Parameter(torch.randn(5, 3)),
        c=nn.Parameter(torch.randn(4)),
    )


def test_a_frozen_parameter_is_in_no_update() -> None:
    net, _, x, y = started("sgd")
    frozen, _ = next(iter(net.named_parameters()))
    net.get_parameter(frozen).requires_grad_(False)
    problem = fl.Problem(net, "half_squared_error", (x, y), parameters="all")
    update = next_update(torch.optim.SGD(net.parameters(), lr=1.0), net, Landscape(problem).risk_and_gradient()[1])
    assert set(update) == {name for name, p in net.named_parameters() if p.requires_grad}


def test_memory_given_later_counts() -> None:
    net, _, x, y = started("sgd")
    problem = fl.Problem(net, "half_squared_error", (x, y))
    before = Landscape(problem).fitting
    problem.memory = 10_000
    assert 1 <= Landscape(problem).fitting < before


def attends() -> nn.Module:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        q, k, v = net.qkv(x).unflatten(-1, (3, 1, 8)).permute(2, 0, 3, 1, 4)
        return net.out(nn.functional.scaled_dot_product_attention(q, k, v).squeeze(1).mean(1))

    return module_of(forward, qkv=(8, 24), out=(8, 3))


class Attention(TorchDispatchMode):
    """Collects the kernels of attention that run inside."""

    def __enter__(self) -> Attention:
        self.kernels: set[str] = set()
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "attention" in str(func):
            self.kernels.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ["measure", "Tracker"])
def test_no_second_derivative_so_the_fast_kernels_of_attention_run(how: str) -> None:
    net, x = attends(), torch.randn(40, 5, 8)
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    problem = fl.Problem(net, "cross_entropy", (x, torch.arange(40) % 3))

    def run(measure: str) -> set[str]:
        with Attention() as mode:
            if how == "measure":
                fl.measure(fl.Lens(problem, optimiser=adam), measure)
            else:
                fl.Tracker(problem, measure, live=False).step(0, optimiser=adam)
        return mode.kernels

    with Attention() as plain:
        net(x)
    assert run("critical_sharpness") >= plain.kernels
    assert plain.kernels, "the processor has a fast kernel"
    assert not run("sharpness") & plain.kernels


def test_an_optimiser_that_writes_to_gradients_gets_a_copy() -> None:
    net, _, x, y = started("sgd")
    gradient = Landscape(fl.Problem(net, "half_squared_error", (x, y))).risk_and_gradient()[1]
    before = {name: part.clone() for name, part in gradient.items()}
    update = next_update(WritesToGradients(net.parameters(), lr=0.5), net, gradient)
    for name, part in gradient.items():
        assert torch.equal(part, before[name])
        assert torch.allclose(update[name], 2 * part)


def test_a_step_at_the_critical_rate_leaves_the_risk_and_a_longer_one_raises_it() -> None:
    """On a network that is no quadratic, with the optimiser's own steps."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    x, y = torch.randn(100, 6), torch.arange(100) % 3
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(20):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()
    problem = fl.Problem(net, "cross_entropy", (x, y))
    lens = fl.Lens(problem, optimiser=optimiser)
    critical = 2 / fl.measure(lens, "critical_sharpness")["critical_sharpness"].value
    landscape, update = Landscape(problem), next_update(optimiser, net, lens.gradient)
    here, risks = landscape.risk(), {}
    with landscape.walk(update) as move:
        for share in (0.1, 0.3, 0.6, 0.9, 0.95, 1.05):
            move(share * critical)
            risks[share] = landscape.risk()
    assert [share for share, risk in risks.items() if risk > here] == [1.05]


def test_relative_critical_sharpness_is_of_one_loss_along_the_update_of_another() -> None:
    net, optimiser, x, y = started("adam")
    here, there = (fl.Problem(net, "half_squared_error", (x[part], y[part])) for part in (slice(80), slice(80, 200)))
    D = flat(net, next_update(optimiser, net, Landscape(there).risk_and_gradient()[1]))
    g, H = gradient_and_hessian(net, x[:80], y[:80])
    report = fl.measure(
        fl.Lens(here, optimiser=optimiser, along=there), ["critical_sharpness", "directional_sharpness"]
    )
    assert report["critical_sharpness"].value == pytest.approx(float(D @ H @ D / (D @ g)), rel=0.01)
    assert len(report["critical_sharpness"].arrays["steps"]) <= 7
    assert report["directional_sharpness"].value == pytest.approx(float(D @ H @ D / (D @ D)), rel=1e-9)


def test_directional_sharpness_is_the_quadratic_form() -> None:
    net, optimiser, x, y = started("adam")
    problem = fl.Problem(net, "half_squared_error", (x, y))
    g, H = gradient_and_hessian(net, x, y)
    lens = fl.Lens(problem, optimiser=optimiser)
    D = flat(net, next_update(optimiser, net, lens.gradient))
    names = ["directional_sharpness", "directional_sharpness(along='gradient')"]
    report = fl.measure(lens, names)
    assert report[names[0]].value == pytest.approx(float(D @ H @ D / (D @ D)), rel=1e-9)
    assert report[names[1]].value == pytest.approx(float(g @ H @ g / (g @ g)), rel=1e-9)
    assert fl.measure(fl.Lens(problem), names[0])[names[0]].value == pytest.approx(report[names[1]].value)
    own = {name: torch.randn_like(p) for name, p in net.named_parameters()}
    u = flat(net, own)
    found = fl.measure(fl.Lens(problem, along=own), names[0])[names[0]]
    assert found.value == pytest.approx(float(u @ H @ u / (u @ u)), rel=1e-9)
    one = fl.measure(fl.Lens(problem, along={"bias": torch.ones(2)}), names[0])[names[0]]
    assert one.value == pytest.approx(float(H[-2:, -2:].sum() / 2))


def test_directions_that_cannot_be_taken_say_why() -> None:
    net, _, x, y = started("sgd")
    problem = fl.Problem(net, "half_squared_error", (x, y))
    with pytest.raises(BadInput, match="weight"):
        fl.Lens(problem, along={"weight": torch.ones(3)})
    with pytest.raises(BadInput, match="another network"):
        fl.Lens(problem, along=fl.Problem(linear()[0], "half_squared_error", (x, y)))
    uphill = {name: -part for name, part in fl.Lens(problem).gradient.items()}
    found = fl.measure(fl.Lens(problem, along=uphill), "critical_sharpness")["critical_sharpness"]
    assert found.kind == "lower bound"
    assert "rose at the smallest step" in found.note
    nothing = {"weight": torch.zeros(2, 6)}
    assert "zero" in fl.measure(fl.Lens(problem, along=nothing), "directional_sharpness")["directional_sharpness"].note
    lens = fl.Lens(problem, optimiser=torch.optim.LBFGS(net.parameters()))
    assert "LBFGS" in fl.measure(lens, "critical_sharpness")["critical_sharpness"].note

    class Guarded(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            raise raised

    for raised in (AssertionError("a closure is needed"), KeyError("old_p"), Exception("not in train mode")):
        report = fl.measure(fl.Lens(problem, optimiser=Guarded(net.parameters())), ["critical_sharpness", "loss"])
        note = f"Guarded: no step of a copy of it is possible ({raised})"
        assert (report["critical_sharpness"].note, report["loss"].kind) == (note, "exact")
    climbing = torch.optim.SGD(net.parameters(), lr=0.1, maximize=True)
    lens = fl.Lens(problem, optimiser=climbing)
    assert "downhill" in fl.measure(lens, "critical_sharpness")["critical_sharpness"].note


def test_measuring_leaves_the_network_and_the_optimiser_alone() -> None:
    net, optimiser, x, y = started("momentum")
    state = {k: v["momentum_buffer"].clone() for k, v in optimiser.state.items()}
    before = [p.detach().clone() for p in net.parameters()]
    slopes = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    lens = fl.Lens(fl.Problem(net, "half_squared_error", (x, y)), optimiser=optimiser)
    fl.measure(lens, ["critical_sharpness", "directional_sharpness", "gradient_noise_scale(batches=4)"])
    lens.require_fresh()
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert all(torch.equal(state[k], v["momentum_buffer"]) for k, v in optimiser.state.items())
    assert len(optimiser.state) == 2
    assert len(slopes) == 2
    assert all(p.grad is not None and torch.equal(p.grad, g) for p, g in zip(net.parameters(), slopes, strict=True))


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_directional_sharpness_does_not_depend_on_the_length_of_the_direction(scale: float) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    problem = fl.Problem(net, "cross_entropy", (torch.randn(9, 3), torch.arange(9) % 2))
    unit = {name: torch.randn_like(p) for name, p in net.named_parameters()}
    scaled = {name: scale * part for name, part in unit.items()}
    values = [fl.measure(fl.Lens(problem, along=u), "directional_sharpness")["directional_sharpness"].value
              for u in (unit, scaled)]  # fmt: skip
    assert values[1] == pytest.approx(values[0], rel=1e-4)


def matrices(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False)).to(dtype)


@pytest.mark.parametrize("lr", [1e-7, 1e-2])
@pytest.mark.parametrize("name", _LINEAR)
def test_the_next_update_is_not_lost_in_the_weights_rounding(name: str, lr: float) -> None:
    """At 1e-7, where most schedules end, a step of float32 weights is below their last digits."""
    if name == "Muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    coarse, fine = matrices(torch.float32), matrices(torch.float64)
    fine.load_state_dict(coarse.state_dict())
    kind = getattr(torch.optim, name)
    optimisers = [kind(net.parameters(), lr=lr) for net in (coarse, fine)]
    gradients = [
        torch.randn(p.shape, generator=torch.Generator().manual_seed(k)) for k, p in enumerate(fine.parameters())
    ]
    for net, optimiser in zip((coarse, fine), optimisers, strict=True):
        for _ in range(7):  # RAdam takes plain steps at first
            for p, gradient in zip(net.parameters(), gradients, strict=True):
                p.grad = gradient.to(p)
            optimiser.step()
    before = {name: p.detach().clone() for name, p in fine.named_parameters()}
    for p in fine.parameters():
        p.grad = p.grad.double() + 0.1
    given = {name: p.grad.clone() for name, p in fine.named_parameters()}
    optimisers[1].step()
    found = next_update(optimisers[0], coarse, given)
    for key, p in fine.named_parameters():
        wanted = (before[key] - p.detach()) / lr
        tolerance = 2e-2 if name == "Muon" else 1e-4  # Muon iterates in bfloat16
        assert torch.allclose(found[key].double(), wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


class Halving(torch.optim.Optimizer):
    """One of the user's own, of which nobody knows how its step depends on the learning rate."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad)


def test_a_step_that_is_lost_in_rounding_is_refused() -> None:
    net = matrices(torch.float32)
    gradient = {name: torch.ones_like(p) for name, p in net.named_parameters()}
    assert torch.allclose(
        next_update(Halving(net.parameters(), 0.1), net, gradient)["0.weight"], torch.ones(6, 4), 1e-4
    )
    with pytest.raises(BadInput, match="the next step of Halving is lost in the rounding of the weights"):
        next_update(Halving(net.parameters(), 1e-6), net, gradient)


def test_critical_sharpness_at_the_end_of_a_schedule() -> None:
    """In float32 a step of this learning rate changes the risk by rounding alone: 1e6 was the answer once."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)), torch.randn(48, 6)
    y = x[:, :3].argmax(1)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    found = fl.measure(fl.Lens(problem, optimiser=torch.optim.SGD(net.parameters(), lr=1e-7)), "critical_sharpness")
    exact = fl.Problem(copy.deepcopy(net).double(), "cross_entropy", (x.double(), y))
    wanted = fl.measure(fl.Lens(exact), "critical_sharpness")
    assert found["critical_sharpness"].value == pytest.approx(wanted["critical_sharpness"].value, rel=0.05)


def test_the_users_hooks_on_all_optimisers_do_not_run() -> None:
    calls = []
    handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    try:
        net = matrices(torch.float64)
        gradient = {name: torch.ones_like(p) for name, p in net.named_parameters()}
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        next_update(sgd, net, gradient)
        assert not calls
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        sgd.step()
        assert calls == [1]
    finally:
        handle.remove()


@pytest.mark.parametrize("batchnorm", ["eval", "train"])
def test_the_preconditioner_of_training_beside_the_hessian_of_evaluation(batchnorm: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(20, 3).double(), torch.randn(20, 2).double()
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(3):
        optimiser.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimiser.step()
    problem = fl.Problem(net, "mse", (x, y), batchnorm=batchnorm, ghost_batch=20 if batchnorm == "train" else None)
    found = fl.measure(fl.Lens(problem, optimiser=optimiser), "preconditioned_sharpness")["preconditioned_sharpness"]
    assert ("the preconditioner is from training" in found.note) == (batchnorm == "eval")


@pytest.mark.parametrize("seed", [1, 5])
def test_rounding_of_far_outputs_is_in_critical_sharpness(seed: int) -> None:
    """Outputs near 1000 in float32, near a minimum: the risk is small, and what their rounding does to it is not."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 2))
    x, y = torch.randn(5, 5), torch.randn(5, 2) * 0.5 + 1000
    sgd = torch.optim.SGD(net.parameters(), 0.05)
    for _ in range(1000):
        sgd.zero_grad()
        (0.5 * (outputs_far_away(net, (x, y))[0] - y).square().sum(1).mean()).backward()
        sgd.step()
    key = "critical_sharpness"
    far = fl.Problem(net, "half_squared_error", (x, y), forward=outputs_far_away)
    fine = fl.Problem(copy.deepcopy(net).double(), "half_squared_error", (x.double(), y.double()),
                      forward=outputs_far_away)  # fmt: skip
    found, true = (fl.measure(fl.Lens(problem), key)[key] for problem in (far, fine))
    assert found.kind == "undefined" or abs(found.value - true.value) <= 1.96 * (found.stderr + true.stderr)


def outputs_far_away(net: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return net(batch[0]) + 1000, batch[1]


@pytest.mark.parametrize("ascent", [SAM(0.3), ASAM(0.5, eta=0.1)], ids=["SAM", "ASAM"])
def test_a_sharpness_aware_update_is_the_next_step_of_training(ascent: Ascent) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x, y = torch.randn(20, 4).double(), torch.randn(20, 2).double()
    problem = fl.Problem(net, "half_squared_error", (x, y))
    weights, reports, lr = list[Tensor](), list[fl.Report](), 0.05

    class Watch:
        def step(self, step: int, *, optimiser: torch.optim.Optimizer) -> None:
            weights.append(torch.cat([p.detach().flatten() for p in net.parameters()]).clone())
            lens = fl.Lens(problem, optimiser=optimiser)
            reports.append(fl.measure(lens, ["directional_sharpness", "critical_sharpness(rtol=0.001)"]))

    settings = Training(SGD(lr, momentum=0.9), ascent=ascent, loss="half_squared_error", max_steps=3)
    train(net, (x, y), settings, watch=Watch())

    def risk(theta: Tensor) -> Tensor:
        parts, named = torch.split(theta, [p.numel() for p in net.parameters()]), dict(net.named_parameters())
        values = {name: part.view(p.shape) for (name, p), part in zip(named.items(), parts, strict=True)}
        return 0.5 * (torch.func.functional_call(net, values, (x,)) - y).square().sum(1).mean()

    for theta, after, report in zip(weights, weights[1:], reports, strict=False):
        u = (theta - after) / lr
        curvature = u @ torch.func.hessian(risk)(theta) @ u / (u @ u)
        assert abs(report["directional_sharpness"].value / float(curvature) - 1) < 1e-6
        step = 2 / report["critical_sharpness(rtol=0.001)"].value
        assert float(risk(theta - 0.99 * step * u)) < float(risk(theta)) < float(risk(theta - 1.01 * step * u))


def test_an_ascent_over_parameters_that_are_not_measured_has_no_update() -> None:
    net, x, y = linear()
    sam = SharpnessAware(torch.optim.SGD(net.parameters(), lr=0.1), SAM(0.1))
    problem = fl.Problem(net, "half_squared_error", (x, y), parameters=["weight"])
    found = fl.measure(fl.Lens(problem, optimiser=sam), "critical_sharpness")["critical_sharpness"]
    assert found.kind == "undefined"
    assert "moves parameters that are not measured" in found.note
