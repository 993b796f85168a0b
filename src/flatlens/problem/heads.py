"""Several heads: outputs that are a dict or a tuple of tensors, with one target for each; their losses are added."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from flatlens.errors import BadData, BadLoss
from flatlens.problem.forms import OfForm
from flatlens.problem.loss import Loss


@dataclass(frozen=True, eq=False)
class Heads:
    """The targets of several heads, and where each head's outputs lie among all outputs."""

    targets: Mapping[str, Any] | tuple[Any, ...]  #: in the structure of the outputs
    columns: tuple[slice, ...]
    shapes: tuple[tuple[int, ...], ...]  #: of one sample's outputs

    def parts(self, f: Tensor) -> Iterator[tuple[slice, Any]]:
        """Yield each head's columns and targets."""
        each = self.targets.values() if isinstance(self.targets, Mapping) else self.targets
        yield from zip(self.columns, each, strict=True)

    def structured(self, f: Tensor) -> Any:
        """Return the outputs in the structure and the shapes that the network gives them."""
        parts = [f[:, at].reshape(len(f), *shape) for at, shape in zip(self.columns, self.shapes, strict=True)]
        return dict(zip(self.targets, parts, strict=True)) if isinstance(self.targets, Mapping) else tuple(parts)


def heads_joined(outputs: Any, targets: Any, n: int) -> tuple[Tensor, Heads] | None:
    """Return (the heads' outputs side by side, (n, N); their targets); None if these are not several heads.

    >>> f, y = heads_joined({"a": torch.ones(2, 1), "b": torch.zeros(2, 3)}, {"b": 1, "a": 2}, 2)
    >>> f.shape, y.targets
    (torch.Size([2, 4]), {'a': 2, 'b': 1})
    """
    if isinstance(outputs, Mapping) and isinstance(targets, Mapping):
        named = {name: part for name, part in outputs.items() if name in targets}
        if missing := sorted(set(targets) - set(named)):
            raise BadData(
                f"Problem(data=...): there are targets for {missing[0]!r}, but the network's outputs are "
                f"{', '.join(map(str, outputs))}: name the targets as the outputs"
            )
        parts: list[Any] = list(named.values())
        told: dict[Any, Any] | tuple[Any, ...] = {name: targets[name] for name in named}
    elif isinstance(outputs, tuple | list) and isinstance(targets, tuple | list) and len(outputs) == len(targets):
        parts, told = list(outputs), tuple(targets)
    else:
        return None
    if not parts or not all(isinstance(part, Tensor) and part.ndim and len(part) == n for part in parts):
        return None
    widths = [part.numel() // n for part in parts]
    ends = torch.tensor(widths).cumsum(0).tolist()
    columns = tuple(slice(end - width, end) for end, width in zip(ends, widths, strict=True))
    shapes = tuple(tuple(part.shape[1:]) for part in parts)
    return torch.cat([part.reshape(n, -1) for part in parts], 1), Heads(told, columns, shapes)


def of_heads(loss: Loss, y: Heads) -> Loss:
    """Return the loss of several heads: that of each, or a callable of all."""
    if isinstance(loss, OfHeads | OfStructure):
        return loss
    if isinstance(loss, HeadLosses):
        return OfHeads(loss.matched(y.targets))
    return OfStructure(loss) if loss.whole else OfHeads([loss] * len(y.columns))


@final
class HeadLosses(Loss):
    """The losses given for the heads, before the outputs are known."""

    def __init__(self, each: Sequence[Loss], names: list[Any] | None) -> None:
        self.each, self.names = list(each), names
        self.name = " + ".join(loss.name for loss in each)

    def values(self, f: Tensor, y: Any) -> Tensor:
        """Refuse outputs that are one tensor."""
        raise BadLoss(
            f"Problem(loss=...): {len(self.each)} losses are given, but the network's outputs are one tensor, or the "
            f"targets are: several heads need a dict or a tuple of outputs and one of targets"
        )

    def matched(self, targets: Any) -> list[Loss]:
        """Return the losses in the order of the targets."""
        if self.names is None and len(self.each) == len(targets) and not isinstance(targets, Mapping):
            return self.each
        if self.names is not None and isinstance(targets, Mapping) and set(self.names) == set(targets):
            return [self.each[self.names.index(name)] for name in targets]
        heads = ", ".join(map(str, targets)) if isinstance(targets, Mapping) else len(targets)
        given = len(self.each) if self.names is None else ", ".join(map(str, self.names))
        raise BadLoss(f"Problem(loss=...): there are losses for the heads {given}, and targets for {heads}: match them")


@final
class OfStructure(OfForm):
    """A callable of all heads: it gets the outputs and the targets as the network and the data give them."""

    def form(self, f: Tensor, y: Any) -> Any:
        """Return the outputs in the network's structure."""
        return y.structured(f)


@final
class OfHeads(Loss):
    """The sum of the heads' losses: C is block-diagonal."""

    def __init__(self, each: list[Loss]) -> None:
        self.each = each
        self.name = " + ".join(loss.name for loss in each)
        self.apart, self.convex = all(loss.apart for loss in each), all(loss.convex for loss in each)

    @property
    def description(self) -> str:
        """Return the heads' own, added."""
        return " + ".join(loss.description for loss in self.each)

    def _each(self, f: Tensor, y: Heads) -> Iterator[tuple[Loss, slice, Tensor, Any]]:
        """Yield each head's loss, columns, outputs and targets."""
        for loss, (at, target) in zip(self.each, y.parts(f), strict=True):
            yield loss, at, f[:, at], target

    def settled(self, f: Tensor, y: Any) -> Loss:
        """Return the loss whose heads' losses are settled."""
        return OfHeads([loss.settled(part, target) for loss, _, part, target in self._each(f, y)])

    def values(self, f: Tensor, y: Any) -> Tensor:
        """Return the sum over heads, (n,)."""
        return torch.stack([loss.values(part, target) for loss, _, part, target in self._each(f, y)]).sum(0)

    def check(self, f: Tensor, y: Any) -> Tensor:
        """Return the losses; refuse heads whose samples do not all count alike."""
        for loss, _, part, target in self._each(f, y):
            loss.check(part, target)
            if not bool((loss.mass(part, target) == 1).all()):
                raise BadLoss(
                    f"Problem(loss={self.name}): some targets of a head are ignored, or its classes are weighted: with "
                    f"several heads every sample must count alike: give a function (outputs, targets) -> losses, (n,)"
                )
        return super().check(f, y)

    def require_apart(self, f: Tensor, y: Any) -> None:
        """Refuse heads whose losses couple samples."""
        for loss, _, part, target in self._each(f, y):
            loss.require_apart(part, target)

    def least(self, f: Tensor, y: Any) -> Tensor | None:
        """Return the sum of the heads' least losses; None if one is not known."""
        each = [loss.least(part, target) for loss, _, part, target in self._each(f, y)]
        known = [least for least in each if least is not None]
        return torch.stack(known).sum(0) if len(known) == len(each) else None

    def output_hessian(self, f: Tensor, y: Any) -> Tensor:
        """Return C with one block per head, (n, N, N)."""
        C = f.new_zeros(len(f), f.shape[1], f.shape[1], dtype=torch.float64)
        for loss, at, part, target in self._each(f, y):
            C[:, at, at] = loss.output_hessian(part, target)
        return C

    def output_hessian_product(self, f: Tensor, y: Any) -> Callable[[Tensor], Tensor]:
        """Return the product with C, head by head."""
        each = [(at, loss.output_hessian_product(part, target)) for loss, at, part, target in self._each(f, y)]
        return lambda u: torch.cat([product(u[:, at]) for at, product in each], 1)

    def combine(self, f: Tensor, y: Any, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return each head's own rows, zero at the other heads."""
        rows, blocks = [], []
        for loss, at, part, target in self._each(f, y):
            found, B = loss.combine(part, target, u[:, at])
            wide = found.new_zeros(len(f), found.shape[1], f.shape[1])
            wide[:, :, at] = found
            rows.append(wide)
            blocks.append(B)
        return torch.cat(rows, 1), _block_diagonal(blocks)

    def fisher(self, f: Tensor, y: Any) -> Callable[[Tensor], Tensor]:
        """Return the product for targets drawn separately for every head."""
        each = [(at, loss.fisher(part, target)) for loss, at, part, target in self._each(f, y)]
        return lambda u: torch.cat([product(u[:, at]) for at, product in each], 1)

    def draw_slopes(self, f: Tensor, y: Any, draws: int, generator: torch.Generator) -> Tensor:
        """Return gradients for targets drawn separately for every head, (n, draws, N)."""
        each = self._each(f, y)
        return torch.cat([loss.draw_slopes(part, target, draws, generator) for loss, _, part, target in each], 2)

    def correct(self, f: Tensor, y: Any) -> Tensor | None:
        """Return None: several heads have no one class."""
        return None


def _block_diagonal(blocks: list[Tensor]) -> Tensor:
    """Return the batched blocks (n, r, r) along the diagonal of one matrix per sample."""
    size = sum(block.shape[1] for block in blocks)
    B, start = blocks[0].new_zeros(len(blocks[0]), size, size), 0
    for block in blocks:
        stop = start + block.shape[1]
        B[:, start:stop, start:stop] = block
        start = stop
    return B
