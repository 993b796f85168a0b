"""The definition of a study: settings shared by its networks, axes along which they differ, quantities to relate.

A study may grow: `spelled_as` and `lost` compare it with an earlier one, `settings_apart` does so in words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from itertools import product
from numbers import Real
from typing import Any, Literal, Self, TypeAlias

from flatlens.bounds.definition import read_bound
from flatlens.data import Split, UserData
from flatlens.data.sources import DataSettings
from flatlens.deprecated_names import FORMER_TRANSFORMS, former_measure, former_transform, present_measure, silent
from flatlens.errors import BadInput, UnknownName
from flatlens.experiments.overrides import paths, setting_text, value_of, vary
from flatlens.experiments.quantities import STUDIED, Quantity, quantities
from flatlens.measures import named
from flatlens.models import ARCHITECTURES, MLP, Architecture, UserNetwork
from flatlens.settings_json import as_plain, digest, from_plain
from flatlens.tracking.tracker import Schedule
from flatlens.training import SETTINGS, SGD, TrainedElsewhere, Training, Until
from flatlens.transforms.invariance import named_transforms
from flatlens.user_code import short

StudyScale: TypeAlias = Literal["smoke", "laptop"]
Dtype: TypeAlias = Literal["float64", "float32"]


@dataclass(frozen=True)
class Followed:
    """Measures during training: every `every` steps, or at the steps listed."""

    measures: tuple[str, ...]
    every: int | tuple[int, ...] = 100
    samples: int | None = None  #: number of training samples for measuring, drawn once; all by default

    def __post_init__(self) -> None:
        named(self.measures)  # refuses an unknown one now rather than in a worker
        object.__setattr__(self, "measures", tuple(map(present_measure, self.measures)))
        Schedule(self.every)


class _Stored:
    """Settings that are stored as JSON."""

    def as_json(self) -> dict[str, Any]:
        """Return plain dicts, lists and numbers; `from_json` undoes it."""
        plain: dict[str, Any] = as_plain(self)
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Self:
        """Read the settings that `as_json` wrote (study.json, or a network's config.json).

        Raises:
            BadInput: the settings are not such settings of this version.
        """
        what = "study" if cls is Study else "network"
        try:
            with silent():
                found = from_plain(dict(plain), KNOWN)
        except BadInput as error:
            raise BadInput(f"these settings do not describe a {what}: {error}") from error
        if not isinstance(found, cls):
            raise BadInput(f"these settings do not describe a {what}, but a {type(found).__name__}")
        return found


@dataclass(frozen=True)
class NetworkSettings(_Stored):
    """Everything that decides one network's results, bit by bit; `key` is its folder's name.

    Former names of options and transforms become the present ones.
    """

    data: DataSettings | UserData
    model: Architecture
    training: Training | TrainedElsewhere
    measures: tuple[str, ...]
    bounds: tuple[str, ...] = ()  #: inequalities whose sides are kept as well: "mls_chain.lhs", "mls_chain.rhs"
    moved: tuple[str, ...] = ()  #: transforms after which everything is measured again: "relative_flatness@layerwise"
    samples: int | None = None  #: number for measuring, drawn by the data's seed; all by default, and for the risk
    followed: Followed | None = None  #: measures during training
    dtype: Dtype = "float64"  #: of weights and data while the trained network is measured

    def __post_init__(self) -> None:
        for name in self.bounds:
            read_bound(name)  # refuses an unknown one, or an unknown option
        named_transforms(self.moved or None)  # refuses an unknown one now rather than in a worker
        object.__setattr__(self, "moved", tuple(FORMER_TRANSFORMS.get(name, name) for name in self.moved))
        object.__setattr__(self, "measures", tuple(map(present_measure, self.measures)))

    @cached_property  # every row of a layer's values asks for it
    def key(self) -> str:
        """Twelve hexadecimal digits of the hash of the settings alone: no version, host or date enters.

        Names enter as they were first spelt, and `dtype` if it is not the default, so that a study from before a
        renaming or before that setting keeps its folders; files of the user's enter without the folders they are in.
        """
        plain = without_places(self.as_json())
        if self.dtype == "float64":
            del plain["dtype"]
        plain["measures"] = [former_measure(name) for name in self.measures]
        plain["moved"] = [former_transform(name) for name in self.moved]
        if self.followed is not None:
            plain["followed"]["measures"] = [former_measure(name) for name in self.followed.measures]
        return digest(plain)


@dataclass(frozen=True)
class Axis:
    """A setting by its name, and the values it takes; pairs of values for two that go together, "batch_size+lr"."""

    name: str
    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values))
        if not self.values or len(set(map(_by_value, self.values))) < len(self.values):
            raise BadInput(f"the axis {self.name}={self.values}: expected at least one value, each of them once")


@dataclass(frozen=True)
class Study(_Stored):
    """A population of networks: every value of each axis with every value of the others.

    >>> study = Study.digits("laptop")
    >>> len(study.networks()), [axis.name for axis in study.axes]
    (99, ['lr', 'batch_size', 'seed'])
    >>> len(study.over("lr", 0.1).over("model.activation", "relu", "tanh").networks())
    66
    """

    name: str
    base: NetworkSettings
    axes: tuple[Axis, ...]
    quantities: tuple[Quantity, ...] = quantities(STUDIED)
    scale: str = ""

    def __post_init__(self) -> None:
        taken: dict[str, str] = {}
        for axis in self.axes:
            for path in paths(self.base, axis.name):
                if path in taken:
                    raise BadInput(f"the axes {taken[path]} and {axis.name} both set {path}: keep one of them")
                taken[path] = axis.name

    @classmethod
    def digits(cls, scale: StudyScale = "laptop") -> Study:
        """Return 4-layer ReLU networks on scikit-learn's digits: 99 ("laptop", minutes) or 8 ("smoke", seconds)."""
        sizes = {
            "smoke": (200, 32, 1e-2, 10_000, ((0.05, 0.1), (4, 16), (0, 1))),
            "laptop": (600, 64, 2e-3, 40_000, ((0.05, 0.1, 0.2), (4, 16, 64), tuple(range(11)))),
        }
        if scale not in sizes:
            raise UnknownName.among("scale", scale, sizes, where="of this study")
        train, width, loss_below, steps, grid = sizes[scale]
        until = Until(loss_below=loss_below, accuracy=1.0)
        training = Training(SGD(lr=0.1), batch_size=16, loss="half_squared_error", until=until, max_steps=steps)
        base = NetworkSettings(DataSettings("digits", train=train), MLP(64, (width,) * 3, 10), training, STUDIED)
        return cls("digits", base, tuple(map(Axis, ("lr", "batch_size", "seed"), grid)), scale=scale)

    @property
    def varied(self) -> list[str]:
        """The names of the axes that take more than one value."""
        if isinstance(self.base.training, TrainedElsewhere):
            rows = [facts(one) for one in self.networks()]
            names = dict.fromkeys(name for row in rows for name in row)
            return [name for name in names if len({repr(row.get(name)) for row in rows}) > 1]
        return [axis.name for axis in self.axes if len(axis.values) > 1]

    def setting(self, name: str, value: Any) -> Study:
        """Return the study with another value of a setting that all its networks share."""
        return replace(self, base=vary(self.base, name, value), axes=tuple(a for a in self.axes if a.name != name))

    def over(self, name: str, *values: Any) -> Study:
        """Return the study with these values on an axis, which is added if it is new."""
        axis = Axis(name, values)
        known = [a.name for a in self.axes]
        axes = [axis if a.name == name else a for a in self.axes] + ([] if name in known else [axis])
        return replace(self, axes=tuple(axes))

    def networks(self) -> list[NetworkSettings]:
        """Return the settings of every network, axis by axis, each from its smallest value to its largest."""
        names, found, several = [axis.name for axis in self.axes], [], []
        for axis in self.axes:
            numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in axis.values)
            several.append(sorted(axis.values) if numbers else axis.values)
        for values in product(*several):
            settings = self.base
            for name, value in sorted(zip(names, values, strict=True), key=lambda pair: pair[0] != "model"):
                settings = vary(settings, name, value)  # the architecture first: its seed may be another axis
            found.append(settings)
        return found

    def spelled_as(self, there: Study) -> Study:
        """Return this study with each number spelled as in an earlier one (0.0 for 0): a key is a hash of the text.

        >>> there = Study.digits("smoke")
        >>> there.over("momentum", 0, 0.9).spelled_as(there).axes[-1].values
        (0.0, 0.9)
        """
        former = {axis.name: axis.values for axis in there.axes}
        axes = []
        for axis in self.axes:
            with suppress(UnknownName, BadInput):  # not a setting of the earlier architecture
                known = (value_of(there.base, axis.name), *former.get(axis.name, ()))  # the last spelling counts
                axis = replace(axis, values=_spelled(axis.values, known))
            axes.append(axis)
        return replace(self, base=_spelled_within(self.base, there.base), axes=tuple(axes))

    def lost(self, there: Study) -> list[NetworkSettings]:
        """Return the networks of an earlier study that this one does not have."""
        keys = {one.key for one in self.networks()}
        return [one for one in there.networks() if one.key not in keys]


