"""The N backward passes of a chunk: output Jacobians at all watched places, and the data of the certificate.

Backward pass k differentiates the sum over samples of output k. Because samples do not affect each other, the result at
sample i's rows is sample i's own derivative: one pass gives row k of every sample's Jacobian. The certificate tests
this assumption. It is one more backward pass, of a random combination of all samples' outputs: see `certificate`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatlens.errors import out_of_memory
from flatlens.grams.certificate import Certificate
from flatlens.grams.layout import Layout
from flatlens.grams.places import WatchedPlace, watched_places
from flatlens.grams.record import Call, Tape
from flatlens.grams.unexplained import ignore_slow_batching_warning
from flatlens.operations.graph import Place

MEMORY_SHARE = 8
"""A batched backward pass may use the memory divided by this; the previous chunk still holds its part."""


class Pool:
    """Buffers for Jacobians that are computed output by output, kept for the whole pass.

    New memory for every chunk would cost as much time as the arithmetic.
    """

    def __init__(self, memory: int, *, batched: bool = True) -> None:
        self._kept: dict[str, Tensor] = {}
        self.batch_bytes = memory // MEMORY_SHARE  #: bytes of derivatives that one batched pass may return
        self.batched: bool | None = None if batched else False
        """Whether torch can batch the network's operations; None before the first attempt."""

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return an uninitialised buffer of this shape, (n, ...)."""
        kept = self._kept.get(name)
        if kept is None or len(kept) < shape[0] or kept.shape[1:] != shape[1:]:
            kept = self._kept[name] = torch.empty(shape, dtype=like.dtype, device=like.device)
        return kept[: shape[0]]

    def for_place(self, name: str, place: WatchedPlace, f: Tensor) -> Tensor:
        """Return a buffer for the derivatives of all outputs f (n, N) at a place, (n, N, ...)."""
        if not place.tokens_first:
            return self.take(name, (*f.shape, *place.kept), f)
        (n, N), (g, d, P) = f.shape, place.kept
        return self.take(name, (n, N, g, P, d), f).mT


@dataclass(frozen=True, eq=False)
class PassStart:
    """The tensor from which the backward passes begin: there the derivative of output k is `rows[k]` for every sample.

    It is f with the identity, or the input of the last layer with its weight.
    """

    at: Tensor  #: the tensor, (n, width)
    rows: Tensor  #: derivatives of the outputs in it, (N, width)

    def derivatives(self, wanted: list[Place], rows: slice, retain: bool) -> tuple[Tensor | None, ...]:
        """Return the derivatives of several outputs in one batched backward pass, (count, ...) each."""
        onto = self.rows[rows, None].expand(-1, *self.at.shape)
        with ignore_slow_batching_warning():
            return torch.autograd.grad(
                self.at, wanted, onto, retain_graph=retain, allow_unused=True, is_grads_batched=True
            )

    def derivative(self, wanted: list[Place], k: int, retain: bool) -> tuple[Tensor | None, ...]:
        """Return the derivatives of output k, summed over samples."""
        onto = self.rows[k].repeat(len(self.at), 1)
        return torch.autograd.grad(self.at, wanted, onto, retain_graph=retain, allow_unused=True)


@dataclass(frozen=True, eq=False)
class OutputJacobians:
    """The output Jacobians of a chunk, and their certificate."""

    found: dict[str, Tensor]  #: df/d(place), (n, N, ...), by place
    certificate: Certificate | None  #: None if it was not requested

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
    """Return the Jacobians df/d(place), (n, N, ...), in the network's dtype, at all places that the plan needs.

    They are views or buffers of the pool: do not write to them, and do not read them after the next chunk.

    Args:
        f: the outputs, (n, N).
        tape: the record of their forward pass.
        layout: the plan.
        inputs: the network's inputs.
        needs: what measures will read; without "G" no input is differentiated to.
        pool: buffers.
        live: for each output whether it has any derivative; None if all have.
        keep_graph: whether the graph is needed afterwards.
        certify: draws the certificate's combination; None for no certificate.
        parameters: parameters in which the certificate's combination is also differentiated.
    """
    watched = watched_places(tape, layout, inputs, len(f), needs)
    units = torch.eye(f.shape[1], dtype=f.dtype, device=f.device)
    start, known = PassStart(f, units), {}
    head = _head(tape, f)
    if head is not None and f"z:{head[0].key}" in watched and watched[f"z:{head[0].key}"].plain:
        call, W = head
        start, known = PassStart(call.x, W), {f"z:{call.key}": units, f"x:{call.key}": W}
    asked = {name: watched[name] for name in watched if name not in known}
    tested = {name: place for name, place in asked.items() if not _implied(name, tape, layout)}
    certificate = None if certify is None else certificate_of(f, tested, parameters or {}, certify)
    found = _all_outputs(asked, start, f, pool, live, keep_graph)
    found |= {name: rows.expand(len(f), *rows.shape) for name, rows in known.items() if name in watched}
    return OutputJacobians(found, certificate)


def _implied(name: str, tape: Tape, layout: Layout) -> bool:
    """Return whether samples are certainly apart at a call's input, because they are so at its output.

    A pure call treats each sample separately, so the certificate need not test its input, too.
    """
    kind, _, key = name.partition(":")
    return kind == "x" and tape.linear[key].pure and f"z:{key}" in layout.rows and not layout.ignores_padding


def certificate_of(
    f: Tensor,
    watched: dict[str, WatchedPlace],
    parameters: dict[str, Tensor],
    generator: torch.Generator,
) -> Certificate:
    """Return the derivatives of sum_ik u_ik f_ik, u random (n, N), at all places and in some parameters."""
    u = torch.randn(f.shape, generator=generator).to(f)
    wanted = [place.at for place in watched.values()] + list(parameters.values())
    rows: tuple[Tensor | None, ...] = ()
    if wanted:
        rows = torch.autograd.grad(f, wanted, u, retain_graph=True, allow_unused=True)
    totals = {
        name: place.shape(torch.zeros(place.size).to(f) if row is None else row)
        for (name, place), row in zip(watched.items(), rows, strict=False)
    }
    rest = zip(parameters.items(), rows[len(watched) :], strict=False)
    found = {name: torch.zeros_like(p) if row is None else row for (name, p), row in rest}
    return Certificate(u, totals, dict(zip(watched, rows, strict=False)), found)


def _head(tape: Tape, f: Tensor) -> tuple[Call, Tensor] | None:
    """Return the linear call that gives the network's outputs, and its matrix W (N, m); None if there is none.

    Its Jacobians need no backward pass: df/dz is the identity and df/dx is W. The graph must show f = clone(z) and
    z = x W^T + b with parameters W and b, and no hook on f, because a hook may change the gradient.
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
    """Return whether a node is a leaf, perhaps transposed, or None, as for a frozen parameter."""
    if node is not None and node.name() == "TBackward0":
        node = node.next_functions[0][0]
    return node is None or node.name() == "torch::autograd::AccumulateGrad"


