"""The page on the paper's slips is true: its blocks run, and its figures are those it says."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "slips_relative.md"


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


def test_every_block_runs_and_asserts() -> None:
    names: dict[str, object] = {"__name__": "document"}
    for block in blocks():
        exec(compile(block, str(PAGE), "exec"), names)
    assert all("assert" in block for block in blocks()[1:])


def test_every_slip_has_its_example() -> None:
    sections = PAGE.read_text().split("\n## ")[1:]
    assert [section.partition(":")[0] for section in sections] == [
        "Theorem 4",
        "Proposition 12",
        "Proposition 12",
        "Theorem 15",
        "Section 4 (i)",
        "C.2",
        "Fig. 3",
    ]
    assert all("```python" in section for section in sections)
