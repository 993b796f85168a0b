"""DATA on the command line: a data set by name, `name:ROOT` where its files are, or from `file.py:callable`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from flatlens import userfile
from flatlens.data.imagesets import IMAGE_SETS
from flatlens.data.named import IMAGES, SYNTHETIC
from flatlens.data.split import Split
from flatlens.errors import BadData, BadInput, UnknownName, one_line

MEANINGS = {
    "digits": "handwritten digits of 8 x 8 pixels, 10 classes",
    "patches": "32 x 32 colour patches of two photographs, 2 classes",
    "clusters": "four Gaussian clusters in 8 features, 2 classes",
    "eight_points": "a regression of 8 points on a line",
    **{s.name: f"{s.title}: {' x '.join(map(str, s.shape))}, {s.classes} classes" for s in IMAGE_SETS.values()},
}
"""What each data set is, in a few words."""

FORMS = "a pair (x, y), a Dataset, a DataLoader, or an object with x and y (and test_x, test_y)"

Samples: TypeAlias = "tuple[Any, Any] | Dataset[Any] | DataLoader[Any]"
"""What `flatlens.Problem` takes as data."""


@dataclass(frozen=True, eq=False)  # eq would compare tensors
class Source:
    """What DATA names: the samples to measure on, and held-out ones where it has them."""

    data: Samples
    test: Samples | None = None


def load_data(spec: str, argument: str = "--data") -> Source:
    """The data that `spec` names; `argument` is how an error calls it.

    >>> source = load_data("digits")
    >>> source.data[0].shape, source.test[0].shape
    (torch.Size([600, 64]), torch.Size([1197, 64]))

    Raises:
        UnknownName: no data set has this name.
        BadData: what the user's function returned, or the files of a named set, cannot be read as data.
        BadInput: the user's file is missing or raises.
    """
    if userfile.is_userfile(spec):
        return _source(_from_file(spec, argument), spec, argument)
    name, colon, root = spec.partition(":")
    if name in MEANINGS:
        split = _named(name, root if colon else None, argument)
        return Source(split.train, split.test)
    if Path(spec).exists():
        raise BadData(f"{argument}: {spec!r} is not read directly: write file.py:NAME, a function that returns {FORMS}")
    raise UnknownName.among("data set (nor is it file.py:NAME)", name, MEANINGS)


def _named(name: str, root: str | None, argument: str) -> Split:
    if root == "" or (root is not None and name in SYNTHETIC):
        needed = "it has no files of its own: write the name alone" if name in SYNTHETIC else "write name:FOLDER"
        raise BadData(f"{argument}: {name}:{root} names no folder that {name} could be read from; {needed}")
    if name in SYNTHETIC:
        return SYNTHETIC[name][0]()
    try:
        return IMAGES[name](root)
    except BadInput as error:
        raise type(error)(f"{argument}: {error}") from error


def _from_file(spec: str, argument: str) -> object:
    named = userfile.load(spec, argument)
    if isinstance(named, Dataset | DataLoader) or not callable(named):
        return named
    needed = userfile.needed_arguments(named)
    if needed:
        raise BadData(
            f"{argument}: {spec} needs the arguments {', '.join(needed)}, and is called without any: give defaults"
        )
    return userfile.guarded(lambda: named(), f"{argument}: {spec}")


def _source(found: object, spec: str, argument: str) -> Source:
    if isinstance(found, DataLoader | Dataset):
        return Source(found)
    if isinstance(found, tuple | list) and len(found) == 2:
        return Source(_pair(found[0], found[1], spec, argument))
    if hasattr(found, "x") and hasattr(found, "y"):
        test_x, test_y = getattr(found, "test_x", None), getattr(found, "test_y", None)
        test = None if test_x is None or test_y is None else _pair(test_x, test_y, f"{spec} (test)", argument)
        return Source(_pair(found.x, found.y, spec, argument), test)
    shape = f" of {len(found)}" if isinstance(found, tuple | list | dict) else ""
    raise BadData(f"{argument}: {spec} gave a {type(found).__name__}{shape}; it must give {FORMS}")


def _pair(x: object, y: object, spec: str, argument: str) -> tuple[Any, Any]:
    pair = _tensors(x, f"{argument}: the inputs of {spec}"), _tensors(y, f"{argument}: the targets of {spec}")
    lengths = [len(t) for t in pair if isinstance(t, Tensor) and t.ndim]
    if len(lengths) == 2 and lengths[0] != lengths[1]:
        raise BadData(f"{argument}: {spec} gave {lengths[0]} inputs and {lengths[1]} targets: they must agree")
    return pair


def _tensors(values: object, what: str) -> object:
    """Arrays and lists as tensors; a network of several inputs takes a dict or a tuple, which is left alone."""
    if isinstance(values, Tensor | dict | tuple):
        return values
    try:
        return torch.as_tensor(np.asarray(values))
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadData(f"{what} are no array of numbers ({one_line(error)})") from error
