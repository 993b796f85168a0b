"""Finite differences, the arbiter between flatlens and the brute force of drawn networks."""

from __future__ import annotations

import zlib

import pytest
import torch
from brute_force import Truth, gradients, literally, plainly, side_by_side
from drawn_networks import FAMILIES, LOSS_OF, Drawn, build, networks
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import Tensor

STEP = 1e-6


def truth_of(drawn: Drawn, plain: bool = False) -> Truth:
    net, x, y = build(drawn)
    net.eval()
    if plain:
        plainly(net)
    return Truth(net, x, y, LOSS_OF[drawn.loss])


@torch.no_grad()
def moved(truth: Truth, v: Tensor, step: float) -> None:
    for name, p in truth.parameters.items():
        p.add_(step * v[truth.slice(name)].reshape(p.shape))


def differences(truth: Truth, v: Tensor, of) -> Tensor:
    """Of something along v in the parameters, central."""
    moved(truth, v, STEP)
    above = of()
    moved(truth, v, -2 * STEP)
    below = of()
    moved(truth, v, STEP)
    return (above - below) / (2 * STEP)


def is_cut(drawn: Drawn) -> bool:
    """Whether autograd is told to leave something out: a detached branch or direction, a row that is never trained."""
    return drawn.entry == "padding" or bool({"blind", "jvp"} & dict(drawn.stages).keys())


def agree(found: Tensor, truth: Tensor) -> None:
    assert float((found - truth).norm()) <= 1e-6 * float(truth.norm()) + 1e-8


@pytest.mark.parametrize("family", FAMILIES)
def test_brute_force_agrees_with_finite_differences(family: str) -> None:
    cases = 0

    @seed(zlib.crc32(family.encode()))
    @settings(
        max_examples=6, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(networks(family))
    def every(drawn: Drawn) -> None:
        nonlocal cases
        if is_cut(drawn):
            return
        cases += 1
        truth = truth_of(drawn, plain=cases % 2 == 0)
        _, J, Jx, _ = truth.rows
        v = torch.randn(J.shape[2], generator=torch.Generator().manual_seed(0)).double()
        with torch.no_grad():
            agree(differences(truth, v, lambda: truth.net(truth.x.clone()).detach().flatten(1)), J @ v)

        def gradient() -> Tensor:
            with literally():
                return side_by_side(gradients(truth.risk(), list(truth.parameters.values())))

        Hv = truth.H @ v
        agree(differences(truth, v, gradient), Hv)
        assert torch.allclose(truth.H, truth.H.T, rtol=1e-8, atol=1e-9 * float(truth.H.abs().max()))
        if truth.x.is_floating_point():
            u = torch.randn(truth.x.shape, generator=torch.Generator().manual_seed(1)).double()
            with torch.no_grad():
                along = (truth.net(truth.x + STEP * u) - truth.net(truth.x - STEP * u)).flatten(1) / (2 * STEP)
            agree(along, torch.einsum("nkm,nm->nk", Jx, u.flatten(1)))

    every()
    assert cases >= 3
