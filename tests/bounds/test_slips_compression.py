"""The page on the compression paper's slips is true: its blocks run, and say what the page says."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "slips_compression.md"


def test_the_code_runs_and_says_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": "slips"}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S):
        exec(compile(block, str(PAGE), "exec"), names)
    said = capsys.readouterr().out
    assert "3.0 <= 1.0? False" in said
    assert "1.0 <= 0.5? False" in said
    assert "0.141 <= 0.010? False" in said
    assert "f = z: B / C = 0.800" in said
    assert "f = -1/z: B / C = 1.000" in said
