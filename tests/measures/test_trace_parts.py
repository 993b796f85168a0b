"""How many probes a trace takes, and what they say."""

from __future__ import annotations

import pytest
import torch
from builders import chain, lens_on, normal
from linear import measured
from torch import Tensor, nn

import flatlens as fl
from flatlens.errors import BadInput


def test_probes_of_few_directions_are_all_of_them() -> None:
    """Two probes of a weight and a bias agree by chance half of the time."""
    net, x = chain([1, 1], 2), normal(3, 1, seed=1)
    lens = lens_on(nn.Sequential(*net, nn.Tanh()), x)
    for key in ("hessian_trace", "adaptive_sharpness"):
        found = fl.measure(lens, [f"{key}(probes=2)", f"{key}(exact=True)"])
        few, every = found[f"{key}(probes=2)"], found[f"{key}(exact=True)"]
        assert (few.kind, few.value, few.products) == ("exact", every.value, 2)


class TwoOfMany(nn.Module):
    """x a b, with squares of many more parameters: signs give one of two values of v^T H v."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((70,), 0.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w[0] * self.w[1] + self.w[2:].square().sum()


def test_probes_that_agree_by_chance_are_no_exact_ones() -> None:
    x, y = normal(3, 1, seed=1), normal(3, 1, seed=2)
    lens = fl.Lens(fl.Problem(TwoOfMany(), "half_squared_error", (x, y)))
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
