"""The parts of a screen: tables that fit its width, and the head that says what was measured; pages have the same head.

In a narrow table names fold, extra columns go, value columns continue below; no number is ever cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import pandas as pd
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flatlens.measures.answer import UNTRAINED, has_random_weights
from flatlens.progress import by_key, count_of
from flatlens.report.blocks import profile
from flatlens.result import MOST_ROWS

_Role = Literal["name", "value", "extra", "picture"]
_NAME = 24  #: width to which names may be folded before extra columns are dropped
_LEAST = 12  #: width to which names are folded once no extra column is left
_BETWEEN = re.compile(r"(?<=[_.(,=/\s-])(?=.)")  #: the places where a name may be folded, unless in a number
_NUMBER = re.compile(r"(?:(?<![\w.])[-+])?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
WIDE = 100  #: columns of a table that is not printed on a terminal


class _Column(NamedTuple):
    heading: str
    role: _Role
    justify: Literal["left", "right"]
    least: int  #: least width, in characters


class Fitted:
    """A table for a screen of any width.

    A `name` column folds; a `value` column is shown whole, below the others if there is no room beside them; an `extra`
    column is shown whole or not at all, the last one goes first; a `picture` draws itself in the width that it gets.
    """

    def __init__(
        self,
        title: str = "",
        names: Iterable[str] = (),
        values: Iterable[str] = (),
        *,
        between: int = 2,
        instead: str = "a wider screen or --json has them",
    ) -> None:
        self.title = title
        self.between = between  #: spaces between columns
        self._instead = instead  #: where the columns are that have no room
        self._columns: list[_Column] = []
        self._rows: list[tuple[RenderableType, ...] | str] = []  #: a text is a section's heading
        for heading in names:
            self.column(heading, "name")
        for heading in values:
            self.column(heading)

    def column(self, heading: str, role: _Role = "value", *, left: bool = False, least: int = 0) -> None:
        """Add a column; numbers are on the right, unless `left`; at least `least` characters wide."""
        numeric = role in ("value", "extra") and not left
        self._columns.append(_Column(heading, role, "right" if numeric else "left", least))

    def section(self, heading: str) -> None:
        """Begin a group of rows with a line of its own."""
        self._rows.append(heading)

    def row(self, *cells: RenderableType) -> None:
        """Add a row; missing cells are empty."""
        self._rows.append((*cells, *[""] * (len(self._columns) - len(cells))))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = [self._width(console, options, at) for at in range(len(self._columns))]
        roles = [column.role for column in self._columns]
        names = [at for at, role in enumerate(roles) if role == "name"]
        extras = [at for at, role in enumerate(roles) if role == "extra"]

        def taken(shown: Sequence[int], least: int) -> int:
            own = sum(min(widths[at], least) if roles[at] == "name" else widths[at] for at in shown)
            return own + self.between * (len(shown) - 1)

        # extra columns go first, from the last one on
        shown, left_out = list(range(len(roles))), list[int]()
        while extras and taken(shown, _NAME) > options.max_width:
            left_out.insert(0, extras.pop())
            shown.remove(left_out[0])

        # names that do not even fit by themselves continue below, beside the first one
        if taken(names, _LEAST) > options.max_width:
            names = names[:1]

        # what then does not fit beside the names continues below them
        blocks, rest = [], [at for at in shown if at not in names]
        while rest:
            many = len(rest)
            while many > 1 and taken([*names, *rest[:many]], _LEAST) > options.max_width:
                many -= 1
            blocks.append(sorted([*names, *rest[:many]]))
            rest = rest[many:]
        for number, block in enumerate(blocks or [names]):
            yield from self._part(block, self._rooms(block, widths, options.max_width), first=number == 0)
        if left_out:
            dropped = ", ".join(self._columns[at].heading for at in left_out)
            yield Text(f"no room for the columns {dropped}: {self._instead}", style="dim")

    def _width(self, console: Console, options: ConsoleOptions, at: int) -> int:
        """Return the width of a column that shows everything; of pictures the smallest that they can be drawn in."""
        heading, role, _, least = self._columns[at]
        wide = options.update(max_width=10_000)
        cells = [Measurement.get(console, wide, row[at]) for row in self._rows if not isinstance(row, str) and row[at]]
        found = [cell.minimum if role == "picture" else cell.maximum for cell in cells]
        heading = heading if role in ("name", "picture") else str(name_in_lines(heading, _LEAST))
        return max([*map(cell_len, heading.split("\n")), least, *found])

    def _rooms(self, block: Sequence[int], widths: Sequence[int], total: int) -> dict[int, int]:
        """Return each column's width: what whole ones need, and the rest for names, the narrow ones first."""
        names = sorted((at for at in block if self._columns[at].role == "name"), key=lambda at: widths[at])
        rooms = {at: widths[at] for at in block if at not in names}
        left = total - sum(rooms.values()) - self.between * (len(block) - 1)
        for number, at in enumerate(names):
            rooms[at] = max(1, min(widths[at], left // (len(names) - number)))
            left -= rooms[at]
        return rooms

    def _part(self, block: Sequence[int], rooms: Mapping[int, int], first: bool) -> Iterator[RenderableType]:
        """Yield some of the columns: a table for each section, under one row of headings."""
        if first and self.title:
            yield Text(f"\n{self.title}", style="bold")
        table = self._empty(block, rooms, headed=True)
        for row in self._rows:
            if not isinstance(row, str):
                named = {at: self._columns[at].role == "name" for at in block}
                table.add_row(*(name_in_lines(row[at], rooms[at]) if named[at] else row[at] for at in block))
            elif first:  # columns that continue below do not repeat the sections' headings
                if table.row_count or table.show_header:
                    yield table
                yield Padding(Text(row.lstrip(), "italic dim"), (0, 0, 0, len(row) - len(row.lstrip())), expand=False)
                table = self._empty(block, rooms, headed=False)
        yield table

    def _empty(self, block: Sequence[int], rooms: Mapping[int, int], headed: bool) -> Table:
        table = Table(
            box=None, padding=(0, self.between, 0, 0), pad_edge=False, header_style="dim", show_header=headed
        )  # fmt: skip
        for at in block:
            heading, role, justify, _ = self._columns[at]
            width = None if role == "picture" else rooms[at]
            table.add_column(name_in_lines(heading, rooms[at]), justify=justify, overflow="fold", width=width)
        return table


@dataclass(frozen=True)
class Profile:
    """Values as a row of bars, as wide as there is room."""

    values: Sequence[float]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(len(self.values), _LEAST), len(self.values))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(profile(self.values, options.max_width))


def name_in_lines(cell: RenderableType, room: int) -> RenderableType:
    r"""Return a name with line ends where it is folded: after a mark such as _ or a dot, else anywhere but in a number.

    >>> name_in_lines("parameter_jacobian_frobenius", 24), name_in_lines("  mls", 24), name_in_lines("r = -1.5e-05", 10)
    ('parameter_jacobian_\nfrobenius', '  mls', 'r =\n-1.5e-05')
    """
    if isinstance(cell, Text):
        return Text(str(name_in_lines(cell.plain, room)), style=cell.style)
    if not isinstance(cell, str) or cell_len(cell) <= room:
        return cell
    indent = " " * (len(cell) - len(cell.lstrip()))
    lines = [indent]
    name = cell.lstrip()
    inside = {at for number in _NUMBER.finditer(name) for at in range(number.start() + 1, number.end())}
    ends = [0, *(place.start() for place in _BETWEEN.finditer(name) if place.start() not in inside), len(name)]
    for start, end in pairwise(ends):
        piece = name[start:end]
        if lines[-1].strip() and cell_len(lines[-1] + piece.rstrip()) > room:
            lines.append(indent * 2)
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def frame_as_text(frame: pd.DataFrame, answer: Sequence[str] = ()) -> str:
    """Return a result's answer and table as text that is as wide as the terminal, or `WIDE` columns in a file.

    Numbers have six digits. Columns without an entry are left out, and of long tables the middle rows.

    >>> print(frame_as_text(pd.DataFrame({"layer": ["fc1", "fc2"], "value": [1.5, -4.0953e12], "note": ""})))
    layer        value
    fc1            1.5
    fc2    -4.0953e+12
    """
    if not isinstance(frame.index, pd.RangeIndex):
        frame = frame.reset_index(names="") if frame.index.name is None else frame.reset_index()
    frame = frame[[name for name in frame if not frame[name].isin(["", None]).all()]] if len(frame) else frame
    table = Fitted(instead="frame() has them")
    first = len(frame.columns)  # the place of the first column of numbers: names stand before it
    for at, name in enumerate(frame):
        numeric = pd.api.types.is_numeric_dtype(frame[name])
        first = min(first, at) if numeric else first
        long = not numeric and frame[name].astype(str).str.len().max() > _NAME
        table.column(str(name), "name" if at < min(first, 2) else "extra" if long else "value", left=not numeric)
    half, left = MOST_ROWS // 2, len(frame) - MOST_ROWS
    for at, row in enumerate(frame.itertuples(index=False)):
        if at == half and left > 0:
            table.section(f"{left} more rows: frame() has them")
        if left <= 0 or not half <= at < half + left:
            table.row(*(f"{cell:.6g}" if isinstance(cell, float) else str(cell) for cell in row))
    return as_text(*map(Text, answer), *([""] if answer else []), table)


def as_text(*parts: RenderableType) -> str:
    """Return what a screen would show, without colours: as wide as the terminal, or `WIDE` columns in a file."""
    probe = Console()
    console = Console(width=probe.width if probe.is_terminal else WIDE, color_system=None, force_jupyter=False)
    with console.capture() as captured:
        console.print(*parts, sep="\n", highlight=False, markup=False)
    return "\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n"))


