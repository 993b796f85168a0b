"""The user's own Python files, named on the command line as `file.py:name` or `package.module:name`."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, final

from flatlens.errors import BadInput, FlatlensError, UnknownName, message_of, typed_line

_T = TypeVar("_T")
YAML = (".yaml", ".yml")  #: endings of the names of files that describe a study
OURS = str(Path(__file__).parent)
_read: dict[str, str] = {}
"""The hash of the code of each file of the user's that this process has read, by its whole path."""
_taken: dict[str, tuple[Path, bool]] = {}
"""By name: the place, without its ending, of a module that files of the user's import from beside them.

With it: whether one of them imports it in a function, so perhaps later.
"""
_FOLDERS = re.compile(r"(?<![\w/:.~-])(?:~|[A-Za-z]:)?[/\\](?:[^\s/\\'\":,()]+[/\\])+(?=[^\s/])")
_MODULE = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)+):\w+")


def is_userfile(spec: str) -> bool:
    """Return whether `spec` names a Python file or a module, with or without the name inside it.

    >>> is_userfile("nets/mine.py:build"), is_userfile("mine.py"), is_userfile("digits"), is_userfile("json.tool:main")
    (True, True, False, True)
    """
    return spec.endswith(".py") or ".py:" in spec or _file_of_module(spec) is not None


def load(spec: str, argument: str) -> object:
    """Return the object that `file.py:name` names; `argument` ("MODEL", "--data") is its name in errors.

    A file inside a package is imported as part of the package. Its folder, and the folder that holds the package, are
    searched after Python's own modules and before installed packages.
    """
    path, name = file_and_name(spec)
    file = spec.removesuffix(f":{name}")
    module = _module(path, argument)
    callables = {n: each for n, each in vars(module).items() if not n.startswith("_") and callable(each)}
    public = [n for n, each in callables.items() if getattr(each, "__module__", None) == module.__name__]
    if not name:
        raise BadInput(f"{argument}: {spec!r} names no function: write {file}:NAME ({_listing(file, public)})")
    if not hasattr(module, name):
        raise (
            UnknownName.among("function", name, public, where=f"in {file}")
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
@dataclass(frozen=True)
class users_code(AbstractContextManager[object]):  # noqa: N801 (a generator's would let a StopIteration pass)
    """A context that raises `failed(line)` in place of an error of the user's code, `line` being that of `said`.

    Errors of flatlens pass, and so does an exit that the user's code did not ask for: that of a signal's handler. With
    `hooks`, all errors pass except those of user code that torch called, such as a backward hook.
    """

    failed: Callable[[str], FlatlensError]
    hooks: bool = False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception | SystemExit) or type(error).__module__.startswith("flatlens."):
            return
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        if isinstance(error, SystemExit) and files[-1].startswith(OURS):
            return
        own = [number for number, file in enumerate(files) if is_users(file)]
        if self.hooks and (not own or "site-packages" not in files[own[-1] - 1]):
            return
        cause: BaseException = error
        if self.hooks and isinstance(error, StopIteration):  # as a cause, contexts made of generators would raise it
            cause = RuntimeError("a StopIteration")
            cause.__cause__ = error
        raise self.failed(said(error)) from cause


def said(error: BaseException) -> str:
    """Return one line on an error of the user's code: its type, message, and the user's own line where it arose."""
    text = message_of(error)
    if re.match(r"Caught \w+ in \w+ worker process", text):  # the text of a traceback, from another process
        places = [(file, int(line)) for file, line in re.findall(r'File "(.+)", line (\d+)', text)]
        return " ".join(text.split("\n  ")[-1].splitlines()[1:])[:200] + _last_own(places)
    frames = traceback.extract_tb(error.__traceback__)[1:]
    return f"{typed_line(error, 200)}{_last_own((frame.filename, frame.lineno) for frame in frames)}"


def needed_arguments(function: Callable[..., object]) -> list[str]:
    """Return the names of the arguments that have no default."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in _parameters(function) if p.default is p.empty and p.kind not in variadic]


def takes(function: Callable[..., object], count: int) -> bool:
    """Return whether a function can be called with this number of arguments by position.

    >>> takes(lambda outputs, targets: None, 2), takes(lambda weight=None: None, 2)
    (True, False)
    """
    found = _parameters(function)
    by_position = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in found)
    return by_position >= count or any(p.kind is p.VAR_POSITIONAL for p in found) or inspect.isbuiltin(function)


def arguments(function: Callable[..., object]) -> dict[str, Any]:
    """Return the arguments of a function that settings can give, with their defaults; None for one without a default.

    An argument whose default is not a number, word, None or tuple of these is left out: it keeps its default.

    >>> arguments(lambda width, depth=2, activation=print: None)
    {'width': None, 'depth': 2}
    """
    named = [p for p in _parameters(function) if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    defaults = {p.name: None if p.default is p.empty else p.default for p in named}
    return {name: default for name, default in defaults.items() if _plain(default)}


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # built in: calling it will tell
        return []


def _plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def file_and_name(spec: str) -> tuple[Path, str]:
    """Return the file of `file.py:name` or `package.module:name`, and the name; empty where there is none."""
    if ".py:" in spec:
        file, _, name = spec.rpartition(":")
        return Path(file), name
    found = None if spec.endswith(".py") else _file_of_module(spec)
    return (Path(spec), "") if found is None else (found, spec.rpartition(":")[2])


def file_of(spec: str) -> Path:
    """Return the file of `file.py:name`."""
    return file_and_name(spec)[0]


def with_folder(spec: str) -> str:
    """Return `file.py:name` with the file's whole path."""
    file, name = file_and_name(spec)
    return f"{file.resolve()}:{name}" if name else str(file.resolve())


