"""How many probes a trace takes, and what they say."""

from __future__ import annotations

import pytest
import torch
from builders import chain, lens_on, normal
from linear import measured
from networks import module_of
from torch import nn

import flatlens as fl
from flatlens.errors import BadInput
from flatlens.grams.data_pass import random_signs
from flatlens.measures.definition import Run
from flatlens.measures.traces import Effort, of_probes, sampled


def test_probes_of_few_directions_are_all_of_them() -> None:
    """Two probes of a weight and a bias agree by chance half of the time."""
    net, x = chain([1, 1], 2), normal(3, 1, seed=1)
    lens = lens_on(nn.Sequential(*net, nn.Tanh()), x)
    for key in ("hessian_trace", "adaptive_sharpness"):
        found = fl.measure(lens, [f"{key}(probes=2)", f"{key}(exact=True)"])
        few, every = found[f"{key}(probes=2)"], found[f"{key}(exact=True)"]
        assert (few.kind, few.value, few.products) == ("exact", every.value, 2)


def two_of_many() -> nn.Module:
    """x a b, with squares of many more parameters: signs give one of two values of v^T H v."""
    return module_of(
        lambda net, x: x * net.w[0] * net.w[1] + net.w[2:].square().sum(),
        w=nn.Parameter(torch.full((70,), 0.5, dtype=torch.float64)),
    )


def test_probes_that_agree_by_chance_are_no_exact_ones() -> None:
    x, y = normal(3, 1, seed=1), normal(3, 1, seed=2)
    lens = fl.Lens(fl.Problem(two_of_many(), "half_squared_error", (x, y)))
    truth = fl.measure(lens, "hessian_trace(exact=True)")["hessian_trace(exact=True)"].value
    key, taken = "hessian_trace(probes=2)", set()
    for seed in range(12):
        found = fl.measure(lens, key, generator=torch.Generator().manual_seed(seed))[key]
        assert abs(found.value - truth) <= 1.96 * found.stderr
        taken.add(found.products)
    assert taken == {2, 16}


def test_bad_options_are_one_line() -> None:
    with pytest.raises(BadInput, match="choose one"):
        measured("hessian_trace(exact=True, probes=4)")
    with pytest.raises(BadInput, match="at least 2"):
        measured("hessian_trace(probes=1)")


def test_a_part_that_underflows_is_not_zero() -> None:
    """In float32 slopes of 1e-48 are 0, and with them the functional Hessian, while C, in float64, is not."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    with torch.no_grad():
        net[2].bias.copy_(torch.tensor([110.0, 0.0, 0.0]))
    data, key = (torch.randn(30, 4), torch.zeros(30, dtype=torch.long)), "hessian_trace(exact=True)"
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", data)), [key, "layer_factors"])
    assert "underflow" in report[key].note
    assert report[f"{key}.functional_hessian"].kind == "undefined"
    assert report[f"{key}.gauss_newton"].value > 0
    assert {report["layer_factors", at].kind for at in (None, "0", "2")} == {"undefined"}
    assert report["layer_factors.features", "0"].kind == "exact"


def test_a_pilot_of_signs_that_agree_by_chance_does_not_decide() -> None:
    """Three parameters of equal weight: (sum of 3 signs)^2 is 1 in 3/4 of the draws, and 9 in the others."""
    covered = 0
    for seed in range(400):
        generator = torch.Generator().manual_seed(seed)

        def draw(m: int, generator: torch.Generator = generator) -> torch.Tensor:
            signs = random_signs((m, 3), torch.zeros(1, dtype=torch.float64), generator)
            return signs.sum(1, keepdim=True).square() + 1e-3 * torch.randn(m, 1, generator=generator)

        run = Run(generator, None)
        found = sampled(draw, Effort(0.05, None, False), 0.0, 10_000, run)
        assert found is not None
        estimate = of_probes(found[0].sum(1), found[1])
        covered += abs(estimate.value - 3) <= 1.96 * estimate.stderr
    assert covered >= 0.94 * 400