_PLACES = {"UserData": ("source", "held_out"), "UserNetwork": ("source",), "TrainedElsewhere": ("weights",)}
"""Settings that name a file by its whole path, by their type."""


def without_places(plain: Any) -> Any:
    """Return plain settings with the names of files alone: where files lie is not a setting."""
    if isinstance(plain, list):
        return [without_places(each) for each in plain]
    if not isinstance(plain, dict):
        return plain
    places = _PLACES.get(str(plain.get("type")), ())
    return {
        key: short(value) if key in places and isinstance(value, str) else without_places(value)
        for key, value in plain.items()
    }


def in_words(settings: NetworkSettings, varied: Sequence[str]) -> str:
    """Return a network by the settings in which it differs from the others: "lr 0.1, seed 0"."""
    if isinstance(settings.training, TrainedElsewhere):
        return short(settings.training.weights)
    return ", ".join(f"{name} {setting_text(value_of(settings, name))}" for name in varied) or settings.key


def facts(settings: NetworkSettings) -> dict[str, Any]:
    """Return what is known about the training elsewhere of a network, and the settings of its architecture."""
    model = settings.model
    own = model.options if isinstance(model, UserNetwork) else {f.name: getattr(model, f.name) for f in fields(model)}
    known = settings.training.settings if isinstance(settings.training, TrainedElsewhere) else {}
    return {**known, **own, "seed": settings.training.seed}


