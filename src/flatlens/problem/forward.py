"""How a batch becomes outputs, (n, N), and losses: the call of the network, and the reading of its answer."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatlens.errors import FORWARD, BadData, BadInput
from flatlens.problem.arguments import REDUCED_PRECISION, Arithmetic, require_numbers
from flatlens.problem.batches import FORWARD_CHUNK, Batch, counts_samples, move, size
from flatlens.problem.data import Data
from flatlens.problem.diagnosis import forward_failed
from flatlens.problem.eval_context import copy_of, device_of, differentiable, measuring, put_back
from flatlens.problem.loss import Constant, Loss
from flatlens.problem.op_overrides import in_bfloat16
from flatlens.problem.ranks import ChunkBuffer, Ranks
from flatlens.problem.row_layout import attention_mask, in_rows
from flatlens.progress import Progress
from flatlens.user_code import users_code

Forward: TypeAlias = Callable[[nn.Module, Batch], tuple[Any, ...]]
"""Maps (model, batch) to (outputs, targets), or to (outputs (n, T, N), targets, mask of counted tokens (n, T))."""

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
    constant: Constant | None = None  #: the best fit by outputs that ignore the input, where it has a formula
    works_in: Arithmetic = "full"  #: `arithmetic` in the pass and in curvature products only

    def changed(self, **attributes: Any) -> Self:
        """Return the same with other attributes, not checked again."""
        changed = copy.copy(self)
        vars(changed).update(attributes)
        return changed

    @property
    def coupled(self) -> bool:
        """Whether samples are coupled, through the statistics of their batch: `batchnorm="train"`."""
        return self.ghost_batch is not None

    @property
    def sharded(self) -> bool:
        """Return whether a parameter is spread over processes: by fully_shard (FSDP2), or by tensor parallelism."""
        return any(hasattr(p, "to_local") for p in self.model.parameters())

    @property
    def peers(self) -> Ranks:
        """Return the processes that measure together: all over which parameters are spread, or those of `ranks`."""
        return Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size()) if self.sharded else self.ranks

    @property
    def precision(self) -> float:
        """Return the machine epsilon with which derivatives are computed."""
        return REDUCED_PRECISION.get(self.works_in, torch.finfo(self.dtype).eps)

    def measuring(self, model: nn.Module, *, twice: bool = True) -> AbstractContextManager[None]:
        """Return the context in which the risk is differentiated, `twice` or once only."""
        return measuring(model, batch_statistics=self.coupled, tf32=self.works_in == "tf32", twice=twice)

    # The data

    def batches(self, most: int) -> Iterator[Batch]:
        """Yield the data in chunks of at most `most` samples; in ghost batches where samples are coupled."""
        return self.data.chunks(most) if self.ghost_batch is None else self.data.in_batches_of(self.ghost_batch)

    def shared(
        self, most: int, ranks: Ranks | None = None, what: str = "", progress: Progress | None = None
    ) -> Iterator[tuple[int, Batch]]:
        """Yield this process's share of `batches(most)` among `ranks` (default: the problem's).

        Each chunk comes with a number that gives its position in the data. After each chunk, the progress of all ranks
        is reported.
        """
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
        return move(batch, device_of(self.model), self.dtype)

    # The forward pass

    def run(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """Return (outputs (n, N), targets) of a placed batch, in the form of `problem.row_layout`."""
        cast = in_bfloat16(device_of(model).type) if self.works_in == "bfloat16" else nullcontext()
        put_back(model)
        torch.clear_autocast_cache()  # weights may have moved since an autocast around this call kept casts of them
        with cast:
            outputs, targets, counted = self._answer(model, batch)
        if isinstance(outputs, Tensor):
            require_numbers(outputs)
            outputs = outputs.to(self.dtype)
        return in_rows(outputs, targets, size(batch), self.loss, counted, self.outputs)

    def _answer(self, model: nn.Module, batch: Batch) -> tuple[Any, Any, Any]:
        """Return (outputs, targets, mask of counted tokens) as the network or forward= returns them."""
        where, itself = (
            f"a batch of {size(batch)} samples",
            None if model is self.model else partial(self._itself, batch),
        )
        if self.forward is not None:
            with users_code(forward_failed(where, None, batch, itself)):
                found = self.forward(model, batch)
            if not isinstance(found, tuple | list) or len(found) not in (2, 3):
                raise BadInput(
                    f"it must return (outputs, targets), or (outputs, targets, mask), got {type(found).__name__}",
                    argument="forward",
                )
            outputs, targets, *mask = found
            return main_output(outputs), targets, mask[0] if mask else None
        if not isinstance(batch, tuple) or len(batch) != 2:
            told = "batches must be pairs (x, y) or dicts with labels"
            if isinstance(batch, Tensor) or (isinstance(batch, tuple) and len(batch) == 1):
                told = "the data have no targets: give (x, x) for an autoencoder"
            raise BadData((f"{told}; for others give ", FORWARD), argument="data")
        x, targets = batch
        with users_code(forward_failed(where, model, x, itself)):
            outputs = main_output(called(model, x, targets if self.convention.fed else None))
        counted = self.mask(batch)
        if self.convention.by_token and counted is None and isinstance(outputs, Tensor):
            counted = torch.ones(outputs.shape[:2], dtype=torch.bool)
        if not self.convention.shifted:
            return outputs, targets, counted
        return outputs[:, :-1], targets[:, 1:], None if counted is None else counted[:, 1:]

    def _itself(self, batch: Batch) -> object:
        model = copy_of(self.model, "a cause").eval()
        batch = move(batch, device_of(model), next((p.dtype for p in model.parameters()), self.dtype))
        with torch.no_grad():
            return self.forward(model, batch) if self.forward is not None else called(model, batch[0])

    def mask(self, batch: Batch) -> Tensor | None:
        """Return the mask of a batch's tokens, (n, T), 0 at padding; None if there is none."""
        return None if self.convention.fed else attention_mask(batch)


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
        if _is_slope(slope, f, F.pad(y[rows], (0, shift), value=_IGNORED)[:, shift:]):
            return Convention(fed, bool(shift), by_token=True)
    told = (
        "the network's own loss of the labels is the cross-entropy neither of each token nor of the next token, so it "
        "is not known which output belongs to which label: give "
    )
    raise BadData((told, FORWARD), argument="data")


