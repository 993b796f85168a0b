"""The page's sentences and numbers in words."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

if TYPE_CHECKING:
    from flatlens.experiments import StudyResult

#: In the order of the marks' shapes in the figures.
_SIGNS = ("●", "■", "▲", "◆", "✚", "▼")


def title(result: StudyResult) -> str:
    """The page's heading."""
    name = result.settings.get("name", "study")
    return f"Flatness, compression and generalisation: {name}"


def what_was_run(result: StudyResult) -> str:
    """The study in one or two sentences, from its settings and tables."""
    networks, settings = result.networks, result.settings
    lrs = listed([f"{lr:g}" for lr in sorted(set(networks["lr"]))])
    sizes = listed([str(size) for size in sorted(set(networks["batch_size"]))])
    seeds = networks["seed"].nunique()
    grid = f"learning {_s('rate', networks['lr'])} {lrs}, batch {_s('size', networks['batch_size'])} {sizes}"
    trained = f"{counted(len(networks), 'network')}{_made_of(settings)}, trained by SGD{_on_data(settings)}"
    return f"{trained}: {grid}, {counted(seeds, 'seed')} for each pair.{_stop(settings)}"


def _made_of(settings: Mapping[str, Any]) -> str:
    widths = settings.get("widths")
    if not widths:
        return ""
    layers = counted(len(widths) + 1, "layer")
    return f" of {layers} ({settings.get('activation', 'hidden')}, widths {listed([str(w) for w in widths])})"


def _on_data(settings: Mapping[str, Any]) -> str:
    data, loss = settings.get("data"), settings.get("loss")
    words = ""
    if isinstance(data, Mapping) and "train" in data:
        words = f" on {data['train']} training samples of {data.get('name', 'the data')}"
    return f"{words} with the {str(loss).replace('_', ' ')}" if loss else words


def _stop(settings: Mapping[str, Any]) -> str:
    bound, steps = settings.get("loss_below"), settings.get("max_steps")
    if bound is None or steps is None:
        return ""
    return f" Each ran until every training sample was right and the loss under {bound:g}, or for {steps:,} steps."


def caveats(result: StudyResult) -> list[str]:
    """What a reader must know before believing the findings: who is left out, what failed, what is missing."""
    lines = []
    total = len(result.networks)
    if result.excluded:
        verb = "is" if len(result.excluded) == 1 else "are"
        lines.append(
            f"{len(result.excluded)} of {counted(total, 'network')} {verb} left out of every correlation "
            "(listed below; drawn hollow or dashed)."
        )
    if result.failed:
        lines.append(f"{counted(len(result.failed), 'run')} ended in an error and {_is(result.failed)} missing here.")
    if result.unfinished:
        lines.append(
            f"{counted(result.unfinished, 'network')} of the study not finished yet: these are the findings so far."
        )
    return lines


def _is(items: list[tuple[str, str]]) -> str:
    return "is" if len(items) == 1 else "are"


def counted(count: int, noun: str) -> str:
    """A number and its noun.

    >>> counted(1, "network"), counted(48, "network")
    ('1 network', '48 networks')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _s(noun: str, values: Any) -> str:
    return noun if values.nunique() == 1 else f"{noun}s"


def listed(items: list[str]) -> str:
    """Items in a row, as one writes them.

    >>> listed(["4", "16", "64"])
    '4, 16 and 64'
    """
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else "none"


def shape_signs(count: int) -> list[str]:
    """The signs of the legend, one a batch size."""
    return [_SIGNS[i % len(_SIGNS)] for i in range(count)]


def flatten(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as (dotted name, value) rows.

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
            rows.append((f"{prefix}{key}", str(value)))
    return rows


def _item(item: Any) -> str:
    """One member of a list; a quantity of the study as its name and what it is made of."""
    if not isinstance(item, Mapping):
        return str(item)
    if {"name", "column", "transform"} <= set(item):
        column = item["column"] if item["transform"] == "identity" else f"{item['transform']} {item['column']}"
        return f"{item['name']} ({column})"
    return "; ".join(f"{key} {value}" for key, value in item.items())


def shown(value: Any) -> str:
    """A table's number: four significant digits, whole numbers whole, and a dash for what does not exist.

    >>> [shown(v) for v in (0.123456, 48, float("nan"), "converged", 1.0)]
    ['0.1235', '48', '–', 'converged', '1']
    """
    if isinstance(value, float):
        return f"{value:.4g}" if not math.isnan(value) else "–"
    return str(value)


def breakable(name: str) -> Markup:
    """A long name that may be broken after its punctuation.

    >>> str(breakable("mls<[fc1]"))
    'mls&lt;<wbr>[fc1]'
    """
    parts = re.split(r"(?<=[_.])|(?=\[)", name)
    return Markup("<wbr>").join(part for part in parts if part)


def exact(value: Any) -> str:
    """All digits, for sorting and for the pointer resting on a cell."""
    return repr(float(value)) if isinstance(value, float) else str(value)
