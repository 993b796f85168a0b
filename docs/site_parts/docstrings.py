"""Docstrings, which are plain text with code in single backquotes, as reStructuredText."""

from __future__ import annotations

import re
from typing import Any

_CODE = re.compile(r"(`+[^`]*`+)")
_SPECIAL = re.compile(r"([\\*|])|(?<=\w)(_)(?!\w)")
_SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Attributes):$")


def as_rest(line: str) -> str:
    r"""Return a line whose formulas no longer read as markup; code in backquotes stays.

    >>> as_rest("mean_i ||df/dx_i||_F^2, see `a|b`")
    'mean_i \\|\\|df/dx_i\\|\\|_F^2, see `a|b`'
    """
    parts = _CODE.split(line)
    parts[::2] = [_SPECIAL.sub(lambda found: "\\" + found.group(0), part) for part in parts[::2]]
    return "".join(parts)


def _process(app: Any, what: str, name: str, of: Any, options: Any, lines: list[str]) -> None:
    if any(drawn := [line.strip() == "FlatlensError" for line in lines]):
        lines[drawn.index(True) : drawn.index(True)] = ["::", ""]
    kept = False  # in a doctest with its output, or in a block that is drawn with characters
    for number, line in enumerate(lines):
        kept = bool(line.strip()) and (kept or line.lstrip().startswith((">>>", "FlatlensError")))
        if not kept and not _SECTION.match(line.strip()):
            lines[number] = as_rest(line)


def setup(app: Any) -> None:
    """Change docstrings before napoleon reads their sections."""
    app.connect("autodoc-process-docstring", _process, priority=400)
