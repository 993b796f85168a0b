"""The search for the largest change of the Jacobian, against pen and paper and dense grids."""

from __future__ import annotations

import math

import pytest
import torch
from builders import mlp, normal, seeded
from networks import module_of
from torch import Tensor, nn

import flatlens as fl
from flatlens.errors import BadInput
from flatlens.measures.sensitivity import local_variation
from flatlens.perturbation.variation import farthest_pairs, found_variation


def problem_of(net: nn.Module, x: Tensor) -> fl.Problem:
    x = x.to(torch.float64)
    net = net.to(torch.float64)
    return fl.Problem(net, "mse", (x, torch.zeros(len(x), net(x).shape[1], dtype=torch.float64)))


def search(problem: fl.Problem, delta: float, seed: int = 0, restarts: int = 4, steps: int = 20) -> Tensor:
    return found_variation(problem, problem.model, delta, restarts=restarts, steps=steps, generator=seeded(seed))


def dense(weights: list[float], bias: list[float], out: list[float], activation: nn.Module) -> nn.Module:
    """sum_k out_k a(w_k x + b_k) of one number."""
    first, last = nn.Linear(1, len(weights)), nn.Linear(len(weights), 1, bias=False)
    with torch.no_grad():
        first.weight.copy_(torch.tensor(weights)[:, None])
        first.bias.copy_(torch.tensor(bias))
        last.weight.copy_(torch.tensor(out)[None])
    return nn.Sequential(first, activation, last)


def steep_mlp(seed: int, inputs: int, activation: type[nn.Module]) -> nn.Module:
    net = mlp((inputs, 12, 12, 2), activation, seed)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.5)
    return net


def on_a_grid(net: nn.Module, x: Tensor, delta: float) -> Tensor:
    """The diameter of {J(u)} over a grid of each ball of one or two dimensions, from its distinct Jacobians."""
    if x.shape[1] == 1:
        w = torch.linspace(-1, 1, 2001, dtype=torch.float64)[:, None]
    else:
        r, angle = torch.linspace(0.05, 1, 20, dtype=torch.float64), torch.linspace(0, 2 * math.pi, 91)[:-1]
        w = torch.stack([torch.outer(r, angle.cos()), torch.outer(r, angle.sin())], -1).reshape(-1, 2)
    largest = []
    for point in x:
        leaf = (point + delta * w).requires_grad_()
        J = torch.stack([torch.autograd.grad(f.sum(), leaf, retain_graph=True)[0] for f in net(leaf).unbind(1)], 1)
        J = torch.unique((J * 1e9).round(), dim=0) / 1e9
        if len(J) > 300:  # the farthest from their mean
            J = J[(J - J.mean(0)).flatten(1).norm(dim=1).topk(300).indices]
        D = (J[:, None] - J[None]).flatten(0, 1)
        G = D @ D.mT if D.shape[1] <= D.shape[2] else D.mT @ D
        largest.append(torch.linalg.eigvalsh(G)[:, -1].max().sqrt())
    return torch.stack(largest)


def test_a_linear_network_does_not_vary() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for dtype in (torch.float32, torch.float64):
        problem = fl.Problem(net.to(dtype), "mse", (torch.randn(7, 3), torch.zeros(7, 2)))
        report = fl.measure(fl.Lens(problem), [local_variation(delta=0.5)])
        for part in ("local_variation(delta=0.5)", "local_variation(delta=0.5).upper"):
            assert report[part].value == 0
            assert report[part].samples is not None
            assert report[part].samples.tolist() == [0.0] * 7


@pytest.mark.parametrize(("x", "delta"), [(0.0, 0.3), (0.2, 0.5), (1.5, 0.4), (-2.0, 3.0)])
def test_tanh_of_one_number(x: float, delta: float) -> None:
    """f = 2 tanh(3x): the slope 6 sech^2(3x) falls on either side of 0."""
    problem = problem_of(dense([3.0], [0.0], [2.0], nn.Tanh()), torch.tensor([[x]]))

    def slope(u: float) -> float:
        return 6 / math.cosh(3 * u) ** 2

    far, near = abs(x) + delta, max(0.0, abs(x) - delta)
    assert float(search(problem, delta)) == pytest.approx(slope(near) - slope(far), rel=1e-4)
    assert float(search(problem, delta)) <= slope(near) - slope(far)


@pytest.mark.parametrize(("x", "expected"), [(0.55, 2.0), (0.3, 2.0), (0.1, 0.0), (0.9, 0.0)])
def test_absolute_value(x: float, expected: float) -> None:
    """|x - 0.5| jumps by 2 where the kink lies in the ball."""
    net = dense([1.0, -1.0], [-0.5, 0.5], [1.0, 1.0], nn.ReLU())
    assert float(search(problem_of(net, torch.tensor([[x]])), 0.3)) == pytest.approx(expected, abs=1e-12)