def _is_slope(slope: Tensor, f: Tensor, labels: Tensor) -> bool:
    counted = labels != _IGNORED
    if not bool(counted.any()):
        return False
    one_hot = F.one_hot(labels.masked_fill(~counted, 0), f.shape[2])
    expected = (f.softmax(2) - one_hot) * counted[..., None] / counted.sum()
    return float((slope - expected).abs().max()) <= 1e-3 * float(expected.abs().max())


# Each sample's loss


@dataclass(frozen=True, eq=False)
class Outcomes:
    """The loss and the correctness of every sample of a data set."""

    losses: Tensor  #: (n,) float64, scaled so that their mean is the risk
    correct: Tensor | None  #: (n,) float64, 1 where correct, NaN where ignored; None if targets are no classes
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
    """Return every sample's outcome under the problem's loss, from this rank's chunks of the data.

    `run` maps a placed batch to (outputs (n, N), targets).
    """
    kept: ChunkBuffer[str] = ChunkBuffer()
    with torch.no_grad(), problem.ranks.as_one():
        for number, raw in shared:
            f, y = run(problem.place(raw))
            f = f.to(torch.float64)
            rows = as_rows(problem.loss.values(f, y), problem.loss.correct(f, y))
            kept.add(number, rows | {"mass": problem.loss.mass(f, y)})
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
    slope, mass = slopes(problem, f, y), problem.loss.mass(f, y)
    rows = slope * (problem.n * problem.mass / mass.clamp(min=1e-300)).sqrt()[:, None]
    return torch.where((mass == 0)[:, None] & (slope != 0), torch.nan, rows)


def as_rows(losses: Tensor, hits: Tensor | None) -> dict[str, Tensor]:
    """Return the rows of one chunk that are kept."""
    return {"losses": losses} if hits is None else {"losses": losses, "hits": hits}


def from_rows(found: Mapping[str, Tensor]) -> Outcomes:
    """Return the outcomes of all chunks; no correctness if one chunk has none."""
    losses, hits = found["losses"], found.get("hits")
    return Outcomes(losses, hits if hits is not None and len(hits) == len(losses) else None)
