"""Flatness of heads: its literal definition, the metric behind it, and that no symmetry of attention moves it."""

from __future__ import annotations

import attentions
import modern
import pytest
import torch
from networks import module_of
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize

import flatlens as fl
from flatlens.transforms import TRANSFORMS, read_wiring

NAME, WHOLE = "head_flatness_ggn", "head_flatness"
EXACTLY = f"{WHOLE}(exact=True)"
MOVES = ("query_key_basis", "value_output_basis", "head_permutation", "norm_folding", "norm_scale", "gate_scale")
DEFINED = ["plain", "grouped", "llama-shaped", "called twice", "crossed", "partly rotary", "gemma-shaped"]
NORMED = {"crossed": ("q",)}  #: which projections read a norm's features; else all


def measured(problem: fl.Problem) -> fl.Report:
    return fl.measure(fl.Lens(problem), [NAME])


def changed(net: nn.Module, projection: str, head: int, size: int, normed: bool, A: Tensor) -> dict[str, Tensor]:
    """Weights of the network with one head's weight changed relatively by A."""
    layer, name = getattr(net.attention, projection), f"attention.{projection}"
    W, rows = layer.weight.detach(), slice(size * head, size * head + size)
    one = torch.eye(len(A), dtype=torch.float64)
    if projection == "o":
        new = torch.cat([W[:, : rows.start], (one + A) @ W[:, rows], W[:, rows.stop :]], 1)
        return {f"{name}.weight": new}
    norm = net.norm1
    scale = getattr(norm, "scale", norm.weight).detach() if normed else torch.ones(W.shape[1], dtype=torch.float64)
    mine = (W[rows] * scale) @ (one + A) / scale  # as the network reads it: features times the scale
    found = {f"{name}.weight": torch.cat([W[: rows.start], mine, W[rows.stop :]])}
    if layer.bias is not None and normed and getattr(net.norm1, "bias", None) is not None:
        b, shift = layer.bias.detach(), net.norm1.bias.detach()
        kept = b[rows] + (W[rows] - mine) @ shift  # the shift is read by W, not by W (I + A)
        found[f"{name}.bias"] = torch.cat([b[: rows.start], kept, b[rows.stop :]])
    return found


def literal(net: nn.Module, x: Tensor, y: Tensor, projection: str, head: int, size: int, normed: bool) -> float:
    """mean_i tr(C_i J_i J_i^T), J_i the Jacobian of sample i's outputs in A, by explicit backward passes."""
    width = getattr(net.attention, projection).weight.shape[0 if projection == "o" else 1]
    total = 0.0
    for one, label in zip(x, y, strict=True):
        A = torch.zeros(width, width, dtype=torch.float64, requires_grad=True)
        f = functional_call(net, changed(net, projection, head, size, normed, A), (one[None],))[0]
        J = torch.stack([torch.autograd.grad(out, A, retain_graph=True)[0].flatten() for out in f])
        leaf = f.detach().requires_grad_()
        loss = nn.functional.cross_entropy(leaf[None], label[None])
        (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
        C = torch.stack([torch.autograd.grad(part, leaf, retain_graph=True)[0] for part in slope])
        total += float((C * (J @ J.T)).sum())
    return total / len(x)


@pytest.mark.parametrize("name", DEFINED)
def test_it_is_its_literal_definition(name):
    net, x, y = attentions.made(name)
    found = measured(fl.Problem(net, "cross_entropy", (x, y)))
    net.requires_grad_(False)
    a = net.attention
    normed = NORMED.get(name, ("q", "k", "v"))
    sizes = {"q": a.heads, "k": a.groups, "v": a.groups, "o": a.heads}
    each = {
        projection: sum(literal(net, x, y, projection, h, a.size, projection in normed) for h in range(heads))
        for projection, heads in sizes.items()
    }
    assert found[NAME].value == pytest.approx(sum(each.values()), rel=1e-9)
    assert found[f"{NAME}.query_key"].value == pytest.approx(each["q"] + each["k"], rel=1e-9)
    assert found[f"{NAME}.value_output"].value == pytest.approx(each["v"] + each["o"], rel=1e-9)
    assert found[NAME].kind == "exact"


def literal_hessian(net: nn.Module, x: Tensor, y: Tensor, projection: str, head: int, size: int, normed: bool) -> float:
    """The trace over A of the risk's second derivative, by explicit double backward."""
    width = getattr(net.attention, projection).weight.shape[0 if projection == "o" else 1]
    A = torch.zeros(width, width, dtype=torch.float64, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH):
        f = functional_call(net, changed(net, projection, head, size, normed, A), (x,))
    slope = torch.autograd.grad(nn.functional.cross_entropy(f, y), A, create_graph=True)[0].flatten()
    seconds = [torch.autograd.grad(part, A, retain_graph=True)[0].flatten()[i] for i, part in enumerate(slope)]
    return float(torch.stack(seconds).sum())


@pytest.mark.parametrize("name", DEFINED)
def test_the_whole_is_its_literal_definition(name):
    net, x, y = attentions.made(name)
    whole, few = f"{WHOLE}(exact=True)", f"{WHOLE}(probes=60)"
    found = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), [whole, few, NAME])
    net.requires_grad_(False)
    a, normed = net.attention, NORMED.get(name, ("q", "k", "v"))
    sizes = {"q": a.heads, "k": a.groups, "v": a.groups, "o": a.heads}
    each = {
        projection: sum(literal_hessian(net, x, y, projection, h, a.size, projection in normed) for h in range(heads))
        for projection, heads in sizes.items()
    }
    assert found[whole].value == pytest.approx(sum(each.values()), rel=1e-9)
    assert found[f"{whole}.query_key"].value == pytest.approx(each["q"] + each["k"], rel=1e-9)
    assert found[f"{whole}.value_output"].value == pytest.approx(each["v"] + each["o"], rel=1e-9)
    assert found[f"{whole}.gauss_newton"].value == pytest.approx(found[NAME].value, rel=1e-12)
    for key, layer in found:
        if key.startswith(few) and not key.endswith(".max"):  # the largest of noisy values is too large
            exact = found[key.replace("probes=60", "exact=True"), layer].value
            assert abs(found[key, layer].value - exact) <= 4 * found[key, layer].stderr + 1e-12, (key, layer)


