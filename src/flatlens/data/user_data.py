"""Data of the user's own, as the data of a study: from `file.py:NAME`, or a folder of images or texts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from flatlens import userfile
from flatlens.data.sources import Samples, load_data
from flatlens.data.split import Split
from flatlens.errors import BadData
from flatlens.problem.loaders import load_seeded, seeded
from flatlens.training.training_data import Pair

ONE_IN = 5
"""One of this many samples is held out as test data, where there is none."""
_SEED = 0
"""Seed of the random numbers that the user's function draws."""
ReadSamples: TypeAlias = tuple[Pair, Pair | None]
"""All training samples, and the test samples if the user gives any."""


@dataclass(frozen=True)
class UserData:
    """Samples of the user's own, and which of them to train and to test on.

    Without test data, `test` of the samples are held out, drawn with `seed`: a fifth by default, none if it is 0.
    """

    source: str  #: file.py:NAME, or a folder; with the whole path
    contents: str  #: hash of all samples
    held_out: str | None = None  #: test data in the same forms
    train: int | None = None  #: number of training samples, drawn with the seed; all by default
    test: int | None = None  #: number of test samples; all by default
    seed: int = 0
    flat: bool | None = None  #: whether inputs become rows of numbers

    @classmethod
    def of(cls, source: str, held_out: str | None = None) -> UserData:
        """Return the data that `source` names, as `flatlens measure --data` does, with the hash of its contents."""
        return cls.read(source, held_out)[0]

    @classmethod
    def read(cls, source: str, held_out: str | None = None) -> tuple[UserData, ReadSamples]:
        """Return the same, and all its samples: `split` takes them in place of another reading.

        Raises:
            BadData: it cannot be read as pairs of tensors, one row for each sample.
        """
        source, held_out = _whole_path(source), None if held_out is None else _whole_path(held_out)
        samples = _read(source, held_out)
        return cls(source, _contents(*samples), held_out), samples

    @property
    def name(self) -> str:
        """The file and the function, without folders."""
        return userfile.short(self.source)

    def load(self) -> Split:
        """Read the data again and return it.

        Raises:
            BadData: the samples are others than those the study began with, or fewer than asked for.
        """
        samples = _read(self.source, self.held_out)
        if _contents(*samples) != self.contents:
            raise BadData(
                f"data: {self.name} gives other samples than when the study began: was it changed, or does it draw "
                f"random numbers from a generator without a seed? Each call must give the same samples"
            )
        return self.split(samples)

    def split(self, samples: ReadSamples) -> Split:
        """Return the training and test data, of all the samples that were read.

        Raises:
            BadData: there are fewer samples than asked for.
        """
        train, test = samples
        told = [f"what {self.name} gives"]
        if test is None:
            total = len(train[0])
            held = total // ONE_IN if self.test is None else self.test
            if not 0 <= held < total:
                raise BadData(f"data: test={self.test} of {total} samples: at least one must be left for training")
            train, test = _parted(train, held, self.seed)
            told += [f"{held} of {total} samples are held out as test data, drawn with seed {self.seed}"] * (held > 0)
        elif self.test is not None:
            test = _drawn(test, self.test, self.seed, "test")
        if self.train is not None:
            train = _drawn(train, self.train, self.seed, "train")
        (x, y), (test_x, test_y) = (((x.flatten(1) if self.flat else x), y) for x, y in (train, test))
        labels = torch.cat([y, test_y]) if not y.is_floating_point() else y[:0]
        classes = max(0, 1 + int(labels.max())) if labels.numel() else 0
        return Split(self.name, x, y, test_x, test_y, classes, "; ".join(told))


def _whole_path(spec: str) -> str:
    if not userfile.is_userfile(spec):
        return str(Path(spec).expanduser().resolve())
    return userfile.with_folder(spec)


def _read(source: str, held_out: str | None) -> ReadSamples:
    """Return the training data, and the test data if there are any."""
    for spec, argument in ((source, "data"), (held_out, "test")):
        if spec is not None and userfile.is_userfile(spec):
            load_seeded(spec, argument)  # apart from the call, which is seeded anew
    with seeded(_SEED):
        found = load_data(source, "data")
        train = _gathered(found.data, f"data: {userfile.short(source)}")
    test = found.test
    if held_out is not None:
        with seeded(_SEED):
            test = load_data(held_out, "test", classes=found.classes).data
    if test is None:
        return train, None
    with seeded(_SEED):
        others = _gathered(test, f"test: {userfile.short(held_out or source)}")
    _require_alike(train[1], others[1], userfile.short(source))
    return train, others


def _require_alike(y: Tensor, test_y: Tensor, what: str) -> None:
    """Raise BadData if training and test data have targets of different kinds."""
    if y.dtype == test_y.dtype and y.shape[1:] == test_y.shape[1:]:
        return
    one, other = (
        f"{'numbers' if part.is_floating_point() else 'class labels'} of shape {tuple(part.shape)}"
        for part in (y, test_y)
    )
    raise BadData(
        f"data: the targets of {what} are {one}, those of the test data {other}: give both in one form, such as "
        f"y.long() for labels or y.float() for a regression"
    )


def _gathered(samples: Samples, what: str) -> Pair:
    """Return all samples as one pair of tensors: inputs (n, ...), and labels (n,) or targets (n, N)."""
    pair: object = samples
    if isinstance(samples, Dataset | DataLoader):
        loader = samples if isinstance(samples, DataLoader) else DataLoader(samples, batch_size=256)
        pair = userfile.guarded(lambda: _joined(loader), what)
    if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(part, Tensor) for part in pair):
        raise BadData(f"{what}: a study needs pairs of tensors (inputs, targets); dicts and several inputs do not work")
    x, y = pair
    if x.ndim < 2 or len(x) != len(y) or len(x) < 2:
        raise BadData(
            f"{what}: inputs of shape (n, ...) and n targets are needed, n at least 2, got {tuple(x.shape)} and "
            f"{tuple(y.shape)}"
        )
    x = x.float() if x.is_floating_point() else x
    if y.is_floating_point():
        return x.detach(), y.detach().float().reshape(len(y), -1)
    return x.detach(), y.detach().long().squeeze(1) if y.ndim == 2 and y.shape[1] == 1 else y.detach().long()


def _joined(loader: DataLoader[object]) -> object:
    batches = [tuple(batch) if isinstance(batch, tuple | list) else (batch,) for batch in loader]
    if not batches or len(batches[0]) != 2 or not all(isinstance(part, Tensor) for part in batches[0]):
        return None
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def _contents(train: Pair, test: Pair | None) -> str:
    """Return twelve hexadecimal digits of the hash of the samples, their types and shapes."""
    digest = hashlib.sha256()
    for tensor in (*train, *(test or ())):
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:12]


def _parted(data: Pair, count: int, seed: int) -> tuple[Pair, Pair]:
    """Return the samples that stay, and `count` drawn ones, both in the data's order."""
    order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(seed))
    kept, held = order[count:].sort().values, order[:count].sort().values
    return (data[0][kept], data[1][kept]), (data[0][held], data[1][held])


def _drawn(data: Pair, count: int, seed: int, name: str) -> Pair:
    if not 1 <= count <= len(data[0]):
        raise BadData(f"data: {name}={count}: there are {len(data[0])} samples")
    return _parted(data, count, seed)[1]
