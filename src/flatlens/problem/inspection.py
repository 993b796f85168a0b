"""Checks of model, loss and data together when a Problem is made: on the first batch, then on every batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from flatlens.errors import BadData, BadInput, BadLoss, BadModel, ForwardFailed, Give, NotAlike, Words
from flatlens.problem.batches import FORWARD_CHUNK, Batch, checksum, finite, require_finite, select, size, spaced, take
from flatlens.problem.data import CHOICE, Data
from flatlens.problem.diagnosis import (
    forward_failed,
    if_found,
    is_random,
    losing,
    retold,
    training_in,
    why_coupled,
    why_not_finite,
    why_random,
)
from flatlens.problem.eval_context import copy_of, differentiable, original_of, size_of_parts
from flatlens.problem.forward import ROUNDING, NetworkOnData, Seen, combined, convention_of
from flatlens.problem.loss import Loss
from flatlens.problem.loss_checks import require_apart, require_no_weights, same_targets
from flatlens.problem.ranks import require_all_processes
from flatlens.problem.row_layout import (
    RowLayout,
    hidden_labels,
    ignored_outputs,
    in_doubt,
    known_as_tokens,
    laid_out,
    token_mask,
)
from flatlens.progress import count_of
from flatlens.user_code import said, users_code

Outputs: TypeAlias = tuple[Tensor, Any]
"""Outputs (n, N) and targets, as `problem.run` returns them."""

_PART = 0.45  #: share of a batch that is run alone; with the probes, all passes are one and a half
_PROBE = 8  #: samples in a probe
_MASKED = -1e9  #: an output whose exp() is 0
_AS_ONE = (
    "give samples that influence each other, such as the nodes of a graph, as one sample, x[None] (docs/recipes.md)"
)


def require_same_everywhere(problem: NetworkOnData) -> None:
    """Refuse a network or data that are not the same in all processes that measure together.

    Not compared: parameters that are spread over the processes and, of a loader's samples, all but the first batch.
    """
    require_all_processes(problem.model)
    if problem.sharded and problem.ranks.size > 1:
        raise BadInput(
            "the network's parameters are spread over the processes, each of which reads all the data: leave ranks out",
            argument="ranks",
        )

    def facts() -> dict[tuple[str, str], object]:
        tensors = (("weights", problem.model.named_parameters()), ("buffers", problem.model.named_buffers()))
        own = [(of, name, tensor) for of, named in tensors for name, tensor in named if not hasattr(tensor, "to_local")]
        given = filter(None, (problem.data, problem.test))
        of_data = {(data.where, name): fact for data in given for name, fact in data.facts.items()}
        return {(of, name): checksum(tensor) for of, name, tensor in own} | of_data

    found = problem.peers.apart(facts)
    if found is None:
        return
    (of, name), others = found
    if of in ("weights", "buffers"):
        cause = (
            "give all processes the same weights (set the seed before building the model)" if of == "weights" else
            "each process may take running statistics from its own samples: broadcast rank 0's before "
            "measuring (for b in model.buffers(): torch.distributed.broadcast(b, 0)), or train with SyncBatchNorm"
        )  # fmt: skip
        raise NotAlike(f"the {of} of {others} differ from those of rank 0, the first in {name!r}", remedy=cause)
    if name == CHOICE:
        raise BadData(
            f"the loader picks other samples in {others} than in rank 0 (a DistributedSampler, a loader of "
            "accelerate, an unseeded sampler?): give every process the data set itself, or a loader of all of it",
            argument=of,
        )
    raise BadData(
        f"the {name} of {others} differ from those of rank 0",
        argument=of,
        remedy="give every process all of the data, in the same order (set the seed before drawing or splitting it)",
    )


def check_first(
    problem: NetworkOnData, model: nn.Module, first_run: AbstractContextManager[object] | None = None
) -> tuple[Loss, Outputs | None]:
    """Refuse a model or data that differ when used twice, on the first batch; the network runs first in `first_run`.

    Note how the network reads labels that came in a dict; in a pair (x, labels) they lie as they are given.

    Returns the loss for its outputs, and what the network gave for the batch; None where the loss changes its form.
    """
    first = next(problem.batches(FORWARD_CHUNK), None)
    if first is None or size(first) == 0:
        raise BadData("the data is empty", argument="data", remedy="give at least one sample")
    if problem.forward is None and problem.data.labelled:
        with retold("the first batch"), users_code(partial(forward_failed, where="the first batch")):
            problem.convention = convention_of(model, *problem.place(first))
    for _ in problem.batches(FORWARD_CHUNK):  # read again from the start: the first batch must come back the same
        break
    require_finite(first, problem.data.where)
    with retold("the first batch"), first_run or nullcontext():
        once, y = problem.run(model, problem.place(first))
    loss = laid_out(problem.loss, y)
    with losing(loss, "the first batch", once, y):
        loss = loss.settled(once, y)
        loss.check(once, y)
    if not finite(once):
        return loss, None  # check_all names the sample
    # what is random, or has a state, shows in a few samples, or in the part that is run alone
    few = first if problem.coupled or problem.forward is not None else spaced(first, _PROBE)
    with _together(size(first), size(few)):
        before = once if few is first else _outputs(problem, model, few)
        targets = _require_same_again(problem, model, few, before)
    if problem.forward is not None and not same_targets(y, targets, 100):
        alike = partial(same_targets, roundings=100)
        why = "it draws random numbers: draw beforehand, and give the targets with the data"
        if not if_found(lambda: "yes" * is_random(lambda: problem.run(model, problem.place(first))[1], alike)):
            why = "not because of random numbers of torch, NumPy or Python: compute them once, give them with the data"
        elif name := if_found(lambda: training_in(problem.forward)):
            why = f"the network {name} that it uses is in train mode, and draws random numbers: call eval() on it"
        raise BadData("forward= returned different targets for the same batch twice", argument="forward", remedy=why)
    return loss, None if isinstance(y, RowLayout) else (once, y)


def _require_same_again(problem: NetworkOnData, model: nn.Module, batch: Batch, before: Tensor) -> Any:
    """Refuse a network that gives other outputs for a batch than `before`; return the targets."""
    again, targets = problem.run(model, problem.place(batch))  # a fresh copy: forward() may write to its input
    most = 100 * torch.finfo(before.dtype).eps * (float(before.abs().max()) + 1e-30)
    apart = _largest_difference(before, again)
    if apart > most:
        run = partial(_outputs, problem, model, batch)
        why = if_found(lambda: why_random(model, run, lambda a, b: _largest_difference(a, b) <= most))
        raise BadModel(
            f"the model gave different outputs for the same batch twice (max difference {apart:.2g})",
            remedy=why or "random numbers or a state in forward() are possible",
        )
    return targets


def _outputs(problem: NetworkOnData, model: nn.Module, batch: Batch) -> Tensor:
    return problem.run(model, problem.place(batch))[0]


@dataclass(frozen=True)
class Contents:
    """Sums over the chunks of a data set."""

    n: int = 0  #: samples
    outputs: int = 0  #: N; with one row per token, N of the longest batch
    mass: float = 0.0  #: sum of the samples' masses
    sums: Tensor | float = 0.0  #: of the targets, for the best constant fit; NaN where it is not known
    readings: frozenset[str] = frozenset()  #: as what outputs of tokens are read
    doubt: str = ""  #: the words on the first chunk whose shapes have two meanings
    hidden: int = 0  #: tokens with a label that attention_mask hides
    labelled: int = 0  #: all tokens with a label

    def __add__(self, other: Contents) -> Contents:
        return Contents(
            self.n + other.n, max(self.outputs, other.outputs), self.mass + other.mass, self.sums + other.sums,
            self.readings | other.readings, self.doubt or other.doubt, self.hidden + other.hidden,
            self.labelled + other.labelled,
        )  # fmt: skip


def probed_together(data: Data, n: int) -> int:
    """Return of how many of n samples a plan holds graphs at once: of the first probe, and of another one."""
    return min(n, _PROBE * (1 + (n > FORWARD_CHUNK or data.in_batches)))


def check_all(
    problem: NetworkOnData, model: nn.Module, data: Data, first: Outputs | None = None
) -> tuple[Contents, list[Batch], Seen]:
    """Run the model on all of `data`, the first batch if it has not run; refuse what is not finite.

    Returns the size of the data; a few samples from all over it, none of held-out data; the outputs.
    """
    own, seen, found = data is problem.data, Seen(), Contents()
    few: dict[int, Batch] = {}
    with problem.ranks.as_one():
        shared = problem.shared(FORWARD_CHUNK) if own else data.shared(FORWARD_CHUNK, problem.ranks)
        for turn, (number, raw) in enumerate(shared):
            f, y = _checked(problem, model, raw, found, data, first if number == 0 else None)
            seen.note(number, f)
            hidden = hidden_labels(y, problem.loss.ignore_index) if problem.forward is None else (0, 0)
            readings = frozenset() if token_mask(y) is None else frozenset({y.reading})
            mass, sums = float(problem.loss.mass(f, y).sum()), problem.loss.target_sums(f, y)
            found += Contents(
                len(f), f.shape[1], mass, math.nan if sums is None else sums, readings, in_doubt(y), *hidden
            )
            if own and turn & (turn - 1) == 0:  # chunks 0, 1, 2, 4, 8, ...
                few[number] = spaced(raw, _PROBE)
    # all ranks go on with the same numbers
    found = sum(problem.ranks.together(found), Contents())
    data.hidden = "" if not found.hidden else (
        f"{found.hidden} of {found.labelled} tokens with a label do not count, because attention_mask hides them as "
        f"padding (the mean over all labels, such as a network's own loss, counts them)"
    )  # fmt: skip
    data.reading = found.doubt
    if "tokens" in found.readings:  # a sample of other data, or a batch of square outputs, need not show it
        problem.loss = known_as_tokens(problem.loss)
        data.reading = problem.data.reading = ""
    probes = problem.ranks.in_order(few) if own else []
    data.counted(found.n)
    if found.n == 0:
        raise BadData("the data is empty", argument=data.where, remedy="give at least one sample")
    if found.mass <= 0:
        raise BadData(
            "every target is ignored (ignore_index) or has class weight 0: at least one must count", argument=data.where
        )
    seen.join(problem.ranks)
    return found, probes, seen


def _checked(
    problem: NetworkOnData, model: nn.Module, raw: Batch, before: Contents, data: Data, known: Outputs | None
) -> Outputs:
    """Return the outputs, unless they are known, and targets of a chunk after `before`; refuse what is unfit."""
    own, n = data is problem.data, before.n
    require_finite(raw, data.where)
    if own and problem.coupled and size(raw) < 2:
        raise BadInput(
            "the last ghost batch would have one sample alone: leave this sample out, or choose another size",
            argument="ghost_batch",
            value=problem.ghost_batch,
        )
    given = "the data" if own else "the held-out data"
    with retold(partial(_failing_sample, problem, model, raw, n, given)):
        f, y = problem.run(model, problem.place(raw)) if known is None else known
    if not finite(f):
        bad = n + int((~torch.isfinite(f)).any(1).nonzero()[0])
        raise BadModel(
            f"the model's output for sample {bad} is NaN or inf, though weights and data are finite",
            argument=data.where,
            remedy=_why_not_finite(problem, model, raw, bad - n, f, y),
        )
    if before.outputs not in (0, f.shape[1]) and token_mask(y) is None:
        raise BadModel(
            f"the model gives {count_of(before.outputs, 'output')} for the samples before {n}, and {f.shape[1]} for "
            f"sample {n}",
            argument=data.where,
            remedy="give every sample the same number",
        )
    # the loss depends on the weights through the outputs alone
    _require_no_weights(problem, model, raw, n)
    # the outputs of a sample do not depend on the others, and neither does its loss
    if len(f) > 1 and not problem.coupled:
        _require_samples_apart(problem, model, raw, f, y)
    _require_losses(problem, model, f.detach().to(torch.float64), y, n, data.where)
    return f, y


def _require_no_weights(problem: NetworkOnData, model: nn.Module, raw: Batch, start: int) -> None:
    """Refuse a loss that leads to weights through targets of forward=, or through what the network keeps of a pass.

    A graph shows it: that of two samples, as no more may fit. (Of a network in parts this pass might leave the parts
    gathered.) Weights that the loss reads itself are seen on the whole chunk.
    """
    weights = _weights(problem, model)
    if problem.sharded or not weights or (problem.loss.apart and problem.forward is None):
        return
    with torch.enable_grad(), differentiable(weight for _, weight in weights):
        few = raw if problem.coupled else spaced(raw, 2)
        with _together(size(raw), size(few)):
            f, y = problem.run(model, problem.place(few))
        f = f.detach().to(torch.float64)
        with losing(problem.loss, f"samples of the chunk from sample {start} on", f, y):
            require_no_weights(problem.loss.name, problem.loss.values(f, y), weights)


def _weights(problem: NetworkOnData, model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the measured parameters, and the network's own beside a copy in another dtype: a loss may read them."""
    networks = [model] if model is problem.model or original_of(model) is not None else [model, problem.model]
    return [named for one in networks for named in one.named_parameters() if named[0] in problem.parameters]


