"""The Problem: a model, a loss and data, checked once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from flatlens.deprecated_names import renamed
from flatlens.errors import BadInput, BadModel, FlatlensError
from flatlens.problem.arguments import (  # fmt: skip
    Arithmetic,
    chosen_parameters,
    in_bytes,
    measuring_dtype,
    require_arithmetic,
    require_finite_weights,
    require_forward,
    require_ghosts,
    require_present,
    require_ranks,
    require_same_form,
    require_usable,
)
from flatlens.problem.batches import Batch, spaced
from flatlens.problem.data import Data
from flatlens.problem.eval_context import (
    ReachesOriginal,
    apart_from_original,
    copy_of,
    copy_on_same_weights,
    device_of,
    holds,
    in_turn,
    measuring,
    require_own_torch,
    turn_together,
    untouched,
    unwrapped,
)
from flatlens.problem.forward import Convention, Forward, NetworkOnData
from flatlens.problem.inspection import check_all, check_first, require_same_everywhere
from flatlens.problem.loss import Loss
from flatlens.problem.loss_checks import MOST_OUTPUTS, require_twice
from flatlens.problem.losses import LossFunction, as_loss
from flatlens.problem.ranks import ALONE, Ranks, to_parts


@final
class Problem(NetworkOnData):
    """The problem to measure: the risk of `model` under `loss` on `data`.

    The constructor runs the model over the data, and parts of each batch again. Outputs must be finite, be the same
    when computed twice, and each sample's must not depend on the others. They have shape (n, N), or one of
    `problem.row_layout`: (n,), images of classes, several heads. The model stays as it was; it may be trained further
    between measurements.

    For outputs of shape (n, T, N), with one row per token, the rows side by side are a sample's outputs. Some tokens do
    not count: those labelled `ignore_index` (-100), those hidden by an `attention_mask` fed to the model, or those for
    which a third value of forward=, (n, T), is false. `problem.row_layout` defines the risk. Where torch's
    cross-entropy takes outputs (n, A, B) with the targets, axis 1 holds the classes, as in torch, unless a mask of
    tokens, the network's own loss, or another batch shows that the outputs are those of A tokens.

    Args:
        model: The network; the one inside torch.compile, DataParallel or DistributedDataParallel is measured.
        loss: A name ("cross_entropy", "half_squared_error", "mse", "HuberLoss"), a loss of torch.nn or
            torch.nn.functional, or a function of outputs and targets that returns each sample's loss, (n,), or the mean
            of a batch; for several heads a dict or a tuple of these.
        data: The training data: (x, y), a dict with "labels", a list of such dicts, a Dataset, a DataLoader, or an
            object with x and y; with forward= x alone. A list in a batch has one item for each sample.
        test: Held-out data in the same forms.
        forward: Called with (model, batch); returns (outputs, targets), or (outputs, targets, which tokens count).
        parameters: The measured ones: "trainable", "all", or their names.
        dtype: The precision in which a copy is measured; None: the network's own, or float32 for half types.
        arithmetic: "full" is that of `dtype`. In "tf32" (on CUDA) or "bfloat16", the pass and the curvature products
            multiply and convolve with 10 or 7 bits per factor. Sums over derivatives are in float64 in any case, and
            everything else is in full precision. Every report states it.
        memory: The memory that the pass may take: bytes, or "512MiB".
        batchnorm: "train" measures the network as it is trained: every BatchNorm normalises over `ghost_batch` samples
            at a time. Samples are then coupled: per-sample measures are undefined, curvature operators work.
        ghost_batch: The number of samples that a BatchNorm normalises together; with batchnorm="train" only.
        ranks: The processes that share the samples. Each gets the same model and all the data, works on a part, and
            returns the same numbers (`problem.ranks`).

    >>> net = nn.Linear(3, 2)
    >>> problem = Problem(net, "mse", (torch.zeros(5, 3), torch.zeros(5, 2)))
    >>> problem.n, problem.outputs
    (5, 2)
    """

    def __init__(
        self,
        model: nn.Module,
        loss: str | nn.Module | Loss | LossFunction | Mapping[str, Any] | Sequence[Any],
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
        # a mistake in several arguments is told in this order
        require_own_torch()
        model = unwrapped(model)
        if isinstance(model, nn.Module):
            to_parts(model)
        require_usable(model, dtype)
        require_ghosts(batchnorm, ghost_batch)
        dtype, paired = dtype or measuring_dtype(model), forward is None
        super().__init__(
            model=model,
            loss=as_loss(loss),
            data=data if isinstance(data, Data) else Data(data, "data", paired),
            test=test if test is None or isinstance(test, Data) else Data(test, "test", paired),
            forward=require_forward(forward),
            parameters=chosen_parameters(model, parameters),
            dtype=dtype,
            arithmetic=require_arithmetic(arithmetic, dtype, device_of(model)),
            memory=in_bytes(memory),
            ghost_batch=ghost_batch,
            ranks=require_ranks(ranks),
        )
        self._asked = parameters if isinstance(parameters, str) else None
        self.facts: dict[Hashable, Any] = {}  #: found out about the network once, for a tracker that asks often
        self.origin: dict[str, str] = {}  #: origin of network and data, in words; every report repeats it
        self.probes: list[Batch] = []  #: a few samples from all over the data, for trials
        require_same_everywhere(self)
        require_finite_weights(model)
        # whether the user's own modules are measured: what else is given reads or runs them
        self._in_place = holds([self.loss, forward], model, inside=True)
        try:
            self._check(self.measured())
        except ReachesOriginal as reached:
            self._in_place = True
            try:
                self._check(self.model)
            except FlatlensError as error:
                raise reached.__cause__ or error  # noqa: B904 - each with its own cause

    def _check(self, network: nn.Module) -> None:
        """Run the network on all the data; refuse what cannot be measured, and note what is found."""
        with untouched(network):
            with self.measuring(network), torch.no_grad():
                with apart_from_original(network):
                    loss = check_first(self, network)
                self.loss = loss
                found, self.probes, seen = check_all(self, network, self.data)
                self.n, self.outputs, self.mass = found.n, found.outputs, found.mass
                if isinstance(found.sums, Tensor) and found.mass > 1:
                    self.constant = self.loss.constant(found.sums, found.mass)
                self.seen = None if self.coupled else seen
                if not self.sharded and self.outputs <= MOST_OUTPUTS:
                    few = spaced(self.probes[0], max(1, MOST_OUTPUTS // self.outputs))
                    require_twice(self.loss, *self.run(network, self.place(few)))
            if self.test is not None:
                if self.convention != Convention():
                    require_same_form(self.test)
                with measuring(network), torch.no_grad():
                    check_all(self, network, self.test)

    def __repr__(self) -> str:
        count = sum(p.numel() for name, p in self.model.named_parameters() if name in self.parameters)
        held_out = "" if self.test is None else ", held-out data"
        return (
            f"Problem: {type(self.model).__name__} of {count:,} parameters, {self.loss.description}, "
            f"{self.n:,} sample{'s' * (self.n != 1)}, {self.outputs:,} output{'s' * (self.outputs != 1)}{held_out}"
        )

    @property
    def first(self) -> bool:
        """Return whether this process is the first of those that measure together: it alone prints and writes."""
        return self.peers.rank == 0

    def present(self) -> Problem:
        """Return the same problem, with the parameters that are trainable now if it measures the trainable ones.

        Raises:
            BadModel: a parameter that the problem was asked to measure by its name has another name now.
        """
        if self._asked is None:
            require_present(self.model, self.parameters)
        now = self.parameters if self._asked is None else chosen_parameters(self.model, self._asked)
        return self if now == self.parameters else self.changed(parameters=now)

    def widened(self) -> Problem:
        """Return the same problem in float64, not checked again: for a copy of its network."""
        return self.changed(dtype=torch.float64, arithmetic="full", works_in="full", seen=None)

    def in_ghost_batches(self, most: int) -> Problem:
        """Return the problem as in training: BatchNorm normalises over `most` samples, or all if there are fewer."""
        require_ghosts("train", most)
        if self.n % most == 1:
            raise BadInput(
                f"Problem.in_ghost_batches({most}): the last of {self.n} samples would be alone in its ghost batch: "
                f"choose a size that leaves no rest of 1"
            )
        return self.changed(ghost_batch=min(most, self.n), seen=None)

    @renamed(k="samples")
    def subset(self, samples: int, generator: torch.Generator) -> Problem:
        """Return the same problem on `samples` of its samples, drawn without replacement, in the data's order."""
        if not 1 <= samples <= self.n:
            raise BadInput(
                f"Problem.subset({samples}): the data has {self.n} samples: between 1 and {self.n} can be drawn"
            )
        part = self.with_changes(data=self.data.picked(torch.randperm(self.n, generator=generator)[:samples]))
        part.origin = dict(self.origin)
        return part

    def with_changes(self, model: nn.Module | None = None, **changes: Any) -> Problem:
        """Return a new problem, checked again, with the same arguments except those given."""
        kept = ("loss", "data", "test", "forward", "dtype", "arithmetic", "memory", "ghost_batch", "ranks")
        given = {name: getattr(self, name) for name in kept}
        given |= {"parameters": self._asked or self.parameters, "batchnorm": "train" if self.coupled else "eval"}
        return Problem(self.model if model is None else model, **given | changes)

    def measured(self) -> nn.Module:
        """Return the network that is differentiated: a copy of the model on its weights, or with weights in `dtype`.

        The model itself where it has no copy: see `problem.eval_context`.
        """
        with in_turn(self.model):  # not while another thread measures it in place
            if all(p.dtype == self.dtype for p in self.model.parameters()):
                return self.model if self._in_place else copy_on_same_weights(self.model) or self.model
            name = str(self.dtype).removeprefix("torch.")
            if self.sharded:
                raise BadModel(
                    "a network whose parameters are spread over processes is measured as it is, in float32 or float64",
                    argument="dtype",
                    remedy=f"it cannot be copied to {name}",
                )
            itself = f"call model.{'float' if self.dtype == torch.float32 else 'double'}() yourself, or "
            copied = copy_of(self.model, f"measuring in {name}", itself).to(self.dtype)
            turn_together(copied, self.model)
            return copied

    def run_chunk(self, model: nn.Module, batch: Batch, number: int) -> tuple[Tensor, Any]:
        """Return what `run` does, of the chunk whose first sample has this number; require the outputs seen before.

        A negative number is that of no chunk.

        Raises:
            BadModel: the outputs are others than in larger chunks.
        """
        f, y = self.run(model, batch)
        self.require_as_seen(model, batch, number, f)
        return f, y

    def require_as_seen(self, model: nn.Module, batch: Batch, number: int, f: Tensor | None = None) -> None:
        """Require that the outputs f of a chunk, found here if they are not given, are those seen in larger chunks."""
        if self.seen is not None and number >= 0:
            with torch.no_grad():
                f = self.run(model, batch)[0] if f is None else f.detach()
            self.seen.require_same(self, model, batch, number, f, self.seen.off(number, f))
