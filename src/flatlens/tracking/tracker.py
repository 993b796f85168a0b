"""The Tracker: measures followed during training, at the steps of a schedule, isolated from the training."""

from __future__ import annotations

import math
import operator
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, final

import numpy as np
import pandas as pd
import torch
from torch import nn

from flatlens.curvature.krylov import Remembered
from flatlens.curvature.optimiser_geometry import Edge, edge_of, plain_optimiser, without_ascent
from flatlens.curvature.space import inner
from flatlens.deprecated_names import present_measure, renamed
from flatlens.errors import BadData, BadInput, BadLoss, BadModel, one_line
from flatlens.estimate import Key, Report, undefined
from flatlens.measures import Lens, Measure
from flatlens.measures.definition import NetworkMeasure, Run, as_studied, named
from flatlens.measures.pipeline import measure_with
from flatlens.memory import warn_of
from flatlens.problem import Problem
from flatlens.problem.batches import finite
from flatlens.problem.data import random_kept
from flatlens.problem.eval_context import device_of
from flatlens.problem.forward import forwards
from flatlens.problem.ranks import in_first_process
from flatlens.progress import PAUSE, Aside, Bar, Watch, beside, count_of, no_progress
from flatlens.result import of_report
from flatlens.tracking.history import SKIPPED, History, answer_of_run, save_history
from flatlens.tracking.loggers import Live, Moment, scalars

Every: TypeAlias = int | Iterable[int] | Callable[[int], bool]


class Schedule:
    """The steps at which a measurement is due: every k-th step, a list of steps, or those that a function accepts.

    >>> [step for step in range(10) if Schedule(4).due(step)], Schedule([1, 2, 9]).due(2)
    ([0, 4, 8], True)
    """

    def __init__(self, every: Every) -> None:
        self._divisor, self._listed, self._says = 0, frozenset[int](), None
        if callable(every):
            self._says = every
            self.plain: int | str | list[int] = f"function {getattr(every, '__qualname__', type(every).__name__)}"
        elif isinstance(every, Iterable) and not isinstance(every, str) and getattr(every, "ndim", 1) != 0:
            self.plain = [whole(step, "every=[...]", 0) for step in every]
            if self.plain != sorted(set(self.plain)) or not self.plain:
                raise BadInput(f"Tracker(every={self.plain}): the steps must increase")
            self._listed = frozenset(self.plain)
        else:
            self.plain = self._divisor = whole(every, "every", 1)

    def due(self, step: int) -> bool:
        """Return whether to measure after this many training steps."""
        if self._says is not None:
            return bool(self._says(step))
        return step in self._listed if self._listed else step % self._divisor == 0


