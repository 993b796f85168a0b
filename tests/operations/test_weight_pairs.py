"""Entries of parameters, and moves of two sets of them that leave their product alone."""

from __future__ import annotations

import torch

from flatlens.operations.weight_pairs import Entries, HeadOrder, WeightPair

Q, K = torch.randn(2, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
BASIS = torch.tensor([[0.0, 1.0], [2.0, 0.0]], dtype=torch.float64)


def rows(name: str, first: int, basis: torch.Tensor | None = None) -> Entries:
    return Entries(name, torch.arange(18).reshape(6, 3)[first : first + 2], basis)


def parameters() -> dict[str, torch.Tensor]:
    return {"q": torch.nn.Parameter(Q.clone()), "k": torch.nn.Parameter(K.clone())}


def test_entries_are_read_and_written_alone():
    live = parameters()
    some = rows("q", 2)
    assert torch.equal(some.of(live), Q[2:4])
    some.set(live, torch.zeros(2, 3).double())
    assert torch.equal(live["q"][2:4], torch.zeros(2, 3).double())
    assert torch.equal(live["q"][:2], Q[:2])
    assert torch.equal(live["q"][4:], Q[4:])


def test_a_pair_keeps_its_product_in_the_coordinates_of_the_bases():
    pair = WeightPair("one", (rows("q", 0, BASIS),), (rows("k", 2, BASIS.T.contiguous()),), ((0, 1),), (), frozenset())
    live = parameters()
    A = pair.drawn(torch.Generator().manual_seed(1))
    pair.move(live, A)
    before = (BASIS @ Q[:2]).T @ (BASIS.T @ K[2:4])
    after = (BASIS @ live["q"][:2]).T @ (BASIS.T @ live["k"][2:4])
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(BASIS @ live["q"][:2], A @ BASIS @ Q[:2])


def test_what_is_drawn_has_the_structure():
    turned = WeightPair("t", (rows("q", 0),), (rows("k", 0),), (), ((0, 1),), frozenset())
    A = turned.drawn(torch.Generator().manual_seed(1))
    assert A[0, 0] == A[1, 1]
    assert A[0, 1] == -A[1, 0] != 0
    diagonal = WeightPair("d", (rows("q", 0),), (rows("k", 0),), None, (), frozenset())
    a = diagonal.drawn(torch.Generator().manual_seed(1))
    assert a.shape == (2,)
    assert bool(((a >= 5) & (a <= 25)).all())
    free = WeightPair("f", (rows("q", 0),), (rows("k", 0),), ((0, 1),), (), frozenset())
    sizes = torch.linalg.svdvals(free.drawn(torch.Generator().manual_seed(1)))
    assert bool(((sizes >= 5) & (sizes <= 25)).all())


def test_heads_change_places_within_their_groups():
    groups = tuple((rows("k", first),) for first in (0, 2, 4))
    members = tuple(((rows("q", first),),) for first in (0, 2, 4))
    live = parameters()
    HeadOrder("heads", groups, members, frozenset()).move(live, torch.Generator().manual_seed(2))
    q, k = (live[name].detach().reshape(3, 2, 3) for name in "qk")
    order = [next(i for i in range(3) if torch.equal(one, Q.reshape(3, 2, 3)[i])) for one in q]
    assert sorted(order) == [0, 1, 2] != order
    assert torch.equal(k, K.reshape(3, 2, 3)[order])