def test_a_kink_that_touches_the_rim_is_outside() -> None:
    net = dense([1.0], [0.0], [1.0], nn.ReLU())
    assert float(search(problem_of(net, torch.tensor([[0.5]])), 0.5)) == 0


def test_the_norm_is_spectral() -> None:
    """Both outputs jump at kinks of their own: diag(3, 4) has norm 4, not 5."""
    net = nn.Sequential(nn.ReLU(), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        net[1].weight.copy_(torch.diag(torch.tensor([3.0, 4.0])))
    assert float(search(problem_of(net, torch.full((1, 2), 0.01)), 1.0)) == pytest.approx(4.0, abs=1e-12)


@pytest.mark.parametrize("inputs", [1, 2])
@pytest.mark.parametrize(("activation", "least", "mean"), [(nn.Tanh, 0.9, 0.99), (nn.ReLU, 0.75, 0.98)])
def test_it_finds_what_a_grid_finds(activation: type[nn.Module], least: float, mean: float, inputs: int) -> None:
    shares = []
    for seed in range(4):
        net = steep_mlp(seed, inputs, activation)
        x = normal(4, inputs, seed=seed)
        for delta in (0.1, 1.0):
            grid, found = on_a_grid(net, x, delta), search(problem_of(net, x), delta)
            shares.append((found / grid)[grid > 1e-6])
    share = torch.cat(shares)
    assert len(share) > 15
    assert float(share.min()) >= least
    assert float(share.clamp(max=1).mean()) >= mean


def test_uphill_is_better_than_random() -> None:
    """In many dimensions moving the pairs matters: they end far above where they began."""
    problem = problem_of(steep_mlp(0, 40, nn.Tanh), torch.randn(3, 40, generator=seeded(0)))
    assert bool((search(problem, 0.1, steps=20) > 1.5 * search(problem, 0.1, steps=0)).all())


def test_same_generator_same_digits() -> None:
    problem = problem_of(steep_mlp(0, 2, nn.ReLU), torch.randn(5, 2, generator=seeded(0)))
    assert torch.equal(search(problem, 0.3, 1), search(problem, 0.3, 1))
    reports = [fl.measure(fl.Lens(problem), [local_variation]) for _ in range(2)]
    assert reports[0]["local_variation"].value == reports[1]["local_variation"].value


def test_rescaled_and_permuted_networks_are_searched_alike() -> None:
    """The same function through other weights: rounding decides nothing."""
    net = steep_mlp(2, 3, nn.ReLU)
    x = normal(6, 3)
    before = search(problem_of(net, x), 0.5)
    order = torch.randperm(12, generator=seeded(1))
    with torch.no_grad():
        first, second = net.get_submodule("0"), net.get_submodule("2")
        assert isinstance(first, nn.Linear)
        assert isinstance(second, nn.Linear)
        scale = torch.linspace(0.3, 3, 12, dtype=torch.float64)
        first.weight.copy_(scale[:, None] * first.weight[order])
        first.bias.copy_(scale * first.bias[order])
        second.weight.copy_(second.weight[:, order] / scale)
    assert torch.allclose(search(problem_of(net, x), 0.5), before, rtol=1e-9)


def test_the_report() -> None:
    """The larger sample's value; both bounds, in order; the model and its lens are left as they were."""
    seen = []
    net = steep_mlp(3, 2, nn.Tanh).train()
    problem = problem_of(net, torch.randn(6, 2, generator=seeded(0)))
    lens = fl.Lens(problem)
    report = fl.measure(lens, [local_variation(delta=0.2)], progress=lambda *step: seen.append(step))
    lens.require_fresh()
    assert net.training
    assert all(p.grad is None for p in net.parameters())
    lower, upper = (report[f"local_variation(delta=0.2){part}"] for part in ("", ".upper"))
    assert (lower.kind, upper.kind) == ("lower bound", "upper bound")
    assert lower.samples is not None
    assert upper.samples is not None
    assert lower.value == float(lower.samples.max())
    assert upper.value == float(upper.samples.max())
    assert bool((lower.samples <= upper.samples).all())
    assert ("local variation", 6, 6) in seen


def test_chunks_do_not_matter() -> None:
    """With little memory samples are searched one by one: the smooth maxima are the same."""
    net, x = steep_mlp(1, 3, nn.Tanh), normal(5, 3)
    small = fl.Problem(net, "mse", (x, torch.zeros(5, 2)), memory=100_000)
    assert torch.allclose(search(small, 0.1), search(problem_of(net, x), 0.1), rtol=1e-3)


def test_images_and_a_function_of_the_users_own() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(18, 2))
    x = torch.randn(4, 1, 5, 5)
    plain = problem_of(net, x)
    own = fl.Problem(
        net, "mse", {"x": x, "y": torch.zeros(4, 2)}, forward=lambda model, batch: (model(batch["x"]), batch["y"])
    )
    assert torch.equal(search(plain, 0.2), search(own, 0.2))
    upper = fl.measure(fl.Lens(own), [local_variation])["local_variation.upper"]
    assert upper.kind == "undefined"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"delta": -1.0}, "delta=-1.0"),
        ({"delta": math.inf}, "delta=inf"),
        ({"steps": 0}, "steps=0"),
        ({"restarts": 1.5}, "restarts=1.5"),
        ({"delta": 1e-16}, "too small for float64"),
    ],
)
def test_bad_options(options: dict[str, float], said: str) -> None:
    lens = fl.Lens(problem_of(steep_mlp(0, 2, nn.Tanh), torch.ones(3, 2)))
    with pytest.raises(BadInput, match=said) as caught:
        fl.measure(lens, [local_variation(**options)])
    assert "\n" not in str(caught.value)