def remark(head: str, words: str) -> Text:
    """Return a line of a screen that explains the numbers above it, with its subject in bold."""
    return Text(head, style="bold").append(words, style="not bold")


Abouts: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The `about` of each network's report, by the network's name; one network needs no name."""

_MOST = 6  #: number of lines on different weights that a screen shows at most


def head_of_screen(abouts: Abouts, answer: Sequence[str] = ()) -> list[RenderableType]:
    """Return the first lines of a screen: the answer, and what was measured; untrained weights are highlighted."""
    styles = {True: "bold yellow", False: "dim"}
    return [
        *(Text(sentence) for sentence in answer),
        *([Text("")] if answer else []),
        Text(measured_facts(abouts), style="bold"),
        *(Text(f"{what}: {words}", styles[words.startswith(UNTRAINED)]) for what, words in origins(abouts, _MOST)),
        *(Text(line, style="bold yellow") for line in _untrained(abouts) if "untrained" not in " ".join(answer)),
    ]


def head_of_page(abouts: Abouts) -> dict[str, Any]:
    """Return what the head of a page needs, by the names in its template."""
    return {"facts": measured_facts(abouts), "origins": origins(abouts), "untrained": _untrained(abouts)}


def measured_facts(abouts: Abouts) -> str:
    """Return samples, outputs, layers and loss in words, as far as they are the same for all networks.

    >>> measured_facts({"a": {"n": 12, "outputs": 1, "layers": ["1"]}, "b": {"n": 12, "outputs": 1, "layers": []}})
    '12 samples, 1 output'
    """
    each: list[list[str]] = []
    for about in abouts.values():
        each.append(
            [count_of(about[key], noun) for key, noun in (("n", "sample"), ("outputs", "output")) if key in about]
        )
        layers = about.get("layers")
        if layers and isinstance(layers, Sequence) and not isinstance(layers, str):
            each[-1].append(count_of(len(layers), "layer"))
        if about.get("arithmetic", "full") != "full":
            each[-1].append(f"multiplied in {about['arithmetic']}")
        if "casts" in about:
            each[-1].append(f"without forward()'s casts to {about['casts']}")
        if "loss" in about:
            each[-1].append(str(about["loss"]).replace("_", " "))
    return ", ".join(fact for fact in (each or [[]])[0] if all(fact in other for other in each)) or "measured"


def origins(abouts: Abouts, most: int | None = None) -> list[tuple[str, str]]:
    """Return the origin of weights, data and preparation; what differs between networks has a line for each origin.

    More than `most` different ones are counted.

    >>> origins({"a": {"origin": {"weights": "a.pt", "data": "digits"}},
    ...          "b": {"origin": {"weights": "b.pt", "data": "digits"}}})
    [('weights of a', 'a.pt'), ('weights of b', 'b.pt'), ('data', 'digits')]
    """
    told = ((name, what, words) for name, about in abouts.items() for what, words in about.get("origin", {}).items())
    lines = []
    for what, origin in by_key((what, (words, name)) for name, what, words in told).items():
        names = by_key(origin)
        if most is not None and len(names) > most:
            names = {f"{len(names)} different ones: --page and --json list them": list(abouts)}
        for words, of in names.items():
            lines.append((what if len(of) == len(abouts) else f"{what} of {', '.join(of)}", words))
    return lines


def _untrained(abouts: Abouts) -> list[str]:
    names = [name for name, about in abouts.items() if has_random_weights(about)]
    if not names:
        return []
    of = f" of {', '.join(names)}" if len(abouts) > 1 else ""
    return [f"Untrained: the weights{of} are random."]
