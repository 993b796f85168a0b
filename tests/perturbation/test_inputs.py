"""The steepest secants, against the slope they tend to."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from networks import module_of
from torch import Tensor, nn

import flatlens as fl
from flatlens.errors import BadInput
from flatlens.measures.sensitivity import mls_by_search

WEIGHT = torch.tensor([[3.0, 0.0, 1.0], [0.0, 1.0, 2.0]], dtype=torch.float64)


def tanh_problem(dtype: torch.dtype = torch.float64) -> fl.Problem:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 3)).to(torch.float64)
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return fl.Problem(net.to(dtype), "mse", (x, torch.zeros(8, 3)))


def linear_problem(x: torch.Tensor) -> fl.Problem:
    net = nn.Linear(3, 2, dtype=torch.float64)
    with torch.no_grad():
        net.weight.copy_(WEIGHT)
    return fl.Problem(net, "mse", (x, torch.zeros(len(x), 2)))


@pytest.mark.parametrize("radius", [1e-2, 1.0, 100.0])
def test_of_a_linear_network_it_is_the_slope(radius: float) -> None:
    report = fl.measure(
        fl.Lens(linear_problem(torch.ones(5, 3, dtype=torch.float64))), ["mls", mls_by_search(delta=radius, steps=60)]
    )
    found = report[mls_by_search(delta=radius, steps=60).key]
    assert found.value == pytest.approx(float(torch.linalg.matrix_norm(WEIGHT, 2)), rel=1e-10)
    assert found.value == pytest.approx(report["mls"].value, rel=1e-10)
    assert found.kind == "lower bound"


def test_it_tends_to_the_slope() -> None:
    """The error falls with the radius: a secant differs from a slope by the curvature."""
    lens = fl.Lens(tanh_problem())
    exact = fl.measure(lens, ["mls"])["mls"]
    errors = []
    for radius in (1e-2, 1e-3, 1e-4):
        one = mls_by_search(delta=radius, steps=200)
        found = fl.measure(lens, [one])[one.key]
        assert found.samples is not None
        assert exact.samples is not None
        errors.append(float((found.samples / exact.samples - 1).abs().max()))
    assert errors[0] > 5 * errors[1] > 25 * errors[2]
    assert errors[2] < 1e-4


def test_the_secant_may_be_steeper_than_the_slope() -> None:
    """f = tanh(x) at x = 2: the steepest secant of length 2 leads to 0."""
    net = nn.Sequential(nn.Linear(1, 1, dtype=torch.float64), nn.Tanh())
    with torch.no_grad():
        net[0].weight.fill_(1.0)
        net[0].bias.zero_()
    problem = fl.Problem(net, "mse", (torch.tensor([[2.0]]), torch.zeros(1, 1)))
    report = fl.measure(fl.Lens(problem), ["mls", mls_by_search(delta=1.0)])
    assert report["mls_by_search(delta=1.0)"].value == pytest.approx(math.tanh(2) / 2, rel=1e-12)
    assert report["mls_by_search(delta=1.0)"].value > 5 * report["mls"].value


def test_the_radius_is_relative() -> None:
    """Of inputs ten times as large, the same secants at a tenth of the weights."""
    small, large = (torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double() * scale for scale in (1, 10))
    nets = [nn.Sequential(nn.Linear(3, 5, bias=False), nn.Tanh(), nn.Linear(5, 2)).double() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    with torch.no_grad():
        nets[1][0].weight.div_(10)
    values = [
        fl.measure(fl.Lens(fl.Problem(net, "mse", (x, torch.zeros(4, 2)))), [mls_by_search(delta=0.5)])[
            "mls_by_search(delta=0.5)"
        ].value
        for net, x in zip(nets, (small, large), strict=True)
    ]
    assert values[0] == pytest.approx(10 * values[1], rel=1e-9)


def test_same_digits_and_progress() -> None:
    seen = []
    lens = fl.Lens(tanh_problem())
    reports = [fl.measure(lens, [mls_by_search], progress=lambda *step: seen.append(step)) for _ in range(2)]
    first, second = (report["mls_by_search"] for report in reports)
    assert first.value == second.value
    assert first.samples is not None
    assert first.value == float(first.samples.mean())
    assert seen == [("secants", 8, 8)] * 2


def test_an_input_of_zero_is_left_out() -> None:
    x = torch.ones(4, 3, dtype=torch.float64)
    x[1] = 0
    found = fl.measure(fl.Lens(linear_problem(x)), [mls_by_search(steps=60)])["mls_by_search(steps=60)"]
    assert found.value == pytest.approx(float(torch.linalg.matrix_norm(WEIGHT, 2)), rel=1e-9)
    assert "1 of 4 samples 0" in found.note
    assert found.samples is not None
    assert bool(found.samples[1].isnan())
    nothing = fl.measure(fl.Lens(linear_problem(torch.zeros(4, 3))), [mls_by_search])["mls_by_search"]
    assert nothing.kind == "undefined"


def test_rounding_is_told() -> None:
    """In float32 outputs far from 0 drown their differences; a radius that drowns in the inputs is refused."""
    problem = tanh_problem(torch.float32)
    with torch.no_grad():
        problem.model.get_submodule("2").bias.fill_(1e4)
    assert (
        "mostly rounding"
        in fl.measure(fl.Lens(problem), [mls_by_search(delta=1e-4)])["mls_by_search(delta=0.0001)"].note
    )
    assert "rounding" not in fl.measure(fl.Lens(tanh_problem()), [mls_by_search])["mls_by_search"].note
    with pytest.raises(BadInput, match="too small for float32"):
        fl.measure(fl.Lens(problem), [mls_by_search(delta=1e-9)])


@pytest.mark.parametrize("options", [{"delta": 0.0}, {"delta": -1.0}, {"steps": 0}, {"restarts": 0}])
def test_bad_options(options: dict[str, float]) -> None:
    (name,) = options
    with pytest.raises(BadInput, match=f"option {name}="):
        fl.measure(fl.Lens(tanh_problem()), [mls_by_search(**options)])


def test_tokens_have_no_secants() -> None:
    net = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
    problem = fl.Problem(net, "mse", (torch.randint(0, 5, (4, 2)), torch.zeros(4, 2)))
    assert fl.measure(fl.Lens(problem), [mls_by_search])["mls_by_search"].kind == "undefined"


def test_normalised_slopes_are_in_units_of_the_input():
    """Of a linear network every secant is a slope: mean ||x||^2 ||W||_2^2, as `normalized_mls`."""
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one = mls_by_search(steps=200, normalized=True)
    report = fl.measure(fl.Lens(linear_problem(x)), ["normalized_mls", one])
    assert report[one.key].value == pytest.approx(report["normalized_mls"].value, rel=1e-6)


@pytest.mark.parametrize("bias", [0.0, 10.0, 100.0, 1000.0])
@pytest.mark.parametrize("delta", [1e-3, 2e-5])
def test_a_lower_bound_is_one_in_float32_too(bias: float, delta: float) -> None:
    """The largest of many noisy secants is the noisiest: 0.88 was the answer for 0.54 once."""
    torch.manual_seed(0)
    net, x = nn.Linear(4, 2), torch.randn(8, 4)
    nn.init.constant_(net.bias, bias)
    one = mls_by_search(delta=delta)
    found = fl.measure(fl.Lens(fl.Problem(net, "mse", (x, torch.zeros(8, 2)))), [one])[one.key]
    assert found.kind == "lower bound"
    assert found.value <= float(torch.linalg.matrix_norm(net.weight.detach().double(), 2)) * (1 + 1e-7)


def cancelling(far: float) -> nn.Module:
    """An affine map whose hidden numbers are far from 0 in between, so that they round coarsely."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = net.last((net.first(x) + far) - far)
        return y

    return module_of(forward, first=(4, 8), last=(8, 3))