def fitted(model: Architecture, split: Split) -> Architecture:
    """Return the architecture with the sizes of the data: inputs, channels and image, outputs or classes."""
    shape = tuple(split.x.shape[1:])
    outputs = split.classes or int(split.y[0].numel())
    sizes = {"outputs": outputs, "classes": outputs}
    if len(shape) == 1:
        sizes["inputs"] = shape[0]
    elif len(shape) == 3:
        sizes |= {"channels": shape[0], "image": shape[1]}
    if isinstance(model, UserNetwork):
        return model.with_sizes({"inputs": int(split.x[0].numel()), **sizes})
    known = {f.name for f in fields(model)}
    if len(shape) != 1 and "inputs" in known:
        raise BadInput(f"a {type(model).__name__} takes rows of numbers, and the data is {shape}: set data.flat=True")
    if len(shape) == 1 and "channels" in known:
        raise BadInput(f"a {type(model).__name__} takes images, and the data is rows of {shape[0]} numbers")
    for name, value in sizes.items():
        if name in known:
            model = vary(model, name, value)
    return model


def _by_value(value: Any) -> Any:
    """Return what equal settings have in common, however their numbers are written; a bool is not a number.

    >>> _by_value(SGD(1)) == _by_value(SGD(1.0)), _by_value((1, 2)) == _by_value((1, True))
    (True, False)
    """
    if isinstance(value, tuple | list):
        return tuple(map(_by_value, value))
    if is_dataclass(value):
        return type(value).__name__, *(_by_value(getattr(value, field.name)) for field in fields(value))
    return value if isinstance(value, Real) and not isinstance(value, bool) else repr(value)


