"""What the commands print: text for people, JSON for machines, and on stderr progress and the expected time.

stdout is data, stderr all else. Characters that control a terminal are replaced before anything is printed.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, redirect_stdout
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

from cyclopts import Parameter, Token, convert

from flatlens.errors import BadFolder, BadInput, FlatlensError, TooLong, needs, one_line, typed_line
from flatlens.files import require_writable
from flatlens.memory import in_gib
from flatlens.progress import DELAY, Aside, Bar, visible
from flatlens.version import __version__

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    from flatlens.forecast import Cost, Forecast
    from flatlens.measures import Lens
    from flatlens.result import Result


Flag = Parameter(negative="", show_default=False)  #: an option without a value


def _whole(kind: Any, tokens: Sequence[Token]) -> Any:
    """Return an option's value; refuse a fraction, which cyclopts would round."""
    for token in tokens:
        if "." in token.value and not float(token.value).is_integer():
            raise ValueError(f"{token.value} is a fraction: give a whole number")
    return convert(kind, tokens)


Json = Annotated[bool, Flag, Parameter(name="--json")]  #: the option that prints JSON
WHOLE = Parameter(converter=_whole)
Whole = Annotated[int, WHOLE]  #: an option that takes a whole number


def require_page(file: Path | None) -> None:
    """Check before the work that a page can be drawn and written."""
    if file is not None:
        html = b"<!doctype html"
        ends = {".html": "a page is HTML", ".htm": ""}
        _require(file, "--page", ends, "flatlens page", lambda there: html in there.read_bytes()[: 2**12].lower())
        with needs("study", "--page"):
            import_module("flatlens.report.page")


def require_own(file: Path | None, option: str) -> None:
    """Check before the work that a file can be written, and that no other file than a saved result is replaced."""
    from flatlens.result import is_saved

    if file is not None:
        _require(file, option, {".safetensors": "the format is safetensors", "": ""}, "saved result", is_saved)


def require_plan(file: Path | None) -> None:
    """Check before the work that a plan can be written, and that no other file than a plan is replaced."""
    if file is not None:
        ours = "plan of flatlens compress"
        _require(file, "--plan", {}, ours, lambda there: b'"rise_stderr"' in there.read_bytes())


def _require(file: Path, option: str, ends: Mapping[str, str], kind: str, ours: Callable[[Path], bool]) -> None:
    """Require that a file can be written, has an ending of `ends` if these are given, and replaces only `ours`."""
    require_writable(file, f"{option} {file}")
    if ends and file.suffix.lower() not in ends:
        (end, why), *_ = ends.items()
        raise BadFolder(f"{option} {file}: {why}: choose a name that ends in {end}")
    if file.exists() and not ours(file):
        raise BadFolder(f"{option} {file}: file exists and is not a {kind}; choose another name")


def note(message: str) -> None:
    """Print one line on stderr."""
    print(f"flatlens: {visible(message)}", file=sys.stderr, flush=True)


def written(option: str, write: Callable[[], object]) -> bool:
    """Write a file that later commands need; tell in one line if that fails, so that the numbers are shown first."""
    try:
        write()
    except Exception as error:
        told = one_line(error) if isinstance(error, FlatlensError) else typed_line(error, 200)
        note(f"{option}: not written ({told})")
        return False
    return True


def show(*renderables: RenderableType) -> None:
    """Print text and tables on stdout, as wide as the terminal (100 columns in a pipe)."""
    from rich.console import Console

    probe = Console()
    console = probe if probe.is_terminal else Console(width=100)
    for renderable in renderables:
        console.print(_Visible(renderable), highlight=False, markup=False)


class _Visible:
    """Something to print, without the characters in its text that control a terminal."""

    def __init__(self, renderable: RenderableType) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        from rich.segment import Segment

        for text, style, control in console.render(self._renderable, options):
            yield Segment(text if control else visible(text), style, control)


def bullets(sentences: Iterable[str]) -> RenderableType:
    """Return a list with hanging indents."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1, 0, 0))
    for sentence in sentences:
        table.add_row("-", Text(sentence))
    return table


def show_json(value: Mapping[str, object]) -> None:
    """Print one JSON document on stdout, with its schema and flatlens's version; NaN and inf become null."""
    from flatlens.result import SCHEMA

    print(json.dumps(plain({"schema": SCHEMA, "flatlens": __version__, **value}), indent=1, allow_nan=False))


def plain(value: object) -> Any:
    """Return the value as dicts, lists, strings and finite numbers.

    >>> plain({"a": float("nan"), "b": frozenset({"y", "x"}), "c": (1, 2.5)})
    {'a': None, 'b': ['x', 'y'], 'c': [1, 2.5]}
    """
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(str(v) for v in value)
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if hasattr(value, "item"):  # NumPy's numbers
        return plain(value.item())
    return str(value)


