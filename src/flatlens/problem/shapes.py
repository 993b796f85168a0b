"""Outputs of any shape as one row per sample: (n,), images of classes or numbers, sequences, several heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from flatlens.errors import BadData, BadModel
from flatlens.problem.forms import OfForm
from flatlens.problem.heads import Heads, OfHeads, OfStructure, in_columns, loss_of_each, matching, of_one_target
from flatlens.problem.loss import Loss, one_each
from flatlens.problem.sequences import Reading, Tokens, TokenWise, by_token, filled_up, of_sequences


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
            f"Problem(model=...): the network returned {_told(outputs)}; outputs must be a tensor of shape "
            f"(batch, ...), or several heads with targets of the same structure: choose one through "
            f"forward=(model, batch) -> (outputs, targets)"
        )
    if n == 1 and outputs.ndim < 2:  # a squeeze() in the network also takes the axis of a single sample
        outputs = outputs.reshape(1, -1) if outputs.numel() > 1 else outputs.reshape(1)
    if outputs.ndim == 0 or len(outputs) != n:
        raise BadModel(
            f"Problem(model=...): outputs must have shape (batch, N) = ({n}, N), or (batch, ...), got "
            f"{tuple(outputs.shape)}: {_mend_of_axes(outputs, n)}"
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
            f"Problem(data=...): outputs of shape {tuple(outputs.shape)} need one target for each output, or class "
            f"labels of shape {(n, *outputs.shape[2:])}, one for each place; the targets are {got}: flatten or pool "
            f"the outputs, in the model or through forward=(model, batch) -> (outputs, targets)"
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
