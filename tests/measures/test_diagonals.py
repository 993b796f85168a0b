"""Diagonals of the Hessian and of the Gauss-Newton matrix, entry by entry, against double backward in float64."""

from __future__ import annotations

import pytest
import torch
from builders import normal, seeded
from literal_curvature import LOSSES, hessian_of, jacobian_of, output_derivatives, slices
from networks import NETWORKS, module_of, network
from torch import Tensor, nn

import flatlens as fl
from flatlens.errors import BadInput
from flatlens.measures import hessian_diagonal


def literal(net: nn.Module, loss: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """(diagonal of the Hessian, diagonal of the Gauss-Newton matrix), (P,) each, from whole matrices."""
    H = hessian_of(net, lambda f: LOSSES[loss](f, y).mean(), x)
    J = jacobian_of(net, x)
    _, C = output_derivatives(LOSSES[loss], net(x.clone()).detach(), y)
    return H.diagonal(), torch.einsum("nkp,nkj,njp->p", J, C, J) / len(x)


def flat(net: nn.Module, found: fl.Estimate, end: str = "") -> Tensor:
    """The arrays of an estimate as one vector, each in its parameter's shape."""
    for name, p in net.named_parameters():
        assert found.arrays[name + end].shape == p.shape
    return torch.cat([found.arrays[name + end].flatten() for name, _ in net.named_parameters()])


@pytest.mark.parametrize("loss", ["cross_entropy", "half_squared_error"])
@pytest.mark.parametrize("name", NETWORKS)
def test_diagonals_are_those_of_the_whole_matrices(name: str, loss: str) -> None:
    net, x, y = network(name, n=3)
    H, GGN = literal(net, loss, x, y)
    exact, gauss_newton = hessian_diagonal(exact=True), hessian_diagonal(of="gauss_newton")
    lens = fl.Lens(fl.Problem(net, loss, (x, y)))
    report = fl.measure(lens, [exact, gauss_newton, "hessian_trace(exact=True)", "ggn_trace"])
    size = float(GGN.abs().max())
    for one, truth, trace in ((exact, H, "hessian_trace(exact=True)"), (gauss_newton, GGN, "ggn_trace")):
        found = report[one.key]
        assert found.kind == "exact"
        assert torch.allclose(flat(net, found), truth, rtol=1e-8, atol=1e-11 * size)
        assert found.value == pytest.approx(float(truth.sum()), abs=1e-10 * size * len(truth))
        sums = {at: e.value for (key, at), e in report.items() if key == one.key and at is not None}
        traces = {at: e.value for (key, at), e in report.items() if key == trace and at is not None}
        assert sums == pytest.approx(traces, rel=1e-8, abs=1e-10 * size)


def words() -> tuple[nn.Module, Tensor, Tensor]:
    """Ids that repeat within a sample and never occur, a row of padding, a table of positions."""
    net = module_of(
        lambda net, ids: net.head(torch.tanh(net.mix(net.words(ids) + net.places.weight)).mean(1)),
        words=nn.Embedding(6, 4, padding_idx=0),
        places=nn.Embedding(3, 4),
        mix=(4, 4),
        head=(4, 3),
    ).double()
    return net, torch.tensor([[1, 1, 2], [0, 4, 1], [4, 4, 4]]), torch.tensor([0, 1, 2])


def test_rows_of_tables_have_their_own_entries() -> None:
    net, ids, y = words()
    H, GGN = literal(net, "cross_entropy", ids, y)
    found = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (ids, y))), "hessian_diagonal(of='gauss_newton')")
    assert torch.allclose(flat(net, found["hessian_diagonal(of='gauss_newton')"]), GGN, atol=1e-12)
    found = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (ids, y))), "hessian_diagonal(exact=True)")
    padding = torch.ones(len(H), dtype=torch.bool)
    padding[slices(net)["words.weight"].start :][:4] = False  # torch's own forward gives its gradient to no one
    assert torch.allclose(flat(net, found["hessian_diagonal(exact=True)"])[padding], H[padding], atol=1e-12)


