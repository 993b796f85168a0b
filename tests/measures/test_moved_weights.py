"""Moved weights against closed forms: quadratics, normal noise on a threshold, and the limit of small moves."""

from __future__ import annotations

import math

import pytest
import torch
from builders import estimated
from literal_perturbation import on_the_ball
from networks import network
from scipy import stats
from torch import Tensor, nn

import flatlens as fl
from flatlens.errors import BadInput


def regression(n: int = 12) -> tuple[fl.Problem, Tensor, Tensor, Tensor]:
    """(a problem quadratic in its weights, the weights, gradient, Hessian)."""
    generator = torch.Generator().manual_seed(3)
    net = nn.Linear(4, 1, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[0.5, -1.0, 2.0, 0.0]]))  # one weight at zero
    x, y = torch.randn(n, 4, generator=generator).double(), torch.randn(n, 1, generator=generator).double()
    w = net.weight.detach()[0]
    return fl.Problem(net, "half_squared_error", (x, y)), w, ((x @ w)[:, None] - y).mul(x).mean(0), x.T @ x / n


@pytest.mark.parametrize("adaptive", [True, False])
def test_average_sharpness_of_a_quadratic_is_its_trace_at_any_radius(adaptive: bool) -> None:
    problem, w, _, H = regression()
    truth = float((H.diagonal() * (w.square() if adaptive else torch.ones(4))).sum())
    key = (
        "average_sharpness(rho=0.7, probes=400)"
        if adaptive
        else "average_sharpness(rho=0.7, adaptive=False, probes=400)"
    )
    found = estimated(problem, key)
    assert found.value == pytest.approx(truth, abs=4 * found.stderr)
    assert found.stderr < 0.15 * truth
    assert found.samples is not None
    assert float(found.samples.mean()) == pytest.approx(found.value)


def test_antithetic_pairs_have_no_part_of_the_slope() -> None:
    problem, _, g, _ = regression()
    assert float(g.norm()) > 0.3  # far from a minimum: single draws would swamp the trace
    small = estimated(problem, "average_sharpness(rho=1e-5, adaptive=False, probes=400)")
    large = estimated(problem, "average_sharpness(rho=1.0, adaptive=False, probes=400)")
    torch.testing.assert_close(small.arrays["pairs"], large.arrays["pairs"], rtol=1e-3, atol=1e-3)  # the same draws


@pytest.mark.parametrize("name", ["mlp-tanh", "mlp-gelu", "attention"])
@pytest.mark.parametrize(("adaptive", "limit"), [(True, "adaptive_sharpness"), (False, "hessian_trace")])
def test_average_sharpness_tends_to_the_curvature(name: str, adaptive: bool, limit: str) -> None:
    net, x, y = network(name, n=6)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    truth = estimated(problem, f"{limit}(exact=True)").value
    tail = "" if adaptive else ", adaptive=False"
    found = estimated(problem, f"average_sharpness(rho=0.001{tail}, probes=300)")
    assert found.value == pytest.approx(truth, abs=4 * found.stderr)
    assert found.stderr < 0.3 * abs(truth)


def test_the_published_scale_has_no_factor() -> None:
    net, x, y = network("mlp-relu", n=6)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    ours, published = (
        estimated(problem, key) for key in ("average_sharpness", "average_sharpness(scale='published46')")
    )
    assert ours.value == pytest.approx(2 / 0.1**2 * published.value)
    assert ours.stderr == pytest.approx(200 * published.stderr)


@pytest.mark.parametrize("adaptive", [False, True])
def test_worst_sharpness_of_a_quadratic(adaptive: bool) -> None:
    problem, w, g, H = regression()
    unit = w.abs() if adaptive else torch.ones(4, dtype=torch.float64)
    truth = on_the_ball(unit[:, None] * H * unit, unit * g, 0.3)
    found = estimated(
        problem, f"worst_sharpness(rho=0.3, adaptive={adaptive}, steps=60)".replace("adaptive=False, ", "")
    )
    assert truth * (1 - 1e-4) <= found.value <= truth * (1 + 1e-9)
    assert found.kind == "lower bound"
    assert len(found.arrays["restarts"]) == 3


