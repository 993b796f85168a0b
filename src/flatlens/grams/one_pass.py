"""The one pass: one forward and N backwards over all layers, a chunk of samples at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import get_args

import torch
from torch import Tensor, nn

from flatlens.estimate import Progress
from flatlens.grams.contract import gram, joined, norm2, quadratic
from flatlens.grams.dense import DenseJacobian
from flatlens.grams.first_layer import input_gram, input_squares, knows_its_input
from flatlens.grams.layer_grams import ChunkGrams, LayerGrams
from flatlens.grams.layout import Layout, Weight
from flatlens.grams.leftover import per_sample_gradients, slow_batching_is_fine
from flatlens.grams.lookups import looked_up
from flatlens.grams.record import Call, Tape, run_recorded
from flatlens.grams.shared import ExplicitJacobian, SharedJacobian, Wanted
from flatlens.grams.sketch import Sketch
from flatlens.problem import Batch, LinearLayer, Problem, is_linear
from flatlens.problem.layers import affine_gradient, by_position, by_sample, normalised, patches
from flatlens.problem.loss import labels_known
from flatlens.problem.ranks import ALONE, Ranks
from flatlens.problem.sequences import Tokens

ALL = ("G", "K", "R")
CHUNK = 256  #: samples at most: more gain nothing (benchmarks/one_pass.py)
TOGETHER = (
    2**25
)  #: bytes of slopes that one batched backward pass may give: many small passes cost more than their sums


def one_pass(
    problem: Problem,
    model: nn.Module,
    layout: Layout,
    feature_scale: Mapping[str, Tensor] | None = None,
    progress: Progress | None = None,
    needs: Collection[str] = ALL,
    sketch: Sketch | None = None,
    ranks: Ranks = ALONE,
) -> Iterator[ChunkGrams]:
    """Yield the Grams of every place, chunk by chunk; a chunk is dead once the next is asked for.

    Of all the data, or of what is this process's among `ranks` that share it.

    With a `sketch` every chunk comes once for each of its probes: as seen through a random combination of the outputs.

    `needs` says what will be read: without "G" no slope is taken at any input; the rest is made on first use, together.

    `feature_scale`: the spread of each layer's input features over all data, for measures that normalise by it.
    """
    problem = problem.as_asked()
    rows = problem.outputs if sketch is None else 2
    most = min(CHUNK, layout.samples_at_once(problem.memory, rows, needs))
    with problem.measuring(model):
        walk = _Walk(problem, model, layout, feature_scale or {}, _Pool(), frozenset(needs))
        for number, raw in problem.walked(most, "one pass", progress, ranks):
            yield from walk.chunk(problem.place(raw), sketch, number)


class _Pool:
    """Buffers that live as long as the pass: fresh memory for every chunk would cost as much as the arithmetic."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self.batches: bool | None = None  #: whether torch can batch the network's operations; None: nobody tried

    def take(self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
        """An uninitialised buffer of this shape; the samples come first."""
        kept = self._kept.get(name)
        if kept is None or len(kept) < shape[0] or kept.shape[1:] != shape[1:] or kept.dtype != dtype:
            kept = self._kept[name] = torch.empty(shape, dtype=dtype, device=like.device)
        return kept[: shape[0]]


@dataclass(eq=False)
class _Slot:
    """Where the N slopes at one tensor are gathered, (n, N, ...)."""

    at: Tensor
    buffer: Tensor
    shape: Callable[[Tensor], Tensor]  # a slope as the buffer holds it
    plain: bool = False  # whether that is the slope itself, samples first, one row each

    def put(self, k: int, slope: Tensor | None) -> None:
        if slope is None:
            self.buffer[:, k].zero_()
        else:
            self.buffer[:, k] = self.shape(slope)

    def put_many(self, start: int, slopes: Tensor | None, count: int) -> None:
        """Those of `count` outputs from `start` on, (count, n, ...)."""
        held = self.buffer[:, start : start + count]
        if slopes is None:
            held.zero_()
        else:
            held.copy_(slopes.reshape(count, len(held), -1).transpose(0, 1))


@dataclass(frozen=True, eq=False)
class _Walk:
    """What stays the same from chunk to chunk."""

    problem: Problem
    model: nn.Module
    layout: Layout
    scale: Mapping[str, Tensor]
    pool: _Pool
    needs: frozenset[str]

    def chunk(self, batch: Batch, sketch: Sketch | None, number: int) -> Iterator[ChunkGrams]:
        """One chunk: once as it is, or once for each probe."""
        problem = self.problem
        tape, inputs, f, y = run_recorded(problem, self.model, batch)
        inputs = [inputs[number] for number in self.layout.inputs]
        self.layout.require_same(tape, len(f))
        per_mass = problem.n / problem.mass
        outputs = f.detach().to(torch.float64)
        with labels_known():
            losses = problem.loss.values(outputs, y).detach().to(torch.float64) * per_mass
            hits = problem.loss.correct(outputs, y)
        if sketch is None:
            tokens = y if isinstance(y, Tokens) else None
            with labels_known():
                C = problem.loss.output_hessian(f, y) * per_mass
            grams = self._grams(tape, inputs, f, C, batch, tokens=tokens)
            yield ChunkGrams(number, losses, hits, *grams)
            return
        for probe, (rows, C) in enumerate(sketch.views(problem.loss, f, y, number)):
            seen = (rows.to(f) @ f[..., None])[..., 0]
            C = C * per_mass if sketch.weighted else C
            more = probe + 1 < sketch.probes
            grams = self._grams(tape, inputs, seen, C, batch, rows=rows, keep_graph=more)
            yield ChunkGrams(number, losses, hits, *grams)

    def _grams(
        self,
        tape: Tape,
        inputs: list[Tensor],
        f: Tensor,
        C: Tensor,
        batch: Batch,
        *,
        tokens: Tokens | None = None,
        rows: Tensor | None = None,
        keep_graph: bool = False,
    ) -> tuple[LayerGrams | None, dict[str, LayerGrams], dict[str, LayerGrams]]:
        """(network's input, layers, parameters outside them) for outputs f, `rows` of the network's where given."""
        problem, model, layout, needs = self.problem, self.model, self.layout, self.needs
        slots = _slots(tape, layout, inputs if "G" in needs else [], f, self.pool, needs)
        if tokens is not None or not _fill_together(slots, f, keep_graph, self.pool):
            _fill(slots, f, keep_graph, _live(f, tokens))
        explicit = {
            **_norm_jacobians(problem, tape, layout, slots),
            **per_sample_gradients(problem, model, batch, layout.leftovers, rows),
        }
        place = partial(LayerGrams, C, f.detach().to(torch.float64), problem.precision, tokens=tokens)
        layers = _layers(problem, tape, layout, slots, place, self.scale, needs)
        if layout.input_is is not None:
            network: LayerGrams | None = layers[layout.input_is]
        else:
            held = [layout.unpadded(x.detach().to(f.dtype), tape) for x in inputs]
            network = _network_input(slots, held, place) if "G" in needs else None
        named = dict(model.named_parameters())
        jacobians = {
            name: ExplicitJacobian(M, named[name].detach().flatten().to(torch.float64), C)
            for name, M in explicit.items()
        }
        for name, keys in layout.lookups.items():
            calls, buffers = [tape.lookups[key] for key in keys], [slots[f"e:{key}"].buffer for key in keys]
            jacobians[name] = looked_up(named[name].detach(), calls, buffers, C)
        return network, layers, {name: place(weight=J, counts_weight=True) for name, J in jacobians.items()}


def _slots(
    tape: Tape, layout: Layout, inputs: list[Tensor], f: Tensor, pool: _Pool, needs: frozenset[str]
) -> dict[str, _Slot]:
    """One slot per tensor at which slopes are wanted: `z:call`, `x:call`, `n:norm call` and `input:number`."""
    n, N = f.shape
    slots: dict[str, _Slot] = {}
    dense = {call for weight in layout.weights.values() if weight.dense for call in weight.calls}

    def add(name: str, at: Tensor, shape: Callable[[Tensor], Tensor], dtype: torch.dtype, plain: bool = False) -> None:
        held = shape(at.detach()).shape
        slots[name] = _Slot(at, pool.take(name, (n, N, *held[1:]), f, dtype), shape, plain)

    for key, call in tape.linear.items():
        if key not in layout.batch_axis:
            continue
        assert is_linear(call.module)
        axis = layout.batch_axis[key]

        def flat(slope: Tensor, axis: int = axis) -> Tensor:
            return by_sample(slope, axis).reshape(n, -1)

        def positions(slope: Tensor, axis: int = axis, module: LinearLayer = call.module) -> Tensor:
            return by_position(module, by_sample(slope, axis), n)

        if key in dense:
            add(f"z:{key}", call.z, flat, torch.float64, axis == 0)
        else:
            add(f"z:{key}", call.z, positions, f.dtype)
        if "G" in needs and not _is_first(layout, key):
            add(f"x:{key}", call.x, flat, torch.float64, axis == 0 and key in dense)
    for key in layout.norms:
        add(f"n:{key}", tape.norms[key].z, lambda slope: slope, f.dtype)
    for key in (key for calls in layout.lookups.values() for key in calls):
        add(f"e:{key}", tape.lookups[key].z, lambda slope: slope.reshape(n, -1, slope.shape[-1]), f.dtype)
    if layout.input_is is None:
        for number, x in enumerate(inputs):
            add(f"input:{number}", x, lambda slope: slope.reshape(n, -1), torch.float64, True)
    return slots


def _fill_together(slots: dict[str, _Slot], f: Tensor, keep_graph: bool, pool: _Pool) -> bool:
    """Several outputs' backward passes in one, where every slot is plain; False where that is not so, or cannot be.

    So it is where all layers are dense. Small ones gain most: there a pass costs more to call than to compute.
    """
    n, N = f.shape
    each = sum(slot.at.numel() * slot.at.element_size() for slot in slots.values())
    count = min(N, TOGETHER // max(1, each))
    if pool.batches is False or count < 2 or not slots or not all(slot.plain for slot in slots.values()):
        return False
    wanted = [slot.at for slot in slots.values()]
    units = torch.eye(N, dtype=f.dtype, device=f.device)[:, None].expand(N, n, N)
    try:
        for start in range(0, N, count):
            onto = units[start : start + count]
            retain = keep_graph or start + count < N or pool.batches is None  # should the first attempt fail
            with slow_batching_is_fine():
                slopes = torch.autograd.grad(
                    f, wanted, onto, retain_graph=retain, allow_unused=True, is_grads_batched=True
                )
            for slot, slope in zip(slots.values(), slopes, strict=True):
                slot.put_many(start, slope, len(onto))
    except RuntimeError as error:  # a function of the user's own without a batching rule
        if "memory" in str(error) or pool.batches:
            raise
        pool.batches = False
        return False
    pool.batches = True
    return True


def _live(f: Tensor, tokens: Tokens | None) -> list[bool]:
    """Which outputs are those of no masked token, on one sample at least: the others are zero."""
    if tokens is None:
        return [True] * f.shape[1]
    counts: list[bool] = tokens.counted.any(0).repeat_interleave(f.shape[1] // tokens.counted.shape[1]).tolist()
    return counts


def _fill(slots: dict[str, _Slot], f: Tensor, keep_graph: bool, live: list[bool]) -> None:
    """A backward pass for each of the N outputs that lives; no gradient at a weight is ever asked for."""
    wanted = [slot.at for slot in slots.values()]
    last = max((k for k, lives in enumerate(live) if lives), default=-1)
    for k, lives in enumerate(live) if wanted else ():
        if not lives:
            for slot in slots.values():
                slot.put(k, None)
            continue
        onto = torch.zeros_like(f)
        onto[:, k] = 1
        slopes = torch.autograd.grad(f, wanted, onto, retain_graph=keep_graph or k < last, allow_unused=True)
        for slot, slope in zip(slots.values(), slopes, strict=True):
            slot.put(k, slope)


def _layers(
    problem: Problem,
    tape: Tape,
    layout: Layout,
    slots: dict[str, _Slot],
    place: Callable[..., LayerGrams],
    scale: Mapping[str, Tensor],
    needs: frozenset[str],
) -> dict[str, LayerGrams]:
    """Every linear call, in execution order; the first call of a weight carries the weight."""
    layers = {}
    for key, call in tape.linear.items():
        if key not in layout.batch_axis:
            continue
        x = layout.unpadded(by_sample(call.read, layout.batch_axis[key]), tape)
        x = x.reshape(len(slots[f"z:{key}"].buffer), -1)
        x_norm2 = norm2(x)
        grams = place(None, None, x, x_norm2)
        if key in layout.weights:
            weight = layout.weights[key]
            grams.weight = _jacobian(weight, tape, layout, slots, x, x_norm2, grams.C, needs)
            grams.explained = weight.explained
            grams.counts_weight = weight.parameter in problem.parameters
            grams.counts_bias = weight.bias in problem.parameters
            grams.feature_scale = scale[key].flatten() if weight.dense and key in scale else scale.get(key)
        if "G" in needs:
            shared = grams.weight if "columns" in needs else None
            grams.input_gram, grams.input_squares = _input_side(layout, key, call, slots, shared)
        layers[key] = grams
    return layers


def _is_first(layout: Layout, key: str) -> bool:
    """Whether the call alone reads the network's input and its slope there follows from the one at its output."""
    return key == layout.input_is and key in layout.weights and knows_its_input(layout.weights[key])


def _input_side(
    layout: Layout, key: str, call: Call, slots: dict[str, _Slot], jacobian: object
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """What makes G, and the squares of the slopes, at a call's input: a dense `jacobian`, if it makes them anyway."""
    if isinstance(jacobian, DenseJacobian):
        return jacobian.input_gram, lambda: jacobian.input_squares
    if _is_first(layout, key):
        known = (layout.weights[key], slots[f"z:{key}"].buffer, call.z.shape[2:])
        return partial(input_gram, *known), partial(input_squares, *known)
    below = slots[f"x:{key}"].buffer
    return partial(gram, below), partial(quadratic, None, below)


def _jacobian(
    weight: Weight,
    tape: Tape,
    layout: Layout,
    slots: dict[str, _Slot],
    x: Tensor,
    x_norm2: Tensor,
    C: Tensor,
    needs: frozenset[str],
) -> DenseJacobian | SharedJacobian:
    if weight.dense:
        below = slots.get(f"x:{weight.layer}")
        return DenseJacobian(
            slots[f"z:{weight.layer}"].buffer, weight.matrix, None if below is None else below.buffer, x, x_norm2, C
        )
    J = [slots[f"z:{key}"].buffer for key in weight.calls]
    inputs = [by_sample(tape.linear[key].read, layout.batch_axis[key]) for key in weight.calls]
    n = len(J[0])

    def phi(piece: slice) -> Tensor:
        folded = [x.reshape(n, -1, *x.shape[1:])[piece] for x in inputs]
        return joined([patches(weight.module, x.flatten(0, 1), len(x)) for x in folded], 3)

    wanted: frozenset[Wanted] = frozenset(what for what in get_args(Wanted) if what in needs)
    return SharedJacobian(joined(J, 4), phi, weight.matrix, C, wanted)


def _norm_jacobians(problem: Problem, tape: Tape, layout: Layout, slots: dict[str, _Slot]) -> dict[str, Tensor]:
    """df/dgamma and df/dbeta of every norm, (n, N, size); several calls of one norm add."""
    found: dict[str, Tensor] = {}
    for key, names in layout.norms.items():
        call, slopes = tape.norms[key], slots[f"n:{key}"].buffer
        xhat = normalised(call.module, call.read)
        n, N = slopes.shape[:2]
        for name, rows in zip(names, (slopes * xhat[:, None], slopes), strict=True):
            if name in problem.parameters:
                M = affine_gradient(call.module, rows.flatten(0, 1), n * N).reshape(n, N, -1).to(torch.float64)
                found[name] = found[name] + M if name in found else M
    return found


def _network_input(
    slots: dict[str, _Slot], inputs: list[Tensor], place: Callable[..., LayerGrams]
) -> LayerGrams | None:
    """The network's own input: all its floating tensors side by side."""
    if not inputs:
        return None
    Jx = joined([slots[f"input:{number}"].buffer for number in range(len(inputs))], 2)
    x = joined([x.reshape(len(Jx), -1) for x in inputs], 1)
    return place(partial(gram, Jx), partial(quadratic, None, Jx), x, norm2(x))
