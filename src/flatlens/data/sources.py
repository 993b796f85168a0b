"""Data by name, as a study saves it (`DataSettings`, `UserData`) and as the command line reads it (`load_data`).

DATA is a data set by name, `name:ROOT` where its files are, a folder, or from `file.py:callable`. Images and texts are
prepared as the network's makers prepare them, where the network brings that with it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, Subset

from flatlens import user_code
from flatlens.data.bundled import digit_images, digits, patch_images, patches
from flatlens.data.image_sets import IMAGE_SETS, cifar10, cifar100, fashion_mnist, mnist, read_images
from flatlens.data.raw import PLAIN, Raw, RawImages, RawTexts, from_pixels, imagenet, prepare, read_folder
from flatlens.data.split import Images, Preparation, Split
from flatlens.data.synthetic import RECIPES, clusters, eight_points, inverted_clusters, waves
from flatlens.errors import BadData, BadInput, UnknownName, one_line
from flatlens.models.external import NetworkPreparation
from flatlens.problem.batches import LABELS, is_dicts, size
from flatlens.problem.data import Data, load_seeded, seeded
from flatlens.progress import count_of
from flatlens.training.evaluation import Pair

Standardise = Literal["component", "channel", "none"]

_SIZES = {"train": "n", "test": "test", "seed": "seed"}
SYNTHETIC: Mapping[str, tuple[Callable[..., Split], Mapping[str, str]]] = {
    "digits": (digits, {name: name for name in ("train", "seed", "flat", "scale")}),
    "patches": (patches, {name: name for name in ("train", "test", "seed", "standardise", "scale", "flat")}),
    "clusters": (clusters, {**_SIZES, "separation": "separation"}),
    "inverted_clusters": (inverted_clusters, {**_SIZES, "separation": "separation", "fold": "fold"}),
    "eight_points": (eight_points, {"seed": "seed"}),
    **{f"waves_{law}": (partial(waves, law), _SIZES) for law in RECIPES},
    "imagenet": (imagenet, _SIZES),
}
"""Data sets with settings of their own, and each one's names for them."""

IMAGES: Mapping[str, Callable[..., Split]] = {
    "mnist": mnist, "fashion_mnist": fashion_mnist, "cifar10": cifar10, "cifar100": cifar100,
}  # fmt: skip
"""Data sets that are read from a folder: each takes its root, and a `Preparation`."""


@dataclass(frozen=True)
class DataSettings:
    """A named data set and how it is chosen and split; None means the data set's own default.

    Image sets are read from $FLATLENS_DATA, or ~/.cache/flatlens: where files lie is not a setting.

    >>> DataSettings("digits", train=100).load().x.shape
    torch.Size([100, 64])
    """

    name: str
    train: int | None = None
    test: int | None = None
    seed: int = 0
    classes: tuple[int, ...] | None = None
    order: Literal["random", "first"] | None = None
    standardise: Standardise | None = None
    statistics: Literal["used", "all"] | None = None
    scale: float | None = None
    flat: bool | None = None
    separation: float | None = None
    fold: int | None = None

    def __post_init__(self) -> None:
        if self.name not in (*SYNTHETIC, *IMAGES):
            raise UnknownName.among("data set", self.name, [*SYNTHETIC, *IMAGES])
        if self.classes is not None:
            object.__setattr__(self, "classes", tuple(self.classes))
        known = [f.name for f in fields(Preparation)] if self.name in IMAGES else list(SYNTHETIC[self.name][1])
        for name in self._given():
            if name not in known:
                raise BadInput(f"DataSettings({name}=...): {self.name} takes {', '.join(known)}")

    def load(self) -> Split:
        """Return the data.

        Raises:
            BadInput: a size or a seed that does not fit, files that are missing or damaged.
        """
        given = self._given()
        if self.name in IMAGES:
            return IMAGES[self.name](None, Preparation(**given))
        function, names = SYNTHETIC[self.name]
        return function(**{names[name]: value for name, value in given.items()})

    def _given(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"}
        return {name: value for name, value in values.items() if value is not None}


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
        """Return the same with `count` of the samples, drawn without replacement, in the data's order."""
        data = self.data
        if not (isinstance(data, tuple) or (isinstance(data, Dataset) and isinstance(data, Sized))):
            raise BadInput("--samples: does not work with a DataLoader or dicts: return a Dataset, or (x, y)")
        total = size(data) if isinstance(data, tuple) else len(data)
        if not 1 <= count <= total:
            raise BadInput(f"--samples {count}: expected 1 to {total}, the number of samples in the data")
        picked = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count].sort().values
        some = f"{count} of {total} samples, drawn with seed {seed}"
        if isinstance(data, tuple):
            x, y = tree_map(lambda one: one[picked] if isinstance(one, Tensor) and len(one) == total else one, data)
        part = (x, y) if isinstance(data, tuple) else Subset(data, picked.tolist())
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
    if user_code.is_userfile(spec):
        return _from_file(spec, argument, preparation)
    name, colon, root = spec.partition(":")
    if name in MEANINGS:
        if colon and (not root or name in SYNTHETIC):
            needed = "it has no files of its own: write the name alone" if name in SYNTHETIC else "write name:FOLDER"
            raise BadData(f"{argument}: {name} cannot be read from {root!r}: {needed}")
        place = root if colon else None
        try:
            if preparation is None or name not in PICTURES:
                split = SYNTHETIC[name][0]() if name in SYNTHETIC else IMAGES[name](place)
                return Source(split.train, split.test, split.description)
            images = PICTURES[name](place)
        except BadInput as error:
            raise error.but(argument=argument, call="", what=str(error), remedy="") from error
        parts = ((images.pixels, images.labels), (images.test_pixels, images.test_labels))
        train, held_out = (prepare(from_pixels(*part), preparation, argument) for part in parts)
        return Source(train, held_out, images.source, preparation.description)
    folder = Path(spec).expanduser()
    if folder.is_dir():
        found = read_folder(folder, {} if preparation is None else preparation.labels, argument, classes)
        told = PLAIN if preparation is None else preparation.description
        test = None if found.test is None else prepare(found.test, preparation, argument)
        return Source(prepare(found.train, preparation, argument), test, found.description, told, found.labels)
    if folder.exists():
        told = f"data files such as {spec!r} are not read: write file.py:NAME, a function that returns {_FORMS}"
        raise BadData(f"{argument}: {told}")
    if os.sep in name:
        raise BadData(f"{argument}: there is no folder or file {name}")
    raise UnknownName.among("data set", name, MEANINGS, where="(not a folder or file.py:NAME either)")


