"""Which place the label of an output has, and what a network is called with."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from networks import applied, module_of
from torch import Tensor, nn
from torch.nn import functional as F

import flatlens as fl
from flatlens.errors import BadData, BadInput
from flatlens.problem.forward import Convention, called, convention_of, main_output

IDS = torch.tensor([[1, 2, 3, 4], [2, 3, 1, 0]])
LABELS = IDS.masked_fill(IDS == 0, -100)


def own_loss(net: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
    T = labels.shape[1]
    return F.cross_entropy(logits[:, : T - net.shift].flatten(0, 1), labels[:, net.shift :].flatten())


def speaker(shift: int, zero: bool = False, own: Callable[..., Tensor] = own_loss) -> nn.Module:
    """As a network of transformers: it takes labels, and returns logits and a loss of its own."""

    def forward(net: nn.Module, input_ids: Tensor, labels: Tensor | None = None, unused: Any = None) -> SimpleNamespace:
        logits = net.head(net.embed(input_ids).cumsum(1))
        return SimpleNamespace(logits=logits, loss=None if labels is None else own(net, logits, labels))

    torch.manual_seed(0)
    net = module_of(forward, embed=nn.Embedding(5, 4), head=(4, 5), shift=shift)
    if zero:  # all outputs are alike, and so are both losses
        nn.init.zeros_(net.head.weight)
        nn.init.zeros_(net.head.bias)
    return net


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
def test_the_network_s_own_loss_says_where_labels_lie(shift: int, zero: bool, frozen: bool) -> None:
    net = speaker(shift, zero).requires_grad_(not frozen)
    batch = {"input_ids": IDS, "labels": LABELS}
    assert convention_of(net, {"input_ids": IDS}, LABELS) == Convention(False, bool(shift), by_token=True)
    problem = fl.Problem(net, "cross_entropy", batch, parameters="all")
    assert fl.Lens(problem).outcomes("data").risk == pytest.approx(float(net(**batch).loss), rel=1e-6)
    assert all(p.requires_grad != frozen for p in net.parameters())


def test_in_a_pair_labels_lie_as_they_are_given() -> None:
    net = speaker(1)
    pair = fl.Problem(net, "cross_entropy", ({"input_ids": IDS}, LABELS))
    f = net(IDS).logits
    truth = F.cross_entropy(f.flatten(0, 1), LABELS.flatten())
    assert fl.Lens(pair).outcomes("data").risk == pytest.approx(float(truth.detach()), rel=1e-6)
    with pytest.raises(BadInput, match="test data in the same form"):
        fl.Problem(net, "cross_entropy", {"input_ids": IDS, "labels": LABELS}, test=({"input_ids": IDS}, LABELS))
    part = fl.Problem(net, "cross_entropy", {"input_ids": IDS, "labels": LABELS}).subset(1, torch.Generator())
    assert part.convention == Convention(False, True, by_token=True)


@pytest.mark.parametrize("kind", ["Smooth", "Detached"])
def test_another_loss_of_the_network_s_own_is_refused_with_forward(kind: str) -> None:
    own = {"Smooth": lambda net, f, y: f.square().mean(), "Detached": lambda net, f, y: net.head.bias.sum()}
    net = speaker(0, own=own[kind])
    with pytest.raises(BadData, match=r"neither of each token nor of the next token.*give forward="):
        fl.Problem(net, "cross_entropy", {"input_ids": IDS, "labels": LABELS})
    data = {"input_ids": IDS}, LABELS
    assert fl.Problem(net, "cross_entropy", data, forward=lambda m, b: (m(**b[0]).logits, b[1])).mass == 7


def test_a_network_that_needs_its_labels_gets_them() -> None:
    class Needs(nn.Linear):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            assert len(labels) == len(x)
            return super().forward(x)

    problem = fl.Problem(Needs(3, 2), "cross_entropy", {"x": torch.randn(4, 3), "labels": torch.tensor([0, 1, 1, 0])})
    assert problem.convention == Convention(fed=True)


def test_entries_that_forward_does_not_name_are_left_out() -> None:
    net = speaker(0)
    assert called(net, {"input_ids": IDS, "special_tokens_mask": IDS}).logits.shape == (2, 4, 5)
    assert called(nn.Linear(2, 1), {"anything": torch.ones(3, 2)}).shape == (3, 1)
    both = called(applied(lambda a, b: a - b), (torch.ones(2, 1), torch.ones(2, 1)))
    assert both.abs().sum() == 0


def test_the_outputs_of_an_answer() -> None:
    f = torch.ones(2, 3)
    assert main_output(SimpleNamespace(logits=f)) is f
    assert main_output({"out": f, "aux": 2 * f}) is f
    assert main_output({"a": f})["a"] is f
