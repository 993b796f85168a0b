"""Run the tasks of docs/thirty.md and docs/decisions.md, say how long each takes, and write the pages anew.

python docs/thirty.py
python docs/thirty.py 8 29
python docs/thirty.py decisions.md

The second does so for two tasks of each page, the third for one page.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from flatlens import cli

PAGE, DECISIONS = (Path(__file__).parent / name for name in ("thirty.md", "decisions.md"))
MOST_LINES = 14  #: longer outputs end with "..."

FENCE = re.compile(r"^```(\w+)(?: title=\"(.*?)\")?\n(.*?)^```\n", re.M | re.S)


def files(page: Path = PAGE) -> dict[str, str]:
    """Return the blocks with a title: the file that all tasks need, and the lines before each."""
    return {title: code for _, title, code in FENCE.findall(page.read_text()) if title}


def tasks(page: Path = PAGE) -> dict[str, tuple[str, str, str]]:
    """Return each task's language, code and printed output, by its heading."""
    found = {}
    for heading, text in re.findall(r"^### (\d+\. .*?)\n(.*?)(?=^##|\Z)", page.read_text(), re.M | re.S):
        (language, _, code), *printed = FENCE.findall(text)
        found[heading] = (language, code, printed[0][2] if printed else "")
    return found


def prepared(folder: Path, page: Path = PAGE) -> dict[str, Any]:
    """Write net.py into the working folder, run the lines before each task, and return their names."""
    titled = files(page)
    (folder / "net.py").write_text(titled["net.py"])
    sys.modules.pop("net", None)
    names: dict[str, Any] = {"__name__": "thirty"}
    sys.path.insert(0, str(folder))
    try:
        exec(compile(titled["before"], page.name, "exec"), names)
    finally:
        sys.path.remove(str(folder))
    return names


def printed(language: str, code: str, names: dict[str, Any]) -> tuple[str, float]:
    """Return what a task prints, shortened as on the page, and how many seconds it takes."""
    begun = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if language == "sh":
            for command in filter(None, code.replace("\\\n", " ").splitlines()):
                status = cli.run(shlex.split(command)[1:])
                assert status == 0, (command, status)
        else:
            *lines, last = ast.parse(code).body
            closes = isinstance(last, ast.Expr) and not code.splitlines()[-1].startswith("print(")
            exec(compile(ast.Module([*lines, *([] if closes else [last])], []), "thirty.md", "exec"), names)
            if closes:
                value = eval(compile(ast.Expression(last.value), "thirty.md", "eval"), names)
                print("" if value is None else repr(value))
    seconds = time.perf_counter() - begun
    lines = [line.rstrip() for line in out.getvalue().strip("\n").splitlines()]
    shown = lines if len(lines) <= MOST_LINES else [*lines[: MOST_LINES - 1], "..."]
    return "".join(f"{line}\n" for line in shown), seconds


def main() -> None:
    """Run the tasks that the command line names, or all; write the pages with what they print."""
    for page in (PAGE, DECISIONS):
        if not any(name.endswith(".md") for name in sys.argv[1:]) or page.name in sys.argv[1:]:
            rewrite(page, [name for name in sys.argv[1:] if not name.endswith(".md")])


def rewrite(page: Path, only: list[str]) -> None:
    """Run these tasks of a page, or all; write it with what they print."""
    text = page.read_text()
    for heading, (language, code, before) in tasks(page).items():
        if only and heading.partition(".")[0] not in only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            found, seconds = printed(language, code, prepared(Path(folder), page))
            print(f"{seconds:5.1f} s  {heading}", flush=True)
        block = f"```{language}\n{code}```\n"
        shown = f"\n```text\n{before}```\n" if before else ""
        text = text.replace(block + shown, block + (f"\n```text\n{found}```\n" if found else ""))
    page.write_text(text)


if __name__ == "__main__":
    main()
