"""Former names of options, parts, transforms and modules: users may still write them, and saved files may hold them."""

from __future__ import annotations

import functools
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from flatlens.errors import BadInput

_P = ParamSpec("_P")
_T = TypeVar("_T")

FORMER_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "average_sharpness": {"pairs": "probes"},
    "feature_robustness": {"draws": "probes"},
    "ggn_norm": {"top": "top_k", "tol": "rtol"},
    "layer_factors": {"tol": "rtol"},
    "layer_sharpness": {"tol": "rtol"},
    "locally_constant_labels": {"draws": "probes"},
    "maximal_relative_flatness": {"tol": "rtol"},
    "mls_by_search": {"radius": "delta"},
    "pac_bayes_flatness": {"draws": "probes"},
    "relative_flatness": {"normalize": "normalized"},
    "relative_flatness_ggn": {"normalize": "normalized"},
    "representativeness": {"draws": "probes"},
    "sharpness": {"top": "top_k", "bottom": "bottom_k", "tol": "rtol"},
}
"""Options of measures: by measure, the present name of each former one."""

FORMER_PARTS: Mapping[str, Mapping[str, str]] = {"hessian_trace": {"bending": "functional_hessian"}}
"""Parts of measures: by measure, the present name of each former one."""

FORMER_TRANSFORMS: Mapping[str, str] = {
    "feature_normalisation": "feature_normalization",
    "feature_normalisation.published": "feature_normalization.published",
}
"""Transforms: the present name of each former one."""

FORMER_MODULES: Mapping[str, str] = {
    "flatlens.bounds.bound": "flatlens.bounds.definition",
    "flatlens.bounds.claim": "flatlens.bounds.context",
    "flatlens.measures.card": "flatlens.measures.definition",
    "flatlens.measures.reduce": "flatlens.measures.definition",
    "flatlens.papers.predictions": "flatlens.papers.experiment",
    "flatlens.transforms.moves": "flatlens.transforms.neurons",
    "flatlens.transforms.permutation": "flatlens.transforms.neurons",
    "flatlens.transforms.transform": "flatlens.transforms.definition",
}
"""Modules from which version 0.2 let extensions import: where their names are now. They go with the next version."""

_NAMED = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(\w+)(?==)""")


_PASSED = ("flatlens", "importlib", "_frozen_importlib", "_frozen_importlib_external")


class FormerName(DeprecationWarning):
    """A former name was used; the message says the present one."""


def warn(what: str, former: str, present: str) -> None:
    """Warn, at the caller's own line, that a name has changed."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and (module := frame.f_globals.get("__name__", "").partition(".")[0]) in _PASSED:
        level, frame = level + (module == "flatlens"), frame.f_back  # warnings leaves out importlib, too
    warnings.warn(f"{what}: {former} is now called {present}", FormerName, stacklevel=level)


def former_module(name: str) -> ModuleSpec | None:
    """Return the spec of a module that has another name now; None for any other name."""
    return ModuleSpec(name, _Renamed()) if name in FORMER_MODULES else None


class _Renamed(Loader):
    """Loads a module of `FORMER_MODULES`, with a warning: the names of the present one."""

    def exec_module(self, module: ModuleType) -> None:
        present = import_module(FORMER_MODULES[module.__name__])
        warn("import", module.__name__, present.__name__)
        names = {name: value for name, value in vars(present).items() if not name.startswith("__")}
        vars(module).update(names)
        # An import binds the module in its package. Where that has an object of this name, such as the decorator
        # `flatlens.bounds.bound`, the object stays, and has the module's names as attributes.
        package, _, own = module.__name__.rpartition(".")
        if (kept := vars(sys.modules[package]).get(own)) is not None:
            vars(kept).update({name: value for name, value in names.items() if not hasattr(kept, name)})
            sys.modules[module.__name__] = kept


def present_options(what: str, given: Mapping[str, Any], former: Mapping[str, str]) -> dict[str, Any]:
    """Return options with their present names, in the order given; warn of each former one.

    Raises:
        BadInput: an option is given by both names.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        present = former.get(name, name)
        if present != name:
            if present in given:
                raise BadInput(f"{what}: {name} is the former name of {present}: give only one of the two")
            warn(what, f"option {name}", present)
        found[present] = value
    return found


def renamed(**former: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Make a function accept former names of its options: `@renamed(tol="rtol")`."""

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        what = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def accepting(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            if former.keys() & kwargs.keys():
                return function(*args, **present_options(what, kwargs, former))
            return function(*args, **kwargs)

        return accepting

    return decorate


@contextmanager
def silent() -> Iterator[None]:
    """Give no warnings of former names: a saved file is being read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FormerName)
        yield


def present_measure(spelling: str) -> str:
    """Return a measure's name with the present names of its options.

    >>> present_measure("sharpness(top=3, tol=0.01)"), present_measure("mine(top=3)")
    ('sharpness(top_k=3, rtol=0.01)', 'mine(top=3)')
    """
    return _respelled(spelling, FORMER_OPTIONS.get(spelling.partition("(")[0], {}))


def present_part(measure: str, part: str) -> str:
    """Return the present name of a part of a measure.

    >>> present_part("hessian_trace(exact=True)", "bending")
    'functional_hessian'
    """
    return FORMER_PARTS.get(measure.partition("(")[0], {}).get(part, part)


def former_measure(spelling: str) -> str:
    """Return a measure's name with the first names of its options, from which keys of networks were made.

    >>> former_measure("sharpness(top_k=3)")
    'sharpness(top=3)'
    """
    former = FORMER_OPTIONS.get(spelling.partition("(")[0], {})
    return _respelled(spelling, {present: first for first, present in former.items()})


def former_transform(name: str) -> str:
    """Return a transform's first name, from which keys of networks were made."""
    return next((former for former, present in FORMER_TRANSFORMS.items() if present == name), name)


def _respelled(spelling: str, names: Mapping[str, str]) -> str:
    """Return a measure's name with other names of options; quoted values stay."""
    if not names or "(" not in spelling:
        return spelling
    return _NAMED.sub(lambda found: names.get(found[1], found[0]) if found[1] else found[0], spelling)
