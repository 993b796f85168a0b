"""The one pass: one forward and N backwards over all layers, a chunk of samples at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, get_args

import torch
from torch import Tensor, nn

from flatlens.errors import BadModel
from flatlens.estimate import Progress
from flatlens.grams.contract import gram, joined, norm2, quadratic
from flatlens.grams.dense import DenseJacobian
from flatlens.grams.first_layer import input_gram, input_squares
from flatlens.grams.layer_grams import ChunkGrams, LayerGrams
from flatlens.grams.layout import Layout, PlanBroken, Weight
from flatlens.grams.leftover import one_by_one, per_sample_gradients
from flatlens.grams.lookups import looked_up
from flatlens.grams.record import Tape, run_recorded
from flatlens.grams.rows import FRONT, Rows, apart
from flatlens.grams.shared import ExplicitJacobian, SharedJacobian, Wanted
from flatlens.grams.sketch import Sketch
from flatlens.grams.slopes import Certificate, Pool, is_first, slopes_of
from flatlens.grams.small import entry_jacobian
from flatlens.grams.trial import hides, operations_of
from flatlens.operations.graph import Place
from flatlens.operations.layers import by_sample
from flatlens.operations.reads import Operation
from flatlens.problem import Batch, Problem
from flatlens.problem.loss import labels_known
from flatlens.problem.ranks import ALONE, Ranks
from flatlens.problem.sequences import Tokens
from flatlens.problem.state import differentiable

ALL = ("G", "K", "R")
Saved: TypeAlias = dict[tuple[str, int], Tensor]
"""What the plan's operations read beside a parameter, samples in front: by (parameter or layer, its k-th operation)."""
CHUNK = 256  #: samples at most: more gain nothing (benchmarks/one_pass.py)


def one_pass(
    problem: Problem,
    model: nn.Module,
    layout: Layout,
    feature_scale: Mapping[str, Tensor] | None = None,
    progress: Progress | None = None,
    needs: Collection[str] = ALL,
    sketch: Sketch | None = None,
    ranks: Ranks = ALONE,
) -> Generator[ChunkGrams, None, None]:
    """Yield the Grams of every place, chunk by chunk; a chunk is dead once the next is asked for.

    Of all the data, or of what is this process's among `ranks` that share it.

    With a `sketch` every chunk comes once for each of its probes: as seen through a random combination of the outputs.

    `needs` says what will be read: without "G" no slope is taken at any input; the rest is made on first use, together.

    `feature_scale`: the spread of each layer's input features over all data, for measures that normalise by it.
    """
    problem = problem.as_asked()
    rows = problem.outputs if sketch is None else 2
    most = min(CHUNK, layout.samples_at_once(problem.memory, rows, needs))
    with problem.measuring(model), differentiable(model.parameters()):  # the graph then shows frozen ones, too
        walk = _Walk(problem, model, layout, feature_scale or {}, Pool(problem.memory), frozenset(needs))
        for number, raw in problem.walked(most, "one pass", progress, ranks):
            yield from walk.chunk(problem.place(raw), sketch, number)
            walk.settle(1)
        walk.settle(0)


