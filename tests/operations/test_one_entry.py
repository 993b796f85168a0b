"""One entry of the table is enough: transforms, bounds, certified variation and Lipschitz constants all read it."""

from __future__ import annotations

import pytest
import torch
from networks import SquaredReLU, module_of
from torch import Tensor, nn
from torch.nn import functional as F

import flatlens as fl
from flatlens.distributions import lipschitz_product
from flatlens.perturbation.inputs import Refused
from flatlens.perturbation.variation import certified_variation, found_variation
from flatlens.transforms import TRANSFORMS, read_wiring

X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def around(between: object) -> nn.Module:
    """Two linear layers, and something between them."""
    torch.manual_seed(0)
    return module_of(
        lambda net, x: net.last(net.between(net.first(x))), first=(4, 5), between=between, last=(5, 2)
    ).double()


def problem_of(between: object) -> fl.Problem:
    return fl.Problem(around(between), "half_squared_error", (X, torch.zeros(6, 2, dtype=torch.float64)))


def kink_above(between: object) -> str:
    rows = fl.check_bounds(fl.Lens(problem_of(between)), "feature_robustness_bound")
    return rows.of("feature_robustness_bound", "first").assumption


def permuted(between: object) -> bool:
    problem = problem_of(between)
    return [str(link) for link in TRANSFORMS["permutation"].offer(read_wiring(problem, problem.model)).links] != []


@pytest.mark.parametrize("between", [nn.Hardswish(), F.hardswish])
def test_hardswish_is_known_wherever_activations_are(between: object) -> None:
    problem = problem_of(between)
    generator = torch.Generator().manual_seed(0)
    bound = certified_variation(problem, problem.model, 0.5)
    found = found_variation(problem, problem.model, 0.5, restarts=3, steps=6, generator=generator)
    assert bool((found <= bound).all())
    assert bool((bound < 10 * found).all())
    assert permuted(between)
    assert "hardswish acts above first" in kink_above(between)
    assert lipschitz_product(nn.Hardswish(), (3,)) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("between", "kink"),
    [
        (F.celu, "celu"),
        (lambda z: torch.fmax(z, -z), "fmax"),
        (lambda z: z.kthvalue(2, dim=1, keepdim=True).values + z, "kthvalue"),
        (lambda z: _relu_on_a_part(z.clone()), "copyslices"),
        (torch.tanh, ""),
    ],
)
def test_kinks_are_those_of_the_table(between: object, kink: str) -> None:
    told = kink_above(between)
    assert (f"{kink} acts above first" in told) if kink else "acts above" not in told


def _relu_on_a_part(z: Tensor) -> Tensor:
    z[:, 0].relu_()
    return z


def hooked() -> nn.Module:
    act = nn.Tanh()
    act.register_forward_hook(lambda module, inputs, z: z * z.flip(1))
    return act


def test_what_a_hook_may_change_is_not_supposed() -> None:
    assert permuted(nn.Tanh())
    assert not permuted(hooked())
    problem = problem_of(hooked())
    with pytest.raises(Refused, match=r"between \(Tanh\) has forward hooks"):
        certified_variation(problem, problem.model, 0.1)


def test_a_subclass_with_a_forward_of_its_own_is_not_its_base_class() -> None:
    problem = problem_of(SquaredReLU())
    layerwise = TRANSFORMS["layerwise"].offer(read_wiring(problem, problem.model))
    assert not layerwise.links
    with pytest.raises(Refused, match="square"):
        certified_variation(problem, problem.model, 0.1)


@pytest.mark.parametrize(
    ("between", "scales"),
    [
        (lambda z: z.relu() / 2, True),
        (lambda z: torch.div(z.relu(), 2, rounding_mode="floor"), False),
        (lambda z: z.relu() * -2, False),
        (lambda z: z.relu() + 1, False),
    ],
)
def test_a_number_scales_or_does_not(between: object, scales: bool) -> None:
    problem = problem_of(between)
    links = TRANSFORMS["layerwise"].offer(read_wiring(problem, problem.model)).links
    assert bool(links) == scales
