"""Arrangements of samples, and the tests that find every pair of samples that affect each other."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from networks import module_of
from torch import Tensor, nn

import flatlens as fl
from flatlens.errors import BadModel
from flatlens.grams.plan import CANDIDATES, FRONT, Rows, coupled_places, independent_rows, splits


@pytest.mark.parametrize("n", [1, 2, 3, 8, 13])
def test_every_pair_of_samples_is_split(n: int) -> None:
    masks = list(splits(n))
    for i, j in permutations(range(n), 2):
        assert any(mask[i] and not mask[j] for mask in masks)


@pytest.mark.parametrize("rows", CANDIDATES)
def test_rows_are_put_side_by_side(rows: Rows) -> None:
    """Each entry holds the number of its sample, from 1: 3 samples with 2 rows each."""
    owner = torch.arange(1, 4).repeat_interleave(2) if rows.order == "outer" else torch.arange(1, 4).repeat(2)
    tensor = owner.reshape(6, 1).expand(6, 6).movedim(0, rows.axis)
    assert rows.fit(tensor.shape, 3)
    found = rows.by_sample(tensor, 3)
    assert found.shape == (3, 2, 6)
    assert torch.equal(found, torch.arange(1, 4).reshape(3, 1, 1).expand(3, 2, 6))


def test_the_one_arrangement_that_is_true_is_left() -> None:
    x = torch.randn(4, 5, 3, dtype=torch.float64, requires_grad=True)  # tokens first: 5 samples
    weight = torch.randn(4, 3, 2, dtype=torch.float64)
    f = torch.einsum("tnd,tdk->nk", x, weight)
    fitting = [rows for rows in CANDIDATES if rows.fit(x.shape, 5)]
    left = independent_rows(f, {"x": x}, {"x": fitting}, torch.Generator().manual_seed(0))
    assert left == {"x": [Rows(1), Rows(1, "inner")]}  # one row of each sample: both say the same
    assert coupled_places(f, {"x": x}, {"x": Rows(1)}, torch.Generator().manual_seed(0)) == []


def test_one_pair_that_meets_is_found() -> None:
    x = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    f = x.sin()
    f = torch.cat([f[:7], (f[7] + 1e-6 * f[2])[None], f[8:]])
    generator = torch.Generator().manual_seed(0)
    assert independent_rows(f, {"x": x}, {"x": [FRONT]}, generator) == {"x": []}
    assert coupled_places(f, {"x": x}, {"x": FRONT}, generator) == ["x"]


def rarely_coupled() -> nn.Module:
    """A network whose samples affect each other only on batches with an outlier, and only in derivatives."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        h = torch.relu(net.a(x))
        other = 0.1 * h.roll(1, 0)
        return net.o(h + other - other.detach() if bool((x > 5).any()) else h)

    return module_of(forward, a=(4, 6), o=(6, 40))


@pytest.mark.parametrize("outputs", ["exact", 4])
def test_samples_that_meet_on_a_late_batch_are_refused(outputs: str | int) -> None:
    x = torch.randn(600, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[400] = 9
    problem = fl.Problem(rarely_coupled().double(), "cross_entropy", (x, torch.arange(600) % 40))
    for measure in ("interpolation_sharpness", "mls"):
        with pytest.raises(BadModel, match="change with the other samples"):
            fl.measure(fl.Lens(problem, outputs=outputs), measure)
