"""The N backward passes of a chunk: output Jacobians at all watched places, and the certificate that checks them.

Backward pass k differentiates the sum over samples of output k. Because samples do not affect each other, the result at
sample i's rows is sample i's own derivative: one pass gives row k of every sample's Jacobian.

The certificate tests this assumption with one more backward pass, of a random combination s = sum_ik u_ik f_ik of all
samples' outputs. At every place of the plan, ds/d(row of sample i) must be sum_k u_ik J_ik, to rounding. And ds/dtheta,
by autograd, must be the gradient that the plan gives for a small or unexplained parameter theta (weights are proved on
the trials, see `planner`). If one of these fails, then samples affect each other, or lie elsewhere than planned, or a
parameter does not act as planned, or torch's batching is wrong. Up to rounding a wrong Jacobian passes with probability
0: its error in the sum is a linear function of u that is not 0 everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatlens.errors import out_of_memory
from flatlens.grams.autograd import each_sample_alone, ignore_slow_batching_warning
from flatlens.grams.plan import (
    BATCHING,
    FRONT,
    Plan,
    PlanBroken,
    Rows,
    Weight,
    coupled_samples_error,
    independent_rows,
    padding_ignored,
)
from flatlens.grams.record import Call, Tape, run_recorded
from flatlens.grams.weight_jacobians import SMALLEST2, RowProduct, norm2, pieces, row_products
from flatlens.operations.graph import LEAF, Place
from flatlens.operations.layers import Adapter, Convolution
from flatlens.operations.parameter_uses import Bias, Lookup, Product
from flatlens.problem import Batch, Problem
from flatlens.problem.batches import take


@dataclass(frozen=True, eq=False)
class WatchedPlace:
    """A place to differentiate to, and the form in which the derivatives are kept."""

    at: Place
    size: torch.Size  #: shape of autograd's derivative
    n: int
    rows: Rows = FRONT  #: where its samples lie
    form: tuple[int, ...] | None = (-1,)  #: of a sample's derivative; None: (w, the other axes)
    adapter: Adapter | None = None  #: of a product that is not dense: its derivatives are kept as (n, g, d, P)
    plain: bool = False  #: whether the derivative already has one row per sample

    def shape(self, derivative: Tensor) -> Tensor:
        """Return a derivative in its form, samples in front."""
        by_sample = self.rows.by_sample(derivative, self.n)
        if self.adapter is not None:
            return self.adapter.by_position(by_sample.flatten(0, 1), self.n)
        return by_sample if self.form is None else by_sample.reshape(self.n, *self.form)

    @property
    def kept(self) -> torch.Size:
        """Return the shape of a sample's derivative after `shape`."""
        return self.shape(torch.empty(self.size, device="meta")).shape[1:]

    @property
    def tokens_first(self) -> bool:
        """Return whether the kept form (g, d, P) is stored as (g, P, d), as it comes."""
        return self.adapter is not None and self.adapter.token_wise


def watched_places(
    tape: Tape, plan: Plan, inputs: list[Tensor], n: int, needs: Collection[str]
) -> dict[str, WatchedPlace]:
    """Return all places at which output Jacobians are needed, by name."""
    dense = {place for w in plan.weights.values() if w.dense for place in w.products}
    operations, watched = plan.operations(tape), dict[str, WatchedPlace]()
    for name, rows in plan.rows.items():
        one = operations[name]
        adapter = one.adapter if isinstance(one, Product | Bias) and name not in dense else None
        form = (-1,) if name in dense else (-1, one.shape[-1]) if isinstance(one, Lookup) else None
        plain = name in dense and rows == FRONT
        watched[name] = WatchedPlace(one.edge, one.shape, n, rows, form, adapter, plain)
    for key, axis in plan.batch_axis.items() if "G" in needs else ():
        if input_route(plan, key, needs) == "place":
            x = tape.linear[key].x
            watched[f"x:{key}"] = WatchedPlace(x, x.shape, n, Rows(axis), plain=f"z:{key}" in dense and axis == 0)
    if plan.input_call is None and "G" in needs:
        watched |= {f"input:{number}": WatchedPlace(x, x.shape, n, plain=True) for number, x in enumerate(inputs)}
    return watched


def same_tokens(plan: Plan, weight: Weight) -> bool:
    """Return whether a weight acts in one call, whose input has the tokens in the order of the product's output."""
    only = weight.pure and weight.adapter.token_wise and len(weight.products) == 1 == len(weight.calls)
    return only and plan.batch_axis.get(weight.layer) == 0 and plan.rows[weight.products[0]] == FRONT


