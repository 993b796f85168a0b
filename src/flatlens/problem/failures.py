"""The errors of a user's own code, told in one line: the forward pass of the network, and the loss."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from flatlens.errors import ForwardFailed, LossFailed
from flatlens.problem.loss import Loss
from flatlens.problem.plain import NO_LOOP
from flatlens.userfile import said, users_code


@contextmanager
def losing(loss: Loss, where: str, f: Tensor, y: Any) -> Iterator[None]:
    """Raise any exception of the loss as one line that says where in the data it happened."""

    def failed(line: str) -> LossFailed:
        return LossFailed(f"Problem(loss={loss}): the loss failed on {where} ({line}): {_mend_of_loss(line, f, y)}")

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
        if NO_LOOP in line:
            return ForwardFailed(f"Problem(model=...): forward failed on {where} ({line})")
        inputs = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        mend = _mend_of_forward(line, model, inputs, itself)
        return ForwardFailed(f"Problem(model=...): forward failed on {where} ({line}): {mend}")

    return failed


def _mend_of_forward(line: str, model: nn.Module | None, inputs: list[Tensor], itself: Any) -> str:
    """Return the cause of an error of forward() as far as it can be told, and what to do."""
    name = getattr(getattr(type(model), "forward", None), "__qualname__", "")
    if name and f"{name}() " in line and re.match("TypeError: .*(missing|takes|unexpected)", line):
        return (
            "it does not take the inputs that the data give: give several as a tuple, ((x, mask), y), or in a dict by "
            "their names, or call the network yourself: forward=(model, batch) -> (outputs, targets)"
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
        told, known = re.subn(r"(?<=forward failed on )[^(]*(?= \()", lambda _: place, str(error), count=1)
        raise ForwardFailed(told) if known else forward_failed(place)(said(cause)) from cause


def _kind(y: Any) -> str:
    return f"shape {tuple(y.shape)} and {y.dtype}" if isinstance(y, Tensor) else f"type {type(y).__name__}"
