"""Wrong formulas: modules of bounds with one expression of one function replaced."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flatlens.bounds import BOUNDS, Bound, BoundsReport, check_bounds


class Replace(ast.NodeTransformer):
    """Replace the expression `right` by `wrong`, in the function named `where` only.

    Expressions are compared as syntax trees, so neither their layout nor comments matter.
    """

    def __init__(self, where: str, right: str, wrong: str) -> None:
        self.where, self.inside, self.found = where, False, 0
        self.right, self.wrong = ast.dump(_expression(right)), _expression(wrong)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        before, self.inside = self.inside, self.inside or node.name == self.where
        self.generic_visit(node)
        self.inside = before
        return node

    def visit(self, node: ast.AST) -> Any:
        if self.inside and isinstance(node, ast.expr) and ast.dump(node) == self.right:
            self.found += 1
            return self.wrong
        return super().visit(node)


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def changed(tree: ast.Module, where: str, right: str, wrong: str) -> ast.Module:
    """Return the module's tree with the one occurrence of `right` in the function `where` replaced."""
    replace = Replace(where, right, wrong)
    tree = replace.visit(tree)
    assert replace.found == 1, f"{right!r} is {replace.found} times in {where}(), expected once"
    return ast.fix_missing_locations(tree)


@contextmanager
def mutated(
    modules: Sequence[types.ModuleType], module: types.ModuleType, where: str, right: str, wrong: str
) -> Iterator[Callable[..., BoundsReport]]:
    """Give a `check_bounds` whose bounds come from `modules`, with one expression of `module` replaced.

    `modules` are in the order in which they import one another, and all are made anew. Where the function `where` does
    not hold `right` exactly once, this fails before any check, so that no mutant passes by accident.
    """
    kept = {each.__name__: each for each in modules}
    registered = dict(BOUNDS._known)  # bounds register when their module is made
    bounds: dict[str, Bound] = {}
    try:
        for each in modules:
            tree = ast.parse(Path(str(each.__file__)).read_text())
            if each is module:
                tree = changed(tree, where, right, wrong)
            made = sys.modules[each.__name__] = types.ModuleType(each.__name__)
            exec(compile(tree, each.__name__, "exec"), made.__dict__)
            bounds |= {name: one for name, one in vars(made).items() if isinstance(one, Bound)}

        def check(lens: Any, which: str | Sequence[str], **options: Any) -> BoundsReport:
            names = [which] if isinstance(which, str) else which
            return check_bounds(lens, [bounds[name] for name in names], **options)

        yield check
    finally:
        sys.modules.update(kept)
        BOUNDS._known.update(registered)
