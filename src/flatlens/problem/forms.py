"""Callables of outputs in the form that the network gives them, while flatlens keeps outputs as rows, (n, N)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from flatlens.problem.apart import require_apart
from flatlens.problem.loss import Loss


class OfForm(Loss):
    """A callable of outputs in another form than rows; targets are dataclasses with the user's own in `targets`."""

    def __init__(self, each: Loss) -> None:
        self.each, self.name, self.whole = each, each.name, True

    @abstractmethod
    def form(self, f: Tensor, y: Any) -> Any:
        """Return the outputs f, (n, N), as the network gives them."""

    @property
    def description(self) -> str:
        """Return the callable's own."""
        return self.each.description

    def settled(self, f: Tensor, y: Any) -> Loss:
        """Return the loss whose callable is settled."""
        return type(self)(self.each.settled(self.form(f, y), y.targets))

    def values(self, f: Tensor, y: Any) -> Tensor:
        """Return the callable's losses, (n,)."""
        return self.each.values(self.form(f, y), y.targets)

    def by_sample(self, y: Any) -> tuple[Any, Callable[[Any], Any]]:
        """Return (what y holds for each sample, a function that puts that of some samples in its place)."""
        return y.targets, lambda targets: replace(y, targets=targets)

    def require_apart(self, f: Tensor, y: Any) -> None:
        """Refuse a callable that couples samples."""
        if self.each.singly:
            self.each.require_apart(self.form(f, y), y.targets)
            return
        held, of_some = self.by_sample(y)
        require_apart(self.name, lambda f, some: self.values(f, of_some(some)), f, held)

    def correct(self, f: Tensor, y: Any) -> Tensor | None:
        """Return None: what the outputs mean is not known."""
        return None
