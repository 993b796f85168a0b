"""The call of a network on the inputs of a batch, the output that its answer holds.

The errors of the user's own code in one line.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from flatlens.errors import FORWARD, BadData, ForwardFailed, LossFailed, Words
from flatlens.problem.batches import counts_samples
from flatlens.problem.eval_context import differentiable
from flatlens.problem.loss import Loss
from flatlens.problem.op_overrides import NO_LOOP
from flatlens.user_code import said, users_code

_IGNORED = -100  #: a label that counts as no target, in torch and in transformers


@dataclass(frozen=True)
class Convention:
    """The way in which a network reads a dict with labels, found on the first batch."""

    fed: bool = False  #: whether it gets the labels: an encoder-decoder makes its decoder's inputs from them
    shifted: bool = False  #: whether its outputs at a token are about the next token's label, as a causal model's are
    by_token: bool = False  #: whether its own loss shows that its outputs (n, T, V) are of T tokens


def called(model: nn.Module, x: Any, labels: Any = None) -> Any:
    """Return the network's answer to the inputs of a batch: a tensor, a tuple of arguments, or a dict of named ones.

    Entries of a dict that forward() does not name are left out, as transformers' Trainer does. A single tensor under
    another name is given by position.
    """
    if not isinstance(x, Mapping):
        return model(*x) if isinstance(x, tuple) else model(x)
    known, anything = _parameters(model)
    fed = {key: value for key, value in x.items() if anything or key in known}
    tensors = [value for value in x.values() if isinstance(value, Tensor)]
    if not fed and len(tensors) == 1 and labels is None:
        return model(tensors[0])
    return model(**fed) if labels is None else model(**fed, labels=labels)


def _parameters(model: nn.Module) -> tuple[set[str], bool]:
    """Return (the names that forward() takes, whether it takes any other)."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return set(), True
    return {p.name for p in parameters}, any(p.kind is p.VAR_KEYWORD for p in parameters)


