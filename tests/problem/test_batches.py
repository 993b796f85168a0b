"""Dicts, lists of dicts, and samples of different lengths."""

from __future__ import annotations

from collections import UserDict

import numpy as np
import pytest
import torch
from networks import module_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import flatlens as fl
from flatlens.errors import BadData, BadInput
from flatlens.problem.batches import as_pair, checksum, collated, is_dicts, picked, stacked

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(6) % 2


def net() -> nn.Module:
    torch.manual_seed(0)
    return module_of(lambda net, pixels: net.net(pixels), net=(3, 2))


class Rows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"pixels": X[i], "label": Y[i]}


def in_arrays(rows: list[dict[str, Tensor]]) -> dict[str, np.ndarray]:
    return {name: np.stack([row[name].numpy() for row in rows]) for name in rows[0]}


class Table:
    """As datasets.Dataset of Hugging Face: a length, and rows by number."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> dict[str, object]:
        return {"pixels": X[i].tolist(), "label": int(Y[i]), "text": "some words"}


class Pair:
    x, y = X, Y


FORMS = {
    "a pair": lambda: (X, Y),
    "an object": Pair,
    "a dict": lambda: {"pixels": X, "labels": Y},
    "a BatchEncoding": lambda: UserDict({"pixels": X, "labels": Y}),
    "a dict of lists": lambda: {"pixels": X.tolist(), "labels": Y.tolist()},
    "a dict of arrays": lambda: {"pixels": X.numpy(), "labels": Y.numpy(), "text": np.array(["a"] * 6)},
    "a loader of dicts of arrays": lambda: DataLoader(Rows(), batch_size=4, collate_fn=in_arrays),
    "another name": lambda: {"image": X, "label": Y},
    "entries not named": lambda: {"pixels": X, "labels": Y, "idx": torch.arange(6), "text": ["a"] * 6},
    "a list of samples": lambda: [{"pixels": X[i], "labels": Y[i]} for i in range(6)],
    "a list of samples in numpy": lambda: [{"pixels": X[i].numpy(), "labels": np.int64(Y[i])} for i in range(6)],
    "a list of batches": lambda: [{"pixels": X[i : i + 2], "labels": Y[i : i + 2]} for i in (0, 2, 4)],
    "two samples in a list, twice": lambda: [{"pixels": X[i : i + 3], "labels": Y[i : i + 3]} for i in (0, 3)],
    "a data set of dicts": Rows,
    "another library's data set": Table,
    "a loader of dicts": lambda: DataLoader(Rows(), batch_size=4),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_same_data_gives_the_same_numbers(form: str) -> None:
    truth = fl.measure(fl.Lens(fl.Problem(net(), "cross_entropy", (X, Y))), ["loss", "mls", "ggn_trace"])
    problem = fl.Problem(net(), "cross_entropy", FORMS[form](), test=FORMS[form]())
    found = fl.measure(fl.Lens(problem), ["loss", "mls", "ggn_trace", "test_loss"])
    assert problem.n == 6
    for key, e in truth.items():
        assert torch.equal(found[key].samples, e.samples) if e.samples is not None else found[key].value == e.value
    assert found["test_loss"].value == found["loss"].value


def test_ids_of_different_lengths_are_padded_and_hidden() -> None:
    rows = [{"input_ids": [1, 2, 3], "labels": [4, 5, 6]}, {"input_ids": [7], "labels": [8]}]
    batch = collated(rows)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [7, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[4, 5, 6], [8, -100, -100]]
    own = collated([{**row, "attention_mask": [0] * len(row["input_ids"])} for row in rows])
    assert own["attention_mask"].tolist() == [[0, 0, 0], [0, 0, 0]]


def test_a_list_of_boxes_is_taken_apart_with_its_images() -> None:
    """Four boxes of one image, and four images: the list has one item for each image all the same."""
    boxes = [torch.ones(4, 4), torch.zeros(2, 4), torch.zeros(0, 4), torch.zeros(1, 4)]
    loader = DataLoader(range(4), batch_size=4, collate_fn=lambda rows: (X[rows], [boxes[i] for i in rows]))
    seen: list[int] = []

    def loss(f: Tensor, y: list[Tensor]) -> Tensor:
        seen.append(len(y))
        assert len(f) == len(y)
        return torch.stack([one.sum() * (1 + len(box)) for one, box in zip(f, y, strict=True)])

    problem = fl.Problem(net(), loss, loader)
    truth = net()(X[:4]).sum(1) * torch.tensor([5, 3, 1, 2])
    assert torch.allclose(fl.Lens(problem).outcomes("data").losses, truth.double(), rtol=1e-6)
    small = problem.subset(3, torch.Generator().manual_seed(0))
    assert small.n == 3
    assert {1, 2, 4} <= set(seen)


def test_picked_targets() -> None:
    at, three = torch.tensor([2, 0]), torch.arange(3)
    whole = {"a": three, "b": [three, torch.ones(2)], "c": ["x", "y", "z"], "d": None, "e": torch.tensor(1.0)}
    found = picked(whole, at, 3)
    assert found["a"].tolist() == found["b"][0].tolist() == [2, 0]
    assert found["b"][1].tolist() == [1, 1]
    assert found["c"] == ["z", "x"]
    assert (found["d"], float(found["e"])) == (None, 1.0)


def test_a_list_or_tuple_as_long_as_the_batch() -> None:
    """A list is cut unless all its items count samples; a tuple only if none does."""
    at, two, other = torch.tensor([1]), torch.arange(2), torch.zeros(3)
    assert [one.tolist() for one in picked([two, two], at, 2)] == [[1], [1]]
    assert picked([two, other], at, 2) == [other]
    assert [one.tolist() for one in picked((two, other), at, 2)] == [[1], [0, 0, 0]]
    assert picked((other, "a"), at, 2) == ["a"]
    assert picked((other, "a"), at, 2, lambda part: isinstance(part, list)) == (other, "a")


REFUSED = {
    "no labels": ({"pixels": X}, BadData, "pairs .x, y. or dicts with labels"),
    "rows that differ": ([{"pixels": X[0], "label": 1}, {"pixels": X[0]}, {"pixels": X[0], "label": 1}], BadData,
                         r"sample 1 has the entries \['pixels'\], not \['label', 'pixels'\]"),
    "images of two sizes": ([{"pixels": torch.ones(3, i), "label": 0} for i in (2, 3)], BadData, "to one shape"),
    "words": ([{"pixels": ["a", "b"], "label": 0}], BadInput, "forward failed"),
    "nothing": ([], BadData, "a list of dicts"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_gets_one_line(what: str) -> None:
    data, error, words = REFUSED[what]
    with pytest.raises(error, match=words) as caught:
        fl.Problem(net(), "cross_entropy", data)
    assert "\n" not in str(caught.value)


class Unlike(Rows):
    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"pixels": X[i]} if i == 1 else super().__getitem__(i)


UNREADABLE = {
    "rows that differ": (lambda: [FORMS["a list of samples"]()[0], {"pixels": X[0]}, FORMS["a list of samples"]()[0]],
                         "sample 1 has the entries"),
    "a data set of rows that differ": (Unlike, "sample 1 has the entries"),
    "images of two sizes": (lambda: [{"pixels": torch.ones(3, i), "label": 0} for i in (2, 3)], "to one shape"),
    "numbers that are none": (lambda: [{"pixels": [1.0, 2.0, "a"], "label": 0}], "a list is not a tensor"),
    "a dict of such": (lambda: {"pixels": [[1.0, 2.0, "a"]], "labels": [0]}, "a list is not a tensor"),
}  # fmt: skip


@pytest.mark.parametrize("what", UNREADABLE)
def test_held_out_data_that_cannot_be_read_are_named_so(what: str) -> None:
    data, words = UNREADABLE[what]
    with pytest.raises(BadData, match=rf"Problem\(test=\.\.\.\): .*{words}"):
        fl.Problem(net(), "cross_entropy", (X, Y), test=data())


def test_small_parts() -> None:
    assert as_pair((1, 2)) == (1, 2)
    assert as_pair({"a": 1}) == {"a": 1}
    assert not is_dicts("ab")
    assert not is_dicts(({"a": 1}, {"a": 2}))
    assert not is_dicts([{"a": 1}, {"b": 2}])
    assert stacked("x", [torch.ones(2, 2), torch.ones(1, 2)]).shape == (2, 2, 2)


def test_a_checksum_is_of_values_at_any_stride() -> None:
    whole = torch.arange(12).reshape(3, 4)
    for part in (whole[:1, 1], whole[0, ::2][1:], whole[:, 1], whole.T, whole[:0]):
        assert checksum(part) == checksum(torch.tensor(part.tolist(), dtype=torch.long))
