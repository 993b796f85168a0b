"""Symmetries are found where they are, by what the network does, and nowhere else; what has none gets one line."""

from __future__ import annotations

import copy

import attentions
import pytest
import torch
from networks import module_of
from torch import nn

import flatlens as fl
from flatlens.transforms.symmetries import read_symmetries

KINDS = ("queries", "values", "orders", "norms", "gates")


def read(net: nn.Module, x: torch.Tensor, y: torch.Tensor):
    return read_symmetries(fl.Problem(net, "cross_entropy", (x, y)), net)


@pytest.mark.parametrize("name", attentions.MADE)
def test_every_symmetry_is_found_and_what_has_none_says_why(name):
    net, x, y = attentions.made(name)
    before = copy.deepcopy(net.state_dict())
    found, said = read(net, x, y), attentions.MADE[name][1]
    assert {kind: len(getattr(found, kind).symmetries) for kind in KINDS} == {
        kind: getattr(said, kind) for kind in KINDS
    }
    lines = [why for kind in KINDS for why in getattr(found, kind).left.values()]
    assert any(said.why in line for line in lines) if said.why else not lines
    assert not any("\n" in line for line in lines)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


@pytest.mark.parametrize(
    ("name", "free", "turned"),
    [
        ("plain", ((0, 1, 2, 3),), ()),
        ("rotary", (), ((0, 2), (1, 3))),
        ("partly rotary", ((2, 3),), ((0, 1),)),
        ("llama-shaped", (), ((0, 2), (1, 3))),
    ],
)
def test_positions_leave_a_subgroup(name, free, turned):
    for pair in read(*attentions.made(name)).queries.symmetries:
        assert (pair.free, pair.turned) == (free, turned)


def test_the_subgroup_is_no_larger():
    """Any other change of basis of rotary queries and keys moves the function."""
    net, x, _ = attentions.made("rotary")
    pair = read(*attentions.made("rotary")).queries.symmetries[0]
    expected = net(x).detach()
    A = torch.eye(4).double()
    A[0, 1] = 0.5
    pair.move(dict(net.named_parameters()), A)
    assert float((net(x) - expected).abs().max()) > 1e-4


def test_a_rotation_of_what_is_turned_commutes():
    net, x, _ = attentions.made("rotary")
    pair = read(*attentions.made("rotary")).queries.symmetries[0]
    expected = net(x).detach()
    pair.move(dict(net.named_parameters()), pair.drawn(torch.Generator().manual_seed(0)))
    torch.testing.assert_close(net(x), expected, rtol=0, atol=1e-12)


def test_a_tied_head_keeps_its_embedding():
    import modern

    case = modern.case("gpt2", "cross_entropy")
    found = read_symmetries(fl.Problem(case.net, "cross_entropy", case.data), case.net).norms
    assert len(found.symmetries) == 4
    assert found.left == {
        "transformer.ln_f.weight -> transformer.wte.weight": "transformer.wte.weight acts elsewhere, too"
    }


def test_a_network_that_fails_on_few_samples_says_so():
    net = module_of(lambda net, x: net.fc(x), fc=(3, 2))
    problem = fl.Problem(net, "mse", (torch.ones(4, 3), torch.zeros(4, 2)))
    net.forward = lambda x: (_ for _ in ()).throw(ValueError("no"))
    (why,) = read_symmetries(problem, net).queries.left.values()
    assert "autograd's graph of the network cannot be read" in why
    assert "\n" not in why


def test_an_expert_that_the_first_samples_do_not_reach_reads_the_features_too():
    def forward(net: nn.Module, x):
        z = net.norm(x)
        out = torch.zeros(len(x), 2, dtype=x.dtype)
        for number, expert in enumerate(net.experts):
            mine = x[:, 0] > 0 if number else x[:, 0] <= 0
            if mine.any():
                out = out.index_add(0, mine.nonzero()[:, 0], expert(z[mine]))
        return out

    torch.manual_seed(0)
    x = torch.randn(12, 3).double()
    x[:, 0] = torch.tensor([-1.0] * 9 + [1.0] * 3)
    net = module_of(forward, norm=nn.LayerNorm(3), experts=nn.ModuleList(nn.Linear(3, 2) for _ in range(2))).double()
    problem = fl.Problem(net, "mse", (x, torch.zeros(12, 2).double()))
    report = fl.check_invariance(fl.Lens(problem), "mls", ["norm_scale", "norm_folding"])
    assert not report.moved
    assert all("the outputs change: something" in why for why in report.left_out.values())


def test_heads_of_two_attentions_that_cancel_are_found():
    torch.manual_seed(0)
    one = nn.MultiheadAttention(4, 2, batch_first=True)
    net = module_of(
        lambda net, x: (net.one(x, x, x)[0] - net.other(x, x, x)[0]).mean(1), one=one, other=copy.deepcopy(one)
    ).double()
    found = read(net, torch.randn(6, 5, 4, dtype=torch.float64), torch.zeros(6, dtype=torch.int64))
    assert [len(getattr(found, kind).symmetries) for kind in ("queries", "values", "orders")] == [4, 4, 2]
