"""Largest eigenvalues by differences of gradients, beside a dense eigensolver; tests/perturbation/test_sharded.py has
them on two processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens.curvature import Hessian
from flatlens.curvature.optimiser_geometry import Preconditioner
from flatlens.errors import BadInput
from flatlens.measures.definition import Run
from flatlens.measures.leading_eigenvalues import sharded_top
from flatlens.perturbation.weights import By, ShardedHessian

DIFFERENCES: By = "central differences of gradients"


def problem() -> fl.Problem:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return fl.Problem(net, "cross_entropy", (torch.randn(20, 4).double(), torch.arange(20) % 3))


def run() -> Run:
    return Run(torch.Generator().manual_seed(0))


def test_the_ends_of_the_spectrum_are_those_of_the_dense_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    lens = fl.Lens(problem())
    wanted = torch.linalg.eigvalsh(Hessian(problem()).matrix()).flip(0)
    with monkeypatch.context() as without:
        without.setattr(ShardedHessian, "_tried", lambda H: DIFFERENCES)
        found = sharded_top(lens, run(), "sharpness", 1e-5, top_k=2, bottom_k=1)
    assert found.kind == "estimate"
    assert found.value == pytest.approx(float(wanted[0]), rel=1e-6)
    assert abs(found.value - float(wanted[0])) <= 1.96 * found.stderr + 1e-9
    assert found.arrays["eigenvalues"].tolist() == pytest.approx(wanted[[0, 1, -1]].tolist(), rel=1e-5)
    assert "central differences" in found.note
    exact = sharded_top(fl.Lens(problem()), run(), "sharpness", 1e-5)
    assert (exact.kind, exact.note.partition(";")[0]) == ("lower bound", "by double backward")
    assert exact.value == pytest.approx(float(wanted[0]), rel=1e-6)
    again = sharded_top(fl.Lens(problem(), after=lens), run(), "sharpness", 1e-5)
    assert again.value == pytest.approx(found.value, rel=1e-6)


def test_a_preconditioner_scales_both_sides() -> None:
    one = problem()
    P = {name: torch.rand_like(p.detach()) + 0.5 for name, p in one.model.named_parameters() if name != "0.bias"}
    decay = dict.fromkeys(P, 0.3)
    H = Hessian(one, list(P))
    flat = H.space.flat(P)
    dense = (H.matrix() + 0.3 * torch.eye(len(flat))) / flat.sqrt() / flat.sqrt()[:, None]
    found = sharded_top(fl.Lens(one), run(), "preconditioned_sharpness", 1e-5, P=Preconditioner(P, decay))
    assert found.value == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=1e-6)
    with pytest.raises(BadInput, match="moves none"):
        sharded_top(fl.Lens(one), run(), "preconditioned_sharpness", 1e-5, P=Preconditioner({}, {}))
