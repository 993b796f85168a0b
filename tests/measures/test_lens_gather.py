"""Values per sample, gathered chunk by chunk."""

from __future__ import annotations

import pytest
import torch
from builders import chain, lens_on, normal

import flatlens as fl
from flatlens.measures.lens import by_weighting


def test_measures_with_and_without_the_loss_are_gathered_apart() -> None:
    mls, ggn = fl.measures.mls, fl.measures.ggn_trace
    assert list(by_weighting([mls, ggn])) == [(False, [mls]), (True, [ggn])]
    assert list(by_weighting([ggn])) == [(True, [ggn])]
    assert list(by_weighting([])) == []


@pytest.mark.parametrize("memory", ["2KB", "1GiB"])
def test_each_sample_has_its_own_value_in_the_order_of_the_data(memory: str) -> None:
    """||df/dtheta_i||_F^2 = N ||x_i||^2 of f = W x, however the samples are chunked."""
    x = normal(50, 3, seed=3)
    seen = []
    report = fl.measure(
        lens_on(chain([3, 2], 5, bias=False), x, memory=memory),
        ["interpolation_sharpness"],
        progress=lambda what, done, total: seen.append(done),
    )
    found = report["interpolation_sharpness"].samples
    assert found is not None
    assert torch.allclose(found, 2 * x.square().sum(1))
    assert (len(seen) > 2) == (memory == "2KB")
