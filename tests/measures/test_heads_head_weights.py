"""The weights of heads: the directions in which they are moved span what their definition asks for."""

from __future__ import annotations

import attentions
import pytest
import torch
from torch import Tensor

import flatlens as fl
from flatlens.measures.heads import HeadWeight, _samples, heads_of
from flatlens.operations.weight_pairs import Entries, NotUnderstood


def outer(rows: list[dict[str, Tensor]]) -> Tensor:
    """Sum over directions of their outer products."""
    M = torch.stack([torch.cat([row[name].flatten() for name in sorted(row)]) for row in rows])
    return M.T @ M


def row_of(parts: list[tuple[Entries, Tensor]], values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The change of whole parameters, by name."""
    row = {}
    for entries, part in parts:
        row[entries.parameter] = torch.zeros_like(values[entries.parameter]).flatten()
        row[entries.parameter][entries.at.flatten()] = part.flatten()
    return row


def relative(one: HeadWeight, values: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The change of the parameters by W A for each unit matrix A; the bias keeps W's product with the shift."""
    W, norm = one.entries.of(values), one.norm
    scale = torch.ones(W.shape[1]).double() if norm is None else norm.scale.of(values)[:, 0]
    found = []
    for unit in torch.eye(W.shape[1] ** 2, dtype=torch.float64):
        change = W * scale @ unit.reshape(W.shape[1], W.shape[1]) / scale
        parts = [(one.entries, change)]
        if norm is not None and norm.shift is not None and one.bias is not None:
            parts.append((one.bias, -change @ norm.shift.of(values)))
        found.append(row_of(parts, values))
    return found


@pytest.mark.parametrize("name", ["plain", "grouped", "llama-shaped", "crossed"])
def test_directions_span_all_relative_changes(name: str) -> None:
    net, x, y = attentions.made(name)
    lens = fl.Lens(fl.Problem(net, "cross_entropy", (x, y)))
    weights, why = heads_of(lens)
    assert not why
    values = {key: p.detach() for key, p in lens.model.named_parameters()}
    assert {one.reads for one in weights} == {True, False}
    for one in weights:
        directions = one.directions(values)
        h, a = directions.shape
        assert h < a
        units = torch.eye(h * a, dtype=torch.float64)
        moved = [row_of(directions.along(unit.reshape(h, a)), values) for unit in units]
        theirs = relative(one, values)
        assert all(set(row) == set(theirs[0]) for row in moved)
        torch.testing.assert_close(outer(moved), outer(theirs), rtol=1e-10, atol=1e-10)


def test_a_row_that_is_rounding_takes_the_sample_of_its_place() -> None:
    plain = torch.ones(6, 2)
    numbered = torch.tensor([1.0, 1, 2, 2, 3, 3])[:, None] * plain
    plain[4], numbered[4] = 1e-5, -2e-5
    assert _samples(plain, numbered, 3).tolist() == [0, 0, 1, 1, 2, 2]
    turned = [0, 2, 4, 1, 3, 5]  # in another order its place is no sign
    assert _samples(plain[turned], numbered[turned], 3).tolist() == [0, 1, -1, 0, 1, 2]
    numbered[4] = 3e-5 + torch.tensor([0, 1e-2])
    with pytest.raises(NotUnderstood, match="several samples"):
        _samples(plain, numbered, 3)


class Routed(torch.nn.Module):
    """A linear layer of two before attention, for each sample by the sign of its first number."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.attention, *_ = attentions.made("plain")

    def forward(self, x: Tensor) -> Tensor:
        first, h = x[:, 0, 0] > 0, torch.zeros_like(x)
        for expert, mine in zip(self.experts, (first, ~first), strict=True):
            if bool(mine.any()):
                h = h.index_put((mine.nonzero()[:, 0],), expert(x[mine]))
        return self.attention(h)


def test_the_products_of_a_head_are_found_behind_experts_that_other_samples_take() -> None:
    """Where the first samples, from which the heads are read, take one expert, and all together both."""
    torch.manual_seed(0)
    net = Routed().double()
    x = torch.randn(6, *attentions.made("plain")[1].shape[1:], dtype=torch.float64)
    x[:, 0, 0] = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, -1.0])
    y = torch.zeros(len(x), dtype=torch.long)
    in_turn = [0, 2, 1, 3, 4, 5]
    one, other = (
        fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x[order], y))), ["head_flatness_ggn"])
        for order in (slice(None), in_turn)
    )
    assert one["head_flatness_ggn"].value == pytest.approx(other["head_flatness_ggn"].value, rel=1e-12)
