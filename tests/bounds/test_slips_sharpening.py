"""The page on the sharpening paper's slips: every section shows its own in code that runs."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "slips_sharpening.md"


def sections() -> list[str]:
    return PAGE.read_text().split("\n## ")[1:]


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


def test_every_section_shows_its_slip() -> None:
    assert len(sections()) == 6
    assert all(any("assert" in block for block in blocks(section)) for section in sections())


def test_the_code_runs_and_says_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": "slips"}
    for number, block in enumerate(blocks(PAGE.read_text())):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
    said = capsys.readouterr().out
    assert "20.02 <= 1.04? not applicable" in said
    assert "5 <= 0? not applicable; declared convex: violated" in said
    assert "hold 2.00" in said