def short(spec: str) -> str:
    """Return `file.py:name`, or the name of a folder, without the folders above.

    >>> short("/home/ada/net.py:build"), short("photos/")
    ('net.py:build', 'photos')
    """
    if not is_userfile(spec):
        return Path(spec).name
    file, name = file_and_name(spec)
    return file.name + (f":{name}" if name else "")


def without_folders(text: str) -> str:
    """Return text in which each whole path is the name of its file alone.

    >>> without_folders("there is no file '/home/ada/net.py', line 3, at https://x.org/a/b or 1/2")
    "there is no file 'net.py', line 3, at https://x.org/a/b or 1/2"
    """
    return _FOLDERS.sub("", text)


def code_of(path: Path) -> str:
    """Return twelve hexadecimal digits of the hash of a Python file and of the files beside it that it imports."""
    digest = hashlib.sha256()
    for file in _sources(path.resolve())[0]:
        with suppress(OSError):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def is_current(path: Path) -> bool:
    """Return whether this process has read the file, and those that it imports, as they are now."""
    return _read.get(str(path.resolve())) == code_of(path)


def _file_of_module(spec: str) -> Path | None:
    """Return the file of `package.module:name`, found without running any code; None where there is none."""
    named = _MODULE.fullmatch(spec)
    for start in ([""], sys.path) if named else ():
        places, found = start, None
        for part in named[1].split(".") if named else ():
            found = PathFinder.find_spec(part, places)
            places = list((found and found.submodule_search_locations) or ())
        if found and found.origin and found.origin.endswith(".py"):
            return Path(found.origin)
    return None


def _package_of(path: Path) -> tuple[Path, list[str]]:
    """Return the folder from which a file is imported, and the parts of its name there: ["net"], or ["pkg", "net"].

    Folders with an `__init__.py` are packages, and so are those that the file's relative imports need.
    """
    names, folder = ([] if path.name == "__init__.py" else [path.stem]), path.parent
    packages, needed = 0, max((node.level for node in _nodes(path) if isinstance(node, ast.ImportFrom)), default=0)
    while folder.name and ((folder / "__init__.py").is_file() or packages < needed):
        names, folder, packages = [folder.name, *names], folder.parent, packages + 1
    return folder, names


def _nodes(file: Path) -> list[ast.AST]:
    """Return the nodes of a file's code; none where it cannot be read: the import itself tells."""
    try:
        return list(ast.walk(ast.parse(file.read_bytes())))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []


def _sources(path: Path) -> tuple[list[Path], dict[str, tuple[Path, bool]]]:
    """Return a file and those of its package or beside it that it imports, and, as in `_taken`, their whole names."""
    root, names = _package_of(path)
    parents = [root.joinpath(*names[:length]) for length in range(1, len(names))]
    files = [path, *(init for folder in parents if (init := folder / "__init__.py").is_file() and init != path)]
    whole: dict[str, tuple[Path, bool]] = {}
    for file in files:  # grows while it is walked
        nodes = _nodes(file)
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        late = {inner for function in functions for inner in ast.walk(function)}
        imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        for node in sorted(imports, key=lambda node: isinstance(node, ast.ImportFrom)):
            relative = isinstance(node, ast.ImportFrom) and node.level
            bases = [*file.parents][relative - 1 : relative] if relative else dict.fromkeys((root, path.parent))
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:  # those of a `from` may be no modules
                names = [".".join(filter(None, (node.module, alias.name))) for alias in node.names]
            for base, name in product(bases, names):
                # the files of a module and of the packages around it; what is not a module is left out
                parts = name.split(".")
                at = [base.joinpath(*parts[:length]) for length in range(1, len(parts) + 1)]
                paths = [path for each in at for path in (each.with_suffix(".py"), each / "__init__.py")]
                found = [one for one in paths if one.is_file()]
                files += [near for near in found if near not in files]
                if found and not relative:
                    place, is_late = whole.get(first := name.partition(".")[0], (base / name.partition(".")[0], False))
                    whole[first] = place, is_late or node in late
    return files, whole


