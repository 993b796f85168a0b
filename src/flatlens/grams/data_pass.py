"""The one pass: one forward and N backward passes over the data, chunk by chunk.

For each chunk:

1. Run the network once (`record`), and require that it does what the plan says (`Plan.require_same`).
2. Differentiate all outputs to all places of the plan, and a random combination of them (`output_jacobians`).
3. Make the Gram matrices of all layers and parameters from these (`jacobians`), and yield them.
4. Check the certificate. PlanBroken then makes the caller plan again, with this chunk among the trials, and start anew.

With many outputs, few backward passes take the place of N: those of random combinations of the outputs, the sketch.
With random signs u, E[u u^T] = I, so ||u^T J||^2 has the mean tr(J J^T). With C = R R^T the combination R u gives
tr(J^T C J) in the same way. Each probe is the exact pass of a network with the one output u^T f. So every trace,
diagonal and sum of squares is unbiased. Every sample has its own probes, which do not depend on its chunk.

With k probes of signs, the products u_a u_b of two outputs are equal in all probes with probability 2^(1-k). If few
outputs of one sample decide, the probes then have no spread at all: with k = 3, 95% intervals cover 0.75. Therefore few
probes are not signs but balanced normal numbers (`_balanced`).

The certificate is read one chunk late, so that a device need not be waited for. The numbers of a pass count only when
the pass has ended without PlanBroken.

A pass of its own gives means and standard deviations of the features that weights multiply.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from flatlens.estimate import Progress
from flatlens.grams.autograd import clear_autograd_errors, per_sample_gradients
from flatlens.grams.jacobians import ChunkGrams, ChunkJacobians, ForwardPass, LayerGrams, kept_by
from flatlens.grams.output_jacobians import MEMORY_SHARE, Checker, ChunkCheck, Pool, output_jacobians, shown_rounding
from flatlens.grams.plan import Plan, PlanBroken, Weight, coupled_places
from flatlens.grams.record import Tape, record, run_recorded
from flatlens.operations.graph import closing_softmax
from flatlens.operations.parameter_uses import Product
from flatlens.problem import Batch, Loss, Problem
from flatlens.problem.batches import FORWARD_CHUNK, size
from flatlens.problem.eval_context import device_of, differentiable
from flatlens.problem.forward import fisher_slopes
from flatlens.problem.loss import labels_known
from flatlens.problem.ranks import ALONE, Ranks
from flatlens.problem.row_layout import token_mask


def random_signs(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    """Return independent +1 and -1, the probes with the least variance, with the dtype and device of `like`."""
    return torch.randint(0, 2, shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1).to(like)


_FEW = 31
"""Largest number of probes for which signs are not used: a few outputs that move alike decide a form of signs, which
takes a handful of values, and 16 can miss the rare large one."""
_HELD = 2**15  #: most numbers of one sample: all probes are held at once, signs one by one
_VERY_FEW = 4  #: largest number of probes whose numbers are normal, and scaled until both sums are right
_ROUNDS = 20  #: number of times that these are scaled; for more probes once is enough


def _balanced(draws: Tensor, rounds: int) -> Tensor:
    """Return combinations (probes, n, N): random numbers, scaled to have the sums of squares that signs have.

    For each sample, the squares add up to the number of probes for each output, and to N for each probe. So the
    variance of means over probes is at most that of signs, and products of two outputs differ between probes.
    E[u u^T] = I, because the signs of the entries are random and the probes are exchangeable.
    """
    for _ in range(rounds):
        draws *= draws.square().mean(2, keepdim=True).rsqrt()
        draws *= draws.square().mean(0, keepdim=True).rsqrt()
    return draws


@dataclass(frozen=True)
class SampleStream:
    """Random numbers for samples: those of a sample do not depend on which other samples are drawn with it."""

    seed: int
    number: int

    def signs(self, first: int, n: int, each: int) -> Tensor:
        """Return +1 and -1, (n, each) float64, for n samples from number `first` on."""
        bits = np.unpackbits(self._raw(first, n, -(-each // 256)).view(np.uint8), axis=1)[:, :each]
        return torch.from_numpy(bits).to(torch.float64).mul_(2).sub_(1)

    def normal(self, first: int, n: int, each: int) -> Tensor:
        """Return standard normal numbers, (n, each) float64, for n samples from number `first` on."""
        normal: Tensor = torch.special.ndtri(self._shares(first, n, each))
        return normal

    def uniform(self, first: int, n: int, each: int) -> Tensor:
        """Return numbers in (-1, 1), (n, each) float64, for n samples from number `first` on."""
        return self._shares(first, n, each).mul_(2).sub_(1)

    def _shares(self, first: int, n: int, each: int) -> Tensor:
        high = (self._raw(first, n, -(-each // 4))[:, :each] >> np.uint64(12)).astype(np.float64)
        return torch.from_numpy(high).add_(0.5).mul_(2.0**-52)

    def _raw(self, first: int, n: int, blocks: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
        """Return raw bits, (n, 4 blocks); Philox makes blocks of four numbers and can start at any block."""
        drawn = np.random.Philox(key=(self.number << 64) + self.seed, counter=first * blocks)
        return drawn.random_raw(n * blocks * 4).reshape(n, blocks * 4)


@dataclass(frozen=True)
class Sketch:
    """The random combinations of the outputs.

    >>> Sketch(probes=4, seed=0, weighted=False).probes
    4
    """

    probes: int  #: number of combinations; each takes a pass
    seed: int
    weighted: bool  #: whether combinations are for traces with the loss's C; else for traces with I

    def views(self, loss: Loss, f: Tensor, y: Any, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each probe rows (n, r, N) and C (n, r, r), for the chunk that begins at sample `chunk`."""
        for u in self.combinations(chunk, len(f), f[0].numel()):
            u = u.reshape(f.shape).to(f.device)
            if self.weighted:
                yield loss.combine(f.detach(), y, u)
            else:
                yield u[:, None], u.new_ones(len(f), 1, 1)

    def combinations(self, first: int, n: int, outputs: int) -> Iterator[Tensor]:
        """Yield each probe's u, (n, N) float64, for n samples from number `first` on."""
        streams = [SampleStream(self.seed, probe) for probe in range(self.probes)]
        if self.probes > _FEW or (self.probes > _VERY_FEW and self.probes * outputs > _HELD):
            yield from (stream.signs(first, n, outputs) for stream in streams)
        elif self.probes > _VERY_FEW:
            yield from _balanced(torch.stack([stream.uniform(first, n, outputs) for stream in streams]), 1)
        else:
            yield from _balanced(torch.stack([stream.normal(first, n, outputs) for stream in streams]), _ROUNDS)


