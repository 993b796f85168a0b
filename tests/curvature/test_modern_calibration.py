"""The Hessian of transformers as a user asks for it: error bars of its trace, the residual of its top eigenvalue."""

from __future__ import annotations

import pytest
import torch
from literal_modern import Literal
from modern import case

import flatlens as fl

RUNS = 100
KEY = "hessian_trace(probes=4)"


def inside(name: str, loss: str, runs: int, first: int = 0) -> int:
    """How many intervals of four probes hold the trace of the Hessian."""
    this = case(name, loss)
    lens = fl.Lens(fl.Problem(this.net, loss, this.data), outputs="exact")
    truth = float(Literal(this).H.trace())
    found = [
        fl.measure(lens, KEY, generator=torch.Generator().manual_seed(seed))[KEY] for seed in range(first, first + runs)
    ]
    assert all(e.kind == "estimate" and e.stderr > 0 for e in found)
    spread = torch.tensor([e.value for e in found]).std()  # the true standard error
    assert torch.tensor([e.stderr for e in found]).median() <= 6 * spread
    return sum(abs(e.value - truth) <= 1.96 * e.stderr for e in found)


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("vit-mha", "cross_entropy"),
        ("vit-sdpa", "half_squared_error"),
        ("gpt2", "cross_entropy"),
        ("low-rank", "cross_entropy"),
    ],
)
def test_intervals_hold_the_trace_of_the_explicit_hessian(name: str, loss: str) -> None:
    """At least 95 of 100 are due, less three standard deviations of 2.2."""
    assert inside(name, loss, RUNS) >= 89


@pytest.mark.parametrize("name", ["encoder", "bert"])
def test_intervals_where_the_norm_comes_last(name: str) -> None:
    """One direction of a post-norm encoder bends far more than others: probes on four sentences have a skewness of -2,
    and Student's intervals of four of them cover 0.85 to 0.94."""
    assert inside(name, "half_squared_error", RUNS) >= 89


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cross_entropy", "half_squared_error"])
@pytest.mark.parametrize("name", ["vit-mha", "vit-sdpa"])
def test_intervals_of_a_vit_over_many_seeds(name: str, loss: str) -> None:
    """At least 950 of 1000 are due, with a standard deviation of 6.9; for probes near normal more."""
    assert inside(name, loss, 1000, first=1000) >= 980


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cross_entropy", "half_squared_error"])
@pytest.mark.parametrize("name", ["encoder", "bert"])
def test_intervals_of_a_post_norm_transformer_over_many_seeds(name: str, loss: str) -> None:
    assert inside(name, loss, 300, first=1000) >= 279  # 0.93


def test_a_residual_net_needs_no_probe() -> None:
    this = case("resnet", "cross_entropy")
    lens = fl.Lens(fl.Problem(this.net, this.loss, this.data))
    found = fl.measure(lens, "hessian_trace")["hessian_trace"]
    assert (found.kind, found.products) == ("exact", 0)
    assert found.value == pytest.approx(float(Literal(this).H.trace()), rel=1e-9)


@pytest.mark.parametrize("name", ["vit-mha", "vit-sdpa", "gpt2"])
def test_a_ritz_value_is_within_its_residual_of_the_largest_eigenvalue(name: str) -> None:
    this = case(name, "cross_entropy")
    lens, top = fl.Lens(fl.Problem(this.net, this.loss, this.data)), torch.linalg.eigvalsh(Literal(this).H)[-1]
    for seed in range(5):
        draws = torch.Generator().manual_seed(seed)
        found = fl.measure(lens, "sharpness(rtol=0.001)", generator=draws)["sharpness(rtol=0.001)"]
        residual = float(found.arrays["residuals"][0])
        assert found.value <= float(top) * (1 + 1e-12)
        assert float(top) - found.value <= residual <= 1e-3 * found.value
