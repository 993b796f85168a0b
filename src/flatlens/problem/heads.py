"""Several heads: outputs that are a dict or a tuple of tensors, with one target for each; their losses are added."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor

from flatlens.errors import BadData, BadLoss
from flatlens.problem.forms import OfForm
from flatlens.problem.loss import Loss
from flatlens.problem.sequences import TokenWise


@dataclass(frozen=True, eq=False)
class Heads:
    """The targets of several heads, and where each head's outputs lie among all outputs."""

    targets: Any  #: as the user gave them; but for a callable of all heads, in the structure of the outputs
    forms: tuple[Any, ...]  #: each head's targets in the form that its loss takes
    columns: tuple[slice, ...]
    shapes: tuple[tuple[int, ...], ...]  #: of one sample's outputs
    joined: Callable[[list[Tensor]], Any]  #: puts the heads' outputs into the structure that the network gives them

    def structured(self, f: Tensor) -> Any:
        """Return the outputs in the structure and the shapes that the network gives them."""
        parts = [f[:, at].reshape(len(f), *shape) for at, shape in zip(self.columns, self.shapes, strict=True)]
        return self.joined(parts)


def matching(outputs: Any, targets: Any, n: int, *, any_targets: bool = False) -> tuple[list[Tensor], Any] | None:
    """Return (each head's outputs; the targets in their order); None if these are not several heads.

    `any_targets`: whether the loss takes targets of another structure, too.

    >>> matching({"a": torch.ones(2, 1), "b": torch.zeros(2, 3)}, {"b": 1, "a": 2}, 2)[1]
    {'a': 2, 'b': 1}
    """
    if isinstance(outputs, Mapping) and isinstance(targets, Mapping):
        named = {name: part for name, part in outputs.items() if name in targets}
        missing = sorted(set(targets) - set(named))
        if missing and any_targets:
            return None
        if missing:
            raise BadData(
                f"Problem(data=...): there are targets for {missing[0]!r}, but the network's outputs are "
                f"{', '.join(map(str, outputs))}: name the targets as the outputs"
            )
        parts: list[Any] = list(named.values())
        told: Any = {name: targets[name] for name in named}
    elif isinstance(outputs, tuple | list) and isinstance(targets, tuple | list) and len(outputs) == len(targets):
        parts, told = list(outputs), tuple(targets)
    else:
        return None
    if not parts or not all(isinstance(part, Tensor) and part.ndim and len(part) == n for part in parts):
        return None
    return parts, told


def of_one_target(outputs: Any, targets: Any, n: int) -> tuple[Tensor, Heads] | None:
    """Return (outputs side by side, targets as they are) for a callable of several outputs, as a mean and a variance.

    None if these are not several heads.
    """
    given = outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, tuple | list) else ()
    parts = [part for part in given if _is_head(part, n)]
    if not parts or len(parts) < len(given):
        return None
    return in_columns(parts, targets, [(part.reshape(n, -1), None) for part in parts], outputs)


def _is_head(part: Any, n: int) -> bool:
    return isinstance(part, Tensor) and part.is_floating_point() and part.ndim > 0 and len(part) == n


def in_columns(parts: list[Tensor], targets: Any, each: list[tuple[Tensor, Any]], like: Any) -> tuple[Tensor, Heads]:
    """Return (the heads' outputs side by side, (n, N); their targets) from each head's rows and form of its targets."""
    ends = list(accumulate(rows.shape[1] for rows, _ in each))
    columns = tuple(slice(end - rows.shape[1], end) for end, (rows, _) in zip(ends, each, strict=True))
    forms, shapes = tuple(form for _, form in each), tuple(tuple(part.shape[1:]) for part in parts)
    return torch.cat([rows for rows, _ in each], 1), Heads(targets, forms, columns, shapes, _joining(like))


def _joining(like: Any) -> Callable[[list[Tensor]], Any]:
    """Return the function that puts heads into a structure like this: a dict, a tuple, or a tuple with names."""
    if isinstance(like, Mapping):
        names = tuple(like)  # not the tensors, which hold graphs
        return lambda parts: dict(zip(names, parts, strict=True))
    made: Callable[[list[Tensor]], Any] = getattr(like, "_make", tuple)
    return made


def loss_of_each(loss: Loss, targets: Any) -> list[Loss] | None:
    """Return the heads' losses in the order of the targets; None for a callable of all heads."""
    if isinstance(loss, OfHeads):
        return loss.each
    if isinstance(loss, HeadLosses):
        return loss.matched(targets)
    return None if loss.whole else [loss] * len(targets)


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

    one_softmax = False

    def form(self, f: Tensor, y: Any) -> Any:
        """Return the outputs in the network's structure."""
        return y.structured(f)