def _module(path: Path, argument: str) -> ModuleType:
    if not path.is_file():
        near = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        hint = f"{path.parent} holds {', '.join(near[:5])}" if near else f"the folder {path.parent} holds no .py file"
        raise BadInput(f"{argument}: there is no file {str(path)!r}: {hint}")
    path = path.resolve()
    _require_own(path, argument)
    root, names = _package_of(path)
    # Search the folders for modules after Python's own, which no file of the user's may hide, and before packages
    for folder in dict.fromkeys((str(path.parent), str(root))):
        with suppress(ValueError):
            sys.path.remove(folder)
        python = sysconfig.get_path("stdlib")
        own = [at for at, place in enumerate(sys.path, 1) if place.startswith(python) and "-packages" not in place]
        sys.path.insert(max(own, default=0), folder)
    top = root / names[0] if len(names) > 1 or path.name == "__init__.py" else path
    # Keyed by the whole path: MODEL and DATA in one file load it once, and a data.py hides no package called data.
    key = f"{names[0]}_{hashlib.sha256(os.fsencode(top)).hexdigest()[:8]}"
    packaged = top != path and _is_free(top)
    name = ".".join([names[0] if packaged else key, *names[1:]])
    if name in sys.modules:
        _read.setdefault(str(path), code_of(path))
        return sys.modules[name]
    _read[str(path)] = code_of(path)
    if not packaged:
        _run(key, top, argument)
    return guarded(lambda: importlib.import_module(name), f"{argument}: importing {path.name}")


def _run(key: str, top: Path, argument: str) -> None:
    """Run a file, or the `__init__.py` of a package, as the module `key`."""
    if key in sys.modules:
        return
    init = top / "__init__.py"
    if top.is_dir() and not init.is_file():
        sys.modules[key] = ModuleType(key)
        sys.modules[key].__path__ = [str(top)]
        return
    inside = [str(top)] if top.is_dir() else None
    spec = importlib.util.spec_from_file_location(key, init if inside else top, submodule_search_locations=inside)
    if spec is None or spec.loader is None:
        raise BadInput(f"{argument}: {str(top)!r} cannot be imported as Python")
    sys.modules[key], loader = importlib.util.module_from_spec(spec), spec.loader
    try:
        guarded(lambda: loader.exec_module(sys.modules[key]), f"{argument}: importing {top.name}")
    except BaseException:
        del sys.modules[key]
        raise


def _is_free(package: Path) -> bool:
    """Return whether an import of the package's name finds this package, and no other module."""
    if package.name in sys.stdlib_module_names or not package.name.isidentifier():
        return False
    if (held := sys.modules.get(package.name)) is not None:
        return _place(held) == package
    found = PathFinder.find_spec(package.name)
    return found is not None and any(Path(one).resolve() == package for one in found.submodule_search_locations or ())


def _require_own(path: Path, argument: str) -> None:
    """Let a file import its neighbours, though the process has read others of their names; else refuse it."""
    # It cannot where the name is an installed package's, or where an import inside a function may come later
    for name, (own, late) in _sources(path)[1].items():
        if name in sys.stdlib_module_names:
            continue
        before, was_late = _taken.get(name, (own, False))
        other = _place(sys.modules.get(name)) or before
        if other != own and (other != before or late or was_late):
            raise BadInput(
                f"{argument}: {path.name} imports {name!r} from {own.parent}, and this process has another {name!r}, "
                f"from {other.parent}: rename one of them, or measure their networks in separate processes"
            )
        if other != own:
            for each in [one for one in sys.modules if one.partition(".")[0] == name]:
                del sys.modules[each]
        _taken[name] = own, late or (was_late and before == own)


def _place(module: ModuleType | None) -> Path | None:
    """Return the folder of a package, or the file of a module without its ending; None where there is none."""
    for folder in getattr(module, "__path__", ()):
        return Path(folder).resolve()
    file = getattr(module, "__file__", None)
    return Path(file).resolve().with_suffix("") if file else None


def _listing(file: str, public: list[str]) -> str:
    return f"it defines {', '.join(public[:8])}" if public else f"{Path(file).name} defines no function"


def _last_own(places: Iterable[tuple[str, int | None]]) -> str:
    """Return the last place in the user's own files, in brackets; a SyntaxError's message has it already."""
    own = [place for place in places if is_users(place[0])]
    return f" ({Path(own[-1][0]).name}, line {own[-1][1]})" if own else ""


def is_users(file: str) -> bool:
    """Return whether a file of a traceback is the user's: not of a package, of Python or of flatlens."""
    foreign = ("<", sysconfig.get_path("stdlib"), OURS)
    return "site-packages" not in file and not file.startswith(foreign)
