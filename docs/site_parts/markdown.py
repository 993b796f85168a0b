"""Markdown pages that GitHub shows as they are, changed for the site while they are read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_FORMULA = re.compile(r"\$`([^`]+)`\$")
_OF_THE_ROOT = re.compile(r"^```\{include\} \.\./(\w+\.md)\n```$", re.M)
_ABSENT = r"\[([^\]]+)\]\((?:%s[^)]*|benchmarks[^)]*|tables|development[^)]*|LICENSE)\)"
"""A link to what the site does not have: a file above docs/ (%s is the way there), or one of these."""


def for_the_site(text: str, depth: int = 0) -> str:
    """Return a page with formulas as MyST writes them, and without links to files that the site does not have.

    `depth`: number of folders between docs/ and the page.

    >>> for_the_site("$`S`$ is in [results](../benchmarks/results)")
    '$S$ is in results'
    """
    for name in ("CONTRIBUTING", "CHANGELOG"):
        text = text.replace(f"](../{name}.md", f"]({name.lower()}.md").replace(f"]({name}.md", f"]({name.lower()}.md")
    absent = re.compile(_ABSENT % re.escape("../" * (depth + 1)))
    return absent.sub(r"\1", _FORMULA.sub(r"$\1$", text))


def of_the_root(name: str) -> str:
    """Return a page of the repository's root, whose links lead from docs/."""
    return (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")


def _read(app: Any, name: str, content: list[str]) -> None:
    content[0] = for_the_site(_OF_THE_ROOT.sub(lambda found: of_the_root(found[1]), content[0]), name.count("/"))


def setup(app: Any) -> None:
    """Change every page that is read."""
    app.connect("source-read", _read)
