"""Spectral norms of features are those of a dense decomposition, whatever their size, shape and arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import flatlens as fl
from flatlens.curvature.features import feature_norms
from flatlens.grams import lay_out


def norm_of(x: Tensor, memory: str = "1GiB") -> float:
    """The norm of the features that the last of two layers reads, where the first leaves them as they are."""
    net = nn.Sequential(nn.Identity(), nn.Linear(x.shape[1], 2)).to(x.dtype)
    problem = fl.Problem(net, "half_squared_error", (x, torch.zeros(len(x), 2, dtype=x.dtype)), memory=memory)
    (norm,) = feature_norms(problem, problem.model, lay_out(problem, problem.model)).values()
    return norm.value


def drawn(n: int, width: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(n, width, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    return (scale * x).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "width"), [(300, 100), (700, 64), (700, 63), (300, 400), (90, 100), (1, 5)])
def test_of_noise(n: int, width: int, dtype: torch.dtype) -> None:
    x = drawn(n, width, dtype=dtype)
    assert norm_of(x) == pytest.approx(float(torch.linalg.matrix_norm(x.double(), 2)), rel=1e-12)


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e-15, 1e15, 1e22])
def test_of_very_small_and_very_large_features(scale: float) -> None:
    """Their squares leave the range of float32."""
    x = drawn(300, 100, scale)
    assert norm_of(x) == pytest.approx(float(torch.linalg.matrix_norm(x.double(), 2)), rel=1e-12)


def test_of_equal_singular_values_and_of_few_directions() -> None:
    orthogonal = torch.linalg.qr(drawn(300, 100, dtype=torch.float64)).Q.float()
    few = torch.cat([drawn(300, 3), torch.zeros(300, 97)], 1)
    assert norm_of(orthogonal) == pytest.approx(float(torch.linalg.matrix_norm(orthogonal.double(), 2)), rel=1e-9)
    for x in (few, torch.zeros(300, 100), torch.ones(300, 100)):
        assert norm_of(x) == pytest.approx(float(torch.linalg.matrix_norm(x.double(), 2)), rel=1e-12)


def test_it_is_the_same_where_features_are_computed_again_for_each_product() -> None:
    x = drawn(600, 100)
    assert norm_of(x, "100KB") == pytest.approx(norm_of(x), rel=1e-12)
