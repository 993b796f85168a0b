"""The Lens: one network at one moment, and the values per sample that its passes gave.

A pass gives every measure's values at every place: exact, from probes, or from largest eigenvalues. The rule of
failures: what cannot be computed is undefined, with its reason, and takes no other number with it (`attempted`).
"""

from __future__ import annotations

import copy
import math
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, TypeVar, final

import torch
from torch import Tensor, nn

from flatlens.curvature.functional_hessian import Directions, functional_hessian_along
from flatlens.curvature.krylov import Remembered
from flatlens.curvature.optimiser_geometry import plain_optimiser
from flatlens.curvature.space import space_of
from flatlens.curvature.spectral_norms import CallOrInput, jacobian_norms
from flatlens.deprecated_names import warn
from flatlens.errors import (
    OF_ONE_NUMBER,
    BadInput,
    FlatlensError,
    NotDifferentiable,
    Overflows,
    StaleLens,
    Unexpected,
    one_line,
    out_of_memory,
    typed_line,
)
from flatlens.estimate import Key, Progress
from flatlens.grams import (
    ChunkGrams,
    Plan,
    PlanBroken,
    Sketch,
    agreed,
    feature_spread,
    lay_out,
    one_pass,
    singular,
)
from flatlens.grams.data_pass import random_signs
from flatlens.grams.record import run_recorded
from flatlens.measures.definition import INPUT_SIDE, PassMeasure, Run
from flatlens.perturbation.autograd_check import coarsest_inside, moved_by_rounding
from flatlens.perturbation.nudges import loss_scaled
from flatlens.perturbation.weights import Landscape
from flatlens.problem import Batch, Problem
from flatlens.problem.batches import FORWARD_CHUNK, checksum
from flatlens.problem.eval_context import device_of, differentiable, fingerprint, in_turn, require_own_torch
from flatlens.problem.forward import Outcomes, forwards, from_rows, outcomes, slopes_of_each
from flatlens.problem.inspection import require_same_everywhere
from flatlens.problem.problem import require_finite_weights
from flatlens.problem.ranks import ALONE, ChunkBuffer, Ranks, to_parts
from flatlens.progress import count_of
from flatlens.user_code import OURS, is_users, said

_T = TypeVar("_T")
_OF_DERIVATIVES = re.compile("deriv|differentiab|autograd|backward|grad|vmap|functorch|batching", re.IGNORECASE)


def attempted(work: Callable[[], _T], what: str, peers: Ranks = ALONE, singular: Callable[[], str] = str) -> _T | str:
    """Return the result of `work`, or why there is none; `what` names it, `singular` explains what is not finite.

    Errors that spoil all numbers are raised. So is, where several processes measure together, what one of them may meet
    alone: the others would wait for it.
    """
    try:
        return work()
    except Exception as error:
        spoils_all = isinstance(error, FlatlensError | PlanBroken) and not isinstance(error, OF_ONE_NUMBER)
        # torch's own errors are raised in all processes
        of_one_process = out_of_memory(error) or not isinstance(error, RuntimeError | ArithmeticError)
        if spoils_all or (peers.size > 1 and of_one_process):
            raise
        not_finite = isinstance(error, Overflows | torch.linalg.LinAlgError)  # type: ignore[attr-defined]
        return (not_finite and singular()) or reason_of(error, what)


def reason_of(error: Exception, what: str) -> str:
    """Why there is no number, in the words of an error; one that flatlens did not foresee is a warning, too."""
    if out_of_memory(error):
        why = one_line(error, 160)  # with the bytes
        return f"memory ran out ({why}): give a smaller Problem(memory=...), fewer samples, outputs or parameters"
    if isinstance(error, FlatlensError):
        return one_line(error)
    if isinstance(error, RuntimeError | ArithmeticError):
        of_derivatives = _OF_DERIVATIVES.search(one_line(error))
        failed = "the network cannot be differentiated as this measure needs" if of_derivatives else "torch failed"
        return f"{failed} ({one_line(error, 120)})"
    frames = traceback.extract_tb(error.__traceback__)
    files = [frame.filename for frame in frames]
    # it arose in the user's file, or in what that file called
    last = next((file for file in reversed(files) if file.startswith(OURS) or is_users(file)), OURS)
    if not last.startswith(OURS):
        return f"your code raised {said(error)}"
    at = frames[-1]
    told = f"an unexpected error, please report it ({typed_line(error, 120)}, in {at.name}, line {at.lineno})"
    warnings.warn(f"{what}: {told}", Unexpected, stacklevel=2)
    return told