def _all_outputs(
    watched: dict[str, WatchedPlace],
    start: PassStart,
    f: Tensor,
    pool: Pool,
    live: list[bool] | None,
    keep_graph: bool,
) -> dict[str, Tensor]:
    """Return the Jacobians at the watched places, from batched backward passes where torch can batch the network."""
    if not watched:
        return {}
    if live is None and pool.batched is not False and all(place.plain for place in watched.values()):
        each = sum(place.size.numel() for place in watched.values()) * f.element_size()
        count = min(f.shape[1], pool.batch_bytes // max(1, each))
        if count > 1:
            try:
                found = _several_outputs(watched, start, f, pool, count, keep_graph)
            except RuntimeError as error:  # the user's own autograd function, without a batching rule
                if out_of_memory(error) or pool.batched:
                    raise
                pool.batched = False
            else:
                pool.batched = True
                return found
    return _each_output_alone(watched, start, f, pool, live or [True] * f.shape[1], keep_graph)


def _several_outputs(
    watched: dict[str, WatchedPlace], start: PassStart, f: Tensor, pool: Pool, count: int, keep_graph: bool
) -> dict[str, Tensor]:
    """Return the Jacobians from batched backward passes of `count` outputs each.

    Small networks gain most: a single backward pass costs more time to start than to compute.
    """
    n, N = f.shape
    wanted = [place.at for place in watched.values()]
    found = {} if count == N else {name: pool.take(name, (*f.shape, *place.kept), f) for name, place in watched.items()}
    for first in range(0, N, count):
        rows = slice(first, min(N, first + count))
        retain = keep_graph or rows.stop < N or pool.batched is None  # the first attempt may fail
        derivatives = start.derivatives(wanted, rows, retain)
        for (name, place), derivative in zip(watched.items(), derivatives, strict=True):
            derivative = f.new_zeros(rows.stop - first, *place.size) if derivative is None else derivative
            derivative = derivative.to(f.dtype).reshape(len(derivative), n, -1).transpose(0, 1)
            if count == N:
                found[name] = derivative  # no copy: it would cost as much time as the Gram matrix
            else:
                found[name][:, rows] = derivative
    return found


def _each_output_alone(
    watched: dict[str, WatchedPlace], start: PassStart, f: Tensor, pool: Pool, live: list[bool], keep_graph: bool
) -> dict[str, Tensor]:
    """Return the Jacobians from one backward pass for each live output; the others' rows are 0."""
    wanted = [place.at for place in watched.values()]
    found = {name: pool.for_place(name, place, f) for name, place in watched.items()}
    last = max((k for k, lives in enumerate(live) if lives), default=-1)
    for k, lives in enumerate(live):
        derivatives = start.derivative(wanted, k, keep_graph or k < last) if lives else [None] * len(wanted)
        for place, buffer, derivative in zip(watched.values(), found.values(), derivatives, strict=True):
            buffer[:, k] = 0 if derivative is None else place.shape(derivative)
    return found