def test_the_whole_needs_a_bias_that_keeps_the_part_of_a_norms_shift():
    net, x, y = attentions.made("plain")
    for projection in ("q", "k", "v"):
        getattr(net.attention, projection).bias = None
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), [WHOLE, NAME])
    assert report[NAME].kind == "exact"
    assert report[WHOLE].kind == "undefined"
    assert "norm's shift" in report[WHOLE].note


def risk_curvature(net: nn.Module, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """Gauss-Newton matrix of the half squared error in some weights, side by side."""
    values = [weight.clone().requires_grad_() for weight in weights.values()]
    f = functional_call(net, dict(zip(weights, values, strict=True)), (x,)).flatten()
    rows = [torch.cat([g.flatten() for g in torch.autograd.grad(out, values, retain_graph=True)]) for out in f]
    J = torch.stack(rows)
    return J.T @ J / len(x)


def test_it_is_the_trace_in_the_metric_of_the_quotient():
    """Of queries: sum_ss' <w_s, w_s'> Tr H_ss', the trace in tr((W W^T)^-1 dW dW^T); directions that only change the
    basis have no curvature, so it is the trace over the quotient."""
    net, x, _ = attentions.made("last")
    problem = fl.Problem(net, "half_squared_error", (x, torch.zeros(len(x), 3).double()))
    report = measured(problem)
    net.requires_grad_(False)
    q, k = net.attention.q.weight[:4], net.attention.k.weight[:4]
    names = {"attention.q.weight": net.attention.q.weight, "attention.k.weight": net.attention.k.weight}
    H = risk_curvature(net, x, names).reshape(2, 8, 8, 2, 8, 8)  # (weight, row, column) twice
    total = 0.0
    for number, layer in enumerate((net.attention.q, net.attention.k)):
        for rows in (slice(0, 4), slice(4, 8)):
            W = layer.weight[rows]
            total += float(
                torch.einsum("st,satb,ab->", W @ W.T, H[number, rows][:, :, number, rows], torch.eye(8).double())
            )
    assert report[f"{NAME}.query_key"].value == pytest.approx(total, rel=1e-9)
    biases = {**names, "attention.q.bias": net.attention.q.bias, "attention.k.bias": net.attention.k.bias}
    X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).double()
    along = torch.zeros(2, 8, 8).double()
    along[0, :4], along[1, :4] = X @ q, -X.T @ k
    turn = torch.zeros(2, 8).double()
    turn[0, :4], turn[1, :4] = X @ net.attention.q.bias[:4], -X.T @ net.attention.k.bias[:4]
    v = torch.cat([along.flatten(), turn.flatten()])
    G = risk_curvature(net, x, biases)
    assert float(v @ G @ v) < 1e-14 * float(v @ v) * float(G.diagonal().sum())


@pytest.mark.parametrize(
    "name", ["plain", "grouped", "llama-shaped", "called twice", "crossed", "gemma-shaped", "vit-mha", "gpt2", "llama"]
)
def test_no_symmetry_moves_it(name):
    if name in attentions.MADE:
        net, x, y = attentions.made(name)
        problem = fl.Problem(net, "cross_entropy", (x, y))
    else:
        case = attentions.hf_llama() if name == "llama" else modern.case(name, "cross_entropy")
        problem = fl.Problem(case.net, "cross_entropy", case.data)
    before, done = measured(problem)[NAME].value, 0
    assert before > 0
    for move in MOVES:
        if TRANSFORMS[move].offer(read_wiring(problem, problem.model)).links:
            moved = TRANSFORMS[move].apply(problem).problem
            assert measured(moved)[NAME].value == pytest.approx(before, rel=1e-6 if name == "llama" else 1e-10)
            done += 1
            if name in ("plain", "llama-shaped"):
                whole, again = (fl.measure(fl.Lens(one), EXACTLY)[EXACTLY].value for one in (problem, moved))
                assert again == pytest.approx(whole, rel=1e-8)
    assert done >= 4


