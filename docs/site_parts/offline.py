"""The built site needs no network: a script, a style, a font or a picture from elsewhere is a warning."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sphinx.util import logging

_LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video)\b[^>]*\bsrc=["'](?:https?:)?//[^"']+"""
    r"""|<link\b(?=[^>]*\brel=["'](?:stylesheet|preload|preconnect|icon))[^>]*\bhref=["'](?:https?:)?//[^"']+"""
    r"""|(?:@import\s+|url\()["']?(?:https?:)?//[^"')]+"""
)


def loaded(text: str) -> list[str]:
    """Return what a page or style would load from a network.

    >>> loaded('<a href="https://pytorch.org">torch</a> <script src="_static/a.js"></script>')
    []
    >>> loaded('<script async src="https://cdn.org/a.js"></script> <style>@import "//fonts.org/a.css"</style>')
    ['<script async src="https://cdn.org/a.js', '@import "//fonts.org/a.css']
    """
    return _LOADED.findall(text)


def _check(app: Any, error: Exception | None) -> None:
    for page in sorted(Path(app.outdir).rglob("*")) if error is None and app.builder.format == "html" else []:
        if page.suffix in (".html", ".css"):
            for one in loaded(page.read_text(encoding="utf-8")):
                logging.getLogger(__name__).warning("%s needs a network: %s", page.relative_to(app.outdir), one)


def setup(app: Any) -> None:
    """Look at every page and style when they are written."""
    app.connect("build-finished", _check)
