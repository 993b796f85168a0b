"""The N backward passes of a chunk: the slopes of its outputs wherever the network is watched, and their certificate.

The certificate is one more backward pass, of a random combination of all samples' outputs. Where the N passes' slopes,
combined in the same way sample by sample, give anything else, samples see each other or lie elsewhere than planned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatlens.grams.certificate import Certificate
from flatlens.grams.first_layer import input_side_follows
from flatlens.grams.layout import Layout
from flatlens.grams.record import Call, Tape
from flatlens.grams.rows import FRONT, Rows
from flatlens.grams.unexplained import ignore_slow_batching_warning
from flatlens.operations.graph import Place
from flatlens.operations.layers import by_sample
from flatlens.operations.reads import Bias, Lookup, Operation, Product

MEMORY_SHARE = 8
"""One batched backward pass may take the memory divided by this: the chunk before still holds its own part."""


class Pool:
    """Buffers that live as long as the pass, for slopes that come output by output: fresh memory for every chunk would
    cost as much as the arithmetic."""

    def __init__(self, memory: int, *, batched: bool = True) -> None:
        self._kept: dict[str, Tensor] = {}
        self.batch_bytes = memory // MEMORY_SHARE  #: bytes of slopes that one batched pass may give
        self.batched: bool | None = None if batched else False
        """Whether torch batches the network's operations; None where nobody tried."""

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised buffer of this shape; the samples come first."""
        kept = self._kept.get(name)
        if kept is None or len(kept) < shape[0] or kept.shape[1:] != shape[1:]:
            kept = self._kept[name] = torch.empty(shape, dtype=like.dtype, device=like.device)
        return kept[: shape[0]]


@dataclass(frozen=True, eq=False)
class _WatchedPlace:
    """A place where slopes are wanted, and the form in which they are held."""

    at: Place
    size: torch.Size  # of a slope there
    shape: Callable[[Tensor], Tensor]  # such a slope with its samples in front
    plain: bool = False  # whether that is the slope itself, one row a sample

    def buffer(self, name: str, f: Tensor, pool: Pool) -> Tensor:
        """Return a buffer for the slopes of all outputs, (n, N, ...)."""
        kept = self.shape(torch.empty(self.size, device="meta")).shape[1:]
        return pool.take(name, (*f.shape, *kept), f)


@dataclass(frozen=True, eq=False)
class PassStart:
    """The place where the backward passes begin: the slope of output k is `rows[k]` there, for every sample."""

    at: Tensor  # (n, width)
    rows: Tensor  # (N, width)

    def combined(self, wanted: list[Place], u: Tensor) -> tuple[Tensor | None, ...]:
        """Return the slopes of the outputs combined by u (n, N); the graph is kept."""
        return torch.autograd.grad(self.at, wanted, u @ self.rows, retain_graph=True, allow_unused=True)

    def slopes(self, wanted: list[Place], rows: slice, retain: bool) -> tuple[Tensor | None, ...]:
        """Return the slopes of several outputs, (count, ...) each."""
        onto = self.rows[rows, None].expand(-1, *self.at.shape)
        with ignore_slow_batching_warning():
            return torch.autograd.grad(
                self.at, wanted, onto, retain_graph=retain, allow_unused=True, is_grads_batched=True
            )

    def slope(self, wanted: list[Place], k: int, retain: bool) -> tuple[Tensor | None, ...]:
        """Return the slopes of one output."""
        onto = self.rows[k].repeat(len(self.at), 1)
        return torch.autograd.grad(self.at, wanted, onto, retain_graph=retain, allow_unused=True)


@dataclass(frozen=True, eq=False)
class OutputJacobians:
    """The slopes of a chunk, and their certificate."""

    found: dict[str, Tensor]  #: df/d(...), (n, N, ...), by place
    certificate: Certificate | None  #: None where it was not asked for

    def __getitem__(self, name: str) -> Tensor:
        return self.found[name]


def output_jacobians(
    f: Tensor,
    tape: Tape,
    layout: Layout,
    inputs: list[Tensor],
    needs: Collection[str],
    pool: Pool,
    *,
    live: list[bool] | None = None,
    keep_graph: bool = False,
    certify: torch.Generator | None = None,
    parameters: dict[str, Tensor] | None = None,
) -> OutputJacobians:
    """df/d(...), (n, N, ...), in the network's dtype: at `z:call` and other operations, `x:call` of linear layers and
    `input:number`.

    They are views or buffers of the pool: read, not written, and dead with the next chunk. No gradient at a weight is
    ever asked for. `live`: which outputs have any slope at all, where some have none. With a generator to `certify`
    by, the certificate comes with them, and its slopes in some `parameters`.
    """
    slots = watched_places(tape, layout, inputs, len(f), needs)
    units = torch.eye(f.shape[1], dtype=f.dtype, device=f.device)
    start, known = PassStart(f, units), {}
    head = _head(tape, f)
    if head is not None and f"z:{head[0].key}" in slots and slots[f"z:{head[0].key}"].plain:
        call, W = head
        start, known = PassStart(call.x, W), {f"z:{call.key}": units, f"x:{call.key}": W}
    asked = {name: slots[name] for name in slots if name not in known}
    shown = {name: slot for name, slot in asked.items() if not _implied(name, tape, layout)}
    certificate = None if certify is None else certificate_of(PassStart(f, units), f, shown, parameters or {}, certify)
    found = _all_outputs(asked, start, f, pool, live, keep_graph)
    found |= {name: rows.expand(len(f), *rows.shape) for name, rows in known.items() if name in slots}
    return OutputJacobians(found, certificate)


def _implied(name: str, tape: Tape, layout: Layout) -> bool:
    """Return whether samples are apart at a call's input because they are at its output: each goes by itself."""
    kind, _, key = name.partition(":")
    return kind == "x" and tape.linear[key].pure and f"z:{key}" in layout.rows and not layout.ignores_padding