def _from_file(spec: str, argument: str, preparation: NetworkPreparation | None) -> Source:
    """Return the data of file.py:NAME, in any form that users have it: see `_FORMS`."""
    found = user_code.load(spec, argument)
    if callable(found) and not isinstance(found, Dataset | DataLoader):
        if needed := user_code.needed_arguments(found):
            told = f"{spec} needs the arguments {', '.join(needed)}, but is called without arguments: give defaults"
            raise BadData(f"{argument}: {told}")
        found = user_code.guarded(found, f"{argument}: {spec}")
    told = user_code.short(spec)
    has_labels = isinstance(found, Mapping) and any(name in found for name in LABELS)  # a batch as transformers have it
    if isinstance(found, DataLoader | Dataset) or has_labels or is_dicts(found):
        return Source(cast(Samples, found), None, told)
    if isinstance(found, tuple | list) and len(found) == 2:
        data, how = _pair(found[0], found[1], spec, argument, preparation)
        return Source(data, None, told, how)
    if hasattr(found, "x") and hasattr(found, "y"):
        data, how = _pair(found.x, found.y, spec, argument, preparation)
        test_x, test_y = getattr(found, "test_x", None), getattr(found, "test_y", None)
        test = None
        if test_x is not None and test_y is not None:
            test = _pair(test_x, test_y, f"{spec} (test)", argument, preparation)[0]
        return Source(data, test, told, how)
    shape = f" of {len(found)}" if isinstance(found, tuple | list | dict) else ""
    several = isinstance(found, tuple) and len(found) > 2
    hint = "; several inputs of the network go into a tuple, ((x, z), y)" if several else ""
    raise BadData(f"{argument}: {spec} returned a {type(found).__name__}{shape}; it must return {_FORMS}{hint}")


def _pair(
    x: object, y: object, spec: str, argument: str, preparation: NetworkPreparation | None
) -> tuple[Samples, str]:
    """Return inputs and targets, and the preparation of the inputs in words."""
    targets = _tensors(y, f"{argument}: the targets of {spec}")
    # A list of texts or of Pillow's images is prepared
    raw: Raw | None = None
    if isinstance(x, list) and x and isinstance(targets, Tensor):
        pillow = sys.modules.get("PIL.Image")  # whoever made the images has imported it
        if all(isinstance(one, str) for one in x):
            raw = RawTexts(x, targets)
        elif pillow and all(isinstance(one, pillow.Image) for one in x):
            raw = RawImages([one.copy for one in x], targets)
    inputs = _tensors(x, f"{argument}: the inputs of {spec}") if raw is None else x
    lengths = [len(t) for t in (inputs, targets) if isinstance(t, Tensor | list) and (isinstance(t, list) or t.ndim)]
    if len(lengths) == 2 and lengths[0] != lengths[1]:
        told = f"{lengths[0]} inputs and {lengths[1]} targets"
        raise BadData(f"{argument}: {spec} returned {told}: return as many of each")
    if raw is None:
        return (inputs, targets), ""
    return prepare(raw, preparation, argument), PLAIN if preparation is None else preparation.description