def stdout_to_stderr() -> AbstractContextManager[object]:
    """Redirect stdout to stderr: the user's own code must not print into the data."""
    return redirect_stdout(sys.stderr)


DRAWING = "drawing the page"  #: the last stage of a command with a page


def saved(found: Result, save: Path | None, what: str) -> bool:
    """Save a result where `--save` asks for it, and say so; return False if that fails, as in `written`."""
    if save is None:
        return True
    kept = written("--save", lambda: found.save(save))
    if kept:
        note(f"{what} saved in {save}")
    return kept


def page_beside(page: Path | None, bar: Bar, write: Callable[[Path], Path]) -> None:
    """Write the page beside a command's numbers, if it is asked for; they are shown also if that fails."""
    if page is not None:
        bar.stage(DRAWING)
        Aside(f"--page {page}", lambda: note(f"page written: {write(page)}"))()


_P = ParamSpec("_P")
_T = TypeVar("_T")


def announce(lens: Lens, work: Callable[[Lens], object], *, times: int = 1, anyway: bool = False) -> Forecast:
    """Announce the size, time and memory of long work; refuse, unless `anyway`, what takes too much of either."""
    from flatlens.forecast import FIRST, SHARE, by_rule, forecast

    expected = by_rule(lens)
    if not anyway:
        _require_room(lens, expected)
    if lens.problem.n < SHARE * FIRST:
        return expected
    try:
        expected = forecast(lens, work, short=DELAY)
    except TooLong as error:
        if not anyway:
            raise
        takes = error.what[0] if isinstance(error.what, tuple) else error.what  # without the limit
        note(f"on a few of the samples, {error.but(what=takes, remedy='')}")
        return expected
    except FlatlensError:  # a few samples may all have ignored labels, or be too few for batch statistics
        return expected
    if not anyway:
        _require_room(lens, expected)
    if (expected.seconds or 0.0) * times >= DELAY:
        found = expected.cost(lens, times)
        each = " each" * (lens.problem.ranks.size > 1)
        note(f"{found.size}: {repr(found).replace(' of memory', f' of memory{each}')}")
    return expected


class DryRun(Exception):
    """The end of a command with --dry-run, from within its work: `show` prints the cost, as JSON or as text."""

    def __init__(self, show: Callable[[bool], int]) -> None:
        self.show = show


def or_cost(command: Callable[_P, _T]) -> Callable[_P, _T | int]:
    """Return a command that shows what its work costs where this is all that is asked for."""

    @wraps(command)
    def either(*given: _P.args, **options: _P.kwargs) -> _T | int:
        try:
            return command(*given, **options)
        except DryRun as end:
            return end.show(bool(options.get("as_json")))

    return either


def show_cost(cost: Cost, as_json: bool) -> int:
    """Print the cost in place of the work: the answer, what it depends on, and what it goes to."""
    answer = cost.answer
    if as_json:
        told = {"seconds": cost.seconds, "memory": cost.memory, "free": cost.free, "products": cost.products}
        show_json({"answer": [answer], **told, "size": cost.size, "measures": cost.frame().to_dict("records")})
        return 0
    from flatlens.report.screen import Fitted

    table = Fitted("By measure", names=["measure"], values=["seconds", "products"])
    for row in cost.frame().to_dict("records"):
        table.row(row["measure"], f"{row['seconds']:.2g}", str(row["products"]))
    free = "" if math.isnan(cost.free) else f"{in_gib(cost.free)} of memory is free. "
    show(answer, f"{free}Only trials on a few samples were run.", table)
    return 0


def _require_room(lens: Lens, expected: Forecast) -> None:
    if expected.more is None or expected.left is None or expected.more <= expected.left:
        return
    advice = []
    spared = (expected.peak or 0.0) - (expected.least or 0.0)
    if expected.more - spared <= expected.left:
        fits = max(1.0, 0.5 * (expected.left - (expected.more - spared)))
        advice.append(f"--memory {max(1, int(fits / 2**20))}MiB takes fewer samples at a time")
    if lens.probes is None and lens.problem.outputs > 2:
        few = min(16, lens.problem.outputs - 1)
        advice.append(f"--outputs {few} takes random combinations of the {lens.problem.outputs} outputs")
    advice.append("--parameters NAMES measures a part of the network; --anyway starts it although memory may run out")
    raise BadInput(
        f"memory: this needs about {in_gib(expected.more)} more, but only {in_gib(expected.left)} is free: "
        f"{'; '.join(advice)}"
    )
