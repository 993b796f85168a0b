"""The call of a network on the inputs of a batch, and the output that its answer holds."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatlens.errors import BadData
from flatlens.problem.batches import counts_samples
from flatlens.problem.state import differentiable

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
        raise BadData(f"Problem(data=...): {_UNKNOWN}")
    for shift in (0, 1):
        if _is_slope(slope, f, F.pad(y[rows], (0, shift), value=_IGNORED)[:, shift:]):
            return Convention(fed, bool(shift), by_token=True)
    raise BadData(f"Problem(data=...): {_UNKNOWN}")


_UNKNOWN = (
    "the network's own loss of the labels is the cross-entropy neither of each token nor of the next token, so it is "
    "not known which output belongs to which label: give forward=(model, batch) -> (outputs, targets)"
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