def input_route(plan: Plan, key: str, needs: Collection[str]) -> Literal["first layer", "output", "place"]:
    """Return from what G at a call's input is made.

    first layer  the output Jacobian of the only reader of the network's input, faster than by autograd
    output       J W, where the layer has fewer outputs than inputs, and only that Gram matrix is needed
    place        the derivative at the input
    """
    weight = plan.weights.get(key)
    if weight is None:
        return "place"
    alone = key == plan.input_call and weight.pure and len(weight.calls) == 1
    if alone and (weight.dense or _flips(weight.adapter)):
        return "first layer"
    _, d, m = weight.matrix.W.shape
    only_gram = not weight.dense and "squares" not in needs and not plan.ignores_padding
    return "output" if only_gram and d < m and same_tokens(plan, weight) else "place"


def input_products(
    weight: Weight, J: Tensor, out: torch.Size, wanted: Sequence[RowProduct], x: Tensor
) -> dict[RowProduct, Tensor]:
    """`row_products` of the Jacobian at the input x, from J (n, N, d), or (n, N, 1, d, P) with output size `out`."""
    if weight.dense and list(wanted) == ["gram"]:
        return {"gram": weight.matrix.gram_at_input(J)}
    if weight.dense:
        return row_products(weight.matrix.at_input(J), wanted, x=x)
    # W^T J of a few samples at a time, (n', N, M), where the matrix W is the convolution
    adapter, (n, N, _, d, _) = weight.adapter, J.shape
    assert isinstance(adapter, Convolution)
    kernel, parts = weight.value.flip(2, 3).transpose(0, 1).contiguous(), []
    for piece in pieces(n, 16 * J[0].numel()):
        z = J[piece].reshape(-1, d, *out)
        rows = F.conv2d(z, kernel, padding=_padding(adapter), dilation=adapter.dilation)
        parts.append(row_products(rows.reshape(-1, N, rows[0].numel()), wanted, x=x[piece]))
    return {what: torch.cat([part[what] for part in parts]) for what in wanted}


def _flips(adapter: Adapter) -> bool:
    """Return whether it is a 2D convolution with stride 1, one group, and zero padding smaller than its kernel."""
    return (
        isinstance(adapter, Convolution)
        and (len(adapter.kernel), adapter.groups, adapter.stride, adapter.mode) == (2, 1, (1, 1), "constant")
        and adapter.pad[::2] == adapter.pad[1::2]
        and all(p >= 0 for p in _padding(adapter))
    )


def _padding(adapter: Convolution) -> list[int]:
    sides = zip(adapter.dilation, adapter.kernel, adapter.pad[::-2], strict=True)
    return [d * (k - 1) - p for d, k, p in sides]


MEMORY_SHARE = 8
"""A batched backward pass may use the memory divided by this; the previous chunk still holds its part."""


