"""Origins of tensors in autograd's graph, and the linear maps along which their entries move."""

from __future__ import annotations

import pytest
import torch
from networks import module_of
from torch import nn

from flatlens.operations.graph import Graph, shape_of, taken_back

X = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def moves(then) -> nn.Module:
    theta = nn.Parameter(torch.ones(6))
    return module_of(lambda net, x: then(net, net.fc(x)).square(), fc=(4, 6), theta=theta).double()


def read(then):
    torch.manual_seed(0)
    net = moves(then)
    f = net(X.clone().requires_grad_())
    return net, Graph(f, net), f.grad_fn.next_functions[0]


@pytest.mark.parametrize(
    ("then", "found"),
    [
        (lambda s, z: z.view(2, 3, 2, 3).transpose(1, 2)[..., :2].flip(-1) * 3, "AddmmBackward0"),
        (lambda s, z: torch.cat([-z[..., 3:], z[..., :3]], -1) * 0.5 + z / 2, "AddmmBackward0"),
        (lambda s, z: torch.view_as_real(torch.view_as_complex(z.unflatten(-1, (3, 2))) * 1j), "AddmmBackward0"),
        (lambda s, z: z.mean(1), "AddmmBackward0"),
        (lambda s, z: z.tanh().view(-1), "TanhBackward0"),
        (lambda s, z: z * s.theta, "MulBackward0"),
        (lambda s, z: z[..., None, :] + s.theta, "AddBackward0"),
        (lambda s, z: z.softmax(-1) @ z.mT, "UnsafeViewBackward0"),
    ],
)
def test_a_tensor_is_followed_back_to_what_made_it(then, found):
    _, paths, edge = read(then)
    origins = paths.origins(edge)
    if found == "UnsafeViewBackward0":
        assert [node.name() for node, _ in origins.edges] == ["BmmBackward0"]
        return
    assert origins.single is not None
    assert origins.single[0].name() == found
    assert paths.is_product(origins.single[0]) == (found == "AddmmBackward0")


def test_a_parameter_that_joins_is_told():
    _, paths, edge = read(lambda s, z: torch.cat([z, s.theta.expand(2, 1, 6)], 1))
    assert paths.origins(edge).joined
    assert paths.origins(edge).single is None


def test_a_bias_that_is_added_apart_belongs_to_its_product():
    net = module_of(
        lambda net, x: ((x @ net.w) + net.b).view(2, -1).exp(),
        w=nn.Parameter(torch.randn(4, 5).double()),
        b=nn.Parameter(torch.randn(5).double()),
    )
    f = net(X.clone().requires_grad_())
    paths = Graph(f, net)
    origin = paths.origins(f.grad_fn.next_functions[0]).single
    assert origin is not None
    assert origin[0].name() == "MmBackward0"


def test_vectors_come_back_along_the_map():
    _, paths, edge = read(lambda s, z: 2 * z.flip(-1).transpose(1, 2))
    origin = paths.origins(edge).single
    u = torch.randn(3, *shape_of(edge), dtype=torch.float64)
    back = taken_back(edge, origin, u)
    torch.testing.assert_close(back.view(3, 2, 3, 6), 2 * u.transpose(2, 3).flip(-1))
    assert torch.equal(taken_back(edge, edge, u), u)


@pytest.mark.parametrize(
    ("make", "of"),
    [
        (lambda w: w, lambda at: at),
        (lambda w: w.T, lambda at: at.T),
        (lambda w: w[2:5, ::2], lambda at: at[2:5, ::2]),
        (lambda w: w.chunk(2)[1].reshape(3, 4).flip(0), lambda at: at.chunk(2)[1].reshape(3, 4).flip(0)),
        (lambda w: 2 * w, None),
        (lambda w: w / w.norm(), None),
        (lambda w: w.repeat(2, 1), None),
        (lambda w: w[:3] + w[3:], None),
        (lambda w: w / 2 + w / 2, lambda at: at),
        (lambda w: 1 + w, None),
        (lambda w: w - 1, None),
        (lambda w: torch.ones(6, 4).double().index_add(0, torch.arange(6), w), None),
        (lambda w: (w - w.detach()).exp(), None),
    ],
)
def test_entries_of_a_parameter_keep_their_positions(make, of):
    net = nn.Module()
    net.w = nn.Parameter(torch.randn(6, 4).double())
    f = make(net.w).exp()
    known = Graph(f, net).leaf_of(f.grad_fn.next_functions[0])
    if of is None:
        assert known is None
        return
    name, at = known
    assert name == "w"
    assert torch.equal(at, of(torch.arange(24).reshape(6, 4)))


def test_what_acts_on_samples_is_told_apart_from_what_makes_a_weight():
    net, paths, _ = read(lambda s, z: z + (s.theta * 2).exp())
    (node, edge), = paths.acting(net.theta)  # fmt: skip
    assert node.name() == "AddBackward0"
    assert edge[0].name() == "ExpBackward0"
    assert [node.name() for node, _ in paths.acting(net.fc.weight)] == ["AddmmBackward0"]


def test_a_constant_may_be_added_where_the_caller_knows_of_it():
    net = nn.Module()
    net.w = nn.Parameter(torch.zeros(5).double())
    for make, known in ((lambda w: (w + 1).flip(0), True), (lambda w: w.exp(), False)):
        f = make(net.w).square()
        found = Graph(f, net).leaf_of(f.grad_fn.next_functions[0], shifted=True)
        assert (found is not None) == known
        assert found is None or found[1].tolist() == [4, 3, 2, 1, 0]
