"""Networks whose first embedding has no samples in front: transposed ids, or positions looked up before words."""

from __future__ import annotations

import pytest
import torch
from networks import module_of
from torch import Tensor, nn

import flatlens as fl
from flatlens.grams.record import sample_axis


def embedded(net: nn.Module, ids: Tensor) -> Tensor:
    """The words and their places, looked up in one of several orders."""
    places = torch.arange(ids.shape[1])
    if net.order == "transposed":
        return net.words(ids.T).movedim(0, 1) + net.places(places)
    if net.order == "copied":
        return net.words(ids.T.contiguous()).movedim(0, 1) + net.places(places)
    if net.order == "places first":
        before = net.places(places[None])
        return before + net.words(ids)
    if net.order == "keyword":
        return net.words(input=ids) + net.places(places)
    if net.order == "one row":
        return net.words(ids.reshape(-1)).reshape(*ids.shape, -1) + net.places(places)
    return net.words(ids) + net.places(places)


def reader(order: str) -> nn.Module:
    """Embeds token ids in one of several orders; the function of the ids is the same in all."""
    net = module_of(lambda net, ids: net.out(embedded(net, ids).tanh().mean(1)), order=order)
    net.words, net.places, net.out = nn.Embedding(6, 3), nn.Embedding(8, 3), nn.Linear(3, 2)
    return net


@pytest.mark.parametrize("tokens", [3, 4])  # fewer tokens than samples, and as many
@pytest.mark.parametrize("order", ["transposed", "copied", "places first"])
def test_the_input_is_that_of_the_words(order: str, tokens: int) -> None:
    torch.manual_seed(0)
    plain, net = reader("words first").double(), reader(order).double()
    net.load_state_dict(plain.state_dict())
    data = torch.randint(0, 6, (4, tokens)), torch.tensor([0, 1, 1, 0])
    asked = ["mls", "interpolation_sharpness", "ggn_trace", "jacobian_norm"]
    expected, found = (fl.measure(fl.Lens(fl.Problem(one, "cross_entropy", data)), asked) for one in (plain, net))
    for measure in asked:
        assert found[measure].kind == expected[measure].kind == "exact"
        assert found[measure].value == pytest.approx(expected[measure].value, rel=1e-12), measure


def test_a_column_is_one_id_of_each_sample() -> None:
    ids = torch.randint(0, 6, (4, 4), generator=torch.Generator().manual_seed(0))
    assert sample_axis(ids[:, 1], [ids]) == (0, True)
    assert sample_axis(ids[1], [ids]) == (0, False)  # all ids of one sample
    assert sample_axis(ids, []) == (None, False)


def test_ids_by_keyword_and_in_one_row() -> None:
    torch.manual_seed(0)
    plain = reader("words first").double()
    for tokens in (3, 4):
        data = torch.randint(0, 6, (4, tokens)), torch.tensor([0, 1, 1, 0])
        truth = fl.measure(fl.Lens(fl.Problem(plain, "cross_entropy", data)), ["interpolation_sharpness", "mls"])
        for order in ("keyword", "one row"):
            net = reader(order).double()
            net.load_state_dict(plain.state_dict())
            found = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", data)), ["interpolation_sharpness", "mls"])
            assert found["interpolation_sharpness"].value == pytest.approx(truth["interpolation_sharpness"].value)
            if order == "keyword":
                assert found["mls"].value == pytest.approx(truth["mls"].value)
