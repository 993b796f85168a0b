"""Every measure against what its card declares: unchanged by a function-preserving move exactly where it says so."""

from __future__ import annotations

import math

import attentions
import pytest
import torch
from networks import network
from torch import nn

import flatlens as fl


def rescaled(net: nn.Sequential, how: str) -> None:
    """Move the weights of a ReLU MLP without moving its function."""
    generator = torch.Generator().manual_seed(7)
    first, second, third = net[0], net[2], net[4]
    with torch.no_grad():
        if how == "layerwise":
            for layer, factor in ((first, 11.0), (second, 7.0)):
                layer.weight.mul_(factor)
            first.bias.mul_(11.0)
            second.bias.mul_(77.0)
            third.weight.div_(77.0)
        elif how == "neuronwise":
            a = torch.rand(5, generator=generator).double() * 20 + 5
            second.weight.mul_(a[:, None])
            second.bias.mul_(a)
            third.weight.div_(a)
        else:
            order = torch.randperm(5, generator=generator)
            second.weight.copy_(second.weight[order].clone())
            second.bias.copy_(second.bias[order].clone())
            third.weight.copy_(third.weight[:, order].clone())


HELD_OUT = ("test_loss", "test_accuracy", "generalisation_gap")
TIGHT = {  # to a residual
    "sharpness",
    "ggn_norm",
    "layer_sharpness",
    "maximal_relative_flatness",
    "layer_factors",
    "batch_jacobian_norm",
    "preconditioned_sharpness",
    "minibatch_sharpness",
    "eigenspace",
}
SPELLED = {  # so that errors are small beside what a move changes
    "pac_bayes_flatness": "pac_bayes_flatness(of='loss', probes=50)",
    "feature_robustness": "feature_robustness(probes=400)",
    "spectral_density": "spectral_density(probes=64)",
    "locally_constant_labels": "locally_constant_labels(delta=0.5, probes=400)",
    "local_learning_coefficient": "local_learning_coefficient(gamma=10, draws=150, burn_in=50, leapfrogs=3)",
    **{name: f"{name}(rtol=1e-11)" for name in TIGHT},
}
UNDEFINED_THERE = ("preconditioned_sharpness", "minibatch_sharpness", "batch_sharpness")
"""They need an optimiser, or more samples."""
HIDDEN_THERE = (SPELLED["locally_constant_labels"], SPELLED["local_learning_coefficient"], "representativeness")
"""Labels are constant near these samples; few draws have a large error; in 40 features no two kernels overlap."""
OF_HEADS = ("head_flatness", "head_flatness_ggn")  #: undefined without attention
KEYS = [SPELLED.get(name, name) for name in fl.measures.MEASURES if name not in HELD_OUT + OF_HEADS]
OPTIONS = [
    "average_sharpness(adaptive=False)",
    "worst_sharpness(adaptive=True)",
    "pac_bayes_flatness(of='loss', adaptive=True)",
    "representativeness(bandwidth='relative')",
    "relative_flatness(normalized='std')",
    "relative_flatness(normalized='variance')",
    "relative_flatness(kernel='spread')",
    "jacobian_norm(softmax=True)",
    "mls(softmax=True)",
    "matrix_normalized_sharpness(frobenius=True)",
]


MOVES = ("layerwise", "neuronwise", "permutation")


@pytest.mark.parametrize("key", [*KEYS, *OPTIONS])
def test_a_measure_is_unchanged_exactly_where_its_card_says(key: str) -> None:
    before, x, y = network("mlp-relu", n=40)
    measure = fl.measures.named([key])[0]

    def measured(net: nn.Module) -> fl.Estimate:
        problem, optimiser = fl.Problem(net, "cross_entropy", (x, y)), torch.optim.SGD(net.parameters(), lr=0.1)
        return fl.measure(fl.Lens(problem, optimiser=optimiser), [key])[measure.key]

    a = measured(before)
    for how in MOVES:
        after, _, _ = network("mlp-relu", n=40)
        rescaled(after, how)
        assert torch.allclose(before(x), after(x), rtol=1e-12)
        b = measured(after)
        searched = 1e-3 if measure.card.name == "worst_sharpness" else 1e-8  # from other starts
        drawn = 0 if measure.card.name == "representativeness" else 4  # the same splits on either side
        unchanged = b.value == pytest.approx(a.value, rel=searched, abs=drawn * math.hypot(a.margin, b.margin) / 1.96)
        assert unchanged == (how in measure.invariant_under), (how, a, b)


def in_other_bases(net: nn.Module) -> None:
    """Change the basis of every head of attention by hand: queries and keys, values and what reads them."""
    generator = torch.Generator().manual_seed(7)
    attention = net.attention.requires_grad_(False)
    for number in range(attention.heads):
        rows = slice(4 * number, 4 * number + 4)
        A, B = (torch.randn(4, 4, generator=generator).double() + 3 * torch.eye(4).double() for _ in range(2))
        for layer, change in ((attention.q, A), (attention.k, torch.linalg.inv(A).T), (attention.v, B)):
            layer.weight[rows] = change @ layer.weight[rows]
            layer.bias[rows] = change @ layer.bias[rows]
        attention.o.weight[:, rows] = attention.o.weight[:, rows] @ torch.linalg.inv(B)
    net.requires_grad_(True)


@pytest.mark.parametrize("key", [*KEYS, *OPTIONS, *OF_HEADS])
def test_a_measure_survives_another_basis_of_heads_exactly_where_its_card_says(key: str) -> None:
    """The last layer of this network reads the heads: what is measured there moves with their basis."""
    (before, x, y), (after, _, _) = attentions.made("last", n=12), attentions.made("last", n=12)
    in_other_bases(after)
    assert torch.allclose(before(x), after(x), rtol=1e-10)
    measure = fl.measures.named([key])[0]
    a, b = (
        fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), [key], anyway=True)[measure.key]
        for net in (before, after)
    )
    if "undefined" in (a.kind, b.kind):
        assert a.kind == b.kind
        assert measure.card.name in UNDEFINED_THERE
        return
    searched = 1e-3 if measure.card.name == "worst_sharpness" else 1e-8
    drawn = 0 if measure.card.name == "representativeness" else 4
    unchanged = b.value == pytest.approx(a.value, rel=searched, abs=drawn * math.hypot(a.margin, b.margin) / 1.96)
    if key in HIDDEN_THERE:
        assert "headwise" not in measure.invariant_under
        return
    assert unchanged == ("headwise" in measure.invariant_under), (a, b)
