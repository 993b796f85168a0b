"""The Problem: a model, a loss and data, checked once."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from flatlens.deprecated_names import renamed
from flatlens.errors import BadInput, BadModel, Code, FlatlensError, Give, UnknownName
from flatlens.problem.batches import Batch, finite, spaced
from flatlens.problem.data import Data
from flatlens.problem.eval_context import (
    ReachesOriginal,
    apart_from_original,
    copy_of,
    copy_on_same_weights,
    device_of,
    holds,
    in_turn,
    require_own_torch,
    turn_together,
    untouched,
    unwrapped,
)
from flatlens.problem.forward import REDUCED_PRECISION, Arithmetic, Convention, Forward, NetworkOnData
from flatlens.problem.inspection import Outputs, check_all, check_first, require_same_everywhere
from flatlens.problem.loss import Loss
from flatlens.problem.loss_checks import MOST_OUTPUTS, require_twice
from flatlens.problem.losses import LossFunction, as_loss
from flatlens.problem.op_overrides import HALF, NotedCasts, plain_casts
from flatlens.problem.ranks import ALONE, Ranks, in_one_piece, to_parts

_MOST = 2**62  #: largest number of bytes; larger sizes become this


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
            ranks=ranks,
        )
        if not isinstance(ranks, Ranks):
            remedy = "give Ranks.joined() under torchrun; leave ranks out in a single process"
            raise BadInput(remedy, argument="ranks", value=ranks)
        self._asked = parameters if isinstance(parameters, str) else None
        self.facts: dict[Hashable, Any] = {}  #: cached results about the network, for a tracker that asks often
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
        # nothing here differentiates attention: on a processor its fast kernel multiplies in float32, too
        twice = device_of(network).type != "cpu"
        with untouched(network):
            with self.measuring(network, twice=twice), torch.no_grad():
                with apart_from_original(network):
                    self.loss, first = self._first(network)
                with nullcontext() if self.casts is None else plain_casts(self.dtype):
                    found, self.probes, seen = check_all(self, network, self.data, first)
                    self.n, self.outputs, self.mass = found.n, found.outputs, found.mass
                    if isinstance(found.sums, Tensor) and found.mass > 1:
                        self.constant = self.loss.constant(found.sums, found.mass)
                    self.seen = None if self.coupled else seen
                    if not self.sharded and self.outputs <= MOST_OUTPUTS:
                        few = spaced(self.probes[0], max(1, MOST_OUTPUTS // self.outputs))
                        require_twice(self.loss, *self.run(network, self.place(few)))
            if self.test is not None:
                if self.convention != Convention():
                    next(self.test.chunks(1), None)  # which shows its form
                    if not self.test.labelled:
                        told = "the data are dicts with labels, and the network says which output a label belongs to"
                        raise BadInput(told, argument="test", remedy="give the test data in the same form")
                with self.measuring(network, twice=twice, plain=True), torch.no_grad():
                    check_all(self, network, self.test)

    def _first(self, network: nn.Module) -> tuple[Loss, Outputs | None]:
        """Return what `check_first` does; without forward()'s casts to half types if the network runs so, too."""
        noted = NotedCasts()
        try:
            found = check_first(self, network, None if self.sharded else noted)
        except FlatlensError:
            if (without := self._without(network, noted.found)) is None:
                raise
            return without
        return self._without(network, noted.found) or found

    def _without(self, network: nn.Module, casts: set[torch.dtype]) -> tuple[Loss, Outputs | None] | None:
        """Return the same without casts to these types, and note them; None if there are none, or it fails so."""
        with suppress(FlatlensError), plain_casts(self.dtype):
            found = check_first(self, network) if casts else None
            self.casts = max(casts, key=lambda dtype: torch.finfo(dtype).eps, default=None)
            return found
        return None

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
        known = [name for name, _ in self.model.named_parameters()]
        # what is left would be measured silently
        for name in sorted(self.parameters.difference(known)) if self._asked is None else ():
            raise BadModel(
                f"{UnknownName.among('parameter', name, known)} (it had this name when the Problem was made; pruning, "
                "for instance, gives another: make a new Problem with the present names)",
                argument="parameters",
                value=Code("[...]"),
            )
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

    def part(self, samples: Tensor) -> Problem:
        """Return the same problem on some of its samples, not checked again; its risk is the sum of their losses."""
        return self.changed(data=self.data.picked(samples), test=None, n=len(samples), mass=1.0, seen=None)

    def with_changes(self, model: nn.Module | None = None, **changes: Any) -> Problem:
        """Return a new problem, checked again, with the same arguments except those given."""
        kept = ("loss", "data", "test", "forward", "dtype", "arithmetic", "memory", "ghost_batch", "ranks")
        given = {name: getattr(self, name) for name in kept}
        given |= {"parameters": self._asked or self.parameters, "batchnorm": "train" if self.coupled else "eval"}
        return Problem(self.model if model is None else model, **given | changes)

    def measured(self) -> nn.Module:
        """Return the network that is differentiated: a copy on the model's weights or in `dtype`, or the model."""
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
        """Return what `run` does; require the outputs seen before of the chunk at sample `number` (below 0: none)."""
        f, y = self.run(model, batch)
        self.require_as_seen(model, batch, number, f)
        return f, y

    def require_as_seen(self, model: nn.Module, batch: Batch, number: int, f: Tensor | None = None) -> None:
        """Require that the outputs f of a chunk, found here if they are not given, are those seen in larger chunks."""
        if self.seen is not None and number >= 0:
            with torch.no_grad():
                f = self.run(model, batch)[0] if f is None else f.detach()
            self.seen.require_same(self, model, batch, number, f, self.seen.off(number, f))