ALL_GRAMS = ("C", "G", "K", "R")
PASS_CHUNK = 256  #: samples of a chunk at most; more gain no speed (benchmarks/one_pass.py)
_FEW_SAMPLES = 64  #: with fewer samples of a chunk, backward passes take longer
_CHUNK_BYTES = 2**28
"""Bytes of a chunk's Jacobians at most on a processor, if there are more samples than few: fetching more memory for the
first time takes longer than what larger chunks save."""


def chunk_size(problem: Problem, plan: Plan, outputs: int, needs: Collection[str] = ()) -> int:
    """Return how many samples the pass takes at once at most."""
    most = min(PASS_CHUNK, plan.samples_at_once(problem.memory, outputs, needs))
    if device_of(problem.model).type == "cpu":
        most = min(most, max(_FEW_SAMPLES, _CHUNK_BYTES // max(1, outputs * plan.jacobian_bytes)))
    return most


def one_pass(
    problem: Problem,
    model: nn.Module,
    plan: Plan,
    feature_scale: Mapping[str, Tensor] | None = None,
    progress: Progress | None = None,
    needs: Collection[str] = ALL_GRAMS,
    sketch: Sketch | None = None,
    ranks: Ranks = ALONE,
    *,
    inputs_alone: bool = False,
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
        inputs_alone: whether G is all that is read: then chunks have no losses, and no side of a parameter.

    Raises:
        PlanBroken: a chunk does not agree with the plan. All numbers so far are then void.
        BadModel: samples affect each other's outputs.
    """
    problem = problem.as_asked()
    outputs = problem.outputs if sketch is None else 2
    most = chunk_size(problem, plan, outputs, needs)
    most = math.ceil(problem.n / math.ceil(problem.n / most))  # chunks of equal size
    # differentiable: so that the graph also shows frozen parameters
    once = problem.measuring(model, twice=not plan.fused)
    with clear_autograd_errors(), once, differentiable(model.parameters()):
        run = _Pass(
            problem,
            model,
            plan,
            feature_scale or {},
            Pool(problem.memory // MEMORY_SHARE, None if plan.batched else False),
            frozenset(needs),
            Checker(problem, model, plan),
            inputs_alone,
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
    inputs_alone: bool
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
        named = dict(self.model.named_parameters())
        forward = ForwardPass(plan, tape, named, len(f), {} if self.inputs_alone else kept_by(plan, tape, len(f)))
        per_mass = problem.n / problem.mass
        C = f.new_full((), torch.nan, dtype=torch.float64).expand(*f.shape, f.shape[1])  # where it is not read
        losses, correct, slope = None, None, None
        if not self.inputs_alone:
            with labels_known():
                outputs = f.detach().to(torch.float64)
                losses = problem.loss.values(outputs, y).detach().to(torch.float64) * per_mass
                correct = problem.loss.correct(outputs, y)
                if sketch is None:
                    C = problem.loss.output_hessian(f, y) * per_mass if "C" in self.needs else C
                    slope = fisher_slopes(problem, f, y)
        read = [inputs[number] for number in plan.inputs]
        if sketch is None:
            yield self._grams(
                _Chunk(batch, forward, read, number, losses, correct, f, C, token_mask(y), slope, closing_softmax(f))
            )
            return
        for probe, (rows, C) in enumerate(sketch.views(problem.loss, f, y, number)):
            combined = (rows.to(f) @ f[..., None])[..., 0]
            C, first, last = C * per_mass if sketch.weighted else C, probe == 0, probe + 1 == sketch.probes
            chunk = _Chunk(
                batch, forward, read, number, losses, correct, combined, C, rows=rows, first=first, last=last
            )
            yield self._grams(chunk)

    def _grams(self, of: _Chunk) -> ChunkGrams:
        """Return a chunk's Gram matrices of the network whose outputs are its f."""
        problem, plan, needs, tape = self.problem, self.plan, self.needs, of.forward.tape
        # Differentiate to all places. Weights were checked on the trials, see `planner`; other parameters are here.
        unexplained = () if self.inputs_alone else plan.unexplained
        checked = () if self.inputs_alone else (*unexplained, *plan.small_parameters, *plan.derived)
        # Only an output whose token counts in some sample has a derivative: None if all count.
        per_token = 1 if of.counted is None else of.f.shape[1] // of.counted.shape[1]
        live = None if of.counted is None else of.counted.any(0).repeat_interleave(per_token).tolist()
        found, certificate = output_jacobians(
            of.f, tape, plan, of.inputs, needs, self.pool,
            live=live, keep_graph=not of.last or bool(plan.derived and checked),
            certify=torch.Generator().manual_seed(of.number) if of.first else None,
            parameters={name: of.forward.named[name] for name in checked},
        )  # fmt: skip
        explicit: dict[str, Tensor] = {}
        if unexplained:
            explicit = per_sample_gradients(problem, self.model, of.batch, unexplained, of.rows)
        if explicit and certificate is not None:
            explicit = self.checker.unexplained(of.batch, explicit, certificate, of.rows)
        make_grams = partial(
            LayerGrams, of.C, of.f.detach().to(torch.float64), problem.precision,
            counted=of.counted, losses=of.losses, slope=of.slope, softmax_size=of.softmax_size,
        )  # fmt: skip
        convex = problem.loss.convex and of.rows is None
        jacobians = ChunkJacobians(
            of.forward, found, explicit, of.C, needs, convex, problem.parameters, self.scale, make_grams,
            self.inputs_alone,
        )  # fmt: skip
        # Compare with the certificate; its flags are read later.
        apart: dict[str, Tensor] = {}
        if certificate is not None:
            apart = certificate.apart(found)
            rebuilt: dict[str, tuple[Tensor, Tensor]] = {}
            if not self.inputs_alone:
                rebuilt = of.forward.rebuilt(certificate.totals, weights=False) | jacobians.combined(certificate.u)
            batched = self.pool.batched is True
            self.pending.append(self.checker.check(tape, of.batch, apart, certificate, rebuilt, batched))
        layers = jacobians.layers()
        if plan.input_call is not None:
            network: LayerGrams | None = layers[plan.input_call]
        else:
            read = [plan.unpadded(x.detach().to(of.f.dtype), tape) for x in of.inputs]
            network = jacobians.network_input(read) if "G" in needs else None
        if "G" in needs and of.rows is None:
            for key, grams in layers.items():
                at = f"x:{key}" if f"x:{key}" in apart else f"z:{key}"  # df/dx of a layer follows from df/dz
                grams.rounding = shown_rounding(apart, found, [at])
            if network is not None and plan.input_call is None:
                network.rounding = shown_rounding(apart, found, [at for at in apart if at.startswith("input:")])
        return ChunkGrams(
            of.number, of.losses, of.correct, make_grams(), network, layers,
            {} if self.inputs_alone else jacobians.others(), {} if self.inputs_alone else jacobians.parts(layers),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Chunk:
    """A chunk's forward pass, and the outputs that are differentiated: the network's own, or a probe's combinations."""

    batch: Batch
    forward: ForwardPass
    inputs: list[Tensor]  #: inputs on which the outputs depend
    number: int
    losses: Tensor | None
    correct: Tensor | None
    f: Tensor  #: (n, N)
    C: Tensor  #: output Hessians, (n, N, N)
    counted: Tensor | None = None  #: for outputs of tokens: which tokens count, (n, T)
    slope: Tensor | None = None
    softmax_size: int = 0
    rows: Tensor | None = None  #: (n, r, N): f is these times the network's outputs; None for its own
    first: bool = True  #: whether the chunk's certificate is drawn
    last: bool = True  #: whether the graph is not needed afterwards


_DEAD_UNIT = 1e-15  #: unit of a feature that is always 0: its square is negligible, and float32 can represent it


def feature_spread(problem: Problem, model: nn.Module, plan: Plan) -> dict[str, tuple[Tensor, int]]:
    """Return for each layer the standard deviation of its features, (g, m), and the number of constant features.

    It is taken over samples and positions, in one forward pass. A constant feature has no spread: its unit is its
    absolute value, or `_DEAD_UNIT` if it is always 0, which leaves its weights out. So measures in these units do not
    change when features are rescaled.
    """
    moments = feature_moments(problem, model, plan)
    for name, part in plan.parts.items():
        if part.part_of in moments:
            count, mean, squares = moments[part.part_of]
            at = slice(None) if part.columns is None else part.columns.to(mean.device)
            moments[name] = count, mean[at], squares[at]
    found = {}
    for name, (count, mean, squares) in moments.items():
        spread = (squares / count).sqrt()
        constant = is_constant(mean, spread)
        units = torch.where(constant, mean.abs(), spread)
        units = torch.where(units == 0, _DEAD_UNIT, units)
        found[name] = plan.weight(name).adapter.per_feature(units), int(constant.sum())
    return found


Moments: TypeAlias = tuple[int, Tensor, Tensor]
"""Number of observations, mean (features,) and sum of squared deviations (features,), over samples and positions."""


def feature_moments(problem: Problem, model: nn.Module, plan: Plan) -> dict[str, Moments]:
    """Return the moments of each weight's features, from one forward pass, merged by Chan's update in float64."""
    moments: dict[str, Moments] = {}
    graphs = bool(_at_products(plan))
    with problem.measuring(model, plain=True), differentiable(model.parameters()) if graphs else torch.no_grad():
        for raw in problem.data.chunks(256 if graphs else FORWARD_CHUNK):
            tape, found = features_read(problem, model, plan, problem.place(raw))
            there = tape.mask if plan.ignores_padding else None
            for layer, weight in plan.weights.items():
                keys = weight.calls or outside_keys(weight)
                for key in () if weight.unplaced or not found.keys() >= {*keys} else keys:
                    x, axis = found[key], -1 if weight.adapter.token_wise else 1
                    if there is not None and x.ndim == 3 and x.shape[:2] == there.shape:
                        x = x[there != 0]  # without padded tokens
                    x = x.movedim(axis, -1).reshape(-1, weight.adapter.features(weight.matrix.W)).to(torch.float64)
                    count, mean = len(x), x.mean(0)
                    squares = (x - mean).square().sum(0)
                    if layer in moments:
                        before, mean_before, squares_before = moments[layer]
                        step, total = mean - mean_before, before + count
                        squares = squares_before + squares + step.square() * before * count / total
                        count, mean = total, mean_before + step * count / total
                    moments[layer] = count, mean, squares
    return moments


def features_read(problem: Problem, model: nn.Module, plan: Plan, batch: Batch) -> tuple[Tape, dict[str, Tensor]]:
    """Return the record of a forward pass, and the features that weights multiply in it, a sample's rows side by side.

    They are by call of a linear layer, or by `outside_keys`: the call's input where the call multiplies just that, else
    what the product reads. This autograd alone keeps, so the pass must run with gradients on where there is any.

    Raises:
        PlanBroken: the batch is not computed as planned, or its samples do not lie as planned where they are folded.
    """
    n, at_products = size(batch), _at_products(plan)
    if at_products:
        tape, *_ = run_recorded(problem, model, batch)
    else:
        with record(model, problem.mask(batch)) as tape:
            problem.run(model, batch)
    if tape.linear.keys() - plan.structure.varying_calls != plan.structure.calls.keys():
        raise PlanBroken([batch])
    found: dict[str, Tensor] = {}
    for key, rows in plan.call_rows.items():
        if key not in plan.structure.altered:
            x = tape.linear[key].read
            if not rows.fit(x.shape, n):
                raise PlanBroken([batch], [f"x:{key}"])
            found[key] = rows.by_sample(x, n).flatten(0, 1)
    for key, (place, token_wise) in at_products.items():
        product = plan.operations(tape).get(place)
        if not isinstance(product, Product) or not plan.rows[place].fit(product.shape, n):
            raise PlanBroken([batch], [place])
        x = plan.rows[place].by_sample(product.kept(), n).flatten(0, 1)
        found[key] = x.reshape(n, -1, x.shape[-1]) if token_wise and len(x) > n else x
    return tape, found


def require_told_apart(problem: Problem, model: nn.Module, plan: Plan, batch: Batch) -> None:
    """Raise PlanBroken if some call's rows of samples, folded into one axis, do not lie as planned on a batch."""
    tape, _, f, _ = run_recorded(problem, model, batch)
    planned = {f"x:{key}": rows for key, rows in plan.call_rows.items() if key not in plan.structure.altered}
    at = {name: tape.linear[name.removeprefix("x:")].x for name in planned}
    folded = {name: x for name, x in at.items() if x.shape[planned[name].axis] != len(f)}
    if folded and (apart := coupled_places(f, folded, planned, torch.Generator().manual_seed(0))):
        raise PlanBroken([batch], apart)


def outside_keys(weight: Weight) -> tuple[str, ...]:
    """Return the keys of the products of a weight outside layers, as the calls of a layer have them."""
    return tuple(weight.layer + (f":{k}" if k else "") for k in range(len(weight.products)))


def _at_products(plan: Plan) -> dict[str, tuple[str, bool]]:
    """Return the products whose own inputs are features, by call or outside key, each with whether it is token-wise."""
    found = {}
    for weight in plan.weights.values():
        own = {key: f"z:{key}" for key in weight.calls} or dict(zip(outside_keys(weight), weight.products, strict=True))
        for key, place in own.items():
            known = key in plan.call_rows and key not in plan.structure.altered
            if place in plan.rows and not known:
                found[key] = place, weight.adapter.token_wise
    return found


def is_constant(mean: Tensor, spread: Tensor) -> Tensor:
    """Return for each feature whether it is constant over the data, so that its spread is mere rounding."""
    return spread <= 1e-12 * mean.abs()
