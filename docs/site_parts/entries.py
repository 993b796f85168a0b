"""A measure's name in code leads to its entry on the page of measures, wherever it stands."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes

PAGE = "measures"
_HEADING = re.compile(r"^### `(\w+)`$", re.M)
_NAME = re.compile(r"(\w+)(?:[.(].*)?")
_TOO_COMMON = {"loss", "accuracy"}  #: names of arguments, too


@cache
def measures() -> frozenset[str]:
    """Return the names that have an entry, and mean nothing else."""
    written = (Path(__file__).parents[1] / f"{PAGE}.md").read_text(encoding="utf-8")
    return frozenset(_HEADING.findall(written)) - _TOO_COMMON


def measure_in(code: str) -> str | None:
    """Return the measure that code names, with or without an option or a part.

    >>> [measure_in(code) for code in ("mls", "mls.max", "local_volume(top_k=3)", "loss", "mls - 1")]
    ['mls', 'mls', 'local_volume', None, None]
    """
    found = _NAME.fullmatch(code)
    return found[1] if found and found[1] in measures() else None


def _link(app: Any, document: nodes.document, page: str) -> None:
    way = app.builder.get_relative_uri(page, PAGE)
    for code in [*document.findall(nodes.literal)]:
        within = code.parent
        while within is not None and not isinstance(within, nodes.reference | nodes.title):
            within = within.parent
        if within is None and (name := measure_in(code.astext())):
            link = nodes.reference("", "", internal=True, refuri=f"{way}#{nodes.make_id(name)}")
            code.replace_self(link)
            link += code


def setup(app: Any) -> None:
    """Add the links when a page is written."""
    app.connect("doctree-resolved", _link)