def _tensors(values: object, what: str) -> object:
    """Return arrays and lists as tensors; dicts and tuples, for networks of several inputs, are unchanged."""
    if isinstance(values, Tensor | dict | tuple):
        return values
    try:
        found = np.asarray(values)
        is_text = found.dtype.kind in "US" or (found.dtype.kind == "O" and any(isinstance(v, str) for v in found.flat))
    except (TypeError, ValueError):  # such as rows of different lengths
        is_text = False
    if is_text:
        mend = "number the classes 0, 1, ..." if "targets" in what else "give a list of texts, or numbers"
        raise BadData(f"{what} are text: {mend}")
    try:
        return torch.as_tensor(np.require(values, requirements="W"))  # a copy where the array is read-only
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadData(f"{what} cannot be turned into an array of numbers ({one_line(error)})") from error


ONE_IN = 5  #: one of this many samples is held out as test data, where there is none
_SEED = 0  #: seed of the random numbers that the user's function draws
ReadSamples: TypeAlias = tuple[Pair, Pair | None]  #: all training samples, and the test samples if the user gives any


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
        return user_code.short(self.source)

    def load(self) -> Split:
        """Read the data again and return it.

        Raises:
            BadData: the samples are others than those the study began with, or fewer than asked for.
        """
        samples = _read(self.source, self.held_out)
        if _contents(*samples) != self.contents:
            other = f"{self.name} returns other samples than when the study began"
            cause = "was it changed, or does it draw random numbers from a generator without a seed?"
            raise BadData(f"data: {other}: {cause} Each call must return the same samples")
        return self.split(samples)

    def split(self, samples: ReadSamples) -> Split:
        """Return the training and test data, of all the samples that were read.

        Raises:
            BadData: there are fewer samples than asked for.
        """
        train, test = samples
        told = [self.name]
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
    if not user_code.is_userfile(spec):
        return str(Path(spec).expanduser().resolve())
    return user_code.with_folder(spec)


def _read(source: str, held_out: str | None) -> ReadSamples:
    """Return the training data, and the test data if there are any."""
    for spec, argument in ((source, "data"), (held_out, "test")):
        if spec is not None and user_code.is_userfile(spec):
            load_seeded(spec, argument)  # apart from the call, which is seeded anew
    with seeded(_SEED):
        found = load_data(source, "data")
        train = _gathered(found.data, f"data: {user_code.short(source)}")
    with seeded(_SEED):
        test = found.test if held_out is None else load_data(held_out, "test", classes=found.classes).data
    if test is None:
        return train, None
    with seeded(_SEED):
        others = _gathered(test, f"test: {user_code.short(held_out or source)}")
    y, test_y = train[1], others[1]
    if y.dtype != test_y.dtype or y.shape[1:] != test_y.shape[1:]:
        one, other = (
            f"{'numbers' if part.is_floating_point() else 'class labels'} of shape {tuple(part.shape)}"
            for part in (y, test_y)
        )
        unlike = f"the targets of {user_code.short(source)} are {one}, those of the test data {other}"
        mend = "give both in one form, such as y.long() for labels or y.float() for a regression"
        raise BadData(f"data: {unlike}: {mend}")
    return train, others


def _gathered(samples: Samples, what: str) -> Pair:
    """Return all samples as one pair of tensors: inputs (n, ...), and labels (n,) or targets (n, N)."""
    pair: object = samples
    if isinstance(samples, Dataset | DataLoader):
        loader = samples if isinstance(samples, DataLoader) else DataLoader(samples, batch_size=256)
        pair = user_code.guarded(lambda: _joined(loader), what)
    if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(part, Tensor) for part in pair):
        raise BadData(f"{what}: a study needs pairs of tensors (inputs, targets); dicts and several inputs do not work")
    x, y = pair
    if x.ndim < 2 or len(x) != len(y) or len(x) < 2:
        expected, got = "inputs of shape (n, ...) and n targets, n at least 2", f"{tuple(x.shape)} and {tuple(y.shape)}"
        raise BadData(f"{what}: expected {expected}, got {got}")
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
        raise BadData(f"data: {name}={count}: the data has {count_of(len(data[0]), 'sample')}")
    return _parted(data, count, seed)[1]
