"""Sentences of cards and papers as a page shows them: code, plain characters for TeX, and the papers they cite."""

from __future__ import annotations

import re
from collections.abc import Iterable

from markupsafe import Markup, escape

from flatlens.measures.papers import PAPERS
from flatlens.report.cards import plain

_CODE = re.compile(r"`([^`]+)`")
_EMPHASIS = re.compile(r"\*([^*]+)\*")
_FRACTION = re.compile(r"\\frac\{([^{}]*)\}\{([^{}]*)\}")
_BRACES = re.compile(r"(?:\\mathbb)?\{([^{}]*)\}")
_CHARACTERS = {r"\epsilon": "ε", r"\cdot": "·", r"\geq": "≥", r"\to": "→"}
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
    parts[1::2] = [_formula(part) for part in parts[1::2]]
    parts[::2] = [_EMPHASIS.sub(r"<em>\1</em>", part) for part in parts[::2]]
    return Markup("".join(parts))


def _formula(tex: str) -> str:
    """Return a formula in plain characters; with a command that is not known, as it is."""
    found = _BRACES.sub(r"\1", _FRACTION.sub(r"(\1/\2)", tex))
    for command, character in _CHARACTERS.items():
        found = found.replace(command, character)
    return plain(found) or tex


def cited(sources: Iterable[str]) -> dict[str, str]:
    """Return the papers that any of these sources names, by their short names.

    >>> list(cited(["compression Def. 3.7", "relative2021 Def. 3; symmetries2025", "definition of attention"]))
    ['compression', 'relative2021', 'symmetries2025']
    """
    words = set(re.findall(r"\w+", " ".join(sources)))
    return {key: paper for key, paper in PAPERS.items() if key in words}
