"""Leading eigenspaces compared with dense eigenvectors: multiplicities, what is left, shares, overlaps, layers."""

from __future__ import annotations

import math

import pytest
import torch
from builders import mlp, normal, seeded, symmetric
from torch import Tensor, nn

import flatlens as fl
from flatlens.curvature import Hessian, eigenspace, leading
from flatlens.curvature.krylov import Krylov, unseen
from flatlens.curvature.leading import Wanted, with_multiplicity

torch.set_num_threads(1)


def head(outputs: int = 10) -> Hessian:
    """The last layer of a regression: I (x) mean_i x_i x_i^T, each eigenvalue once for each output."""
    problem = fl.Problem(nn.Linear(9, outputs).double(), "half_squared_error", (normal(40, 9), normal(40, outputs)))
    return Hessian(problem)


def dense(A: Tensor, k: int, by: str = "value") -> tuple[Tensor, Tensor]:
    """Return (values, vectors as rows) of the k leading eigenpairs, literally."""
    values, V = torch.linalg.eigh(A)
    order = (values.abs() if by == "size" else values).argsort(descending=True)[:k]
    return values[order], V.T[order]


@pytest.mark.parametrize(("k", "whole"), [(10, 10), (3, 10), (17, 20)])
def test_a_regression_head_has_every_eigenvalue_once_for_each_output(k: int, whole: int) -> None:
    operator = head()
    space = eigenspace(operator, k)
    assert operator.products == space.products
    A = operator.matrix()
    values, V = dense(A, whole + 1)
    assert space.converged
    assert len(space.values) == whole
    assert space.extended == (k < whole)
    assert ("extended" in str(space)) == (k < whole)
    assert torch.allclose(space.values, values[:whole], rtol=1e-6)
    off = space.vectors @ A - space.values[:, None] * space.vectors
    assert torch.allclose(off.norm(dim=1), space.residuals, atol=1e-12)
    assert values[whole] <= space.others < space.values[-1]
    assert space.gaps[-1] == pytest.approx(float(values[whole - 1] - values[whole]), rel=0.05)
    P, Q = space.vectors.T @ space.vectors, V[:whole].T @ V[:whole]
    assert float((P - Q).norm()) / 2**0.5 <= space.sine < 0.1


