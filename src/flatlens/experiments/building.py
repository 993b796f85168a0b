"""Studies as users write them: a data set's name with a few settings, or a small YAML file.

    name: smoothing
    data: {name: digits, train: 300}
    model: MLP(widths=(64, 64))
    training: {optimiser: SGD(lr=0.1), batch_size: 16, loss: cross_entropy, max_epochs: 50}
    set: {label_smoothing: [0, 0.5], seed: 0:5}
    measures: [mls, relative_flatness, generalisation_gap]

The architecture's inputs and outputs come from the data. Every part but the data has a default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flatlens.data import Split
from flatlens.data.named import DataSettings
from flatlens.errors import BadInput, UnknownName
from flatlens.experiments.quantities import STUDIED, quantities, setting
from flatlens.experiments.reading import assignment, expression, load_yaml, values
from flatlens.experiments.settings import KNOWN, Axis, NetworkSettings, Study, StudyScale, fitted
from flatlens.experiments.vary import vary
from flatlens.measures.registry import named
from flatlens.models import ARCHITECTURES, MLP, Architecture, SmallVGG
from flatlens.plain import made
from flatlens.problem import is_linear
from flatlens.training import SGD, Augmentation, Mixup, Training, Until

IMPLIED: Mapping[str, type] = {
    "data": DataSettings,
    "training": Training,
    "until": Until,
    "augmentation": Augmentation,
    "mixup": Mixup,
}
"""Types that a YAML file may omit, by the name of the part."""

PARTS = ("name", "data", "model", "training", "set", "measures")
DEFAULT_AXES = (Axis("lr", (0.02, 0.05, 0.1)), Axis("seed", (0, 1, 2)))
_SIZES: dict[str, Any] = {"inputs": 1, "widths": (64, 64, 64), "outputs": 1}
"""Sizes of an MLP, which the data and the user replace."""


def study_of(
    data: str,
    *,
    model: str | None = None,
    settings: Sequence[str] = (),
    measures: Sequence[str] = (),
    scale: StudyScale = "laptop",
) -> Study:
    """Return the study that a command line describes; `data` is a data set's name or a YAML file.

    `settings` are `NAME=VALUE` for all networks, or `NAME=VALUE,VALUE` and `NAME=FIRST:END` for an axis. The
    default axes apply only if no axis is given.

    >>> study = study_of("digits", settings=["lr=0.05,0.1", "seed=0:5", "label_smoothing=0.1"], scale="smoke")
    >>> len(study.networks()), study.base.training.label_smoothing
    (10, 0.1)

    Raises:
        BadInput: a part is unknown or impossible, or parts do not fit together.
    """
    file = load_yaml(Path(data)) if data.endswith((".yaml", ".yml")) else {"data": data}
    if unknown := [part for part in file if part not in PARTS]:
        raise BadInput(f"the study {data!r} has no part {unknown[0]!r}: known are {', '.join(PARTS)}")
    if "data" not in file:
        raise BadInput(f"the study {data!r} names no data: add a line such as data: digits")
    for part, kinds in {"training": (Mapping,), "measures": (list, tuple)}.items():
        if part in file and not isinstance(file[part], kinds):
            needed = "[mls, nmls]" if part == "measures" else "{batch_size: 16, max_epochs: 50}"
            raise BadInput(f"{part}: something like {needed} is needed, got {file[part]!r}")
    if data == "digits" and not (model or settings or measures):
        return Study.digits(scale)
    named_measures = tuple(measures) or tuple(map(str, file.get("measures", ()))) or STUDIED
    base, split = _base(file, model, scale, tuple(one.key for one in named(named_measures)))
    loaded = base.data
    axes: list[Axis] = []
    given = [*_pairs(file.get("set", {})), *(assignment(text, KNOWN) for text in settings)]
    for name, several in given:
        if len(several) == 1:
            base = vary(base, name, several[0])
            axes = [axis for axis in axes if axis.name != name]
        else:
            axes = [*(axis for axis in axes if axis.name != name), Axis(name, several)]
    if base.data != loaded:
        split = base.data.load()
    base = vary(base, "model", fitted(base.model, split))
    axes = axes or list(DEFAULT_AXES)
    settings_shown = [shown for axis in axes if (shown := setting(axis.name, axis.values)) is not None]
    compared = quantities(base.measures, settings_shown, first_layer=_first_layer(base.model))
    return Study(str(file.get("name", Path(data).stem)), base, tuple(axes), compared, scale=scale)


def _base(
    file: Mapping[str, Any], model: str | None, scale: StudyScale, measures: tuple[str, ...]
) -> tuple[NetworkSettings, Split]:
    """Return the settings that all networks share, before `set` and the command line change them, and the data."""
    data = _part("data", file["data"] if not isinstance(file["data"], str) else {"name": file["data"]})
    if not isinstance(data, DataSettings):
        raise BadInput(f"data: the name of a data set is needed, or a mapping such as {{name: digits}}, got {data!r}")
    if data.name == "digits" and data.train is None:
        data = vary(data, "train", 600 if scale == "laptop" else 200)
    split = data.load()
    given_model = expression_of_model(model) if model else _part("model", file.get("model", _model_for(split)))
    if not isinstance(given_model, ARCHITECTURES):
        raise BadInput(
            f"model: {given_model!r} is not an architecture: known are {', '.join(k.__name__ for k in ARCHITECTURES)}"
        )
    architecture: Any = given_model
    given = file.get("training", {})
    defaults = _training_for(split, scale)
    if {"max_steps", "max_epochs"} & set(given):  # the user gave an end of training: no other condition
        defaults = {name: value for name, value in defaults.items() if name not in ("until", "max_steps")}
    training = _part("training", {**defaults, **given})
    return NetworkSettings(data, architecture, training, measures), split


def expression_of_model(text: str) -> Any:
    """Return the architecture that `MLP(widths=(64, 64))` describes; sizes that the data gives may be left out."""

    def mlp(**given: Any) -> MLP:
        found: MLP = made(MLP, _SIZES | given)
        return found

    known: dict[str, Any] = {**KNOWN, "MLP": mlp}
    return expression(text, known)


def _part(name: str, plain: Any) -> Any:
    """Return a part of a YAML file: settings from an expression, or from a mapping whose type is named or implied."""
    if isinstance(plain, str):
        looks_like_settings = "(" in plain or plain in KNOWN
        return expression_of_model(plain) if looks_like_settings else plain
    if isinstance(plain, list):
        return tuple(_part(name, each) for each in plain)
    if not isinstance(plain, Mapping):
        return plain
    kind = KNOWN.get(str(plain.get("type"))) or IMPLIED.get(name)
    if kind is None:
        raise BadInput(
            f"{name}: {dict(plain)} needs a known type: write type: NAME, or NAME(...); known are {', '.join(KNOWN)}"
        )
    inside = {key: _part(str(key), value) for key, value in plain.items() if key != "type"}
    try:
        return made(kind, _SIZES | inside if kind is MLP else inside)
    except UnknownName:
        raise
    except BadInput as error:
        raise BadInput(f"{name}: {error}") from error


def _pairs(plain: Any) -> list[tuple[str, tuple[Any, ...]]]:
    """Return the names and values in the part `set` of a YAML file."""
    if not isinstance(plain, Mapping):
        raise BadInput(f"set: a mapping of names to values is needed, not {plain!r}")
    found = []
    for name, value in plain.items():
        several = values(value, KNOWN) if isinstance(value, str) else value if isinstance(value, list) else [value]
        found.append((str(name), tuple(_part(str(name), each) for each in several)))
    return found


def _model_for(split: Split) -> Architecture:
    return SmallVGG(init="kaiming_uniform") if split.x.ndim == 4 else MLP(1, (64, 64, 64), 1)


def _training_for(split: Split, scale: StudyScale) -> dict[str, Any]:
    """Return training settings that suit most data: to interpolation, or for a number of steps."""
    steps = 20_000 if scale == "laptop" else 2_000
    if split.classes == 0:
        return {
            "optimiser": SGD(0.05),
            "loss": "half_squared_error",
            "until": Until(loss_below=1e-3),
            "max_steps": steps,
        }
    until = Until(loss_below=1e-2, accuracy=1.0)
    return {"optimiser": SGD(0.05), "batch_size": 32, "loss": "cross_entropy", "until": until, "max_steps": steps}


def _first_layer(model: Architecture) -> str:
    return next((name for name, module in model.build().named_modules() if is_linear(module)), "")