def _spelled(values: Iterable[Any], known: Iterable[Any]) -> tuple[Any, ...]:
    """Return values, each as it is among those known, if an equal one is."""
    spelling = {_by_value(one): one for one in known}
    return tuple(spelling.get(_by_value(value), value) for value in values)


def _spelled_within(settings: Any, there: Any) -> Any:
    """Return settings with the numbers of their parts spelled as in others, where they are equal."""
    if is_dataclass(settings) and type(settings) is type(there):
        parts = {f.name: getattr(settings, f.name) for f in fields(settings) if f.init}
        spelled = {name: _spelled_within(part, getattr(there, name)) for name, part in parts.items()}
        return replace(settings, **spelled)  # type: ignore[type-var]  # an instance, not a class
    return _spelled([settings], [there])[0]


KNOWN: dict[str, type] = {
    one.__name__: one
    for one in (DataSettings, UserData, NetworkSettings, Followed, Study, Axis, Quantity, *ARCHITECTURES, *SETTINGS)
}
"""The types that settings are made of, by name."""


def settings_apart(there: Study, here: Study) -> str:
    """Return what keeps a study from holding the networks of an earlier one: the first two differences, or "".

    Axes that are new, or have more values, are none; nor are the study's name, scale and quantities.

    >>> study = Study.digits("smoke").over("seed", 0, 1, 2)
    >>> settings_apart(Study.digits("smoke"), study.setting("samples", 40).over("lr", 0.1))
    'base.samples: none there, 40 requested; lr: [0.05, 0.1] there, [0.1] requested'
    """
    # the settings of the networks by dotted name, and the axes by name
    plain = (without_places(one.as_json()) for one in (there, here))
    before, now = (
        dict(_dotted(one["base"], "base.")) | {axis["name"]: axis["values"] for axis in one["axes"]} for one in plain
    )
    for axis in there.axes:
        now[axis.name] = now.get(axis.name, [as_plain(_value_in(here.base, axis.name))])
    for axis in here.axes:
        before[axis.name] = before.get(axis.name, [as_plain(_value_in(there.base, axis.name))])
        if all(value in now[axis.name] for value in before[axis.name]):
            now[axis.name] = before[axis.name]
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return "; ".join(_apart(name, before.get(name), now.get(name)) for name in names[:2])


def _value_in(settings: NetworkSettings, name: str) -> Any:
    try:
        return value_of(settings, name)
    except (UnknownName, BadInput):  # another architecture
        return None


def _dotted(plain: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in plain.items():
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{key}.")
        elif key != "type":
            yield f"{prefix}{key}", value


def _apart(name: str, there: Any, here: Any) -> str:
    """Return how two settings differ, in words; of long ones the first part that does."""
    if _short(there) != _short(here):
        return f"{name}: {_short(there)} there, {_short(here)} requested"
    if isinstance(there, list) and isinstance(here, list):
        if len(there) != len(here):
            return f"{name}: {len(there)} values there, {len(here)} requested"
        there, here = (dict(enumerate(values)) for values in (there, here))
    if isinstance(there, dict) and isinstance(here, dict):
        part = next(key for key in {**there, **here} if there.get(key) != here.get(key))
        return _apart(f"{name}.{part}", there.get(part), here.get(part))
    return f"{name} differs"


def _short(value: Any) -> str:
    text = _told(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _told(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_told, value))}]"
    if isinstance(value, dict):
        return f"{value.get('type', '')}({', '.join(f'{k}={_told(v)}' for k, v in value.items() if k != 'type')})"
    return setting_text(value)
