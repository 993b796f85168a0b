"""Tensors that forward() keeps in its modules between passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_OF_ALL = frozenset(vars(nn.Module()))
"""The attributes that every module has."""


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Put back the tensors that forward() keeps in plain attributes, lists and dicts of modules.

    A function of a weight that is kept from a pass without gradients would hide the weight from all later passes. Left
    alone are weights of torch's own layers that are no parameters: hooks (old weight_norm, spectral_norm, pruning) or
    forward() compute them in each pass.
    """
    before = [(module, frozenset(vars(module)), _held(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, names, held in before:
            own = vars(module)
            for name in own.keys() - names:
                if isinstance(own[name], Tensor) and not _computed(module, name):
                    del own[name]
            for name, (value, content) in held.items():
                own[name] = value
                if content is not None and not _alike(value, content):
                    value.clear()
                    value.extend(content) if isinstance(value, list) else value.update(content)


def _held(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return the attributes that can hold tensors, each with a copy of a list's or dict's content."""
    own = vars(module)
    return {
        name: (own[name], own[name].copy() if isinstance(own[name], list | dict) else None)
        for name in own.keys() - _OF_ALL
        if (own[name] is None or isinstance(own[name], Tensor | list | dict)) and not _computed(module, name)
    }


def _computed(module: nn.Module, name: str) -> bool:
    """Return whether an attribute is a weight that each pass computes."""
    if name in ("weight", "bias") and type(module).__module__.startswith("torch.nn.modules"):
        return True
    return f"{name}_orig" in module._parameters or f"{name}_g" in module._parameters


def _alike(now: Any, before: Any) -> bool:
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(now[key] is before[key] for key in before)
    return all(a is b for a, b in zip(now, before, strict=True))