def covered(lens_of, key: str, truth: Tensor, net: nn.Module, draws: int) -> tuple[float, float, float]:
    """Shares of draws in which the intervals hold: of entries with an error, of layers' sums, of the sum of all."""
    entries, layers, whole = [], [], []
    where = slices(net)
    for seed in range(draws):
        report = fl.measure(lens_of(), key, generator=seeded(seed))
        found = report[key]
        assert found.kind == "estimate"
        off, stderr = (flat(net, found) - truth).abs(), flat(net, found, ".stderr")
        exact = stderr == 0
        assert float(off[exact].max() if exact.any() else 0.0) < 1e-9
        entries.append((off <= 1.96 * stderr)[~exact].double().mean())
        for (name, at), e in report.items():
            mine = [where[p] for p in where if at and (p == at or p.startswith(f"{at}."))]
            if name == key and mine and e.kind == "estimate":
                layers.append(abs(e.value - sum(float(truth[one].sum()) for one in mine)) <= e.margin)
        whole.append(abs(found.value - float(truth.sum())) <= found.margin)
    return tuple(float(torch.tensor(rows, dtype=torch.float64).mean()) for rows in (entries, layers, whole))


@pytest.mark.parametrize("probes", [8, 16])
@pytest.mark.parametrize("name", ["mlp-tanh", "attention"])
def test_intervals_of_probes_hold_95_percent(name: str, probes: int) -> None:
    net, x, y = network(name, n=4)
    truth, _ = literal(net, "cross_entropy", x, y)
    lens = fl.Lens(fl.Problem(net, "cross_entropy", (x, y)))
    shares = covered(lambda: lens, f"hessian_diagonal(probes={probes})", truth, net, 100)
    assert min(shares) >= 0.94


def test_intervals_of_combinations_of_outputs_hold_95_percent() -> None:
    """With `outputs=16` the Gauss-Newton part is an estimate, too."""
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 40)).double()
    x, y = normal(6, 4, seed=1), torch.arange(6)
    truth, _ = literal(net, "cross_entropy", x, y)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    shares = covered(lambda: fl.Lens(problem, outputs=16), "hessian_diagonal", truth, net, 100)
    assert min(shares) >= 0.93


def test_without_memory_for_combinations_of_outputs_products_estimate_all_of_it() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 40)).double()
    x, y = normal(6, 4, seed=1), torch.arange(6)
    problem = fl.Problem(net, "cross_entropy", (x, y), memory=30_000)
    for key, truth in zip(("", "(of='gauss_newton')"), literal(net, "cross_entropy", x, y), strict=True):
        shares = covered(lambda: fl.Lens(problem, outputs=16), f"hessian_diagonal{key}", truth, net, 60)
        assert min(shares) >= 0.94


@pytest.mark.parametrize("of", ["hessian", "gauss_newton"])
def test_where_samples_are_coupled_all_of_it_is_estimated_or_exact(of: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double().train()
    x, y = normal(8, 3, seed=1), normal(8, 2, seed=2)
    problem = fl.Problem(net, "half_squared_error", (x, y), batchnorm="train", ghost_batch=8)
    operator = {"hessian": fl.curvature.Hessian, "gauss_newton": fl.curvature.GaussNewton}[of](problem)
    truth, key = operator.matrix().diagonal(), f"hessian_diagonal(of={of!r})" if of != "hessian" else "hessian_diagonal"
    report = fl.measure(fl.Lens(problem), key)
    found = report[key]  # 38 parameters: all directions
    assert found.kind == "exact"
    assert torch.allclose(flat(net, found), truth, atol=1e-12)
    assert sum(e.value for (_, at), e in report.items() if at is not None) == pytest.approx(found.value)


def test_bad_options_are_one_line() -> None:
    net, x, y = network("mlp-relu")
    lens = fl.Lens(fl.Problem(net, "cross_entropy", (x, y)))
    for option, said in (("of='fisher'", "'hessian', 'gauss_newton'"), ("probes=4", "at least 8")):
        with pytest.raises(BadInput, match=said):
            fl.measure(lens, f"hessian_diagonal({option})")
    with pytest.raises(BadInput, match="choose one"):
        fl.measure(lens, "hessian_diagonal(probes=8, exact=True)")