SPECTRA = {
    "simple": torch.cat([torch.linspace(5, 2, 7), torch.linspace(-1, 1, 60)]),
    "a multiplet in the middle": torch.tensor([9.0] + [5.0] * 6 + [3.0, 2.0] + [0.5] * 40),
    "both signs": torch.tensor([4.0] * 3 + [-4.0] * 2 + [-6.0] + [1.0] * 20 + [-0.5] * 20),
    "low rank": torch.tensor([3.0, 3.0, -2.0] + [0.0] * 40),
    "bulk": torch.linspace(0, 1, 150),
    "zero": torch.zeros(8),
    "identity": torch.ones(12),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("by", ["value", "size"])
@pytest.mark.parametrize("kind", SPECTRA)
def test_spectra_that_are_known(kind: str, by: str, dtype: torch.dtype) -> None:
    spectrum, asked, size = SPECTRA[kind].double(), 4, by == "size"
    A, counted = symmetric(spectrum).to(dtype), []
    start = normal(len(A), seed=3).to(dtype)
    found = with_multiplicity(
        lambda v: counted.append(v) or A @ v, start, Wanted(asked, 0, 1e-3, by_size=size, whole=True),
        most=500, room=200, random=1.0, generator=seeded(),
    )  # fmt: skip
    values, _ = dense(torch.diag(spectrum), len(spectrum), by)
    far = values.abs() if size else values
    last = float(far[asked - 1])
    wanted = (
        values[(far >= last - 1e-3 * abs(last)) & (values != 0)] if kind != "low rank" else values[: 3 if size else 2]
    )
    assert found.converged
    assert found.products == len(counted)
    assert torch.allclose(found.values.abs().sort().values, wanted.abs().sort().values, rtol=2e-3)
    others = far[len(wanted) :]
    assert len(others) == 0 or found.others >= float(others[0]) - 1e-4
    V = found.vectors.double()
    assert torch.allclose(V @ V.T, torch.eye(len(V)).double(), atol=1e-4)


@pytest.mark.parametrize("room", [14, 24])
def test_in_little_memory(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    held, lock = list[int](), Krylov.lock

    def locking(krylov: Krylov, keep: Tensor) -> None:
        lock(krylov, keep)
        held.append(len(krylov._left))

    monkeypatch.setattr(Krylov, "lock", locking)
    spectrum = torch.tensor([5.0] * 3 + [2.0] + [-1.0] * 35 + [0.2] * 30).double()
    A = symmetric(spectrum)
    wanted = Wanted(2, 0, 1e-6, whole=True)
    found = with_multiplicity(lambda v: A @ v, normal(69), wanted, most=900, room=room, generator=seeded())
    assert torch.allclose(found.values, spectrum[:3], rtol=1e-8)
    bulk = torch.cat([torch.ones(2), torch.linspace(0, 0.7, 98)]).double()
    found = with_multiplicity(lambda v: bulk * v, normal(100), wanted, most=900, room=room, generator=seeded())
    assert found.converged  # the proof takes more steps than there is room for
    assert torch.allclose(found.values, bulk[:2], rtol=1e-8)
    assert 0.7 <= found.others < 1
    assert max(held) <= room // 2 + 1  # the residuals of many searches take no more vectors than are locked
    assert room > 14 or len(held) > room // 2 + 1


def test_out_of_products() -> None:
    space = eigenspace(head(), 10, most=30)
    assert not space.converged
    assert space.products == 30
    assert "not converged" in str(space)


LEFT = {
    "bulk": torch.cat([torch.ones(1), torch.linspace(0, 0.9, 99)]),
    "Chebyshev's extrema": torch.cat([torch.ones(1), 0.8 * torch.cos(torch.arange(99) * torch.pi / 9).square()]),
}  # fmt: skip


@pytest.mark.parametrize("chance", [0.5, 0.1])
@pytest.mark.parametrize("kind", LEFT)
def test_no_step_of_a_search_misses_more_than_the_bound(kind: str, chance: float) -> None:
    """At any of its steps; and the bound is hardly above that of Kuczynski and Wozniakowski, Theorem 4.2."""
    spectrum, size, failed = LEFT[kind].double(), 100, 0
    for seed in range(100):
        search, misses = Krylov(lambda v: spectrum * v, normal(size, seed=seed), 10), []
        while not search.full and (search.steps == 0 or search.beta > 0):
            search.extend()
            T, beta = search.newest()
            theta = torch.linalg.eigvalsh(T)
            reach = unseen(theta, torch.cat([T.diagonal(1), T.new_tensor([beta])]), size, 1.0, chance)
            misses.append(float(theta[-1]) + reach < 1 - 1e-12)
            k = len(theta)
            theorem = (math.log(1.648 * size**0.5 / chance) / (2 * k - 1)) ** 2
            assert reach <= 1.2 * theorem or theorem > 0.5
        failed += any(misses)
    assert failed / 100 <= chance + 2 * (chance * (1 - chance) / 100) ** 0.5
    assert failed >= 1  # it is no empty bound


def test_what_is_called_complete_is_wrong_as_rarely_as_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second copy, hidden in 300 dimensions, at a chance that can be counted: the first later search has half."""
    monkeypatch.setattr(leading, "LEFT_CHANCE", 0.8)
    spectrum, wrong = torch.cat([torch.ones(2), torch.linspace(0, 0.8, 298)]).double(), 0
    for seed in range(50):
        start, wanted, drawn = normal(300, seed=seed), Wanted(1, 0, 1e-2, whole=True), seeded(1000 + seed)
        found = with_multiplicity(lambda v: spectrum * v, start, wanted, most=200, room=150, generator=drawn)
        wrong += found.converged and len(found.values) < 2
    assert 1 <= wrong <= 50 * 0.4


def checkpoints() -> tuple[nn.Module, list[Hessian]]:
    net, x, y = mlp((5, 6, 3), nn.Tanh, seed=1), normal(30, 5), torch.arange(30) % 3
    moved = mlp((5, 6, 3), nn.Tanh, seed=1)
    with torch.no_grad():
        for p in moved.parameters():
            p.add_(0.05 * normal(*p.shape, seed=p.numel()))
    return net, [Hessian(fl.Problem(one, "cross_entropy", (x, y))) for one in (net, moved)]


@pytest.mark.parametrize("by", ["value", "size"])
def test_shares_overlaps_and_layers(by: str) -> None:
    net, (one, two) = checkpoints()
    first, second = (eigenspace(operator, 5, by=by, slack=1e-3) for operator in (one, two))
    (_, V), (_, W) = (dense(operator.matrix(), 5, by) for operator in (one, two))
    truth, overlap = float((V @ W.T).square().sum()) / 5, first.overlap(second)
    assert len(first.values) == len(second.values) == 5
    assert overlap.value == pytest.approx(truth, abs=1e-3)
    assert abs(overlap.value - truth) <= overlap.margin + 1e-12
    assert first.overlap(first).value == pytest.approx(1)
    _, gradient = one.risk_and_gradient()
    g = one.space.flat(gradient)
    share = first.share(gradient)
    truth = float((V @ g).square().sum() / g.square().sum())
    assert share.value == pytest.approx(truth, abs=1e-3)
    assert abs(share.value - truth) <= share.margin + 1e-12
    assert first.share(g).value == share.value
    assert first.share(V[0]).value == pytest.approx(1, abs=1e-4)
    layers = first.by_layer()
    assert list(layers) == ["0", "2"]
    assert torch.allclose(sum(layers.values()), torch.ones(5).double())
    size = sum(p.numel() for p in net[0].parameters())
    assert torch.allclose(layers["0"], V[:, :size].square().sum(1), atol=1e-3)


def test_bad_input() -> None:
    operator = head(2)
    space = eigenspace(operator, 2)
    for call in (
        lambda: eigenspace(operator, 0),
        lambda: eigenspace(operator, 2, rtol=2),
        lambda: eigenspace(operator, 2, by="x"),
        lambda: eigenspace(operator, 2, slack=0),
        lambda: eigenspace(operator, 2, most=0),
        lambda: space.share(torch.ones(3)),
        lambda: space.share({"nothing": torch.ones(1)}),
        lambda: space.overlap(3),
    ):
        with pytest.raises(fl.errors.FlatlensError) as refused:
            call()
        assert "\n" not in str(refused.value)
    assert space.share(torch.zeros(operator.size)).kind == "undefined"
    assert len(eigenspace(operator, 50).values) == operator.size  # no eigenvalue is 0