def certificate_of(
    start: PassStart,
    f: Tensor,
    slots: dict[str, _WatchedPlace],
    parameters: dict[str, Tensor],
    generator: torch.Generator,
) -> Certificate:
    """Take the backward pass of a random combination of the outputs, at all places and in some parameters."""
    u = torch.randn(f.shape, generator=generator).to(f)
    wanted = [slot.at for slot in slots.values()] + list(parameters.values())
    rows = start.combined(wanted, u) if wanted else ()
    totals = {
        name: slot.shape(torch.zeros(slot.size).to(f) if row is None else row)
        for (name, slot), row in zip(slots.items(), rows, strict=False)
    }
    rest = zip(parameters.items(), rows[len(slots) :], strict=False)
    found = {name: torch.zeros_like(p) if row is None else row for (name, p), row in rest}
    return Certificate(u, totals, dict(zip(slots, rows, strict=False)), found)


def is_first_layer(layout: Layout, key: str) -> bool:
    """Return whether the call alone reads the network's input and its slope there follows from that at its output."""
    return key == layout.input_call and key in layout.weights and input_side_follows(layout.weights[key])


def _head(tape: Tape, f: Tensor) -> tuple[Call, Tensor] | None:
    """The linear call whose output the network's is, and the matrix (N, m) it applies: its slopes are known.

    It is read off autograd's graph: f = clone(z), z = x W^T + b, with W and b parameters, and no hook on f, because a
    hook may change the gradient.
    """
    copied = f.grad_fn
    if copied is None or copied.name() != "CloneBackward0" or f._backward_hooks:
        return None
    made: Any = copied.next_functions[0][0]
    if made is None or made.name() not in ("AddmmBackward0", "MmBackward0"):
        return None
    *bias, x, weight = [node for node, _ in made.next_functions]
    if x is None or not all(_is_parameter(node) for node in (*bias, weight)) or getattr(made, "_saved_alpha", 1) != 1:
        return None
    there = (call for call in tape.linear.values() if call.z.grad_fn is made and call.x.grad_fn is x)
    return next(((call, made._saved_mat2.detach().T) for call in there), None)


def _is_parameter(node: Any) -> bool:
    """Return whether it stands for a leaf, maybe transposed, or for what needs no gradient."""
    if node is not None and node.name() == "TBackward0":
        node = node.next_functions[0][0]
    return node is None or node.name() == "torch::autograd::AccumulateGrad"