BY_ROUNDING = ".rounding"  #: at the end of a measure's key: how far rounding may move each sample's number
TOLERANCE = 0.03  #: largest relative residual of a squared spectral norm found by products: 1.5% of the norm


@dataclass(eq=False)
class Gathered:
    """The results of one pass over the data."""

    values: dict[Key, Tensor]  #: (n,) per place, or the mean over samples; (probes, ...) for a sketch
    outcomes: Outcomes | None = None
    residuals: dict[Key, Tensor] = field(default_factory=dict)  #: relative residuals of largest eigenvalues, (n,)
    products: int = 0
    failed: dict[Key, str] = field(default_factory=dict)  #: why a measure has no values at a place


@dataclass(frozen=True, eq=False)
class Gatherer:
    """The values of measures on one network, computed pass by pass."""

    problem: Problem
    model: nn.Module
    plan: Plan
    scale: Mapping[str, Tensor]  #: the features' spread, if a measure needs it
    progress: Progress | None

    def by_pass(self, measures: list[PassMeasure], sketch: Sketch | None = None) -> Gathered:
        """Return the measures from one pass over every output, or over a sketch's combinations of outputs."""
        problem, ranks = self.problem, self.problem.ranks
        probes = 1 if sketch is None else sketch.probes
        kept: ChunkBuffer[tuple[Key, int]] = ChunkBuffer()
        ends: ChunkBuffer[str] = ChunkBuffer()  # losses, and whether samples are classified correctly
        totals: dict[tuple[Key, int], Tensor] = {}  # sums, added at once, as each may be as large as a weight
        failed: dict[Key, str] = {}
        needs = frozenset().union(*(measure.needs for measure in measures))
        # whether neither the loss nor anything of parameters is read
        alone = needs <= INPUT_SIDE and all(measure.place == "input" for measure in measures)
        walk = one_pass(
            problem, self.model, self.plan, self.scale, self.progress, needs, sketch, ranks, inputs_alone=alone
        )
        with agreed(ranks), closing(walk) as chunks:  # the generator is also closed when a measure raises
            for turn, chunk in enumerate(chunks):
                probe = turn % probes
                if probe == 0 and not alone:
                    ends.add(chunk.number, {"losses": chunk.losses, "hits": chunk.correct})
                for measure in measures:
                    for key, value in _values(measure, chunk):
                        at = key, probe
                        if isinstance(value, str):
                            failed.setdefault(key, value)
                        elif measure.total:
                            totals[at] = totals[at].add_(value) if at in totals else value.clone()
                        else:
                            kept.add(chunk.number, {at: value})
        # what one process could not compute, none has
        for other in ranks.together(failed):
            failed = other | failed
        found = kept.joined(ranks) | {at: total.div_(problem.n).cpu() for at, total in ranks.totals(totals).items()}
        del totals  # freed now: each may be as large as a weight, and is not held twice
        values: dict[Key, Tensor] = {}
        for key in dict.fromkeys(key for key, _ in found):
            each = [found.pop((key, probe)) for probe in range(probes) if (key, probe) in found]
            if (key[0].removesuffix(BY_ROUNDING), key[1]) not in failed:
                values[key] = each[0] if sketch is None else torch.stack(each)
        return Gathered(values, None if alone else from_rows(ends.joined(ranks)), failed=failed)

    def by_top(self, measures: list[PassMeasure], generator: torch.Generator) -> Iterator[Gathered]:
        """Yield the measures of the largest eigenvalue of each G, first for the logits, then for the softmax."""
        for softmax in (False, True):
            mine = [m for m in measures if bool(dict(m.options).get("softmax")) == softmax]
            wanted = list(dict.fromkeys(at for measure in mine for at in self._sought(measure)))
            if wanted:
                yield self._top(mine, wanted, softmax, generator)

    def _sought(self, measure: PassMeasure) -> list[CallOrInput]:
        # the network's input, or every call of a layer for measures that add layers up
        if measure.answer == "input":
            return [None] if self.plan.inputs else []
        return list(self.plan.batch_axis)

    def _top(
        self, measures: list[PassMeasure], wanted: list[CallOrInput], softmax: bool, generator: torch.Generator
    ) -> Gathered:
        kept: ChunkBuffer[tuple[Key, Literal["value", "residual"]]] = ChunkBuffer()
        products = 0
        walk = jacobian_norms(
            self.problem, self.model, self.plan, wanted,
            softmax=softmax, rtol=TOLERANCE, generator=generator, progress=self.progress,
        )  # fmt: skip
        with agreed(self.problem.ranks), closing(walk) as chunks:
            for chunk in chunks:
                products = max(products, chunk.products)
                for measure in measures:
                    for place in self._sought(measure):
                        value, residual = measure.evaluate(chunk.grams[place]), chunk.residuals[place]
                        key = (measure.key, place)
                        kept.add(chunk.number, {(key, "value"): value, (key, "residual"): residual})
        found = kept.joined(self.problem.ranks)
        values, residuals = (
            {key: rows for (key, what), rows in found.items() if what == which} for which in ("value", "residual")
        )
        return Gathered(values, residuals=residuals, products=max(self.problem.ranks.together(products)))


