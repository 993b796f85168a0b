"""Training data on the network's device, with targets in the form that the loss takes; evaluation over all of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flatlens.curvature.space import norm
from flatlens.errors import BadData, BadInput, BadModel, one_line, typed_line
from flatlens.problem.batches import require_finite
from flatlens.problem.eval_context import modes_kept
from flatlens.training.objective import InputJacobian, accuracy
from flatlens.training.settings import Training

SAMPLES_AT_ONCE = 1024  #: samples that a look at the loss sends through the network at a time
HARD = 8  #: an eighth of the samples is tried first, to see whether a look at all data could end a run
LOSS_MARGIN = 1e-3  #: relative; a sample's loss has other rounding errors in another batch
LOSS_ROUNDING = 1e-4  #: mean loss, for outputs of size 1, above which those errors are well below `LOSS_MARGIN`
FAR_FROM_OVERFLOW = 1e15  #: of outputs: their squares are far from float32's largest number
Pair: TypeAlias = tuple[Tensor, Tensor]


class TrainingData:
    """Data on the network's device, with targets ready for the loss."""

    def __init__(self, model: nn.Module, data: Pair, settings: Training, what: str) -> None:
        x, y = data
        if len(x) != len(y) or not len(x):
            counts = f"{len(x)} inputs and {len(y)} targets"
            raise BadData(counts, argument=what, remedy="give as many of each, at least one", call="train")
        require_finite((x, y), what, "train")
        device = next(model.parameters()).device
        self.model, self.loss = model, settings.objective
        self.x, self.y = x.to(device), y.to(device)
        self.targets = self.loss.targets(self.y, first_outputs(model, self.x, what), what)
        self.hardest: Tensor | None = None  #: samples with the largest losses at the last look
        self.shown = -math.inf  #: what their losses showed when they were last seen: a lower bound of the loss

    def look(self) -> list[float]:
        """Return the loss and the accuracy over all of the data."""
        with evaluating(self.model), torch.no_grad():
            outputs = torch.cat([self.model(x) for x, _ in self._pieces()])
        values = self.loss.values(outputs, self.targets)
        self.hardest = values.topk(-(-len(values) // HARD)).indices
        self.shown = self._bound(outputs[self.hardest], values[self.hardest])
        return [float(values.to(torch.float64).mean()), accuracy(outputs, self.y)]

    def surely_above(self, bound: float) -> bool:
        """Return whether the samples with the largest losses at the last look prove that the loss is above `bound`."""
        # Losses are not negative: their sum over n is at most the loss of all. What proved nothing is not tried again
        by_batch = any(isinstance(m, _BatchNorm) and m.running_mean is None for m in self.model.modules())
        if self.hardest is None or not self.shown > bound or by_batch:
            return False
        with evaluating(self.model), torch.no_grad():
            outputs = self.model(self.x[self.hardest])
        self.shown = self._bound(outputs, self.loss.values(outputs, self.targets[self.hardest]))
        return self.shown > bound

    def _bound(self, outputs: Tensor, values: Tensor) -> float:
        """Return what some samples' losses are of the loss over all data, less rounding; -inf if it could overflow."""
        size, total = float(outputs.abs().max()), float(values.to(torch.float64).sum())
        if not (size < FAR_FROM_OVERFLOW and math.isfinite(total)):
            return -math.inf
        exact = total > len(values) * LOSS_ROUNDING * (1 + size * size)
        return total / len(self.x) / (1 + LOSS_MARGIN) if exact else 0.0

    def gradient_norm(self, parameters: Sequence[Tensor]) -> float:
        """Return ||dL/dtheta||, L the mean loss over all of the data, in eval mode."""
        total = [torch.zeros_like(p) for p in parameters]
        with evaluating(self.model):
            for x, targets in self._pieces():
                share = self.loss.values(self.model(x), targets).sum() / len(self.x)
                slopes = torch.autograd.grad(share, parameters, allow_unused=True)
                total = [t if g is None else t + g for t, g in zip(total, slopes, strict=True)]
        return norm(total)

    def _pieces(self) -> Iterator[Pair]:
        """Yield (inputs, targets) in chunks; the inputs are copies, because a network may write to its input."""
        parts = (torch.split(each, SAMPLES_AT_ONCE) for each in (self.x, self.targets))
        yield from ((x.clone(), targets) for x, targets in zip(*parts, strict=True))


def pair(data: object, what: str) -> Pair:
    """Return inputs and targets, given as tensors or arrays, as tensors."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        got = f"{type(data).__name__}{f' of {len(data)}' if isinstance(data, tuple | list) else ''}"
        said = f"expected a pair (inputs, targets), got a {got}; a Split has .train and .test"
        raise BadData(said, argument=what, call="train")
    try:
        x, y = (torch.as_tensor(part) for part in data)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadData(f"expected tensors or arrays ({one_line(error)})", argument=what, call="train") from error
    return x, y


def first_outputs(model: nn.Module, x: Tensor, what: str) -> Tensor:
    """Return the outputs of the network for one sample, (1, N)."""
    try:
        with evaluating(model), torch.no_grad():
            outputs = model(x[:1].clone())
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        failed = f"forward failed on the first sample of {what}=... ({typed_line(error, 200)})"
        raise BadModel(f"{failed}: do its shape and dtype fit?", call="train") from error
    if not isinstance(outputs, Tensor) or outputs.ndim != 2:
        got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise BadModel(f"expected outputs of shape (n, N), got {got}", call="train")
    return outputs


def require_trainable(model: nn.Module, data: Pair, settings: Training) -> None:
    """Refuse a network with nothing to train, conditions that cannot hold, and BatchNorm of a single sample."""
    x, y = data
    n = max(len(x), 1)
    if settings.until.accuracy is not None and y.is_floating_point():
        needed = "accuracy needs integer class labels, and the targets are not: leave accuracy out"
        raise BadInput(f"Until(accuracy=...): {needed}")
    if any(isinstance(p, InputJacobian) for p in settings.penalties) and not x.is_floating_point():
        whole = "the inputs are not floating numbers, so there is no derivative with respect to them"
        raise BadInput(f"InputJacobian: {whole}: leave this penalty out")
    if settings.mixup is not None and not x.is_floating_point():
        raise BadInput("Mixup: the inputs are not floating numbers and cannot be averaged: leave mixup out")
    if not any(p.requires_grad for p in model.parameters()):
        raise BadModel("no parameter has requires_grad=True, so there is nothing to train", call="train")
    batch = min(settings.batch_size or n, n)
    last = n % batch or batch
    ghost = settings.ghost_batch or batch
    parts = {min(ghost, size - start) for size in (batch, last) for start in range(0, size, ghost)}
    if 1 in parts and any(isinstance(module, _BatchNorm) for module in model.modules()):
        sizes = f"Training(batch_size={settings.batch_size}, ghost_batch={settings.ghost_batch})"
        alone = f"with {n} samples, the last batch has one sample, which BatchNorm cannot normalise"
        raise BadInput(f"{sizes}: {alone}: choose a size that leaves no rest of 1")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode inside this context; restore every module's mode afterwards."""
    with modes_kept(model):
        model.eval()
        yield