def test_chunks_and_rows_of_heads():
    net, x, y = attentions.made("plain", n=9)
    whole = measured(fl.Problem(net, "cross_entropy", (x, y)))
    small = measured(fl.Problem(net, "cross_entropy", (x, y), memory=20000))
    assert small[NAME].value == pytest.approx(whole[NAME].value, rel=1e-12)
    heads = [layer for row, layer in whole if row == NAME and layer is not None]
    assert heads == ["attention.q.0", "attention.q.1", "attention.v.0", "attention.v.1"]
    assert sum(whole[NAME, layer].value for layer in heads) == pytest.approx(whole[NAME].value)
    assert whole[f"{NAME}.max"].value == max(whole[NAME, layer].value for layer in heads)


def test_no_head_is_undefined_with_the_reason():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    plain = measured(fl.Problem(net, "mse", (torch.ones(4, 3), torch.zeros(4, 2))))[NAME]
    assert (plain.kind, plain.note) == ("undefined", "no attention heads could be identified in this network")
    net, x, y = attentions.made("plain")
    few = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y)), outputs=2), [NAME])[NAME]
    assert few.kind == "undefined"
    assert "outputs='exact'" in few.note


def test_a_weight_with_something_added_is_no_parameter():
    """Its derivative is that of the change, and its values are not: a change of 0 would have no flatness."""
    net, x, y = attentions.made("plain")

    for layer in (net.attention.q, net.attention.k, net.attention.v, net.attention.o):
        added = module_of(lambda own, change: own.base + change, base=layer.weight.detach().clone())
        parametrize.register_parametrization(layer, "weight", added, unsafe=True)
    report = measured(fl.Problem(net, "cross_entropy", (x, y)))
    assert report[NAME].kind == "undefined"
    assert "not a parameter itself" in report[NAME].note


def test_frozen_weights_are_left_out():
    net, x, y = attentions.made("plain")
    whole = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), [NAME, EXACTLY])
    net.attention.q.requires_grad_(False)
    net.attention.k.weight.requires_grad_(False)
    part = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), [NAME, EXACTLY])
    for name in (NAME, EXACTLY):
        assert part[name].value == pytest.approx(whole[f"{name}.value_output"].value, rel=1e-9)
        assert part[name].note == "2 frozen layers left out"
        assert part[f"{name}.query_key"].kind == "undefined"
        assert [layer for row, layer in part if row == name and layer] == ["attention.v.0", "attention.v.1"]
    none = measured(fl.Problem(net, "cross_entropy", (x, y), parameters=["head.weight"]))[NAME]
    assert "parameters='all'" in none.note
    every = measured(fl.Problem(net, "cross_entropy", (x, y), parameters="all"))[NAME]
    assert (every.value, every.note) == (pytest.approx(whole[NAME].value), "")
    net.attention.v.bias.requires_grad_(False)
    assert "frozen bias" in fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), EXACTLY)[EXACTLY].note


@pytest.mark.parametrize("scale", [5, 60])
def test_saturated_attention_in_single_precision(scale):
    """Its softmax cancels: the derivatives of some rows are rounding."""
    net, x, y = attentions.made("plain", n=16)
    with torch.no_grad():
        net.attention.q.weight.mul_(scale)
    exact = measured(fl.Problem(net, "cross_entropy", (x, y)))[NAME].value
    found = measured(fl.Problem(net.float(), "cross_entropy", (x.float(), y)))[NAME]
    assert found.value == pytest.approx(exact, rel=1e-4), found


@pytest.mark.parametrize("name", ["normed queries", "unit queries", "tied"])
def test_a_product_that_is_not_understood_leaves_no_sum(name):
    """Values are; queries and keys are not, and the sum would miss them without a word."""
    report = measured(fl.Problem(attentions.made(name)[0], "cross_entropy", attentions.made(name)[1:]))
    for part in ("", ".query_key", ".max"):
        assert report[NAME + part].kind == "undefined"
        assert report[NAME + part].note.startswith("some heads could not be identified: ")
    heads = [layer for row, layer in report if row == NAME and layer is not None]
    assert heads == ["attention.v.0", "attention.v.1"]
    assert report[f"{NAME}.value_output"].value == pytest.approx(sum(report[NAME, head].value for head in heads))
