"""Tensors that forward() keeps in its modules between passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_TORCHS_OWN = frozenset(vars(nn.Module()))
"""The attributes that every module has."""


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Put back the tensors that forward() keeps in plain attributes, lists and dicts of modules.

    A function of a weight that is kept from a pass without gradients would hide the weight from all later passes.
    Weights that a hook of torch's computes (old weight_norm, spectral_norm, pruning) stay: hooks set them in each pass.
    """
    before = [(vars(module), frozenset(vars(module)), _held(module)) for module in model.modules()]
    try:
        yield
    finally:
        for own, names, held in before:
            for name in [name for name, value in own.items() if isinstance(value, Tensor) and name not in names]:
                del own[name]
            for name, (value, content) in held.items():
                own[name] = value
                if content is not None and not _alike(value, content):
                    value.clear()
                    value.extend(content) if isinstance(value, list) else value.update(content)


def _held(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return the attributes that can hold tensors, each with a copy of a list's or dict's content."""
    computed = {name.removesuffix(end) for name in module._parameters for end in ("_orig", "_g")}
    return {
        name: (value, value.copy() if isinstance(value, list | dict) else None)
        for name, value in vars(module).items()
        if (value is None or isinstance(value, Tensor | list | dict)) and name not in _TORCHS_OWN | computed
    }


def _alike(now: Any, before: Any) -> bool:
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(now[key] is before[key] for key in before)
    return all(a is b for a, b in zip(now, before, strict=True))
