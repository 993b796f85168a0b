"""Every exact measure against its definition, on every kind of network and loss."""

from __future__ import annotations

import math

import pytest
import torch
from builders import cross_entropy, half_squared
from literal import (
    LINEAR,
    call_jacobians,
    count_calls,
    definition_3,
    full_hessian_trace,
    gauss_newton,
    input_jacobian,
    matrices,
    parameter_jacobian,
    weight_hessian,
)
from networks import NETWORKS, network, twice
from torch import Tensor, nn
from torch.nn import functional as F

import flatlens as fl

torch.set_num_threads(1)


def quartic(f: Tensor, y: Tensor) -> Tensor:
    """A loss nobody has a closed form for, its Hessian not diagonal and not always positive."""
    target = F.one_hot(y, f.shape[1]).to(f)
    return (f - target).pow(4).sum(1) + 0.1 * f.prod(1)


LOSSES = {
    "half_squared_error": ("half_squared_error", half_squared),
    "cross_entropy": ("cross_entropy", cross_entropy),
    "custom": (quartic, quartic),
}


def output_hessians(loss, f: Tensor, y: Tensor) -> Tensor:
    each = [
        torch.autograd.functional.hessian(lambda o, i=i: loss(o[None], y[i : i + 1])[0], f[i]) for i in range(len(f))
    ]
    return torch.stack(each)


FAMILIES = ("sharpness", "sensitivity", "compression", "flatness", "normalised")


@pytest.fixture(scope="module", params=[(net, loss) for net in NETWORKS for loss in LOSSES], ids=lambda p: "-".join(p))
def case(request):
    """(name, network, loss, x, y, report of all measures written out here, Jacobian of every parameter, C)."""
    name, loss = request.param
    net, x, y = network(name)
    ours, literal_loss = LOSSES[loss]
    lens = fl.Lens(fl.Problem(net, ours, (x, y)))
    chosen = [name for name, one in fl.measures.MEASURES.items() if one.card.family in FAMILIES]
    report = fl.measure(lens, [*chosen, "local_volume(top_k=2)", "jacobian_norm(softmax=True)"])
    return (
        name,
        net,
        literal_loss,
        x,
        y,
        report,
        parameter_jacobian(net, x),
        output_hessians(literal_loss, net(x).detach(), y),
    )


def close(value: float, truth: float, tolerance: float = 1e-10) -> None:
    assert value == pytest.approx(truth, rel=tolerance, abs=1e-13)


def layer_names(net: nn.Module) -> list[str]:
    return [n for n, m in net.named_modules() if isinstance(m, LINEAR) and "self_attn" not in n]


def test_traces_over_all_parameters(case) -> None:
    _, _, _, _, _, report, J, C = case
    n = len(C)
    close(report["interpolation_sharpness"].value, sum(float(j.square().sum()) for j in J.values()) / n)
    close(report["ggn_trace"].value, sum(float(torch.einsum("nka,nkl,nla->", j, C, j)) for j in J.values()) / n)


def test_traces_of_each_layer_sum_to_the_total(case) -> None:
    _, net, _, _, _, report, J, C = case
    for layer in layer_names(net):
        own = {name: j for name, j in J.items() if name.rpartition(".")[0] == layer}
        if ("ggn_trace", layer) in report:  # but for what has a row of its own
            mine = [j for name, j in own.items() if ("ggn_trace", name) not in report]
            truth = sum(float(torch.einsum("nka,nkl,nla->", j, C, j)) for j in mine) / len(C)
            close(report["ggn_trace", layer].value, truth)
    rows = report.frame().query("measure == 'ggn_trace' and layer != ''")
    close(rows["value"].sum(), report["ggn_trace"].value)


def singular(J: Tensor) -> Tensor:
    return torch.linalg.svdvals(J)


def test_sensitivity_at_the_input(case) -> None:
    _, net, _, x, _, report, _, _ = case
    J = input_jacobian(net, x)
    close(report["mls"].value, float(singular(J)[:, 0].mean()))
    close(report["jacobian_norm"].value, float(singular(J)[:, 0].max()))
    close(report["normalized_mls"].value, float((x.flatten(1).square().sum(1) * singular(J)[:, 0].square()).mean()))
    S = torch.stack(
        [
            torch.autograd.functional.jacobian(lambda one: net(one)[0].softmax(0), x[i : i + 1]).flatten(1)
            for i in range(len(x))
        ]
    )
    close(report["jacobian_norm(softmax=True)"].value, float(singular(S)[:, 0].max()))
    s2 = singular(J).square()
    alive = s2.sum(1) > 0
    close(report["local_dimension"].value, float((s2.sum(1).square() / s2.square().sum(1))[alive].mean()))


