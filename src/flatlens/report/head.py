"""The head of a screen and of a page: what was measured, and with which weights, data and preparation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rich.text import Text

from flatlens.progress import count_of

Abouts: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The `about` of each network's report, by the network's name; one network needs no name."""

UNTRAINED = "random"
"""The first word on the weights of an untrained network."""

MOST = 6
"""Number of lines on different weights that a screen shows at most."""


def head_of_screen(abouts: Abouts) -> list[Text]:
    """Return the first lines of a screen; those on untrained weights are highlighted."""
    lines = [Text(measured_facts(abouts), style="bold")]
    lines += [
        Text(f"{what}: {words}", style="bold yellow" if words.startswith(UNTRAINED) else "dim")
        for what, words in origins(abouts, MOST)
    ]
    return [*lines, *(Text(line, style="bold yellow") for line in _untrained(abouts))]


def head_of_page(abouts: Abouts) -> dict[str, Any]:
    """Return what the head of a page needs, by the names in its template."""
    return {"facts": measured_facts(abouts), "origins": origins(abouts), "untrained": _untrained(abouts)}


def measured_facts(abouts: Abouts) -> str:
    """Return samples, outputs, layers and loss in words, as far as they are the same for all networks.

    >>> measured_facts({"a": {"n": 12, "outputs": 1, "layers": ["1"]}, "b": {"n": 12, "outputs": 1, "layers": []}})
    '12 samples, 1 output'
    """
    first, *others = (_facts(about) for about in abouts.values())
    return ", ".join(fact for fact in first if all(fact in other for other in others)) or "measured"


def _facts(about: Mapping[str, Any]) -> list[str]:
    found = [count_of(about[key], noun) for key, noun in (("n", "sample"), ("outputs", "output")) if key in about]
    layers = about.get("layers")
    if layers and isinstance(layers, Sequence) and not isinstance(layers, str):
        found.append(count_of(len(layers), "layer"))
    if about.get("arithmetic", "full") != "full":
        found.append(f"multiplied in {about['arithmetic']}")
    if "loss" in about:
        found.append(str(about["loss"]).replace("_", " "))
    return found


def origins(abouts: Abouts, most: int | None = None) -> list[tuple[str, str]]:
    """Return the origin of weights, data and preparation; what differs between networks has a line for each origin.

    More than `most` different ones are counted.

    >>> origins({"a": {"origin": {"weights": "a.pt", "data": "digits"}},
    ...          "b": {"origin": {"weights": "b.pt", "data": "digits"}}})
    [('weights of a', 'a.pt'), ('weights of b', 'b.pt'), ('data', 'digits')]
    """
    found: dict[str, dict[str, list[str]]] = {}
    for name, about in abouts.items():
        for what, words in about.get("origin", {}).items():
            found.setdefault(what, {}).setdefault(words, []).append(name)
    lines = []
    for what, each in found.items():
        if most is not None and len(each) > most:
            lines.append((what, f"{len(each)} different ones: --page and --json list them"))
            continue
        for words, names in each.items():
            lines.append((what if len(names) == len(abouts) else f"{what} of {', '.join(names)}", words))
    return lines


def _untrained(abouts: Abouts) -> list[str]:
    """Return a sentence on the networks whose weights are random, if there are any."""
    names = [name for name, about in abouts.items() if about.get("origin", {}).get("weights", "").startswith(UNTRAINED)]
    if not names:
        return []
    of = f" of {', '.join(names)}" if len(abouts) > 1 else ""
    return [f"The weights{of} are random: nobody trained {'this network' if len(names) == 1 else 'these networks'}."]