@dataclass(eq=False)
class Pool:
    """Kept buffers for Jacobians that are computed output by output: new ones would cost as much as the arithmetic."""

    batch_bytes: int  #: bytes of derivatives that one batched pass may return
    batched: bool | None = None  #: whether torch can batch the network's operations; None before the first attempt
    _kept: dict[str, Tensor] = field(default_factory=dict)

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return an uninitialised buffer of this shape, (n, ...)."""
        kept = self._kept.get(name)
        if kept is None or len(kept) < shape[0] or kept.shape[1:] != shape[1:]:
            kept = self._kept[name] = torch.empty(shape, dtype=like.dtype, device=like.device)
        return kept[: shape[0]]


def output_jacobians(
    f: Tensor,
    tape: Tape,
    plan: Plan,
    inputs: list[Tensor],
    needs: Collection[str],
    pool: Pool,
    *,
    live: list[bool] | None = None,
    keep_graph: bool = False,
    certify: torch.Generator | None = None,
    parameters: dict[str, Tensor] | None = None,
) -> tuple[dict[str, Tensor], Certificate | None]:
    """Return the Jacobians df/d(place), (n, N, ...), by place, at all places that the plan needs, and the certificate.

    They have the network's dtype, and are views or buffers of the pool: do not write to them, and do not read them
    after the next chunk. Without "G" in `needs` no input is differentiated to. `live` says of each output whether it
    has any derivative (None: all have), `keep_graph` whether the graph is needed afterwards. `certify` draws the
    certificate's combination (None: no certificate), which is also differentiated in `parameters`.
    """
    watched = watched_places(tape, plan, inputs, len(f), needs)
    # The passes begin at f with the unit vectors; if a layer gives the outputs, at its input, with its matrix.
    units = torch.eye(f.shape[1], dtype=f.dtype, device=f.device)
    start, known = (f, units), {}
    head = _head(tape, f)
    if head is not None and f"z:{head[0].key}" in watched and watched[f"z:{head[0].key}"].plain:
        call, W = head
        start, known = (call.x, W), {f"z:{call.key}": units, f"x:{call.key}": W}
    asked = {name: watched[name] for name in watched if name not in known}
    # A pure call treats each sample separately: where samples are apart at its output, they are so at its input.
    implied = {
        f"x:{key}"
        for key, call in tape.linear.items()
        if call.pure and f"z:{key}" in plan.rows and not plan.ignores_padding
    }
    tested = {name: place for name, place in asked.items() if name not in implied}
    certificate = None if certify is None else certificate_of(f, tested, parameters or {}, certify)
    found = _all_outputs(asked, start, f, pool, live, keep_graph)
    found |= {name: rows.expand(len(f), *rows.shape) for name, rows in known.items() if name in watched}
    return found, certificate


def certificate_of(
    f: Tensor, watched: dict[str, WatchedPlace], parameters: dict[str, Tensor], generator: torch.Generator
) -> Certificate:
    """Return the derivatives of sum_ik u_ik f_ik, u random (n, N), at all places and in some parameters."""
    u = torch.randn(f.shape, generator=generator).to(f)
    wanted = [place.at for place in watched.values()] + list(parameters.values())
    rows = torch.autograd.grad(f, wanted, u, retain_graph=True, allow_unused=True) if wanted else ()
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
    # Each parameter is a leaf, the weight perhaps transposed, or None where it is frozen.
    if weight is not None and weight.name() == "TBackward0":
        weight = weight.next_functions[0][0]
    bare = all(node is None or node.name() == LEAF for node in (*bias, weight))
    if x is None or not bare or getattr(made, "_saved_alpha", 1) != 1:
        return None
    there = (call for call in tape.linear.values() if call.z.grad_fn is made and call.x.grad_fn is x)
    return next(((call, made._saved_mat2.detach().T) for call in there), None)


def _all_outputs(
    watched: dict[str, WatchedPlace],
    start: tuple[Tensor, Tensor],
    f: Tensor,
    pool: Pool,
    live: list[bool] | None,
    keep_graph: bool,
) -> dict[str, Tensor]:
    """The Jacobians at the watched places, begun at `start`: a tensor (n, width), and df in it, (N, width)."""
    (n, N), (at, units), wanted = f.shape, start, [place.at for place in watched.values()]
    each = sum(place.size.numel() for place in watched.values()) * f.element_size()
    count = min(N, pool.batch_bytes // max(1, each))
    plain = live is None and all(place.plain for place in watched.values())
    found: dict[str, Tensor] = {}
    # Batched passes of `count` outputs each, if torch can batch the network: starting a pass costs small networks most.
    if watched and plain and count > 1 and pool.batched is not False:
        if count < N:
            found = {name: pool.take(name, (n, N, *place.kept), f) for name, place in watched.items()}
        try:
            for first in range(0, N, count):
                rows = slice(first, min(N, first + count))
                retain = keep_graph or rows.stop < N or pool.batched is None  # the first attempt may fail
                with ignore_slow_batching_warning():
                    several = torch.autograd.grad(
                        at, wanted, units[rows, None].expand(-1, *at.shape),
                        retain_graph=retain, allow_unused=True, is_grads_batched=True,
                    )  # fmt: skip
                for (name, place), own in zip(watched.items(), several, strict=True):
                    own = f.new_zeros(rows.stop - first, *place.size) if own is None else own
                    own = own.to(f.dtype).reshape(len(own), n, -1).transpose(0, 1)
                    if count == N:
                        found[name] = own  # no copy: it would cost as much time as the Gram matrix
                    else:
                        found[name][:, rows] = own
            pool.batched = True
            return found
        except RuntimeError as error:  # the user's own autograd function, without a batching rule
            if out_of_memory(error) or pool.batched:
                raise
            pool.batched = False
    # One backward pass for each live output; the others' rows are 0.
    for name, place in watched.items():
        if place.tokens_first:
            g, d, P = place.kept
            found[name] = pool.take(name, (n, N, g, P, d), f).mT
        else:
            found[name] = pool.take(name, (n, N, *place.kept), f)
    outputs = [k for k in range(N) if live is None or live[k]]
    for k in range(N) if watched else ():
        derivatives: Sequence[Tensor | None] = [None] * len(wanted)
        if live is None or live[k]:
            retain = keep_graph or k < outputs[-1]
            derivatives = torch.autograd.grad(at, wanted, units[k].repeat(n, 1), retain_graph=retain, allow_unused=True)
        for place, buffer, derivative in zip(watched.values(), found.values(), derivatives, strict=True):
            buffer[:, k] = 0 if derivative is None else place.shape(derivative)
    return found


_PARAMETER = "parameter "
"""Prefix of a place's name in a check of the parameter that acts there, not of the samples' positions."""


@dataclass(frozen=True, eq=False)
class Certificate:
    """A random combination s = sum_ik u_ik f_ik of all outputs, and its derivatives."""

    u: Tensor  #: random weights, (n, N)
    totals: dict[str, Tensor]  #: ds/d(place), samples in front, by place
    raw: dict[str, Tensor | None]  #: the same in the shape that autograd returned
    parameters: dict[str, Tensor]  #: ds/dtheta, by parameter

    def apart(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return ||sum_k u_ik J_ik - ds/d(row of sample i)||^2 at each place, (n,), with the Jacobians `found`."""
        distances = {}
        for name, total in self.totals.items():
            J = found[name]
            if J.ndim > 3 and J.stride(-2) == 1:  # in the order in which it is stored, so that nothing is copied
                J, total = J.mT, total.mT
            combined = (self.u[:, None].to(J) @ J.flatten(2))[:, 0]
            distances[name] = norm2(combined - total.reshape(combined.shape))
        return distances


