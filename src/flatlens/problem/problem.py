"""The Problem: a model, a loss and data, checked once."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from flatlens.errors import BadData, BadInput, BadLoss, BadModel, ForwardFailed, LossFailed
from flatlens.estimate import Progress
from flatlens.problem.checks import (
    REDUCED_PRECISION,
    Arithmetic,
    chosen_parameters,
    in_bytes,
    measuring_dtype,
    require_arithmetic,
    require_finite_weights,
    require_ghosts,
    require_ranks,
    require_usable,
)  # fmt: skip
from flatlens.problem.data import Batch, Data, checksum, finite, move, require_finite, select, size, spaced, take
from flatlens.problem.loss import Loss
from flatlens.problem.losses import LossFunction, as_loss
from flatlens.problem.ranks import ALONE, Ranks
from flatlens.problem.sequences import Tokens, attention_mask, by_token, of_sequences
from flatlens.problem.state import device_of, measuring, untouched
from flatlens.userfile import said, users_code

Forward = Callable[[nn.Module, Batch], tuple[Any, ...]]
"""(outputs, targets), or (outputs (n, T, N), targets, which tokens count (n, T))."""
PROBE = 8  #: samples in a probe


@final
class Problem:
    """What is measured: the risk of `model` under `loss` on `data`.

    Construction runs the model once over the data: it must give finite outputs of shape (n, N), the same ones when
    asked twice, each sample's its own. The model is left as it was; it may be trained further between measurements.

    Outputs of shape (n, T, N), a row for each token, are a sample's outputs side by side. Tokens that do not count are
    left out: those labelled `ignore_index` (-100), those an `attention_mask` fed to the model hides, or those that
    forward= says in a third value, (n, T) and true where they count. `problem.sequences` has the risk's definition.

    `batchnorm="train"` measures the network as it is trained: every BatchNorm normalises by the `ghost_batch` samples
    it sees together. Samples are coupled then: what is defined per sample is undefined, curvature operators work.

    `arithmetic`: "full", that of `dtype`; or, on request, "tf32" (on CUDA) or "bfloat16", in which the one pass and
    curvature products then multiply and convolve, with 10 or 7 bits of a factor; sums over derivatives are in float64
    in any case. All else is in full: how the network is built, losses elsewhere, differences. Every report says it.

    `ranks`: the processes that share the samples; each is given the same model and all the data, takes part of it, and
    comes to the same numbers (`problem.ranks`).

    >>> net = nn.Linear(3, 2)
    >>> problem = Problem(net, "mse", (torch.zeros(5, 3), torch.zeros(5, 2)))
    >>> problem.n, problem.outputs
    (5, 2)
    """

    def __init__(
        self,
        model: nn.Module,
        loss: str | nn.Module | Loss | LossFunction,
        data: Any,
        *,
        test: Any = None,
        forward: Forward | None = None,
        parameters: Literal["trainable", "all"] | Iterable[str] = "trainable",
        dtype: torch.dtype | None = None,
        arithmetic: Arithmetic = "full",
        memory: str | int = "1GiB",
        batchnorm: Literal["eval", "train"] = "eval",
        ghost_batch: int | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        require_usable(model, dtype)
        require_ghosts(batchnorm, ghost_batch)
        self.model = model
        self.loss = as_loss(loss)
        self.data = data if isinstance(data, Data) else Data(data, "data=...")
        self.test = test if test is None or isinstance(test, Data) else Data(test, "test=...")
        self.forward = forward
        self.parameters = chosen_parameters(model, parameters)
        self.dtype = dtype or measuring_dtype(model)
        require_arithmetic(arithmetic, self.dtype, device_of(model))
        self.arithmetic = arithmetic
        self._works_in: Arithmetic = "full"
        self.probes: list[Batch] = []  #: a few samples from all over the data, to see on what the network does there
        self.memory = in_bytes(memory)
        self.origin: dict[str, str] = {}  #: where network and data are from, in words; every report repeats it
        require_ranks(ranks)
        self.ranks = ranks  #: the processes that share the samples
        self.ghost_batch = ghost_batch  #: samples that BatchNorm normalises together; None where samples are apart
        require_finite_weights(model)
        self.outputs = 0  #: N, of a network with a row a token that of the longest batch
        copied = self.measured()
        ranks.require_same(lambda: [checksum(tensor) for tensor in copied.state_dict().values()], "weights")
        with untouched(copied):
            with self.measuring(copied), torch.no_grad():
                self._check_first(copied)
                self.n, self.outputs, self.mass = self._census(copied, self.data)
            if self.test is not None:
                with measuring(copied), torch.no_grad():
                    self._census(copied, self.test)

    @property
    def coupled(self) -> bool:
        """Whether samples see each other, through the statistics of their batch."""
        return self.ghost_batch is not None

    def measuring(self, model: nn.Module) -> AbstractContextManager[None]:
        """The state in which the risk is differentiated."""
        return measuring(model, batch_statistics=self.coupled, tf32=self._works_in == "tf32")

    @property
    def precision(self) -> float:
        """eps of the arithmetic that derivatives are computed in."""
        return REDUCED_PRECISION.get(self._works_in, torch.finfo(self.dtype).eps)

    def as_asked(self) -> Problem:
        """The same problem, worked on in the arithmetic asked for: by the pass and by curvature products alone."""
        asked = copy.copy(self)
        asked._works_in = self.arithmetic
        return asked

    def batches(self, most: int) -> Iterator[Batch]:
        """The data in pieces of at most `most` samples; in ghost batches where samples are coupled."""
        return self.data.chunks(most) if self.ghost_batch is None else self.data.in_batches_of(self.ghost_batch)

    def shared(self, most: int, ranks: Ranks | None = None) -> Iterator[tuple[int, Batch]]:
        """The part of `batches(most)` that is this process's among `ranks` (the problem's), each with a number that
        tells where in the data it is."""
        ranks = self.ranks if ranks is None else ranks
        if self.ghost_batch is None:
            return self.data.shared(most, ranks)
        whole = enumerate(self.data.in_batches_of(self.ghost_batch))
        return ((number, batch) for number, batch in whole if ranks.takes(number))

    def walked(
        self, most: int, what: str, progress: Progress | None, ranks: Ranks | None = None
    ) -> Iterator[tuple[int, Batch]]:
        """The same, that says how far it is, of all ranks, whenever a chunk is done with."""
        done, size_of_ranks = 0, (self.ranks if ranks is None else ranks).size
        for number, raw in self.shared(most, ranks):
            yield number, raw
            done += size(raw) * size_of_ranks
            if progress is not None:
                progress(what, min(done, self.n), self.n)

    def in_ghost_batches(self, most: int) -> Problem:
        """The same problem as in training: every BatchNorm normalises by the `most` samples it sees together, or by all
        where there are fewer."""
        require_ghosts("train", most)
        if self.n % most == 1:
            raise BadInput(
                f"Problem.in_ghost_batches({most}): one of {self.n} samples would be normalised alone: choose another "
                f"size"
            )
        coupled = copy.copy(self)
        coupled.ghost_batch = min(most, self.n)
        return coupled

    def subset(self, k: int, generator: torch.Generator) -> Problem:
        """The same problem on `k` of its samples, drawn without replacement, in the data's order."""
        if not 1 <= k <= self.n:
            raise BadInput(f"Problem.subset({k}): the data has {self.n} samples: between 1 and {self.n} can be drawn")
        part = self.with_changes(data=self.data.picked(torch.randperm(self.n, generator=generator)[:k]))
        part.origin = dict(self.origin)
        return part

    def with_changes(self, model: nn.Module | None = None, **changes: Any) -> Problem:
        """A new problem, checked anew, of what this one was made of but for what is named."""
        given: dict[str, Any] = {
            "loss": self.loss,
            "data": self.data,
            "test": self.test,
            "forward": self.forward,
            "parameters": self.parameters,
            "dtype": self.dtype,
            "arithmetic": self.arithmetic,
            "memory": self.memory,
            "batchnorm": "train" if self.coupled else "eval",
            "ghost_batch": self.ghost_batch,
            "ranks": self.ranks,
        }
        return Problem(self.model if model is None else model, **given | changes)

    def measured(self) -> nn.Module:
        """The network that is differentiated: the model itself, or a copy of it in `dtype`."""
        if all(p.dtype == self.dtype for p in self.model.parameters()):
            return self.model
        return copy.deepcopy(self.model).to(self.dtype)

    def place(self, batch: Batch) -> Batch:
        """The batch on the model's device, its floating tensors in the measured dtype."""
        return move(batch, device_of(self.model), self.dtype)

    def run(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """(outputs (n, N), targets) of a placed batch; outputs (n, T, V) come as (n, T V), with `Tokens` for
        targets."""
        n = size(batch)
        if self._works_in == "bfloat16":
            with torch.autocast(device_of(model).type, torch.bfloat16, cache_enabled=False):
                outputs, targets, counted = self._forward(model, batch)
        else:
            outputs, targets, counted = self._forward(model, batch)
        if isinstance(outputs, Tensor) and outputs.is_complex():
            raise BadModel(
                "Problem(model=...): the outputs are complex: real ones are needed, such as "
                "torch.view_as_real(outputs).flatten(1)"
            )
        if isinstance(outputs, Tensor) and not outputs.is_floating_point():
            raise BadModel(
                f"Problem(model=...): the outputs are {outputs.dtype}: floating ones are needed, before they are "
                f"rounded or compared"
            )
        if isinstance(outputs, Tensor) and (outputs.is_meta or outputs.layout != torch.strided):
            raise BadModel(
                "Problem(model=...): the outputs are sparse, or on the meta device: dense numbers are needed, such as "
                "outputs.to_dense()"
            )
        outputs = outputs.to(self.dtype) if isinstance(outputs, Tensor) else outputs
        if isinstance(outputs, Tensor) and outputs.ndim > 1 and outputs.shape[-1] == 0:
            raise BadModel(f"Problem(model=...): outputs of shape {tuple(outputs.shape)} hold no number: N is 0")
        if isinstance(outputs, Tensor) and outputs.ndim == 3 and len(outputs) == n:
            fits = isinstance(counted, Tensor) and counted.shape == outputs.shape[:2]
            longest = self.outputs // outputs.shape[2]
            return by_token(outputs, targets, counted if fits else None, self.loss.ignore_index, longest)
        if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != n:
            got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise BadModel(
                f"Problem(model=...): outputs must have shape (batch, N) = ({n}, N), or (batch, tokens, N), "
                f"got {got}: flatten or pool them, in the model or through forward=(model, batch) -> (outputs, "
                f"targets)"
            )
        return outputs, targets

    def _forward(self, model: nn.Module, batch: Batch) -> tuple[Any, Any, Any]:
        """(outputs, targets, which tokens count) as the network, or forward=, has them."""
        if self.forward is not None:
            with users_code(_failing(f"a batch of {size(batch)} samples")):
                outputs, targets, *mask = self.forward(model, batch)
            counted = mask[0] if mask else None
        else:
            if not isinstance(batch, tuple) or len(batch) != 2:
                raise BadData(
                    "Problem(data=...): batches must be pairs (x, y); for others give forward=(model, batch) "
                    "-> (outputs, targets)"
                )
            x, targets = batch
            with users_code(_failing(f"a batch of {size(batch)} samples")):
                outputs = model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)
            counted = attention_mask(batch)
        return getattr(outputs, "logits", outputs), targets, counted

    def _check_first(self, model: nn.Module) -> None:
        """Refuse a model or data that give something else the second time, on the first batch."""
        first = next(self.batches(256), None)
        if first is None or size(first) == 0:
            raise BadData("Problem(data=...): the data is empty: at least one sample is needed")
        for _ in self.batches(256):  # read again from the start: the first batch must come back the same
            break
        require_finite(first, f"Problem({self.data.where})")
        self.ranks.require_same(
            lambda: [checksum(x) for x in tree_leaves(first) if isinstance(x, Tensor)], "first samples"
        )
        once, _ = self._first_run(model, self.place(first))
        again, _ = self.run(model, self.place(first))  # a fresh copy: forward() may write to what it is fed
        if not finite(once):
            return  # the census names the sample
        apart = _largest_difference(once, again)
        scale = float(once.abs().max()) + 1e-30
        eps = torch.finfo(once.dtype).eps
        if apart > 100 * eps * scale:
            raise BadModel(
                f"Problem(model=...): the model gave different outputs for the same batch twice (max difference "
                f"{apart:.2g}). It runs in eval mode here: is there a functional dropout, or noise drawn inside "
                f"forward()?"
            )

    def _require_samples_apart(self, model: nn.Module, raw: Batch, f: Tensor) -> None:
        """Compare the outputs of a batch with those of two parts of it, drawn at random.

        Derivatives cannot tell what a forward pass has detached, such as a mean over the batch.
        """
        order = torch.randperm(len(f), generator=torch.Generator().manual_seed(len(f)))
        for rows in (part.sort().values for part in order.chunk(2)):
            alone, whole = self.run(model, self.place(select(raw, rows)))[0], f[rows.to(f.device)]
            apart, scale = _largest_difference(whole, alone), float(f.abs().max()) + 1e-30
            if apart > 1e4 * torch.finfo(f.dtype).eps * scale:
                raise BadModel(
                    f"Problem(model=...): samples give other outputs in half their batch (difference {apart:.2g}): "
                    f"they are coupled, so per-sample derivatives do not exist. Is there a BatchNorm without running "
                    f'statistics? batchnorm="train" with ghost_batch=k measures it in batches of k'
                )

    def _first_run(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """Whatever the model or the loss raises on the first batch, as one line."""
        with _retold("the first batch"):
            f, y = self.run(model, batch)
        if isinstance(y, Tokens):
            self.loss = of_sequences(self.loss)
        with self._losing("the first batch", f, y):
            self.loss.check(f, y)
        return f, y

    @contextmanager
    def _losing(self, where: str, f: Tensor, y: Any) -> Iterator[None]:
        """Whatever the loss raises there, as one line."""

        def failed(line: str) -> LossFailed:
            return LossFailed(
                f"Problem(loss={self.loss}): the loss failed on {where} ({line}): do the targets, of {_kind(y)}, fit "
                f"outputs of shape {tuple(f.shape)}, and is it differentiable?"
            )

        with users_code(failed):
            try:
                yield
            except LossFailed as error:
                raise error.__cause__ or error from None

    def _census(self, model: nn.Module, data: Data) -> tuple[int, int, float]:
        """(n, N, sum of masses); refuses what is not finite."""
        n, outputs, mass = 0, 0, 0.0
        few: dict[int, Batch] = {}
        for turn, (number, raw) in enumerate(self.shared(1024) if data is self.data else data.shared(1024, self.ranks)):
            require_finite(raw, f"Problem({data.where})")
            if data is self.data and turn & (turn - 1) == 0:  # chunks 0, 1, 2, 4, 8...: from all over, and few
                few[number] = spaced(raw, PROBE)
            if data is self.data and self.coupled and size(raw) < 2:
                raise BadInput(
                    f"Problem(ghost_batch={self.ghost_batch}): the last ghost batch would hold one sample alone: leave "
                    f"it out, or choose another size"
                )
            with _retold(
                partial(self._failing_sample, model, raw, n, "the data" if data is self.data else "the held-out data")
            ):
                f, y = self.run(model, self.place(raw))
            if not finite(f):
                bad = n + int((~torch.isfinite(f)).any(1).nonzero()[0])
                raise BadModel(
                    f"Problem({data.where}): the model's output for sample {bad} is NaN or inf, though weights and "
                    f"data are finite: do activations overflow {f.dtype}? dtype=torch.float64 may mend it"
                )
            if outputs not in (0, f.shape[1]) and not isinstance(y, Tokens):
                raise BadModel(
                    f"Problem({data.where}): the model gives {outputs} outputs for the samples before {n}, and "
                    f"{f.shape[1]} for sample {n}: every sample needs as many"
                )
            if len(f) > 1 and not self.coupled:
                self._require_samples_apart(model, raw, f)
            self._require_losses(f.to(torch.float64), y, n, data.where)
            n, outputs, mass = n + len(f), max(outputs, f.shape[1]), mass + float(self.loss.mass(f, y).sum())
        ns, widths, masses = zip(*self.ranks.together((n, outputs, mass)), strict=True)
        n, outputs, mass = sum(ns), max(widths), sum(masses)
        if data is self.data:
            self.probes = self.ranks.in_order(few)
        data.counted(n)
        if n == 0:
            raise BadData(f"Problem({data.where}): the data is empty: at least one sample is needed")
        if mass <= 0:
            raise BadData(f"Problem({data.where}): no sample counts: every target is ignored or has weight 0")
        return n, outputs, mass

    def _failing_sample(self, model: nn.Module, raw: Batch, start: int, given: str) -> str:
        """Which sample of a chunk forward() fails on, found by halving."""
        low, high, where = 0, size(raw), f"samples {start} to {start + size(raw) - 1} of {given}"
        while high - low > 1:
            middle = (low + high) // 2
            for part in ((low, middle), (middle, high)):
                try:
                    self.run(model, self.place(take(raw, *part)))
                except ForwardFailed:
                    low, high = part
                    break
            else:
                return where  # together alone
        return f"sample {start + low} of {given}"

    def _require_losses(self, f: Tensor, y: Any, start: int, given: str) -> None:
        """Refuse a chunk, of samples from `start`, whose losses are not finite, or not each sample's own."""
        where = f"samples {start} to {start + len(f) - 1} of the data"
        try:
            with self._losing(where, f, y):
                values = self.loss.check(f, y)
        except BadData as error:
            raise BadData(f"{str(error).replace('data=...', given, 1)} ({where})") from error
        if not finite(values):
            bad = start + int((~torch.isfinite(values)).nonzero()[0])
            raise BadLoss(
                f"Problem(loss={self.loss}): the loss of sample {bad} is NaN or inf: do its target and the loss fit "
                f"together?"
            )
        with self._losing(where, f, y):
            self.loss.require_apart(f, y)


def _largest_difference(one: Tensor, other: Tensor) -> float:
    """Between entries of two tensors; infinite where one is NaN, or their shapes differ."""
    apart = float((one - other).abs().max()) if one.shape == other.shape else math.inf
    return math.inf if math.isnan(apart) else apart


def _failing(where: str) -> Callable[[str], ForwardFailed]:
    """The error of a network that raised what a line says."""
    return lambda line: ForwardFailed(
        f"Problem(model=...): forward failed on {where} ({line}): do the data's shapes and types fit the model?"
    )


@contextmanager
def _retold(where: str | Callable[[], str]) -> Iterator[None]:
    """Say where in the data forward() failed."""
    try:
        yield
    except ForwardFailed as error:
        cause = error.__cause__ or error
        raise _failing(where if isinstance(where, str) else where())(said(cause)) from cause


def _kind(y: Any) -> str:
    return f"shape {tuple(y.shape)} and {y.dtype}" if isinstance(y, Tensor) else f"type {type(y).__name__}"
