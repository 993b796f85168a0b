"""Error bars of all that is drawn at random: mean +- 1.96 stderr holds the truth as often as it says."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from networks import network

import flatlens as fl

RUNS = {4: 200, 8: 100, 16: 60}  #: sets of so many draws
WIDEST = {4: 6, 8: 4, 16: 2, 32: 1.5}
"""Largest reported error, in true ones: Student's quantile and `mean_of_forms` make those of few draws wider."""

DRAWN = {
    "average_sharpness": ("average_sharpness(rho=0.3, probes={m})", "mlp-tanh"),
    "average_sharpness, ReLU": ("average_sharpness(rho=0.3, adaptive=False, probes={m})", "mlp-relu"),
    "rotations": ("feature_robustness(delta=0.5, probes={m})", "mlp-gelu"),
    "ball": ("feature_robustness(delta=0.5, over='ball', probes={m})", "mlp-gelu"),
    "noise": ("feature_robustness(delta=0.5, over='noise', probes={m})", "mlp-gelu"),
    "labels": ("locally_constant_labels(delta=0.5, probes={m})", "mlp-tanh"),
}
SLOWLY = {"pac_bayes_flatness": ("pac_bayes_flatness(of='loss', adaptive=True, probes={m})", "mlp-tanh")}


def least(runs: int) -> float:
    """3.2 standard deviations below 95%."""
    return 0.95 - 3.2 * (0.95 * 0.05 / runs) ** 0.5


@cache
def lens_on(name: str) -> fl.Lens:
    net, x, y = network(name, n=24)
    return fl.Lens(fl.Problem(net, "cross_entropy", (x, y)))


def one(who: str, draws: int, seed: int) -> fl.Estimate:
    spelling, name = {**DRAWN, **SLOWLY}[who]
    measure = fl.measures.named(spelling.format(m=draws))[0]
    return fl.measure(lens_on(name), measure, generator=torch.Generator().manual_seed(seed))[measure.key]


@cache
def truth(who: str, draws: int) -> fl.Estimate:
    return one(who, draws, 10**6)


def share_inside(found: list[fl.Estimate], there: fl.Estimate) -> float:
    return sum(abs(e.value - there.value) <= 1.96 * (e.stderr**2 + there.stderr**2) ** 0.5 for e in found) / len(found)


def widths(found: list[fl.Estimate]) -> float:
    """The median of the standard errors that estimates report, in units of the true one."""
    errors, values = (torch.tensor([getattr(e, field) for e in found]) for field in ("stderr", "value"))
    return float(errors.median() / values.std())


@pytest.mark.parametrize("who", DRAWN)
@pytest.mark.parametrize("m", [4, 16])
def test_intervals_hold_the_truth(who: str, m: int) -> None:
    found = [one(who, m, seed) for seed in range(RUNS[m])]
    assert share_inside(found, truth(who, 1500)) >= least(RUNS[m])
    assert widths(found) <= WIDEST[m]


@pytest.mark.slow
@pytest.mark.parametrize("who", [*DRAWN, *SLOWLY])
@pytest.mark.parametrize("m", [8, 32])
def test_intervals_hold_the_truth_over_many_sets(who: str, m: int) -> None:
    """The draws of labels are skewed, and sigma is a root of them: there a few draws cover a little less."""
    found = [one(who, m, seed) for seed in range(400)]
    inside = share_inside(found, truth(who, 600 if who in SLOWLY else 8000))
    print(f"{who}, {m} draws: {inside:.3f}, {widths(found):.2f} times the true error")
    assert inside >= least(400) - 0.02
    assert widths(found) <= WIDEST[m]


KEYS = ["ggn_trace", "interpolation_sharpness", "matrix_normalized_sharpness", "normalized_sharpness"]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("probes", [4, 8])
def test_intervals_of_sketches_hold_the_exact_value(key: str, probes: int) -> None:
    net, x, y = network("mlp-tanh", n=10)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    exact, runs, found = fl.measure(fl.Lens(problem), key)[key], RUNS[probes], []
    for seed in range(runs):
        lens = fl.Lens(problem)
        lens.probes = probes
        found.append(fl.measure(lens, key, generator=torch.Generator().manual_seed(seed))[key])
    assert share_inside(found, exact) >= least(runs)
    assert widths(found) <= WIDEST[probes]
