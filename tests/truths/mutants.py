"""Wrong formulas: modules of bounds with one expression replaced."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flatlens.bounds import Bound, BoundsReport, check_bounds


@contextmanager
def mutated(
    modules: Sequence[types.ModuleType], module: types.ModuleType, right: str, wrong: str
) -> Iterator[Callable[..., BoundsReport]]:
    """`check_bounds` by name with `right` replaced in one module; all, in the order they import one another, made anew.

    Where `right` is no longer in the source, or there twice, the mutant says so rather than pass.
    """
    source = Path(str(module.__file__)).read_text()
    assert source.count(right) == 1, right
    kept = {each.__name__: each for each in modules}
    bounds: dict[str, Bound] = {}
    try:
        for each in modules:
            text = source.replace(right, wrong) if each is module else Path(str(each.__file__)).read_text()
            made = sys.modules[each.__name__] = types.ModuleType(each.__name__)
            exec(compile(text, each.__name__, "exec"), made.__dict__)
            bounds |= {name: one for name, one in vars(made).items() if isinstance(one, Bound)}

        def check(lens: Any, which: str | Sequence[str], **options: Any) -> BoundsReport:
            names = [which] if isinstance(which, str) else which
            return check_bounds(lens, [bounds[name] for name in names], **options)

        yield check
    finally:
        sys.modules.update(kept)
