"""A box on long pages of reference that filters their rows and sections: static/filter.js, which needs no network."""

from __future__ import annotations

from typing import Any

PAGES = frozenset({"measures", "zoo", "sizes", "conventions", "glossary"})


def _add(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    if page in PAGES:
        app.add_js_file("filter.js", loading_method="defer")


def setup(app: Any) -> None:
    """Add the script to these pages alone."""
    app.connect("html-page-context", _add)
