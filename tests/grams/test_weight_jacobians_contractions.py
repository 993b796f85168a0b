"""Contractions of float32 Jacobians: widening them piece by piece is as exact as widening them at once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import flatlens as fl
from flatlens.grams import lay_out, one_pass
from flatlens.grams.weight_jacobians import CACHE_BYTES, WeightMatrix, gram, quadratic, row_products

n, N, M = 150, 10, 512  # three pieces, the last one short


def jacobians(layout: str) -> Tensor:
    gen = torch.Generator().manual_seed(0)
    if layout == "samples first":
        return torch.randn(n, N, M, generator=gen)
    if layout == "outputs first":
        return torch.randn(N, n, M, generator=gen).transpose(0, 1)
    return torch.randn(N, M, generator=gen).expand(n, N, M)


@pytest.mark.parametrize("layout", ["samples first", "outputs first", "the same for all"])
def test_pieces_of_float32_are_widened_exactly(layout: str) -> None:
    assert 2 * CACHE_BYTES < n * N * M * 8 < 3 * CACHE_BYTES
    A = jacobians(layout)
    wide = A.double()
    assert torch.allclose(gram(A), wide @ wide.mT, rtol=1e-13, atol=1e-11)
    C = torch.randn(n, N, N, generator=torch.Generator().manual_seed(1)).double()
    assert torch.allclose(quadratic(C, A), torch.einsum("nkl,nkm,nlm->nm", C, wide, wide), rtol=1e-11, atol=1e-11)
    assert torch.allclose(quadratic(None, A), wide.square().sum(1), rtol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 1e200])  # the square of x, which nobody asked for, leaves the range
def test_products_with_a_vector_are_the_same_beside_a_gram_matrix(size: float, dtype: torch.dtype) -> None:
    A = jacobians("outputs first").to(dtype)
    x = size * torch.randn(n, M, generator=torch.Generator().manual_seed(1)).double()
    both, alone = row_products(A, ("gram", "squares", "along"), x=x), row_products(A, ("along",), x=x)
    assert torch.allclose(both["along"] / size, (A.double() @ (x / size)[..., None])[..., 0], rtol=1e-12, atol=1e-12)
    assert torch.allclose(both["along"] / size, alone["along"] / size, rtol=1e-12, atol=1e-12)
    assert torch.allclose(both["gram"], gram(A), rtol=1e-13, atol=1e-11)
    assert torch.allclose(both["squares"], A.double().square().sum(1), rtol=1e-13)


@pytest.mark.parametrize("shape", [(512, 784), (784, 512), (1, 5), (5, 1), (3, 3)])
@pytest.mark.parametrize("layout", ["samples first", "outputs first"])
def test_jacobians_at_the_input_of_a_dense_layer(layout: str, shape: tuple[int, int]) -> None:
    d, m = shape
    W = torch.randn(1, d, m, generator=torch.Generator().manual_seed(2)).double()
    J = torch.randn(7, N, d, generator=torch.Generator().manual_seed(3)).double()
    J = J if layout == "samples first" else J.transpose(0, 1).contiguous().transpose(0, 1)
    below = J @ W[0]
    assert torch.allclose(WeightMatrix(W).at_input(J), below, rtol=1e-12, atol=1e-12)
    assert torch.allclose(WeightMatrix(W).gram_at_input(J), below @ below.mT, rtol=1e-11, atol=1e-11)
    assert torch.allclose(WeightMatrix(W, rounded=True).gram_at_input(J), below @ below.mT, rtol=1e-11, atol=1e-11)


def test_a_pass_in_float32_is_that_in_float64_up_to_rounding_of_the_jacobians() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, N))
    x, y = torch.randn(300, 64), torch.randint(N, (300,))
    narrow, wide = (fl.Problem(each, "cross_entropy", (x, y)) for each in (net, copy.deepcopy(net).double()))
    chunks = [list(one_pass(p, p.model, lay_out(p, p.model))) for p in (narrow, wide)]
    assert len(chunks[0]) == 2  # of 256 and 44
    for ours, truth in zip(*chunks, strict=True):
        for layer, g in ours.layers.items():
            for what in ("G", "K", "R"):
                found, expected = getattr(g, what), getattr(truth.layers[layer], what)
                assert found.dtype == torch.float64
                off = (found - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
                assert float(off.max()) < 1e-5, (layer, what)