def watched_places(
    tape: Tape, layout: Layout, inputs: list[Tensor], n: int, needs: Collection[str]
) -> dict[str, _WatchedPlace]:
    """Return a slot for each place at which slopes are wanted."""
    dense = {slot for w in (*layout.weights.values(), *layout.outside.values()) if w.dense for slot in w.products}
    operations = layout.operations(tape)
    slots = {name: _slot(operations[name], rows, n, name in dense) for name, rows in layout.rows.items()}
    for key, axis in layout.batch_axis.items() if "G" in needs else ():
        if not is_first_layer(layout, key):
            x = tape.linear[key].x
            plain = f"z:{key}" in dense and axis == 0

            def flat(slope: Tensor, axis: int = axis) -> Tensor:
                return by_sample(slope, axis).reshape(n, -1)

            slots[f"x:{key}"] = _WatchedPlace(x, x.shape, flat, plain)
    if layout.input_call is None and "G" in needs:
        for number, x in enumerate(inputs):
            slots[f"input:{number}"] = _WatchedPlace(x, x.shape, lambda slope: slope.reshape(n, -1), True)
    return slots


def _slot(operation: Operation, rows: Rows, n: int, dense: bool) -> _WatchedPlace:
    """The output of an operation: (n, d) of a dense product, (n, g, d, P) of others, (n, T, D) of a lookup, (n, w, the
    other axes) of what acts entry by entry."""
    if dense:
        return _WatchedPlace(
            operation.edge, operation.shape, lambda slope: rows.in_front(slope, n).reshape(n, -1), rows == FRONT
        )
    if isinstance(operation, Product | Bias):
        adapter = operation.adapter
        return _WatchedPlace(
            operation.edge, operation.shape, lambda slope: adapter.by_position(rows.in_front(slope, n), n)
        )
    if isinstance(operation, Lookup):
        width = operation.shape[-1]
        return _WatchedPlace(
            operation.edge, operation.shape, lambda slope: rows.by_sample(slope, n).reshape(n, -1, width)
        )
    return _WatchedPlace(operation.edge, operation.shape, lambda slope: rows.by_sample(slope, n))


def _all_outputs(
    slots: dict[str, _WatchedPlace], start: PassStart, f: Tensor, pool: Pool, live: list[bool] | None, keep_graph: bool
) -> dict[str, Tensor]:
    """The slopes of all outputs: of several at once where that can be."""
    if not slots:
        return {}
    if live is None and pool.batched is not False and all(slot.plain for slot in slots.values()):
        each = sum(slot.size.numel() for slot in slots.values()) * f.element_size()
        count = min(f.shape[1], pool.batch_bytes // max(1, each))
        if count > 1:
            try:
                found = _several_outputs(slots, start, f, pool, count, keep_graph)
            except RuntimeError as error:  # a function of the user's own without a batching rule
                if "memory" in str(error) or pool.batched:
                    raise
                pool.batched = False
            else:
                pool.batched = True
                return found
    return _each_output_alone(slots, start, f, pool, live or [True] * f.shape[1], keep_graph)


def _several_outputs(
    slots: dict[str, _WatchedPlace], start: PassStart, f: Tensor, pool: Pool, count: int, keep_graph: bool
) -> dict[str, Tensor]:
    """Several outputs' backward passes in one. Small networks gain most: there a pass costs more to call than to
    compute."""
    n, N = f.shape
    wanted = [slot.at for slot in slots.values()]
    found = {} if count == N else {name: slot.buffer(name, f, pool) for name, slot in slots.items()}
    for first in range(0, N, count):
        rows = slice(first, min(N, first + count))
        retain = keep_graph or rows.stop < N or pool.batched is None  # should the first attempt fail
        slopes = start.slopes(wanted, rows, retain)
        for (name, slot), slope in zip(slots.items(), slopes, strict=True):
            slope = f.new_zeros(rows.stop - first, *slot.size) if slope is None else slope
            slope = slope.to(f.dtype).reshape(len(slope), n, -1).transpose(0, 1)
            if count == N:
                found[name] = slope  # as it is: a copy would cost as much as its Gram
            else:
                found[name][:, rows] = slope
    return found


def _each_output_alone(
    slots: dict[str, _WatchedPlace], start: PassStart, f: Tensor, pool: Pool, live: list[bool], keep_graph: bool
) -> dict[str, Tensor]:
    """A backward pass for each output that lives."""
    wanted = [slot.at for slot in slots.values()]
    found = {name: slot.buffer(name, f, pool) for name, slot in slots.items()}
    last = max((k for k, lives in enumerate(live) if lives), default=-1)
    for k, lives in enumerate(live):
        slopes = start.slope(wanted, k, keep_graph or k < last) if lives else [None] * len(wanted)
        for slot, buffer, slope in zip(slots.values(), found.values(), slopes, strict=True):
            buffer[:, k] = 0 if slope is None else slot.shape(slope)
    return found
