"""Heads are the rows and columns that the network's own code gives them, however it stores them."""

from __future__ import annotations

import attentions
import modern
import pytest
import torch
from networks import module_of
from torch import nn

from flatlens.operations.graph import Graph
from flatlens.operations.pair_finders import HeadFinder

X = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def heads_of(net: nn.Module, *inputs: torch.Tensor):
    torch.manual_seed(0)
    f = net.double()(*(x.clone().requires_grad_() for x in inputs))
    f = f if isinstance(f, torch.Tensor) else f[0]
    return HeadFinder(Graph(f, net)).run()


def rows_of(entries) -> list[int]:
    return [int(at) // 4 for at in entries.at[:, 0]]


@pytest.mark.parametrize("net", [modern.self_attention(4, 2), modern.packed(4, 2)], ids=["sdpa", "mha"])
def test_fused_projections_are_split_into_heads(net):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found = heads_of(net, X)
    assert [(rows_of(pair.left[0]), rows_of(pair.right[0])) for pair in found.queries] == [
        ([0, 1], [4, 5]), ([2, 3], [6, 7])
    ]  # fmt: skip
    assert [rows_of(pair.left[0]) for pair in found.values] == [[8, 9], [10, 11]]
    columns = [pair.right[0].at for pair in found.values]
    at = torch.arange(16).reshape(4, 4)
    assert torch.equal(columns[0], at[:, :2].T)
    assert torch.equal(columns[1], at[:, 2:].T)
    assert {pair.left[1].parameter.rpartition(".")[2] for pair in found.queries} <= {"bias", "in_proj_bias"}


def test_a_mask_in_the_product_of_queries_and_keys_hides_no_head():
    """torch.baddbmm makes the scores where nn.MultiheadAttention gives its weights back, too."""
    net = nn.MultiheadAttention(4, 2, batch_first=True)
    net.forward = lambda x, plain=net.forward: plain(x, x, x, attn_mask=torch.ones(3, 3).triu(1).bool())
    found = heads_of(net, X)
    assert [rows_of(pair.left[0]) for pair in found.queries] == [[0, 1], [2, 3]]
    assert [rows_of(pair.left[0]) for pair in found.values] == [[8, 9], [10, 11]]
    assert len(found.orders) == 1
    assert not found.refused_queries | found.refused_values


def test_what_is_added_to_values_is_no_head():
    net = module_of(lambda net, x: net.o(torch.baddbmm(x, (x @ x.mT).softmax(-1), net.v(x))), v=(4, 4), o=(4, 4))
    found = heads_of(net, X)
    assert not found.values
    assert list(found.refused_values.values()) == ["something is added to what its heads make"]


def test_queries_that_share_a_key_move_together():
    net, x, _ = attentions.made("grouped")
    found = heads_of(net, x)
    assert [len(pair.left) for pair in found.queries] == [4, 4]  # two heads: weight and bias of each
    assert [len(pair.right) for pair in found.queries] == [2, 2]
    assert [len(pair.right) for pair in found.values] == [2, 2]  # two sets of columns read one set of values
    (order,) = found.orders
    assert (len(order.groups), [len(group) for group in order.members]) == (2, [2, 2])


def test_the_coordinates_are_those_that_are_multiplied():
    """Queries in another order and with a sign are told from keys in their own."""

    class Reordered(attentions.Attention):
        def forward(self, x):
            q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            seen = (torch.cat([-q[..., 2:], q[..., :2]], -1) @ k.mT).softmax(-1)
            return self.o((seen @ v).transpose(1, 2).flatten(2))

    net = Reordered().double()
    x = torch.randn(2, 5, 8).double()
    found, expected = heads_of(net, x), net(x).detach()
    for pair in found.queries:
        pair.move(dict(net.named_parameters()), pair.drawn(torch.Generator().manual_seed(0)))
    torch.testing.assert_close(net(x), expected, rtol=0, atol=1e-12)


def test_products_of_other_tensors_are_no_heads():
    net = module_of(lambda net, x: torch.bmm(net.a(x).tanh(), net.b(x).tanh().mT), a=(4, 4), b=(4, 4))
    found = heads_of(net, X)
    assert [found.queries, found.values, found.orders] == [[], [], []]


def beside(other: nn.Module) -> nn.Module:
    """Attention by linear layers, and what else reads its features."""
    return module_of(lambda net, x: net.other(x + net.attention(x)), attention=attentions.Attention(), other=other)


def convolved() -> nn.Module:
    def forward(net: nn.Module, x):
        q, k, v = (z.mT for z in net.qkv(x.mT).chunk(3, 1))
        return net.o(((q @ k.mT).softmax(-1) @ v).mT)

    return module_of(forward, qkv=nn.Conv1d(8, 24, 1), o=nn.Conv1d(8, 8, 1))


def pooled() -> nn.Module:
    """Products of features that weigh nothing: second moments, and a mean weighed by one layer."""

    def forward(net: nn.Module, x):
        z = net.norm(x)
        return z.mT @ z + net.weigh(x.mT).softmax(-1) @ z

    return module_of(forward, norm=nn.LayerNorm(8), weigh=nn.Conv1d(8, 1, 1))


def test_an_attention_by_convolutions_is_refused_and_other_products_are_not():
    x = torch.randn(2, 5, 8).double()
    for other, why in ((convolved(), "pass through Convolution on their way"), (pooled(), "")):
        found = heads_of(beside(other), x)
        assert (len(found.queries), len(found.values)) == (2, 2)
        assert found.refused_values == ({"other.qkv.weight": f"its values {why}"} if why else {})
        assert found.refused_queries == ({"other.qkv.weight": f"its queries or keys {why}"} if why else {})


def test_a_weight_that_is_made_refuses_its_own_attention_alone():
    other = attentions.Attention()
    nn.utils.parametrizations.weight_norm(other.v)
    nn.utils.parametrizations.weight_norm(other.q)
    found = heads_of(beside(other), torch.randn(2, 5, 8).double())
    assert (len(found.queries), len(found.values)) == (2, 2)
    (values,), (queries,) = found.refused_values, found.refused_queries
    assert values.startswith("other.v.parametrizations.weight")
    assert queries.startswith("other.q.parametrizations.weight")
