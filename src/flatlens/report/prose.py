"""Sentences and numbers of a page: a study's settings, code and TeX in docstrings, the papers they cite."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd
from markupsafe import Markup, escape

from flatlens.experiments.narrative import is_or_are
from flatlens.experiments.overrides import TOGETHER, but_seeds, is_seed, last_field, setting_text, split_values
from flatlens.experiments.quantities import in_words
from flatlens.measures.definition import PAPERS
from flatlens.progress import count_of, listed
from flatlens.report.cards import plain
from flatlens.training import REACHED
from flatlens.user_code import short

if TYPE_CHECKING:
    from flatlens.experiments import StudyResult


_CODE = re.compile(r"`([^`]+)`")
_EMPHASIS = re.compile(r"\*([^*]+)\*")
_FRACTION = re.compile(r"\\frac\{([^{}]*)\}\{([^{}]*)\}")
_BRACES = re.compile(r"(?:\\mathbb)?\{([^{}]*)\}")
_BARE = re.compile(r"\\[a-z]+(?:\{[^{}]*\})?|\^\*")  #: TeX that stands outside of a formula
_CHARACTERS = {
    r"\epsilon": "ε", r"\cdot": "·", r"\geq": "≥", r"\leq": "≤", r"\to": "→", r"\pi": "π", r"\sin": "sin", r"\ell": "ℓ",
    r"\alpha": "α", r"\ldots": "…", "^*": "⋆",
}  # fmt: skip
"""The commands of TeX in quotes that the cards' symbols do not have."""


def coded(text: str) -> Markup:
    """Return a sentence of a docstring with the words between backticks as code.

    >>> str(coded("rows of `mls` < 1"))
    'rows of <code>mls</code> &lt; 1'
    """
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))


def quoted(text: str) -> Markup:
    r"""Return a paper's words with its TeX in plain characters, and its stars as emphasis.

    >>> str(quoted(r"*slower* $O((\log(N)N^{-1})^{\frac{1}{d}})$ decay"))
    '<em>slower</em> O((log(N)N^-1)^(1/d)) decay'
    """
    parts = [str(escape(part)) for part in text.split("$")]
    parts[1::2] = map(_in_characters, parts[1::2])
    outside = (_BARE.sub(lambda found: _in_characters(found[0]), part) for part in parts[::2])
    parts[::2] = [_EMPHASIS.sub(r"<em>\1</em>", part) for part in outside]
    return Markup("".join(parts))


def _in_characters(formula: str) -> str:
    """Return a formula of TeX in plain characters; one with an unknown command stays as it is."""
    found = _BRACES.sub(r"\1", _FRACTION.sub(r"(\1/\2)", formula))
    for command, character in _CHARACTERS.items():
        found = found.replace(command, character)
    return plain(found) or formula


def cited(sources: Iterable[str]) -> dict[str, str]:
    """Return the papers that any of these sources names, by their short names.

    >>> list(cited(["compression Def. 3.7", "relative2021 Def. 3; symmetries2025", "definition of attention"]))
    ['compression', 'relative2021', 'symmetries2025']
    """
    words = set(re.findall(r"\w+", " ".join(sources)))
    return {key: paper for key, paper in PAPERS.items() if key in words}


SHORT_LIST = 4  #: networks left out, or architectures, that are named, at most
SIGNS_OF_SHAPES = {
    "circle": "●",
    "square": "■",
    "triangle-up": "▲",
    "diamond": "◆",
    "cross": "✚",
    "triangle-down": "▼",
    "triangle-right": "▶\ufe0e",  # without the selector a phone shows a button
}
"""The signs of the legend, by the marks' shapes in the figures."""