def main_output(answer: Any) -> Any:
    """Return the tensor of outputs in an answer: `logits` of transformers, `out` of torchvision's segmentation."""
    if isinstance(answer, Tensor):
        return answer
    logits = getattr(answer, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    for name in ("logits", "out"):
        if isinstance(answer, Mapping) and isinstance(answer.get(name), Tensor):
            return answer[name]
    return answer


def convention_of(model: nn.Module, x: Any, y: Any) -> Convention:
    """Return how a network reads inputs with labels.

    A network of transformers that takes `labels` returns its own loss of them. The derivative of this loss in the
    outputs says at which place the label of an output lies: at its own, or at the next one.

    Raises:
        BadData: the labels lie at neither.
    """
    known, _ = _parameters(model)
    if not (isinstance(x, Mapping) and isinstance(y, Tensor) and "labels" in known):
        return Convention()
    decodes = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    fed = (decodes and not any(str(key).startswith("decoder_") for key in x)) or _needs_labels(model)
    if y.ndim != 2 or y.is_floating_point():
        return Convention(fed)
    rows = ((y[:, 1:] != _IGNORED).any(1).nonzero()[:2, 0]).tolist() or [0]
    few = {key: value[rows] if counts_samples(value, len(y)) else value for key, value in x.items()}
    with torch.enable_grad(), differentiable(model.parameters()):
        answer = called(model, few, y[rows])
        f, own = main_output(answer), getattr(answer, "loss", None)
        if not (isinstance(f, Tensor) and f.ndim == 3 and f.shape[:2] == y[rows].shape and isinstance(own, Tensor)):
            return Convention(fed)
        (slope,) = torch.autograd.grad(own.sum(), f, allow_unused=True)
    f = f.detach()
    if slope is None:
        raise BadData(_UNKNOWN, argument="data")
    for shift in (0, 1):
        if _is_slope(slope, f, F.pad(y[rows], (0, shift), value=_IGNORED)[:, shift:]):
            return Convention(fed, bool(shift), by_token=True)
    raise BadData(_UNKNOWN, argument="data")


_UNKNOWN = (
    "the network's own loss of the labels is the cross-entropy neither of each token nor of the next token, so it is "
    "not known which output belongs to which label: give ",
    FORWARD,
)


def _is_slope(slope: Tensor, f: Tensor, labels: Tensor) -> bool:
    """Return whether this is the derivative of the mean cross-entropy of these labels in the outputs."""
    counted = labels != _IGNORED
    if not bool(counted.any()):
        return False
    one_hot = F.one_hot(labels.masked_fill(~counted, 0), f.shape[2])
    expected = (f.softmax(2) - one_hot) * counted[..., None] / counted.sum()
    return float((slope - expected).abs().max()) <= 1e-3 * float(expected.abs().max())


def _needs_labels(model: nn.Module) -> bool:
    parameter = inspect.signature(model.forward).parameters["labels"]
    return parameter.default is parameter.empty


@contextmanager
def losing(loss: Loss, where: str, f: Tensor, y: Any) -> Iterator[None]:
    """Raise any exception of the loss as one line that says where in the data it happened."""

    def failed(line: str) -> LossFailed:
        return LossFailed(f"the loss failed on {where} ({line})", value=loss, remedy=_mend_of_loss(line, f, y))

    with users_code(failed):
        try:
            yield
        except LossFailed as error:
            raise error.__cause__ or error from None


def forward_failed(
    where: str, model: nn.Module | None = None, batch: Any = None, itself: Callable[[], object] | None = None
) -> Callable[[str], ForwardFailed]:
    """Return the function that makes one line about an exception into the error of a failed forward().

    `itself` runs the network in the dtype that its owner gave it, if that is another one.
    """

    def failed(line: str) -> ForwardFailed:
        what = "forward failed on ", where, f" ({line})"
        if NO_LOOP in line:
            return ForwardFailed(what)
        inputs = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        mend = _mend_of_forward(line, model, inputs, itself)
        return ForwardFailed(what, remedy=mend)

    return failed


def _mend_of_forward(line: str, model: nn.Module | None, inputs: list[Tensor], itself: Any) -> Words:
    """Return the cause of an error of forward() as far as it can be told, and what to do."""
    name = getattr(getattr(type(model), "forward", None), "__qualname__", "")
    if name and f"{name}() " in line and re.match("TypeError: .*(missing|takes|unexpected)", line):
        return (
            "it does not take the inputs that the data give: give several as a tuple, ((x, mask), y), or in a dict by "
            "their names, or call the network yourself: ",
            FORWARD,
        )
    given = f"inputs of {', '.join(map(_kind, inputs[:4]))}" if inputs else "the inputs"
    kinds = {kind.lower() for kind in re.findall(r"\b(BFloat16|Half|Float|Double|Long|Int)(?:Tensor)?\b", line, re.I)}
    if len(kinds) > 1 and "type" in line:
        if _works(itself):
            return (
                "the network runs in its own dtype, not in a copy of another one, in which it is measured: forward() "
                "casts to a fixed dtype; cast to the weight's, as in x.to(self.layer.weight.dtype)"
            )
        if kinds & {"long", "int"}:
            return f"it needs numbers of another type, floating ones or whole ones, and gets {given}: cast them"
        if model is not None and (held := _held(model, lambda one, p: one.dtype != p.dtype)):
            return f"the attribute {held} has another dtype than the weights: cast it in forward(), or make it a buffer"
        return "forward() computes in several dtypes: cast to the weight's, as in x.to(self.layer.weight.dtype)"
    if "device" in line:
        if model is not None and (held := _held(model, lambda one, p: one.device != p.device)):
            return f"the attribute {held} is on another device than the weights: make it a buffer (register_buffer)"
        return "forward() makes a tensor on another device than its inputs: give it device=x.device"
    if line.startswith("IndexError: index out of range in self"):
        return f"an embedding has fewer rows than the largest index of {given} needs"
    if re.search(_SHAPES, line):
        return f"forward() gets {given}: does the network take these shapes?"
    return f"its own code raised this, on {given}"


_SHAPES = r"shape|[Ss]ize|dimension|channels|[0-9]D|elements|unpack|\.dim\b|subscript|indices for tensor"
"""Words of torch's and Python's errors about shapes."""


def _works(call: Callable[[], object] | None) -> bool:
    if call is None:
        return False
    try:
        call()
    except Exception:
        return False
    return True


def _held(model: nn.Module, other: Callable[[Tensor, Tensor], bool]) -> str:
    """Return the name of a floating tensor, a plain attribute or a buffer, that is other than the first parameter."""
    first = next(model.parameters(), torch.zeros(()))
    for name, module in model.named_modules():
        for key, value in {**vars(module), **module._buffers}.items():
            if isinstance(value, Tensor) and value.is_floating_point() and other(value, first):
                return f"{key!r} of {repr(name) if name else 'the network'}"
    return ""


def _mend_of_loss(line: str, f: Tensor, y: Any) -> str:
    """Return the cause of an error of the loss as far as it can be told, and what to do."""
    if isinstance(y, list | tuple) and any(isinstance(one, str) for one in y):
        return "the labels are text: number the classes 0, 1, ..."
    if "'Tensor' object has no attribute" in line:
        return (
            "the loss gets .logits of what the network returns, where it has them (those of a Categorical are "
            "normalised), else its tensor: compute the loss from a tensor"
        )
    given = f"outputs of shape {tuple(f.shape)}, and targets of {_kind(y)}"
    whole = isinstance(y, Tensor) and not y.is_floating_point()
    if f.ndim > 1 and whole and y.numel() and "out of bounds" in line:
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= f.shape[1]:
            return f"the targets run from {low} to {high}, and {f.shape[1]} outputs are classes 0 to {f.shape[1] - 1}"
    if re.search(r"\b(d?type|LongTensor|int64)\b", line):
        if isinstance(y, Tensor) and (
            re.search("to be Long|Expected dtype int|LongTensor|found (Double|Float)$", line) and not whole
        ):
            return "the targets are floating numbers where class numbers are needed: give y.long()"
        if whole and re.search("output type Long|but found Long|Found dtype Long|got Long", line):
            return "the targets are whole numbers where floating ones are needed: give y.float()"
        if f.dtype == torch.float64:
            return (
                "the loss gets float64 outputs: cast its own tensors with .to(outputs.dtype), or, for class weights, "
                "give nn.CrossEntropyLoss(weight=...)"
            )
    if "does not require grad" in line:
        return "it is not differentiable: compute it from the outputs, without argmax, comparison or detach()"
    if re.search(_SHAPES, line):
        return f"it gets {given}: does it take these shapes?"
    return f"its own code raised this, on {given}"


@contextmanager
def retold(where: str | Callable[[], str]) -> Iterator[None]:
    """Add to the error of a failed forward() where in the data it happened."""
    try:
        yield
    except ForwardFailed as error:
        cause, place = error.__cause__ or error, where if isinstance(where, str) else where()
        if isinstance(error.what, tuple):  # of `forward_failed`: what, where, line
            raise error.but(what=(error.what[0], place, error.what[2])) from cause
        raise forward_failed(place)(said(cause)) from cause


def _kind(y: Any) -> str:
    return f"shape {tuple(y.shape)} and {y.dtype}" if isinstance(y, Tensor) else f"type {type(y).__name__}"