def test_tokens_have_no_ball() -> None:
    net = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
    problem = fl.Problem(net, "mse", (torch.randint(0, 5, (4, 2)), torch.zeros(4, 2)))
    for estimate in fl.measure(fl.Lens(problem), [local_variation]).values():
        assert estimate.kind == "undefined"
        assert "on a floating input" in estimate.note


def test_two_inputs_are_refused() -> None:
    net = module_of(lambda net, a, b: torch.tanh(a) * b)
    problem = fl.Problem(net, "mse", ((torch.randn(4, 2), torch.randn(4, 2)), torch.zeros(4, 2)), parameters="all")
    with pytest.raises(Exception, match="depend on 2"):
        search(problem, 0.1)


def test_coupled_samples_are_refused() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    problem = fl.Problem(net, "mse", (torch.randn(8, 2), torch.zeros(8, 2)), batchnorm="train", ghost_batch=4)
    assert fl.measure(fl.Lens(problem), [local_variation])["local_variation"].kind == "undefined"


def test_pairs_are_disjoint() -> None:
    points = torch.randn(3, 10, 4, generator=seeded(0))
    for ends in zip(*farthest_pairs(points, 5, torch.full((3, 1), 1e-6)), strict=True):
        assert sorted(torch.cat(ends).tolist()) == list(range(10))


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.Softplus()])
@pytest.mark.parametrize(("x", "delta"), [(30.0, 0.1), (1000.0, 0.02), (5000.0, 0.1)])
def test_points_that_are_rounded_stay_in_the_ball(activation: nn.Module, x: float, delta: float) -> None:
    """In float32 a point of the ball's rim can be rounded out of it: the lower bound was above the upper one once."""
    net = dense([1.0], [0.5 - x], [1.0], activation)
    problem = fl.Problem(net, "mse", (torch.full((1, 1), x), torch.zeros(1, 1)))
    one = local_variation(delta=delta)
    found = fl.measure(fl.Lens(problem), [one])
    assert found[one.key].value <= found[f"{one.key}.upper"].value


def winding(k: float) -> nn.Module:
    """x (sin^2 kx + cos^2 kx) = x: a Jacobian of 1 whose terms of size k x cancel."""
    return module_of(
        lambda net, x: net.weight * x * ((k * x).sin() ** 2 + (k * x).cos() ** 2), weight=nn.Parameter(torch.ones(()))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [1e3, 1e5])
def test_rounding_inside_the_network_is_taken_off(k: float, dtype: torch.dtype) -> None:
    """0.06 was a lower bound of 0 once."""
    x = 1 + torch.rand(4, 2, generator=seeded(0)).to(dtype)
    problem = fl.Problem(winding(k).to(dtype), "mse", (x, torch.zeros_like(x)))
    assert search(problem, 0.1).tolist() == [0.0] * 4


@pytest.mark.parametrize("seed", [2, 4])
def test_behind_a_confident_softmax_float32_finds_no_more_than_float64(seed: int) -> None:
    """The terms of p (u - sum p u) cancel: 1.47 of the truth was a lower bound once."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Softmax(1))
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(3)
        net[2].weight.mul_(6)
    x = torch.randn(8, 3)
    coarse = search(fl.Problem(net, "mse", (x, torch.zeros(8, 3))), 1e-3)
    assert bool((coarse <= 1.001 * search(problem_of(net, x), 1e-3)).all())
