"""The tasks of docs/thirty.md and docs/decisions.md print what the pages show; the run's end lists their seconds."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("thirty", Path(__file__).parent.parent / "docs" / "thirty.py")
thirty = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(thirty)
TASKS, DECISIONS = thirty.tasks(), thirty.tasks(thirty.DECISIONS)

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
CLOSE = 0.02  #: of numbers in an output: digits are not the same on all machines
ROUNDING = 1e-3  #: numbers below are residuals and other rounding


def alike(shown: str, found: str) -> bool:
    """Whether two outputs have the same words, and numbers that are close."""
    words = [re.sub(r"[\s│─-]+", " ", NUMBER.sub("0", text)).strip() for text in (shown, found)]
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (shown, found)]
    return words[0] == words[1] and all(
        abs(a - b) <= CLOSE * max(abs(a), abs(b)) or max(abs(a), abs(b)) < ROUNDING
        for a, b in zip(*numbers, strict=True)
    )


@pytest.mark.parametrize("heading", [*TASKS, *DECISIONS])
def test_a_task_prints_what_the_page_shows(
    heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flatlens.progress.DELAY", 1e6)
    page = thirty.PAGE if heading in TASKS else thirty.DECISIONS
    language, code, shown = (TASKS | DECISIONS)[heading]
    names = thirty.prepared(tmp_path, page)
    found, seconds = thirty.printed(language, code, names)
    record_property("thirty", f"{seconds:5.1f} s  {heading}")
    difference = "\n".join(difflib.unified_diff(shown.splitlines(), found.splitlines(), "page", "run", lineterm=""))
    assert alike(shown, found), (
        f"if this is right, write the page anew: python docs/thirty.py {page.name}\n{difference}"
    )


def test_the_readme_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parent.parent / "README.md").read_text()
    blocks = dict(re.findall(r"^```(python|text)\n(.*?)^```$", text, re.M | re.S))
    shown = blocks["text"].removesuffix("...\n")
    found, _ = thirty.printed("python", blocks["python"], {"__name__": "readme"})
    assert alike(shown, "".join(found.splitlines(keepends=True)[: len(shown.splitlines())])), found


def test_there_are_thirty_short_ones() -> None:
    assert [heading.partition(".")[0] for heading in TASKS] == [str(i + 1) for i in range(30)]
    assert max(sum(map(bool, code.splitlines())) for _, code, _ in TASKS.values()) <= 18


def test_outputs_are_alike_only_if_words_and_numbers_are() -> None:
    assert alike("mls  3.062 exact\n", "mls 3.063 exact\n")
    assert alike("residual 7e-10", "residual 3e-9")
    assert not alike("mls 3.062 exact", "mls 3.9 exact")
    assert not alike("mls 3.062 exact", "mls 3.062 estimate")
    assert not alike("mls 3.062 exact", "mls 3.062 exact 5")