def _require_samples_apart(problem: NetworkOnData, model: nn.Module, raw: Batch, f: Tensor, y: Any) -> None:
    """Refuse a batch whose outputs, or targets of forward=, differ from those of a random part of it, or of pairs.

    Whatever depends on the other samples, or on the position in the batch, changes in a part. The pairs are those with
    the smallest outputs, and with the largest. Derivatives would not show a coupling through detached values, such as a
    detached mean over the batch.
    """
    order = torch.randperm(len(f), generator=torch.Generator().manual_seed(len(f)))

    @cache
    def of_parts() -> float:  # the size of parts that may cancel in the outputs; 0 if it is not known
        with suppress(BadModel, ForwardFailed):
            if not problem.sharded:
                return size_of_parts(model, "a check", lambda moved: _outputs(problem, moved, raw))
        return 0.0

    by_size = combined(f).cpu().argsort()
    pairs = (by_size[:2], by_size[-2:]) if len(f) > 4 else ()
    for rows in (part.sort().values for part in (order[: math.ceil(_PART * len(f))], *pairs)):
        with _together(len(f), len(rows)):
            alone, targets = problem.run(model, problem.place(select(raw, rows)))
        whole = f[rows.to(f.device)]
        if alone.shape != whole.shape:
            raise BadModel(
                f"a sample has {count_of(f.shape[1], 'output')} among all {len(f)} samples of its batch, and "
                f"{alone.shape[1]} among {len(rows)}: are sequences padded to the longest of the batch? Pad them "
                "to one length, as pad_packed_sequence(..., total_length=x.shape[1]) does"
            )
        apart, allowed = _largest_difference(whole, alone), ROUNDING * torch.finfo(f.dtype).eps
        if apart > allowed * (float(f.abs().max()) + 1e-30) and apart > allowed * of_parts():
            _require_same_again(problem, model, select(raw, rows), alone)
            some = partial(_outputs, problem, model, select(raw, rows))
            every = partial(_outputs, problem, model, raw)
            why = if_found(partial(why_coupled, model, every, some, rows, len(f), _AS_ONE))
            raise BadModel(
                f"a sample's outputs change with the other samples of its batch (difference {apart:.2g}), so "
                "per-sample derivatives do not exist",
                remedy=why or _AS_ONE,
            )
        if problem.forward is not None and not same_targets(y, targets, ROUNDING, rows, len(f)):
            name = if_found(lambda: training_in(problem.forward))
            eval_it = f"call eval() on {name}, which forward= uses in train mode, or " if name else ""
            raise BadData(
                "a sample's targets change with the other samples of its batch",
                argument="forward",
                remedy=f"{eval_it}compute them on all the data beforehand, and give them with the data",
            )


