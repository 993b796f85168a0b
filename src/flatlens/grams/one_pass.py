"""The one pass: one forward and N backwards over all layers, a chunk of samples at a time."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from flatlens.estimate import Progress
from flatlens.grams.broken import clear_autograd_errors
from flatlens.grams.certificate import Checker, ChunkCheck
from flatlens.grams.jacobians import ChunkJacobians, Saved, network_input, saved_of
from flatlens.grams.layer_grams import ChunkGrams, LayerGrams
from flatlens.grams.layout import Layout
from flatlens.grams.output_jacobians import Pool, output_jacobians
from flatlens.grams.record import Tape, run_recorded
from flatlens.grams.sketch import Sketch
from flatlens.grams.unexplained import per_sample_gradients
from flatlens.problem import Batch, Problem
from flatlens.problem.loss import labels_known
from flatlens.problem.ranks import ALONE, Ranks
from flatlens.problem.sequences import Tokens
from flatlens.problem.state import differentiable

ALL_GRAMS = ("G", "K", "R")
PASS_CHUNK = 256  #: samples at most: more gain nothing (benchmarks/one_pass.py)


def one_pass(
    problem: Problem,
    model: nn.Module,
    layout: Layout,
    feature_scale: Mapping[str, Tensor] | None = None,
    progress: Progress | None = None,
    needs: Collection[str] = ALL_GRAMS,
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
    most = min(PASS_CHUNK, layout.samples_at_once(problem.memory, rows, needs))
    # differentiable, so that the graph shows frozen parameters, too
    with clear_autograd_errors(), problem.measuring(model), differentiable(model.parameters()):
        walk = _Pass(
            problem,
            model,
            layout,
            feature_scale or {},
            Pool(problem.memory, batched=layout.batched),
            frozenset(needs),
            Checker(problem, model, layout),
        )
        for number, raw in problem.walked(most, "one pass", progress, ranks):
            yield from walk.chunk(problem.place(raw), sketch, number)
            walk.require_certificates(1)
        walk.require_certificates(0)


@dataclass(frozen=True, eq=False)
class _Pass:
    """What stays the same from chunk to chunk."""

    problem: Problem
    model: nn.Module
    layout: Layout
    scale: Mapping[str, Tensor]
    pool: Pool
    needs: frozenset[str]
    checker: Checker
    pending: list[ChunkCheck] = field(default_factory=list)  #: of the last chunks, not looked at

    def require_certificates(self, most: int) -> None:
        """Look at certificates until `most` are left open: a chunk's own, while the device works on it."""
        while len(self.pending) > most:
            self.checker.require(self.pending.pop(0))

    def chunk(self, batch: Batch, sketch: Sketch | None, number: int) -> Iterator[ChunkGrams]:
        """One chunk: once as it is, or once for each probe."""
        problem = self.problem
        tape, inputs, f, y = run_recorded(problem, self.model, batch)
        self.layout.require_same(tape, inputs, self.model, batch)
        seen = _ForwardPass(
            tape, [inputs[number] for number in self.layout.inputs], batch, number, saved_of(self.layout, tape, len(f))
        )
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

    def _grams(
        self,
        seen: _ForwardPass,
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
        live = None if tokens is None else _live_outputs(f, tokens)
        named: dict[str, Tensor] = dict(self.model.named_parameters())
        proved = (*layout.unexplained, *layout.small_parameters)  # weights are proved on the trials
        asked = {name: named[name] for name in proved}
        generator = torch.Generator().manual_seed(seen.number) if certify else None
        slopes = output_jacobians(
            f, tape, layout, seen.inputs, needs, self.pool,
            live=live, keep_graph=keep_graph, certify=generator, parameters=asked,
        )  # fmt: skip
        explicit = per_sample_gradients(problem, self.model, seen.batch, layout.unexplained, rows)
        if slopes.certificate is not None:
            explicit = self.checker.unexplained(seen.batch, explicit, slopes.certificate, rows)
        make_grams = partial(LayerGrams, C, f.detach().to(torch.float64), problem.precision, tokens=tokens)
        chunk = ChunkJacobians(problem, tape, layout, slopes.found, seen.saved, explicit, C, needs)
        if slopes.certificate is not None:
            rebuilt = chunk.rebuilt(slopes.certificate.totals, weights=False)
            batched = self.pool.batched is True
            self.pending.append(
                self.checker.verdict(tape, seen.batch, slopes.found, slopes.certificate, rebuilt, batched)
            )
        layers = chunk.layers(make_grams, self.scale)
        if layout.input_call is not None:
            network: LayerGrams | None = layers[layout.input_call]
        else:
            held = [layout.unpadded(x.detach().to(f.dtype), tape) for x in seen.inputs]
            network = network_input(slopes.found, held, make_grams) if "G" in needs else None
        others = {name: make_grams(weight=J, counts_weight=True) for name, J in chunk.others(named).items()}
        return network, layers, others


@dataclass(frozen=True, eq=False)
class _ForwardPass:
    """A chunk's forward pass."""

    tape: Tape
    inputs: list[Tensor]  #: those that the outputs depend on
    batch: Batch
    number: int
    saved: Saved


def _live_outputs(f: Tensor, tokens: Tokens) -> list[bool]:
    """Which outputs are those of no masked token, on one sample at least: the others are zero."""
    counts: list[bool] = tokens.counted.any(0).repeat_interleave(f.shape[1] // tokens.counted.shape[1]).tolist()
    return counts
