"""Studies as users write them: a data set's name with a few settings, or a small YAML file.

    name: smoothing
    data: {name: digits, train: 300}
    model: MLP(widths=(64, 64))
    training: {optimiser: SGD(lr=0.1), batch_size: 16, loss: cross_entropy, max_epochs: 50}
    set: {label_smoothing: [0, 0.5], seed: 0:5}
    measures: [mls, relative_flatness, generalisation_gap]

Data and model may be the user's own, `net.py:samples` and `net.py:build`; the arguments of `build` are settings.
`checkpoints: runs.csv` names networks that were trained elsewhere, which are measured only. The architecture's inputs
and outputs come from the data. Every part but the data has a default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from flatlens import userfile
from flatlens.data import Split, UserData
from flatlens.data.named import IMAGES, SYNTHETIC, DataSettings
from flatlens.data.user_data import ReadSamples
from flatlens.errors import BadData, BadInput, UnknownName
from flatlens.experiments.checkpoints import checkpoint_axis
from flatlens.experiments.parts import assigned, data_of, in_its_folder, pairs, part_of
from flatlens.experiments.quantities import STUDIED, quantities, setting
from flatlens.experiments.reading import LONGEST, load_yaml
from flatlens.experiments.settings import Axis, NetworkSettings, Study, StudyScale, facts, fitted
from flatlens.experiments.vary import TOGETHER, last_field, value_of, vary
from flatlens.measures.registry import MEASURES, named
from flatlens.models import ARCHITECTURES, MLP, Architecture, SmallVGG, UserNetwork
from flatlens.models.checkpoints import load_weights
from flatlens.operations.layers import is_linear
from flatlens.plain import made
from flatlens.training import SGD, TrainedElsewhere, Training, Until
from flatlens.training.ridge import Ridge
from flatlens.training.run import TrainingRun

PARTS = ("name", "data", "test", "model", "checkpoints", "training", "set", "measures")
ENDS = ("max_steps", "max_epochs")
DEFAULT_AXES = (Axis("lr", (0.02, 0.05, 0.1)), Axis("seed", (0, 1, 2)))


def study_of(
    data: str,
    *,
    model: str | None = None,
    settings: Sequence[str] = (),
    measures: Sequence[str] = (),
    test: str | None = None,
    checkpoints: str | None = None,
    scale: StudyScale = "laptop",
) -> Study:
    """Return the study that a command line describes; `data` is a data set's name, the user's own, or a YAML file.

    `settings` are `NAME=VALUE` for all networks, or `NAME=VALUE,VALUE` and `NAME=FIRST:END` for an axis. The default
    axes apply only if no axis is given, without those of settings that are given.

    >>> study = study_of("digits", settings=["lr=0.05,0.1", "seed=0:5", "label_smoothing=0.1"], scale="smoke")
    >>> len(study.networks()), study.base.training.label_smoothing
    (10, 0.1)

    Raises:
        BadInput: a part is unknown or impossible, or parts do not fit together.
    """
    given_here = {"model": model, "test": test, "checkpoints": checkpoints}
    file = _file_of(data, given_here)
    if data == "digits" and not (any(given_here.values()) or settings or measures):
        return Study.digits(scale)
    named_measures = tuple(measures) or tuple(map(str, file.get("measures", ()))) or STUDIED
    given = [*pairs(file.get("set", {})), *map(assigned, settings)]
    if ends := {name: several[0] for name, several in given if name in ENDS and "checkpoints" not in file}:
        file["training"] = {**file.get("training", {}), **ends}
    base, split, read = _base(file, scale, tuple(one.key for one in named(named_measures)))
    loaded = base.data
    base, axes, shared = _with_settings(base, given)
    if _is_flattened(base):
        base = vary(base, "data.flat", True)
    if base.data != loaded:
        split = _loaded(base.data, read)
    base = vary(base, "model", fitted(base.model, split))
    if not len(split.test_x):
        kept = [name for name in base.measures if not MEASURES[name.partition("(")[0]].held_out]
        base = replace(base, measures=tuple(kept))
    _require_samples(base, axes, split)
    name = str(file.get("name", userfile.file_of(data).stem))
    if isinstance(base.training, TrainedElsewhere):
        return _of_checkpoints(name, base, str(file["checkpoints"]), list(axes), scale)
    grid = tuple(axes.values()) or _default_axes(shared, file.get("training", {}))
    if "model" in axes:
        models = _fitted_models(axes["model"], base, shared, grid, split)
        base = vary(base, "model", models[0])
        grid = tuple(replace(axis, values=models) if axis.name == "model" else axis for axis in grid)
    else:
        base = _complete(base, grid, split)
    settings_shown = [shown for axis in grid if (shown := setting(axis.name, axis.values)) is not None]
    compared = quantities(base.measures, settings_shown, first_layer=_first_layer(base.model))
    return Study(name, base, grid, compared, scale=scale)


def _file_of(data: str, given: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the parts of the study: those of a YAML file, or the data alone; parts that are given replace them.

    Raises:
        BadInput: a part is unknown or of another type, or there is no data.
    """
    file: dict[str, Any] = (
        in_its_folder(load_yaml(Path(data)), Path(data).parent) if data.endswith(userfile.YAML) else {"data": data}
    )
    file = {**file, **{part: text for part, text in given.items() if text is not None}}
    if unknown := [part for part in file if part not in PARTS]:
        raise BadInput(f"the study {data!r} has no part {unknown[0]!r}: known are {', '.join(PARTS)}")
    if "data" not in file:
        raise BadInput(f"the study {data!r} names no data: add a line such as data: digits")
    for part, kinds in {"training": (Mapping,), "measures": (list, tuple)}.items():
        if part in file and (not isinstance(file[part], kinds) or (part == "measures" and not file[part])):
            needed = "[mls, nmls]" if part == "measures" else "{batch_size: 16, max_epochs: 50}"
            raise BadInput(f"{part}: something like {needed} is needed, got {file[part]!r}")
    return file


