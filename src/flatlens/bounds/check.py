"""fl.check_bounds: which theorems apply to this network, how tight they are, and whether any is violated."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any, Self, overload

import pandas as pd
import torch
from torch import Tensor

from flatlens.bounds import (  # noqa: F401  # their import registers their bounds
    batchnorm,
    compression,
    feature_robustness,
    relative_generalisation,
    residual,
    sharpening,
)
from flatlens.bounds.context import DECLARABLE, Assumption, Claim, Context, Target, declared
from flatlens.bounds.definition import BOUNDS, Bound, Verdict, read_bound, weigh
from flatlens.column import Column
from flatlens.distributions import RULES, Distribution, Rule
from flatlens.errors import BadInput, Give, NotDifferentiable, UnknownName
from flatlens.measures import Lens, about
from flatlens.measures.definition import drawing
from flatlens.progress import LESS_OF_A_BOUND, LIMIT, Shown, Watch, count_of, listed, progress_shown
from flatlens.result import Result


class BoundsReport(Result, Sequence[Verdict]):
    """Verdicts, one a claim; `frame()` is the table, `about` tells what was measured and assumed.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(3, 2, dtype=torch.float64)
    >>> data = (torch.ones(4, 3, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64))
    >>> problem = fl.Problem(net, "half_squared_error", data)
    >>> fl.check_bounds(fl.Lens(problem), "linear_stability").violated
    []
    """

    _KIND = "bounds report"

    def __init__(self, verdicts: Iterable[Verdict], about: Mapping[str, Any] | None = None) -> None:
        self._verdicts = list(verdicts)
        self.about = dict(about or {})

    @property
    def answer(self) -> list[str]:
        """The answer in at most three sentences: violations, how many claims hold, the tightest, what to declare."""
        return answer_of_bounds(self._verdicts)

    @overload
    def __getitem__(self, which: int | str | tuple[str, str | None]) -> Verdict: ...

    @overload
    def __getitem__(self, which: slice) -> list[Verdict]: ...

    def __getitem__(self, which: int | str | tuple[str, str | None] | slice) -> Verdict | list[Verdict]:
        """Return a row by its position, or by bound and layer: `table["mls_chain", "fc1"]`."""
        if isinstance(which, str | tuple):
            return self.of(*((which,) if isinstance(which, str) else which))
        return self._verdicts[which]

    def __len__(self) -> int:
        return len(self._verdicts)

    def of(self, bound: str, layer: str | None = None) -> Verdict:
        """Return the verdict of one row, `bound` with its dotted part."""
        for verdict in self._verdicts:
            if (verdict.bound, verdict.layer) == (bound, layer):
                return verdict
        known = [f"{verdict.bound} {verdict.layer}" for verdict in self]
        raise UnknownName.among("row", f"{bound} {layer}", known, where="of this table")

    @property
    def violated(self) -> list[Verdict]:
        """Return the violated rows: an error in flatlens, or in a theorem."""
        return [verdict for verdict in self._verdicts if verdict.status == "violated"]

    def frame(self) -> pd.DataFrame:
        """Return the tidy table: one row per claim; `layer` is empty for the whole network."""
        rows = [{**asdict(verdict), "layer": verdict.layer or ""} for verdict in self._verdicts]
        return pd.DataFrame(rows, columns=[one.name for one in fields(Verdict)])

    def _content(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {"rows": [asdict(verdict) for verdict in self._verdicts]}, {}

    @classmethod
    def _restored(cls, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        return cls([Verdict(**row) for row in content["rows"]], content["about"])


def check_bounds(
    lens: Lens,
    bounds: str | Bound | Iterable[str | Bound] | None = None,
    *,
    assume: Collection[str] = (),
    distribution: Distribution | None = None,
    target: Target | None = None,
    delta: float | None = None,
    rule: Rule = "exact",
    anyway: bool = False,
    generator: torch.Generator | None = None,
    progress: Shown = None,
) -> BoundsReport:
    """Check inequalities on a network: those that need the pass alone, or the named ones.

    A bound whose products, searches or draws are expected to take more than 10 minutes is refused, unless `anyway`.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(3, 2)
    >>> problem = fl.Problem(net, "half_squared_error", (torch.ones(4, 3), torch.zeros(4, 2)))
    >>> check_bounds(fl.Lens(problem), "linear_stability")[0].status
    'holds'

    Args:
        lens: The network, with every output and in full precision.
        bounds: Names, also with options ("volume_bound(k=3)"), or Bound objects; one alone is enough.
            None is every bound that needs the pass alone.
        assume: Names of assumptions that no sample can check; the table shows them as declared, not checked.
        distribution: The distribution of the data, if it is known.
        target: The function that the network should compute, with its Lipschitz constant.
        delta: A radius, in the input's units, within which the samples cover the support of the data. For a known
            distribution it is computed.
        rule: The way to compute it: "exact", "published" or "tight" (`Distribution.covering_radius`).
        anyway: Whether to do long work, too.
        generator: Draws the random numbers; seeded with 0 if None.
        progress: Called with (what, done, total); None shows a bar after two seconds, False shows none.
    """
    # The lens: every output of each sample by itself, in full precision
    refused = partial(BadInput, call="check_bounds")
    if not isinstance(lens, Lens):
        raise BadInput(f"expected a Lens, got {type(lens).__name__}: check_bounds(Lens(problem))", call="check_bounds")
    lens.require_fresh()
    needs_all = "bounds are checked sample by sample and need every output, but "
    if lens.problem.coupled:
        train, other = Give("batchnorm", "train"), Give("batchnorm", "eval")
        raise refused((needs_all, train, " makes samples depend on each other: use ", other))
    if lens.probes is not None:
        raise refused(f"{needs_all}this lens uses random combinations of the outputs: use "
                      "Lens(problem, outputs='exact')")  # fmt: skip
    if lens.problem.arithmetic != "full":
        raise refused("bounds need full precision", remedy=("make the Problem without ", Give("arithmetic")))
    # The bounds, and what they read beside the lens
    unasked = [one for one in BOUNDS.values() if not one.on_request]
    chosen = unasked if bounds is None else BOUNDS.named(bounds, "check_bounds(bounds=...)", read_bound)
    if not chosen:
        needed = "name at least one bound, or leave bounds out to check all that need the pass alone"
        raise refused(needed, argument="bounds", value=[])
    generator = drawing(generator, progress, "check_bounds")
    lens.problem.peers.same_draws(generator)
    if delta is not None and not (isinstance(delta, int | float) and 0 < delta < math.inf):
        raise refused("expected a radius in the input's units, above 0 and finite", argument="delta", value=delta)
    for name, given, kind in (("distribution", distribution, Distribution), ("target", target, Target)):
        if given is not None and not isinstance(given, kind):
            raise refused(f"expected a {kind.__name__}, got {type(given).__name__}", argument=name)
    if rule not in RULES:
        raise UnknownName.among("rule", str(rule), RULES, where="for the covering radius")
    with progress_shown(progress, "checking") as line, lens.problem.measuring(lens.model):
        watch = Watch(line, math.inf if anyway else LIMIT, "check_bounds", LESS_OF_A_BOUND)
        context = Context(lens, declared(assume), distribution, generator, watch, target, delta, rule)
        verdicts = [verdict for one in chosen for verdict in _verdicts(one, context, watch)]
    return BoundsReport(verdicts, {**about(lens), "assume": sorted(context.declared), "rule": rule})


def _verdicts(one: Bound, context: Context, watch: Watch) -> Iterator[Verdict]:
    watch.within = one.name
    watch.begin(one.name)
    try:
        for claim in one.claims(context):
            rounding, floor = max(claim.rounding, context.rounding), max(claim.floor, context.floor)
            yield weigh(one, replace(claim, rounding=rounding, floor=floor))
    except NotDifferentiable as error:
        missing = Assumption("twice_differentiable", False, str(error))
        yield weigh(one, Claim(math.nan, math.nan, assumptions=(missing,)))


NEAR = 0.1  #: share of the right side that the left one reaches at least where a bound says something
_VACUOUS = "vacuous"  #: in the note of a bound that no network violates
MOST = 3  #: names that a sentence lists
UNDECLARED = "neither checked nor declared"


def answer_of_bounds(verdicts: Sequence[Verdict]) -> list[str]:
    """Return at most three sentences on the claims."""
    if not verdicts:
        return []
    violated = [v for v in verdicts if v.status == "violated"]
    wrong = f"Violated: {listed(_names(violated), MOST)}; {cause(violated)}." if violated else ""
    # How many claims hold
    count = Counter(v.status for v in verdicts)
    others = [f"{count[s]} {'is' if count[s] == 1 else 'are'} {s}" for s in ("not applicable", "undecided") if count[s]]
    claims = count_of(len(verdicts), "claim")
    held = f"{count['holds'] or 'None'} of {claims} hold{'s' * (count['holds'] <= 1)} on this network"
    counted = f"{'; '.join([held, *others])}."
    return [sentence for sentence in (wrong, counted, _said(verdicts), _next(verdicts)) if sentence][:3]


def cause(violated: Sequence[Verdict]) -> str:
    """Return the meaning of a violated bound; the user's own declarations come first."""
    declared = list(dict.fromkeys(v.assumption for v in violated if v.assumption))
    ours = "an error in flatlens or in a theorem: please report it"
    return f"either an assumption that you declared is false ({'; '.join(declared)}), or {ours}" if declared else ours


