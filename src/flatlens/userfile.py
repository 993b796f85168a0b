"""The user's own Python files, named on the command line as `file.py:name`."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, final

from flatlens.errors import BadInput, FlatlensError, UnknownName, message_of, typed_line

_T = TypeVar("_T")
YAML = (".yaml", ".yml")
"""Endings of the names of files that describe a study."""
OURS = str(Path(__file__).parent)
_read: dict[str, str] = {}
"""The hash of the code of each file of the user's that this process has read, by its whole path."""


def is_userfile(spec: str) -> bool:
    """Return whether `spec` names a Python file, with or without the name inside it.

    >>> is_userfile("nets/mine.py:build"), is_userfile("mine.py"), is_userfile("digits")
    (True, True, False)
    """
    return spec.endswith(".py") or ".py:" in spec


def load(spec: str, argument: str) -> object:
    """Return the object that `file.py:name` names; `argument` ("MODEL", "--data") is its name in errors.

    The file runs as `python file.py` would: its folder comes first on the import path.
    """
    file, _, name = spec.rpartition(":") if ".py:" in spec else (spec, "", "")
    module = _module(Path(file), argument)
    public = [n for n, value in vars(module).items() if not n.startswith("_") and _made_here(value, module)]
    if not name:
        raise BadInput(f"{argument}: {spec!r} names no function: write {file}:NAME ({_listing(file, public)})")
    if not hasattr(module, name):
        raise (
            UnknownName.among(f"function in {file}", name, public)
            if public
            else BadInput(f"{argument}: {file} defines no {name!r} ({_listing(file, public)})")
        )
    return getattr(module, name)


def guarded(call: Callable[[], _T], what: str) -> _T:
    """Return the value of the user's code; turn any exception into one line with the place it came from."""
    try:
        return call()
    except (Exception, SystemExit) as error:  # a script may well call sys.exit() when it is imported
        raise BadInput(f"{what} raised {said(error)}") from error


@final
class users_code:  # noqa: N801 (a context; one made of a generator would let a StopIteration pass)
    """A context that raises `failed(line)` in place of an error of the user's code, `line` being that of `said`.

    Errors of flatlens pass, and so does an exit that the user's code did not ask for: that of a signal's handler. With
    `hooks`, all errors pass except those of user code that torch called, such as a backward hook.
    """

    def __init__(self, failed: Callable[[str], FlatlensError], *, hooks: bool = False) -> None:
        self.failed, self.hooks = failed, hooks

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception | SystemExit) or type(error).__module__.startswith("flatlens."):
            return
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        if isinstance(error, SystemExit) and files[-1].startswith(OURS):
            return
        own = [number for number, file in enumerate(files) if _is_own(file)]
        if self.hooks and (not own or "site-packages" not in files[own[-1] - 1]):
            return
        cause: BaseException = error
        if self.hooks and isinstance(error, StopIteration):  # as a cause, contexts made of generators would raise it
            cause = RuntimeError("a StopIteration")
            cause.__cause__ = error
        raise self.failed(said(error)) from cause


def said(error: BaseException) -> str:
    """Return one line on an error of the user's code: its type, message, and the user's own line where it arose."""
    if re.match(
        r"Caught \w+ in \w+ worker process", text := message_of(error)
    ):  # the text of a traceback, from another process
        places = [(file, int(line)) for file, line in re.findall(r'File "(.+)", line (\d+)', text)]
        return " ".join(text.split("\n  ")[-1].splitlines()[1:])[:200] + _last_own(places)
    frames = traceback.extract_tb(error.__traceback__)[1:]
    return f"{typed_line(error, 200)}{_last_own((frame.filename, frame.lineno) for frame in frames)}"