def what_was_run(result: StudyResult) -> str:
    """Return the study in one or two sentences, from its settings and tables."""
    base = result.settings.get("base", {})
    training = base.get("training", {})
    if training.get("type") == "TrainedElsewhere":
        differ = f", by {listed([in_words(name) for name in result.varied])}" if result.varied else ""
        networks = count_of(len(result.networks), "network")
        return f"{networks}{_made_of(base)}, trained outside flatlens, measured{_on_data(base)}{differ}."
    # the grid, and the seeds: of each network alone, of each combination, or in one axis with other settings
    axes = [axis for axis in result.settings.get("axes", ()) if not is_seed(axis["name"])]
    grid, number = ", ".join(map(_in_words, axes)), result.networks["seed"].nunique()
    seeds = count_of(number, "seed")
    if number == len(result.networks) and any(_with_seeds(axis["name"]) for axis in axes):
        seeds = ", each network with a seed of its own"
    elif grid:
        each = {count for axis in axes if _with_seeds(axis["name"]) for count in _but_its_seeds(axis)["seeds"]}
        counts = sorted(each or {number})
        told = count_of(1, "seed") if counts == [1] else f"{' or '.join(map(str, counts))} seeds"
        seeds = f", {told} for each{' combination' if len(axes) > 1 else ''}" if number > 1 else ""
    # how they were trained, and what they are made of, as far as no axis says it
    untrained = training.get("max_steps") == 0 and all(axis["name"] != "max_steps" for axis in axes)
    varied = {last_field(one) for axis in axes for one in axis["name"].split(TOGETHER)}
    optimiser, batch = training.get("optimiser"), training.get("batch_size", "unknown")
    whole = " in full batches" if batch is None and "batch_size" not in varied else ""
    by = f" by {optimiser['type']}" if optimiser and "optimiser" not in varied else ""
    how = "at their initial weights" if untrained else f"trained{by}{whole}"
    models = {_value(value) for axis in axes if axis["name"] == "model" for value in axis["values"]}
    made_of = f" ({', '.join(models)})" if len(models) == 1 else "" if models else _made_of(base)
    networks = f"{count_of(len(result.networks), 'network')}{made_of}, {how}{_on_data(base, varied)}"
    told = f"{networks}: {grid}{seeds}."
    # when each ended
    until, steps, epochs = training.get("until", {}), training.get("max_steps"), training.get("max_epochs")
    if until.get("loss_below") is not None and not (steps is epochs is None):
        ends = [f"{steps:,} step{'s' * (steps != 1)}"] if steps is not None else []
        ends += [count_of(epochs, "epoch")] if epochs is not None else []
        first = ", whichever came first" if len(ends) > 1 else ""
        right = "every training sample was right and " if until.get("accuracy") == 1 else ""
        under = f"the loss was under {until['loss_below']:g}"
        told += f" Each ran until {right}{under}, or for {' or '.join(ends)}{first}."
    return f"{told}{_not_reached(result)}"


def _not_reached(result: StudyResult) -> str:
    """Return how many networks did not get to the end of training, and which; most claims leave them out."""
    networks = result.networks
    short = networks[~networks["outcome"].isin(REACHED)] if "outcome" in networks else networks.iloc[:0]
    if short.empty:
        return ""
    names = [name for name in result.varied if name in networks and not is_seed(name)]
    told = []
    for _, row in short.head(SHORT_LIST).iterrows():
        values = {name: split_values(row[name]) if TOGETHER in name else row[name] for name in names}
        settings = [_in_words({"name": name, "values": [value]}) for name, value in values.items()]
        told.append(f"{row['outcome']} ({', '.join([*settings, f'seed {row.seed}'])})")
    others = [f"{count} {outcome}" for outcome, count in short["outcome"].iloc[SHORT_LIST:].value_counts().items()]
    more = f"; and {len(short) - SHORT_LIST} more ({listed(others)})" if others else ""
    return f" {count_of(len(short), 'network')} did not get there: {'; '.join(told)}{more}."


def _with_seeds(name: str) -> bool:
    """Return whether an axis changes other settings together with a seed."""
    return not is_seed(name) and but_seeds(name) != name.split(TOGETHER)


def _but_its_seeds(axis: Mapping[str, Any]) -> dict[str, Any]:
    """Return an axis that changes a seed together with other settings as one of these alone, and its seeds for each."""
    names, settings = axis["name"].split(TOGETHER), but_seeds(axis["name"])
    kept = [names.index(one) for one in settings]
    values: list[tuple[Any, ...]] = []
    seeds: list[int] = []
    for value in axis["values"]:
        rest = tuple(value[i] for i in kept)
        if rest not in values:
            values, seeds = [*values, rest], [*seeds, 0]
        seeds[values.index(rest)] += 1
    return {"name": TOGETHER.join(settings), "values": values, "seeds": seeds}


def _in_words(axis: Mapping[str, Any]) -> str:
    """Return an axis and its values in words; for nested settings, but a few architectures by name, their number."""
    if _with_seeds(axis["name"]):
        axis = _but_its_seeds(axis)
    name, values = axis["name"], axis["values"]
    told = [_value(value) for value in values]
    if name == "model" and 1 < len(set(told)) == len(values) <= SHORT_LIST:
        return f"models {listed(told)}"
    if any(isinstance(value, Mapping) and "lr" not in value for value in values):
        return count_of(len(values), last_field(name).replace("_", " "))
    return f"{_spoken(name, len(values))} {listed(told)}"