@pytest.mark.parametrize("far", [100.0, 1000.0])
@pytest.mark.parametrize("delta", [1e-3, 2e-5])
def test_rounding_inside_the_network_is_taken_off(far: float, delta: float) -> None:
    """The outputs do not show it: 2.8 times the truth was a lower bound once."""
    torch.manual_seed(0)
    net, x = cancelling(far), torch.randn(8, 4)
    truth = torch.linalg.matrix_norm(net.last.weight.detach().double() @ net.first.weight.detach().double(), 2)
    one = mls_by_search(delta=delta)
    found = fl.measure(fl.Lens(fl.Problem(net, "mse", (x, torch.zeros(8, 3)))), [one])[one.key]
    assert found.value <= float(truth) * (1 + 1e-7)


def test_outputs_that_are_not_finite_are_no_inputs_of_zero() -> None:
    """exp(x^2) ends at x = 9.42 in float32."""

    net = module_of(lambda net, x: (net.scale * x**2).exp(), scale=nn.Parameter(torch.ones(())))
    problem = fl.Problem(net, "mse", (torch.tensor([[9.41], [1.0], [0.0]]), torch.zeros(3, 1)))
    found = fl.measure(fl.Lens(problem), "mls_by_search(delta=0.01)")["mls_by_search(delta=0.01)"]
    assert found.kind == "undefined"
    assert found.note == "the search met outputs that are not finite around 1 of 3 samples"


@pytest.mark.parametrize(("offset", "scale", "seed"), [(100.0, 3e-3, 3), (500.0, 0.1, 1)])
def test_rounding_is_not_taken_for_a_slope(offset: float, scale: float, seed: int) -> None:
    """Behind a LayerNorm of nearly equal numbers the largest of many differences in float32 is rounding."""
    torch.manual_seed(seed)
    below, norm, last = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)
    net = shifted(below, norm, last, offset, scale)
    x, y = torch.randn(16, 3), torch.randn(16, 2)
    coarse, fine = (
        fl.measure(fl.Lens(fl.Problem(one, "mse", (data, target))), [asked, "mls"])
        for one, data, target, asked in (
            (net, x, y, mls_by_search(restarts=2, steps=5)),
            (copy.deepcopy(net).double(), x.double(), y.double(), mls_by_search(restarts=4, steps=50)),
        )
    )
    found, most = (next(iter(report.values())).samples for report in (coarse, fine))
    assert bool((found <= torch.maximum(most, fine["mls"].samples) * 1.001).all())


def shifted(below: nn.Module, norm: nn.Module, last: nn.Module, offset: float, scale: float) -> nn.Module:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = net.last(net.norm(net.below(x) * scale + offset).relu())
        return found

    return module_of(forward, below=below, norm=norm, last=last)
