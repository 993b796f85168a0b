"""A check that gradients can be differentiated again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

_ERROR_SUFFIX = "Error"  #: end of the names of autograd's nodes for a derivative that is not implemented


def has_second_derivative(gradients: Iterable[Tensor | None]) -> bool:
    """Return whether no operation in the graph of these gradients is marked `once_differentiable`.

    Autograd may not raise for such an operation, but silently leave its branch out.
    """
    seen: set[Any] = set()
    waiting: list[Any] = [g.grad_fn for g in gradients if g is not None and g.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().endswith(_ERROR_SUFFIX):
            return False
        waiting.extend(parent for parent, _ in node.next_functions)
    return True


def require_second_derivative(gradients: Iterable[Tensor | None]) -> None:
    """Raise RuntimeError if second derivatives would be silently wrong."""
    if not has_second_derivative(gradients):
        raise RuntimeError("an operation of the network is marked once_differentiable")
