"""A data set by name, with all settings that decide its contents: the form in which a study saves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

from flatlens.data.clusters import clusters
from flatlens.data.digits import digits
from flatlens.data.imagenet import imagenet
from flatlens.data.inversion import inverted_clusters
from flatlens.data.local import cifar10, cifar100, fashion_mnist, mnist
from flatlens.data.patches import patches
from flatlens.data.points import eight_points
from flatlens.data.preparation import Preparation
from flatlens.data.split import Split
from flatlens.data.waves import RECIPES, waves
from flatlens.errors import BadInput, UnknownName

Standardise = Literal["component", "channel", "none"]

SYNTHETIC: Mapping[str, tuple[Callable[..., Split], Mapping[str, str]]] = {
    "digits": (digits, {name: name for name in ("train", "seed", "flat", "scale")}),
    "patches": (patches, {name: name for name in ("train", "test", "seed", "standardise", "scale", "flat")}),
    "clusters": (clusters, {"train": "n", "test": "test", "seed": "seed", "separation": "separation"}),
    "inverted_clusters": (
        inverted_clusters,
        {"train": "n", "test": "test", "seed": "seed", "separation": "separation", "fold": "fold"},
    ),
    "eight_points": (eight_points, {"seed": "seed"}),
    **{f"waves_{law}": (partial(waves, law), {"train": "n", "test": "test", "seed": "seed"}) for law in RECIPES},
    "imagenet": (imagenet, {"train": "n", "test": "test", "seed": "seed"}),
}
"""Data sets with settings of their own, and each one's names for them."""

IMAGES: Mapping[str, Callable[..., Split]] = {
    "mnist": mnist,
    "fashion_mnist": fashion_mnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
}
"""Data sets that are read from a folder: each takes its root, and a `Preparation`."""


@dataclass(frozen=True)
class DataSettings:
    """A named data set and how it is chosen and split; None means the data set's own default.

    Image sets are read from $FLATLENS_DATA, or ~/.cache/flatlens: where files lie is no setting.

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
            raise UnknownName.among("data set to study", self.name, [*SYNTHETIC, *IMAGES])
        if self.classes is not None:
            object.__setattr__(self, "classes", tuple(self.classes))
        known = self._known()
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

    def _known(self) -> list[str]:
        return [f.name for f in fields(Preparation)] if self.name in IMAGES else list(SYNTHETIC[self.name][1])

    def _given(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"}
        return {name: value for name, value in values.items() if value is not None}