def whole(value: object, name: str, least: int) -> int:
    """Return a whole number of at least `least`, and refuse anything else."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if not least <= number < 2**63:  # the range of an integer column
        most = "" if number < least else ", and below 2**63,"
        raise BadInput(f"Tracker({name}={value!r}): expected a whole number of at least {least}{most}")
    return number


@contextmanager
def isolated(model: nn.Module) -> Iterator[None]:
    """Turn gradients on and autocast off inside; restore every global random state afterwards.

    Trainers call their hooks under no_grad, inference mode or autocast; a dataset may draw from Python's or numpy's
    generator when read. The problem itself restores everything else (mode, buffers).
    """
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    kinds = sorted({p.device.type for p in model.parameters()} | {"cpu"})
    with ExitStack() as stack:
        stack.enter_context(random_kept(devices))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@final
class Tracker:
    """A follower of measures during training, which continues with the same digits.

    `step` is called after every training step, and once before the first; where parameters are spread over processes,
    by each of them, and the first one tells. At the end, `close` or leaving a `with` block measures the last step, too,
    if `every` is a number. Each measurement is a new `Lens` that starts from the last one's
    eigenpairs, and draws from its own generator, seeded by `seed` and the step.

    Args:
        problem: The network in training, its loss, and the data to measure on.
        measures: Names or Measure objects; one alone is enough.
        every: A number of steps, a list of steps, or a function of the step.
        samples: The number of the problem's samples to measure on, drawn once with `seed`; None: all.
        seed: Seeds all random draws, also of each measurement.
        budget: The largest share of wall time, between 0 and 1, for measuring. Measurements beyond it are skipped, and
            the history then says that it is not reproducible. Not where several processes measure together.
        outputs: As for `Lens`.
        along: As for `Lens`.
        last: Whether `close` measures the last step where `every` is a number that does not divide it.
        live: True for a line on stderr, False for none, or a function that is called with a `Moment`.
        log: Functions that are called with each `Moment`, such as `flatlens.tracking.TensorBoardLog(folder)`; one alone
            is enough. One that fails, as on a full disk, is a warning, once, and training goes on. If one has a method
            `forget_after`, `load_state_dict` calls it with the last step of the state.

    >>> net = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> optimiser = torch.optim.SGD(net.parameters(), lr=0.05)
    >>> data = torch.tensor([[3.0, 4.0]]), torch.zeros(1, 1)
    >>> tracker = Tracker(Problem(net, "half_squared_error", data), "sharpness", every=2, live=False)
    >>> with tracker:
    ...     for step in range(6):
    ...         _ = tracker.step(step, optimiser=optimiser)  # and a training step
    >>> tracker.history[["step", "edge", "measure", "value"]].round(6)
       step  edge    measure  value
    0     0  40.0  sharpness   25.0
    1     2  40.0  sharpness   25.0
    2     4  40.0  sharpness   25.0
    3     5  40.0  sharpness   25.0
    """

    @renamed(subset="samples")
    def __init__(
        self,
        problem: Problem,
        measures: str | Measure | Iterable[str | Measure],
        every: Every = 100,
        *,
        samples: int | None = None,
        seed: int = 0,
        budget: float | None = None,
        outputs: Literal["exact"] | int | None = None,
        along: Mapping[str, torch.Tensor] | Problem | None = None,
        last: bool = True,
        live: bool | Callable[[Moment], None] = True,
        log: Callable[[Moment], None] | Iterable[Callable[[Moment], None]] = (),
    ) -> None:
        several = isinstance(log, Iterable) and not isinstance(log, str) and not callable(log)
        self._logs: list[Any] = list(log) if several else [log]  # type: ignore[arg-type]
        # arguments that a tracker cannot use are refused
        if not isinstance(problem, Problem):
            raise BadInput(f"expected a Problem, got {type(problem).__name__}", argument="problem", call="Tracker")
        self._measures = [as_studied(one) for one in named(measures)]
        if not self._measures:
            raise BadInput("Tracker(measures=[]): name at least one")
        if problem.test is None and (held := [m.key for m in self._measures if m.held_out]):
            what = f"{held[0]} needs held-out data: Problem(..., test=(x, y))"
            raise BadInput(what, argument="measures", call="Tracker")
        if budget is not None and not (isinstance(budget, int | float) and 0 < budget < 1):
            raise BadInput(f"Tracker(budget={budget!r}): expected a share of wall time, between 0 and 1")
        _require_alone(problem, budget)
        if not (isinstance(live, bool) or callable(live)):
            what = "expected True, False or a function of a Moment"
            raise BadInput(what, argument="live", value=live, call="Tracker")
        if wrong := [one for one in self._logs if not callable(one) or isinstance(one, type)]:
            raise BadInput(f"Tracker(log={wrong[0]!r}): expected functions of a Moment, such as CSVLog('run.csv')")
        # what is measured when, and who is told
        self._schedule, self._seed, self._budget = Schedule(every), whole(seed, "seed", 0), budget
        self._outputs: Literal["exact"] | int | None = outputs
        self._along = along
        self._last = last and isinstance(self._schedule.plain, int)
        self._optimiser: torch.optim.Optimizer | None = None  # of the latest call
        self._live = Live() if live is True else live or None
        shown = [] if self._live is None else [Aside("the live line of the tracker", self._live)]
        self._tells = [*shown, *(Aside(f"the tracker's log {_name_of(one)}", one) for one in self._logs)]
        self._identity: dict[str, Any] = {
            "measures": [m.key for m in self._measures],
            "every": self._schedule.plain,
            "subset": None if samples is None else whole(samples, "samples", 1),  # the name in saved states
            "seed": self._seed,
            "outputs": outputs,
            "samples": problem.n,
        }
        # the samples, and a lens on them, which refuses bad outputs now rather than at the first step
        with isolated(problem.model):
            self.problem = problem if samples is None else problem.subset(samples, self._generator(-1))
            Lens(self.problem, outputs=outputs, along=along)
        if self.memory is not None and self.problem.bytes_of_weights > self.problem.memory:
            warn_of(self.memory, device_of(problem.model), "a measurement of this Tracker")
        # what is known of the run so far
        self._history = History()
        self._warm: dict[Key, Remembered] = {}
        self._rounding: list[Any] = [0, ("", "")]  #: moments so far, and what the last look saw
        self._next, self._latest = 0, -1
        self.latest: Moment | None = None  #: the last measurement, in this process
        self.batch_size: int | None = None  #: samples of a step, as `train` and the callbacks know it; yours to set
        self._measuring, self._longest, self._before, self._started = 0.0, 0.0, 0.0, time.perf_counter()

    def __repr__(self) -> str:
        told, plan = repr(self.problem).removeprefix("Problem: "), self._schedule.plain
        when = f"every {count_of(plan, 'step')}" if isinstance(plan, int) else f"at steps {plan}"
        done = f"{count_of(self._history.moments, 'measurement')} so far"
        return f"Tracker: {', '.join(self._identity['measures'])} {when}, of {told}; {done}"

    @property
    def memory(self) -> int | None:
        """The bytes that a measurement may take beside the network: an upper bound; None if a measure states none.

        `fl.cost(lens, measures=...)` expects the memory of all measures, from trials.
        """
        each = [one.memory(self.problem) if isinstance(one, NetworkMeasure) else None for one in self._measures]
        known = [size for size in each if size is not None]
        kept = sum(_KEPT * self.problem.bytes_of_weights for one in self._measures if one.card.name in _SEARCHES)
        return max(known) + kept if len(known) == len(each) else None

    def due(self, step: int) -> bool:
        """Return whether `step` would measure after this many training steps, ignoring the budget."""
        return self._schedule.due(step)

    def step(self, step: int | None = None, *, optimiser: torch.optim.Optimizer | None = None) -> Report | None:
        """Measure if it is due after `step` training steps; return the report, or None.

        Without `step`, calls are counted from 0. A step is measured once, and steps may not decrease: a tracker follows
        one run. `optimiser` gives the learning rate and the edge of stability; SAM's edge takes the norm of the
        gradient of the measured samples. Weights that are not finite give undefined numbers, never an error.
        """
        step = self._next if step is None else whole(step, "step", 0)
        self._optimiser = plain_optimiser(optimiser, "Tracker.step")
        before = self._advance(step, "step")
        if step == before or not self._schedule.due(step):
            return None
        return self._taken(step, before)

    def close(self, step: int | None = None, *, optimiser: torch.optim.Optimizer | None = None) -> Report | None:
        """Measure after the last training step, unless it is measured; return the report, or None.

        Without arguments, `step` and `optimiser` are taken from the last call of `step`. It measures only if `every` is
        a number. The tracker can follow further steps afterwards.
        """
        step = self._latest if step is None else whole(step, "step", 0)
        self._optimiser = plain_optimiser(optimiser, "Tracker.close") or self._optimiser
        if step < 0 or not self._last:
            return None
        before = self._advance(step, "close")
        return None if step == self._history.latest else self._taken(step, before)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # after an error the weights are not those of a finished step
            self.close()

    def _advance(self, step: int, by: str) -> int:
        """Note that this many training steps are done; return the number before."""
        if step < self._latest:
            raise BadInput(
                f"Tracker.{by}({step}): the last step was {self._latest}, and steps must increase: make a new Tracker "
                f"for a new run"
            )
        before, self._next, self._latest = self._latest, step + 1, step
        return before

    def _taken(self, step: int, before: int) -> Report | None:
        """Measure, note and tell; None beyond the budget of time."""
        optimiser = self._optimiser
        _require_alone(self.problem, self._budget)  # a network may have been spread since
        edge = self._edge(optimiser)
        if why := self._over_budget():
            self._history.skip(step, self._identity["measures"], edge, why)
            return None
        start = time.perf_counter()
        try:
            with isolated(self.problem.model):
                report, lens = self._measure(step, optimiser)
                if optimiser is not None and without_ascent(optimiser) is not optimiser and lens is not None:
                    norm = math.nan
                    with suppress(*_UNMEASURABLE):
                        norm = math.sqrt(inner(lens.gradient, lens.gradient))
                    edge = self._edge(optimiser, norm)
        except BaseException:  # an interrupted step has not been measured
            self._latest = before
            raise
        self._longest = max(self._longest, time.perf_counter() - start)
        self._measuring += time.perf_counter() - start
        self._history.add(step, report, edge)
        self.latest = moment = Moment(step, report, edge)
        if self.problem.first:
            for tell in self._tells:
                tell(moment)
        return report

    def _edge(self, optimiser: torch.optim.Optimizer | None, gradient_norm: float = math.nan) -> Edge:
        """Return the optimiser's edge; beside the sharpness only if it trains just the measured parameters."""
        if optimiser is None:
            return Edge()
        trained = {id(p) for group in optimiser.param_groups for p in group["params"] if p.requires_grad}
        with suppress(BadModel):  # one that is measured by name has another name now: the rows say so
            names = self.problem.present().parameters
            if trained == {id(p) for name, p in self.problem.model.named_parameters() if name in names}:
                return edge_of(optimiser, gradient_norm=gradient_norm)
        return replace(edge_of(optimiser), of="preconditioned_sharpness")

    def _measure(self, step: int, optimiser: torch.optim.Optimizer | None) -> tuple[Report, Lens | None]:
        """Return the report of a step that is due, and its lens; what cannot be measured says why."""
        moments, seen = self._rounding
        lens = None
        try:
            lens = Lens(self.problem, outputs=self._outputs, after=self._warm, optimiser=optimiser, along=self._along)
            if moments % _LOOKS:
                lens.rounding = seen
            shown = self._live is not None and self.problem.first and in_first_process()
            delay = None if sys.stderr.isatty() else PAUSE  # a log has the tracker's own lines
            with Bar(prefix=f"step {step}: ", delay=delay) if shown else nullcontext(no_progress) as line:
                watch = Watch(beside(line), limit=math.inf)
                report = measure_with(lens, self._measures, Run(self._generator(step), watch, thorough=True))
        except _UNMEASURABLE as error:
            # what is wrong, without the argument and the remedy, which are those of one measurement
            why = error.but(argument="", call="", remedy="") if isinstance(error, BadInput) else error
            report = Report({(m.key, None): undefined(one_line(why)) for m in self._measures}, {})
            if lens is None:
                return report, None
        self._warm = lens.remembered
        self._rounding = [moments + 1, vars(lens).get("rounding", seen)]
        # what has no number is undefined, and says so if the network's outputs on a few samples are not finite
        doubt = ""
        if any(e.kind == "undefined" for e in report.values()):
            with (
                suppress(*_UNMEASURABLE),
                closing(forwards(lens.problem, lens.model, lens.problem.probes, twice=False)) as passes,
            ):
                doubt = "" if all(finite(f) for f, _ in passes) else "training diverged? "
        rows = dict(report)
        for key, e in report.items():
            if e.value != e.value or e.kind == "undefined":
                note = f"{doubt}{e.note}" if e.note else "not a number: did training diverge?"
                rows[key] = replace(e, kind="undefined", note=note)
        return Report(rows, report.about), lens

    def _generator(self, step: int) -> torch.Generator:
        """Return the generator of one measurement: a resumed run draws the same numbers."""
        (seed,) = np.random.SeedSequence([self._seed, step + 1]).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(seed) >> 1)

    def _over_budget(self) -> str:
        """Return why not to measure now: one more like the longest so far would exceed the budget; empty to measure."""
        if self._budget is None or not self._measuring:
            return ""
        elapsed = self._elapsed()
        if self._measuring + self._longest <= self._budget * (elapsed + self._longest):
            return ""
        share = self._measuring / elapsed
        return f"{SKIPPED}: measuring had taken {share:.0%} of the time, the budget is {self._budget:.0%}"

    def _elapsed(self) -> float:
        return self._before + time.perf_counter() - self._started

    @property
    def history(self) -> pd.DataFrame:
        """Return the tidy table: step, lr, edge, measure, layer, value, stderr, kind, seconds, products, note.

        `attrs["reproducible"]` is False where a budget of time made it skip; `attrs["note"]` says how often.
        """
        table = self._history.frame()
        table.attrs |= {} if self.batch_size is None else {"batch_size": self.batch_size}
        return table

    def plot(self) -> Any:
        """Return an Altair chart (report.figures); a notebook shows it by itself."""
        return of_report("figures.picture")(self)

    @property
    def answer(self) -> list[str]:
        """The answer in at most three sentences: the edge of stability, the loss, the noise of gradients."""
        return answer_of_run(self.history)

    def page(self, path: str | os.PathLike[str]) -> Path:
        """Write one HTML file that needs no network: the answer, the pictures, the first and the last values.

        Raises:
            BadFolder: it cannot be written.
        """
        written: Path = of_report("tracked.write_tracked_page")(self.history, Path(path))
        return written

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the history as CSV, whole or not at all, without `seconds`: the same run gives the same bytes."""
        save_history(self._history.frame(), path)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs for the same history: numbers, strings, lists and tensors.

        It holds up to 10 vectors of the parameters' size for each search for eigenvalues.
        """
        return {
            "version": 1,
            "tracker": dict(self._identity),
            "next": self._next,
            "latest": self._latest,
            "warm": [
                {"search": search, "layer": layer, "values": pairs.values, "vectors": pairs.vectors.cpu()}
                for (search, layer), pairs in self._warm.items()
            ],
            "history": self._history.state(),
            "rounding": self._rounding,
            "seconds": [self._measuring, self._longest, self._elapsed()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of `state_dict`.

        Raises:
            BadInput: the state is of a tracker with other measures, steps, samples or seed.
        """
        if not isinstance(state, dict) or state.get("version") != 1:
            raise BadInput("the argument is not the result of Tracker.state_dict()", call="Tracker.load_state_dict")
        if missing := [key for key in ("tracker", "history", "warm", "next", "latest", "seconds") if key not in state]:
            raise BadInput(f"the state has no {missing[0]!r}: it is not a whole one", call="Tracker.load_state_dict")
        saved = dict(state["tracker"])
        saved["measures"] = [present_measure(name) for name in saved.get("measures", ())]
        for key, own in self._identity.items():
            if (theirs := saved.get(key)) != own:
                raise BadInput(
                    f"Tracker.load_state_dict(...): the saved tracker has {key}={theirs!r}, this one {own!r}: make the "
                    f"Tracker with the same settings"
                )
        self._history.load(state["history"])
        self._warm = {(one["search"], one["layer"]): Remembered(one["values"], one["vectors"]) for one in state["warm"]}
        self._rounding = list(state.get("rounding", self._rounding))
        self._next, self._latest = int(state["next"]), int(state["latest"])
        self._measuring, self._longest, self._before = state["seconds"]
        self._started = time.perf_counter()
        for log in self._logs if self.problem.first and self._latest >= 0 else []:
            if callable(forget := getattr(log, "forget_after", None)):
                Aside(f"forgetting later steps in the tracker's log {_name_of(log)}", forget)(self._latest)


def numbers_after(tracker: Tracker, step: int, optimiser: object, over: bool) -> dict[str, float] | None:
    """Measure in a trainer, after a step or `over` at the end; return the numbers if this process has new ones."""
    known = optimiser if isinstance(optimiser, torch.optim.Optimizer) else None
    report = (tracker.close if over else tracker.step)(step, optimiser=known)
    return None if report is None or tracker.latest is None else scalars(tracker.latest)


def _name_of(log: object) -> str:
    return getattr(log, "__name__", type(log).__name__)


_SEARCHES, _KEPT = ("sharpness", "preconditioned_sharpness", "eigenspace"), 10
"""Measures that keep eigenvectors for the next measurement; the largest number of vectors."""
_LOOKS = 8  #: moments for one comparison with the network in float64, which may take as long as a quick measure
_UNMEASURABLE = BadModel, BadLoss, BadData, ArithmeticError
"""What a network in training may come to, and what its own code, loss or data may raise."""


def _require_alone(problem: Problem, budget: float | None) -> None:
    """Refuse a budget of time where several processes measure together."""
    if budget is not None and problem.peers.size > 1:
        raise BadInput("Tracker(budget=...): processes that measure together would skip different steps: leave it out")