@dataclass(frozen=True, eq=False)
class _Walk:
    """What stays the same from chunk to chunk."""

    problem: Problem
    model: nn.Module
    layout: Layout
    scale: Mapping[str, Tensor]
    pool: Pool
    needs: frozenset[str]
    open: list[_Verdict] = field(default_factory=list)  #: of the last chunks, not looked at

    def settle(self, most: int) -> None:
        """Look at certificates until `most` are left open: a chunk's own, while the device works on it."""
        while len(self.open) > most:
            self.open.pop(0).require(self.problem, self.model, self.layout)

    def chunk(self, batch: Batch, sketch: Sketch | None, number: int) -> Iterator[ChunkGrams]:
        """One chunk: once as it is, or once for each probe."""
        problem = self.problem
        tape, inputs, f, y = run_recorded(problem, self.model, batch)
        self.layout.require_same(tape, inputs, self.model, batch)
        seen = _Seen(tape, [inputs[number] for number in self.layout.inputs], batch, number, self._saved(tape, len(f)))
        per_mass = problem.n / problem.mass
        outputs = f.detach().to(torch.float64)
        with labels_known():
            losses = problem.loss.values(outputs, y).detach().to(torch.float64) * per_mass
            hits = problem.loss.correct(outputs, y)
        if sketch is None:
            tokens = y if isinstance(y, Tokens) else None
            with labels_known():
                C = problem.loss.output_hessian(f, y) * per_mass
            yield ChunkGrams(number, losses, hits, *self._grams(seen, f, C, tokens=tokens))
            return
        for probe, (rows, C) in enumerate(sketch.views(problem.loss, f, y, number)):
            combined = (rows.to(f) @ f[..., None])[..., 0]
            C = C * per_mass if sketch.weighted else C
            more = probe + 1 < sketch.probes
            grams = self._grams(seen, combined, C, rows=rows, keep_graph=more, certify=probe == 0)
            yield ChunkGrams(number, losses, hits, *grams)

    def _saved(self, tape: Tape, n: int) -> Saved:
        """What autograd keeps of the operations' inputs until the last backward pass."""
        layout, found = self.layout, dict[tuple[str, int], Tensor]()
        operations = operations_of(tape, layout.structure)
        reads: dict[tuple[str, int], tuple[Operation, str]] = {
            (name, k): (read, slot)
            for name, slots in (*layout.small.items(), *layout.lookups.items())
            for k, (read, slot) in enumerate(zip(tape.reads[name] or (), slots, strict=True))
        }
        for w in (*layout.weights.values(), *layout.outside.values()):
            reads |= {(w.layer, k): (operations[slot], slot) for k, slot in enumerate(w.slots)}
        for at, (read, slot) in reads.items():
            if (tensor := read.kept()) is not None:
                found[at] = layout.rows[slot].in_front(tensor, n)
        return found

    def _grams(
        self,
        seen: _Seen,
        f: Tensor,
        C: Tensor,
        *,
        tokens: Tokens | None = None,
        rows: Tensor | None = None,
        keep_graph: bool = False,
        certify: bool = True,
    ) -> tuple[LayerGrams | None, dict[str, LayerGrams], dict[str, LayerGrams]]:
        """(network's input, layers, parameters outside them) for outputs f, `rows` of the network's where given."""
        problem, layout, needs, tape = self.problem, self.layout, self.needs, seen.tape
        live = None if tokens is None else _live(f, tokens)
        named: dict[str, Tensor] = dict(self.model.named_parameters())
        left = {name: named[name] for name in layout.leftovers}
        generator = torch.Generator().manual_seed(seen.number) if certify else None
        slopes = slopes_of(
            f, tape, layout, seen.inputs, needs, self.pool,
            live=live, keep_graph=keep_graph, certify=generator, parameters=left,
        )  # fmt: skip
        explicit = per_sample_gradients(problem, self.model, seen.batch, layout.leftovers, rows)
        if slopes.certificate is not None:
            explicit = self._certified(seen, slopes.found, slopes.certificate, explicit, rows)
        place = partial(LayerGrams, C, f.detach().to(torch.float64), problem.precision, tokens=tokens)
        chunk = _Chunk(problem, tape, layout, slopes.found, seen.saved, explicit, C, needs)
        layers = chunk.layers(place, self.scale)
        if layout.input_is is not None:
            network: LayerGrams | None = layers[layout.input_is]
        else:
            held = [layout.unpadded(x.detach().to(f.dtype), tape) for x in seen.inputs]
            network = _network_input(slopes.found, held, place) if "G" in needs else None
        others = {name: place(weight=J, counts_weight=True) for name, J in chunk.others(named).items()}
        return network, layers, others

    def _certified(
        self,
        seen: _Seen,
        found: dict[str, Tensor],
        certificate: Certificate,
        explicit: dict[str, Tensor],
        rows: Tensor | None,
    ) -> dict[str, Tensor]:
        """The gradients of the leftovers, where need be sample by sample; raises where the plan does not hold."""
        layout, tolerance = self.layout, _tolerance(self.problem)
        flags = certificate.holds(found, tolerance)
        hidden = flags.new_ones(())
        if layout.hides_padding and seen.tape.mask is not None:
            inputs = [raw for name, raw in certificate.raw.items() if name.startswith(("x:", "input:"))]
            hidden = hides(seen.tape.mask, inputs)
        self.open.append(_Verdict(seen.batch, list(certificate.totals), torch.cat([flags, hidden[None]])))
        wrong = _wrong(certificate, explicit, tolerance)
        if wrong:  # torch's batching rules are wrong for some operations
            explicit = explicit | one_by_one(self.problem, self.model, seen.batch, wrong, rows)
            if _wrong(certificate, explicit, tolerance):
                raise samples_meet()
        return explicit


