"""What a study runs: its settings, the settings of each of its networks, and the quantities it relates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, TypeAlias, TypeVar

from flatlens.data import Split, digits
from flatlens.errors import BadInput, UnknownName
from flatlens.experiments.quantities import STUDIED, Quantity, quantities
from flatlens.models import ARCHITECTURES, MLP, Architecture
from flatlens.plain import as_plain, digest, from_plain
from flatlens.training import SETTINGS, SGD, Training, Until
from flatlens.training.losses import LossName

Scale: TypeAlias = Literal["smoke", "laptop"]


@dataclass(frozen=True)
class DataSettings:
    """A named data set and how it is split.

    >>> DataSettings("digits", train=100).load().x.shape
    torch.Size([100, 64])
    """

    name: str
    train: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name != "digits":
            raise UnknownName.among("data set to study", self.name, ["digits"])

    def load(self) -> Split:
        """The data itself."""
        return digits(train=self.train, seed=self.seed)


@dataclass(frozen=True)
class NetworkSettings:
    """Everything that decides the digits of one network's results; `key` is its folder's name."""

    data: DataSettings
    model: Architecture
    training: Training
    measures: tuple[str, ...]

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits of the hash of the settings alone: no version, host or date enters."""
        return digest(self)

    def as_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers; `from_json` undoes it."""
        plain: dict[str, Any] = as_plain(self)
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> NetworkSettings:
        """The settings that `as_json` wrote (a network's config.json)."""
        return _read(cls, plain, "network")


@dataclass(frozen=True)
class Study:
    """A population of networks: every learning rate with every batch size and seed, on one split of the data.

    A network's seed draws both its initial weights and the order of its batches.

    >>> len(Study.digits("laptop").networks())
    48
    """

    name: str
    scale: str
    data: DataSettings
    widths: tuple[int, ...]
    lrs: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    seeds: tuple[int, ...]
    loss_below: float
    max_steps: int
    check_every: int = 10
    activation: Literal["relu", "tanh", "gelu"] = "relu"
    loss: LossName = "half_squared_error"
    measures: tuple[str, ...] = STUDIED
    quantities: tuple[Quantity, ...] = quantities(STUDIED)

    @classmethod
    def digits(cls, scale: Scale = "laptop") -> Study:
        """4-layer ReLU networks on scikit-learn's digits: 48 of them ("laptop", minutes) or 8 ("smoke", seconds)."""
        if scale == "laptop":
            return cls(
                name="digits",
                scale=scale,
                data=DataSettings("digits", train=600),
                widths=(64, 64, 64),
                lrs=(0.02, 0.05, 0.1, 0.2),
                batch_sizes=(4, 16, 64),
                seeds=(0, 1, 2, 3),
                loss_below=2e-3,
                max_steps=40_000,
            )
        if scale == "smoke":
            return cls(
                name="digits",
                scale=scale,
                data=DataSettings("digits", train=200),
                widths=(32, 32, 32),
                lrs=(0.05, 0.1),
                batch_sizes=(4, 16),
                seeds=(0, 1),
                loss_below=1e-2,
                max_steps=10_000,
            )
        raise UnknownName.among("scale of this study", scale, ["smoke", "laptop"])

    def networks(self) -> list[NetworkSettings]:
        """The settings of every network, by learning rate, batch size, seed."""
        return [
            NetworkSettings(
                data=self.data,
                model=MLP(inputs=64, widths=self.widths, outputs=10, activation=self.activation, seed=seed),
                training=Training(
                    SGD(lr=lr),
                    batch_size=batch_size,
                    loss=self.loss,
                    until=Until(loss_below=self.loss_below, accuracy=1.0),
                    max_steps=self.max_steps,
                    check_every=self.check_every,
                    seed=seed,
                ),
                measures=self.measures,
            )
            for lr, batch_size, seed in product(sorted(self.lrs), sorted(self.batch_sizes), sorted(self.seeds))
        ]

    def as_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers; `from_json` undoes it."""
        plain: dict[str, Any] = as_plain(self)
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Study:
        """The study that `as_json` wrote (study.json).

        Raises:
            BadInput: the settings are not those of a study of this version.
        """
        return _read(cls, plain, "study")


S = TypeVar("S", NetworkSettings, Study)


def _read(kind: type[S], plain: Mapping[str, Any], what: str) -> S:
    known = {one.__name__: one for one in (DataSettings, NetworkSettings, Study, Quantity, *ARCHITECTURES, *SETTINGS)}
    try:
        found = from_plain(dict(plain), known)
    except BadInput as error:
        raise BadInput(f"these are not the settings of a {what}: {error}") from error
    if not isinstance(found, kind):
        raise BadInput(f"these are not the settings of a {what}")
    return found
