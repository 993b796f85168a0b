"""Processes that share the samples of one measurement (ranks), or the parameters of one network (shards).

Every process (rank) gets the same network and all the data; chunk i goes to rank i mod size. Sums over samples are
then added up, and per-sample results are put in the data's order, so that all ranks continue with the same numbers.
Each rank does the work that is not shared, with the same result.

Parameters may be spread over processes by `fully_shard` (FSDP2), or by tensor parallelism. The process that writes is
the first one; what may differ by rounding between processes, and decides something, is taken from it. FSDP2 keeps
whole parameters and pending gradients beside each process's part. torch has no public names for this; those it has
are used here alone.
"""

from __future__ import annotations

import atexit
import os
import pickle
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatlens.errors import BadModel, LostRank, typed_line
from flatlens.problem.op_overrides import replaced

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


_T = TypeVar("_T")
K = TypeVar("K", bound=Hashable)
GONE = "another process (rank) stopped before the work was finished: nothing was written; see its own message"
_PATIENCE = timedelta(hours=1)  #: time that a rank waits for another one that is connected but sends nothing


@dataclass(frozen=True)
class Ranks:
    """The ranks that share the samples, and which of them this process is; a single one unless it has `joined`.

    >>> ALONE.in_order({1: "b", 0: "a"}), float(ALONE.total(torch.tensor(3.0)))
    (['a', 'b'], 3.0)
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def joined(cls, store: Store | None = None) -> Ranks:
        """Return the ranks that torchrun started; it tells each process its number by environment variables.

        CUDA tensors travel by NCCL, with one device per rank; everything else by gloo. A `torch.distributed` that is
        already set up is used as it is. `store`: where the processes meet, if they have met already.

        Raises:
            LostRank: not all of them came.
        """
        if not dist.is_initialized():
            with _contact():
                size = -1 if store is None else int(os.environ["WORLD_SIZE"])
                rank = -1 if store is None else int(os.environ["RANK"])
                dist.init_process_group(backend(), timeout=_PATIENCE, store=store, rank=rank, world_size=size)
            # gloo's threads that live at exit may abort the process (`terminate called`)
            atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
        return cls(dist.get_rank(), dist.get_world_size())

    def takes(self, number: int) -> bool:
        """Return whether chunk `number` belongs to this rank."""
        return number % self.size == self.rank

    def total(self, part: Tensor) -> Tensor:
        """Return the sum over all ranks, with the same bits on each."""
        if self.size == 1:
            return part
        part = part.clone()
        with _contact():
            dist.all_reduce(part)
        return part

    def totals(self, parts: Mapping[K, Tensor]) -> dict[K, Tensor]:
        """Return the sums by name; a rank without samples has no parts, and gets their shapes from the others."""
        if self.size == 1:
            return dict(parts)
        shapes = {name: (part.shape, part.dtype, part.device.type) for name, part in parts.items()}
        known = {name: shape for mine in self.together(shapes) for name, shape in mine.items()}
        found = {}
        for name, (shape, dtype, device) in known.items():
            found[name] = self.total(parts[name] if name in parts else torch.zeros(shape, dtype=dtype, device=device))
        return found

    def together(self, part: _T) -> list[_T]:
        """Return all ranks' parts, the first rank's first."""
        if self.size == 1:
            return [part]
        parts: list[_T | None] = [None] * self.size
        with _contact():
            dist.all_gather_object(parts, part)
        return parts  # type: ignore[return-value]  # each was filled

    def in_order(self, parts: Mapping[int, _T]) -> list[_T]:
        """Return all ranks' parts in the order of their numbers, which give the position in the data."""
        every = {number: part for mine in self.together(dict(parts)) for number, part in mine.items()}
        return [every[number] for number in sorted(every)]

    def of_the_first(self, part: _T) -> _T:
        """Return the first rank's part."""
        held = [part]
        if self.size > 1:
            with _contact():
                dist.broadcast_object_list(held, 0)
        return held[0]

    def same_draws(self, generator: torch.Generator) -> None:
        """Let a generator draw what the first rank's will: seeds may differ between ranks."""
        if self.size > 1:
            generator.set_state(self.of_the_first(generator.get_state()))

    def apart(self, facts: Callable[[], Mapping[K, object]]) -> tuple[K, str] | None:
        """Return the first fact that differs between ranks, and where; a single process does not find them out."""
        if self.size == 1:
            return None
        with self.as_one():
            own = dict(facts())
        every = self.together(own)
        for name in dict.fromkeys(name for one in every for name in one):
            others = [str(rank) for rank, one in enumerate(every) if one.get(name) != every[0].get(name)]
            if others:
                return name, f"rank {', '.join(others)}"
        return None

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """Raise on all ranks what one raises inside this context, in which none waits for another.

        Otherwise the others would wait for one that goes on with something else, such as the next measure.
        """
        if self.size == 1:
            yield
            return
        own: Exception | None = None
        try:
            yield
        except LostRank:
            raise
        except Exception as error:
            own = error
        # one number, as often nothing has failed: a product of a small network would take twice as long otherwise
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        if not self.total(torch.tensor(int(own is not None), device=device)):
            return
        every = self.together(None if own is None else _sendable(own))
        failed, first = next((rank, error) for rank, error in enumerate(every) if error is not None)
        raise own if own is not None and failed == self.rank else first


