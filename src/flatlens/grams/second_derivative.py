"""Whether a gradient can be differentiated again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

_ERROR_SUFFIX = "Error"  #: how the names of nodes end that stand for a derivative nobody wrote


def has_second_derivative(gradients: Iterable[Tensor | None]) -> bool:
    """Whether no operation in the graph of these gradients was declared `once_differentiable`.

    Autograd would not raise: it leaves such a branch out where nothing asked for depends on it otherwise.
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
    """Refuse numbers that would be wrong without a word."""
    if not has_second_derivative(gradients):
        raise RuntimeError("an operation of the network is marked once_differentiable")