def test_weights_at_zero_stay_there() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    problem = fl.Problem(net, "cross_entropy", (torch.randn(6, 3).double(), torch.randint(2, (6,))))
    assert estimated(problem, "worst_sharpness(adaptive=True)").value == 0
    assert estimated(problem, "average_sharpness").value == 0
    assert estimated(problem, "worst_sharpness").value > 0


def test_m_sharpness_grows_as_the_groups_shrink() -> None:
    net, x, y = network("mlp-tanh", n=12)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    whole, halves, alone = (
        estimated(problem, key) for key in ("worst_sharpness", "worst_sharpness(m=6)", "worst_sharpness(m=1)")
    )
    assert whole.value < halves.value < alone.value
    assert (whole.note, halves.note) == ("m = 12, 1 group of samples", "m = 6, 2 groups of samples")
    one = fl.Problem(net, "cross_entropy", (x[:1], y[:1]))
    each = [
        estimated(fl.Problem(net, "cross_entropy", (x[i : i + 1], y[i : i + 1])), "worst_sharpness").value
        for i in range(12)
    ]
    assert one.n == 1
    assert alone.value == pytest.approx(sum(each) / 12, rel=1e-3)


@pytest.mark.parametrize("adaptive", [False, True])
def test_pac_bayes_flatness_of_a_quadratic(adaptive: bool) -> None:
    """E L(w + sigma z) - L = sigma^2 / 2 sum_j u_j^2 H_jj."""
    problem, w, _, H = regression()
    truth = float((H.diagonal() * (w.square() if adaptive else torch.ones(4))).sum()) / (2 * 0.2)
    key = f"pac_bayes_flatness(level=0.2, of='loss'{', adaptive=True' if adaptive else ''}, probes=400)"
    found = estimated(problem, key)
    assert found.value == pytest.approx(truth, abs=4 * found.stderr)
    assert found.stderr < 0.1 * truth


def test_pac_bayes_flatness_in_accuracy_of_a_threshold() -> None:
    """One weight of 1 decides by its sign: P(1 + sigma z < 0) = level where sigma = -1 / Phi^-1(level)."""
    net = nn.Linear(1, 2, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0], [0.0]]))
    x, y = torch.ones(3, 1).double(), torch.zeros(3, dtype=torch.long)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    found = estimated(problem, "pac_bayes_flatness(level=0.2, adaptive=True, probes=400)")
    assert found.value == pytest.approx(float(stats.norm.ppf(0.2)) ** 2, abs=4 * found.stderr)
    assert found.stderr < 0.4


def test_what_noise_cannot_spoil_has_no_pac_bayes_flatness() -> None:
    net, x, _ = network("mlp-relu", n=9)
    wrong = fl.Problem(net, "cross_entropy", (x, net(x).argmin(1)))
    assert estimated(wrong, "pac_bayes_flatness").kind == "undefined"
    real = fl.Problem(net, "half_squared_error", (x, torch.randn(9, 3).double()))
    assert "not class labels" in estimated(real, "pac_bayes_flatness").note


def test_sigma_and_its_square_agree() -> None:
    net, x, y = network("mlp-tanh", n=9)
    found = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), "pac_bayes_flatness(of='loss')")
    value, sigma = found["pac_bayes_flatness(of='loss')"], found["pac_bayes_flatness(of='loss').sigma"]
    assert value.value == pytest.approx(sigma.value**-2)
    assert value.stderr / value.value == pytest.approx(2 * sigma.stderr / sigma.value)


@pytest.mark.parametrize("key", ["average_sharpness", "worst_sharpness", "pac_bayes_flatness(of='loss')"])
def test_the_same_seed_gives_the_same_digits_and_leaves_no_trace(key: str) -> None:
    net, x, y = network("residual", n=8)
    problem = fl.Problem(net.train(), "cross_entropy", (x, y))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    lens, state = fl.Lens(problem), torch.get_rng_state()
    a, b = (fl.measure(lens, [key], generator=torch.Generator().manual_seed(4))[key] for _ in range(2))
    assert a.value == b.value
    assert net.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert fl.measure(lens, [key], generator=torch.Generator().manual_seed(5))[key].value != a.value or "worst" in key


