"""Measures of steps where a network computes in half precision: their intervals hold the values in float64."""

from __future__ import annotations

import math
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
import torch
from benchmarks import precision
from torch import nn

import flatlens as fl
from flatlens.perturbation.autograd_check import coarsest_inside
from flatlens.perturbation.nudges import Nudged, loss_scaled, nudges, rounds
from flatlens.perturbation.weights import Landscape, next_update


@pytest.mark.parametrize("name", precision.CASES)
@pytest.mark.parametrize("way", precision.WAYS)
@pytest.mark.parametrize("short", precision.SHORT)
def test_intervals_hold_the_value_in_float64(
    name: str, way: str, short: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m benchmarks.precision` counts at 17 steps of each training."""
    monkeypatch.setattr(precision, "MOMENTS", (11,))
    rows = {row["measure"]: row for row in precision.case(name, way, short)}
    assert list(rows) == list(precision.MEASURES)
    assert all(row["holds"] for row in rows.values()), rows
    told = [f"computes in {str(short).removeprefix('torch.')}" in row["note"] or "rounding inside" in row["note"]
            for row in rows.values()]  # fmt: skip
    assert any(told) == (way == "function")


def confident() -> tuple[precision.Net, tuple[torch.Tensor, torch.Tensor]]:
    """Return a network and samples that it classifies with margins of 14: slopes of 1e-8."""
    net, pool = precision.CASES["conv"].build(), torch.randn(6000, 36, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        top = net(pool).topk(2, 1)
        gaps = top.values[:, 0] - top.values[:, 1]
        rows = gaps.argsort(descending=True)[: precision.SAMPLES]
        net.head.weight *= 14 / gaps[rows].mean()
    return net, (pool[rows], top.indices[rows, 0])


def cool() -> tuple[precision.Net, tuple[torch.Tensor, torch.Tensor]]:
    """Return a network whose outputs are divided by a temperature outside: slopes of 1e-6 inside."""
    net = precision.CASES["conv"].build()
    with torch.no_grad():
        net.head.weight *= 1e4
    run = net.run
    net.run = lambda own, x: run(own, x) * 1e-4
    return net, precision.data()


@pytest.mark.parametrize("made", [confident, cool])
def test_what_underflows_in_float16_is_scaled(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    base, data = made()
    monkeypatch.setattr(precision, "data", lambda: data)
    net = precision.in_way(base, "function", torch.float16)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    problem, truth = fl.Problem(net, "cross_entropy", data), precision.Truth(net, optimiser)
    # without a scale the gradient is wrong by more than a rounding
    plain, whole = (Landscape(one).summed_gradient() for one in (problem, loss_scaled(problem, problem.measured())))
    assert float((plain - truth.gradient).norm()) > 3e-3 * float(truth.gradient.norm())
    assert float((whole - truth.gradient).norm()) < 2e-3 * float(truth.gradient.norm())
    asked = ["critical_sharpness", "directional_sharpness", "batch_sharpness(samples=16, batches=4)"]
    report = fl.measure(fl.Lens(problem, optimiser=optimiser), asked, generator=torch.Generator().manual_seed(0))
    for key in asked:
        found, name = report[key], key.partition("(")[0]
        holds, true = precision.held(name, found, truth)
        assert holds or (found.kind == "upper bound" and found.value >= true), (key, found, true)


@pytest.mark.parametrize("seed", range(8))
def test_activations_that_underflow_in_float16_are_those_of_float64(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(seed)
    faint = 10 ** float(-6 - 3 * torch.rand(()))
    base = precision.CASES["mlp"].build()

    def run(own: Any, x: torch.Tensor) -> torch.Tensor:
        h = (own.layers[0](x) * faint).to(own.short).sin().to(x.dtype) / faint
        return own.layers[2](own.layers[1](h))  # type: ignore[no-any-return]

    base.run = run
    net, (x, y) = precision.in_way(base, "casts", torch.float16), precision.data()
    optimiser = torch.optim.Adam(net.parameters(), lr=0.1, eps=1e-4)
    fine = precision.plain(net)
    with torch.no_grad():
        right = fine(x.double())
        assert float((net(x) - right).abs().max()) > 0.01 * float(right.abs().max())
    problem, truth = fl.Problem(net, "cross_entropy", (x, y)), precision.Truth(net, optimiser)
    asked = [name + precision.OPTIONS.get(name, "") for name in precision.MEASURES]
    report = fl.measure(fl.Lens(problem, optimiser=optimiser), [*asked, "sharpness", "hessian_trace(rtol=0.1)", "mls"])
    for key in asked:
        holds, true = precision.held(key.partition("(")[0], report[key], truth)
        unlike = report[key].kind == "undefined" and math.isnan(true)  # the update climbs
        assert holds or unlike, (key, report[key], true)
    dense = torch.func.hessian(truth.risk)(truth.here)
    assert report["sharpness"].value == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=0.01)
    mls = fl.measure(fl.Lens(fl.Problem(fine, "cross_entropy", (x.double(), y))), "mls")["mls"]
    assert report["mls"].value == pytest.approx(mls.value, rel=1e-5)


def test_what_underflows_at_every_scale_says_so() -> None:
    class Apart(nn.Module):
        """Slopes of 1e2 and of 1e-8: float16 holds no multiple of both."""

        def __init__(self) -> None:
            super().__init__()
            self.steep, self.flat = precision.Layer(36, 3), precision.Layer(36, 3)
            for layer in (self.steep, self.flat):
                layer.way, layer.short = "function", torch.float16

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.steep(1e-3 * x) * 1e4 + self.flat(x) * 1e-6

    torch.manual_seed(0)
    problem = fl.Problem(Apart(), "cross_entropy", precision.data())
    report = fl.measure(fl.Lens(problem), ["critical_sharpness", "directional_sharpness", "batch_sharpness"])
    for found in report.values():
        assert found.kind == "undefined"
        assert "is lost: numbers underflow or overflow in half precision inside" in found.note


def test_a_form_is_free_of_the_square_of_its_direction_s_rounding() -> None:
    draw = torch.Generator().manual_seed(0)
    H = torch.diag(torch.cat([torch.full((1,), 4.0), torch.full((99,), -1.0)]).double())
    e, held, plain = torch.eye(100, dtype=torch.float64)[0], 0, 0
    for _ in range(50):
        g = e + 0.03 * torch.randn(8, 100, generator=draw, dtype=torch.float64)
        found = Nudged(g / g.norm(dim=1, keepdim=True), g / g.norm(dim=1, keepdim=True) @ H)
        value, stderr = found.with_error(0.0)
        held += abs(value - 4.0) <= 1.96 * stderr
        squares = (found.directions * found.products).sum(1)
        plain += abs(float(squares.mean()) - 4.0) <= 1.96 * stderr
        assert found.lost(0.01) == ""
    assert held >= 44 > plain


def test_directions_that_are_rounding_say_so() -> None:
    drawn = torch.nn.functional.normalize(torch.randn(8, 100, generator=torch.Generator().manual_seed(0)).double())
    assert "the direction is rounding: operations inside round to 0.008" in Nudged(drawn, drawn).lost(2.0**-7)


@pytest.mark.parametrize("act", [nn.ReLU, nn.Tanh, nn.GELU])
@pytest.mark.parametrize("depth", [1, 6])
def test_a_half_type_out_of_sight_is_seen_and_none_where_there_is_none(act: Any, depth: int) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        widths = [36, *[8] * depth, 3]
        layers = [precision.Layer(m, k, act()) for m, k in pairwise(widths)]
        for way, short in (("", torch.float32), ("function", torch.bfloat16), ("function", torch.float16)):
            for layer in layers:
                layer.way, layer.short = way, short
            problem = fl.Problem(nn.Sequential(*layers), "cross_entropy", precision.data())
            found = coarsest_inside(problem, problem.measured())
            assert rounds(problem, problem.measured()) == (way == "function")
            assert torch.finfo(found).eps >= torch.finfo(short).eps


@pytest.mark.parametrize(("depth", "norm"), [(50, nn.Identity), (50, nn.LayerNorm), (20, nn.BatchNorm1d)])
def test_kinks_of_a_deep_network_are_not_taken_for_rounding(depth: int, norm: Any) -> None:
    torch.manual_seed(0)
    layers = [precision.Layer(width, 128, nn.Sequential(norm(128), nn.ReLU())) for width in (36, *[128] * depth)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    net = nn.Sequential(*layers, nn.Linear(128, 3)).eval()
    for way, short in (("", torch.float32), ("function", torch.float16), ("function", torch.bfloat16)):
        for layer in layers:
            layer.way, layer.short = way, short
        problem = fl.Problem(net, "cross_entropy", precision.data())
        assert rounds(problem, problem.measured()) == (way == "function"), short


def test_outputs_that_cancel_are_not_taken_for_rough() -> None:
    torch.manual_seed(0)

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Sequential(nn.Linear(36, 16), nn.Tanh(), nn.Linear(16, 3))
            self.other = deepcopy(self.one)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x) - self.other(x)

    problem = fl.Problem(Centred(), "cross_entropy", precision.data())
    assert not rounds(problem, problem.measured())


def test_nudges_move_weights_and_inputs_by_less_than_a_rounding_and_back() -> None:
    net = precision.in_way(precision.CASES["mlp"].build(), "casts", torch.bfloat16)
    problem = fl.Problem(net, "cross_entropy", precision.data())
    model, raw = problem.measured(), problem.probes[0]
    before, here = [p.detach().clone() for p in model.parameters()], problem.place(raw)[0]
    with nudges(problem, model, 0) as other:
        x, again = (other.place(raw)[0] for _ in range(2))
        assert torch.equal(x, again)
        for old, new in [(here, x), *zip(before, model.parameters(), strict=True)]:
            unit = 2.0 ** (old.abs().clamp(min=1e-30).log2().floor() - 7)
            assert bool(((old - new).abs() < unit).all())
            assert not bool(old.any()) or not torch.equal(old, new)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("short", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_the_next_update_of_half_weights_is_not_rounded(short: torch.dtype, kind: Any) -> None:
    torch.manual_seed(0)
    half, fine = nn.Linear(5, 4).to(short), nn.Linear(5, 4).double()
    optimiser = kind(half.parameters(), lr=1e-3)
    for p in half.parameters():
        p.grad = torch.randn_like(p)
    optimiser.step()
    fine.load_state_dict(half.state_dict())
    twin = kind(fine.parameters(), lr=1e-3)
    for p, own in zip(fine.parameters(), half.parameters(), strict=True):
        twin.state[p] = {k: v.clone() if k == "step" else v.double() for k, v in optimiser.state[own].items()}
        p.grad = torch.randn_like(p)
    given, before = {n: p.grad for n, p in fine.named_parameters()}, [p.detach().clone() for p in fine.parameters()]
    found = next_update(optimiser, half, given)
    twin.step()
    for name, p, old in zip(found, fine.parameters(), before, strict=True):
        assert torch.allclose(found[name].double(), (old - p.detach()) / 1e-3, rtol=1e-4, atol=1e-4)
    assert all(p.dtype == short for p in half.parameters())
    assert all(v.dtype in (short, torch.float32) for state in optimiser.state.values() for v in state.values())


def test_what_rounding_hides_says_its_size_and_the_distance() -> None:
    for step, net, optimiser in precision.trained("mlp", "function", torch.bfloat16):
        if step == precision.MOMENTS[5]:
            lens = fl.Lens(fl.Problem(net, "cross_entropy", precision.data()), optimiser=optimiser)
            found = fl.measure(lens, "worst_sharpness(rho=0.0001, restarts=1, steps=2)")
            (estimate,) = found.values()
            assert estimate.value == 0
            assert "is rounding error, which is about" in estimate.note
            assert "times as large" in estimate.note
            break
    assert math.isnan(estimate.stderr)
