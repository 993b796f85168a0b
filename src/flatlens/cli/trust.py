"""Python files that the network of a study needs: they run only if the user says so."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from flatlens.cli.output import visible
from flatlens.errors import BadInput

_MOST = 5
"""Largest number of files that are named."""


def require_trust(models: Sequence[str], trusted: bool) -> None:
    """Ask before running Python files that the config.json of a study's network names: it may be from anybody.

    Raises:
        BadInput: the answer is no; or there is no terminal to ask in, and not `trusted`.
    """
    for folder in dict.fromkeys(models):
        named = code_in(Path(folder) / "config.json")
        if not named or trusted:
            continue
        more = f", ... ({len(named)} in all)" if len(named) > _MOST else ""
        told = f"{folder}/config.json names Python code that has to run: {', '.join(named[:_MOST])}{more}"
        if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
            raise BadInput(f"MODEL: {told}: read it, then add --trust to run it")
        print(f"flatlens: {visible(told)}\nRun it? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise BadInput(f"MODEL: {folder}: nothing was run")


def code_in(config: Path) -> list[str]:
    """Return the Python code that a network's settings name, without reading it: none if they cannot be read."""
    try:
        parts = [json.loads(config.read_text())]
    except (OSError, ValueError, RecursionError):  # whoever reads the settings says so
        return []
    named = []
    for part in parts:  # grows while it is walked
        if isinstance(part, dict):
            kind = part.get("type")
            sources = [part.get("source"), part.get("held_out")] if kind in ("UserNetwork", "UserData") else []
            named += [str(one) for one in sources if one is not None and not (kind == "UserData" and _is_folder(one))]
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else []
    return list(dict.fromkeys(named))


def _is_folder(source: object) -> bool:
    return isinstance(source, str) and not source.endswith(".py") and ":" not in source and Path(source).is_dir()