def _require_samples(base: NetworkSettings, axes: Mapping[str, Axis], split: Split) -> None:
    """Refuse a number of measured samples that the data does not have, before any network is trained."""
    if any("data.train" in name.split(TOGETHER) for name in axes):
        return  # each network has a number of its own
    there = len(split.x)
    for samples in axes["samples"].values if "samples" in axes else (base.samples,):
        if samples is not None and not 1 <= samples <= there:
            raise BadInput(f"--set samples={samples}: there are {there} training samples: 1 to {there} can be measured")


def _default_axes(shared: Mapping[str, Any], training: Mapping[str, Any]) -> tuple[Axis, ...]:
    """Return the default axes, without those of settings that all networks share.

    Raises:
        BadInput: none is left.
    """
    given = {*map(last_field, shared), *training}
    if "optimiser" in given:
        given.add("lr")
    axes = tuple(axis for axis in DEFAULT_AXES if axis.name not in given)
    if not axes:
        raise BadInput("--set: every setting has one value, so there is one network: give one several, as in seed=0:6")
    return axes


def _with_settings(
    base: NetworkSettings, given: Sequence[tuple[str, tuple[Any, ...]]]
) -> tuple[NetworkSettings, dict[str, Axis], dict[str, Any]]:
    """Return the settings with those given for all networks, the axes, and those given; the last of a name counts."""
    axes: dict[str, Axis] = {}
    shared: dict[str, Any] = {}
    for name, several in sorted(given, key=lambda pair: pair[0] != "model"):  # others may be the architecture's own
        if TOGETHER in name and "model" in name.split(TOGETHER):
            raise BadInput(f"--set {name}: architectures are an axis of their own: --set model=A,B")
        values = tuple(map(_architecture, several)) if name == "model" else several
        for earlier in (axes, shared):
            earlier.pop(name, None)
        if len(values) != 1:
            axes[name] = Axis(name, values)  # refuses none
        elif name != "model":
            shared[name] = values[0]
        if len(values) == 1 or name == "model":
            base = vary(base, name, values[0])
    return base, axes, shared


def _architecture(given: Any) -> Architecture:
    if isinstance(given, ARCHITECTURES):
        return given  # type: ignore[return-value]
    shown, known = repr(given)[:LONGEST], ", ".join(kind.__name__ for kind in ARCHITECTURES)
    raise BadInput(f"model: {shown} is not an architecture: known are {known}; several are an axis, --set model=A,B")


def _fitted_models(
    axis: Axis, base: NetworkSettings, shared: Mapping[str, Any], grid: Sequence[Axis], split: Split
) -> tuple[Architecture, ...]:
    """Return an axis's architectures with the settings that all networks share and the sizes of the data.

    Raises:
        BadInput: one does not go with the data or with these settings, or two cannot be told apart.
    """
    takes = {field.name: one for one in axis.values for field in fields(one) if field.name in ("inputs", "channels")}
    if len(takes) == 2:
        rows, images = (type(takes[kind]).__name__ for kind in ("inputs", "channels"))
        raise BadInput(f"--set model: {rows} takes rows of numbers and {images} images: that makes two studies")
    models = []
    for model in axis.values:
        one = vary(base, "model", model)
        for name in (*shared, *(axis.name for axis in grid)):
            _require_setting(one, name)
        for name, value in shared.items():
            one = vary(one, name, value)
        models.append(_complete(vary(one, "model", fitted(one.model, split)), grid, split).model)
    if again := [str(one) for one in models if list(map(str, models)).count(str(one)) > 1]:
        raise BadInput(f"--set model: {again[0]} stands there twice: give each its own name or settings")
    return tuple(models)


def _require_setting(settings: NetworkSettings, name: str) -> None:
    """Raise BadInput if these settings have none of this name, as those of other architectures may."""
    try:
        value_of(settings, name)
    except UnknownName as error:
        kind = str(settings.model).partition("(")[0]
        raise BadInput(f"--set {name}: {kind} has no such setting, and every architecture of an axis must") from error