def shown_rounding(apart: dict[str, Tensor], found: dict[str, Tensor], places: Iterable[str]) -> Tensor | None:
    """Return how far rounding moves each sample's Jacobians at these places, over their length, (n,).

    Both derivatives of the certificate come from the same forward pass, in another order of arithmetic, and differ by
    rounding alone. As u is normal, ||sum_k u_ik dJ_ik|| is about ||dJ_i||_F. It is large where derivatives cancel, as
    behind a confident softmax. None if no place is tested.
    """
    tested = [place for place in places if place in apart]
    if not tested:
        return None
    lengths2 = []  # ||J_i||_F^2 at each place
    for J in (found[place] for place in tested):
        axes = tuple(range(2, J.ndim))
        rows = torch.linalg.vector_norm(J, dim=axes)  # in two steps: half the time
        own = rows.to(torch.float64).square().sum(1)
        # float64, which is slow, only where squares over- or underflow float32
        if J.dtype != torch.float64 and not bool(((own > SMALLEST2) & own.isfinite()).all()):
            own = torch.linalg.vector_norm(J, dim=axes, dtype=torch.float64).square().sum(1)
        lengths2.append(own)
    length2, apart2 = torch.stack(lengths2).sum(0), torch.stack([apart[place] for place in tested]).sum(0)
    return torch.where(length2 > 0, apart2 / length2, 0.0).sqrt()


