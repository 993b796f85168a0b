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
from flatlens.grams.autograd import clear_autograd_errors, per_sample_gradients
from flatlens.grams.jacobians import ChunkGrams, ChunkJacobians, ForwardPass, LayerGrams
from flatlens.grams.output_jacobians import MEMORY_SHARE, Checker, ChunkCheck, Pool, output_jacobians, shown_rounding
from flatlens.grams.plan import Plan
from flatlens.grams.record import run_recorded
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
    plan: Plan,
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
        plan: the plan, from `lay_out`.
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
    most = min(PASS_CHUNK, plan.samples_at_once(problem.memory, outputs, needs))
    # differentiable: so that the graph also shows frozen parameters
    with clear_autograd_errors(), problem.measuring(model), differentiable(model.parameters()):
        run = _Pass(
            problem,
            model,
            plan,
            feature_scale or {},
            Pool(problem.memory // MEMORY_SHARE, None if plan.batched else False),
            frozenset(needs),
            Checker(problem, model, plan),
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
    plan: Plan
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
        problem, plan = self.problem, self.plan
        tape, inputs, f, y = run_recorded(problem, self.model, batch)
        if problem.seen is not None:
            self.compared.append((batch, number, f.detach(), problem.seen.off(number, f)))
        plan.require_same(tape, inputs, batch)
        forward = ForwardPass.of(plan, tape, dict(self.model.named_parameters()), len(f))
        per_mass = problem.n / problem.mass
        outputs = f.detach().to(torch.float64)
        with labels_known():
            losses = problem.loss.values(outputs, y).detach().to(torch.float64) * per_mass
            correct = problem.loss.correct(outputs, y)
        chunk = _Chunk(batch, forward, [inputs[number] for number in plan.inputs], number, losses, correct)
        if sketch is None:
            with labels_known():
                unread = f.new_full((), torch.nan, dtype=torch.float64).expand(*f.shape, f.shape[1])
                C = problem.loss.output_hessian(f, y) * per_mass if "C" in self.needs else unread
                slope = fisher_slopes(problem, f, y)
            yield self._grams(chunk, _Outputs(f, C, token_mask(y), slope, closing_softmax(f)))
            return
        for probe, (rows, C) in enumerate(sketch.views(problem.loss, f, y, number)):
            combined = (rows.to(f) @ f[..., None])[..., 0]
            C = C * per_mass if sketch.weighted else C
            last = probe + 1 == sketch.probes
            yield self._grams(chunk, _Outputs(combined, C, rows=rows, first=probe == 0, last=last))

    def _grams(self, chunk: _Chunk, of: _Outputs) -> ChunkGrams:
        """Return a chunk's Gram matrices of the network whose outputs are `of`."""
        problem, plan, needs, tape = self.problem, self.plan, self.needs, chunk.forward.tape
        # Differentiate to all places. Weights were checked on the trials, see `planner`; other parameters are here.
        checked = (*plan.unexplained, *plan.small_parameters, *plan.derived)
        found, certificate = output_jacobians(
            of.f, tape, plan, chunk.inputs, needs, self.pool,
            live=of.live, keep_graph=not of.last or bool(plan.derived),
            certify=torch.Generator().manual_seed(chunk.number) if of.first else None,
            parameters={name: chunk.forward.named[name] for name in checked},
        )  # fmt: skip
        explicit: dict[str, Tensor] = {}
        if plan.unexplained:
            explicit = per_sample_gradients(problem, self.model, chunk.batch, plan.unexplained, of.rows)
        if explicit and certificate is not None:
            explicit = self.checker.unexplained(chunk.batch, explicit, certificate, of.rows)
        make_grams = partial(
            LayerGrams, of.C, of.f.detach().to(torch.float64), problem.precision,
            counted=of.counted, slope=of.slope, softmax_size=of.softmax_size,
        )  # fmt: skip
        convex = problem.loss.convex and of.rows is None
        jacobians = ChunkJacobians(
            chunk.forward, found, explicit, of.C, needs, convex, problem.parameters, self.scale, make_grams
        )
        # Compare with the certificate; its flags are read later.
        apart: dict[str, Tensor] = {}
        if certificate is not None:
            apart = certificate.apart(found)
            rebuilt = chunk.forward.rebuilt(certificate.totals, weights=False) | jacobians.combined(certificate.u)
            batched = self.pool.batched is True
            self.pending.append(self.checker.check(tape, chunk.batch, apart, certificate, rebuilt, batched))
        layers = jacobians.layers()
        if plan.input_call is not None:
            network: LayerGrams | None = layers[plan.input_call]
        else:
            read = [plan.unpadded(x.detach().to(of.f.dtype), tape) for x in chunk.inputs]
            network = jacobians.network_input(read) if "G" in needs else None
        if "G" in needs and of.rows is None:
            for key, grams in layers.items():
                at = f"x:{key}" if f"x:{key}" in apart else f"z:{key}"  # df/dx of a layer follows from df/dz
                grams.rounding = shown_rounding(apart, found, [at])
            if network is not None and plan.input_call is None:
                network.rounding = shown_rounding(apart, found, [at for at in apart if at.startswith("input:")])
        return ChunkGrams(
            chunk.number, chunk.losses, chunk.correct, make_grams(), network, layers,
            jacobians.others(), jacobians.parts(layers),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Chunk:
    """A chunk's forward pass."""

    batch: Batch
    forward: ForwardPass
    inputs: list[Tensor]  #: inputs on which the outputs depend
    number: int
    losses: Tensor
    correct: Tensor | None


@dataclass(frozen=True, eq=False)
class _Outputs:
    """Outputs that are differentiated: the network's own, or the combinations of a probe."""

    f: Tensor  #: (n, N)
    C: Tensor  #: output Hessians, (n, N, N)
    counted: Tensor | None = None  #: for outputs of tokens: which tokens count, (n, T)
    slope: Tensor | None = None
    softmax_size: int = 0
    rows: Tensor | None = None  #: (n, r, N): f is these times the network's outputs; None for its own
    first: bool = True  #: whether the chunk's certificate is drawn
    last: bool = True  #: whether the graph is not needed afterwards

    @property
    def live(self) -> list[bool] | None:
        """For each output whether its token counts in some sample: all others have derivative 0. None if all count."""
        if self.counted is None:
            return None
        live: list[bool] = self.counted.any(0).repeat_interleave(self.f.shape[1] // self.counted.shape[1]).tolist()
        return live
