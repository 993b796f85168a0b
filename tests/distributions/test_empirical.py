"""Intrinsic dimension and the empirical covering radius, where both are known."""

from __future__ import annotations

import math

import pytest
import torch
from builders import seeded
from torch import Tensor

from flatlens.distributions import Cube, Sphere, covering_radius_of, empirical_covering_radius, intrinsic_dimension
from flatlens.errors import BadInput


@pytest.mark.parametrize(("law", "d"), [(Cube(1), 1), (Cube(2), 2), (Sphere(2), 2), (Sphere(3), 3)])
def test_the_dimension_of_a_known_support_is_found_also_in_a_larger_space(law, d: int) -> None:
    x = law.sample(2000, seeded(0)) @ torch.randn(law.dimension, 9, generator=seeded(1), dtype=torch.float64)
    found = intrinsic_dimension(x)
    assert found.value == pytest.approx(d, rel=0.1)
    assert 0 < found.stderr < 0.1 * d


def test_the_dimension_is_its_formula() -> None:
    x = torch.randn(40, 3, generator=seeded(2), dtype=torch.float64)
    T = (x[:, None] - x).norm(dim=2).sort(1).values[:, 1:7]
    truth = 1 / float(((T[:, 5:] / T[:, :5]).log().sum(1) / 4).mean())
    assert intrinsic_dimension(torch.cat([x, x[:5]]), neighbours=6).value == pytest.approx(truth, rel=1e-12)


def literal(x: Tensor, y: Tensor, failure: float) -> float:
    k = math.ceil(math.log(2 / failure))
    reached = max(float((x - one).norm(dim=1).min()) for one in y)
    further = max(float((y - one).norm(dim=1).sort().values[k]) for one in y)  # the first is itself
    return reached + further


def test_the_radius_is_its_definition_and_covers_a_known_support_as_often_as_said() -> None:
    """Against the true covering radius, from below: in 60 draws of each law at most 5 failures at 5%."""
    for law in (Cube(2), Sphere(2)):
        missed = 0
        for k in range(60):
            x, y = law.sample(200, seeded(k)), law.sample(100, seeded(1000 + k))
            found = empirical_covering_radius(x, y)
            if k < 3:
                assert found.value == pytest.approx(literal(x, y, 0.05), rel=1e-12)
            true = covering_radius_of(x, law, probes=4000, generator=seeded(k)).value
            assert float(found.arrays["reached"]) <= true + 0.05
            missed += true > found.value
        assert missed <= 5


def test_what_is_missing_is_named() -> None:
    x = torch.rand(20, 2)
    with pytest.raises(BadInput, match="at least 6 held-out"):
        empirical_covering_radius(x, x[:4])
    with pytest.raises(BadInput, match="entries"):
        empirical_covering_radius(x, torch.rand(20, 3))
    with pytest.raises(BadInput, match="neighbours=20"):
        intrinsic_dimension(x)
    assert "intrinsic dimension" in empirical_covering_radius(x, torch.rand(20, 2)).note