def full_rank(J: Tensor, k: int) -> Tensor:
    s = singular(J)[:, :k]
    return s[:, -1].square() > 100 * torch.finfo(torch.float64).eps * s[:, 0].square()


def test_volumes(case) -> None:
    _, net, _, x, _, report, _, _ = case
    J = input_jacobian(net, x)
    for key, k in (("local_volume", 3), ("local_volume(top_k=2)", 2)):
        s = singular(J)[:, :k]
        there = full_rank(J, k)
        volumes = torch.where(there, s.prod(1), 0.0)
        ours = report[key].samples
        assert ours is not None
        assert torch.equal(ours > 0, there)
        well = there & ((s[:, 0] / s[:, -1]).square() < 1e5)
        assert torch.allclose(ours[well], volumes[well], rtol=1e-10, atol=0)
        assert torch.allclose(ours[there], volumes[there], rtol=1e-8, atol=0)
        close(report[key].value, float(volumes.mean()), 1e-8)
    there = full_rank(J, 3)
    if bool(there.any()):
        close(report["log_volume"].value, float(singular(J)[there].log().sum(1).mean()), 1e-8)
    else:
        assert report["log_volume"].kind == "undefined"
        assert math.isnan(report["log_volume"].value)


def test_input_side_of_every_call(case) -> None:
    """MLS, volumes and dimension through each call of each layer; their sums are NMLS and the network volume."""
    _, net, _, x, _, report, _, _ = case
    nmls = volume = 0.0
    for layer in layer_names(net):
        for number, J in enumerate(call_jacobians(net, layer, x)):
            key = layer if number == 0 else f"{layer}:{number}"
            close(report["mls", key].value, float(singular(J)[:, 0].mean()))
            there = full_rank(J, 3)
            nmls += float(singular(J)[:, 0].mean())
            volume += float(torch.where(there, singular(J).prod(1), 0.0).mean())
            s2 = singular(J).square()
            alive = s2.sum(1) > 0
            close(report["local_dimension", key].value, float((s2.sum(1).square() / s2.square().sum(1))[alive].mean()))
    close(report["nmls"].value, nmls)
    close(report["network_volume"].value, volume, 1e-8)


def test_relative_flatness_is_definition_3(case) -> None:
    name, net, loss, x, y, report, J, C = case
    checked = []
    for layer, (weight, module) in matrices(net).items():
        groups = getattr(module, "groups", 1)
        H = weight_hessian(net, loss, x, y, weight)
        literal = definition_3(H, module.weight, groups)
        part = definition_3(gauss_newton(J[weight], C), module.weight, groups)
        close(report["relative_flatness", layer].value, literal)
        close(report["relative_flatness_ggn", layer].value, part)
        trace = float(H.trace()) * float(module.weight.detach().square().sum())
        close(report["kappa_trace", layer].value, trace)
        checked.append(literal)
        if name.endswith(("relu", "inplace", "1d", "residual")) and count_calls(net, module, x) == 1:
            close(literal, part)  # piecewise linear, each weight used once
    assert len(checked) >= 2
    close(report["relative_flatness"].value, checked[-1])
    close(report["relative_flatness.sum"].value, sum(checked))
    close(report["relative_flatness.max"].value, max(checked))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["mlp-relu", "cnn-relu-inplace", "residual"])
def test_hessian_trace_is_the_gauss_newton_trace_on_relu_nets(name: str, loss: str) -> None:
    """At random weights, far from any minimum, for every loss."""
    net, x, y = network(name)
    ours, literal_loss = LOSSES[loss]
    traced = fl.measure(fl.Lens(fl.Problem(net, ours, (x, y))), ["ggn_trace"])["ggn_trace"].value
    close(traced, full_hessian_trace(net, literal_loss, x, y), 1e-9)


def test_hessian_trace_is_more_than_gauss_newton_for_a_module_called_twice() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = twice("relu").double()
    x, y = torch.randn(6, 6, generator=torch.Generator().manual_seed(2)).double(), torch.tensor([0, 1, 2, 0, 1, 2])
    traced = fl.measure(fl.Lens(fl.Problem(net, "half_squared_error", (x, y))), ["ggn_trace"])["ggn_trace"].value
    truth = full_hessian_trace(net, half_squared, x, y)
    assert abs(traced - truth) > 1e-4 * abs(truth)
