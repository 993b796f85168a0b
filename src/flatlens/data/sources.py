"""DATA on the command line: a data set by name, `name:ROOT` where its files are, a folder, or from `file.py:callable`.

Images and texts are prepared as the network's makers prepare them, where the network brings that with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, Subset

from flatlens import userfile
from flatlens.data.digits import digit_images
from flatlens.data.folders import read_folder
from flatlens.data.images import Images
from flatlens.data.imagesets import IMAGE_SETS
from flatlens.data.local import read_images
from flatlens.data.named import IMAGES, SYNTHETIC
from flatlens.data.patches import patch_images
from flatlens.data.raw import PLAIN, Raw, RawImages, RawTexts, from_pixels, prepare
from flatlens.data.waves import RECIPES
from flatlens.errors import BadData, BadInput, UnknownName, one_line
from flatlens.models.preparing import NetworkPreparation
from flatlens.problem.batches import LABELS, is_dicts
from flatlens.problem.data import Data
from flatlens.problem.samples import size

PICTURES: dict[str, Callable[[str | None], Images]] = {
    "digits": lambda _: digit_images(),
    "patches": lambda _: patch_images(),
    **{name: partial(read_images, known) for name, known in IMAGE_SETS.items()},
}
"""The named data sets that are images, before any preparation."""

MEANINGS = {
    "digits": "handwritten digits of 8 x 8 pixels, 10 classes",
    "patches": "32 x 32 colour patches of two photographs, 2 classes",
    "clusters": "four Gaussian clusters in 8 features, 2 classes",
    "eight_points": "a regression of 8 points on a line",
    **{f"waves_{law}": f"a regression of a wave on {what}" for law, what in RECIPES.items()},
    **{s.name: f"{s.title}: {' x '.join(map(str, s.shape))}, {s.classes} classes" for s in IMAGE_SETS.values()},
}
"""The description of each data set, in a few words."""

_FORMS = (
    "a pair (x, y), a Dataset, a DataLoader, a dict with labels, a list of dicts, or an object with x and y (and "
    "test_x, test_y); x may be a list of texts or of Pillow's images"
)

Samples: TypeAlias = "tuple[Any, Any] | Dataset[Any] | DataLoader[Any] | Mapping[str, Any] | Sequence[Any] | Data"
"""The forms of data that `flatlens.Problem` takes."""


@dataclass(frozen=True, eq=False)  # eq would compare tensors
class Source:
    """The data that DATA names: samples to measure on, and test data if it has any."""

    data: Samples
    test: Samples | None = None
    description: str = ""  #: the samples, in words
    preparation: str = ""  #: their preparation for the network
    classes: Mapping[str, int] = field(default_factory=dict)  #: labels by name, of a folder

    def drawn(self, count: int, seed: int = 0) -> Source:
        """Return the same with `count` of the samples, drawn without replacement, in the data's order.

        Raises:
            BadInput: fewer than one sample, more than there are, or a loader or dicts, whose samples cannot be picked.
        """
        data = self.data
        if not (isinstance(data, tuple) or (isinstance(data, Dataset) and isinstance(data, Sized))):
            raise BadInput("--samples: does not work with a DataLoader or dicts: return a Dataset, or (x, y)")
        total = size(data) if isinstance(data, tuple) else len(data)
        if not 1 <= count <= total:
            raise BadInput(f"--samples {count}: a number from 1 to {total}, the samples of the data, is needed")
        picked = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count].sort().values
        some = f"{count} of {total} samples, drawn with seed {seed}"
        part = _picked(data, picked, total) if isinstance(data, tuple) else Subset(data, picked.tolist())
        return replace(self, data=part, description=f"{self.description}; {some}" if self.description else some)


def load_data(
    spec: str,
    argument: str = "--data",
    preparation: NetworkPreparation | None = None,
    classes: Mapping[str, int] | None = None,
) -> Source:
    """Return the data that `spec` names; `argument` is its name in errors.

    `preparation`: what the network's makers do to images or texts. It takes the place of the data set's own
    standardising. Tensors and data sets from a user's file are taken as they are; lists of texts and of images are
    prepared. `classes`: for held-out data, the classes of the training data; a folder's labels are theirs.

    >>> source = load_data("digits")
    >>> source.data[0].shape, source.test[0].shape
    (torch.Size([600, 64]), torch.Size([1197, 64]))

    Raises:
        UnknownName: no data set has this name.
        BadData: what the user's function returned, or the files of a named set, cannot be read as data.
        BadInput: the user's file is missing or raises.
    """
    if userfile.is_userfile(spec):
        return _source(_from_file(spec, argument), spec, argument, preparation)
    name, colon, root = spec.partition(":")
    if name in MEANINGS:
        return _named(name, root if colon else None, argument, preparation)
    folder = Path(spec).expanduser()
    if folder.is_dir():
        return _from_folder(folder, argument, preparation, classes)
    if folder.exists():
        raise BadData(
            f"{argument}: data files such as {spec!r} are not read: write file.py:NAME, a function that returns "
            f"{_FORMS}"
        )
    if os.sep in name:
        raise BadData(f"{argument}: there is no folder or file {name}")
    raise UnknownName.among("data set (nor is it a folder, nor file.py:NAME)", name, MEANINGS)


def _picked(data: tuple[Any, Any], picked: Tensor, total: int) -> tuple[Any, Any]:
    x, y = tree_map(lambda part: part[picked] if isinstance(part, Tensor) and len(part) == total else part, data)
    return x, y


def _named(name: str, root: str | None, argument: str, preparation: NetworkPreparation | None) -> Source:
    if root == "" or (root is not None and name in SYNTHETIC):
        needed = "it has no files of its own: write the name alone" if name in SYNTHETIC else "write name:FOLDER"
        raise BadData(f"{argument}: {name} cannot be read from {root!r}: {needed}")
    try:
        if preparation is not None and name in PICTURES:
            images = PICTURES[name](root)
            train, test = (
                prepare(from_pixels(*part), preparation, argument)
                for part in ((images.pixels, images.labels), (images.test_pixels, images.test_labels))
            )
            return Source(train, test, images.source, preparation.description)
        split = SYNTHETIC[name][0]() if name in SYNTHETIC else IMAGES[name](root)
    except BadInput as error:
        raise error if str(error).startswith(argument) else type(error)(f"{argument}: {error}") from error
    return Source(split.train, split.test, split.description)


def _from_folder(
    folder: Path, argument: str, preparation: NetworkPreparation | None, classes: Mapping[str, int] | None
) -> Source:
    found = read_folder(folder, {} if preparation is None else preparation.labels, argument, classes)
    told = PLAIN if preparation is None else preparation.description
    test = None if found.test is None else prepare(found.test, preparation, argument)
    return Source(prepare(found.train, preparation, argument), test, found.description, told, found.labels)


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


def _source(found: object, spec: str, argument: str, preparation: NetworkPreparation | None) -> Source:
    told = f"what {userfile.short(spec)} gives"
    if isinstance(found, DataLoader | Dataset) or _has_labels(found) or is_dicts(found):
        return Source(cast(Samples, found), None, told)
    if isinstance(found, tuple | list) and len(found) == 2:
        data, how = _pair(found[0], found[1], spec, argument, preparation)
        return Source(data, None, told, how)
    if hasattr(found, "x") and hasattr(found, "y"):
        data, how = _pair(found.x, found.y, spec, argument, preparation)
        test_x, test_y = getattr(found, "test_x", None), getattr(found, "test_y", None)
        if test_x is None or test_y is None:
            return Source(data, None, told, how)
        return Source(data, _pair(test_x, test_y, f"{spec} (test)", argument, preparation)[0], told, how)
    shape = f" of {len(found)}" if isinstance(found, tuple | list | dict) else ""
    several = "; several inputs of the network go into a tuple, ((x, z), y)" * (
        isinstance(found, tuple) and len(found) > 2
    )
    raise BadData(f"{argument}: {spec} gave a {type(found).__name__}{shape}; it must give {_FORMS}{several}")


def _has_labels(found: object) -> bool:
    """Return whether this is a dict with labels: a batch as transformers have it."""
    return isinstance(found, Mapping) and any(name in found for name in LABELS)


def _pair(
    x: object, y: object, spec: str, argument: str, preparation: NetworkPreparation | None
) -> tuple[Samples, str]:
    """Return inputs and targets, and the preparation of the inputs in words."""
    targets = _tensors(y, f"{argument}: the targets of {spec}")
    raw = _raw(x, targets)
    inputs = _tensors(x, f"{argument}: the inputs of {spec}") if raw is None else x
    lengths = [len(t) for t in (inputs, targets) if isinstance(t, Tensor | list) and (isinstance(t, list) or t.ndim)]
    if len(lengths) == 2 and lengths[0] != lengths[1]:
        raise BadData(f"{argument}: {spec} gave {lengths[0]} inputs and {lengths[1]} targets: give as many of each")
    if raw is None:
        return (inputs, targets), ""
    return prepare(raw, preparation, argument), PLAIN if preparation is None else preparation.description


def _raw(x: object, targets: object) -> Raw | None:
    """Return a list of texts or of Pillow's images; None for anything else."""
    if not (isinstance(x, list) and x and isinstance(targets, Tensor)):
        return None
    if all(isinstance(one, str) for one in x):
        return RawTexts(x, targets)
    pillow = sys.modules.get("PIL.Image")  # whoever made the images has imported it
    if pillow and all(isinstance(one, pillow.Image) for one in x):
        return RawImages([partial(_same, one) for one in x], targets)
    return None


def _same(image: Any) -> Any:
    return image


def _is_text(values: object) -> bool:
    """Return whether values are strings: a list, an array, or a column of a table."""
    try:
        found = np.asarray(values)
    except (TypeError, ValueError):  # such as rows of different lengths
        return False
    return found.dtype.kind in "US" or (found.dtype.kind == "O" and any(isinstance(one, str) for one in found.flat))


def _tensors(values: object, what: str) -> object:
    """Return arrays and lists as tensors; dicts and tuples, for networks of several inputs, are unchanged."""
    if isinstance(values, Tensor | dict | tuple):
        return values
    if _is_text(values):
        mend = "number the classes 0, 1, ..." if "targets" in what else "give a list of texts, or numbers"
        raise BadData(f"{what} are text: {mend}")
    try:
        return torch.as_tensor(np.require(values, requirements="W"))  # a copy where the array is read-only
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadData(f"{what} cannot be turned into an array of numbers ({one_line(error)})") from error