# The arguments: each check refuses in one line, or returns the argument in the form that is used


def require_usable(model: object, dtype: object) -> None:
    """Refuse anything but a network that can be hooked and differentiated."""
    if not isinstance(model, nn.Module):
        raise BadModel(f"expected a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"{name!r} is a ScriptModule, which" if name else "a ScriptModule"
            raise BadModel(f"{where} has no hooks", remedy="pass the nn.Module that it was compiled from")
        if is_quantised(module):
            raise BadModel(
                f"{repr(name) if name else 'the network'} ({type(module).__name__}) is quantised, and quantised "
                "weights have no derivatives: measure the network as it was before quantisation"
            )
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(p, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer):
            raise BadModel(f"{name!r} is not initialised", remedy="run the lazy model once on a batch first")
        if p.numel() == 0 and p.ndim > 1 and isinstance(p, nn.Parameter):
            raise BadModel(f"{name!r}, of shape {tuple(p.shape)}, is empty", remedy="remove its layer")
        if p.is_meta:
            raise BadModel(
                f"{name!r} is on the meta device, where tensors have no values",
                remedy="make the model on a device (model.to_empty(device=...), then load weights into it)",
            )
        if p.is_floating_point() and p.element_size() == 1:
            raise BadModel(f"{name!r} is {p.dtype}, with which torch cannot compute", remedy="call model.float() first")
        if p.layout != torch.strided and isinstance(p, nn.Parameter):
            raise BadModel(f"{name!r} is sparse", remedy="hold it as a dense parameter, p.to_dense()")
        if p.is_inference():
            raise BadModel(f"{name!r} was made under torch.inference_mode()", remedy="build the model outside it")
    if dtype is not None and dtype not in (torch.float32, torch.float64):
        raise BadInput("expected None, torch.float32 or torch.float64", argument="dtype", value=dtype)
    # a copy in another dtype would lose the imaginary part of complex buffers, too
    own = dtype or measuring_dtype(model)
    copied = any(p.dtype != own for p in model.parameters())
    for name, tensor in [*model.named_parameters(), *(model.named_buffers() if copied else ())]:
        if tensor.is_complex():
            raise BadModel(
                f"{name!r} is complex ({tensor.dtype}), and in {own} its imaginary part would be dropped",
                remedy="hold both parts in a real tensor (torch.view_as_real), and join them in forward()",
            )


def is_quantised(module: nn.Module) -> bool:
    """Return whether a module computes with quantised weights; fake quantisation computes with float numbers.

    >>> is_quantised(nn.Linear(2, 2))
    False
    """
    tensors = [one for one in vars(module).values() if isinstance(one, Tensor)]
    held = [one for one in (*module._parameters.values(), *module._buffers.values(), *tensors) if one is not None]
    if any(one.is_quantized or type(one).__module__.startswith("torchao.") for one in held):
        return True
    return any(
        kind.__module__.startswith("torch.") and ".quantized" in kind.__module__ for kind in type(module).__mro__
    )


def require_finite_weights(model: nn.Module) -> None:
    """Refuse a network with NaN or inf in its parameters or running statistics; a mask may well hold -inf."""
    running = ("running_mean", "running_var")
    statistics = [(name, buffer) for name, buffer in model.named_buffers() if name.rpartition(".")[2] in running]
    for name, tensor in [*model.named_parameters(), *statistics]:
        if tensor.is_floating_point() and not finite(tensor):
            bad = int(in_one_piece((~torch.isfinite(tensor)).sum()))
            what = f"{bad} of {tensor.numel()} entries of {name!r} are NaN or inf"
            cause = "as training that diverged or weights that were never set leave them"
            raise BadModel(f"{what}, {cause}", remedy="load a checkpoint without")


def require_forward(forward: Any) -> Any:
    """Return forward=; refuse what cannot be called."""
    if forward is not None and not callable(forward):
        raise BadInput(
            f"expected a function (model, batch) -> (outputs, targets), got {type(forward).__name__}",
            argument="forward",
        )
    return forward


def require_arithmetic(arithmetic: Arithmetic, dtype: torch.dtype, device: torch.device) -> Arithmetic:
    """Return arithmetic=; refuse a reduced precision that would have no effect, or would contradict `dtype`."""
    if arithmetic not in ("full", *REDUCED_PRECISION):
        raise BadInput("expected 'full', 'tf32' or 'bfloat16'", argument="arithmetic", value=arithmetic)
    if arithmetic != "full" and dtype != torch.float32:
        raise BadInput(
            f"only for networks measured in float32, not in {dtype}", argument="arithmetic", value=arithmetic
        )
    if arithmetic == "tf32" and device.type != "cuda":
        raise BadInput(f"only for CUDA devices, and the network is on {device}", argument="arithmetic", value="tf32")
    return arithmetic


def chosen_parameters(model: nn.Module, which: str | Iterable[str]) -> frozenset[str]:
    """Return the names of the parameters that count in sums over parameters."""
    if which not in ("trainable", "all") if isinstance(which, str) else not isinstance(which, Iterable):
        raise BadInput("expected 'trainable', 'all' or a list of parameter names", argument="parameters", value=which)
    with in_turn(model):  # freezing differs while another thread measures it in place
        known = {name: p.requires_grad for name, p in model.named_parameters() if p.is_floating_point()}
    if isinstance(which, str):
        return frozenset(name for name, trainable in known.items() if which == "all" or trainable)
    names = list(which)
    for name in names:
        if not isinstance(name, str):
            shown = type(name).__name__ if isinstance(name, Tensor) else repr(name)
            raise BadInput("expected a list of parameter names", argument="parameters", value=Code(f"[{shown}]"))
        if name not in known:
            raise UnknownName.among("parameter", name, known)
    return frozenset(names)


def measuring_dtype(model: nn.Module) -> torch.dtype:
    """Return the model's dtype; float32 for half types, in which derivatives are mostly rounding errors."""
    first = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return torch.float32 if first in HALF else first


def in_bytes(memory: str | int) -> int:
    """Return a size such as '1GiB' or '500 MB' in bytes.

    >>> in_bytes("1.5GiB"), in_bytes("500 MB")
    (1610612736, 500000000)
    """
    if isinstance(memory, int) and not isinstance(memory, bool) and memory > 0:
        return min(memory, _MOST)
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d*)?)\s*([KMGT]?I?)B?\s*", str(memory).upper())
    if match is None or match[2] not in units or float(match[1]) == 0:
        raise BadInput("expected a size, such as '1GiB' or '500MB'", argument="memory", value=memory)
    return min(int(float(match[1]) * units[match[2]]), _MOST)


def require_ghosts(batchnorm: object, ghost_batch: object) -> None:
    """Refuse batchnorm='train' without ghost_batch, or the reverse."""
    if batchnorm not in ("eval", "train"):
        raise BadInput("expected 'eval' or 'train'", argument="batchnorm", value=batchnorm)
    if batchnorm == "eval" and ghost_batch is not None:
        what = "has an effect with ", Give("batchnorm", "train"), " only"
        raise BadInput(what, argument="ghost_batch", remedy="set both or neither")
    if batchnorm == "train" and not (isinstance(ghost_batch, int) and ghost_batch >= 2):
        needed = "expected the number of samples normalised together, at least 2"
        raise BadInput(needed, argument="ghost_batch", value=ghost_batch)