@dataclass(frozen=True, eq=False)
class _Verdict:
    """A chunk's certificate, on its device."""

    batch: Batch
    places: list[str]
    flags: Tensor  #: whether it holds at each, and whether padding has no effect

    def require(self, problem: Problem, model: nn.Module, layout: Layout) -> None:
        """Raise where the plan does not hold; what is more than rounding is found out exactly."""
        *held, hidden = self.flags.tolist()
        failing = [name for name, holds in zip(self.places, held, strict=True) if not holds]
        if failing:
            failing = _meeting(problem, model, layout, self.batch, failing)
        if any(name.startswith("input:") for name in failing):
            raise samples_meet()
        if failing or not hidden:
            raise PlanBroken([self.batch], failing)


def _meeting(problem: Problem, model: nn.Module, layout: Layout, batch: Batch, places: list[str]) -> list[str]:
    """Those of some places where samples do not lie as planned, or see each other."""
    tape, inputs, f, _ = run_recorded(problem, model, batch)
    operations, at, planned = operations_of(tape, layout.structure), dict[str, Place](), dict[str, list[Rows]]()
    for name in places:
        kind, _, key = name.partition(":")
        if kind == "input":
            at[name], planned[name] = inputs[layout.inputs[int(key)]], [FRONT]
        elif kind == "x":
            at[name], planned[name] = tape.linear[key].x, [Rows(layout.batch_axis[key])]
        else:
            at[name], planned[name] = operations[name].edge, [layout.rows[name]]
    left = apart(f, at, planned, torch.Generator().manual_seed(0))
    return [name for name in places if not left[name]]


def _tolerance(problem: Problem) -> float:
    """How far, relative to their size, slopes of one backward pass may be from sums of those of many."""
    return max(1e4 * torch.finfo(problem.dtype).eps, min(0.3, 30 * problem.precision))


def _wrong(certificate: Certificate, explicit: dict[str, Tensor], tolerance: float) -> tuple[str, ...]:
    """The leftovers whose gradients by sample do not add up to the gradient of the combination."""
    wrong = []
    for name, M in explicit.items():
        total = certificate.parameters[name].to(torch.float64)
        apart = torch.einsum("nk,nkp->p", certificate.u.to(M), M) - total.flatten()
        size = (certificate.u.to(M)[..., None] * M).square().sum().sqrt()
        if not float(apart.norm()) <= tolerance * max(float(total.norm()), float(size)):
            wrong.append(name)
    return tuple(wrong)


def samples_meet() -> BadModel:
    """The error of a network whose samples see each other on some batch."""
    return BadModel(
        "Problem(model=...): on some batch the outputs of a sample depend on other samples: per-sample derivatives do "
        "not exist. Is there a statistic over the batch, or an attention or recurrence over samples, in a rare branch?"
    )


@dataclass(frozen=True, eq=False)
class _Seen:
    """A chunk's forward pass."""

    tape: Tape
    inputs: list[Tensor]  #: those that the outputs depend on
    batch: Batch
    number: int
    saved: Saved


