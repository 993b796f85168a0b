"""What forward() keeps in plain attributes of its modules between passes.

A function of a weight that is kept from a pass without gradients would hide the weight from all later passes, and from
the user's training. So while a network is measured, each pass begins with the attributes that the modules had before,
and ends with them, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_OF_ALL = frozenset(vars(nn.Module()))
"""The attributes that every module has."""

_Held = list[tuple[nn.Module, dict[str, tuple[Any, Any]]]]
_held: WeakKeyDictionary[nn.Module, _Held] = WeakKeyDictionary()
"""By network that is measured: each module's attributes, and copies of the content of lists, dicts and sets."""


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Put back all plain attributes of the network's own modules afterwards, and whenever `put_back` is called inside.

    Torch's modules are left alone: they keep none, and where their weight is no parameter, hooks or forward() set it in
    each pass.
    """
    put_back(model)
    outer = _held.get(model)
    own = [module for module in model.modules() if not type(module).__module__.startswith("torch.nn.")]
    _held[model] = [(module, {name: _copied(vars(module)[name]) for name in _names(module)}) for module in own]
    try:
        yield
    finally:
        put_back(model)
        if outer is None:
            del _held[model]
        else:
            _held[model] = outer


def is_measured(model: nn.Module) -> bool:
    """Return whether this network is in the state of `attributes_kept` now."""
    return model in _held


def put_back(model: nn.Module) -> None:
    """Give a network that is measured the attributes that it had when `attributes_kept` began."""
    for module, before in _held.get(model, ()):
        attributes = vars(module)
        for name in _names(module) - before.keys():
            del attributes[name]
        for name, (value, content) in before.items():
            attributes[name] = value
            if content is not None:
                value.clear()
                if isinstance(value, list):
                    value.extend(content)
                else:
                    value.update(content)


def _names(module: nn.Module) -> set[str]:
    """Return the names of a module's own plain attributes, without weights that hooks of torch's compute."""
    computed = {name.removesuffix(end) for name in module._parameters for end in ("_orig", "_g")}
    return vars(module).keys() - _OF_ALL - computed


def _copied(value: Any) -> tuple[Any, Any]:
    return value, value.copy() if type(value) in (list, dict, set) else None