@contextmanager
def _together(n: int, some: int) -> Iterator[None]:
    """Say that forward() took all samples of a batch, where it fails on some of them."""
    try:
        yield
    except ForwardFailed as error:
        cause = error.__cause__ or error
        raise ForwardFailed(
            f"forward takes {n} samples together, and fails on {some} of them ({said(cause)})",
            remedy=f"{_AS_ONE}; samples of different sizes are a list in the batch, with one item for each",
        ) from cause


def _why_not_finite(problem: NetworkOnData, model: nn.Module, raw: Batch, bad: int, f: Tensor, y: Any) -> Words:
    """Return why the outputs of the chunk `raw` are not finite, the first at sample `bad` of it."""
    if any(not bool((~torch.isfinite(f) & ~ignored).any()) for ignored in ignored_outputs(problem.loss, f, y)):
        return (
            "all lie where the labels or the mask ignore them (0 * NaN is NaN, in sums and in derivatives): let the "
            "network give finite numbers there (attention does if an ignored token attends to itself), or leave them "
            "out of the data"
        )

    sample = select(raw, torch.tensor([bad]))
    narrow, wide = f.dtype != torch.float64 and not problem.sharded, problem.changed(dtype=torch.float64)
    if narrow and if_found(lambda: "yes" * finite(_outputs(wide, copy_of(model, "a cause").double(), sample))):
        return "activations overflow float32: ", Give("dtype", torch.float64), " measures it"
    why = if_found(lambda: why_not_finite(model, partial(_outputs, problem, model, sample)))
    why = why or "numbers that overflow, or an operation without a finite result, are possible"
    # if nothing else is amiss, the losses are finite with another number in place of -inf
    masked = f == -math.inf
    filled = f.to(torch.float64).masked_fill(masked, _MASKED)
    if bool(masked.any()) and if_found(lambda: "yes" * finite(problem.loss.values(filled, y))):
        why += f"; if it masks outputs by -inf, a large negative number in its place, such as {_MASKED:g}, is finite"
    return why


