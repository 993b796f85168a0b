"""Outputs of any shape as one row per sample, (n, N), and the losses of such rows.

The outputs of a network are (n,), (n, N), images of classes or numbers, sequences, or several heads. `in_rows` puts
them side by side, and `RowLayout` says which of these rows belong to which sample, and how they count.

For outputs with one row per token, (n, T, V), a sample's output vector is its counted tokens' rows, one after
another. The rows of masked tokens are zero, with no derivative, so they add nothing to any Gram matrix. A token is
masked by its label (`ignore_index`), by the `attention_mask` fed to the model, or by forward=. With l_it the loss of
a token,

    cross_entropy, mse, torch modules    l_i = sum_t l_it, mass_i = sum_t mass_it: the risk is torch's mean over tokens
    half_squared_error                   l_i = 0.5 ||f_i - y_i||^2 over all rows, mass_i = 1: C = I
    a callable                           l_i = loss((n, T, V), targets), mass_i = 1

The rows of places, whose classes lie in axis 1 of the outputs as torch's cross-entropy has it, are treated as tokens.
The losses of several heads (a dict or a tuple of outputs, with one target for each) are added.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias, final

import torch
from torch import Tensor
from torch.nn import functional as F

from flatlens.errors import FORWARD, BadData, BadLoss, BadModel
from flatlens.problem.loss import SAMPLE, BestConstant, Loss, one_each

Reading: TypeAlias = Literal["tokens", "places", "either"]
"""What outputs (n, A, B) with their targets are: A tokens, B places with A classes (torch's rule), or either."""


@dataclass(frozen=True, eq=False)
class RowLayout:
    """The targets of a batch of other outputs than (n, N), and which columns belong to which row of a sample."""

    targets: Any  #: as the user gave them; of several heads in the order of the outputs
    form: Callable[[Tensor], Any]  #: puts outputs (n, N) into the form in which the network gives them
    counted: Tensor | None = None  #: (n, T) bool, true where a token is an output row; None if a sample is one row
    length: int = 0  #: tokens of this batch; positions beyond, up to the longest batch's T, are masked
    reading: Reading = "tokens"
    heads: tuple[tuple[slice, Any], ...] = ()  #: of several heads: columns of the outputs; targets or a layout


def token_mask(y: Any) -> Tensor | None:
    """Return which tokens count, (n, T); None for targets of other outputs than those of tokens."""
    return y.counted if isinstance(y, RowLayout) else None


# Outputs to rows


def in_rows(outputs: Any, targets: Any, n: int, loss: Loss, counted: Any, known_outputs: int) -> tuple[Tensor, Any]:
    """Return (outputs (n, N), targets in the form that `laid_out` knows) of n samples.

    `loss` is that of these outputs, or the one they will get. `counted`, (n, T), says which tokens count, if it fits.
    `known_outputs` is N as known so far: with one row per token, that of the longest batch; 0 if not known.
    """
    # a dict or a tuple of outputs: heads side by side
    heads = None if isinstance(outputs, Tensor) else matching(outputs, targets, n, any_targets=loss.whole)
    if heads is not None:
        return _in_heads(outputs, *heads, n, loss, counted)
    if not isinstance(outputs, Tensor):
        # a callable of several outputs with one target, as mean and variance
        given = (
            outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, tuple | list) else ()
        )
        own = [isinstance(p, Tensor) and p.is_floating_point() and p.ndim > 0 and len(p) == n for p in given]
        if loss.whole and own and all(own):
            return _in_columns(list(given), targets, [(part.reshape(n, -1), None) for part in given], outputs)
        of_parts = f" of {len(outputs)} parts" if isinstance(outputs, tuple | list) else ""
        told = f" of {', '.join(map(str, outputs))}" if isinstance(outputs, dict) else of_parts
        raise BadModel(
            f"the network returned a {type(outputs).__name__}{told}; outputs must be a tensor of shape (batch, ...), "
            "or several heads with targets of the same structure",
            remedy=("choose one through ", FORWARD),
        )
    if n == 1 and outputs.ndim < 2:  # a squeeze() in the network also takes the axis of a single sample
        outputs = outputs.reshape(1, -1) if outputs.numel() > 1 else outputs.reshape(1)
    if outputs.ndim == 0 or len(outputs) != n:
        mend = "return one row for each sample, in the samples' order"
        if outputs.ndim > 1 and outputs.shape[1] == n:
            first = "if these are the samples, put them first (batch_first=True, or transpose(0, 1))"
            mend = f"axis 1 has {n} entries: {first}"
        elif outputs.ndim and len(outputs) % n == 0 and len(outputs):
            rows = len(outputs) // n
            mend = f"{rows} rows for each sample: if these follow each other, return outputs.reshape({n}, {rows}, ...)"
        elif outputs.numel() == 1:
            mend = "one number for the whole batch: return the outputs before a mean, a sum or a loss is taken of them"
        told = f"outputs must have shape (batch, N) = ({n}, N), or (batch, ...), got {tuple(outputs.shape)}"
        raise BadModel(told, remedy=mend)
    if outputs.ndim == 2:
        return outputs, targets
    # the shapes of outputs and targets say whether each row is a token, or the classes of a place
    labels = isinstance(targets, Tensor) and outputs.ndim == 3 and targets.shape == (n, outputs.shape[2])
    masked = labels and isinstance(counted, Tensor) and counted.shape == targets.shape
    # unless these are labels of the B places of outputs (n, A, B), not of more than A tokens
    if outputs.ndim == 3 and not (labels and loss.places and not masked and not _known_as_tokens(loss)):
        outputs = filled_up(outputs, targets, counted, loss.ignore_index)
    counts = counted if isinstance(counted, Tensor) and counted.shape == outputs.shape[:2] else None
    reading = _reading(outputs, targets, loss, counts) if isinstance(targets, Tensor) and not loss.whole else None
    if outputs.ndim == 3 and reading in (None, "tokens"):
        return by_token(outputs, targets, counts, loss.ignore_index, known_outputs // outputs.shape[2])
    if reading is not None:
        rows, labels = outputs.movedim(1, -1).flatten(1, -2), targets
        labels = labels.movedim(1, -1).flatten(1, -2) if labels.shape == outputs.shape else labels.flatten(1)
        return by_token(rows, labels, None, loss.ignore_index, known_outputs // outputs.shape[1], reading)
    # neither: a callable gets the network's own form, and any other loss one target for each output
    if loss.whole or loss.by_place:
        shape = outputs.shape[1:]
        return outputs.reshape(n, -1), RowLayout(targets, lambda f: f.reshape(-1, *shape))
    if outputs.ndim > 1 and not (isinstance(targets, Tensor) and one_each(outputs, targets)):
        got = f"of shape {tuple(targets.shape)}" if isinstance(targets, Tensor) else f"a {type(targets).__name__}"
        raise BadData(
            f"outputs of shape {tuple(outputs.shape)} need one target for each output, or class labels of shape "
            f"{(n, *outputs.shape[2:])}, one for each place; the targets are {got}",
            argument="data",
            remedy=("flatten or pool the outputs, in the model or through ", FORWARD),
        )
    return outputs.reshape(n, -1), targets.reshape(n, -1) if outputs.ndim > 1 else targets


# Tokens and places


def by_token(
    outputs: Tensor, targets: Any, counted: Tensor | None, ignore: int, longest: int = 0, reading: Reading = "tokens"
) -> tuple[Tensor, RowLayout]:
    """Return (outputs (n, T V), their layout); `counted` (n, T) are the tokens that the model's own mask keeps.

    `longest`: the length of the longest batch; shorter ones are filled up with masked rows.

    >>> f, y = by_token(torch.ones(1, 2, 3), torch.tensor([[4, -100]]), None, -100)
    >>> f.tolist(), y.counted.tolist()
    ([[1.0, 1.0, 1.0, 0.0, 0.0, 0.0]], [[True, False]])
    """
    counts = _counting(outputs, counted, targets, ignore)
    length, V = outputs.shape[1:]
    missing = max(0, longest - length)
    rows = outputs * counts[..., None].to(outputs)
    if missing:  # else F.pad copies what may be the largest tensor
        rows, counts = F.pad(rows, (0, 0, 0, missing)), F.pad(counts, (0, missing))
    return rows.flatten(1), RowLayout(targets, lambda f: f.reshape(len(f), -1, V)[:, :length], counts, length, reading)


def filled_up(outputs: Tensor, targets: Any, counted: Any, ignore: int) -> Tensor:
    """Return outputs (n, T, V) with zeros up to the targets' length, if no token beyond T counts.

    A network that packs its sequences pads its outputs to the longest of the batch only.

    >>> filled_up(torch.ones(1, 1, 2), torch.tensor([[4, -100]]), None, -100).shape
    torch.Size([1, 2, 2])
    """
    n, T = outputs.shape[:2]
    if not isinstance(targets, Tensor) or targets.ndim < 2 or len(targets) != n or targets.shape[1] <= T:
        return outputs
    counts = _counting(targets, counted, targets, ignore)
    return outputs if bool(counts[:, T:].any()) else F.pad(outputs, (0, 0, 0, counts.shape[1] - T))


def _counting(rows: Tensor, counted: Any, targets: Any, ignore: int) -> Tensor:
    """Return which of the tokens of `rows`, (n, T, ...), a mask and the labels let count, (n, T)."""
    counts = torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device)
    if isinstance(counted, Tensor) and counted.shape == counts.shape:
        counts &= counted.to(counts.device).bool()
    if isinstance(targets, Tensor) and targets.shape == counts.shape and not targets.is_floating_point():
        counts &= targets.to(counts.device) != ignore
    return counts


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
    known = counts is not None or not loss.places or _known_as_tokens(loss)
    return "tokens" if known else "either"


def _known_as_tokens(loss: Loss) -> bool:
    return isinstance(loss, OfRows) and loss.tokens


def in_doubt(y: Any) -> str:
    """Words on how outputs (n, A, B) of either meaning are read; empty where the targets leave no doubt."""
    if not isinstance(y, RowLayout) or y.reading != "either":
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


def hidden_labels(y: Any, ignore: int) -> tuple[int, int]:
    """Return how many tokens with a label do not count, and how many tokens have one.

    >>> _, y = by_token(torch.ones(1, 2, 3), torch.tensor([[4, 0]]), torch.tensor([[1, 0]]), -100)
    >>> hidden_labels(y, -100)
    (1, 2)
    """
    counted = token_mask(y)
    if counted is None or not isinstance(y.targets, Tensor) or y.targets.is_floating_point():
        return 0, 0
    labelled, counted = y.targets != ignore, counted[:, : y.length]
    if labelled.shape != counted.shape:
        return 0, 0
    return int((labelled & ~counted.to(labelled.device)).sum()), int(labelled.sum())


def ignored_outputs(loss: Loss, f: Tensor, y: Any) -> list[Tensor]:
    """Return which outputs, (n, N), the labels or the mask ignore, in each possible reading of the outputs' axes."""
    if (counted := token_mask(y)) is not None:
        n, T = counted.shape
        ignored = ~counted[..., None].expand(n, T, f.shape[1] // T)
        return [one.reshape(n, -1) for one in ([ignored, ignored.mT] if y.reading == "either" else [ignored])]
    if isinstance(y, Tensor) and y.ndim == 1 and not y.is_floating_point():
        return [(y.to(f.device) == loss.ignore_index)[:, None].expand_as(f)]
    return []


def unpadded(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return features (n, T, ...) with zeros at the padding.

    >>> unpadded(torch.ones(1, 2, 2), torch.tensor([[1, 0]])).tolist()
    [[[1.0, 1.0], [0.0, 0.0]]]
    """
    if mask is None or x.ndim < 3 or x.shape[:2] != mask.shape:
        return x
    return x * (mask != 0).reshape(*mask.shape, *(1,) * (x.ndim - 2)).to(x)


def softmax_of(f: Tensor, counted: Tensor | None) -> Tensor:
    """Return the softmax of the outputs, (n, N) float64; of outputs of tokens, the softmax of each row."""
    rows = f.to(torch.float64)
    return rows.softmax(1) if counted is None else rows.reshape(*counted.shape, -1).softmax(2).reshape(f.shape)


def onto_softmax(p: Tensor, u: Tensor, counted: Tensor | None) -> Tensor:
    """Return (diag(p) - p p^T) u per token, the softmax's Jacobian times u (..., n, N); p is from `softmax_of`."""
    if counted is None:
        return p * (u - (p * u).sum(-1, keepdim=True))
    n, T = counted.shape
    q, v = p.reshape(n, T, -1), u.reshape(*u.shape[:-2], n, T, -1)
    return (q * (v - (q * v).sum(-1, keepdim=True))).reshape(u.shape)


def next_token(model: Any, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return (outputs, targets, which tokens count) of a causal language model, which predicts each next token.

    Pass it as forward= with batches {"input_ids", "attention_mask"?, "labels"?}. Without "labels" the ids themselves
    are the targets. A token counts if it is not padding and its label is not -100; the first token of a sequence is
    never a target.
    """
    fed = {key: value for key, value in batch.items() if key != "labels"}
    outputs = model(**fed)
    labels: Tensor = batch.get("labels", batch["input_ids"])[:, 1:]
    if "attention_mask" in batch:
        labels = labels.masked_fill(batch["attention_mask"][:, 1:] == 0, -100)
    return getattr(outputs, "logits", outputs)[:, :-1], labels, labels != -100


# Several heads


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


def _in_heads(
    outputs: Any, parts: list[Tensor], targets: Any, n: int, loss: Loss, counted: Any
) -> tuple[Tensor, RowLayout]:
    given = list(zip(parts, targets.values() if isinstance(targets, Mapping) else targets, strict=True))
    each, like = loss_of_each(loss, targets), targets if isinstance(targets, Mapping) else outputs
    if each is None:
        return _in_columns(parts, targets, [(part.reshape(n, -1), target) for part, target in given], like)
    rows = []
    for (part, target), one in zip(given, each, strict=True):
        # one number for each output, in another shape than the outputs'
        numbers = isinstance(target, Tensor) and target.is_floating_point() and one_each(part, target)
        flat = numbers and target.shape not in (part.shape, part.shape[:2])
        rows.append((part.reshape(n, -1), target) if flat else in_rows(part, target, n, one, counted, 0))
    return _in_columns(parts, targets, rows, like)


def _in_columns(
    parts: list[Tensor], targets: Any, each: list[tuple[Tensor, Any]], like: Any
) -> tuple[Tensor, RowLayout]:
    ends = list(accumulate(rows.shape[1] for rows, _ in each))
    columns = [slice(end - rows.shape[1], end) for end, (rows, _) in zip(ends, each, strict=True)]
    shapes = [part.shape[1:] for part in parts]
    names = tuple(like) if isinstance(like, Mapping) else ()  # not the tensors, which hold graphs
    joined = (lambda parts: dict(zip(names, parts, strict=True))) if names else getattr(like, "_make", tuple)

    def form(f: Tensor) -> Any:
        return joined([f[:, at].reshape(len(f), *shape) for at, shape in zip(columns, shapes, strict=True)])

    heads = tuple(zip(columns, (target for _, target in each), strict=True))
    return torch.cat([rows for rows, _ in each], 1), RowLayout(targets, form, heads=heads)


def loss_of_each(loss: Loss, targets: Any) -> list[Loss] | None:
    """Return the heads' losses in the order of the targets; None for a callable of all heads."""
    if isinstance(loss, OfRows):
        return loss.each
    if isinstance(loss, HeadLosses):
        return loss.matched(targets)
    return None if loss.whole else [loss] * len(targets)


# The losses of rows


def laid_out(loss: Loss, y: Any) -> Loss:
    """Return the loss of outputs whose targets have this form; that of plain outputs (n, N) is the loss itself."""
    if not isinstance(y, RowLayout) or isinstance(loss, OfRows | OfForm):
        return loss
    if not y.heads:
        return OfForm(loss, y) if y.counted is None or loss.whole else OfRows([loss], y)
    each = loss_of_each(loss, y.targets)
    if each is None:
        return OfForm(loss, y)
    of_heads = [(one, laid_out(one, target)) for one, (_, target) in zip(each, y.heads, strict=True)]
    return OfRows([found if isinstance(found, OfForm) else one for one, found in of_heads], y)


def known_as_tokens(loss: Loss) -> Loss:
    """Return the loss for outputs (n, A, B) that are A tokens, where their shapes could also mean B places."""
    if isinstance(loss, OfRows):
        loss = copy.copy(loss)
        loss.tokens = True
    return loss


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
        named = isinstance(targets, Mapping)
        keys, own = list(targets) if named else range(len(targets)), self.names or range(len(self.each))
        if named == (self.names is not None) and set(keys) == set(own):
            return [self.each[own.index(key)] for key in keys]
        heads = ", ".join(map(str, targets)) if isinstance(targets, Mapping) else len(targets)
        given = len(self.each) if self.names is None else ", ".join(map(str, self.names))
        raise BadLoss(f"there are losses for the heads {given}, and targets for {heads}", remedy="match them")


@final
class OfForm(Loss):
    """A callable of outputs in the form that the network gives them: (n,) losses. Masked rows are zeros."""

    whole = True

    def __init__(self, each: Loss, y: RowLayout) -> None:
        self.each, self.name, self.one_softmax = each, each.name, y.counted is not None

    @property
    def description(self) -> str:
        """Return the callable's own."""
        return self.each.description

    def settled(self, f: Tensor, y: Any) -> Loss:
        """Return the loss whose callable is settled."""
        return OfForm(self.each.settled(y.form(f), y.targets), y)

    def values(self, f: Tensor, y: Any) -> Tensor:
        """Return the callable's losses, (n,)."""
        return self.each.values(y.form(f), y.targets)

    def correct(self, f: Tensor, y: Any) -> Tensor | None:
        """Return the share of a sample's tokens that are correct, if every token has a label; else None."""
        labelled = isinstance(y.targets, Tensor) and y.targets.shape == (len(f), y.length)
        return OfRows([self.each], y).correct(f, y) if y.counted is not None and labelled else None


class _Head(NamedTuple):
    """The outputs of one head as R rows of each sample, and its loss of a row."""

    loss: Loss
    at: slice  #: its columns of all outputs
    rows: Tensor  #: (n R, V)
    targets: Any  #: with a valid value where masked
    counted: Tensor | None  #: which rows count, (n, R) bool; None if R = 1, and all count
    share: int  #: what its loss is divided by: of several heads, each is the mean over its rows

    def each(self, of: Callable[[Tensor, Any], Tensor]) -> Tensor:
        """Return a number, or a matrix, for each row: (n, R, ...), 0 where masked."""
        try:
            found = of(self.rows, self.targets)
        except BadData as error:
            if self.counted is None:
                raise
            parts = error.what if isinstance(error.what, tuple) else (error.what,)
            raise error.but(what=tuple("token" if part == SAMPLE else part for part in parts)) from error
        if self.counted is None:
            return found[:, None]
        masked = ~self.counted.flatten().reshape(-1, *(1,) * (found.ndim - 1))
        return found.masked_fill(masked, 0.0).reshape(*self.counted.shape, *found.shape[1:])

    def mass(self) -> Tensor:
        """Return the mass of each sample; for the half squared error of tokens 1, or 0 where none counts."""
        if self.counted is not None and self.loss.half_square:
            return self.counted.any(1).to(torch.float64)
        return self.each(self.loss.mass).sum(1)

    def settled(self) -> Loss:
        if self.counted is None:
            return self.loss.settled(self.rows, self.targets)
        counted = self.counted.flatten()
        return self.loss.settled(self.rows[counted], self.targets[counted]) if bool(counted.any()) else self.loss

    def multiplied(self, product: Callable[[Tensor], Tensor], u: Tensor) -> Tensor:
        """Return the product of each row's matrix with its part of u, (n, R V); `product` gives new tensors."""
        found = product(u[:, self.at].reshape(self.rows.shape))
        if self.counted is not None:
            found.mul_(self.counted.reshape(-1, 1))
        found = found.reshape(len(u), -1)
        return found if self.share == 1 else found / self.share

    def combined(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return (rows' combinations side by side (n, r, R V), B (n, r, r)): rows have independent u."""
        found, B = self.loss.combine(self.rows, self.targets, u[:, self.at].reshape(self.rows.shape))
        if self.counted is not None:
            found = found * self.counted.reshape(-1, 1, 1)
            if found.shape[1] == 1:  # B is one nonnegative number per row: multiply the row by its root
                found, B = found * B.clamp(min=0).sqrt(), torch.ones_like(B)
            n, R = self.counted.shape
            found = found.reshape(n, R, found.shape[1], -1).transpose(1, 2).flatten(2)
            B = B.reshape(n, R, *B.shape[1:])[:, 0]
        return found, B / self.share

    def drawn(self, draws: int, generator: torch.Generator) -> Tensor:
        """Return gradients for targets drawn separately for every row, (n, draws, R V)."""
        s = self.loss.draw_slopes(self.rows, self.targets, draws, generator)
        if self.counted is not None:
            s = (s * self.counted.reshape(-1, 1, 1)).reshape(*self.counted.shape, draws, -1).transpose(1, 2).flatten(2)
        return s / math.sqrt(self.share)


@final
class OfRows(Loss):
    """Losses of rows, summed over the rows of a sample that count, and over heads: C is block-diagonal."""

    def __init__(self, each: list[Loss], y: RowLayout) -> None:
        self.each, self.heads = each, bool(y.heads)
        self.tokens = False  #: whether the data show that outputs (n, A, B) are A tokens, not B places
        self.name = " + ".join(loss.name for loss in each)
        self.apart, self.convex = all(loss.apart for loss in each), all(loss.convex for loss in each)
        if self.heads:
            whole = token_mask(y.heads[0][1]) is not None or isinstance(each[0], OfForm)
            self.one_softmax = len(each) == 1 and not whole
        else:
            self.ignore_index, self.places = each[0].ignore_index, each[0].places
            self.half_square, self.closed = each[0].half_square, each[0].closed

    @property
    def description(self) -> str:
        """Return the heads' own, added."""
        return " + ".join(loss.description for loss in self.each)

    def parts(self, f: Tensor, y: RowLayout) -> list[_Head]:
        """Return the rows of each head."""
        heads = zip(self.each, y.heads or ((slice(None), y),), strict=True)
        return [self._head(loss, at, f[:, at], target) for loss, (at, target) in heads]

    def _head(self, loss: Loss, at: slice, f: Tensor, y: Any) -> _Head:
        counted = None if isinstance(loss, OfForm) else token_mask(y)
        if counted is None:
            return _Head(loss, at, f, y, None, 1)
        n, T = counted.shape
        t: Tensor = torch.as_tensor(y.targets, device=f.device)
        V = f.shape[1] // T
        if t.shape not in ((n, y.length), (n, y.length, V)):
            raise BadData(
                f"outputs of shape {(n, y.length, V)} have one row per token: expected labels of shape {(n, y.length)} "
                f"or targets of shape {(n, y.length, V)}, got {tuple(t.shape)}",
                argument="data",
                remedy="pool the tokens in the model, or give every token a label",
            )
        t = F.pad(t, (0, 0) * (t.ndim - 2) + (0, T - y.length)).flatten(0, 1)
        # the label of a masked token may be out of range or NaN; class 0 (or 0) has a finite loss, which does not count
        t = t.masked_fill(~counted.reshape(-1, *(1,) * (t.ndim - 1)), 0)
        return _Head(loss, at, f.reshape(n * T, V), t, counted, T if self.heads and not loss.half_square else 1)

    def settled(self, f: Tensor, y: Any) -> Loss:
        """Return the loss whose losses of a row are settled."""
        found = OfRows([part.settled() for part in self.parts(f, y)], y)
        found.tokens = self.tokens
        return found

    def values(self, f: Tensor, y: Any) -> Tensor:
        """Return the sums over rows and heads, (n,)."""
        return torch.stack([part.each(part.loss.values).sum(1) / part.share for part in self.parts(f, y)]).sum(0)

    def mass(self, f: Tensor, y: Any) -> Tensor:
        """Return the mass of all rows; with several heads 1 (`check` refuses others)."""
        return super().mass(f, y) if self.heads else self.parts(f, y)[0].mass()

    def check(self, f: Tensor, y: Any) -> Tensor:
        """Return the losses; refuse heads whose samples do not all count alike."""
        for part in self.parts(f, y) if self.heads else ():
            if part.counted is None:
                part.loss.check(part.rows, part.targets)
            if not bool((part.mass() == part.share).all()):
                raise BadLoss(
                    "some targets of a head are ignored, its classes are weighted, or its tokens are masked: with "
                    "several heads every sample must count alike: give a function (outputs, targets) -> losses, (n,)",
                    value=self.name,
                )
        return super().check(f, y)

    def least(self, f: Tensor, y: Any) -> Tensor | None:
        """Return the sum of the heads' least losses; None if one is not known, as that of tokens."""
        parts = self.parts(f, y)
        each = [part.loss.least(part.rows, part.targets) for part in parts if part.counted is None]
        known = [least for least in each if least is not None]
        return torch.stack(known).sum(0) if len(known) == len(parts) else None

    def target_sums(self, f: Tensor, y: Any) -> Tensor | None:
        """Return the sums over all tokens that count; None with several heads, or for a mean over a sample's tokens."""
        if self.heads or self.half_square:
            return None
        (part,) = self.parts(f, y)
        if part.counted is None:
            return part.loss.target_sums(part.rows, part.targets)
        counted = part.counted.flatten()
        return part.loss.target_sums(part.rows[counted], part.targets[counted])

    def constant(self, sums: Tensor, mass: float) -> BestConstant | None:
        """Return that of a row's loss."""
        return self.each[0].constant(sums, mass)

    def output_hessian(self, f: Tensor, y: Any) -> Tensor:
        """Return C with one block per row, (n, N, N)."""
        C = torch.zeros(len(f), f.shape[1], f.shape[1], dtype=torch.float64, device=f.device)
        for part in self.parts(f, y):
            blocks, own = part.each(part.loss.output_hessian), C[:, part.at, part.at]
            R, V = blocks.shape[1:3]
            own.view(len(f), R, V, R, V).diagonal(dim1=1, dim2=3).copy_(blocks.permute(0, 2, 3, 1))
            own /= part.share
        return C

    def output_hessian_product(self, f: Tensor, y: Any) -> Callable[[Tensor], Tensor]:
        """Return the product with C, row by row."""
        return _beside([(part, part.loss.output_hessian_product(part.rows, part.targets)) for part in self.parts(f, y)])

    def fisher(self, f: Tensor, y: Any) -> Callable[[Tensor], Tensor]:
        """Return the product for targets drawn separately for every row."""
        return _beside([(part, part.loss.fisher(part.rows, part.targets)) for part in self.parts(f, y)])

    def combine(self, f: Tensor, y: Any, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return each head's own combinations of its rows, zero at the other heads."""
        parts = self.parts(f, y)
        found = [part.combined(u) for part in parts]
        if len(found) == 1:
            return found[0]
        wide = [rows.new_zeros(len(f), rows.shape[1], f.shape[1]) for rows, _ in found]
        for part, (rows, _), whole in zip(parts, found, wide, strict=True):
            whole[:, :, part.at] = rows
        # block-diagonal, as each head has its own combinations
        B, end = found[0][1].new_zeros(len(f), *(sum(own.shape[1] for _, own in found),) * 2), 0
        for _, own in found:
            at = slice(end, end := end + own.shape[1])
            B[:, at, at] = own
        return torch.cat(wide, 1), B

    def draw_slopes(self, f: Tensor, y: Any, draws: int, generator: torch.Generator) -> Tensor:
        """Return gradients for targets drawn separately for every row, (n, draws, N)."""
        return torch.cat([part.drawn(draws, generator) for part in self.parts(f, y)], 2)

    def correct(self, f: Tensor, y: Any) -> Tensor | None:
        """Return the share of a sample's tokens that are correct, NaN where none counts; None with several heads."""
        if self.heads:
            return None
        (part,) = self.parts(f, y)
        hits = part.loss.correct(part.rows, part.targets)
        if hits is None or part.counted is None:
            return hits
        seen = part.counted & ~hits.isnan().reshape(part.counted.shape)
        right = hits.reshape(seen.shape).masked_fill(~seen, 0.0).sum(1)
        return torch.where(seen.any(1), right / seen.sum(1).clamp(min=1), math.nan)


def _beside(products: list[tuple[_Head, Callable[[Tensor], Tensor]]]) -> Callable[[Tensor], Tensor]:
    """Return u -> the heads' products with their parts of u, side by side."""

    def apply(u: Tensor) -> Tensor:
        found = [part.multiplied(product, u) for part, product in products]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    return apply