def _names(verdicts: Sequence[Verdict]) -> list[str]:
    return list(dict.fromkeys(v.bound for v in verdicts))


def _said(verdicts: Sequence[Verdict]) -> str:
    """Return which of the bounds that hold says most, and which ones say nothing."""
    held = [v for v in verdicts if v.status == "holds"]
    known = [v for v in held if math.isfinite(v.tightness) and _VACUOUS not in v.note]
    empty = _names([v for v in held if _VACUOUS in v.note])
    nothing = f"{listed(empty, MOST)} {'is' if len(empty) == 1 else 'are'} vacuous" if empty else ""
    if not known:
        return f"{nothing}." if nothing else ""
    best = max(known, key=lambda v: v.tightness)
    at = f"{best.bound}{f' at {best.layer}' if best.layer else ''}"
    near = sum(v.tightness >= NEAR for v in known)
    told = f"The tightest is {at} (left side {100 * best.tightness:.3g}% of the right)"
    far = f"within a factor of {1 / NEAR:.0f} of equality"
    some = f"{count_of(near, 'claim')} {'is' if near == 1 else 'are'} {far}"
    return f"{'; '.join(filter(None, (told, some if near else f'none is {far}: they say little here', nothing)))}."


def _next(verdicts: Sequence[Verdict]) -> str:
    """Return what decides more claims: an assumption to declare, the one that fails most often, bounds to name."""
    waiting: dict[str, list[Verdict]] = {}
    for v in verdicts:
        name, _, why = v.assumption.partition(": ")
        if v.status == "not applicable" and name in DECLARABLE and why == UNDECLARED:
            waiting.setdefault(name, []).append(v)
    if not waiting and any(v.status != "not applicable" for v in verdicts):
        asked = {Column.parse(v.bound).measure for v in verdicts}
        others = [name for name, one in BOUNDS.items() if one.on_request and name not in asked]
        by_default = {name for name, one in BOUNDS.items() if not one.on_request} <= asked
        more = f"{count_of(len(others), 'bound')} need{'s' * (len(others) == 1)} more than a pass and must be named"
        return f"{more}: {listed(others, MOST)}." if by_default and others else ""
    if not waiting:
        (why, _), *_ = Counter(v.assumption for v in verdicts).most_common(1)
        return f"The assumption that fails most often is {why}."
    decided = listed(_names([v for each in waiting.values() for v in each]), MOST)
    return f"If it holds here, declare {listed(list(waiting), MOST)} with assume=, which decides {decided}."
