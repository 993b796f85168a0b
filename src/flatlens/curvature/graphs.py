"""Autograd graphs kept between products: a product then costs one backward pass, not a forward and two backwards."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flatlens.problem import Batch, Problem
from flatlens.problem.copies import catch_up
from flatlens.problem.plain import checkpoints_made
from flatlens.problem.ranks import ALONE, Ranks
from flatlens.problem.samples import size, spaced, take
from flatlens.problem.state import device_of, differentiable, fingerprint
from flatlens.problem.turns import in_turn

_T = TypeVar("_T")
_COUNTED_ON = 2  #: samples on which the bytes that autograd saves are counted, and a product's operations checked
LARGEST_CHUNK = 1024  #: largest number of samples in a chunk: more make nothing faster
_FEWEST = 128  #: samples of a chunk that make the products of large networks fast
_CACHED = 2**24  #: bytes of a graph on a processor: LeNet takes 1.4 times as long if its chunks have four times as many


@final
class Graphs(Generic[_T]):
    """The results of `make` for each batch of the data, kept while they fit in half the problem's memory.

    The rest is built again in each iteration. So are graphs with checkpoints: backward() runs parts of the network
    anew, and these must meet it in the same state.

    `of`: what `make` builds; the bytes of a sample's graph are counted once for a problem where it is given.
    """

    def __init__(
        self,
        problem: Problem,
        model: nn.Module,
        parameters: list[Tensor],
        make: Callable[[Batch, int], _T],
        every: int = 1,
        ranks: Ranks = ALONE,
        of: Hashable = None,
    ) -> None:
        self._problem, self._model, self._parameters, self._make = problem, model, parameters, make
        self._of = of
        self._ranks = ranks  #: the processes that share the data
        self._every = every  #: k: every k-th sample is used; every k-th ghost batch where samples are coupled
        self._kept: list[_T] = []
        self._all_kept = False
        self._state: tuple[object, ...] = ()
        self._bytes: int | None = None

    def __iter__(self) -> Iterator[_T]:
        with in_turn(self._model), differentiable(self._parameters):
            self._drop_if_changed()
            yield from self._kept
            if not self._all_kept:
                with self._problem.measuring(self._model):
                    yield from self._rest(len(self._kept))

    def _drop_if_changed(self) -> None:
        """Drop all graphs if the network has changed since they were built."""
        catch_up(self._model)
        state = tuple(fingerprint(p) for p in self._model.parameters())
        if state != self._state:
            self._kept, self._all_kept, self._state = [], False, state

    def _rest(self, known: int) -> Iterator[_T]:
        each = self.bytes_per_sample
        budget = self._problem.memory // 2
        most = max(1, min(samples_at_once(self._problem, each), budget // (2 * each)))
        turn = seen = 0
        for number, raw in self._batches(most):
            turn, seen = turn + 1, seen + size(raw)
            if turn <= known:
                continue
            before = checkpoints_made()
            made = self._make(self._problem.place(raw), number)
            if turn == len(self._kept) + 1 and seen * each <= budget and checkpoints_made() == before:
                self._kept.append(made)
            yield made
            del made  # free its memory before the next one is built
        self._all_kept = turn == len(self._kept)

    def _batches(self, most: int) -> Iterator[tuple[int, Batch]]:
        """Yield (number, batch) of this process's share of the data."""
        coupled = self._problem.coupled
        for number, raw in self._problem.shared(most if coupled else most * self._every, self._ranks):
            if not coupled:  # of every k-th sample the outputs are not compared with those seen
                yield (number if self._every == 1 else -1 - number), spaced(raw, -(-size(raw) // self._every))
            elif number % self._every == 0:
                yield number, raw

    @property
    def bytes_per_sample(self) -> int:
        """Return the bytes that autograd saves for one sample, counted on a probe."""
        if self._bytes is None:
            self._bytes = bytes_of_a_sample(self._problem, self._model, lambda probe: self._make(probe, -1), self._of)
        return self._bytes


def samples_at_once(problem: Problem, each: int) -> int:
    """Return how many samples a chunk with a graph has, at `each` bytes a sample: within half the problem's memory."""
    most = LARGEST_CHUNK
    if device_of(problem.model).type == "cpu":
        most = min(most, max(_FEWEST, _CACHED // each))
    return max(1, min(most, problem.memory // 2 // each))


def bytes_of_a_sample(problem: Problem, model: nn.Module, make: Callable[[Batch], object], of: Hashable) -> int:
    """Return the bytes that autograd saves for a sample when `make` builds a graph, counted on a probe.

    It is done once for a problem and what the graph is `of`, if this is not None, while the same parameters are frozen.
    """
    key = "bytes of a sample", of, problem.ghost_batch, *(p.requires_grad for p in model.parameters())
    each: int | None = None if of is None else problem.facts.get(key)
    if each is None:
        probe = problem.place(take(problem.probes[0], 0, _COUNTED_ON))
        each = problem.facts[key] = bytes_saved(model, size(probe), lambda: make(probe))
    return each


def bytes_saved(model: nn.Module, n: int, make: Callable[[], object]) -> int:
    """Return the bytes per sample that autograd saves, without parameters, when `make` builds a graph of n samples.

    Torch does not tell what it saves where forward() uses torch.func: then it is the bytes of all tensors computed,
    which are more.
    """
    held: dict[int, int] = {p.untyped_storage().data_ptr(): 0 for p in model.parameters()}

    def count(tensor: Tensor) -> Tensor:
        for part in _dense_parts(tensor):
            storage = part.untyped_storage()
            held.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            made: object = make()
        total = sum(held.values())
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        with _Computed() as computed:
            made = make()
        total = computed.bytes
    del made
    return max(1, total // n)


def _dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that hold a tensor's numbers: a sparse one has no memory of its own."""
    if tensor.layout == torch.strided:
        return (tensor,)
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    along_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    indices = (tensor.crow_indices(), tensor.col_indices()) if along_rows else (
        tensor.ccol_indices(), tensor.row_indices()
    )  # fmt: skip
    return *indices, tensor.values()


class _Computed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._efficientzerotensor.default:
            func = torch.ops.aten.zeros.default  # zeros without memory crash in the next operation inside a mode
        found = func(*args, **(kwargs or {}))
        made = (part for t in tree_leaves(found) if isinstance(t, Tensor) for part in _dense_parts(t))
        self.bytes += sum(part.numel() * part.element_size() for part in made)
        return found
