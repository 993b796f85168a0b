"""The spread of gradients and the sharpness of minibatches, against literal definitions."""

from __future__ import annotations

import math

import pytest
import torch
from quadratic import gradient_and_hessian, linear
from torch import Tensor, nn

import flatlens as fl
from flatlens.curvature.probes import mean_of_forms
from flatlens.data import digits
from flatlens.errors import BadInput
from flatlens.measures.steps import noise_scale
from flatlens.models import MLP
from flatlens.perturbation.weights import Spread
from flatlens.training import SGD, Training, train


def literal_noise_scale(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """tr Sigma / ||g||^2 with the given samples as the whole population, one backward pass for each."""
    rows = [gradient_and_hessian(net, x[i : i + 1], y[i : i + 1])[0] for i in range(len(x))]
    G = torch.stack(rows)
    return float((G - G.mean(0)).square().sum(1).mean() / G.mean(0).square().sum())


def test_the_noise_scale_of_a_whole_data_set_is_exact() -> None:
    net, x, y = linear(60)
    problem = fl.Problem(net, "half_squared_error", (x, y))
    exact = "gradient_noise_scale(batches=60, sampled=False)"
    found = fl.measure(fl.Lens(problem), exact)[exact]
    truth = literal_noise_scale(net, x, y)
    assert (found.kind, found.stderr) == ("exact", 0)
    assert found.value == pytest.approx(truth, rel=1e-9)


def test_the_noise_scale_from_groups_is_within_a_tenth() -> None:
    net, x, y = linear(4000)
    truth = literal_noise_scale(net, x, y)
    problem = fl.Problem(net, "half_squared_error", (x, y))
    name = "gradient_noise_scale(batches=400, sampled=False)"
    found = fl.measure(fl.Lens(problem), name)[name]
    assert found.value == pytest.approx(truth, rel=0.1)
    assert abs(found.value - truth) < 2.5 * 1.96 * found.stderr
    assert 0 < found.stderr < 0.1 * truth


def test_the_noise_scale_of_an_mlp_is_within_a_tenth_from_the_default_groups() -> None:
    """The standard deviation over ways to deal the samples is 3.6%."""
    split = digits(300)
    net = MLP(64, (32, 32), 10, seed=0).build().double()
    problem = fl.Problem(net, "cross_entropy", (split.x.double(), split.y))
    exact = "gradient_noise_scale(batches=300, sampled=False)"
    truth = fl.measure(fl.Lens(problem), exact)[exact].value
    name = "gradient_noise_scale(sampled=False)"
    for seed in range(5):
        found = fl.measure(fl.Lens(problem), name, generator=torch.Generator().manual_seed(seed))[name]
        assert found.value == pytest.approx(truth, rel=0.1)
        assert abs(found.value - truth) < 2.5 * 1.96 * found.stderr
        assert found.stderr < 0.06 * truth


def test_the_interval_of_the_noise_scale_covers() -> None:
    """Samples of a population whose noise scale is known: g is linear in them, and Sigma has a closed form."""
    net, x, y = linear(20_000)
    W, b = net.weight.detach(), net.bias.detach()
    error = x @ W.T + b - y
    G = torch.cat([(error[:, :, None] * x[:, None]).flatten(1), error], 1)
    truth = float((G - G.mean(0)).square().sum(1).mean() / G.mean(0).square().sum())
    covered = 0
    generator = torch.Generator().manual_seed(5)
    for _ in range(100):
        drawn = torch.randint(len(x), (512,), generator=generator)
        problem = fl.Problem(net, "half_squared_error", (x[drawn], y[drawn]))
        found = fl.measure(fl.Lens(problem), "gradient_noise_scale", generator=generator)["gradient_noise_scale"]
        covered += abs(found.value - truth) <= 1.96 * found.stderr
    assert covered >= 88  # of 95 expected: three standard errors


def test_two_groups_are_too_few() -> None:
    """Without one of them the other has no spread: the jackknife would know no error."""
    net, x, y = linear(20)
    with pytest.raises(BadInput, match="batches=2: expected a whole number of at least 3"):
        fl.measure(fl.Lens(fl.Problem(net, "half_squared_error", (x, y))), "gradient_noise_scale(batches=2)")


@pytest.mark.parametrize("groups", [3, 4, 8])
def test_few_groups_cover_the_covariance_in_one_direction(groups: int) -> None:
    """0.83, 0.81 and 0.87 with Student's width of the jackknife: the covariance is a mean of squares."""
    inside, sizes = 0, torch.full((groups,), 8.0, dtype=torch.float64)
    drawn = torch.randn(500, groups, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 8**0.5 + 2
    for g in drawn:
        spread = Spread(sizes, (g - g.mean()).square(), (g - g.mean()) * g.mean(), float(g.mean().square()))
        found = noise_scale(spread, sampled=True)["covariance"]
        inside += abs(found.value - 1) <= 1.96 * found.stderr
    assert inside / 500 >= 0.9


def test_a_gradient_that_cannot_be_told_from_zero_gives_a_lower_bound() -> None:
    net, x, y = linear(40, noise=5.0)
    with torch.no_grad():  # the least squares solution: the gradient of these samples is zero
        A = torch.cat([x, torch.ones(40, 1, dtype=x.dtype)], 1)
        solved = torch.linalg.lstsq(A, y).solution
        net.weight.copy_(solved[:-1].T)
        net.bias.copy_(solved[-1])
    found = fl.measure(fl.Lens(fl.Problem(net, "half_squared_error", (x, y))), "gradient_noise_scale(batches=20)")
    one = found["gradient_noise_scale(batches=20)"]
    assert one.kind in ("lower bound", "undefined")
    assert found["gradient_noise_scale(batches=20).covariance"].value > 0


def test_a_gradient_that_is_not_zero_is_not_called_so() -> None:
    """Four gradients that nearly cancel: ||g||^2 is less than what their noise adds to it."""
    net = nn.Linear(1, 1, bias=False).double()
    x, sign = torch.ones(4, 1).double(), torch.tensor([[1.0], [-1.0], [1.0], [-1.001]]).double()
    for y, says in (
        (net(x).detach() + sign, "cannot be distinguished from 0"),
        (net(x).detach(), "the gradient is zero"),
    ):
        found = fl.measure(fl.Lens(fl.Problem(net, "half_squared_error", (x, y))), "gradient_noise_scale(batches=4)")
        assert says in found["gradient_noise_scale(batches=4)"].note


def test_the_sharpness_of_minibatches_has_the_interval_of_its_draws() -> None:
    net, x, y = linear(200)
    problem = fl.Problem(net, "half_squared_error", (x, y))
    name, lens = "minibatch_sharpness(samples=16, batches=30)", fl.Lens(problem)
    report = fl.measure(lens, [name, "sharpness"])
    found = report[name]

    def top(part: Tensor) -> float:
        return float(torch.linalg.eigvalsh(gradient_and_hessian(net, x[part], y[part])[1])[-1])

    generator = torch.Generator().manual_seed(9)
    truth = sum(top(torch.randperm(200, generator=generator)[:16]) for _ in range(300)) / 300
    assert abs(found.value - truth) < 1.96 * found.stderr * 1.5
    assert found.value > report["sharpness"].value  # Jensen
    assert len(found.arrays["batches"]) == 30
    assert found.products + report["sharpness"].products == lens.products
    whole = fl.measure(fl.Lens(problem), "minibatch_sharpness(samples=200, batches=2)")
    assert whole["minibatch_sharpness(samples=200, batches=2)"].value == pytest.approx(
        report["sharpness"].value, rel=0.01
    )
    one = fl.measure(fl.Lens(problem), "minibatch_sharpness(samples=200, batches=8)")
    all_data = one["minibatch_sharpness(samples=200, batches=8)"]  # asked with its default: every batch is the whole
    assert abs(all_data.value - top(torch.arange(200))) < 1.96 * all_data.stderr
    assert math.isnan(
        fl.measure(fl.Lens(problem), "minibatch_sharpness(samples=201)")["minibatch_sharpness(samples=201)"].value
    )


def of_one_batch(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """g^T H g / ||g||^2 of a batch's own gradient and Hessian."""
    g, H = gradient_and_hessian(net, x, y)
    return float(g @ H @ g / g.square().sum())


def test_batch_sharpness_is_the_mean_over_batches_of_the_curvature_along_their_gradients() -> None:
    net, x, y = linear(200)
    problem = fl.Problem(net, "half_squared_error", (x, y))
    for size in (4, 32):
        name = f"batch_sharpness(samples={size}, batches=60)"
        found = fl.measure(fl.Lens(problem), name)[name]
        generator = torch.Generator().manual_seed(9)
        parts = [torch.randperm(200, generator=generator)[:size] for _ in range(400)]
        truth = sum(of_one_batch(net, x[part], y[part]) for part in parts) / len(parts)
        assert abs(found.value - truth) < 2 * 1.96 * found.stderr
        assert 0 < found.stderr < 0.2 * truth
        assert len(found.arrays["batches"]) == 60
        assert found.products == 0
    whole = fl.measure(fl.Lens(problem), "batch_sharpness(samples=200)")["batch_sharpness(samples=200)"]
    assert (whole.kind, whole.stderr, whole.products) == ("exact", 0, 1)
    assert whole.value == pytest.approx(of_one_batch(net, x, y), rel=1e-9)


def test_batches_of_one_sample_of_a_linear_model_have_a_known_answer() -> None:
    """g = r x and H = x x^T, so that each batch's value is ||x||^2, whatever the residual r."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(50, width, generator=generator, dtype=torch.float64) for width in (5, 1))
    net = nn.Linear(5, 1, bias=False).double()
    name = "batch_sharpness(samples=1, batches=100)"
    found = fl.measure(fl.Lens(fl.Problem(net, "half_squared_error", (x, y))), name)[name]
    lengths = x.square().sum(1)
    assert all(torch.isclose(lengths, value, rtol=1e-4).any() for value in found.arrays["batches"])
    assert abs(found.value - float(lengths.mean())) < 1.96 * found.stderr
    none = fl.measure(fl.Lens(fl.Problem(net, "half_squared_error", (x, net(x).detach()))), name)[name]
    assert none.kind == "undefined"
    assert "no direction" in none.note


def trained_tanh(dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    split = digits(200)
    net = MLP(64, (16,), 10, activation="tanh", seed=0).build().to(dtype)
    x, y = split.x.to(dtype).flatten(1), split.y
    train(net, (x, y), Training(SGD(0.5), batch_size=16, max_steps=300))
    return net, x, y


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_differences_of_gradients_are_the_product_within_their_error(dtype: torch.dtype) -> None:
    net, x, y = trained_tanh(dtype)
    keys = [f"batch_sharpness(samples=16, batches=24{by})" for by in (", by='product'", ", by='differences'", "")]
    lens = [fl.Lens(fl.Problem(net, "cross_entropy", (x, y))) for _ in keys]
    product, differences, auto = (fl.measure(one, key)[key] for one, key in zip(lens, keys, strict=True))
    exact, by_differences, errors = (
        product.arrays["batches"],
        differences.arrays["batches"],
        differences.arrays["errors"],
    )
    off = by_differences - exact
    assert 0 < float(off.abs().mean()) <= float(errors.mean())
    assert float((off.abs() / errors).median()) < 1
    assert 0 < float(errors.mean()) < 0.1 * float(exact.mean())
    assert differences.stderr > mean_of_forms(by_differences)[1]  # it holds the errors of the differences
    assert (product.products, differences.products) == (24, 0)
    assert "by differences of gradients" in auto.note
    assert auto.value == pytest.approx(product.value, rel=0.01)


def test_a_batch_whose_difference_is_off_gets_a_product() -> None:
    """Outputs of 1 and targets of 1000: the distance that suits this loss is far too long for tanh."""
    net, x, y = trained_tanh(torch.float32)
    problem = fl.Problem(net, "half_squared_error", (x, 1e3 * nn.functional.one_hot(y).float()))
    keys = ["batch_sharpness(samples=4, batches=8, by='product')", "batch_sharpness(samples=4, batches=8)"]
    exact, auto = (fl.measure(fl.Lens(problem), key)[key] for key in keys)
    assert auto.products > 0
    assert f"{auto.products} by a product" in auto.note
    assert torch.allclose(auto.arrays["batches"], exact.arrays["batches"], rtol=0, atol=0.1 * abs(exact.value) + 1e-9)


def test_differences_are_refused_where_gradients_jump_and_the_choice_is_the_product() -> None:
    split = digits(60)
    problem = fl.Problem(MLP(64, (8,), 10, seed=0).build(), "cross_entropy", (split.x.flatten(1), split.y))
    key = "batch_sharpness(samples=8, batches=3, by='differences')"
    refused = fl.measure(fl.Lens(problem), key)[key]
    assert refused.kind == "undefined"
    assert "jumps, as that of a ReLU does; use by='product'" in refused.note
    key = "batch_sharpness(samples=8, batches=3)"
    assert fl.measure(fl.Lens(problem), key)[key].products == 3


@pytest.mark.parametrize("by", ["product", "differences"])
def test_batches_weigh_their_samples_as_the_loss_does(by: str) -> None:
    """A class weight and an ignored label: the risk of a batch is a weighted mean of its own."""
    split = digits(40)
    net = MLP(64, (6,), 10, activation="tanh", seed=0).build().double()
    x, y = split.x.double().flatten(1), split.y.clone()
    y[::3] = -100
    loss = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 3, 10, dtype=torch.float64), ignore_index=-100)
    key = f"batch_sharpness(samples=10, batches=4, by='{by}')"
    found = fl.measure(fl.Lens(fl.Problem(net, loss, (x, y))), key, generator=torch.Generator().manual_seed(2))[key]
    draw, parameters = torch.Generator().manual_seed(2), list(net.parameters())
    for value in found.arrays["batches"]:
        part = torch.randperm(40, generator=draw)[:10]
        grads = torch.autograd.grad(loss(net(x[part]), y[part]), parameters, create_graph=True)
        slope = sum((g * g.detach()).sum() for g in grads)
        products = torch.autograd.grad(slope, parameters)
        square = sum(float(g.detach().square().sum()) for g in grads)
        truth = sum(float((g.detach() * one).sum()) for g, one in zip(grads, products, strict=True)) / square
        assert float(value) == pytest.approx(truth, rel=1e-3)


def test_the_interval_of_batch_sharpness_covers() -> None:
    """On a trained tanh network; 16 batches at a time out of 1,600."""
    net, x, y = trained_tanh(torch.float64)
    name = "batch_sharpness(samples=16, batches=1600)"
    values = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), name)[name].arrays["batches"]
    intervals = [mean_of_forms(part) for part in values.reshape(100, 16)]
    covered = sum(abs(float(mean - values.mean())) < 1.96 * float(stderr) for mean, stderr in intervals)
    assert covered >= 92


@pytest.mark.parametrize(
    ("made", "edge", "says"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 20.0, "its edge is 2 / lr = 20"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), math.nan, "between 2(1-b) / lr = 2, for small batches"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), math.nan, "no edge is known for SGD"),
        (lambda p: torch.optim.Adam(p, lr=0.1), math.nan, "no edge is known for Adam"),
    ],
)
def test_the_edge_of_batch_sharpness_is_that_of_the_optimiser(made, edge, says) -> None:  # type: ignore[no-untyped-def]
    net, x, y = linear(20)
    optimiser = made(net.parameters())
    name = "batch_sharpness(samples=4, batches=2)"
    problem = fl.Problem(net, "half_squared_error", (x, y))
    assert says in fl.measure(fl.Lens(problem, optimiser=optimiser), name)[name].note
    tracker = fl.Tracker(problem, name, live=False)
    tracker.step(0, optimiser=optimiser)
    assert tracker.history["edge"].to_list() == pytest.approx([edge], nan_ok=True)
