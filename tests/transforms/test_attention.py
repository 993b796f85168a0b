"""Heads in other bases and in another order, scales out of norms and gates: weights move, and the function stays."""

from __future__ import annotations

import copy

import attentions
import modern
import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens.errors import BadModel
from flatlens.transforms import TRANSFORMS, read_wiring

NAMES = ("query_key_basis", "value_output_basis", "head_permutation", "norm_folding", "norm_scale", "gate_scale")
WITHOUT = {"norm_folding": {"gpt2": 1}}


def by_hand(name: str) -> fl.Problem:
    net, x, y = attentions.made(name)
    return fl.Problem(net, "cross_entropy", (x, y))


def published(name: str) -> fl.Problem:
    if name != "encoder":
        pytest.importorskip("transformers", reason="transformers is not installed")
    case = attentions.hf_llama() if name == "llama" else modern.case(name, "cross_entropy")
    return fl.Problem(case.net, "cross_entropy", case.data, **case.options)


COUNTS = {  # two layers of two heads each; queries and keys, values, orders, norms that fold, norms that scale, gates
    "vit-mha": (4, 4, 2, 5, 5, 0),
    "vit-sdpa": (4, 4, 2, 5, 5, 0),
    "encoder": (4, 4, 2, 1, 1, 0),
    "encoder-norm-first": (4, 4, 2, 4, 4, 0),
    "hf-vit": (4, 4, 2, 5, 5, 0),
    "bert": (4, 4, 2, 1, 1, 0),
    "gpt2": (4, 4, 2, 4, 4, 0),
    "llama": (4, 4, 2, 5, 5, 2),
}


def require_kept(problem: fl.Problem, name: str, places: int) -> None:
    transform = TRANSFORMS[name]
    assert len(transform.offer(read_wiring(problem, copy.deepcopy(problem.model))).links) == places
    if not places:
        with pytest.raises(BadModel, match=f"transform {name}: cannot be applied to this network: ") as error:
            transform.apply(problem)
        assert "\n" not in str(error.value)
        return
    before = copy.deepcopy(problem.model.state_dict())
    moved = transform.apply(problem, torch.Generator().manual_seed(3))
    assert moved.difference < 1e-10
    assert len(moved.links) == places
    apart = [float((value - moved.model.state_dict()[key]).abs().max()) for key, value in before.items()]
    assert max(apart) > 0.01
    assert all(torch.equal(value, before[key]) for key, value in problem.model.state_dict().items())
    assert moved.problem.parameters == problem.parameters


@pytest.mark.parametrize("transform", NAMES)
@pytest.mark.parametrize("network", COUNTS)
def test_the_function_of_published_networks_stays(network, transform):
    require_kept(published(network), transform, COUNTS[network][NAMES.index(transform)])


@pytest.mark.parametrize("transform", NAMES)
@pytest.mark.parametrize("network", ["plain", "grouped", "llama-shaped", "called twice", "crossed", "partly rotary"])
def test_the_function_of_networks_by_hand_stays(network, transform):
    said = attentions.MADE[network][1]
    places = {
        "query_key_basis": said.queries, "value_output_basis": said.values, "head_permutation": said.orders,
        "norm_folding": said.norms, "norm_scale": said.norms, "gate_scale": said.gates,
    }  # fmt: skip
    require_kept(by_hand(network), transform, places[transform])


def head(weight: torch.Tensor, number: int) -> torch.Tensor:
    return weight.detach()[4 * number : 4 * number + 4]


def test_only_the_products_of_queries_and_keys_count():
    problem = by_hand("plain")
    moved = TRANSFORMS["query_key_basis"].apply(problem).model
    a, b = problem.model.attention, moved.attention
    for number in range(2):
        q, k, q2, k2 = (head(layer.weight, number) for layer in (a.q, a.k, b.q, b.k))
        torch.testing.assert_close(q2.T @ k2, q.T @ k)
        assert float((q2 - q).abs().max()) > 0.1
        A = torch.linalg.lstsq(q.T, q2.T).solution.T
        singular = torch.linalg.svdvals(A)
        assert 5 - 1e-6 <= float(singular.min()) <= float(singular.max()) <= 25 + 1e-6
    assert torch.equal(a.v.weight, b.v.weight)
    assert torch.equal(a.o.weight, b.o.weight)


def test_only_the_products_of_values_and_outputs_count():
    problem = by_hand("grouped")
    moved = TRANSFORMS["value_output_basis"].apply(problem).model
    a, b = (net.requires_grad_(False).attention for net in (problem.model, moved))
    for number in range(4):
        products = [head(layer.o.weight.T, number).T @ head(layer.v.weight, number // 2) for layer in (a, b)]
        torch.testing.assert_close(*products)
    assert float((a.v.weight - b.v.weight).abs().max()) > 0.1
    assert torch.equal(a.q.weight, b.q.weight)


def test_heads_change_places_with_all_that_is_theirs():
    problem = by_hand("grouped")
    moved = TRANSFORMS["head_permutation"].apply(problem).model
    a, b = problem.model.attention, moved.attention
    places = []
    for number in range(4):
        (at,) = (i for i in range(4) if torch.equal(head(b.q.weight, number), head(a.q.weight, i)))
        assert torch.equal(head(b.o.weight.T, number), head(a.o.weight.T, at))
        assert torch.equal(head(b.k.weight, number // 2), head(a.k.weight, at // 2))
        places.append(at)
    assert sorted(places) == [0, 1, 2, 3] != places


def test_a_folded_norm_keeps_ones_and_zeros():
    problem = by_hand("plain")
    moved = TRANSFORMS["norm_folding"].apply(problem).model
    a, b = problem.model, moved
    assert torch.equal(b.norm1.weight, torch.ones_like(b.norm1.weight))
    assert not bool(b.norm1.bias.any())
    torch.testing.assert_close(b.attention.q.weight, a.attention.q.weight * a.norm1.weight)
    want = a.attention.q.bias + a.attention.q.weight @ a.norm1.bias
    torch.testing.assert_close(b.attention.q.bias, want)


def test_a_shift_that_no_bias_can_take_is_left():
    problem = by_hand("no biases")
    offer = TRANSFORMS["norm_folding"].offer(read_wiring(problem, copy.deepcopy(problem.model)))
    assert len(offer.links) == 1
    assert list(offer.left.values()) == ["a layer that reads its features has no bias to take the shift"]
    assert TRANSFORMS["norm_scale"].apply(problem).difference < 1e-12


def test_frozen_weights_and_float32_move_as_well():
    net, x, y = attentions.made("plain")
    net = net.float().requires_grad_(False)
    net.head.requires_grad_(True)
    problem = fl.Problem(net, "cross_entropy", (x.float(), y))
    for name in NAMES[:-1]:
        moved = TRANSFORMS[name].apply(problem)
        assert moved.difference < 1e-3
        assert [p.requires_grad for p in moved.model.parameters()] == [p.requires_grad for p in net.parameters()]
    report = fl.check_invariance(fl.Lens(problem), "mls")
    assert report.disagreeing == []
    assert set(NAMES[:-1]) <= set(report.moved)


def test_a_network_without_attention_says_so():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    wiring = read_wiring(fl.Problem(net, "mse", (torch.ones(4, 3), torch.zeros(4, 2))), net)
    reasons = [TRANSFORMS[name].offer(wiring).refused for name in NAMES]
    assert reasons == ["no attention is found"] * 2 + ["no attention of several heads is found"] + [
        "no norm with a scale that matrix products read is found"
    ] * 2 + ["no gated layer is found"]  # fmt: skip
