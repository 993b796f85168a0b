"""Generated command lines: exit status 0, 1, 2 or 130, never a traceback, one line for every mistake, nothing changed.

They run one after the other in this process, as `flatlens` runs them but for the signals, which
tests/cli/test_processes_stopping.py tests.
"""

import contextlib
import hashlib
import io
import json
from itertools import islice
from pathlib import Path

import pytest
from invocations import folder, invocations

from flatlens import cli
from flatlens.progress import OBEYED

ONE_BY_ONE = 60
ALL, SHARE = 1000, 100
MADE = {"page.html", "saved"}


def state(at: Path) -> dict[str, str]:
    """The checksums of all files but those that the commands were asked for."""
    files = (path for path in sorted(at.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return {str(p.relative_to(at)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files if p.name not in MADE}


def fault(words: list[str]) -> str:
    """What is wrong with how a command line ends; nothing, mostly."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = cli.run(words)
    except BaseException as error:
        return f"raised {type(error).__name__}: {error}"
    said = [line for line in err.getvalue().splitlines() if line]
    if status not in (0, 1, 2, 130):
        return f"exit status {status}"
    if "Traceback (most recent call last)" in err.getvalue() and "--traceback" not in words:
        return f"a traceback: {said[-1]}"
    if "an unexpected error" in err.getvalue() or (status == 1 and "--strict" not in words):
        return f"a bug: {said[-1:]}"
    if OBEYED.search(out.getvalue() + err.getvalue()):
        return "what a terminal obeys"
    if status == 2 and (out.getvalue() or not said or not said[-1].startswith("flatlens: ")):
        return f"status 2 without a line of its own: {said[-1:]} {out.getvalue()[:80]}"
    if status == 0 and "--json" in words and not {"--help", "-h", "--version"} & set(words):
        try:
            json.loads(out.getvalue())
        except ValueError:
            return f"no JSON: {out.getvalue()[:80]}"
    return ""


def faults(at: Path, seed: int, count: int) -> list[tuple[list[str], str]]:
    """The command lines with a fault, of so many."""
    folder(at)
    before = state(at)
    found = []
    for words in islice(invocations(seed), count):
        if what := fault(words):
            found.append((words, what))
        if state(at) != before:
            found.append((words, "changed files"))
            break
    return found


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flatlens.progress.DELAY", 1e6)
    return tmp_path


def test_a_share_of_the_command_lines(place):
    assert faults(place, 0, ONE_BY_ONE) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 1 + ALL // SHARE))
def test_a_thousand_command_lines(place, seed):
    assert faults(place, seed, SHARE) == []


def test_a_fault_is_seen(place, monkeypatch):
    def spoiled(words):
        return {"status": 3, "silent": 2}.get(words[0]) or int(words[0] == "bug")

    monkeypatch.setattr(cli, "run", spoiled)
    assert fault(["status"]) == "exit status 3"
    assert fault(["silent"]).startswith("status 2 without a line")
    assert fault(["bug"]).startswith("a bug")
    assert fault(["fine", "--json"]).startswith("no JSON")
    assert fault([]).startswith("raised IndexError")