def _value(value: Any) -> str:
    """Return a value of an axis: a number, settings that belong together, or an optimiser with its learning rate."""
    if isinstance(value, list | tuple):
        return " with ".join(map(_value, value))
    if isinstance(value, Mapping) and {"type", "lr"} <= set(value):
        return f"{value['type']} at {value['lr']:g}"
    if isinstance(value, Mapping):
        return str(short(value["source"]) if "source" in value else value.get("name", value.get("type")))
    return f"{value:g}" if isinstance(value, float) else _item(value)


def _spoken(name: str, count: int) -> str:
    if TOGETHER in name:
        return " with ".join(_spoken(one, count) for one in name.split(TOGETHER))
    name = last_field(name)
    return in_words(name) + "s" * (count > 1 and name in ("lr", "batch_size"))


def _made_of(base: Mapping[str, Any]) -> str:
    model = base.get("model")
    if not model:
        return ""
    if "widths" not in model:
        return f" ({short(model['source']) if 'source' in model else model['type']})"
    widths = listed([str(width) for width in model["widths"]])
    return f" of {count_of(len(model['widths']) + 1, 'layer')} ({model['activation']}, widths {widths})"


def _on_data(base: Mapping[str, Any], varied: Collection[str] = ()) -> str:
    data, loss = base.get("data"), base.get("training", {}).get("loss")
    size = f"{data['train']} training samples of " if data and data.get("train") and "train" not in varied else ""
    on = f" on {size}{short(data['source']) if 'source' in data else data['name']}" if data else ""
    told = "mean squared error" if loss == "mse" else str(loss).replace("_", " ")
    return f"{on} with the {told}" if loss else on


def caveats(result: StudyResult) -> list[str]:
    """Return what a reader must know before the findings: networks left out, failed or missing."""
    lines = []
    total = len(result.networks)
    if result.excluded:
        left_out = len(result.excluded)
        lines.append(
            f"{left_out} of {count_of(total, 'network')} {is_or_are(left_out)} excluded from every correlation "
            "(listed below; drawn hollow or dashed)."
        )
    if result.failed:
        failed = len(result.failed)
        lines.append(f"{count_of(failed, 'run')} failed and {is_or_are(failed)} missing here.")
    if result.unfinished:
        lines.append(
            f"{count_of(result.unfinished, 'network')} of the study not finished: the findings are preliminary."
        )
    return lines


def flatten(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return nested settings as (dotted name, value) rows.

    >>> flatten({"data": {"train": 600}, "lrs": [0.1, 0.2]})
    [('data.train', '600'), ('lrs', '0.1, 0.2')]
    """
    rows: list[tuple[str, str]] = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            rows += flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple):
            rows.append((f"{prefix}{key}", ", ".join(_item(item) for item in value)))
        else:
            rows.append((f"{prefix}{key}", setting_text(value)))
    return rows


def _item(item: Any) -> str:
    """Return one member of a list in words; a quantity of the study as its name and its column."""
    if not isinstance(item, Mapping):
        return setting_text(item)
    if {"name", "column", "transform"} <= set(item):
        column = item["column"] if item["transform"] == "identity" else f"{item['transform']} {item['column']}"
        return f"{item['name']} ({column})"
    return "; ".join(f"{key} {value}" for key, value in item.items())


def shown(value: Any) -> str:
    """Return a table's number: four significant digits, whole numbers whole, a dash for an undefined one.

    >>> [shown(v) for v in (0.123456, 48, float("nan"), None, "converged", 1.0)]
    ['0.1235', '48', '–', '–', 'converged', '1']
    """
    if value is None or value is pd.NA:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}" if not math.isnan(value) else "–"
    return str(value)


def threshold(number: float) -> str:
    """Return the number that a statistic is held against: one just beside a whole number does not look like it.

    >>> [threshold(v) for v in (0.95, -0.105360515, 1.0, 1 - 1e-9, 2 + 1e-8)]
    ['0.95', '-0.105361', '1', '1 - 1e-09', '2 + 1e-08']
    """
    told, off = f"{number:g}", number - round(number)
    if off == 0 or told != f"{round(number)}":
        return told
    return f"{told} {'+' if off > 0 else '-'} {abs(off):.1g}"


def breakable(name: str) -> Markup:
    """Return a long name with line breaks allowed after its punctuation.

    >>> str(breakable("mls<[fc1]"))
    'mls&lt;<wbr>[fc1]'
    """
    parts = re.split(r"(?<=[_.])|(?=\[)", name)
    return Markup("<wbr>").join(part for part in parts if part)


def exact(value: Any) -> str:
    """Return all digits, for sorting and for the tooltip of a cell."""
    if value is None or value is pd.NA:
        return "nan"
    return repr(float(value)) if isinstance(value, float) else str(value)
