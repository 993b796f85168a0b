"""The one pass: one forward and N backward passes over the data, chunk by chunk.

For each chunk:

1. Run the network once (`record`), and require that it does what the plan says (`Plan.require_same`).
2. Differentiate all outputs to all places of the plan, and a random combination of them (`output_jacobians`).
3. Make the Gram matrices of all layers and parameters from these (`jacobians`), and yield them.
4. Check the certificate. PlanBroken then makes the caller plan again, with this chunk among the trials, and start anew.

The certificate is read one chunk late, so that a device need not be waited for. The numbers of a pass count only when
the pass has ended without PlanBroken.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from flatlens.estimate import Progress
from flatlens.grams.autograd import per_sample_gradients
from flatlens.grams.jacobians import ChunkJacobians, Saved, network_input, saved_of
from flatlens.grams.layer_grams import ChunkGrams, LayerGrams
from flatlens.grams.output_jacobians import Checker, ChunkCheck, Pool, output_jacobians, shown_rounding
from flatlens.grams.plan import Layout, clear_autograd_errors
from flatlens.grams.record import Tape, run_recorded
from flatlens.grams.sketch import Sketch
from flatlens.operations.graph import closing_softmax
from flatlens.problem import Batch, Problem
from flatlens.problem.eval_context import differentiable
from flatlens.problem.forward import fisher_slopes
from flatlens.problem.loss import labels_known
from flatlens.problem.ranks import ALONE, Ranks
from flatlens.problem.row_layout import token_mask

ALL_GRAMS = ("C", "G", "K", "R")
PASS_CHUNK = 256  #: samples of a chunk at most; more gain no speed (benchmarks/one_pass.py)


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
    """Yield the Gram matrices of every place, chunk by chunk; a chunk must not be read after the next one is requested.

    Args:
        problem: the problem.
        model: its network.
        layout: the plan, from `lay_out`.
        feature_scale: spread of each layer's features over all data, for measures that normalise by it.
        progress: callback.
        needs: what will be read. Without "G" no input is differentiated to; all else is computed on first use.
        sketch: if given, every chunk comes once for each probe, as a network whose output is a random combination.
        ranks: processes that share the data; this one yields its own part.

    Raises:
        PlanBroken: a chunk does not agree with the plan. All numbers so far are then void.
        BadModel: samples affect each other's outputs.
    """
    problem = problem.as_asked()
    outputs = problem.outputs if sketch is None else 2
    most = min(PASS_CHUNK, layout.samples_at_once(problem.memory, outputs, needs))
    # differentiable: so that the graph also shows frozen parameters
    with clear_autograd_errors(), problem.measuring(model), differentiable(model.parameters()):
        run = _Pass(
            problem,
            model,
            layout,
            feature_scale or {},
            Pool(problem.memory, batched=layout.batched),
            frozenset(needs),
            Checker(problem, model, layout),
        )
        for number, raw in problem.shared(most, ranks, "one pass", progress):
            yield from run.chunk(problem.place(raw), sketch, number)
            run.require_certificates(1)
        run.require_certificates(0)


@dataclass(frozen=True, eq=False)
class _Pass:
    """The part of a pass that stays the same from chunk to chunk."""

    problem: Problem
    model: nn.Module
    layout: Layout
    scale: Mapping[str, Tensor]
    pool: Pool
    needs: frozenset[str]
    checker: Checker
    pending: list[ChunkCheck] = field(default_factory=list)  #: certificates of the last chunks, not yet read
    compared: list[tuple[Batch, int, Tensor, Tensor]] = field(default_factory=list)
    """The last chunks' outputs, and how far they are from those seen before, not yet read."""

    def require_certificates(self, most: int) -> None:
        """Read certificates until at most `most` are pending; the last one may still be computed on the device."""
        while len(self.pending) > most:
            self.checker.require(self.pending.pop(0))
        while len(self.compared) > most:
            batch, number, f, off = self.compared.pop(0)
            assert self.problem.seen is not None
            self.problem.seen.require_same(self.problem, self.model, batch, number, f, off)

    def chunk(self, batch: Batch, sketch: Sketch | None, number: int) -> Iterator[ChunkGrams]:
        """Yield one chunk: once, or with a sketch once for each probe."""
        problem = self.problem
        tape, inputs, f, y = run_recorded(problem, self.model, batch)
        if problem.seen is not None:
            self.compared.append((batch, number, f.detach(), problem.seen.off(number, f)))
        self.layout.require_same(tape, inputs, self.model, batch)
        forward = _ForwardPass(
            tape, [inputs[number] for number in self.layout.inputs], batch, number, saved_of(self.layout, tape, len(f))
        )
        per_mass = problem.n / problem.mass
        outputs = f.detach().to(torch.float64)
        with labels_known():
            losses = problem.loss.values(outputs, y).detach().to(torch.float64) * per_mass
            correct = problem.loss.correct(outputs, y)
        if sketch is None:
            with labels_known():
                C = problem.loss.output_hessian(f, y) * per_mass if "C" in self.needs else _unknown(f)
                slope = fisher_slopes(problem, f, y)
            grams = self._grams(forward, f, C, counted=token_mask(y), slope=slope, softmax_size=closing_softmax(f))
            yield ChunkGrams(number, losses, correct, *grams)
            return
        for probe, (rows, C) in enumerate(sketch.views(problem.loss, f, y, number)):
            combined = (rows.to(f) @ f[..., None])[..., 0]
            C = C * per_mass if sketch.weighted else C
            more = probe + 1 < sketch.probes
            grams = self._grams(forward, combined, C, rows=rows, keep_graph=more, certify=probe == 0)
            yield ChunkGrams(number, losses, correct, *grams)

    def _grams(
        self,
        forward: _ForwardPass,
        f: Tensor,
        C: Tensor,
        *,
        counted: Tensor | None = None,
        slope: Tensor | None = None,
        softmax_size: int = 0,
        rows: Tensor | None = None,
        keep_graph: bool = False,
        certify: bool = True,
    ) -> tuple[LayerGrams, LayerGrams | None, dict[str, LayerGrams], dict[str, LayerGrams], dict[str, LayerGrams]]:
        """Return (outputs alone, network's input, layers, parameters outside them, parts of weights) for outputs f.

        With `rows` (n, r, N), f is rows times the network's outputs.
        """
        problem, layout, needs, tape = self.problem, self.layout, self.needs, forward.tape
        live = None if counted is None else _live_outputs(f, counted)
        named: dict[str, Tensor] = dict(self.model.named_parameters())
        # weights were checked on the trials, see `proof`
        checked = (*layout.unexplained, *layout.small_parameters, *layout.made)
        asked = {name: named[name] for name in checked}
        generator = torch.Generator().manual_seed(forward.number) if certify else None
        computed = output_jacobians(
            f, tape, layout, forward.inputs, needs, self.pool,
            live=live, keep_graph=keep_graph or bool(layout.made), certify=generator, parameters=asked,
        )  # fmt: skip
        explicit = per_sample_gradients(problem, self.model, forward.batch, layout.unexplained, rows)
        if computed.certificate is not None:
            explicit = self.checker.unexplained(forward.batch, explicit, computed.certificate, rows)
        make_grams = partial(
            LayerGrams, C, f.detach().to(torch.float64), problem.precision,
            counted=counted, slope=slope, softmax_size=softmax_size,
        )  # fmt: skip
        convex = problem.loss.convex and rows is None
        chunk = ChunkJacobians(problem, tape, layout, named, computed.found, forward.saved, explicit, C, needs, convex)
        apart: dict[str, Tensor] = {}
        if computed.certificate is not None:
            apart = computed.certificate.apart(computed.found)
            rebuilt = chunk.rebuilt(computed.certificate.totals, weights=False)
            rebuilt |= chunk.combined(computed.certificate.u)
            batched = self.pool.batched is True
            self.pending.append(self.checker.check(tape, forward.batch, apart, computed.certificate, rebuilt, batched))
        layers = chunk.layers(make_grams, self.scale)
        if layout.input_call is not None:
            network: LayerGrams | None = layers[layout.input_call]
        else:
            read = [layout.unpadded(x.detach().to(f.dtype), tape) for x in forward.inputs]
            network = network_input(computed.found, read, make_grams, needs) if "G" in needs else None
        if "G" in needs and rows is None:
            for key, grams in layers.items():
                at = f"x:{key}" if f"x:{key}" in apart else f"z:{key}"  # df/dx of a layer follows from df/dz
                grams.rounding = shown_rounding(apart, computed.found, [at])
            if network is not None and layout.input_call is None:
                network.rounding = shown_rounding(
                    apart, computed.found, [at for at in apart if at.startswith("input:")]
                )
        others = {name: make_grams(weight=J, counts_weight=True) for name, J in chunk.others().items()}
        return make_grams(), network, layers, others, chunk.parts(layers, make_grams, self.scale)


@dataclass(frozen=True, eq=False)
class _ForwardPass:
    """A chunk's forward pass."""

    tape: Tape
    inputs: list[Tensor]  #: inputs on which the outputs depend
    batch: Batch
    number: int
    saved: Saved


def _unknown(f: Tensor) -> Tensor:
    """Return the output Hessians of a pass that does not read them, (n, N, N): NaN."""
    return f.new_full((), torch.nan, dtype=torch.float64).expand(*f.shape, f.shape[1])


def _live_outputs(f: Tensor, counted: Tensor) -> list[bool]:
    """Return for each output whether its token counts in at least one sample; all others have derivative 0."""
    counts: list[bool] = counted.any(0).repeat_interleave(f.shape[1] // counted.shape[1]).tolist()
    return counts
