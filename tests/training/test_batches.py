from itertools import islice

import pytest
import torch

from flatlens.training import batches as batches_module
from flatlens.training.batches import Batches


def make(size=4, n=10, seed=0):
    x = torch.arange(float(n))[:, None]
    return Batches(x, x + 100, size, torch.Generator().manual_seed(seed))


def taken(batches, count):
    return [(b.x.flatten().tolist(), b.epoch, b.last) for b in islice(batches, count)]


def test_every_epoch_is_another_permutation_cut_into_batches():
    found = taken(make(), 6)
    assert [(epoch, last, len(x)) for x, epoch, last in found] == [
        (0, False, 4), (0, False, 4), (0, True, 2), (1, False, 4), (1, False, 4), (1, True, 2),
    ]  # fmt: skip
    first, second = ([x for xs, e, _ in found if e == epoch for x in xs] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first == torch.randperm(10, generator=torch.Generator().manual_seed(0)).tolist()


def test_targets_go_with_their_inputs():
    for batch in islice(make(), 5):
        assert torch.equal(batch.targets, batch.x + 100)


def test_all_samples_keep_their_order():
    assert taken(make(size=None), 2) == [(list(range(10)), 0, True), (list(range(10)), 1, True)]


@pytest.mark.parametrize("size", [3, 4, 10, 20, None])
@pytest.mark.parametrize("gathered", [1, 12, 28, 1 << 20])
def test_taken_up_anywhere_they_go_on_the_same(monkeypatch, size, gathered):
    wanted = taken(make(size), 12)
    monkeypatch.setattr(batches_module, "GATHERED", gathered)  # bytes put in order at a time: 4 a sample
    for stop in range(12):
        begun = make(size)
        assert taken(begun, stop) == wanted[:stop]
        again = make(size, seed=9)
        again.load_state_dict(begun.state_dict())
        assert taken(again, 12 - stop) == wanted[stop:]
