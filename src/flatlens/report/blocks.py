"""The layers of a deep network by block (`blocks.3`, `encoder.layer.3`, `layer1.0`), to keep a hundred readable."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from flatlens.progress import by_key

CALL = re.compile(r":\d+$")
PARAMETER = re.compile(r"\.(weight|bias)$")
NUMBER = re.compile(r"(?<![^.\s])\d+(?=\.)")
BARS = "▁▂▃▄▅▆▇█"


def blocks(names: Sequence[str]) -> dict[str, str]:
    """Return each layer's or parameter's block, "" if it is in none.

    A block is the longest beginning of a name that ends with a number and holds two layers or more; where no part is a
    number alone, one that ends with a digit will do.

    >>> found = blocks(["conv1", "layer1.0.conv1", "layer1.0.conv2", "layer1.0.downsample.0", "layer1.0.bn1.weight"])
    >>> list(found.values())
    ['', 'layer1.0', 'layer1.0', 'layer1.0', 'layer1.0']
    """
    layers = {name: PARAMETER.sub("", CALL.sub("", name)).split(".") for name in names}
    held: dict[str, set[str]] = {}
    for parts in layers.values():
        for length in range(1, len(parts)):
            held.setdefault(".".join(parts[:length]), set()).add(".".join(parts))

    def block(parts: list[str]) -> str:
        for wanted in (str.isdecimal, lambda part: part[-1:].isdecimal()):
            for length in range(len(parts) - 1, 0, -1):
                if wanted(parts[length - 1]) and len(held[".".join(parts[:length])]) > 1:
                    return ".".join(parts[:length])
        return ""

    return {name: block(parts) for name, parts in layers.items()}


def role(name: str, block: str) -> str:
    """Return the name of a layer within its block.

    >>> role("blocks.3.mlp.fc1", "blocks.3"), role("head", "")
    ('mlp.fc1', 'head')
    """
    return name.removeprefix(f"{block}.") if block else name


def grouped(names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return blocks with their layers, in the order of the first of each; a layer outside blocks is its own group.

    >>> grouped(["stem", "h.0.a", "h.0.b", "h.1.a", "h.1.b", "h.0.norm.weight", "head"])
    [('', ['stem']), ('h.0', ['h.0.a', 'h.0.b', 'h.0.norm.weight']), ('h.1', ['h.1.a', 'h.1.b']), ('', ['head'])]
    """
    found = blocks(names)
    together = by_key((found[name] or f" {name}", name) for name in names)
    return [("" if key.startswith(" ") else key, members) for key, members in together.items()]


def summed_up(names: Iterable[str], between: str = ", ", most: int | None = None) -> str:
    """Return many names in few words: names that differ in one number, or in it and the next one, are joined.

    >>> summed_up(["h.0.fc", "h.1.fc", "h.2.fc", "h.5.fc", "head"])
    'h.{0-2,5}.fc, head'
    >>> summed_up(["h.2.v -> h.2.o", "h.3.v -> h.3.o", "h.2.o -> h.3.v", "h.3.o -> h.4.v"], "; ")
    'h.{2-3}.v -> h.{2-3}.o; h.{2-3}.o -> h.{3-4}.v'
    >>> summed_up(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """

    def slotted(name: str) -> tuple[str, int]:
        """Return a name with one mark in place of its first number, another in place of the next one; the first."""
        first = int((NUMBER.findall(name) or ["0"])[0])
        slots = {first: "\0", first + 1: "\1"}
        return NUMBER.sub(lambda number: slots.get(int(number[0]), number[0]), name), first

    words = []
    for pattern, firsts in by_key(map(slotted, names)).items():
        each = (_ranges(firsts), _ranges([n + 1 for n in firsts]))
        here, following = each if len(set(firsts)) == 1 else (f"{{{runs}}}" for runs in each)
        words.append(pattern.replace("\0", here).replace("\1", following))
    left = 0 if most is None else len(words) - most
    return between.join(words[:most]) + (f" and {left} more" if left > 0 else "")


def by_reason(reasons: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return pairs (reason, the names it is true of, in few words).

    >>> by_reason({"h.0.fc": "tied", "h.1.fc": "tied", "head": "last"})
    [('tied', 'h.{0-1}.fc'), ('last', 'head')]
    """
    return [(why, summed_up(names)) for why, names in by_key((why, name) for name, why in reasons.items()).items()]


def _ranges(numbers: Sequence[int]) -> str:
    counted = sorted(set(numbers))
    runs = [[n for _, n in run] for _, run in groupby(enumerate(counted), lambda at: at[1] - at[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def heights(values: Mapping[str, float]) -> dict[str, float]:
    """Return each value's position between the smallest (0) and the largest (1), by logarithm if all are positive.

    >>> heights({"a": 1.0, "b": 10.0, "c": 100.0}), heights({"a": -1.0, "b": 0.0, "c": 3.0})
    ({'a': 0.0, 'b': 0.5, 'c': 1.0}, {'a': 0.0, 'b': 0.25, 'c': 1.0})
    """
    known = {name: value for name, value in values.items() if math.isfinite(value)}
    if known and min(known.values()) > 0:
        known = {name: math.log(value) for name, value in known.items()}
    low, high = min(known.values(), default=0.0), max(known.values(), default=0.0)
    return {name: (value - low) / (high - low) if high > low else 0.5 for name, value in known.items()}


def profile(values: Sequence[float], width: int) -> str:
    """Return a row of bars, one a value; beyond `width`, the largest of neighbours; a space for an undefined one.

    >>> profile([1.0, 10.0, float("nan"), 100.0], 10), profile([1.0, 2.0, 4.0, 4.0], 2)
    ('▁▅ █', '▁█')
    """
    step = math.ceil(len(values) / width) if values else 1
    merged = []
    for start in range(0, len(values), step):
        part = [value for value in values[start : start + step] if math.isfinite(value)]
        merged.append(max(part, default=math.nan))
    at = heights({str(i): value for i, value in enumerate(merged)})
    return "".join(BARS[round(at[key] * (len(BARS) - 1))] if (key := str(i)) in at else " " for i in range(len(merged)))
