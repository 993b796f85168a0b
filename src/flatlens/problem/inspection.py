"""Checks of model, loss and data together when a Problem is made: on the first batch, then on every batch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from flatlens.errors import BadData, BadInput, BadLoss, BadModel, ForwardFailed, LossFailed
from flatlens.problem.calls import Convention, convention_of
from flatlens.problem.data import (
    FORWARD_CHUNK,
    Batch,
    Data,
    checksum,
    finite,
    require_finite,
    select,
    size,
    spaced,
    take,
)
from flatlens.problem.loss import Loss
from flatlens.problem.ranks import Ranks
from flatlens.problem.sequences import Tokens
from flatlens.problem.shapes import of_form
from flatlens.userfile import said, users_code

_PROBE = 8  #: samples in a probe


class Unchecked(Protocol):
    """A Problem that is being made: the part of it that the checks use."""

    data: Data
    loss: Loss
    ranks: Ranks
    ghost_batch: int | None

    @property
    def coupled(self) -> bool:
        """See `Problem.coupled`."""

    def batches(self, most: int) -> Iterator[Batch]:
        """See `Problem.batches`."""

    def shared(self, most: int) -> Iterator[tuple[int, Batch]]:
        """See `Problem.shared`."""

    def place(self, batch: Batch) -> Batch:
        """See `Problem.place`."""

    def run(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """See `Problem.run`."""


@dataclass(frozen=True, eq=False)
class Contents:
    """The size of a data set, as found by running the model on all of it."""

    n: int  #: samples
    outputs: int  #: N; with one row per token, N of the longest batch
    mass: float  #: sum of the samples' masses
    probes: list[Batch]  #: a few samples from all over the data; empty for held-out data


def first_convention(problem: Unchecked, model: nn.Module) -> Convention:
    """Return how the network reads labels, from the first batch; in a pair (x, labels) they lie as they are given."""
    for raw in problem.batches(256):
        batch = problem.place(raw)
        if problem.data.labelled:
            with _retold("the first batch"), users_code(forward_failed("the first batch")):
                return convention_of(model, *batch)
        break
    return Convention()


def check_first(problem: Unchecked, model: nn.Module) -> Loss:
    """Refuse a model or data that differ when used twice, on the first batch; return the loss for its outputs.

    For outputs with one row per token, the loss becomes one of sequences.
    """
    first = next(problem.batches(256), None)
    if first is None or size(first) == 0:
        raise BadData("Problem(data=...): the data is empty: at least one sample is needed")
    for _ in problem.batches(256):  # read again from the start: the first batch must come back the same
        break
    require_finite(first, f"Problem({problem.data.where})")
    problem.ranks.require_same(
        lambda: [checksum(x) for x in tree_leaves(first) if isinstance(x, Tensor)], "first samples"
    )
    with _retold("the first batch"):
        once, y = problem.run(model, problem.place(first))
    loss = of_form(problem.loss, y)
    with _losing(loss, "the first batch", once, y):
        loss = loss.settled(once, y)
        loss.check(once, y)
    again, _ = problem.run(model, problem.place(first))  # a fresh copy: forward() may write to its input
    if not finite(once):
        return loss  # check_all names the sample
    apart = _largest_difference(once, again)
    scale = float(once.abs().max()) + 1e-30
    eps = torch.finfo(once.dtype).eps
    if apart > 100 * eps * scale:
        raise BadModel(
            f"Problem(model=...): the model gave different outputs for the same batch twice (max difference "
            f"{apart:.2g}). It runs in eval mode here: is there a functional dropout, or noise drawn inside "
            f"forward()?"
        )
    return loss


def check_all(problem: Unchecked, model: nn.Module, data: Data) -> Contents:
    """Run the model on all of `data` and return its size; refuse values, outputs and losses that are not finite."""
    own = data is problem.data
    given = "the data" if own else "the held-out data"
    n, outputs, mass = 0, 0, 0.0
    few: dict[int, Batch] = {}
    shared = problem.shared(FORWARD_CHUNK) if own else data.shared(FORWARD_CHUNK, problem.ranks)
    for turn, (number, raw) in enumerate(shared):
        require_finite(raw, f"Problem({data.where})")
        if own and turn & (turn - 1) == 0:  # chunks 0, 1, 2, 4, 8, ...
            few[number] = spaced(raw, _PROBE)
        if own and problem.coupled and size(raw) < 2:
            raise BadInput(
                f"Problem(ghost_batch={problem.ghost_batch}): the last ghost batch would have one sample alone: leave "
                f"this sample out, or choose another size"
            )
        with _retold(partial(_failing_sample, problem, model, raw, n, given)):
            f, y = problem.run(model, problem.place(raw))
        if not finite(f):
            bad = n + int((~torch.isfinite(f)).any(1).nonzero()[0])
            raise BadModel(
                f"Problem({data.where}): the model's output for sample {bad} is NaN or inf, though weights and "
                f"data are finite: do activations overflow {f.dtype}? dtype=torch.float64 may help"
            )
        if outputs not in (0, f.shape[1]) and not isinstance(y, Tokens):
            raise BadModel(
                f"Problem({data.where}): the model gives {outputs} outputs for the samples before {n}, and "
                f"{f.shape[1]} for sample {n}: give every sample the same number"
            )
        if len(f) > 1 and not problem.coupled:
            _require_samples_apart(problem, model, raw, f)
        _require_losses(problem.loss, f.to(torch.float64), y, n, data.where)
        n, outputs, mass = n + len(f), max(outputs, f.shape[1]), mass + float(problem.loss.mass(f, y).sum())
    ns, widths, masses = zip(*problem.ranks.together((n, outputs, mass)), strict=True)
    n, outputs, mass = sum(ns), max(widths), sum(masses)
    probes = problem.ranks.in_order(few) if own else []
    data.counted(n)
    if n == 0:
        raise BadData(f"Problem({data.where}): the data is empty: at least one sample is needed")
    if mass <= 0:
        raise BadData(
            f"Problem({data.where}): every target is ignored (ignore_index) or has class weight 0: at least one must "
            f"count"
        )
    return Contents(n, outputs, mass, probes)


def _require_samples_apart(problem: Unchecked, model: nn.Module, raw: Batch, f: Tensor) -> None:
    """Refuse a batch whose outputs differ from those of its two random halves.

    Derivatives would not show a coupling through detached values, such as a detached mean over the batch.
    """
    order = torch.randperm(len(f), generator=torch.Generator().manual_seed(len(f)))
    for rows in (part.sort().values for part in order.chunk(2)):
        alone, whole = problem.run(model, problem.place(select(raw, rows)))[0], f[rows.to(f.device)]
        apart, scale = _largest_difference(whole, alone), float(f.abs().max()) + 1e-30
        if apart > 1e4 * torch.finfo(f.dtype).eps * scale:
            raise BadModel(
                f"Problem(model=...): a sample's outputs change with the other samples of its batch (difference "
                f"{apart:.2g}), so per-sample derivatives do not exist. If a BatchNorm without running statistics "
                f'causes this, batchnorm="train" with ghost_batch=k measures it in batches of k'
            )


def _failing_sample(problem: Unchecked, model: nn.Module, raw: Batch, start: int, given: str) -> str:
    """Return the sample of a chunk on which forward() fails, found by halving."""
    low, high, where = 0, size(raw), f"samples {start} to {start + size(raw) - 1} of {given}"
    while high - low > 1:
        middle = (low + high) // 2
        for part in ((low, middle), (middle, high)):
            try:
                problem.run(model, problem.place(take(raw, *part)))
            except ForwardFailed:
                low, high = part
                break
        else:
            return where  # it fails only on several together
    return f"sample {start + low} of {given}"


def _require_losses(loss: Loss, f: Tensor, y: Any, start: int, given: str) -> None:
    """Refuse losses that are not finite, or that couple samples; the chunk begins at sample `start`."""
    where = f"samples {start} to {start + len(f) - 1} of the data"
    try:
        with _losing(loss, where, f, y):
            values = loss.check(f, y)
    except BadData as error:
        raise BadData(f"{str(error).replace('data=...', given, 1)} ({where})") from error
    if not finite(values):
        bad = start + int((~torch.isfinite(values)).nonzero()[0])
        raise BadLoss(
            f"Problem(loss={loss}): the loss of sample {bad} is NaN or inf: do its target and the loss fit together? "
            f"(A target that is ignored needs nn.CrossEntropyLoss.)"
        )
    with _losing(loss, where, f, y):
        loss.require_apart(f, y)


@contextmanager
def _losing(loss: Loss, where: str, f: Tensor, y: Any) -> Iterator[None]:
    """Raise any exception of the loss as one line that says where in the data it happened."""

    def failed(line: str) -> LossFailed:
        mend = f"do the targets, of {_kind(y)}, fit outputs of shape {tuple(f.shape)}, and is it differentiable?"
        if f.dtype == torch.float64 and re.search(r"\b(dtype|scalar type)\b", line):
            mend = (
                "the loss gets float64 outputs: cast its own tensors with .to(outputs.dtype), or, for class weights, "
                "give nn.CrossEntropyLoss(weight=...)"
            )
        if isinstance(y, list | tuple) and any(isinstance(one, str) for one in y):
            mend = "the labels are text: number the classes 0, 1, ..."
        return LossFailed(f"Problem(loss={loss}): the loss failed on {where} ({line}): {mend}")

    with users_code(failed):
        try:
            yield
        except LossFailed as error:
            raise error.__cause__ or error from None


def _largest_difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of entries; infinite if one is NaN or the shapes differ."""
    apart = float((one - other).abs().max()) if one.shape == other.shape else math.inf
    return math.inf if math.isnan(apart) else apart


def forward_failed(where: str) -> Callable[[str], ForwardFailed]:
    """Return the function that makes one line about an exception into the error of a failed forward()."""
    return lambda line: ForwardFailed(
        f"Problem(model=...): forward failed on {where} ({line}): do the data's shapes and types fit the model?"
    )


@contextmanager
def _retold(where: str | Callable[[], str]) -> Iterator[None]:
    """Add to the error of a failed forward() where in the data it happened."""
    try:
        yield
    except ForwardFailed as error:
        cause = error.__cause__ or error
        raise forward_failed(where if isinstance(where, str) else where())(said(cause)) from cause


def _kind(y: Any) -> str:
    return f"shape {tuple(y.shape)} and {y.dtype}" if isinstance(y, Tensor) else f"type {type(y).__name__}"
