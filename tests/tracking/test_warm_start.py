"""A search that begins with what the last one found: how much it saves, and that it is never led astray."""

from __future__ import annotations

import pytest
import torch
from builders import normal, symmetric
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from tracked_run import Run

import flatlens as fl
from flatlens.curvature import lanczos
from flatlens.curvature.krylov import Remembered, recall
from flatlens.errors import BadInput


def remembered(A: Tensor, keep: int = 10, **options: object) -> Remembered:
    found = lanczos(lambda v: A @ v, normal(len(A), seed=7), keep=keep, **options).remembered
    assert found is not None
    return found


def search(A: Tensor, known: Remembered, **options: object):
    """With its promises checked."""
    counted = 0

    def apply(v: Tensor) -> Tensor:
        nonlocal counted
        counted += 1
        return A @ v

    pairs = recall(apply, known, normal(len(A), seed=8), **options)
    truly = (pairs.vectors @ A - pairs.values[:, None] * pairs.vectors).norm(dim=1)
    scale = float(torch.linalg.matrix_norm(A, 2)) or 1.0
    assert pairs.products == counted
    assert torch.allclose(truly, pairs.residuals, rtol=1e-5, atol=1e-12 * scale * len(A))
    identity = torch.eye(len(pairs.values), dtype=torch.float64)
    assert torch.allclose(pairs.vectors @ pairs.vectors.T, identity, atol=1e-9)
    return pairs


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(20, 60), st.integers(0, 10**6), st.integers(1, 3), st.floats(0.0, 2.0))
def test_any_matrix_remembered_well_or_badly(size: int, seed: int, top: int, change: float) -> None:
    """However much has changed since, the eigenvalues are those of today."""
    A = symmetric(normal(size, seed=seed), seed + 1)
    B = A + change * symmetric(normal(size, seed=seed + 2), seed + 3)
    pairs = search(B, remembered(A, top_k=top), top_k=top, rtol=1e-9)
    truth = torch.linalg.eigvalsh(B)
    assert torch.allclose(pairs.values, truth.flip(0)[:top], atol=1e-7)
    assert pairs.converged


def decaying(size: int = 300) -> Tensor:
    return torch.cat([torch.tensor([10.0, 8.0, 5.0, 3.0]), torch.linspace(1, -0.3, size - 4)]).double()


def test_nothing_has_changed() -> None:
    A = symmetric(decaying())
    pairs = search(A, remembered(A, rtol=1e-3))
    assert pairs.largest == pytest.approx(10, rel=1e-5)
    assert pairs.products <= 3


def test_with_nothing_remembered_it_is_lanczos() -> None:
    A, start = symmetric(decaying()), normal(300, seed=8)
    nothing = Remembered(torch.zeros(1, dtype=torch.float64), (start / start.norm())[None])
    cold = lanczos(lambda v: A @ v, start, rtol=1e-6)
    pairs = search(A, nothing, rtol=1e-6)
    assert pairs.products == cold.products
    assert pairs.largest == pytest.approx(cold.largest, rel=1e-12)


@pytest.mark.parametrize("second", [0, 1, 3, 8])
def test_another_eigenvector_has_taken_the_lead(second: int) -> None:
    """Eigenvectors are exactly as they were: the old leader's residual is zero, and it is the wrong one."""
    spectrum = decaying()
    known, ahead = remembered(symmetric(spectrum), rtol=1e-6), spectrum.clone()
    ahead[second] = 14.0
    pairs = search(symmetric(ahead), known)
    assert pairs.largest == pytest.approx(14, rel=1e-4)
    assert pairs.products <= 12


def test_one_that_never_led_has_taken_the_lead() -> None:
    """Nothing of it was remembered: a little of everything is in the first direction."""
    spectrum = decaying()
    known = remembered(symmetric(spectrum), keep=3, rtol=1e-6)
    for at in (50, 150, 299):
        ahead = spectrum.clone()
        ahead[at] = 25.0
        assert search(symmetric(ahead), known).largest == pytest.approx(25, rel=1e-4)


def test_blocks_that_do_not_touch_each_other() -> None:
    """The old leaders all lie in one block; the other has overtaken them."""
    rest = torch.linspace(0, 1, 100).double()
    left, right = (
        symmetric(torch.cat([torch.tensor([9.0, 8.0, 7.0]), rest])),
        symmetric(torch.cat([torch.tensor([20.0]), rest])),
    )
    known = remembered(torch.block_diag(left, 0.01 * right), rtol=1e-6, keep=3)
    assert search(torch.block_diag(left, right), known).largest == pytest.approx(20, rel=1e-4)


