"""Upper bounds of how far F is above its infimum, at points where the infimum is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flatlens.measures.normalised import balance, gap_at_rest

ROUNDING = 1e-15


def drawn(seed: int, density: float, spread: float) -> tuple[Tensor, Tensor]:
    """Two log-normal matrices in one block, with some entries 0."""
    g = torch.Generator().manual_seed(seed)
    h, w = (spread * torch.randn(2, 20, 33, generator=g, dtype=torch.float64)).exp()
    there, back = torch.rand(2, 20, 33, generator=g) < density
    there[0] = back[0] = True
    there[:, 0] = back[:, 0] = True
    return h * there, w * back


CASES = pytest.mark.parametrize(("density", "spread"), [(1.0, 0.5), (1.0, 3.0), (0.4, 1.0)])


@CASES
@pytest.mark.parametrize("rtol", [1e-1, 1e-3, 1e-6, 1e-9])
def test_half_steps_alone_are_certified(density: float, spread: float, rtol: float) -> None:
    for seed in range(10):
        h, w = drawn(seed, density, spread)
        best, early = balance(h, w), balance(h, w, rtol=rtol)
        assert early.gap <= rtol * early.value
        assert best.value - best.gap <= early.value * (1 + ROUNDING)
        assert early.value - early.gap <= best.value * (1 + ROUNDING)


@CASES
@pytest.mark.parametrize("off", [1e-8, 1e-5, 1e-3])
def test_it_holds_wherever_it_is_asked(density: float, spread: float, off: float) -> None:
    """F exceeds its minimum by the square of the distance, the bound is of the order of the distance."""
    for seed in range(10):
        h, w = drawn(seed, density, spread)
        best = balance(h, w)
        g = torch.Generator().manual_seed(seed)
        u, v = (x * (off * torch.randn(len(x), generator=g, dtype=x.dtype)).exp() for x in (best.u, best.v))
        t = u[:, None] * v
        truth = float((h * t + w / t).sum())
        value, gap = gap_at_rest(h, w, u, v, torch.tensor([0]))
        assert value == pytest.approx(truth, rel=1e-13)
        assert truth - best.value <= gap * truth
        assert gap <= 100 * (off + 1e-6)  # the minimum itself is known to a distance of 1e-6


def test_a_row_out_of_reach_is_not_certified() -> None:
    """A row that no path leads to has no bound, so that F itself is the gap."""
    h, w = torch.eye(2).double(), 2 * torch.eye(2).double()
    assert gap_at_rest(h, w, *torch.ones(2, 2).double(), torch.tensor([0]))[1] == 1.0
