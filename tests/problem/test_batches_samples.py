"""Samples of a batch: counted, picked, joined, moved, checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens.errors import BadData
from flatlens.problem.batches import (
    checksum,
    finite,
    joined,
    move,
    require_dense,
    require_finite,
    select,
    size,
    spaced,
    take,
)

X, SHARED = torch.arange(12.0).reshape(6, 2), torch.tensor(3.0)
BATCH = ({"x": X, "scale": SHARED, "names": list("abcdef")}, torch.arange(6))


def test_the_first_axis_counts_samples():
    assert size(BATCH) == 6
    with pytest.raises(BadData, match="first axis is the samples"):
        size({"scale": SHARED})


def test_some_samples_and_what_does_not_count_them():
    inputs, y = take(BATCH, 2, 4)
    assert inputs["x"].tolist() == [[4.0, 5.0], [6.0, 7.0]]
    assert inputs["scale"] is SHARED
    assert inputs["names"] == ["c", "d"]
    assert y.tolist() == [2, 3]
    assert take(BATCH, 0, 6) is BATCH
    assert select(BATCH, torch.tensor([5, 0]))[1].tolist() == [5, 0]


def test_samples_spaced_evenly():
    assert spaced(BATCH, 6) is BATCH
    assert spaced(BATCH, 3)[1].tolist() == [0, 2, 5]


def test_what_is_taken_apart_is_joined_again():
    inputs, y = joined([take(BATCH, 0, 1), take(BATCH, 1, 6)])
    assert torch.equal(inputs["x"], X)
    assert inputs["names"] == list("abcdef")
    assert torch.equal(inputs["scale"], SHARED)
    assert torch.equal(y, BATCH[1])


def test_a_moved_batch_is_a_copy():
    inputs, y = move(BATCH, torch.device("cpu"), torch.float64)
    assert inputs["x"].dtype is torch.float64
    assert y.dtype is torch.int64
    y += 1
    assert BATCH[1][0] == 0


def test_a_checksum_is_of_the_values():
    assert checksum(X) == checksum(X.t().contiguous().t())
    assert checksum(X) != checksum(X + 1)
    assert checksum(X, start=checksum(X)) == checksum(X, X) != checksum(X)


@pytest.mark.parametrize(
    ("values", "is_so"),
    [
        ([1.0, 2.0], True),
        ([], True),
        ([3e38, 3e38], True),  # their sum is inf, they are not
        ([float("inf"), float("-inf")], False),
        ([float("nan"), 1.0], False),
    ],
)
def test_finite(values: list[float], is_so: bool) -> None:
    assert finite(torch.tensor(values)) is is_so


def test_the_first_bad_sample_is_named():
    x = X.clone()
    x[4, 1] = float("nan")
    with pytest.raises(BadData, match=r"Problem\(data=...\): 1 of 6 samples contain NaN or inf, the first at index 4"):
        require_finite((x, BATCH[1]), "data")
    require_finite(BATCH, "data")


@pytest.mark.parametrize("form", ["a pair", "a dict", "a data set", "a list of dicts", "two targets"])
def test_missing_targets_are_told_of_a_mask_and_nothing_else_is(form: str) -> None:
    """A mask as a second target works then, in the same form."""
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    y[4, 1] = torch.nan
    data: dict[str, Any] = {
        "a pair": lambda x, y: (x, y),
        "a dict": lambda x, y: {"input": x, "labels": y},
        "a data set": lambda x, y: torch.utils.data.TensorDataset(x, y),
        "a list of dicts": lambda x, y: [{"input": a, "labels": b} for a, b in zip(x, y, strict=True)],
        "two targets": lambda x, y: (x, (y, y)),
    }
    net, mask = nn.Linear(3, 2), r"1 of 6 samples contain NaN or inf.*give a mask as a second target, \(y.nan_to_num"
    with pytest.raises(BadData, match=mask):
        fl.Problem(net, "mse", data[form](x, y))
    for bad in (x.clone(), y.clone()):
        bad[2, 1] = torch.inf
        with pytest.raises(BadData, match=r"repair or remove them$"):
            fl.Problem(net, "mse", data[form](bad, y.nan_to_num()) if bad.shape == x.shape else data[form](x, bad))
    with pytest.raises(BadData, match=r"repair or remove them$"):
        fl.Problem(net, "mse", data[form](x.where(x > 0, torch.nan), y.nan_to_num()))
    known = ~y.isnan()
    problem = fl.Problem(net, lambda f, t: ((f - t[0]) * t[1]).square().sum(1), (x, (y.nan_to_num(), known)))
    truth = (net(x) - y)[known].square().sum() / 6
    assert fl.Lens(problem).outcomes("data").risk == pytest.approx(float(truth.detach()), rel=1e-6)


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (torch.empty(3, 2, device="meta"), "meta device"),
        (X.to_sparse(), "sparse"),
        (X.to(torch.float8_e5m2), "float8"),
    ],
)
def test_tensors_that_cannot_be_split_are_refused(tensor, told):
    with pytest.raises(BadData, match=told):
        require_dense((tensor, BATCH[1]), "data=...")