def _values(measure: PassMeasure, chunk: ChunkGrams) -> Iterator[tuple[Key, Tensor | str]]:
    """Yield a measure's value, or why there is none, at each of its places; and how far rounding may move it."""
    layers = chunk.layers.items()
    if measure.place == "input":
        network = [(None, chunk.input)] if measure.answer == "input" else []
        places = [*network, *((name, g) for name, g in layers if g.input_side is not None)]
    elif measure.place == "outputs":
        places = [(None, chunk.outputs)]
    elif measure.place == "weight":
        scaled = measure.scales_features
        known = ((name, g) for name, g in (*layers, *chunk.parts.items()) if g.weight is not None and g.has_derivative)
        places = [(name, g) for name, g in known if g.feature_scale is not None or not scaled]
    else:
        places = [*((name, g) for name, g in layers if g.counts_weight or g.counts_bias), *chunk.others.items()]
    once: dict[int, Any] = {}  # the network's input may be that of its first layer
    for place, grams in places:
        if grams is None:
            continue
        if id(grams) not in once:
            once[id(grams)] = attempted(partial(measure.evaluate, grams), measure.key)
        value = once[id(grams)]
        if isinstance(value, tuple):
            value, moved = value
            yield (measure.key + BY_ROUNDING, place), moved
        yield (measure.key, place), value


def by_weighting(measures: Iterable[PassMeasure]) -> Iterator[tuple[bool, list[PassMeasure]]]:
    """Yield (whether weighted by the loss, measures) for each kind of combination that is needed."""
    for weighted in (False, True):
        mine = [measure for measure in measures if ("C" in measure.needs) == weighted]
        if mine:
            yield weighted, mine


EXACT = 128  #: number of outputs up to which every output gets its own backward pass
PROBES = 16  #: number of random combinations beyond `EXACT` outputs
REPLANS = 16  #: largest number of new plans of one pass; each explains fewer parameters than the one before


