"""How a batch becomes outputs, (n, N), and losses: the call of the network, and the reading of its answer."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from flatlens.errors import FORWARD, BadData, BadInput, BadModel
from flatlens.problem.batches import FORWARD_CHUNK, Batch, counts_samples, move, size
from flatlens.problem.data import MOST_IN_BATCH, Data
from flatlens.problem.diagnosis import forward_failed
from flatlens.problem.eval_context import (
    copy_of,
    device_of,
    differentiable,
    measuring,
    put_back,
    size_of_parts,
)
from flatlens.problem.loss import BestConstant, Loss
from flatlens.problem.op_overrides import in_bfloat16
from flatlens.problem.ranks import ALONE, ChunkBuffer, Ranks
from flatlens.problem.row_layout import in_rows
from flatlens.progress import Progress
from flatlens.user_code import users_code

Arithmetic = Literal["full", "tf32", "bfloat16"]


REDUCED_PRECISION = {"tf32": 2.0**-10, "bfloat16": torch.finfo(torch.bfloat16).eps}  #: machine epsilon of each mode


Forward: TypeAlias = Callable[[nn.Module, Batch], tuple[Any, ...]]
"""Maps (model, batch) to (outputs, targets), or to (outputs (n, T, N), targets, mask of counted tokens (n, T))."""

_AT_ONCE = 2**13  #: outputs of a sample that are combined together: many have no float64 copy
ROUNDING = 1e4  #: differences in units of machine epsilon that are rounding
_IGNORED = -100  #: a label that counts as no target, in torch and in transformers


@dataclass(frozen=True)
class Convention:
    """The way in which a network reads a dict with labels, found on the first batch."""

    fed: bool = False  #: whether it gets the labels: an encoder-decoder makes its decoder's inputs from them
    shifted: bool = False  #: whether its outputs at a token are about the next token's label, as a causal model's are
    by_token: bool = False  #: whether its own loss shows that its outputs (n, T, V) are of T tokens


@dataclass(eq=False, repr=False)
class NetworkOnData:
    """A network with its loss and data: how a batch becomes outputs and targets. A `Problem` is a checked one."""

    model: nn.Module
    loss: Loss
    data: Data
    test: Data | None
    forward: Forward | None
    parameters: frozenset[str]  #: names of the measured ones
    dtype: torch.dtype  #: in which a copy is measured
    arithmetic: Arithmetic
    memory: int  #: bytes that the pass may take
    ghost_batch: int | None  #: samples that BatchNorm normalises together; None if samples are not coupled
    ranks: Ranks  #: the processes that share the samples
    # what the checks find
    convention: Convention = Convention()  #: how the network reads labels
    outputs: int = 0  #: N; with one row per token, N of the longest batch
    n: int = 0  #: samples
    mass: float = 0.0  #: sum of the samples' masses
    constant: BestConstant | None = None  #: the best fit by outputs that ignore the input, where it has a formula
    works_in: Arithmetic = "full"  #: `arithmetic` in the pass and in curvature products only
    seen: Seen | None = None  #: the outputs of the first check; None where samples are coupled
    casts: torch.dtype | None = None  #: half type to which forward() casts; it is measured without these casts
    nudge: tuple[int, float] | None = None  #: a seed, and the share by which inputs move (`perturbation.nudges`)
    scale: float = 1.0  #: factor of the loss inside backward passes, a power of 2 (`perturbation.nudges.loss_scaled`)

    def changed(self, **attributes: Any) -> Self:
        """Return the same with other attributes, not checked again."""
        changed = copy.copy(self)
        vars(changed).update(attributes)
        return changed

    def as_asked(self) -> Self:
        """Return the same problem in the requested arithmetic: for the pass and curvature products only."""
        return self if self.arithmetic == "full" else self.changed(works_in=self.arithmetic, seen=None)

    @property
    def coupled(self) -> bool:
        """Return whether samples are coupled, through the statistics of their batch: `batchnorm="train"`."""
        return self.ghost_batch is not None

    @property
    def sharded(self) -> bool:
        """Return whether a parameter is spread over processes: by fully_shard (FSDP2), or by tensor parallelism."""
        return any(hasattr(p, "to_local") for p in self.model.parameters())

    @property
    def bytes_of_weights(self) -> int:
        """Return the bytes of the measured weights, in the dtype in which they are measured."""
        numbers = sum(p.numel() for name, p in self.model.named_parameters() if name in self.parameters)
        return numbers * self.dtype.itemsize

    @property
    def peers(self) -> Ranks:
        """Return the processes that measure together: all over which parameters are spread, or those of `ranks`."""
        return Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size()) if self.sharded else self.ranks

    @property
    def precision(self) -> float:
        """Return the machine epsilon with which derivatives are computed."""
        return REDUCED_PRECISION.get(self.works_in, torch.finfo(self.dtype).eps)

    def measuring(self, model: nn.Module, *, twice: bool = True, plain: bool = False) -> AbstractContextManager[None]:
        """Return the context in which the risk is differentiated; `plain`: always in eval mode and full precision."""
        batch_statistics, tf32 = not plain and self.coupled, not plain and self.works_in == "tf32"
        return measuring(model, batch_statistics=batch_statistics, tf32=tf32, twice=twice, casts=self.casts is not None)

    def derivative(self, of: Tensor, at: Sequence[Tensor], *, again: bool = False) -> list[Tensor | None]:
        """Return the derivative of a scalar in some tensors, `again` with its own graph; None where there is none.

        The backward pass is that of `scale` times the scalar. Powers of 2 change no digit but where numbers underflow.
        """
        start = None if self.scale == 1 else torch.full_like(of, self.scale)
        rows = torch.autograd.grad(of, at, start, create_graph=again, allow_unused=True)
        return [row if row is None or start is None else row / self.scale for row in rows]

    # The data

    def batches(self, most: int) -> Iterator[Batch]:
        """Yield the data in chunks of at most `most` samples; in ghost batches where samples are coupled."""
        return self.data.chunks(most) if self.ghost_batch is None else self.data.in_batches_of(self.ghost_batch)

    def shared(
        self, most: int, ranks: Ranks | None = None, what: str = "", progress: Progress | None = None
    ) -> Iterator[tuple[int, Batch]]:
        """Yield this process's share of `batches(most)`, each with a number for its place; progress is reported."""
        ranks, done = self.ranks if ranks is None else ranks, 0
        if self.ghost_batch is None:
            chunks = self.data.shared(most, ranks)
        else:
            whole = enumerate(self.data.in_batches_of(self.ghost_batch))
            chunks = ((number, batch) for number, batch in whole if ranks.takes(number))
        for number, raw in chunks:
            yield number, raw
            done += size(raw) * ranks.size
            if progress is not None:
                progress(what, min(done, self.n), self.n)

    def place(self, batch: Batch) -> Batch:
        """Return the batch on the model's device, floating tensors in the measured dtype."""
        placed = move(batch, device_of(self.model), self.dtype)
        if self.nudge is None or not isinstance(placed, tuple):
            return placed
        draw, share = torch.Generator().manual_seed(self.nudge[0]), self.nudge[1]
        return tree_map(lambda leaf: nudged(leaf, draw, share), placed[0]), *placed[1:]

    # The forward pass

    def run(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """Return (outputs (n, N), targets) of a placed batch, in the form of `problem.row_layout`."""
        n, itself = size(batch), None if model is self.model else partial(self._itself, batch)
        failed = partial(forward_failed, where=f"a batch of {n} samples", itself=itself)
        cast = in_bfloat16(device_of(model).type) if self.works_in == "bfloat16" else nullcontext()
        put_back(model)
        torch.clear_autocast_cache()  # weights may have moved since an autocast around this call kept casts of them
        # the answer of forward=, or of the network, with the targets and the mask of the tokens that count
        if self.forward is not None:
            with cast, users_code(partial(failed, batch=batch)):
                found = self.forward(model, batch)
            if not isinstance(found, tuple | list) or len(found) not in (2, 3):
                raise BadInput(
                    f"it must return (outputs, targets), or (outputs, targets, mask), got {type(found).__name__}",
                    argument="forward",
                )
            outputs, targets, counted = main_output(found[0]), found[1], found[2] if len(found) == 3 else None
        else:
            if not isinstance(batch, tuple) or len(batch) != 2:
                told = "batches must be pairs (x, y) or dicts with labels"
                if isinstance(batch, Tensor) or (isinstance(batch, tuple) and len(batch) == 1):
                    told = "the data have no targets: give (x, x) for an autoencoder"
                raise BadData((f"{told}; for others give ", FORWARD), argument="data")
            x, targets = batch
            with cast, users_code(partial(failed, model=model, batch=x)):
                outputs = main_output(called(model, x, targets if self.convention.fed else None))
            counted = self.mask(batch)
            if self.convention.by_token and counted is None and isinstance(outputs, Tensor):
                counted = torch.ones(outputs.shape[:2], dtype=torch.bool)
            if self.convention.shifted:
                outputs, targets = outputs[:, :-1], targets[:, 1:]
                counted = None if counted is None else counted[:, 1:]
        # outputs in rows, in the measured dtype
        if isinstance(outputs, Tensor):
            require_numbers(outputs)
            outputs = outputs.to(self.dtype)
        return in_rows(outputs, targets, n, self.loss, counted, self.outputs)

    def _itself(self, batch: Batch) -> object:
        model = copy_of(self.model, "a cause").eval()
        batch = move(batch, device_of(model), next((p.dtype for p in model.parameters()), self.dtype))
        with torch.no_grad():
            return self.forward(model, batch) if self.forward is not None else called(model, batch[0])

    def mask(self, batch: Batch) -> Tensor | None:
        """Return the (n, T) mask, 0 at padding, that a batch feeds to the model as `attention_mask`.

        None for an encoder-decoder, whose outputs and features are of other tokens.
        """
        for part in () if self.convention.fed else batch if isinstance(batch, tuple) else (batch,):
            if isinstance(part, Mapping) and any(str(key).startswith("decoder_") for key in part):
                return None
            mask = part.get("attention_mask") if isinstance(part, Mapping) else None
            if isinstance(mask, Tensor) and mask.ndim == 2:
                return mask
        return None


# The call of the network


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


def require_numbers(outputs: Tensor) -> None:
    """Refuse outputs that are not dense real floating numbers, at least one per sample."""
    if outputs.is_complex():
        raise BadModel(
            "the outputs are complex, but must be real: return, for instance, torch.view_as_real(outputs).flatten(1)"
        )
    if not outputs.is_floating_point():
        raise BadModel(
            f"the outputs are {outputs.dtype}, but must be floating numbers",
            remedy="return them before argmax, rounding or comparison",
        )
    if outputs.is_meta or outputs.layout != torch.strided:
        raise BadModel(
            "the outputs are sparse, or on the meta device, but must be dense numbers",
            remedy="return, for instance, outputs.to_dense()",
        )
    if outputs.ndim > 1 and 0 in outputs.shape[1:]:
        raise BadModel(
            f"the outputs have shape {tuple(outputs.shape)}, with no entries per sample: return at least one output"
        )


def nudged(values: Any, draw: torch.Generator, share: float) -> Any:
    """Return floating numbers, each moved at random by up to this share of its size; all else as it is."""
    if not (isinstance(values, Tensor) and values.is_floating_point()):
        return values
    drawn = torch.rand(values.shape, generator=draw, dtype=torch.float64).to(values)
    return values + share * (2 * drawn - 1) * values


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
    label = inspect.signature(model.forward).parameters["labels"]
    decodes = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    fed = (decodes and not any(str(key).startswith("decoder_") for key in x)) or label.default is label.empty
    if y.ndim != 2 or y.is_floating_point():
        return Convention(fed)
    # two samples with labels are enough
    rows = ((y[:, 1:] != _IGNORED).any(1).nonzero()[:2, 0]).tolist() or [0]
    few = {key: value[rows] if counts_samples(value, len(y)) else value for key, value in x.items()}
    with torch.enable_grad(), differentiable(model.parameters()):
        answer = called(model, few, y[rows])
        f, own = main_output(answer), getattr(answer, "loss", None)
        if not (isinstance(f, Tensor) and f.ndim == 3 and f.shape[:2] == y[rows].shape and isinstance(own, Tensor)):
            return Convention(fed)
        (slope,) = torch.autograd.grad(own.sum(), f, allow_unused=True)
    f = f.detach()
    for shift in (0, 1) if slope is not None else ():
        labels = F.pad(y[rows], (0, shift), value=_IGNORED)[:, shift:]
        counted = labels != _IGNORED
        if bool(counted.any()):
            one_hot = F.one_hot(labels.masked_fill(~counted, 0), f.shape[2])
            expected = (f.softmax(2) - one_hot) * counted[..., None] / counted.sum()
            if float((slope - expected).abs().max()) <= 1e-3 * float(expected.abs().max()):
                return Convention(fed, bool(shift), by_token=True)
    told = (
        "the network's own loss of the labels is the cross-entropy neither of each token nor of the next token, so it "
        "is not known which output belongs to which label: give "
    )
    raise BadData((told, FORWARD), argument="data")


# Each sample's outputs, when they were first seen


@final
class Seen:
    """A combination of each sample's outputs, by the sample's place in the data: what the first check saw.

    Chunks of other sizes must give every sample the same. A gate on a mean over the batch may be open in all parts that
    the check compared, and shut in a smaller chunk.
    """

    def __init__(self) -> None:
        self._parts: dict[int, Tensor] = {}
        self._rows: dict[int, Tensor] = {}  #: of whole batches of the source

    def note(self, number: int, f: Tensor) -> None:
        """Keep the outputs (n, N) of the chunk whose first sample has this number."""
        self._parts[number] = combined(f).cpu()

    def join(self, ranks: Ranks) -> None:
        """Put all chunks together, those of all processes."""
        every = {number: part for mine in ranks.together(self._parts) for number, part in mine.items()}
        for number in sorted(every):
            source = number // MOST_IN_BATCH
            held = self._rows.get(source)
            self._rows[source] = every[number] if held is None else torch.cat([held, every[number]])
        self._parts = {}

    def off(self, number: int, f: Tensor) -> Tensor:
        """Return how far the outputs of a chunk are from those seen, as a share of their size; 0 if it was not seen."""
        start, held = number % MOST_IN_BATCH, self._rows.get(number // MOST_IN_BATCH)
        if held is None or start + len(f) > len(held):
            return f.new_zeros((), dtype=torch.float64)
        known = held[start : start + len(f)].to(f.device)
        largest = f.detach().abs().max().to(torch.float64) * math.sqrt(f.shape[1]) + 1e-300
        return (combined(f.detach()) - known).abs().max() / largest

    def require_same(
        self, problem: NetworkOnData, model: nn.Module, batch: Batch, number: int, f: Tensor, off: Tensor
    ) -> None:
        """Refuse outputs that are `off` by more than rounding from those of the same network in larger chunks.

        The network may have been trained since: then it is run once more.
        """
        allowed = ROUNDING * torch.finfo(f.dtype).eps
        (share,) = off[None].tolist()
        if share <= allowed:
            return
        self._rows = {}
        with torch.no_grad():
            for first, raw in problem.shared(FORWARD_CHUNK, ALONE):
                self.note(first, problem.run(model, problem.place(raw))[0])
        self.join(ALONE)
        apart = float(self.off(number, f))
        if apart > allowed:
            parts = size_of_parts(model, "a check", lambda moved: problem.run(moved, batch)[0].detach())
            if apart * float(f.detach().abs().max()) > allowed * parts:
                raise BadModel(
                    f"outputs of the samples in a chunk of {len(f)} differ from those in larger chunks (by "
                    f"{apart:.2g} of their size), so per-sample derivatives do not exist: does forward() gate, sort "
                    "or count over the batch? Make the whole batch one sample, or gate each sample alone"
                )


def combined(f: Tensor) -> Tensor:
    """Return a fixed combination of each sample's outputs, (n,) float64; outputs of 0 at the end change nothing."""
    weights = (1.7 * torch.arange(1, f.shape[1] + 1, dtype=torch.float64)).cos().to(f.device)
    parts = zip(torch.split(f, _AT_ONCE, 1), torch.split(weights, _AT_ONCE), strict=True)
    return torch.stack([torch.mv(part.to(torch.float64), own) for part, own in parts]).sum(0)


# Each sample's loss


@dataclass(frozen=True, eq=False)
class Outcomes:
    """The loss and the correctness of every sample of a data set."""

    losses: Tensor  #: (n,) float64, scaled so that their mean is the risk
    correct: Tensor | None  #: (n,) float64, 1 where correct, NaN where ignored; None if targets are not classes
    weights: Tensor | None = None  #: masses over their mean, (n,) float64; None where they were not kept

    @property
    def risk(self) -> float:
        """Return the mean loss."""
        return float(self.losses.mean())


def forwards(
    problem: NetworkOnData, model: nn.Module, batches: Iterable[Batch] | None = None, *, twice: bool = True
) -> Generator[tuple[Tensor, Any]]:
    """Yield outputs (n, N) and targets of each batch, by default of all the data, without a graph.

    The network is in the state of `measuring`, with `twice` as there, from the first batch on; a caller that stops
    early closes the generator.
    """
    with problem.measuring(model, twice=twice):
        for raw in problem.batches(FORWARD_CHUNK) if batches is None else batches:
            with torch.no_grad():
                found = problem.run(model, problem.place(raw))
            yield found


def outcomes(
    problem: NetworkOnData, shared: Iterable[tuple[int, Batch]], run: Callable[[Batch], tuple[Tensor, Any]]
) -> Outcomes:
    """Return samples' outcomes, from this rank's chunks; `run` maps a placed batch to (outputs (n, N), targets)."""
    kept: ChunkBuffer[str] = ChunkBuffer()
    with torch.no_grad(), problem.ranks.as_one():
        for number, raw in shared:
            f, y = run(problem.place(raw))
            f = f.to(torch.float64)
            losses, hits, mass = problem.loss.values(f, y), problem.loss.correct(f, y), problem.loss.mass(f, y)
            kept.add(number, {"losses": losses, "hits": hits, "mass": mass})
    found = kept.joined(problem.ranks)
    seen, mean = from_rows(found), found["mass"].sum() / len(found["mass"])
    return Outcomes(seen.losses / mean, seen.correct, found["mass"] / mean)


def slopes(problem: NetworkOnData, f: Tensor, y: object) -> Tensor:
    """Return the losses' slopes in the outputs, dl_i/df over the mass of all samples: (n, N), f's dtype, no graph."""
    return slopes_of_each(problem, f, y, problem.mass).to(f.dtype)


def slopes_of_each(problem: NetworkOnData, f: Tensor, y: object, over: float = 1.0) -> Tensor:
    """Return each sample's slope in its outputs, dl_i/df / over: (n, N) float64, no graph."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = f.detach().to(torch.float64).requires_grad_()
        (slope,) = torch.autograd.grad(problem.loss.values(leaf, y).sum() / over, leaf)
    return slope


def fisher_slopes(problem: NetworkOnData, f: Tensor, y: object) -> Tensor:
    """Return g_i, (n, N) float64: mean_i g_i g_i^T is the empirical Fisher matrix of the outputs.

    They are the slopes of the samples' own losses, times the root of the weight that the risk gives to a sample. They
    are NaN where a sample has a slope and no weight, as smoothed labels have of a class with the weight 0.
    """
    f = f.detach().to(torch.float64)
    slope, mass = slopes_of_each(problem, f, y, problem.mass), problem.loss.mass(f, y)
    rows = slope * (problem.n * problem.mass / mass.clamp(min=1e-300)).sqrt()[:, None]
    return torch.where((mass == 0)[:, None] & (slope != 0), torch.nan, rows)


def from_rows(found: Mapping[str, Tensor]) -> Outcomes:
    """Return the outcomes of all chunks; no correctness if one chunk has none."""
    losses, hits = found["losses"], found.get("hits")
    return Outcomes(losses, hits if hits is not None and len(hits) == len(losses) else None)
