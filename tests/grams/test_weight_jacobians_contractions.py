"""Contractions of float32 Jacobians: widening them piece by piece is as exact as widening them at once."""

from __future__ import annotations

import copy

import pytest
import torch
from networks import NETWORKS, network
from torch import Tensor, nn

import flatlens as fl
from flatlens.grams import lay_out, one_pass
from flatlens.grams.weight_jacobians import (
    CACHE_BYTES,
    FEW_OUTPUTS,
    Roots,
    SharedJacobian,
    WeightMatrix,
    gram,
    quadratic,
    row_products,
)

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


def saddle(f: Tensor, y: Tensor) -> Tensor:
    """A loss that curves upwards in the first output, downwards in the others."""
    return f[:, 0].square() - f[:, 1:].sin().square().sum(1)


def traces(problem: fl.Problem, needs: set[str]) -> dict[tuple[str, str], Tensor]:
    """tr(C K) and tr(C R) at all places: of Gram matrices where these are needed, too."""
    found: dict[tuple[str, str], list[Tensor]] = {}
    for chunk in one_pass(problem, problem.model, lay_out(problem, problem.model), needs=needs):
        for at, g in (chunk.layers | chunk.others).items():
            for what in ("K", "R") if at in chunk.layers and g.has_derivative else ("K",):
                if g.weight is not None:
                    trace = (g.C * getattr(g, what)).sum((1, 2)) if what in needs else getattr(g, "C" + what)
                    found.setdefault((at, what), []).append(trace)
    return {at: torch.cat(parts) for at, parts in found.items()}


@pytest.fixture(params=["cheapest", "pairs"])
def by_pairs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths by the cheapest way, and from pairs of positions, which few positions do not pay for."""
    if request.param == "pairs":
        own = SharedJacobian.cheapest.func  # type: ignore[attr-defined]
        monkeypatch.setattr(SharedJacobian, "cheapest", property(lambda its: own(its) | {"lengths": "pairs"}))


@pytest.mark.usefixtures("by_pairs")
@pytest.mark.parametrize("also", [set(), {"G"}, {"diagonal", "adaptive"}, {"columns"}])
@pytest.mark.parametrize("loss", ["cross_entropy", "mse", saddle])
@pytest.mark.parametrize("name", NETWORKS)
def test_traces_without_gram_matrices_are_those_of_gram_matrices(name: str, loss: object, also: set[str]) -> None:
    net, x, y = network(name)
    problem = fl.Problem(net, loss, (x, y.double()[:, None].expand(-1, 3) if loss == "mse" else y))
    truth, ours = traces(problem, {"C", "K", "R"}), traces(problem, {"C", "CK", "CR"} | also)
    assert ours.keys() == truth.keys()
    for at, expected in truth.items():
        assert torch.allclose(ours[at], expected, rtol=1e-10, atol=1e-14), at


@pytest.mark.usefixtures("by_pairs")
@pytest.mark.parametrize("outputs", [2, FEW_OUTPUTS + 1])
def test_traces_in_float32_have_the_digits_of_those_of_gram_matrices(outputs: int) -> None:
    torch.manual_seed(0)
    convolutions = nn.Conv2d(2, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 3, groups=2)
    net = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, outputs))
    data = torch.randn(40, 2, 8, 8), torch.randint(outputs, (40,))
    narrow, wide = (fl.Problem(each, "cross_entropy", data) for each in (net, copy.deepcopy(net).double()))
    truth = traces(wide, {"C", "K", "R"})
    before, ours = traces(narrow, {"C", "K", "R"}), traces(narrow, {"C", "CK", "CR"})
    for at, expected in truth.items():
        off, was = ((found[at] / expected - 1).norm() for found in (ours, before))
        assert off < 1.5 * was + 1e-8, at


@pytest.mark.usefixtures("by_pairs")
@pytest.mark.parametrize("unit", [1e-30, 1e-15, 1.0, 1e15])
@pytest.mark.parametrize("also", [set(), {"adaptive"}])
@pytest.mark.parametrize("P", [2, 20])
def test_traces_in_float32_keep_their_digits_in_any_unit(P: int, also: set[str], unit: float) -> None:
    """Jacobians, weights and curvatures whose squares leave float32; one sample's C is negligible, another's is 0."""
    gen = torch.Generator().manual_seed(P)
    J, phi = unit * torch.randn(3, 2, 1, 8, P, generator=gen), torch.randn(3, 1, 5, P, generator=gen)
    weight = WeightMatrix(torch.randn(1, 8, 5, generator=gen).double() / unit)
    scale = torch.tensor([1.0, 1e-40, 0.0]).double()
    C = scale[:, None, None] * torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).double()
    wanted = frozenset({"CK", "CR", *also})
    own = SharedJacobian(J, lambda piece: phi[piece], weight, C, wanted, Roots(convex=True))
    M = torch.einsum("nkgdp,ngmp->nkdm", J.double(), phi.double())
    mixed = (M[:, 0] - M[:, 1]) * scale.sqrt()[:, None, None]
    assert torch.allclose(own.trace(), mixed.square().sum((1, 2)), rtol=1e-5, atol=0)
    assert torch.allclose(own.relative_trace(), (weight.W[0].T @ mixed).square().sum((1, 2)), rtol=1e-5, atol=0)


@pytest.mark.usefixtures("by_pairs")
@pytest.mark.parametrize("like", [0.0, 1e-1, 1e-2, 1e-4])
def test_traces_in_float32_keep_their_digits_where_positions_cancel(like: float) -> None:
    """Features that are almost the same at all positions, and derivatives that add up to 0 over them."""
    gen = torch.Generator().manual_seed(0)
    J, phi = torch.randn(4, 3, 1, 8, 40, generator=gen), torch.randn(4, 1, 6, 40, generator=gen)
    if like:
        J, phi = J - J.mean(4, keepdim=True), phi.mean(3, keepdim=True) * 10 + like * phi
    C = torch.eye(3).double().expand(4, 3, 3).contiguous()
    weight = WeightMatrix(torch.randn(1, 8, 6, generator=gen).double())
    own = SharedJacobian(J, lambda piece: phi[piece], weight, C, frozenset({"CK", "CR"}), Roots(convex=True))
    M = torch.einsum("nkgdp,ngmp->nkdm", J.double(), phi.double())
    digits = 1e-5 if like >= 1e-2 or not like else 1e-2  # of M itself: its sum over positions cancels
    assert torch.allclose(own.trace(), M.square().sum((1, 2, 3)), rtol=digits, atol=0)
    assert torch.allclose(own.relative_trace(), (weight.W[0].T @ M).square().sum((1, 2, 3)), rtol=digits, atol=0)