def test_degenerate_matrices() -> None:
    A = symmetric(decaying(80))
    for matrix in (torch.zeros_like(A), torch.eye(80).double(), -torch.eye(80).double(), torch.outer(A[0], A[0])):
        pairs = search(matrix, remembered(A), top_k=2)
        truth = torch.linalg.eigvalsh(matrix)
        assert pairs.largest == pytest.approx(float(truth[-1]), rel=1e-5, abs=1e-8)
        assert pairs.converged
    zero = Remembered(torch.zeros(3, dtype=torch.float64), torch.eye(3, 80, dtype=torch.float64))
    assert search(A, zero).largest == pytest.approx(10, rel=1e-4)


def test_it_stops_where_it_is_told() -> None:
    A = symmetric(torch.linspace(0, 1, 200))
    pairs = search(A, remembered(symmetric(decaying(200))), rtol=1e-9, most=7)
    assert pairs.products == 7
    assert not pairs.converged
    with pytest.raises(ArithmeticError, match="overflows"):
        recall(lambda v: v * torch.inf, remembered(A), normal(200))


@pytest.mark.parametrize("name", ["sharpness", "ggn_norm"])
def test_half_the_products_along_a_run(name: str) -> None:
    """Followed through training: the eigenvalue to the same residual, at half the products or fewer."""
    torch.manual_seed(0)
    x = torch.randn(600, 20)
    y = (x @ torch.randn(20, 5)).argmax(1)
    net = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 5))
    problem = fl.Problem(net, "cross_entropy", (x, y))
    optimiser = torch.optim.SGD(net.parameters(), lr=0.2)
    tracker = fl.Tracker(problem, name, every=10, live=False)
    warm, cold = [], []
    for step in range(301):
        if (report := tracker.step(optimiser=optimiser)) is not None and step:
            (alone,) = fl.measure(fl.Lens(problem), f"{name}(rtol=0.001)").values()  # as a tracker does
            warm.append(report[name].products)
            cold.append(alone.products)
            for estimate in (report[name], alone):
                assert float(estimate.arrays["residuals"][0]) <= 1e-3 * estimate.value
            assert report[name].value == pytest.approx(alone.value, rel=1e-4)
        batch = torch.randint(600, (64,))
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
        optimiser.step()
    assert sum(warm) <= sum(cold) / 2, (sum(warm), sum(cold))
    assert sorted(warm)[15] <= sorted(cold)[15] / 2


def test_layers_and_both_ends_begin_warm_too() -> None:
    run = Run()
    keys = ["sharpness(top_k=3, bottom_k=2)", "sharpness(layers=True)", "layer_sharpness"]
    tracker = fl.Tracker(run.problem, keys, every=1, live=False)
    first = tracker.step()
    for _ in run.steps(1):
        second = tracker.step()
    alone = fl.measure(fl.Lens(run.problem), keys)
    for key in second:
        assert second[key].value == pytest.approx(alone[key].value, rel=2e-3), key
    assert second[keys[0]].products <= 1.1 * first[keys[0]].products  # the proof that none is missed begins anew
    ends = second[keys[0]].arrays["eigenvalues"]
    assert torch.allclose(ends, alone[keys[0]].arrays["eigenvalues"], rtol=1e-2, atol=1e-2 * float(ends[0]))


def test_a_lens_takes_what_another_remembered() -> None:
    run = Run()
    first = fl.Lens(run.problem)
    cold = fl.measure(first, "sharpness")["sharpness"]
    for left in (first, first.remembered):
        again = fl.measure(fl.Lens(run.problem, after=left), "sharpness")["sharpness"]
        assert again.products < cold.products
    (pairs,) = first.remembered.values()
    assert pairs.vectors.shape == (len(pairs.values), 308)
    for wrong in (3, {"sharpness": pairs.vectors}):
        with pytest.raises(BadInput, match=r"Lens\(after=...\): expected an earlier Lens \(or its .remembered\)"):
            fl.Lens(run.problem, after=wrong)


def test_little_memory_keeps_fewer_vectors() -> None:
    run = Run()
    problem = fl.Problem(run.net, "cross_entropy", (run.x, run.y), memory=16 * 4 * 308 * 4)
    lens = fl.Lens(problem)
    fl.measure(lens, "sharpness")
    assert len(lens.remembered["sharpness", None].values) == 4