@final
class Lens:
    """A view of a problem's network as it is now; keeps per-sample values, but no Gram matrices.

    One pass serves all one-pass measures that read no more of it than the requested ones. A later measure that reads
    more runs another pass; `passes` counts them. If the model has changed since, `StaleLens` is raised.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(3, 2, dtype=torch.float64)
    >>> data = (torch.ones(4, 3, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64))
    >>> problem = fl.Problem(net, "half_squared_error", data)
    >>> lens = fl.Lens(problem)
    >>> report = fl.measure(lens, ["mls", "nmls"])
    >>> lens
    Lens: Linear of 8 parameters, half_squared_error, 4 samples, 2 outputs; float64 on cpu; 1 pass, 0 products so far

    Args:
        problem: The network, loss and data.
        outputs: "exact" runs one backward pass for each of the network's N outputs. A number runs passes over that
            many random combinations of the outputs instead: one set for measures with the loss's curvature, one for
            the others. Then traces are estimates with a standard error, spectral norms are lower bounds with a
            residual, and volumes are undefined. None is "exact" up to `EXACT` outputs, and `PROBES` combinations
            beyond.
        attention_heads: Whether measures of weights have values for attention's projections and heads, too: the rows of
            a weight that make queries, keys or values (`attn.qkv/query`), the rows of one head (`attn.qkv/query/0`),
            and the columns that read a head (`attn.proj/output/0`). Sums over layers count whole weights alone.
        after: A lens on an earlier moment of the same network, or its `remembered`: searches for eigenvectors start
            from the ones found then.
        optimiser: The optimiser that trains the network, for measures of its own steps.
        along: The direction of measures along one: a tensor for each parameter, by name, or another problem of the same
            network, whose gradient the optimiser follows. None is the optimiser's next update.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        outputs: Literal["exact"] | int | None = None,
        attention_heads: bool = False,
        after: Lens | Mapping[Key, Remembered] | None = None,
        optimiser: torch.optim.Optimizer | None = None,
        along: Mapping[str, Tensor] | Problem | None = None,
    ) -> None:
        if not isinstance(problem, Problem):
            raise BadInput(
                f"Lens(...): expected a Problem, got {type(problem).__name__}: Lens(Problem(model, loss, data))"
            )
        # the network must be one that can be measured now, and the same in every process
        optimiser = plain_optimiser(optimiser, "Lens")
        to_parts(problem.model)
        require_same_everywhere(problem)
        require_own_torch()
        require_finite_weights(problem.model)
        self.problem = problem.present()
        self.optimiser = optimiser
        self.model = self.problem.measured()
        self.along = _along(along, self.problem, self.model)
        if not isinstance(attention_heads, bool):
            raise BadInput("expected True or False", argument="attention_heads", value=attention_heads, call="Lens")
        self.attention_heads = attention_heads
        self.probes = _probes(outputs, self.problem.outputs)  #: number of random combinations; None for every output
        # what measurements leave, for others and for the report
        self.passes = 0
        self.samples = self.problem.n  #: of the measurement; in a trial of it the number of samples that it stands for
        self.rehearses = False  #: whether it is a trial that takes one product of a search whose length is known
        self.products = 0  #: products with curvature matrices over all the data, since the lens was made
        self.pass_seconds = 0.0  #: duration of all passes, which serve many measures each
        self._peers = self.problem.peers  # asked for at every layer, and found by a look at all parameters
        self.remembered = _remembered(after, self._peers)  #: leading eigenpairs, by search and layer
        self.residuals: dict[Key, Tensor] = {}  #: relative residuals of largest eigenvalues found matrix-free, (n,)
        self.failed: dict[Key, str] = {}  #: why a measure of a pass has no values at a place
        self._values: dict[Key, Tensor] = {}
        self._passed: set[str] = set()  #: measures that a pass has had
        self._failures: dict[frozenset[str] | None, Exception] = {}  #: by what a pass needed; None: that of the plan
        self._met: list[Batch] = []  #: batches on which an earlier plan did not hold
        self._distrusted: frozenset[str] = frozenset()  #: places whose axis of samples differed from the plan
        self._outcomes: dict[str, Outcomes] = {}
        self._scale: dict[str, tuple[Tensor, int]] = {}
        self._versions = _fingerprints(self.problem.model)

    @cached_property
    def plan(self) -> Plan:
        """Return the plan of the pass: which parameter acts where. It is made again if a chunk breaks it."""
        return self._once(None, partial(lay_out, self.problem, self.model, attention_heads=self.attention_heads))

    def __repr__(self) -> str:
        told, kind = repr(self.problem).removeprefix("Problem: "), str(self.problem.dtype).removeprefix("torch.")
        passes = f"{self.passes} pass{'es' * (self.passes != 1)}, {count_of(self.products, 'product')} so far"
        return f"Lens: {told}; {kind} on {device_of(self.problem.model)}; {passes}"

    @property
    def layout(self) -> Plan:
        """The former name of `plan`."""
        warn("Lens", "layout", "plan")
        return self.plan

    @property
    def has_plan(self) -> bool:
        """Return whether a measure has asked for the plan."""
        return "plan" in vars(self)

    @cached_property
    def product_size(self) -> int:
        """Return the size of a curvature product: samples times the multiplications by weights in a forward pass.

        The number of measured parameters where no plan of a pass says how often each weight is used.
        """
        alone = self.problem.coupled or self.problem.sharded
        plan = "" if alone else self.attempted(lambda: self.plan, "the plan")
        weights = () if isinstance(plan, str) else plan.weights.values()
        used = sum(weight.value.numel() * weight.positions for weight in weights)
        measured = (p.numel() for name, p in self.model.named_parameters() if name in self.problem.parameters)
        return self.problem.n * max(used, sum(measured))

    @cached_property
    def risk_and_gradient(self) -> tuple[float, dict[str, Tensor]]:
        """Return the risk, and its gradient in each measured parameter, by name."""
        return Landscape(self.problem, model=self.model).risk_and_gradient()

    @property
    def has_gradient(self) -> bool:
        """Return whether a measure has asked for the gradient of the risk."""
        return "risk_and_gradient" in vars(self)

    @property
    def gradient(self) -> dict[str, Tensor]:
        """The gradient of the risk in each measured parameter, by name."""
        return self.risk_and_gradient[1]

    @cached_property
    def rounding(self) -> tuple[str, str]:
        """Return in words how far rounding moves the derivative in the weights, and in the inputs; empty if not far.

        In float32 it is not looked for where the plan says that all weights act through piecewise affine operations
        alone.
        """
        affine = self.has_plan and self.plan.weights and self.plan.affine.issuperset(self.plan.weights)
        inside = coarsest_inside(self.problem, self.model)
        if affine and self.problem.dtype == inside != torch.float64:
            return "", ""
        return moved_by_rounding(self.problem, self.model)

    @cached_property
    def enlarged(self) -> Problem | str:
        """Return `loss_scaled` of the problem: its loss times what loses no gradient inside, or why there is none."""
        return loss_scaled(self.problem, self.model)

    @cached_property
    def singular(self) -> str:
        """Return in words where the network, or the loss, has no finite derivative; empty if everywhere, or unknown."""
        if self.problem.sharded:
            return ""
        try:
            return singular(self.problem, self.model)
        except (RuntimeError, FlatlensError):  # it is not differentiable as often
            return ""

    @cached_property
    def underflow(self) -> str:
        """Return in words that the loss has slopes in the outputs, and all underflow in float32; empty if not so."""
        problem, steepest = self.problem, 0.0
        if problem.dtype == torch.float64:
            return ""
        for f, y in forwards(problem, self.model):
            steepest = max(steepest, float(slopes_of_each(problem, f, y).abs().max()))
        if not 0 < steepest < torch.finfo(problem.dtype).tiny * problem.mass:
            return ""
        return f"the loss's slopes underflow {problem.dtype}: use Problem(dtype=torch.float64)"

    @cached_property
    def vanishing(self) -> str:
        """Return in words which derivatives of the outputs, or weights, have squares that underflow; empty if none do.

        Looked at on a few samples, along a combination of the outputs that is large enough to show them.
        """
        problem, model = self.problem, self.model
        if problem.sharded:
            return ""
        double = problem.dtype == torch.float64
        large, least = (2.0**500, 1e-140) if double else (2.0**60, 1e-36)
        with problem.measuring(model), differentiable(model.parameters()):
            _, inputs, f, _ = run_recorded(problem, model, problem.place(problem.probes[0]))
            named = {name: p for name, p in model.named_parameters() if name in problem.parameters}
            if not f.requires_grad:
                return ""
            row = large * random_signs(f.shape, f.detach(), torch.Generator().manual_seed(0))
            found = torch.autograd.grad(f, [*inputs, *named.values()], row, allow_unused=True)
        where = ["the inputs"] * len(inputs) + list(named)
        sizes = [(float(one.abs().max()) / large, f"derivatives in {at}")
                 for at, one in zip(where, found, strict=True) if one is not None]  # fmt: skip
        sizes += [(float(p.detach().abs().max()), f"entries of {name}") for name, p in named.items()]
        size, at = min((each for each in sizes if each[0] > 0), default=(math.inf, ""))
        mend = "choose larger units for data or weights" if double else "Problem(dtype=torch.float64) may help"
        said = f"{at} are at most {size:.1g}, and squares of them underflow {problem.dtype}: {mend}"
        return said if size < least else ""

    @cached_property
    def linear_loss(self) -> str:
        """Return in words that the loss is linear in the outputs at all samples; empty if not so, or unknown."""
        loss, draws, identity = self.problem.loss, torch.Generator().manual_seed(0), self.problem.outputs == 1
        if loss.closed or loss.no_curvature or self.problem.sharded:
            return ""
        try:
            with closing(forwards(self.problem, self.model)) as found:
                for f, y in found:
                    u = random_signs(f.shape, f.to(torch.float64), draws)
                    if bool(loss.output_hessian_product(f, y)(u).any()):
                        return ""
                    identity = identity and torch.equal(loss.values(f, y), f[:, 0])
        except RuntimeError:  # differentiable once only
            return ""
        mend = ""
        if loss.name == "NLLLoss":
            mend = " (loss='cross_entropy', before the network's log_softmax, has the same values and is not)"
        if identity:
            mend = ": the network returns its loss; return the outputs instead, and give the loss"
        return f"the loss is linear in the outputs{mend}"

    def planned(self, work: Callable[[], _T]) -> _T:
        """Return the result of `work` under a plan that holds on every chunk."""
        for _ in range(REPLANS):
            try:
                return work()
            except PlanBroken as broken:
                self._met += broken.batches
                self._scale = {}  # the features may have been read along the wrong axis
                self._distrusted |= broken.distrusted
                self.plan = lay_out(
                    self.problem, self.model, self._met, self._distrusted, attention_heads=self.attention_heads
                )
        try:
            return work()
        except PlanBroken as broken:
            raise NotDifferentiable(
                f"{broken}, {REPLANS} times: forward() takes different branches on different samples"
            ) from None

    def _once(self, what: frozenset[str] | None, work: Callable[[], _T]) -> _T:
        """Return the result of `work`; what has failed is not tried again, but fails with the same error."""
        if what in self._failures:
            raise self._failures[what]
        try:
            return work()
        except PlanBroken:
            raise
        except Exception as error:
            self._failures[what] = error.with_traceback(None)  # without the tensors of its frames
            raise

    def attempted(self, work: Callable[[], _T], what: str) -> _T | str:
        """Return the result of `work`, or why there is none, by the rule of failures."""
        return attempted(work, what, self._peers, lambda: self.singular)

    def forget_failures(self) -> None:
        """Try again what failed before: memory may be free now."""
        self._passed -= {key for key, _ in self.failed}
        self._failures, self.failed = {}, {}

    def per_sample(
        self,
        measures: Iterable[PassMeasure],
        progress: Progress | None = None,
        generator: torch.Generator | None = None,
        *,
        partly: bool = False,
    ) -> Mapping[Key, Tensor]:
        """Return one number per sample, (n,) float64, by measure and place: a layer, or None for the network's input.

        For measures that sum over samples: the mean. For measures estimated with probes: one row per probe. With
        `partly`, places where a measure failed are left out: `failed` says why.

        Raises:
            NotDifferentiable: a measure failed at some place, and not `partly`.
        """
        measures = list(measures)
        missing = [measure for measure in measures if measure.key not in self._passed]
        if missing:
            self.require_fresh()
            needs = frozenset[str]().union(*(measure.needs for measure in missing))
            self._once(needs, partial(self.planned, partial(self._gather, missing, progress, generator)))
        lost = [] if partly else [why for measure in measures for why in self.failed_at(measure).values()]
        if lost:
            raise NotDifferentiable(lost[0])
        return self._values

    def failed_at(self, measure: PassMeasure) -> dict[str | None, str]:
        """Return why a measure of a pass has no values, by place."""
        return {place: why for (key, place), why in self.failed.items() if key == measure.key}

    def gathered(self, measure: PassMeasure) -> Mapping[str | None, Tensor]:
        """Return a measure's values by place if a pass has had them; nothing for those of outputs if it was coarse."""
        if self.failed_at(measure) or (measure.place == "outputs" and self.problem.arithmetic != "full"):
            return {}
        return {place: values for (key, place), values in self._values.items() if key == measure.key}

    def _gather(
        self, measures: list[PassMeasure], progress: Progress | None, generator: torch.Generator | None
    ) -> None:
        start = time.perf_counter()
        state = None if generator is None else generator.get_state()
        scale = self.feature_scale() if any(m.scales_features for m in measures) else {}
        gatherer = Gatherer(self.problem, self.model, self.plan, scale, progress)
        try:
            # one pass if every output is taken; else one for each kind of combination, and for spectral norms
            exact = self.probes is None
            for found in [gatherer.by_pass(measures)] if exact else self._passes(gatherer, measures, generator):
                self._values |= found.values
                self.failed |= found.failed
                self._passed |= {key for key, _ in (*found.values, *found.failed)}
                self.residuals |= found.residuals
                self.products += found.products
                if found.outcomes is not None and self.problem.arithmetic == "full":
                    self._outcomes["data"] = found.outcomes
                self.passes += 1
        except PlanBroken:
            if generator is not None and state is not None:
                generator.set_state(state)  # the pass starts again with the same draws
            raise
        self._passed |= {measure.key for measure in measures}
        self.pass_seconds += time.perf_counter() - start

    def _passes(
        self, gatherer: Gatherer, measures: list[PassMeasure], generator: torch.Generator | None
    ) -> Iterator[Gathered]:
        assert self.probes is not None
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        for weighted, mine in by_weighting([m for m in measures if m.sketched == "probes"]):
            seed = int(torch.randint(2**40, (), generator=generator))
            yield gatherer.by_pass(mine, Sketch(self.probes, seed, weighted))
        yield from gatherer.by_top([m for m in measures if m.sketched == "top"], generator)

    def outcomes(self, which: Literal["data", "test"]) -> Outcomes:
        """Return losses and correctness on the data (free after a pass that reads the loss) or on the held-out data."""
        if which not in self._outcomes:
            self.require_fresh()
            problem, model = self.problem, self.model
            if which == "data":
                state, mine = problem.measuring(model), problem.shared(FORWARD_CHUNK)
            else:
                assert problem.test is not None
                state = problem.measuring(model, plain=True)
                mine = problem.test.shared(FORWARD_CHUNK, problem.ranks)
            with state:
                self._outcomes[which] = outcomes(problem, mine, lambda batch: problem.run(model, batch))
        return self._outcomes[which]

    def feature_scale(self) -> Mapping[str, Tensor]:
        """Return the spread over the data of the features that each linear layer reads, (g, m)."""
        if not self._scale:
            self._scale = feature_spread(self.problem, self.model, self.plan)
        return {layer: scale for layer, (scale, _) in self._scale.items()}

    def constant_features(self, layer: str) -> int:
        """Return how many features of a layer are constant over the data; 0 if no measure needed their spread."""
        return self._scale[layer][1] if layer in self._scale else 0

    def functional_hessian(
        self, layer: str, directions: Directions, run: Run, *,
        each: bool = False, weigh: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the functional Hessian along directions of a weight.

        Summed over directions, (n,); with `each` summed over samples, (directions,); or what `weigh` makes of the forms
        of some samples, (samples, directions), for all samples.
        """
        self.require_fresh()
        by_sample = weigh or ((lambda forms: forms.sum(0, keepdim=True)) if each else (lambda forms: forms.sum(1)))
        rows, products = functional_hessian_along(
            self.problem, self.model, self.plan, layer, directions, by_sample, run.progress
        )
        self.products += products
        return rows.sum(0) if each else rows

    def at(self, problem: Problem) -> Lens:
        """Return the lens on the same network in another form of its problem, without what depends on it."""
        other = copy.copy(self)
        for name in ("risk_and_gradient", "underflow", "enlarged"):
            vars(other).pop(name, None)
        other.problem = problem
        return other

    def count(self, products: int) -> None:
        """Add to the number of products with curvature matrices."""
        self.products += products

    def remember(self, key: Key, found: Remembered) -> None:
        """Keep leading eigenpairs for the search at a later moment of the network."""
        self.remembered[key] = found

    def require_fresh(self) -> None:
        """Refuse to mix values of two networks: raise if the model has changed."""
        to_parts(self.problem.model)
        now = _fingerprints(self.problem.model)
        changed = [name for name in {**now, **self._versions} if now.get(name) != self._versions.get(name)]
        if changed:
            raise StaleLens(
                f"{changed[0]!r} changed after the lens was made: make a new Lens(problem) for the model as it is now"
            )


def _fingerprints(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the facts that show a change: identity of modules; identity, version, freezing and values of parameters.

    Values are included because writing to `.data` does not change the version. Versions of buffers are not, because
    forward() may write to them.
    """
    with in_turn(model):  # not while another thread measures it in place
        found: dict[str, tuple[int, ...]] = {f"module {name}": (id(module),) for name, module in model.named_modules()}
        found |= {name: fingerprint(p) for name, p in model.named_parameters()}
        return found | {name: (id(b), checksum(b)) for name, b in model.named_buffers()}


def _remembered(after: object, peers: Ranks) -> dict[Key, Remembered]:
    # those of the first process, if they differ
    left = {} if after is None else after.remembered if isinstance(after, Lens) else after
    if not (isinstance(left, Mapping) and all(isinstance(pairs, Remembered) for pairs in left.values())):
        raise BadInput(
            f"expected an earlier Lens (or its .remembered), got {type(after).__name__}", argument="after", call="Lens"
        )
    if peers.apart(lambda: {key: (checksum(pairs.values), checksum(pairs.vectors)) for key, pairs in left.items()}):
        return peers.of_the_first({key: Remembered(p.values.cpu(), p.vectors.cpu()) for key, p in left.items()})
    return dict(left)


def _along(along: object, problem: Problem, model: nn.Module) -> Mapping[str, Tensor] | Problem | None:
    if isinstance(along, Problem) and along.model is not problem.model:
        raise BadInput(
            "the other problem has another network", argument="along", call="Lens", remedy="make it with the same one"
        )
    if along is None or isinstance(along, Problem):
        return along
    if not isinstance(along, Mapping):
        raise BadInput(
            f"expected tensors by parameter, or a Problem, got {type(along).__name__}", argument="along", call="Lens"
        )
    space = space_of(problem, model)
    return space.named(space.flat(along))


def _probes(outputs: object, N: int) -> int | None:
    if outputs is None:
        return None if N <= EXACT else PROBES
    if outputs == "exact":
        return None
    if isinstance(outputs, bool) or not (isinstance(outputs, int) and outputs >= 2):
        raise BadInput(
            "expected 'exact', or a number of combinations, at least 2",
            argument="outputs",
            value=outputs,
            call="Lens",
        )
    return outputs if outputs < N else None  # taking every output costs no more