def needed_arguments(function: Callable[..., object]) -> list[str]:
    """Return the names of the arguments that have no default."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in _parameters(function) if p.default is p.empty and p.kind not in variadic]


def takes(function: Callable[..., object], count: int) -> bool:
    """Return whether a function can be called with so many arguments by position.

    >>> takes(lambda outputs, targets: None, 2), takes(lambda weight=None: None, 2)
    (True, False)
    """
    found = _parameters(function)
    by_position = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in found)
    return by_position >= count or any(p.kind is p.VAR_POSITIONAL for p in found) or inspect.isbuiltin(function)


def arguments(function: Callable[..., object]) -> dict[str, Any]:
    """Return the arguments of a function that settings can give, with their defaults; None for one without a default.

    An argument whose default is no number, word, None or tuple of these is left out: it keeps its default.

    >>> arguments(lambda width, depth=2, activation=print: None)
    {'width': None, 'depth': 2}
    """
    named = [p for p in _parameters(function) if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {
        p.name: None if p.default is p.empty else p.default for p in named if p.default is p.empty or _plain(p.default)
    }


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # built in: calling it will tell
        return []


def _plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def file_of(spec: str) -> Path:
    """Return the file of `file.py:name`."""
    return Path(spec.rpartition(":")[0] if ".py:" in spec else spec)


def short(spec: str) -> str:
    """Return `file.py:name`, or the name of a folder, without the folders above.

    >>> short("/home/ada/net.py:build"), short("photos/")
    ('net.py:build', 'photos')
    """
    if not is_userfile(spec):
        return Path(spec).name
    return file_of(spec).name + (f":{spec.rpartition(':')[2]}" if ".py:" in spec else "")


def code_of(path: Path) -> str:
    """Return twelve hexadecimal digits of the hash of a Python file and of the files beside it that it imports."""
    digest, files = hashlib.sha256(), [path.resolve()]
    for file in files:  # grows while it is walked
        try:
            code = file.read_bytes()
        except OSError:
            continue
        digest.update(code)
        files += [near for near in _imported(code, file, path.resolve().parent) if near not in files]
    return digest.hexdigest()[:12]


def is_current(path: Path) -> bool:
    """Return whether this process has read the file, and those that it imports, as they are now."""
    return _read.get(str(path.resolve())) == code_of(path)


def _imported(code: bytes, file: Path, top: Path) -> list[Path]:
    """Return the files of packages and modules in the folder `top`, or beside `file`, that its code imports."""
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError, RecursionError):  # the import itself tells
        return []
    names = [(top, alias.name) for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            base = (top, *file.parents)[node.level] if node.level <= len(file.parents) else top
            names += [(base, ".".join(filter(None, (node.module, alias.name)))) for alias in node.names]
    found = []
    for base, name in names:
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            at = base.joinpath(*parts[:length])
            found += [one for one in (at.with_suffix(".py"), at / "__init__.py") if one.is_file()]
    return list(dict.fromkeys(found))


def _module(path: Path, argument: str) -> ModuleType:
    if not path.is_file():
        near = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        hint = f"{path.parent} holds {', '.join(near[:5])}" if near else f"the folder {path.parent} holds no .py file"
        raise BadInput(f"{argument}: there is no file {str(path)!r}: {hint}")
    path = path.resolve()
    # Keyed by the whole path: MODEL and DATA in one file load it once, and a data.py hides no package called data.
    key = f"{path.stem}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, path)
    if spec is None or spec.loader is None:
        raise BadInput(f"{argument}: {str(path)!r} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    loader = spec.loader
    _read[str(path)] = code_of(path)
    sys.modules[key] = module
    sys.path.insert(0, str(path.parent))
    try:
        guarded(lambda: loader.exec_module(module), f"{argument}: importing {path.name}")
    except BaseException:
        del sys.modules[key]
        raise
    return module


def _made_here(value: object, module: ModuleType) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def _listing(file: str, public: list[str]) -> str:
    return f"it defines {', '.join(public[:8])}" if public else f"{Path(file).name} defines no function"


def _last_own(places: Iterable[tuple[str, int | None]]) -> str:
    """Return the last place in the user's own files, in brackets; a SyntaxError's message has it already."""
    own = [place for place in places if _is_own(place[0])]
    return f" ({Path(own[-1][0]).name}, line {own[-1][1]})" if own else ""


def _is_own(file: str) -> bool:
    """Return whether a file of a traceback is the user's: not of a package, of Python or of flatlens."""
    foreign = ("<", sysconfig.get_path("stdlib"), OURS)
    return "site-packages" not in file and not file.startswith(foreign)
