"""Outputs of any shape as one row per sample: (n,), images of classes or numbers, sequences, several heads.

For outputs with one row per token, (n, T, V), a sample's output vector is its counted tokens' rows, one after
another. The rows of masked tokens are zero, with no derivative, so they add nothing to any Gram matrix. A token is
masked by its label (`ignore_index`), by the `attention_mask` fed to the model, or by forward=. With l_it the loss of
a token,

    cross_entropy, mse, torch modules    l_i = sum_t l_it, mass_i = sum_t mass_it: the risk is torch's mean over
    tokens
    half_squared_error                   l_i = 0.5 ||f_i - y_i||^2 over all rows, mass_i = 1: C = I
    a callable                           l_i = loss((n, T, V), targets), mass_i = 1

The rows of places, whose classes lie in axis 1 of the outputs as torch's cross-entropy has it, are treated as tokens.
The losses of several heads, a dict or a tuple of tensors with one target for each, are added.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor
from torch.nn import functional as F

from flatlens.errors import FORWARD, BadData, BadLoss, BadModel
from flatlens.problem.loss import ROW, Loss, one_each
from flatlens.problem.sample_independence import require_apart


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


Reading: TypeAlias = Literal["tokens", "places", "either"]
"""What outputs (n, A, B) with their targets are: A tokens, B places with A classes (torch's rule), or either."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """The targets of outputs (n, T, V), with the mask and the length of the batch."""

    targets: Any  #: the targets as the user gave them
    counted: Tensor  #: (n, T) bool, true where a token is an output row
    length: int  #: tokens of this batch; positions beyond, up to the longest batch's T, are masked
    reading: Reading = "tokens"


def by_token(
    outputs: Tensor,
    targets: Any,
    counted: Tensor | None,
    ignore: int,
    longest: int = 0,
    reading: Reading = "tokens",
) -> tuple[Tensor, Tokens]:
    """Return (outputs (n, T V), their `Tokens`); `counted` (n, T) are the tokens that the model's own mask keeps.

    `longest`: the length of the longest batch; shorter ones are filled up with masked rows.

    >>> f, y = by_token(torch.ones(1, 2, 3), torch.tensor([[4, -100]]), None, -100)
    >>> f.tolist(), y.counted.tolist()
    ([[1.0, 1.0, 1.0, 0.0, 0.0, 0.0]], [[True, False]])
    """
    counts = torch.ones(outputs.shape[:2], dtype=torch.bool, device=outputs.device)
    if counted is not None:
        counts = counts & counted.to(outputs.device).bool()
    if isinstance(targets, Tensor) and targets.shape == outputs.shape[:2] and not targets.is_floating_point():
        counts = counts & (targets.to(outputs.device) != ignore)
    missing = max(0, longest - outputs.shape[1])
    rows = outputs * counts[..., None].to(outputs)
    length = outputs.shape[1]
    if missing:  # else F.pad copies what may be the largest tensor
        rows, counts = F.pad(rows, (0, 0, 0, missing)), F.pad(counts, (0, missing))
    return rows.flatten(1), Tokens(targets, counts, length, reading)


def filled_up(outputs: Tensor, targets: Any, counted: Any, ignore: int) -> Tensor:
    """Return outputs (n, T, V) with zeros up to the targets' length, if no token beyond T counts.

    A network that packs its sequences pads its outputs to the longest of the batch only.

    >>> filled_up(torch.ones(1, 1, 2), torch.tensor([[4, -100]]), None, -100).shape
    torch.Size([1, 2, 2])
    """
    n, T = outputs.shape[:2]
    if not isinstance(targets, Tensor) or targets.ndim < 2 or len(targets) != n or targets.shape[1] <= T:
        return outputs
    counts = torch.ones(targets.shape[:2], dtype=torch.bool, device=targets.device)
    if isinstance(counted, Tensor) and counted.shape == counts.shape:
        counts &= counted.to(counts.device).bool()
    if targets.ndim == 2 and not targets.is_floating_point():
        counts &= targets != ignore
    return outputs if bool(counts[:, T:].any()) else F.pad(outputs, (0, 0, 0, counts.shape[1] - T))


def hidden_labels(y: Any, ignore: int) -> tuple[int, int]:
    """Return how many tokens with a label do not count, and how many tokens have one.

    >>> _, y = by_token(torch.ones(1, 2, 3), torch.tensor([[4, 0]]), torch.tensor([[1, 0]]), -100)
    >>> hidden_labels(y, -100)
    (1, 2)
    """
    if not isinstance(y, Tokens) or not isinstance(y.targets, Tensor) or y.targets.is_floating_point():
        return 0, 0
    labelled, counted = y.targets != ignore, y.counted[:, : y.length]
    if labelled.shape != counted.shape:
        return 0, 0
    return int((labelled & ~counted.to(labelled.device)).sum()), int(labelled.sum())


def attention_mask(batch: Any) -> Tensor | None:
    """Return the (n, T) mask, 0 at padding, that a batch feeds to the model as `attention_mask`.

    None for an encoder-decoder, whose outputs and features are of other tokens.
    """
    for part in batch if isinstance(batch, tuple) else (batch,):
        if isinstance(part, Mapping) and any(str(key).startswith("decoder_") for key in part):
            return None
        mask = part.get("attention_mask") if isinstance(part, Mapping) else None
        if isinstance(mask, Tensor) and mask.ndim == 2:
            return mask
    return None


def unpadded(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return features (n, T, ...) with zeros at the padding.

    >>> unpadded(torch.ones(1, 2, 2), torch.tensor([[1, 0]])).tolist()
    [[[1.0, 1.0], [0.0, 0.0]]]
    """
    if mask is None or x.ndim < 3 or x.shape[:2] != mask.shape:
        return x
    return x * (mask != 0).reshape(*mask.shape, *(1,) * (x.ndim - 2)).to(x)


def ignored_outputs(loss: Loss, f: Tensor, y: Any) -> list[Tensor]:
    """Return which outputs, (n, N), the labels or the mask ignore, in each possible reading of the outputs' axes."""
    if isinstance(y, Tokens):
        n, T = y.counted.shape
        ignored = ~y.counted[..., None].expand(n, T, f.shape[1] // T)
        return [one.reshape(n, -1) for one in ([ignored, ignored.mT] if y.reading == "either" else [ignored])]
    if isinstance(y, Tensor) and y.ndim == 1 and not y.is_floating_point():
        return [(y.to(f.device) == loss.ignore_index)[:, None].expand_as(f)]
    return []


def softmax_of(f: Tensor, tokens: Tokens | None) -> Tensor:
    """Return the softmax of the outputs, (n, N) float64.

    For outputs with one row per token, the softmax of each row.
    """
    rows = f.to(torch.float64)
    if tokens is None:
        return rows.softmax(1)
    return rows.reshape(*tokens.counted.shape, -1).softmax(2).reshape(f.shape)


def onto_softmax(p: Tensor, u: Tensor, tokens: Tokens | None) -> Tensor:
    """Return (diag(p) - p p^T) u per token, the softmax's Jacobian times u (..., n, N); p is from `softmax_of`."""
    if tokens is None:
        return p * (u - (p * u).sum(-1, keepdim=True))
    n, T = tokens.counted.shape
    q, v = p.reshape(n, T, -1), u.reshape(*u.shape[:-2], n, T, -1)
    return (q * (v - (q * v).sum(-1, keepdim=True))).reshape(u.shape)


def of_sequences(loss: Loss) -> Loss:
    """Return the loss for outputs with one row per token, made from the loss for single rows."""
    if isinstance(loss, TokenWise | OfSequence):
        return loss
    return OfSequence(loss) if loss.whole else TokenWise(loss)


def in_doubt(y: Any) -> str:
    """Return in words how outputs (n, A, B) of either meaning are read; empty where the targets leave no doubt.

    Probabilities leave none unless they add up to 1 over tokens' classes alone.
    """
    if not isinstance(y, Tokens) or y.reading != "either":
        return ""
    t: Tensor = y.targets
    if t.is_floating_point():
        adds_up = [torch.allclose(s, torch.ones_like(s), atol=1e-4) for s in (t.sum(1), t.sum(2))]
        if adds_up != [True, False]:
            return ""
    classes, places = t.shape[2] if t.ndim == 3 else y.length, y.length
    return (
        f"outputs {(len(t), classes, places)} are read as torch's cross-entropy reads them, {classes} classes at "
        f"{places} places; if they are tokens, say so by a mask: a third value of forward=, {(len(t), classes)}"
    )


def by_rows(loss: Loss) -> Loss:
    """Return the loss for outputs (n, A, B) that are A tokens, where their shapes could also mean B places."""
    return TokenWise(loss.each, rows=True) if isinstance(loss, TokenWise) else loss


@final
class OfSequence(OfForm):
    """A callable of whole sequences: (n, T, V) and the targets to losses (n,). Masked rows are zeros."""

    def form(self, f: Tensor, y: Any) -> Tensor:
        """Return the outputs, (n, T, V), of the tokens that the batch has."""
        return f.reshape(*y.counted.shape, -1)[:, : y.length]

    def by_sample(self, y: Any) -> tuple[Any, Callable[[Any], Any]]:
        """Return the targets and the mask."""
        return (y.targets, y.counted), lambda some: replace(y, targets=some[0], counted=some[1])

    def correct(self, f: Tensor, y: Any) -> Tensor | None:
        """Return the share of a sample's tokens that are correct, if every token has a label."""
        labelled = isinstance(y.targets, Tensor) and y.targets.shape == (len(f), y.length)
        return TokenWise(self.each).correct(f, y) if labelled else None


@final
class TokenWise(Loss):
    """A loss per row, summed over the tokens that count: C is block-diagonal."""

    def __init__(self, each: Loss, rows: bool = False) -> None:
        self.rows = rows  #: whether the data show that outputs (n, A, B) are A tokens, not B places
        self.each, self.name, self.ignore_index, self.places = each, each.name, each.ignore_index, each.places
        self.half_square, self.apart = each.half_square, each.apart
        self.convex, self.closed = each.convex, each.closed

    @property
    def description(self) -> str:
        """Return the row's own."""
        return self.each.description

    def settled(self, f: Tensor, y: Any) -> Loss:
        """Return the loss whose loss of a row is settled."""
        rows, t, counted = self._rows(f, y)
        return TokenWise(self.each.settled(rows[counted], t[counted]), self.rows) if bool(counted.any()) else self

    def _rows(self, f: Tensor, y: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        """Return (outputs (n T, V), targets with a valid value where masked, counted (n T,))."""
        n, T = y.counted.shape
        t: Tensor = torch.as_tensor(y.targets, device=f.device)
        V = f.shape[1] // T
        if t.shape not in ((n, y.length), (n, y.length, V)):
            raise BadData(
                f"outputs of shape {(n, y.length, V)} have one row per token, so labels of shape {(n, y.length)} or "
                f"targets of shape {(n, y.length, V)} are needed, got {tuple(t.shape)}",
                argument="data",
                remedy="pool the tokens in the model, or give every token a label",
            )
        t = F.pad(t, (0, 0) * (t.ndim - 2) + (0, T - y.length))
        counted = y.counted.flatten()
        t = t.flatten(0, 1)
        masked = ~counted if t.ndim == 1 else ~counted[:, None]
        # the label of a masked token may be out of range or NaN; class 0 (or 0) has a finite loss, which does not count
        return f.reshape(n * T, V), t.masked_fill(masked, 0), counted

    def _per_token(self, f: Tensor, y: Tokens, of: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return one number per token, 0 where masked, (n, T)."""
        rows, t, counted = self._rows(f, y)
        try:
            found = of(rows, t)
        except BadData as error:
            parts = error.what if isinstance(error.what, tuple) else (error.what,)
            raise error.but(what=tuple("token" if part == ROW else part for part in parts)) from error
        return found.masked_fill(~counted, 0.0).reshape(y.counted.shape)

    def values(self, f: Tensor, y: Any) -> Tensor:
        """Return the losses summed over tokens, (n,)."""
        return self._per_token(f, y, self.each.values).sum(1)

    def require_apart(self, f: Tensor, y: Any) -> None:
        """Refuse a loss that couples tokens: C has no entries between them."""
        rows, t, counted = self._rows(f, y)
        if not self.apart and bool(counted.any()):
            self.each.require_apart(rows[counted], t[counted])

    def mass(self, f: Tensor, y: Any) -> Tensor:
        """Return the mass of all tokens; for the half squared error 1, or 0 where no token counts."""
        if self.half_square:
            some: Tensor = y.counted.any(1)
            return some.to(torch.float64)
        return self._per_token(f, y, self.each.mass).sum(1)

    def output_hessian(self, f: Tensor, y: Any) -> Tensor:
        """Return C with one block per token, (n, T V, T V)."""
        rows, t, counted = self._rows(f, y)
        n, T = y.counted.shape
        blocks = self.each.output_hessian(rows, t) * counted[:, None, None]
        C = blocks.new_zeros(n, T, rows.shape[1], T, rows.shape[1])
        C.diagonal(dim1=1, dim2=3).copy_(blocks.reshape(n, T, *blocks.shape[1:]).permute(0, 2, 3, 1))
        return C.reshape(n, f.shape[1], f.shape[1])

    def _block_wise(self, f: Tensor, y: Tokens, product: Callable[[Tensor, Any], Callable[[Tensor], Tensor]]) -> Any:
        rows, t, counted = self._rows(f, y)
        each = product(rows, t)
        return lambda u: each(u.reshape(rows.shape)).mul_(counted[:, None]).reshape(u.shape)

    def output_hessian_product(self, f: Tensor, y: Any) -> Callable[[Tensor], Tensor]:
        """Return the product with C, token by token."""
        found: Callable[[Tensor], Tensor] = self._block_wise(f, y, self.each.output_hessian_product)
        return found

    def fisher(self, f: Tensor, y: Any) -> Callable[[Tensor], Tensor]:
        """Return the product for targets drawn separately for every token."""
        found: Callable[[Tensor], Tensor] = self._block_wise(f, y, self.each.fisher)
        return found

    def combine(self, f: Tensor, y: Any, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's own combinations, side by side; tokens have independent u."""
        rows, t, counted = self._rows(f, y)
        found, B = self.each.combine(rows, t, u.reshape(rows.shape))
        found = found * counted[:, None, None]
        if found.shape[1] == 1:  # B is one nonnegative number per token: multiply the row by its root
            found, B = found * B.clamp(min=0).sqrt(), torch.ones_like(B)
        n, T = y.counted.shape
        return found.reshape(n, T, found.shape[1], -1).transpose(1, 2).flatten(2), B.reshape(n, T, *B.shape[1:])[:, 0]

    def draw_slopes(self, f: Tensor, y: Any, draws: int, generator: torch.Generator) -> Tensor:
        """Return gradients for targets drawn separately for every token, (n, draws, T V)."""
        rows, t, counted = self._rows(f, y)
        s = self.each.draw_slopes(rows, t, draws, generator) * counted[:, None, None]
        return s.reshape(*y.counted.shape, draws, -1).transpose(1, 2).flatten(2)

    def correct(self, f: Tensor, y: Any) -> Tensor | None:
        """Return the share of a sample's tokens that are correct; NaN where none counts."""
        rows, t, counted = self._rows(f, y)
        hits = self.each.correct(rows, t)
        if hits is None:
            return None
        seen = (counted & ~hits.isnan()).reshape(y.counted.shape)
        right = hits.reshape(seen.shape).masked_fill(~seen, 0.0).sum(1)
        return torch.where(seen.any(1), right / seen.sum(1).clamp(min=1), math.nan)


def next_token(model: Any, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return (outputs, targets, which tokens count) of a causal language model, which predicts each next token.

    Pass it as forward= with batches {"input_ids", "attention_mask"?, "labels"?}. Without "labels" the ids themselves
    are the targets. A token counts if it is no padding and its label is not -100; the first token of a sequence is
    never a target.
    """
    fed = {key: value for key, value in batch.items() if key != "labels"}
    outputs = model(**fed)
    labels: Tensor = batch.get("labels", batch["input_ids"])[:, 1:]
    if "attention_mask" in batch:
        labels = labels.masked_fill(batch["attention_mask"][:, 1:] == 0, -100)
    return getattr(outputs, "logits", outputs)[:, :-1], labels, labels != -100


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
                f"there are targets for {missing[0]!r}, but the network's outputs are {', '.join(map(str, outputs))}",
                argument="data",
                remedy="name the targets as the outputs",
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
            f"{len(self.each)} losses are given, but the network's outputs are one tensor, or the targets are",
            remedy="several heads need a dict or a tuple of outputs and one of targets",
        )

    def matched(self, targets: Any) -> list[Loss]:
        """Return the losses in the order of the targets."""
        if self.names is None and len(self.each) == len(targets) and not isinstance(targets, Mapping):
            return self.each
        if self.names is not None and isinstance(targets, Mapping) and set(self.names) == set(targets):
            return [self.each[self.names.index(name)] for name in targets]
        heads = ", ".join(map(str, targets)) if isinstance(targets, Mapping) else len(targets)
        given = len(self.each) if self.names is None else ", ".join(map(str, self.names))
        raise BadLoss(f"there are losses for the heads {given}, and targets for {heads}", remedy="match them")


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
                    "some targets of a head are ignored, its classes are weighted, or its tokens are masked: with "
                    "several heads every sample must count alike: give a function (outputs, targets) -> losses, (n,)",
                    value=self.name,
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


@dataclass(frozen=True, eq=False)
class Shaped:
    """The targets of a callable that gets outputs in the network's own shape."""

    targets: Any
    shape: tuple[int, ...]  #: of one sample's outputs


@final
class OfShape(OfForm):
    """A callable of outputs in the shape that the network gives them."""

    one_softmax = False

    def form(self, f: Tensor, y: Any) -> Tensor:
        """Return the outputs in the network's shape."""
        return f.reshape(-1, *y.shape)


def of_form(loss: Loss, y: Any) -> Loss:
    """Return the loss for targets of this form."""
    if isinstance(y, Tokens):
        return of_sequences(loss)
    if isinstance(y, Heads) and not isinstance(loss, OfHeads | OfStructure):
        each = loss_of_each(loss, y.targets)
        if each is None:
            return OfStructure(loss)
        return OfHeads([of_form(*head) for head in zip(each, y.forms, strict=True)])
    return OfShape(loss) if isinstance(y, Shaped) and not isinstance(loss, OfShape) else loss


def in_rows(outputs: Any, targets: Any, n: int, loss: Loss, counted: Any, known_outputs: int) -> tuple[Tensor, Any]:
    """Return (outputs (n, N), targets in the form that `of_form` knows).

    Args:
        outputs: What the network returned.
        targets: What the data gave.
        n: The number of samples.
        loss: The loss of these outputs, or the one they will get.
        counted: Which tokens count, (n, T); ignored if it does not fit.
        known_outputs: N as known so far: with one row per token, that of the longest batch; 0 if not known.
    """
    heads = None if isinstance(outputs, Tensor) else matching(outputs, targets, n, any_targets=loss.whole)
    if heads is not None:
        return _in_heads(outputs, *heads, n, loss, counted)
    if not isinstance(outputs, Tensor):
        if loss.whole and (found := of_one_target(outputs, targets, n)) is not None:
            return found
        raise BadModel(
            f"the network returned {_told(outputs)}; outputs must be a tensor of shape (batch, ...), or several heads "
            "with targets of the same structure",
            remedy=("choose one through ", FORWARD),
        )
    if n == 1 and outputs.ndim < 2:  # a squeeze() in the network also takes the axis of a single sample
        outputs = outputs.reshape(1, -1) if outputs.numel() > 1 else outputs.reshape(1)
    if outputs.ndim == 0 or len(outputs) != n:
        raise BadModel(
            f"outputs must have shape (batch, N) = ({n}, N), or (batch, ...), got {tuple(outputs.shape)}",
            remedy=_mend_of_axes(outputs, n),
        )
    if outputs.ndim == 2:
        return outputs, targets
    if outputs.ndim == 3 and not _are_places(outputs, targets, loss, counted):
        outputs = filled_up(outputs, targets, counted, loss.ignore_index)
    counts = counted if isinstance(counted, Tensor) and counted.shape == outputs.shape[:2] else None
    reading = _reading(outputs, targets, loss, counts) if isinstance(targets, Tensor) and not loss.whole else None
    if outputs.ndim == 3 and reading in (None, "tokens"):
        return by_token(outputs, targets, counts, loss.ignore_index, known_outputs // outputs.shape[2])
    if reading is not None:
        rows, labels = outputs.movedim(1, -1).flatten(1, -2), targets
        labels = labels.movedim(1, -1).flatten(1, -2) if labels.shape == outputs.shape else labels.flatten(1)
        return by_token(rows, labels, None, loss.ignore_index, known_outputs // outputs.shape[1], reading)
    if loss.whole or loss.by_place:
        return outputs.reshape(n, -1), Shaped(targets, tuple(outputs.shape[1:]))
    if outputs.ndim > 1 and not (isinstance(targets, Tensor) and one_each(outputs, targets)):
        got = f"of shape {tuple(targets.shape)}" if isinstance(targets, Tensor) else f"a {type(targets).__name__}"
        raise BadData(
            f"outputs of shape {tuple(outputs.shape)} need one target for each output, or class labels of shape "
            f"{(n, *outputs.shape[2:])}, one for each place; the targets are {got}",
            argument="data",
            remedy=("flatten or pool the outputs, in the model or through ", FORWARD),
        )
    return outputs.reshape(n, -1), targets.reshape(n, -1) if outputs.ndim > 1 else targets


def _mend_of_axes(outputs: Tensor, n: int) -> str:
    """Return what to do about outputs whose axis 0 does not count the n samples, as their shape shows it."""
    if outputs.ndim > 1 and outputs.shape[1] == n:
        return (
            f"axis 1 has {n} entries: if these are the samples, put them first (batch_first=True, or transpose(0, 1))"
        )
    if outputs.ndim and len(outputs) % n == 0 and len(outputs):
        rows = len(outputs) // n
        return f"{rows} rows for each sample: if these follow each other, return outputs.reshape({n}, {rows}, ...)"
    if outputs.numel() == 1:
        return "one number for the whole batch: return the outputs before a mean, a sum or a loss is taken of them"
    return "return one row for each sample, in the samples' order"


def _in_heads(
    outputs: Any, parts: list[Tensor], targets: Any, n: int, loss: Loss, counted: Any
) -> tuple[Tensor, Heads]:
    """Return the heads' outputs side by side, each in rows, and their targets."""
    given = list(zip(parts, targets.values() if isinstance(targets, Mapping) else targets, strict=True))
    each, like = loss_of_each(loss, targets), targets if isinstance(targets, Mapping) else outputs
    if each is None:
        return in_columns(parts, targets, [(part.reshape(n, -1), target) for part, target in given], like)
    rows = [
        (part.reshape(n, -1), target) if _flat(part, target) else in_rows(part, target, n, one, counted, 0)
        for (part, target), one in zip(given, each, strict=True)
    ]
    return in_columns(parts, targets, rows, like)


def _flat(outputs: Tensor, targets: Any) -> bool:
    """Return whether the targets hold one number for each output, in another shape than the outputs'."""
    numbers = isinstance(targets, Tensor) and targets.is_floating_point() and one_each(outputs, targets)
    return numbers and targets.shape not in (outputs.shape, outputs.shape[:2])


def _reading(outputs: Tensor, targets: Tensor, loss: Loss, counts: Tensor | None) -> Reading | None:
    """Return what outputs (n, A, B, ...) are: places whose classes lie in axis 1, or tokens; None if they are neither.

    Wherever torch's cross-entropy takes the shapes, axis 1 holds the classes, as in torch. So it is for class labels at
    every other place, and for cross-entropy with probabilities of the outputs' shape. Labels of the shape (n, A) are
    those of tokens if torch does not take them, if `counts` is a mask of tokens, or if another batch shows it.
    """
    n, A, *places = outputs.shape if outputs.ndim > 2 else (len(outputs), 0)
    if targets.is_floating_point():
        second = tokens = loss.name == "cross_entropy" and targets.shape == outputs.shape
    else:
        second, tokens = targets.shape == (n, *places), targets.shape == (n, A)
    if outputs.ndim > 3 or not (second and tokens):
        return "places" if second and places else "tokens" if tokens and places else None
    known = counts is not None or not loss.places or _of_tokens(loss)
    return "tokens" if known else "either"


def _are_places(outputs: Tensor, targets: Any, loss: Loss, counted: Any) -> bool:
    """Return whether the targets (n, B) are labels of the B places of outputs (n, A, B), not of more than A tokens."""
    labels = isinstance(targets, Tensor) and targets.shape == (len(outputs), outputs.shape[2])
    masked = labels and isinstance(counted, Tensor) and counted.shape == targets.shape
    return labels and loss.places and not masked and not _of_tokens(loss)


def _of_tokens(loss: Loss) -> bool:
    return isinstance(loss, TokenWise) and loss.rows


def _told(outputs: Any) -> str:
    kind = type(outputs).__name__
    if isinstance(outputs, dict):
        return f"a {kind} of {', '.join(map(str, outputs))}"
    return f"a {kind} of {len(outputs)} parts" if isinstance(outputs, tuple | list) else f"a {kind}"