ALONE = Ranks()


def in_first_process() -> bool:
    """Return whether this process is the first of those that torch.distributed connects, or a single one."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def claimed(name: str) -> bool:
    """Return whether this process was the first to ask for a name. It waits for no other: perhaps no other asks."""
    if not (dist.is_available() and dist.is_initialized()):
        return True
    try:
        store, me = dist.distributed_c10d._get_default_store(), str(dist.get_rank())
        return bool(store.compare_set(f"flatlens/{name}", "", me).decode() == me)
    except (AttributeError, RuntimeError):  # a backend without a store, or one that has gone with its process
        return True


def _sendable(error: Exception) -> Exception:
    try:
        return error if isinstance(pickle.loads(pickle.dumps(error)), type(error)) else RuntimeError(typed_line(error))
    except Exception:  # an error of the user's code may hold anything
        return RuntimeError(typed_line(error))


def backend() -> str:
    """Return the backend that tensors travel by."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


@contextmanager
def _contact() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # from any backend: a reset connection, a timeout, an abort
        raise LostRank(GONE) from error


Name = TypeVar("Name", bound=Hashable)


@dataclass(eq=False)
class ChunkBuffer(Generic[Name]):
    """Rows of every chunk by name, (rows of the chunk, ...), one buffer per name that doubles when it is full.

    Separate small tensors for each chunk would lie on the heap between the large buffers of the pass. The memory freed
    around them would be too small for the next chunk, and the process would grow by some buffers with every chunk.
    """

    _buffers: dict[Name, Tensor] = field(default_factory=dict)
    _filled: dict[Name, int] = field(default_factory=dict)
    _chunks: dict[int, dict[Name, slice]] = field(default_factory=dict)

    def add(self, number: int, parts: Mapping[Name, Tensor | None]) -> None:
        """Add rows of chunk `number`, where there are any; the parts of one chunk may come one after another."""
        places = self._chunks.setdefault(number, {})
        for name, part in parts.items():
            if part is None:
                continue
            start = self._filled.get(name, 0)
            stop = self._filled[name] = start + len(part)
            buffer = self._buffers.get(name)
            if buffer is None or stop > len(buffer):
                wider = part.new_empty(2 * stop, *part.shape[1:])
                if buffer is not None:
                    wider[:start] = buffer[:start]
                buffer = self._buffers[name] = wider
            assert buffer.shape[1:] == part.shape[1:], (name, buffer.shape, part.shape)
            buffer[start:stop] = part
            places[name] = slice(start, stop)

    def joined(self, ranks: Ranks) -> dict[Name, Tensor]:
        """Return the rows of all ranks by name, in the data's order, on the host; the buffers are empty afterwards."""
        if ranks.size == 1:  # one name at a time, so that the rows are never held twice
            places = [self._chunks[number] for number in sorted(self._chunks)]
            joined = {}
            for name in [*self._buffers]:
                buffer = self._buffers.pop(name)
                joined[name] = torch.cat([buffer[at[name]] for at in places if name in at]).cpu()
            return joined
        whole = {name: buffer[: self._filled[name]].cpu() for name, buffer in self._buffers.items()}
        every = ranks.in_order(
            {
                number: {name: whole[name][at].clone() for name, at in at_each.items()}
                for number, at_each in self._chunks.items()
            }
        )
        names = dict.fromkeys(name for one in every for name in one)
        return {name: torch.cat([one[name] for one in every if name in one]) for name in names}