def _failing_sample(problem: NetworkOnData, model: nn.Module, raw: Batch, start: int, given: str) -> str:
    # by halving
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


def _require_losses(problem: NetworkOnData, model: nn.Module, f: Tensor, y: Any, start: int, given: str) -> None:
    """Refuse losses that are not finite, read weights, or couple samples; the chunk begins at sample `start`."""
    loss, where = problem.loss, f"samples {start} to {start + len(f) - 1} of the data"
    weights = _weights(problem, model)
    try:
        with losing(loss, where, f, y), torch.enable_grad(), differentiable(weight for _, weight in weights):
            values = loss.check(f, y)
            require_no_weights(loss.name, values, weights)
            values = values.detach()
    except BadData as error:
        at = given if error.argument == "data" else error.argument
        raise error.but(argument=at, where=f"({where})") from error
    if not finite(values):
        bad = start + int((~torch.isfinite(values)).nonzero()[0])
        raise BadLoss(
            f"the loss of sample {bad} is NaN or inf",
            value=loss,
            remedy="do its target and the loss fit together? (A target that is ignored needs nn.CrossEntropyLoss.)",
        )
    with losing(loss, where, f, y):
        require_apart(loss, f, y)


def _largest_difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of entries; infinite if one is NaN or the shapes differ."""
    apart = float((one - other).abs().max()) if one.shape == other.shape else math.inf
    return math.inf if math.isnan(apart) else apart
