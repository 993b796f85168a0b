"""Truncated Gaussian latents: density, samples, and the bound of the smallest ball beside numbers."""

from __future__ import annotations

import math

import pytest
import torch
from builders import seeded
from scipy.stats import kstest, truncnorm

from flatlens.distributions import PushForward, TruncatedGaussian, covering_radius_of
from flatlens.errors import BadInput


def test_density_and_samples_are_scipys() -> None:
    law, one = TruncatedGaussian(2, cut=1.5), truncnorm(-1.5, 1.5)
    z = law.sample(4000, seeded(0))
    assert kstest(z[:, 0].numpy(), one.cdf).pvalue > 0.001
    truth = torch.as_tensor(one.logpdf(z.numpy())).sum(1)
    assert torch.allclose(law.log_density(z), truth, rtol=1e-12)
    assert law.log_density(torch.tensor([[0.0, 1.6]])).item() == -math.inf


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("r", [0.05, 0.3, 1.0, 2.5])
def test_no_ball_about_a_point_of_the_support_holds_less(d: int, r: float) -> None:
    """Monte Carlo about the corner, an edge and the centre, plus four standard errors; exact on the line."""
    law = TruncatedGaussian(d, cut=2.0)
    z = law.sample(200_000, seeded(1))
    bound = math.exp(law._log_ball(r))
    for centre in (torch.full((d,), 2.0), torch.tensor([2.0] + [0.0] * (d - 1)), torch.zeros(d)):
        hits = int(((z - centre).norm(dim=1) <= r).sum())
        assert bound * len(z) <= hits + 4 * math.sqrt(hits) + 5
    if d == 1:
        one = truncnorm(-2, 2)
        assert bound == pytest.approx(one.cdf(2) - one.cdf(2 - r), rel=1e-9)  # the smallest ball is at the end


def test_samples_cover_the_support_within_the_radius_as_often_as_said() -> None:
    law, radius = TruncatedGaussian(2, cut=1.5), TruncatedGaussian(2, cut=1.5).covering_radius(400, 0.05, rule="tight")
    exact = law.covering_radius(400, 0.05)
    assert radius.value <= exact.value
    missed = [
        covering_radius_of(law.sample(400, seeded(k)), law, probes=2000, generator=seeded(100 + k)).value > radius.value
        for k in range(40)
    ]
    assert sum(missed) <= 2
    assert law.covering_radius(4000, 0.05).value < exact.value
    assert law.covering_radius(400, 0.05, rule="published").kind == "undefined"


def test_a_generator_of_truncated_latents_is_a_good_distribution() -> None:
    """sharpening Thm 4.2's last part."""
    double = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.eye_(double.weight)
    image = PushForward(TruncatedGaussian(2), double)
    assert image.covering_radius(1000, 0.05).value == pytest.approx(
        TruncatedGaussian(2).covering_radius(1000, 0.05).value, rel=1e-6
    )


def test_many_dimensions_stay_finite_and_bad_arguments_are_named() -> None:
    law = TruncatedGaussian(512)
    assert law.covering_radius(10**6, 0.05).value == pytest.approx(law.diameter)  # says nothing, as Eq. 6 there
    assert math.isfinite(law._log_ball(1e-3))
    with pytest.raises(BadInput, match="cut=-1"):
        TruncatedGaussian(2, cut=-1)