def _complete(base: NetworkSettings, grid: Sequence[Axis], split: Split) -> NetworkSettings:
    """Return the settings with a value for each argument of the user's function: where it has none, an axis's first.

    Refuses a network of the user's, or one on the user's data, that cannot be trained, before any worker begins.
    """
    for axis in grid:
        if isinstance(base.model, UserNetwork) and axis.name != "model" and value_of(base, axis.name) is None:
            base = vary(base, axis.name, axis.values[0])
    if isinstance(base.model, UserNetwork):
        base.model.require_complete()
    if isinstance(base.model, UserNetwork) or isinstance(base.data, UserData):
        _require_trains(base, split)
    return base


def _require_trains(base: NetworkSettings, split: Split) -> None:
    assert isinstance(base.training, Training)
    if isinstance(base.training.optimiser, Ridge):
        return
    network = base.model.build()
    try:
        TrainingRun(network, split.train, split.held_out, base.training, None)
    except BadData as error:
        told = str(error).replace("train(data=...)", f"data: {base.data.name}")
        raise BadData(told.replace("train(test=...)", f"test data of {base.data.name}")) from error


def _of_checkpoints(name: str, base: NetworkSettings, where: str, varied: list[str], scale: StudyScale) -> Study:
    """Return the study of networks that were trained elsewhere."""
    assert isinstance(base.training, TrainedElsewhere)
    if varied:
        raise BadInput(
            f"--set {varied[0]}: the networks of --checkpoints are trained already: what differs stands "
            f"in the columns of the table"
        )
    axis = checkpoint_axis(Path(where), base.model, base.training.loss)
    base = vary(base, axis.name, axis.values[0])
    assert isinstance(base.training, TrainedElsewhere)
    if isinstance(base.model, UserNetwork):
        base.model.require_complete()
    load_weights(base.model.build(), base.training.weights)  # a wrong architecture shows before any worker begins
    study = Study(name, base, (axis,), scale=scale)
    rows = [facts(one) for one in study.networks()]
    columns = {one: tuple(row[one] for row in rows if one in row) for one in study.varied}
    settings_shown = [shown for one, each in columns.items() if (shown := setting(one, each)) is not None]
    return replace(study, quantities=quantities(base.measures, settings_shown, first_layer=_first_layer(base.model)))


def _is_flattened(base: NetworkSettings) -> bool:
    """Return whether the network takes rows of numbers, and the data may be images that nobody said how to take."""
    if isinstance(base.model, UserNetwork) or "inputs" not in {f.name for f in fields(base.model)}:
        return False
    if isinstance(base.data, UserData):
        return base.data.flat is None
    takes_flat = base.data.name in IMAGES or "flat" in SYNTHETIC[base.data.name][1]
    return base.data.flat is None and base.data.name != "digits" and takes_flat


def _loaded(data: DataSettings | UserData, read: ReadSamples | None) -> Split:
    """Return the data, of samples that were read already where it is the user's own: that can take long."""
    return data.split(read) if isinstance(data, UserData) and read is not None else data.load()


def _base(
    file: Mapping[str, Any], scale: StudyScale, measures: tuple[str, ...]
) -> tuple[NetworkSettings, Split, ReadSamples | None]:
    """Return the settings that all networks share, before `set` and the command line change them, and the data.

    With data of the user's own, all samples come third.
    """
    elsewhere = "checkpoints" in file
    if elsewhere and not Path(str(file["checkpoints"])).expanduser().exists():
        raise BadInput(f"checkpoints: {file['checkpoints']} is no folder, and no table that is there")
    data, read = data_of(file["data"], file.get("test"))
    if data.name == "digits" and isinstance(data, DataSettings) and data.train is None:
        data = vary(data, "train", 600 if scale == "laptop" else 200)
    if elsewhere and isinstance(data, UserData) and data.test is None and read is not None and read[1] is None:
        data = vary(data, "test", 0)  # they may have been trained on all samples
    split = _loaded(data, read)
    architecture = _architecture(part_of("model", file.get("model", _model_for(split))))
    if elsewhere:
        return NetworkSettings(data, architecture, _untrained(file, split), measures), split, read
    given = file.get("training", {})
    defaults = _training_for(split, scale)
    if set(ENDS) & set(given):  # the user gave an end of training: no other condition
        defaults = {name: value for name, value in defaults.items() if name not in ("until", "max_steps")}
    training = part_of("training", {**defaults, **given})
    return NetworkSettings(data, architecture, training, measures), split, read


def _untrained(file: Mapping[str, Any], split: Split) -> TrainedElsewhere:
    """Return the training of checkpoints, before their files are read."""
    if "model" not in file:
        raise BadInput(
            "checkpoints: --model says what network they are of: file.py:NAME, or such as MLP(widths=(64, 64))"
        )
    if left := sorted(set(file.get("training", {})) - {"loss"}):
        raise BadInput(f"training: {left[0]} has no effect on checkpoints, which are trained already: only loss has")
    own: dict[str, Any] = {
        "loss": "cross_entropy" if split.classes else "half_squared_error",
        **file.get("training", {}),
    }
    return made(TrainedElsewhere, {"weights": "", "contents": "", **own})  # type: ignore[no-any-return]


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
