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
from flatlens.grams.first_layer import input_gram, input_squares
from flatlens.grams.layer_grams import ChunkGrams, LayerGrams
from flatlens.grams.layout import Layout, Weight
from flatlens.grams.leftover import per_sample_gradients
from flatlens.grams.lookups import looked_up
from flatlens.grams.record import Call, Tape, run_recorded
from flatlens.grams.shared import ExplicitJacobian, SharedJacobian, Wanted
from flatlens.grams.sketch import Sketch
from flatlens.grams.slopes import Pool, is_first, slopes_of
from flatlens.problem import Batch, Problem
from flatlens.problem.layers import affine_gradient, by_sample, normalised, patches
from flatlens.problem.loss import labels_known
from flatlens.problem.ranks import ALONE, Ranks
from flatlens.problem.sequences import Tokens

ALL = ("G", "K", "R")
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
        walk = _Walk(problem, model, layout, feature_scale or {}, Pool(problem.memory), frozenset(needs))
        for number, raw in problem.walked(most, "one pass", progress, ranks):
            yield from walk.chunk(problem.place(raw), sketch, number)


@dataclass(frozen=True, eq=False)
class _Walk:
    """What stays the same from chunk to chunk."""

    problem: Problem
    model: nn.Module
    layout: Layout
    scale: Mapping[str, Tensor]
    pool: Pool
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
        live = None if tokens is None else _live(f, tokens)
        slopes = slopes_of(f, tape, layout, inputs, needs, self.pool, live=live, keep_graph=keep_graph)
        explicit = {
            **_norm_jacobians(problem, tape, layout, slopes),
            **per_sample_gradients(problem, model, batch, layout.leftovers, rows),
        }
        place = partial(LayerGrams, C, f.detach().to(torch.float64), problem.precision, tokens=tokens)
        layers = _layers(problem, tape, layout, slopes, place, self.scale, needs)
        if layout.input_is is not None:
            network: LayerGrams | None = layers[layout.input_is]
        else:
            held = [layout.unpadded(x.detach().to(f.dtype), tape) for x in inputs]
            network = _network_input(slopes, held, place) if "G" in needs else None
        named = dict(model.named_parameters())
        jacobians = {
            name: ExplicitJacobian(M, named[name].detach().flatten().to(torch.float64), C)
            for name, M in explicit.items()
        }
        for name, keys in layout.lookups.items():
            calls, found = [tape.lookups[key] for key in keys], [slopes[f"e:{key}"] for key in keys]
            jacobians[name] = looked_up(named[name].detach(), calls, found, C)
        return network, layers, {name: place(weight=J, counts_weight=True) for name, J in jacobians.items()}


def _live(f: Tensor, tokens: Tokens) -> list[bool]:
    """Which outputs are those of no masked token, on one sample at least: the others are zero."""
    counts: list[bool] = tokens.counted.any(0).repeat_interleave(f.shape[1] // tokens.counted.shape[1]).tolist()
    return counts


def _layers(
    problem: Problem,
    tape: Tape,
    layout: Layout,
    slopes: dict[str, Tensor],
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
        x = x.reshape(len(slopes[f"z:{key}"]), -1)
        x_norm2 = norm2(x)
        grams = place(None, None, x, x_norm2)
        if key in layout.weights:
            weight = layout.weights[key]
            grams.weight = _jacobian(weight, tape, layout, slopes, x, x_norm2, grams.C, needs)
            grams.explained = weight.explained
            grams.counts_weight = weight.parameter in problem.parameters
            grams.counts_bias = weight.bias in problem.parameters
            grams.feature_scale = scale[key].flatten() if weight.dense and key in scale else scale.get(key)
        if "G" in needs:
            shared = grams.weight if "columns" in needs else None
            grams.input_gram, grams.input_squares = _input_side(layout, key, call, slopes, shared)
        layers[key] = grams
    return layers


def _input_side(
    layout: Layout, key: str, call: Call, slopes: dict[str, Tensor], jacobian: object
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """What makes G, and the squares of the slopes, at a call's input: a dense `jacobian`, if it makes them anyway."""
    if isinstance(jacobian, DenseJacobian):
        return jacobian.input_gram, lambda: jacobian.input_squares
    if is_first(layout, key):
        known = (layout.weights[key], slopes[f"z:{key}"], call.z.shape[2:])
        return partial(input_gram, *known), partial(input_squares, *known)
    below = slopes[f"x:{key}"]
    return partial(gram, below), partial(quadratic, None, below)


def _jacobian(
    weight: Weight,
    tape: Tape,
    layout: Layout,
    slopes: dict[str, Tensor],
    x: Tensor,
    x_norm2: Tensor,
    C: Tensor,
    needs: frozenset[str],
) -> DenseJacobian | SharedJacobian:
    if weight.dense:
        at_z, at_x = slopes[f"z:{weight.layer}"], slopes.get(f"x:{weight.layer}")
        return DenseJacobian(at_z, weight.matrix, at_x, x, x_norm2, C)
    J = joined([slopes[f"z:{key}"] for key in weight.calls], 4)
    inputs = [by_sample(tape.linear[key].read, layout.batch_axis[key]) for key in weight.calls]
    n = len(J)

    def phi(piece: slice) -> Tensor:
        folded = [x.reshape(n, -1, *x.shape[1:])[piece] for x in inputs]
        return joined([patches(weight.module, x.flatten(0, 1), len(x)) for x in folded], 3)

    wanted: frozenset[Wanted] = frozenset(what for what in get_args(Wanted) if what in needs)
    return SharedJacobian(J, phi, weight.matrix, C, wanted)


def _norm_jacobians(problem: Problem, tape: Tape, layout: Layout, slopes: dict[str, Tensor]) -> dict[str, Tensor]:
    """df/dgamma and df/dbeta of every norm, (n, N, size); several calls of one norm add."""
    found: dict[str, Tensor] = {}
    for key, names in layout.norms.items():
        call, J = tape.norms[key], slopes[f"n:{key}"]
        xhat = normalised(call.module, call.read)
        n, N = J.shape[:2]
        for name, rows in zip(names, (J * xhat[:, None], J), strict=True):
            if name in problem.parameters:
                M = affine_gradient(call.module, rows.flatten(0, 1), n * N).reshape(n, N, -1).to(torch.float64)
                found[name] = found[name] + M if name in found else M
    return found


def _network_input(
    slopes: dict[str, Tensor], inputs: list[Tensor], place: Callable[..., LayerGrams]
) -> LayerGrams | None:
    """The network's own input: all its floating tensors side by side."""
    if not inputs:
        return None
    Jx = joined([slopes[f"input:{number}"] for number in range(len(inputs))], 2)
    x = joined([x.reshape(len(Jx), -1) for x in inputs], 1)
    return place(partial(gram, Jx), partial(quadratic, None, Jx), x, norm2(x))