def test_samples_normalised_together_can_be_moved() -> None:
    net, x, y = network("residual", n=8)
    problem = fl.Problem(net, "cross_entropy", (x, y), batchnorm="train", ghost_batch=4)
    for key in ("average_sharpness", "worst_sharpness", "pac_bayes_flatness(of='loss')"):
        assert math.isfinite(estimated(problem, key).value)
    with pytest.raises(BadInput, match="leave m out"):
        estimated(problem, "worst_sharpness(m=4)")


@pytest.mark.filterwarnings("ignore")
def test_moves_that_overflow_are_undefined() -> None:
    net, x, y = network("mlp-relu", n=6)
    problem = fl.Problem(net.float(), "cross_entropy", (x.float(), y))
    assert estimated(problem, "average_sharpness(rho=1e38)").kind == "undefined"
    assert estimated(problem, "worst_sharpness(rho=1e38)").kind == "undefined"
    wrong = fl.Problem(net, "cross_entropy", (x.float(), torch.ones(6, dtype=torch.long)))
    assert estimated(wrong, "pac_bayes_flatness(level=0.999)").kind == "undefined"


def test_rounding_is_part_of_the_error() -> None:
    net, x, y = network("mlp-tanh", n=30)
    truth = estimated(fl.Problem(net, "cross_entropy", (x, y)), "adaptive_sharpness(exact=True)").value
    single = fl.Problem(net.float(), "cross_entropy", (x.float(), y))
    for rho in (1e-2, 1e-3, 1e-4, 1e-5):
        found = estimated(single, f"average_sharpness(rho={rho})")
        assert found.value == pytest.approx(truth, abs=4 * found.stderr)
    assert "dtype=torch.float64" in found.note
    assert "rounding" in estimated(single, "feature_robustness(delta=1e-6)").note


@pytest.mark.parametrize("key", ["feature_robustness", "local_variation", "mls_by_search", "locally_constant_labels"])
def test_what_is_not_about_parameters_needs_none(key: str) -> None:
    net, x, y = network("mlp-tanh", n=12)
    free = estimated(fl.Problem(net, "cross_entropy", (x, y)), key)
    frozen = estimated(fl.Problem(net.requires_grad_(False), "cross_entropy", (x, y)), key)
    assert frozen.value == pytest.approx(free.value)
    assert estimated(fl.Problem(net, "cross_entropy", (x, y)), "average_sharpness").kind == "undefined"


def test_worst_sharpness_stays_a_lower_bound_in_float32() -> None:
    """Far from 0 the weights' own grid is coarser than a small ball: the rise on it was 34% above the largest."""
    net = nn.Linear(3, 1, bias=False)
    nn.init.constant_(net.weight, 100.3)
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    problem = fl.Problem(net, "half_squared_error", (x, (x.double() @ torch.full((3, 1), 90.0).double()).float()))
    lens = fl.Lens(problem)
    lost = fl.measure(lens, "worst_sharpness(rho=1e-05)")["worst_sharpness(rho=1e-05)"]
    assert lost.note == (
        "rho = 1e-05 is lost in the weights' rounding, which is 6e-06 long: use a rho of at least 0.0006, or "
        "dtype=torch.float64"
    )
    assert fl.measure(lens, "worst_sharpness(rho=0.0007)")["worst_sharpness(rho=0.0007)"].kind == "lower bound"
    X, residual = x.double(), x.double() @ net.weight.detach().double().T - problem.probes[0][1][:6].double()
    g, top = (residual * X).mean(0), float(torch.linalg.eigvalsh(X.T @ X / 6)[-1])
    for rho in (0.002, 0.05):
        name = f"worst_sharpness(rho={rho})"
        assert fl.measure(lens, name)[name].value <= float(g.norm()) * rho + rho**2 * top / 2
