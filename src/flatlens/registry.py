"""Names of one kind of object (measures, bounds, transforms) in the catalogue's order, and the lookup of a name."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar, final

from flatlens.deprecated_names import warn
from flatlens.errors import BadInput, UnknownName

_T = TypeVar("_T")


def first_line(function: Callable[..., object]) -> str:
    """Return the first line of a function's docstring, which says what the function defines.

    >>> first_line(first_line)
    "Return the first line of a function's docstring, which says what the function defines."
    """
    return (inspect.getdoc(function) or "").partition("\n")[0]


def spelled(spelling: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of a spelling; raise ValueError where it is no name.

    >>> spelled("local_volume(top_k=3)"), spelled("mls")
    (('local_volume', {'top_k': 3}), ('mls', {}))
    """
    try:
        tree: ast.expr = ast.parse(spelling.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(spelling) from error
    name, keywords = (tree.func, tree.keywords) if isinstance(tree, ast.Call) and not tree.args else (tree, [])
    if not isinstance(name, ast.Name):
        raise ValueError(spelling)
    return name.id, {k.arg: ast.literal_eval(k.value) for k in keywords if k.arg}


@final
class Registry(Mapping[str, _T], Generic[_T]):
    """A mapping from names to objects, each of which registers itself when its module is imported.

    `rows`: the letters of the catalogue's rows, in its order; an object whose row has another letter does not belong
    to the catalogue. `order` breaks ties between objects of one row; without it, they keep the order of registration.
    `former`: the present name of each former one; a lookup by it warns.

    >>> known = Registry[int]("digit", int, rows="D")
    >>> known.add("two", "D2", 2), known.add("one", "D1", 1), known.add("mine", "own", 5)
    (None, None, None)
    >>> list(known), known.named("one", "count(digits=...)")
    (['one', 'two'], [1])
    """

    def __init__(
        self, what: str, kind: type[_T], *, rows: str, order: Callable[[_T], int] = lambda thing: 0,
        former: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._what, self._kind, self._rows, self._order, self._former = what, kind, rows, order, former or {}
        self._known: dict[str, tuple[tuple[int, int, int], _T]] = {}  #: in the catalogue's order

    def add(self, name: str, row: str, thing: _T) -> None:
        """Register an object under its name, if its row belongs to the catalogue."""
        letter, number = row[:1], row[1:]
        if letter and letter in self._rows and number.isdigit():
            self._known[name] = (self._rows.index(letter), int(number), self._order(thing)), thing
            self._known = dict(sorted(self._known.items(), key=lambda item: item[1][0]))

    def __getitem__(self, name: str) -> _T:
        if name in self._former:
            warn(f"{self._what} {name}", "it", self._former[name])
        return self._known[self._former.get(name, name)][1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def named(
        self, asked: str | _T | Iterable[str | _T], call: str, read: Callable[[str], _T] | None = None
    ) -> list[_T]:
        """Return objects from names or objects; a single one is enough. `call` is the user's call, for errors.

        `read` replaces the plain lookup of a name, where a name may carry options.
        """
        if isinstance(asked, (str, self._kind)):
            asked = [asked]
        if not isinstance(asked, Iterable):
            raise self._unfit(asked, call)
        found: list[_T] = []
        for each in asked:
            if isinstance(each, self._kind):
                found.append(each)
            elif not isinstance(each, str):
                raise self._unfit(each, call)
            elif read is None and self._former.get(each, each) not in self._known:
                raise UnknownName.among(self._what, each, self._known)
            else:
                found.append(self[each] if read is None else read(each))
        return found

    def _unfit(self, given: object, call: str) -> BadInput:
        example = f"such as {next(iter(self))!r}, " if self._known else ""
        objects = f"{self._kind.__name__} objects"
        return BadInput(f"{call}: give names of {self._what}s, {example}or {objects}, got {given!r}")