@dataclass(frozen=True, eq=False)
class Checker:
    """The check of chunks against their certificates."""

    problem: Problem
    model: nn.Module
    plan: Plan

    @property
    def rtol(self) -> float:
        """Return the tolerated relative difference between a derivative and the same one from other passes."""
        return max(1e4 * torch.finfo(self.problem.dtype).eps, min(0.3, 30 * self.problem.precision))

    def check(
        self,
        tape: Tape,
        batch: Batch,
        apart: dict[str, Tensor],
        certificate: Certificate,
        rebuilt: dict[str, tuple[Tensor, Tensor]],
        batched: bool,
    ) -> ChunkCheck:
        """Compare all derivatives with autograd's; the flags stay on the device: `require` reads them, and waits."""
        # Both derivatives at each place are the same, to rounding; overflows are not compared.
        within = {name: self.rtol**2 * norm2(total).max() for name, total in certificate.totals.items()}
        flags = [((apart[name] <= most) | ~apart[name].isfinite()).all()[None] for name, most in within.items()]
        flags += self.same_gradients(certificate, rebuilt)
        padding_holds = certificate.u.new_ones((), dtype=torch.bool)
        if self.plan.ignores_padding and tape.mask is not None:
            at_inputs = [raw for name, raw in certificate.raw.items() if name.startswith(("x:", "input:"))]
            padding_holds = padding_ignored(tape.mask, at_inputs)
        places = [*certificate.totals, *(_PARAMETER + self.plan.uses(tape, name)[0][1] for name in rebuilt)]
        return ChunkCheck(batch, places, torch.cat([*flags, padding_holds[None]]), batched)

    def same_gradients(self, certificate: Certificate, rebuilt: dict[str, tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
        """Yield a flag for each parameter: whether its rebuilt gradient equals autograd's, to rounding."""
        for name, (gradient, size) in rebuilt.items():
            true = certificate.parameters[name].to(torch.float64).flatten()
            off, scale = (gradient - true).norm(), torch.maximum(true.norm(), size.max())
            yield ((off <= self.rtol * scale) | ~off.isfinite())[None]

    def require(self, check: ChunkCheck) -> None:
        """Raise PlanBroken or BadModel if the check failed. An exact test tells coupled samples from mere rounding."""
        *passed, padding_holds = check.flags.tolist()
        failing = [name for name, holds in zip(check.places, passed, strict=True) if not holds]
        wrong = [name.removeprefix(_PARAMETER) for name in failing if name.startswith(_PARAMETER)]
        suspected = [name for name in failing if not name.startswith(_PARAMETER)]
        coupled = self._coupled_places(check.batch, suspected) if suspected else []
        if any(name.startswith("input:") for name in coupled):
            raise coupled_samples_error()
        if coupled or wrong or not padding_holds:
            raise PlanBroken([check.batch], [*coupled, *wrong])
        if suspected and check.batched:  # rounding, or a wrong batching rule: re-run without batching
            raise PlanBroken([], [BATCHING])

    def unexplained(
        self, batch: Batch, explicit: dict[str, Tensor], certificate: Certificate, rows: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the per-sample gradients of unexplained parameters, computed without batching where that is wrong."""
        wrong = self._wrong(certificate, explicit)
        if wrong:  # torch's batching rules are wrong for some operations
            explicit = explicit | each_sample_alone(self.problem, self.model, batch, wrong, rows)
            inputs = [f"input:{number}" for number in range(len(self.plan.inputs))]
            still = self._wrong(certificate, explicit)  # may be mere rounding, of derivatives that cancel
            if still and (self._alone_differ(batch) or self._coupled_places(batch, inputs)):
                raise coupled_samples_error()
        return explicit

    def _wrong(self, certificate: Certificate, explicit: dict[str, Tensor]) -> tuple[str, ...]:
        """Return the parameters whose per-sample gradients, combined by u, do not give ds/dtheta."""
        sums = {}
        for name, M in explicit.items():
            u = certificate.u.to(M)
            sums[name] = torch.einsum("nk,nkp->p", u, M), (u[..., None] * M).square().sum().sqrt()
        same = self.same_gradients(certificate, sums)
        return tuple(name for name, right in zip(sums, same, strict=True) if not bool(right))

    def _coupled_places(self, batch: Batch, places: list[str]) -> list[str]:
        """Return those of the given places where samples do not lie as planned, or affect each other's outputs."""
        plan = self.plan
        tape, inputs, f, _ = run_recorded(self.problem, self.model, batch)
        operations, at, planned = plan.operations(tape), dict[str, Place](), dict[str, list[Rows]]()
        for name in places:
            kind, _, key = name.partition(":")
            if kind == "input":
                at[name], planned[name] = inputs[plan.inputs[int(key)]], [FRONT]
            elif kind == "x":
                at[name], planned[name] = tape.linear[key].x, [Rows(plan.batch_axis[key])]
            else:
                at[name], planned[name] = operations[name].edge, [plan.rows[name]]
        left = independent_rows(f, at, planned, torch.Generator().manual_seed(0))
        return [name for name in places if not left[name]]

    def _alone_differ(self, batch: Batch) -> bool:
        """Return whether some sample alone has other outputs than in its batch."""
        with torch.no_grad():
            together = self.problem.run(self.model, batch)[0]
            alone = [self.problem.run(self.model, take(batch, i, i + 1))[0] for i in range(len(together))]
        return float((torch.cat(alone) - together).abs().max()) > self.rtol * float(together.abs().max())


@dataclass(frozen=True, eq=False)
class ChunkCheck:
    """The result of a chunk's certificate, still on the device."""

    batch: Batch
    places: list[str]  #: names of the places and parameters that were compared
    flags: Tensor  #: whether each place passes; the last flag says whether padding has no effect
    batched: bool  #: whether several backward passes ran as one batched pass
