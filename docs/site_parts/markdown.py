"""Markdown pages that GitHub shows as they are, changed for the site while they are read."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_FORMULA = re.compile(r"\$`([^`]+)`\$")
_OF_THE_ROOT = re.compile(r"^```\{include\} \.\./(\w+\.md)\n```$", re.M)
_ABSENT = r"\[([^\]]+)\]\((?:%s[^)]*|benchmarks[^)]*|tables|development[^)]*|LICENSE)\)"
"""A link to what the site does not have: a file above docs/ (%s is the way there), or one of these."""
_MEASURE = re.compile(r"^### `(\w+)`$", re.M)
_MEASURES = "measures"
_SPANS = re.compile(
    r"^ *(?P<fence>```|~~~).*?^ *(?P=fence)|^#.*?$|^(?: {4}|\t).*?$|\[[^\]\n]*\]\([^)]*\)"
    r"|`(?P<name>[a-z]\w+)(?P<rest>[.(][^`\n]*)?`|`+[^`]*`+",
    re.M | re.S,
)
"""What stays as it is (blocks of code, headings, links, other code), or code that may name a measure."""
_TOO_COMMON = {"loss", "accuracy"}  #: names of arguments, too


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


@cache
def measures() -> frozenset[str]:
    """Return the names that have an entry on the page of measures, and mean nothing else."""
    return frozenset(_MEASURE.findall((ROOT / "docs" / f"{_MEASURES}.md").read_text(encoding="utf-8"))) - _TOO_COMMON


def with_entries(text: str, page: str, names: Collection[str]) -> str:
    """Return a page on which each measure's name in code leads to its entry; a name may have an option or a part.

    >>> with_entries("`mls.max` of [`mls`](a.md), not `mlp`", "papers/index", {"mls"})
    '[`mls.max`](../measures.md#mls) of [`mls`](a.md), not `mlp`'
    """
    way = "" if page == _MEASURES else "../" * page.count("/") + f"{_MEASURES}.md"

    def linked(found: re.Match[str]) -> str:
        return f"[{found[0]}]({way}#{found['name']})" if found["name"] in names else found[0]

    return _SPANS.sub(linked, text)


def of_the_root(name: str) -> str:
    """Return a page of the repository's root, whose links lead from docs/."""
    return (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")


def _read(app: Any, name: str, content: list[str]) -> None:
    text = for_the_site(_OF_THE_ROOT.sub(lambda found: of_the_root(found[1]), content[0]), name.count("/"))
    prose = app is None or str(app.env.doc2path(name)).endswith(".md")
    content[0] = with_entries(text, name, measures()) if prose else text


def setup(app: Any) -> None:
    """Change every page that is read."""
    app.connect("source-read", _read)
