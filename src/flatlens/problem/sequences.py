"""Outputs with one row per token, (n, T, V): the rows that count, side by side, are the sample's outputs.

A sample's output vector is its counted tokens' rows, one after another. The rows of masked tokens are zero, with no
derivative, so they add nothing to any Gram matrix. A token is masked by its label (`ignore_index`), by the
`attention_mask` fed to the model, or by forward=. With l_it the loss of a token,

    cross_entropy, mse, torch modules    l_i = sum_t l_it, mass_i = sum_t mass_it: the risk is torch's mean over tokens
    half_squared_error                   l_i = 0.5 ||f_i - y_i||^2 over all rows, mass_i = 1: C = I
    a callable                           l_i = loss((n, T, V), targets), mass_i = 1

The rows of places, whose classes lie in axis 1 of the outputs as torch's cross-entropy has it, are treated as tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor
from torch.nn import functional as F

from flatlens.errors import BadData
from flatlens.problem.forms import OfForm
from flatlens.problem.loss import Loss

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
                f"Problem(data=...): outputs of shape {(n, y.length, V)} have one row per token, so labels of shape "
                f"{(n, y.length)} or targets of shape {(n, y.length, V)} are needed, got {tuple(t.shape)}: pool the "
                f"tokens in the model, or give every token a label"
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
            raise BadData(str(error).replace("at sample", "at token")) from error
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
