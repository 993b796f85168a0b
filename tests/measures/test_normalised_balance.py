"""The minimum behind normalised sharpness, and its certificate, against pen and paper and a general optimiser."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from flatlens.errors import BadInput
from flatlens.measures.normalised import balance

ROUNDING = 1e-15


def positive(seed: int, d: int, m: int, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    """Two log-normal matrices."""
    g = torch.Generator().manual_seed(seed)
    h, w = (spread * torch.randn(2, d, m, generator=g, dtype=torch.float64)).exp()
    return h, w


def sparse(seed: int, d: int, m: int, density: float, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    """Two log-normal matrices with most entries 0, each at its own places."""
    kept = torch.rand(2, d, m, generator=torch.Generator().manual_seed(seed)) < density
    h, w = positive(seed, d, m, spread)
    return h * kept[0], w * kept[1]


def by_a_general_optimiser(h: Tensor, w: Tensor) -> float:
    """The smallest F that BFGS meets, in log u and log v."""
    H, W = h.numpy(), w.numpy()

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        t = np.clip(x[: len(H), None] + x[len(H) :], -300, 300)
        p, q = H * np.exp(t), W * np.exp(-t)
        return float((p + q).sum()), np.concatenate([(p - q).sum(1), (p - q).sum(0)])

    x = np.zeros(sum(H.shape))
    for _ in range(3):  # anew from where the line search gave up
        x = minimize(objective, x, jac=True, method="BFGS", options={"gtol": 1e-13, "maxiter": 5000}).x
    return objective(x)[0]


def at(h: Tensor, w: Tensor, u: Tensor, v: Tensor) -> float:
    t = u[:, None] * v
    return float((h * t + w / t).sum())


@pytest.mark.parametrize(("d", "m"), [(2, 2), (3, 7), (12, 5), (10, 10)])
@pytest.mark.parametrize("spread", [0.5, 2.0])
def test_it_is_the_minimum(d: int, m: int, spread: float) -> None:
    h, w = positive(d + m, d, m, spread)
    ours = balance(h, w)
    assert ours.value == pytest.approx(by_a_general_optimiser(h, w), rel=1e-10, abs=0)
    assert ours.value == pytest.approx(at(h, w, ours.u, ours.v), rel=1e-13)
    assert 0 < ours.gap <= 1e-12 * ours.value


@pytest.mark.parametrize("most", range(1, 9))
@pytest.mark.parametrize(("density", "spread"), [(1.0, 1.0), (1.0, 5.0), (0.3, 1.0), (0.15, 3.0)])
def test_the_gap_holds_wherever_it_stops(density: float, spread: float, most: int) -> None:
    for seed in range(5):
        h, w = sparse(seed, 8, 11, density, spread)
        exact, early = balance(h, w), balance(h, w, rtol=0.0, most=most)
        assert early.sweeps <= most
        assert exact.value - exact.gap <= early.value * (1 + ROUNDING)
        assert early.value - early.gap <= exact.value * (1 + ROUNDING)
        assert early.gap <= early.value


def test_the_gap_is_not_idle() -> None:
    """Where there is something to gain, the bound is of its size."""
    h, w = positive(1, 20, 30, 2.0)
    best = balance(h, w).value
    for most, far in ((1, 1e-3), (2, 1e-7)):
        early = balance(h, w, most=most)
        assert early.value - best > far * best
        assert early.gap < 1.1 * (early.value - best)


@pytest.mark.parametrize("seed", range(30))
def test_blocks_and_dead_units(seed: int) -> None:
    """Sparse matrices of all kinds: BFGS runs off to infinity, and its F comes down to ours."""
    h, w = sparse(seed, 4 + seed % 3, 6, 0.15 + 0.02 * seed)
    ours, other = balance(h, w), by_a_general_optimiser(h, w)
    assert ours.value - ours.gap <= other * (1 + ROUNDING)
    assert other == pytest.approx(ours.value, rel=1e-7, abs=1e-6)
    assert ours.gap <= 1e-12 * ours.value


def test_one_entry() -> None:
    ours = balance(torch.tensor([[3.0]]), torch.tensor([[12.0]]))
    assert ours.value == pytest.approx(12.0, rel=1e-15)
    assert float(ours.u * ours.v) == pytest.approx(2.0, rel=1e-15)


@pytest.mark.parametrize("shape", [(1, 9), (9, 1)])
def test_one_row_or_column(shape: tuple[int, int]) -> None:
    """Each entry has a factor of its own: sum 2 sqrt(h w)."""
    h, w = positive(3, *shape)
    assert balance(h, w).value == pytest.approx(float(2 * (h * w).sqrt().sum()), rel=1e-14)


def test_rank_one() -> None:
    """h = a b^T and w = c d^T, divided and multiplied by sqrt(a / c) sqrt(b / d)^T, are the same matrix."""
    a, b, c, d = (x.flatten() for x in positive(4, 2, 6)[0].reshape(4, 3, 1))
    value = balance(torch.outer(a, b), torch.outer(c, d)).value
    assert value == pytest.approx(float(2 * (a * c).sqrt().sum() * (b * d).sqrt().sum()), rel=1e-14)


def test_lambda_divides_the_value() -> None:
    h, w = positive(5, 6, 8)
    assert balance(h, w / 9).value == pytest.approx(balance(h, w).value / 3, rel=1e-12)


def test_rows_and_columns_may_be_rescaled() -> None:
    h, w = positive(6, 6, 8)
    r, c = 10 ** torch.linspace(-9, 9, 6).double()[:, None], 10 ** torch.linspace(7, -7, 8).double()
    plain, scaled, turned = balance(h, w), balance(h / r / c, w * r * c), balance(h.T, w.T)
    assert scaled.value == pytest.approx(plain.value, rel=2e-12)
    assert turned.value == pytest.approx(plain.value, rel=2e-12)
    assert balance(w, h).value == pytest.approx(plain.value, rel=2e-12)
    t = plain.u[:, None] * plain.v
    assert torch.allclose(scaled.u[:, None] * scaled.v, t * r * c, rtol=1e-5, atol=0)
    assert torch.allclose(turned.v[:, None] * turned.u, t, rtol=1e-5, atol=0)


def test_dead_units_contribute_nothing() -> None:
    h, w = positive(7, 6, 8)
    alive = balance(h[:4, :5], w[:4, :5]).value
    h[4], w[5], h[:, 5], w[:, 6], h[:, 7], w[:, 7] = 0, 0, 0, 0, 0, 0
    ours = balance(h, w)
    assert ours.value == pytest.approx(alive, rel=2e-12)
    assert ours.gap <= 1e-12 * ours.value
    assert ours.u.isfinite().all()
    assert ours.v.isfinite().all()


def test_a_unit_that_dies_with_another() -> None:
    """The last row has no h; without it the last column has no w; without that the row before has no h: 0 at last."""
    h, w = torch.diag(torch.ones(4), 1), torch.eye(5)
    assert balance(h, w).value == 0.0
    h[4, 0] = 1.0  # the way back: a cycle of ten edges, all of them 1
    assert balance(h, w).value == pytest.approx(10.0, rel=1e-12)


def test_block_triangular() -> None:
    """The entry between two blocks costs nothing, unless one leads back: then 4 sqrt(1 + sqrt(back))."""
    for back in (0.0, 1e-2, 1e-10, 1e-20, 1e-100):
        ours = balance(torch.tensor([[1, 1], [back, 1]], dtype=torch.float64), torch.eye(2))
        above = ours.value - 4 * math.sqrt(1 + math.sqrt(back))
        assert -4 * ROUNDING <= above <= ours.gap + 4 * ROUNDING
        assert ours.gap <= 1e-12 * ours.value
    one_way = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    assert balance(one_way, one_way.T).value == pytest.approx(4.0, rel=1e-15)


@pytest.mark.parametrize(("n", "back"), [(10, 1e-10), (10, 1e-40), (50, 1e-200)])
def test_a_long_way_round(n: int, back: float) -> None:
    """A chain of blocks, each leading to the next by 1, the last to the first by `back`."""
    h = torch.eye(n).double() + torch.diag(torch.ones(n - 1), 1)
    h[-1, 0] = back
    ours = balance(h, torch.eye(n).double())
    truth = 2 * n * math.sqrt(1 + back ** (1 / n))
    assert -4 * ROUNDING * truth <= ours.value - truth <= ours.gap + 4 * ROUNDING * truth
    assert ours.gap <= 1e-12 * truth


def test_nothing_to_balance() -> None:
    h, w = positive(8, 3, 4)
    for a, b in ((0 * h, 0 * w), (h, 0 * w), (0 * h, w), (h[:0], w[:0]), (h[:, :0], w[:, :0])):
        ours = balance(a, b)
        assert (ours.value, ours.gap) == (0.0, 0.0)
        assert (len(ours.u), len(ours.v)) == a.shape


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("density", [0.1, 0.4, 1.0])
def test_sixty_decades(seed: int, density: float) -> None:
    h, w = sparse(seed, 9, 14, density, spread=20.0)
    h, w = 1e-30 * h, 1e10 * w
    ours = balance(h, w)
    assert math.isfinite(ours.value)
    assert ours.gap <= 1e-12 * ours.value
    longer = balance(1e30 * h, 1e-10 * w, rtol=0.0)
    assert ours.value == pytest.approx(1e-10 * longer.value, rel=2e-12)


@pytest.mark.parametrize("link", [1e-6, 1e-12, 1e-18, 1e-30])
def test_weakly_linked_blocks(link: float) -> None:
    """Two dense blocks that hang together one way by `link`: rounding hides the direction between them."""
    h, w = positive(9, 30, 40, 0.5)
    h[15:, :20] *= link
    w[:15, 20:] *= link
    w[15:, :20] *= link**2
    ours = balance(h, w)
    assert ours.gap <= 1e-12 * ours.value
    apart = balance(h[:15, :20], w[:15, :20]).value + balance(h[15:, 20:], w[15:, 20:]).value
    assert apart * (1 - 1e-12) <= ours.value <= apart * (1 + 2 * math.sqrt(link) + 2e-12)


def test_a_layer_of_an_mlp_takes_few_sweeps() -> None:
    h, w = positive(10, 400, 784, 3.0)
    ours = balance(h, w)
    assert ours.gap <= 1e-12 * ours.value
    assert ours.sweeps < 50


def test_conjugate_gradients_do_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    h, w = positive(11, 40, 60, 3.0)
    direct = balance(h, w)
    monkeypatch.setattr("flatlens.measures.normalised.DIRECT", 0)
    ours = balance(h, w)
    assert ours.gap <= 1e-12 * ours.value
    assert ours.value == pytest.approx(direct.value, rel=2e-12)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_what_it_refuses(wrong: float) -> None:
    good, bad = torch.ones(2, 2), torch.tensor([[1.0, wrong], [1.0, 1.0]])
    with pytest.raises(BadInput, match="finite and not negative"):
        balance(good, bad)
    with pytest.raises(BadInput, match="one shape"):
        balance(good, torch.ones(2, 3))


def test_nothing_to_balance_takes_no_sweep() -> None:
    """Blocks without entries: disjoint supports, a lone live row, no rows at all."""
    for h, w in (
        (torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])),
        (torch.zeros(0, 0), torch.zeros(0, 0)),
        (torch.zeros(3, 2), torch.ones(3, 2)),
    ):
        found = balance(h, w)
        assert (found.value, found.gap, found.sweeps) == (0.0, 0.0, 0)