def _live(f: Tensor, tokens: Tokens) -> list[bool]:
    """Which outputs are those of no masked token, on one sample at least: the others are zero."""
    counts: list[bool] = tokens.counted.any(0).repeat_interleave(f.shape[1] // tokens.counted.shape[1]).tolist()
    return counts


@dataclass(frozen=True, eq=False)
class _Chunk:
    """One chunk's slopes, on their way to Grams."""

    problem: Problem
    tape: Tape
    layout: Layout
    slopes: dict[str, Tensor]
    saved: Saved
    explicit: dict[str, Tensor]
    C: Tensor
    needs: frozenset[str]

    def layers(self, place: Callable[..., LayerGrams], scale: Mapping[str, Tensor]) -> dict[str, LayerGrams]:
        """Every call of a linear layer, in execution order; the first call of a weight carries the weight."""
        layers, layout = {}, self.layout
        for key in dict.fromkeys((*layout.structure.calls, *layout.weights)):
            x = x_norm2 = None
            if key in layout.batch_axis:
                call = self.tape.linear[key]
                read = layout.unpadded(by_sample(call.read, layout.batch_axis[key]), self.tape)
                x = read.reshape(len(self.C), -1)
                x_norm2 = norm2(x)
            grams = place(None, None, x, x_norm2)
            if (weight := layout.weights.get(key)) is not None:
                self._put_weight(grams, weight, scale.get(key))
            if "G" in self.needs and key in layout.batch_axis:
                shared = grams.weight if "columns" in self.needs else None
                grams.input_gram, grams.input_squares = self._input_side(key, shared)
            layers[key] = grams
        return layers

    def _put_weight(self, grams: LayerGrams, weight: Weight, scale: Tensor | None) -> None:
        if not weight.slots and weight.parameter not in self.explicit:
            grams.readable = False
            return
        grams.weight = self.jacobian(weight)
        grams.readable, grams.whole = weight.readable, weight.whole
        grams.counts_weight = weight.parameter in self.problem.parameters
        grams.counts_bias = weight.bias in self.problem.parameters
        grams.feature_scale = scale.flatten() if weight.dense and scale is not None else scale

    def _input_side(self, key: str, jacobian: object) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        """What makes G, and the squares of the slopes, at a call's input: a dense `jacobian`, if it has them anyway."""
        if isinstance(jacobian, DenseJacobian) and self.layout.weights[key].whole:
            return jacobian.input_gram, lambda: jacobian.input_squares
        if is_first(self.layout, key):
            known = (self.layout.weights[key], self.slopes[f"z:{key}"], self.tape.linear[key].z.shape[2:])
            return partial(input_gram, *known), partial(input_squares, *known)
        below = self.slopes[f"x:{key}"]
        return partial(gram, below), partial(quadratic, None, below)

    def jacobian(self, weight: Weight) -> DenseJacobian | SharedJacobian:
        """The parameter side of a weight."""
        layout = self.layout
        wanted: frozenset[Wanted] = frozenset(what for what in get_args(Wanted) if what in self.needs)
        if not weight.slots:
            M = self.explicit[weight.parameter or ""]
            stored = M.reshape(*M.shape[:2], *weight.value.shape)
            return SharedJacobian(
                torch.vmap(torch.vmap(weight.adapter.matrix))(stored), None, weight.matrix, self.C, wanted
            )
        n = len(self.C)
        inputs = [self.saved[weight.layer, k] for k in range(len(weight.slots))]
        if weight.dense:
            (slot,) = weight.slots
            at_x = self.slopes.get(f"x:{weight.layer}") if weight.whole else None
            phi = layout.unpadded(inputs[0].reshape(n, -1), self.tape)
            return DenseJacobian(self.slopes[slot], weight.matrix, at_x, phi, norm2(phi), self.C)

        def phi_of(piece: slice) -> Tensor:
            folded = [x.reshape(n, -1, *x.shape[1:])[piece] for x in inputs]
            return joined([weight.adapter.patches(x.flatten(0, 1), len(x)) for x in folded], 3)

        J = joined([self.slopes[slot] for slot in weight.slots], 4)
        return SharedJacobian(J, phi_of, weight.matrix, self.C, wanted)

    def others(self, named: Mapping[str, Tensor]) -> dict[str, ExplicitJacobian | SharedJacobian | DenseJacobian]:
        """The parameters outside linear layers, and those of layers that act elsewhere, too."""
        layout, found = self.layout, dict[str, ExplicitJacobian | SharedJacobian | DenseJacobian]()
        mine = {weight.parameter for weight in layout.weights.values()}
        for name, M in self.explicit.items():
            if name not in mine:
                found[name] = ExplicitJacobian(M, named[name].detach().flatten().to(torch.float64), self.C)
        for name, weight in layout.outside.items():
            found[name] = self.jacobian(weight)
        for name, slots in layout.small.items():
            found[name] = self._small(name, named[name].detach(), slots)
        for name, slots in layout.lookups.items():
            parts: list[tuple[Operation, Tensor, Tensor]] = [
                (read, self.saved[name, k].reshape(len(self.C), -1), self.slopes[slot])
                for k, (read, slot) in enumerate(zip(self.tape.reads[name] or (), slots, strict=True))
            ]
            found[name] = looked_up(named[name].detach(), parts, self.C)
        return found

    def _small(self, name: str, theta: Tensor, slots: tuple[str, ...]) -> ExplicitJacobian:
        """A parameter that acts entry by entry; nothing at all where no operation reads it."""
        if not slots:
            zero = self.C.new_zeros(*self.C.shape[:2], 1)
            return ExplicitJacobian(zero, zero[0, 0], self.C)
        parts = [
            entry_jacobian(read, self.layout.rows[slot], self.slopes[slot], self.saved.get((name, k)))
            for k, (read, slot) in enumerate(zip(self.tape.reads[name] or (), slots, strict=True))
        ]
        M = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
        return ExplicitJacobian(M, theta.flatten().to(torch.float64), self.C)


def _network_input(
    slopes: dict[str, Tensor], inputs: list[Tensor], place: Callable[..., LayerGrams]
) -> LayerGrams | None:
    """The network's own input: all its floating tensors side by side."""
    if not inputs:
        return None
    Jx = joined([slopes[f"input:{number}"] for number in range(len(inputs))], 2)
    x = joined([x.reshape(len(Jx), -1) for x in inputs], 1)
    return place(partial(gram, Jx), partial(quadratic, None, Jx), x, norm2(x))
