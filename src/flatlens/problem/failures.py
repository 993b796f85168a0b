"""The errors of a user's own code, told in one line: the forward pass of the network, and the loss."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flatlens.errors import ForwardFailed, LossFailed
from flatlens.problem.loss import Loss
from flatlens.userfile import said, users_code


@contextmanager
def losing(loss: Loss, where: str, f: Tensor, y: Any) -> Iterator[None]:
    """Raise any exception of the loss as one line that says where in the data it happened."""

    def failed(line: str) -> LossFailed:
        mend = f"do the targets, of {_kind(y)}, fit outputs of shape {tuple(f.shape)}, and is it differentiable?"
        if f.dtype == torch.float64 and re.search(r"\b(dtype|scalar type)\b", line):
            mend = (
                "the loss gets float64 outputs: cast its own tensors with .to(outputs.dtype), or, for class weights, "
                "give nn.CrossEntropyLoss(weight=...)"
            )
        if "'Tensor' object has no attribute" in line:
            mend = (
                "the loss gets .logits of what the network returns, where it has them (those of a Categorical are "
                "normalised), else its tensor: compute the loss from a tensor"
            )
        if isinstance(y, list | tuple) and any(isinstance(one, str) for one in y):
            mend = "the labels are text: number the classes 0, 1, ..."
        return LossFailed(f"Problem(loss={loss}): the loss failed on {where} ({line}): {mend}")

    with users_code(failed):
        try:
            yield
        except LossFailed as error:
            raise error.__cause__ or error from None


def forward_failed(where: str) -> Callable[[str], ForwardFailed]:
    """Return the function that makes one line about an exception into the error of a failed forward()."""

    def failed(line: str) -> ForwardFailed:
        mend = "do the data's shapes and types fit the model?"
        if "type" in line and len({word.lower() for word in re.findall("BFloat16|Half|Float|Double", line, re.I)}) > 1:
            mend = (
                "does forward() cast to a fixed dtype? The network may be measured in a copy of another dtype: cast to "
                "the weight's, as in x.to(self.layer.weight.dtype)"
            )
        return ForwardFailed(f"Problem(model=...): forward failed on {where} ({line}): {mend}")

    return failed


@contextmanager
def retold(where: str | Callable[[], str]) -> Iterator[None]:
    """Add to the error of a failed forward() where in the data it happened."""
    try:
        yield
    except ForwardFailed as error:
        cause = error.__cause__ or error
        raise forward_failed(where if isinstance(where, str) else where())(said(cause)) from cause


def _kind(y: Any) -> str:
    return f"shape {tuple(y.shape)} and {y.dtype}" if isinstance(y, Tensor) else f"type {type(y).__name__}"