@final
class OfHeads(Loss):
    """The sum of the heads' losses, that of tokens or places the mean over them: C is block-diagonal."""

    def __init__(self, each: list[Loss]) -> None:
        self.each = each
        self.name = " + ".join(loss.name for loss in each)
        self.apart, self.convex = all(loss.apart for loss in each), all(loss.convex for loss in each)
        self.one_softmax = len(each) == 1 and not isinstance(each[0], TokenWise | OfForm)

    @property
    def description(self) -> str:
        """Return the heads' own, added."""
        return " + ".join(loss.description for loss in self.each)

    def _each(self, f: Tensor, y: Heads) -> Iterator[tuple[Loss, slice, Tensor, Any, int]]:
        """Yield each head's loss, columns, outputs and targets, and the mass of a sample, by which it is divided."""
        for loss, at, form in zip(self.each, y.columns, y.forms, strict=True):
            places = form.counted.shape[1] if isinstance(loss, TokenWise) and not loss.half_square else 1
            yield loss, at, f[:, at], form, places

    def settled(self, f: Tensor, y: Any) -> Loss:
        """Return the loss whose heads' losses are settled."""
        return OfHeads([loss.settled(part, target) for loss, _, part, target, _ in self._each(f, y)])

    def values(self, f: Tensor, y: Any) -> Tensor:
        """Return the sum over heads, (n,)."""
        return torch.stack([loss.values(part, target) / mass for loss, _, part, target, mass in self._each(f, y)]).sum(
            0
        )

    def check(self, f: Tensor, y: Any) -> Tensor:
        """Return the losses; refuse heads whose samples do not all count alike."""
        for loss, _, part, target, mass in self._each(f, y):
            loss.check(part, target)
            if not bool((loss.mass(part, target) == mass).all()):
                raise BadLoss(
                    f"Problem(loss={self.name}): some targets of a head are ignored, its classes are weighted, or its "
                    f"tokens are masked: with several heads every sample must count alike: give a function (outputs, "
                    f"targets) -> losses, (n,)"
                )
        return super().check(f, y)

    def require_apart(self, f: Tensor, y: Any) -> None:
        """Refuse heads whose losses couple samples."""
        for loss, _, part, target, _ in self._each(f, y):
            loss.require_apart(part, target)

    def least(self, f: Tensor, y: Any) -> Tensor | None:
        """Return the sum of the heads' least losses; None if one is not known."""
        each = [(loss.least(part, target), mass) for loss, _, part, target, mass in self._each(f, y)]
        known = [least / mass for least, mass in each if least is not None]
        return torch.stack(known).sum(0) if len(known) == len(each) else None

    def output_hessian(self, f: Tensor, y: Any) -> Tensor:
        """Return C with one block per head, (n, N, N)."""
        C = f.new_zeros(len(f), f.shape[1], f.shape[1], dtype=torch.float64)
        for loss, at, part, target, mass in self._each(f, y):
            C[:, at, at] = loss.output_hessian(part, target) / mass
        return C

    def output_hessian_product(self, f: Tensor, y: Any) -> Callable[[Tensor], Tensor]:
        """Return the product with C, head by head."""
        return self._head_by_head(f, y, lambda loss, part, target: loss.output_hessian_product(part, target))

    def combine(self, f: Tensor, y: Any, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return each head's own rows, zero at the other heads."""
        rows, blocks = [], []
        for loss, at, part, target, mass in self._each(f, y):
            found, B = loss.combine(part, target, u[:, at])
            wide = found.new_zeros(len(f), found.shape[1], f.shape[1])
            wide[:, :, at] = found
            rows.append(wide)
            blocks.append(B / mass)
        return torch.cat(rows, 1), _block_diagonal(blocks)

    def fisher(self, f: Tensor, y: Any) -> Callable[[Tensor], Tensor]:
        """Return the product for targets drawn separately for every head."""
        return self._head_by_head(f, y, lambda loss, part, target: loss.fisher(part, target))

    def _head_by_head(
        self, f: Tensor, y: Any, product: Callable[[Loss, Tensor, Any], Callable[[Tensor], Tensor]]
    ) -> Callable[[Tensor], Tensor]:
        each = [(at, product(loss, part, target), mass) for loss, at, part, target, mass in self._each(f, y)]
        return lambda u: torch.cat([of_head(u[:, at]) / mass for at, of_head, mass in each], 1)

    def draw_slopes(self, f: Tensor, y: Any, draws: int, generator: torch.Generator) -> Tensor:
        """Return gradients for targets drawn separately for every head, (n, draws, N)."""
        each = [
            loss.draw_slopes(part, target, draws, generator) / mass**0.5
            for loss, _, part, target, mass in self._each(f, y)
        ]
        return torch.cat(each, 2)

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