# Parameters that are spread over processes

_PLAIN: Mapping[str, object] = {
    "reduce_grads": True,
    "all_reduce_grads": True,
    "gradient_divide_factor": None,
    "force_sum_reduction_for_comms": False,
}
"""Settings of a group of parameters with which a gradient is the mean over processes, at once."""


@contextmanager
def parts_between_calls(model: nn.Module) -> Iterator[None]:
    """Leave each process its part of every parameter, before this context, after it, and after each forward inside.

    Otherwise the outermost module keeps its parameters whole until a backward, as other tensors. Gradients inside are
    means over the processes; those that wait to be added up are put away, and restored.

    >>> with parts_between_calls(nn.Linear(2, 1)) as nothing:
    ...     nothing
    """
    modules = _wrapped(model)
    if not modules:
        yield
        return
    for module in modules:  # the outermost first, as in a first forward, which decides what it keeps whole
        module._get_fsdp_state()._lazy_init()
    to_parts(model)
    groups = _groups(modules)
    # where gradients lie that are not added up over the processes yet
    parameters = [one for group in groups for one in group.fsdp_params]
    waiting = [(one, "unsharded_accumulated_grad") for one in parameters]
    waiting += [(getattr(one, "_unsharded_param", None), "grad") for one in parameters]
    waiting = [place for place in waiting if getattr(*place, None) is not None]
    settings = [(group, name, value) for group in groups for name, value in _PLAIN.items()]
    settings += [(group, "post_forward_mesh_info", group.mesh_info) for group in groups]
    with replaced(settings), replaced((holder, name, None) for holder, name in waiting):
        try:
            yield
        finally:
            to_parts(model)


@contextmanager
def whole_parameters(model: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[list[Tensor]]:
    """Give the tensors that a forward inside this context uses as these parameters, in their order.

    Each process holds them whole until the end, so that a backward can be differentiated: otherwise it frees them.

    >>> net = nn.Linear(2, 1, bias=False)
    >>> with whole_parameters(net, dict(net.named_parameters())) as tensors:
    ...     tensors[0] is net.weight
    True
    """
    modules = _wrapped(model)
    settings = (("post_forward_mesh_info", None), ("reshard_after_backward", False))
    with replaced((group, *setting) for group in _groups(modules) for setting in settings):
        try:
            for module in modules:
                module.unshard()
            whole = dict(model.named_parameters()) if modules else parameters
            yield [whole[name] for name in parameters]
        finally:
            to_parts(model)


def to_parts(model: nn.Module) -> None:
    """Leave each process its part of every parameter: after a forward without a backward, some are whole."""
    for module in _wrapped(model):
        module.reshard()


def in_one_piece(tensor: Tensor) -> Tensor:
    """Return a tensor whose parts lie in several processes in one piece; any other as it is."""
    full: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def of_the_first(tensor: Tensor, sharded: bool) -> Tensor:
    """Return the first process's tensor in every process, if parameters are spread over them; else the tensor."""
    if sharded:
        dist.broadcast(tensor, 0)
    return tensor


def require_all_processes(model: nn.Module) -> None:
    """Refuse parameters that are spread over some of the processes: the others have another network, or none."""
    over = max((p.device_mesh.size() for p in model.parameters() if hasattr(p, "device_mesh")), default=None)
    if over is not None and over != (size := dist.get_world_size()):
        raise BadModel(
            f"its parameters are spread over {over} of the {size} processes of torch.distributed, and a network is "
            "measured by all of them: use a mesh of all, or measure a copy in one piece (full_tensor)"
        )


def _wrapped(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]


def _groups(modules: list[Any]) -> list[Any]:
    """Return the groups of parameters that are gathered together; older versions of torch have one a module."""
    found: list[Any] = []
    for module in modules:
        state = module._get_fsdp_state()
        found += getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in found if group is not None]
