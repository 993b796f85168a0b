"""fl.compare: several networks, measured in the same way and ranked; and the result, as tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any, Self, overload

import pandas as pd
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from flatlens.comparing.rankings import Agreement, Place, agreement, places
from flatlens.curvature.probes import student
from flatlens.deprecated_names import present_measure, warn
from flatlens.errors import BadInput, UnknownName
from flatlens.estimate import Estimate, Report
from flatlens.measures import LAYERWISE, MEASURES, NEURONWISE, Card, Lens, Measure, measure, named
from flatlens.measures.definition import drawing
from flatlens.measures.presets import PRESETS, Choice, asked_for
from flatlens.problem import Problem
from flatlens.problem.batches import FORWARD_CHUNK, checksum
from flatlens.problem.data import Data
from flatlens.problem.forward import REDUCED_PRECISION
from flatlens.progress_bar import Shown, shown
from flatlens.result import Result, of_report

SMALL = {
    **dict.fromkeys(("sharpness", "flatness", "normalised", "hessian", "perturbation"), "flat"),
    **dict.fromkeys(("sensitivity", "compression"), "compressed"),
}
"""The meaning of a small value, by family. For norms and the sample's own properties there is none."""
NEITHER = frozenset({"interpolation_gap", "gradient_noise_scale"})  # a difference of traces; no curvature
RISK_FAMILY = "generalisation"  #: the family of quantities that one would like to predict: shown, but not ranked


def direction(card: Card) -> str:
    """Return the meaning of a small value, "flat" or "compressed"; "" if not known.

    >>> from flatlens.measures import MEASURES
    >>> [direction(MEASURES[name].card) for name in ("ggn_trace", "mls", "weight_norm")]
    ['flat', 'compressed', '']
    """
    return "" if card.name in NEITHER else SMALL.get(card.family, "")


_TIMES = 2.0  #: ratio of training losses beyond which the larger one is not as good a fit
_POINTS = 0.02  #: difference of accuracies beyond which the smaller one is not as good a fit


@dataclass(frozen=True)
class NotRanked:
    """A network that does not fit the data as well as the best one."""

    network: str
    reason: str
    loss: float
    accuracy: float  #: NaN where the targets are not class labels


def not_ranked(reports: Mapping[str, Report]) -> dict[str, NotRanked]:
    """Return the networks that fit the data worse than the one of the smallest training loss.

    The 95% interval of the paired difference of the losses excludes 0, and the loss is over twice the smallest one or
    the accuracy over 2 points lower; or the loss is not finite.
    """
    reports = {name: report for name, report in reports.items() if ("loss", None) in report}
    losses = {name: report["loss"].value for name, report in reports.items()}
    known = {name: loss for name, loss in losses.items() if math.isfinite(loss)}
    if not known:
        return {}
    best = min(known, key=lambda name: known[name])
    reasons = {name: _reason(report, reports[best], best) for name, report in reports.items()}
    return {name: NotRanked(name, why, losses[name], _accuracy(reports[name])) for name, why in reasons.items() if why}


def _reason(report: Report, best: Report, name: str) -> str:
    mine, its = report["loss"], best["loss"]
    if not math.isfinite(mine.value):
        return f"training loss {mine.value:g}"
    if mine.samples is None or its.samples is None or len(mine.samples) < 2:
        return ""
    difference, stderr = student(mine.samples - its.samples)
    larger = mine.value > its.value + (_TIMES - 1) * abs(its.value)
    accuracies = _accuracy(report), _accuracy(best)
    worse = accuracies[0] < accuracies[1] - _POINTS  # False where there is none
    if not (difference > 1.96 * stderr and (larger or worse)):
        return ""
    told = f"training loss {mine.value:.3g} against {its.value:.3g} of {name}"
    return f"{told}, accuracy {accuracies[0]:.0%} against {accuracies[1]:.0%}" if worse else told


def _accuracy(report: Report) -> float:
    return report["accuracy"].value if ("accuracy", None) in report else math.nan


_COLUMNS = ["measure", "model", "value", "stderr", "kind", "rank", "undecided_with", "small_means", "invariant", "note"]
BESIDE = ("loss", "accuracy", "test_loss", "test_accuracy", "generalisation_gap")
RESCALINGS = frozenset({LAYERWISE, NEURONWISE})


@dataclass(frozen=True, eq=False, repr=False)  # == would compare reports
class Comparison(Result):
    """Networks ranked by each measure: `comparison["mls"]` has estimates by network, `["mls", "net"]` one of them.

    Networks that do not fit the data as well as the best one (`not_ranked`) have values, and no ranks.

    >>> import torch, flatlens as fl
    >>> nets = {"a": torch.nn.Linear(3, 2), "b": torch.nn.Linear(3, 2)}
    >>> data = (torch.ones(4, 3), torch.zeros(4, 2))
    >>> comparison = fl.compare({name: fl.Lens(fl.Problem(net, "mse", data)) for name, net in nets.items()}, "mls")
    >>> sorted(comparison["mls"])
    ['a', 'b']
    """

    _KIND = "comparison"

    reports: Mapping[str, Report]  #: by network, with layers, parts and samples
    measures: Mapping[str, Measure]  #: the ranked measures, by the name of their row
    notes: tuple[str, ...] = ()  #: differences between the networks beside their weights

    @cached_property
    def about(self) -> dict[str, Any]:  # type: ignore[override]  # it cannot be set
        """Return what was measured, by network, from their reports."""
        return {name: report.about for name, report in self.reports.items()}

    @property
    def models(self) -> list[str]:
        """Return the networks' names, in the order given."""
        return list(self.reports)

    @cached_property
    def places(self) -> dict[str, dict[str, Place]]:
        """Return each network's rank by each measure, and the networks whose order to it is open."""
        found = {name: places(self._ranked_estimates(name), self.rounding) for name in self.measures}
        return {name: {model: of.get(model, Place(math.nan)) for model in self.reports} for name, of in found.items()}

    def _ranked_estimates(self, measure: str) -> dict[str, Estimate]:
        return {name: self.reports[name][measure] for name in self.ranked}

    @cached_property
    def not_ranked(self) -> dict[str, NotRanked]:
        """Return the networks that fit the data worse than the best one, with the reason; they have no ranks."""
        return not_ranked(self.reports)

    @property
    def ranked(self) -> list[str]:
        """Return the names of the networks that are ranked."""
        return [name for name in self.reports if name not in self.not_ranked]

    @cached_property
    def answer(self) -> list[str]:
        """Return what to know before any rank, in sentences."""
        if not self.not_ranked:
            return []
        networks = ", ".join(f"{one.network} ({one.reason})" for one in self.not_ranked.values())
        told = [f"Not ranked, because the training losses differ: {networks}."]
        told.append("A network that does not fit the data can have small derivatives without being at a flat minimum.")
        if len(self.ranked) < 2:
            told.append("No two networks are left to rank.")
        return told

    @property
    def rounding(self) -> float:
        """Return the relative difference below which values tie: half the digits of the lowest precision.

        A volume loses that many digits in nearly singular Jacobians.
        """
        kinds = {str(report.about["dtype"]).removeprefix("torch.") for report in self.reports.values()}
        reduced = {str(report.about.get("arithmetic", "full")) for report in self.reports.values()} - {"full"}
        eps = [torch.finfo(getattr(torch, kind)).eps for kind in kinds] + [REDUCED_PRECISION[kind] for kind in reduced]
        return math.sqrt(max(eps))

    def estimates(self, measure: str) -> dict[str, Estimate]:
        """Return one measure's estimates by network."""
        return {name: report[measure] for name, report in self.reports.items()}

    def survives(self, measure: str) -> bool:
        """Return whether both rescalings of the weights leave the measure unchanged: it is about the function."""
        return self.measures[measure].invariant_under >= RESCALINGS

    def plot(self) -> Any:
        """Return an Altair chart (report.figures); a notebook shows it by itself."""
        return of_report("figures.picture")(self)

    def frame(self) -> pd.DataFrame:
        """Return the tidy table: one row per measure and network.

        `rank` is 1 for the smallest value, shared where it is tied or the 95% intervals overlap (`undecided_with` says
        with whom), NaN where undefined. `small_means` is "flat", "compressed" or, where no direction is known, empty.
        `invariant` holds the moves of the weights that leave the measure alone, as its card declares.
        """
        rows = []
        for name, one in self.measures.items():
            for model, e in self.estimates(name).items():
                place = self.places[name][model]
                rows.append((name, model, e.value, e.stderr, e.kind, place.rank, ", ".join(place.open),
                             direction(one.card), ", ".join(sorted(one.invariant_under)), e.note))  # fmt: skip
        return pd.DataFrame(rows, columns=_COLUMNS)

    def ranks(self) -> pd.DataFrame:
        """Return the ranks: one row per measure, one column per network."""
        found = {name: {model: place.rank for model, place in row.items()} for name, row in self.places.items()}
        return pd.DataFrame.from_dict(found, orient="index", columns=self.models, dtype=float)

    def networks(self) -> pd.DataFrame:
        """Return one row per network: loss, accuracy, mean ranks; with held-out data the gap and its standard error.

        The mean ranks are over the measures that `agreement` counts, and over those that survive both rescalings.
        """
        counted = self.agreement().counted
        ranks = self.ranks()
        rows: list[dict[str, Any]] = []
        for model, report in self.reports.items():
            row: dict[str, Any] = {"model": model}
            row |= {name: report[name].value for name in BESIDE if (name, None) in report}
            if ("generalisation_gap", None) in report:
                row["gap_stderr"] = report["generalisation_gap"].stderr
            row["mean_rank"] = ranks.loc[counted, model].mean()
            row["mean_rank_surviving"] = ranks.loc[[name for name in counted if self.survives(name)], model].mean()
            rows.append(row)
        return pd.DataFrame(rows)

    def agreement(self) -> Agreement:
        """Return how far the rankings agree with each other and, with held-out data, with the gap."""
        return self._agreement

    @cached_property
    def _agreement(self) -> Agreement:
        reports = {name: self.reports[name] for name in self.ranked}
        gaps = {name: r["generalisation_gap"] for name, r in reports.items() if ("generalisation_gap", None) in r}
        surviving = [name for name in self.measures if self.survives(name)]
        pointing = [name for name, one in self.measures.items() if direction(one.card)]
        estimates = {name: self._ranked_estimates(name) for name in self.measures}
        return agreement(estimates, pointing, surviving, gaps, self.rounding)

    @overload
    def __getitem__(self, key: str) -> dict[str, Estimate]: ...

    @overload
    def __getitem__(self, key: tuple[str, str]) -> Estimate: ...

    def __getitem__(self, key: str | tuple[str, str]) -> dict[str, Estimate] | Estimate:
        """Return a measure's estimates by network, or the estimate of (measure, network)."""
        measure, model = key if isinstance(key, tuple) and len(key) == 2 else (key, None)
        if measure not in self.measures and (present := present_measure(str(measure))) in self.measures:
            warn(f"comparison[{measure!r}]", "the measure", present)
            measure = present
        if measure not in self.measures:
            raise UnknownName.among("measure in this comparison", measure, self.measures)
        found = self.estimates(str(measure))
        if model is None:
            return found
        if model not in found:
            raise UnknownName.among("network in this comparison", model, found)
        return found[model]

    def __iter__(self) -> Iterator[str]:
        return iter(self.measures)

    def __len__(self) -> int:
        return len(self.measures)

    def _displayed(self) -> pd.DataFrame:
        return self.ranks()

    def _content(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        rows: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        for number, (name, report) in enumerate(self.reports.items()):
            rows[name], arrays = report._content()
            tensors |= {f"{number}/{key}": tensor for key, tensor in arrays.items()}
        measures: dict[str, Any] = {
            name: {
                "card": {**asdict(one.card), "invariant_under": sorted(one.card.invariant_under)},
                "options": one.options,
                "invariant_under": sorted(one.invariant_under),
            }
            for name, one in self.measures.items()
        }
        return {"reports": rows, "measures": measures, "notes": self.notes}, tensors

    @classmethod
    def _restored(cls, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        reports = {}
        for number, (name, rows) in enumerate(content["reports"].items()):
            start = f"{number}/"
            arrays = {key.removeprefix(start): tensor for key, tensor in tensors.items() if key.startswith(start)}
            reports[name] = Report._restored({**rows, "about": content["about"][name]}, arrays)
        measures = {
            present_measure(name): _from_plain(present_measure(name), row) for name, row in content["measures"].items()
        }
        return cls(reports, measures, tuple(content["notes"]))


def _from_plain(name: str, row: Mapping[str, Any]) -> Measure:
    # The measure that flatlens knows, or one without a function that has the card of the user's own
    card = Card(**{**row["card"], "invariant_under": frozenset(row["card"]["invariant_under"])})
    with suppress(BadInput):
        known = named(name)[0]
        if known.card == card:
            return known
    card = replace(card, invariant_under=frozenset(row["invariant_under"]))
    return Measure(card, _lost, tuple((option, value) for option, value in row["options"]))


def _lost(*_arguments: object, **_options: object) -> Estimate:
    raise BadInput("this measure comes from a saved comparison, which has its values and not its function")


SAME_LOSS = "they must be measured under one loss"


def require_alike(lenses: Mapping[str, Lens]) -> None:
    """Refuse networks that are not measured on the same task and data; name the first two that differ."""
    if not isinstance(lenses, Mapping) or not all(isinstance(lens, Lens) for lens in lenses.values()):
        such = 'such as compare({"a": Lens(...), "b": Lens(...)})'
        raise BadInput(f"compare(...): a dict of name -> Lens is needed, {such}")
    if len(lenses) < 2:
        raise BadInput(f"compare(...): at least two networks are needed, got {len(lenses)}")
    for (a, first), (b, second) in combinations(lenses.items(), 2):
        if first.problem.model is second.problem.model:
            raise BadInput(
                f"compare(...): {a} and {b} use the same model object: make one model for each checkpoint "
                f"(copy.deepcopy, or load the weights into a new one)"
            )
    (a, first), *others = lenses.items()
    for b, lens in others:
        for (what, mine, advice), (_, theirs, _) in zip(_facts(first.problem), _facts(lens.problem), strict=True):
            if mine != theirs:
                raise BadInput(f"compare(...): {what} of {a}: {mine}, of {b}: {theirs}; {advice}")
    _require_same_data(lenses)
    _require_same_loss(lenses)


def _facts(problem: Problem) -> list[tuple[str, object, str]]:
    # What must be equal, its value, and the advice if it is not
    ghost = "eval" if problem.ghost_batch is None else f"train, ghost_batch={problem.ghost_batch}"
    held_out = "none" if problem.test is None else "given"
    return [
        ("loss", problem.loss.description, SAME_LOSS),
        ("samples", problem.n, "they must be measured on the same data"),
        ("outputs", problem.outputs, "they must answer the same task"),
        ("held-out data", held_out, "give the same test data to all, or to none"),
        ("batchnorm", ghost, "give all the same batchnorm and ghost_batch"),
    ]


def _require_same_data(lenses: Mapping[str, Lens]) -> None:
    # The same bytes in the same order; a shared data object is read once
    for which, name in (("data", "data"), ("test", "held-out data")):
        (a, first), *others = ((model, getattr(lens.problem, which)) for model, lens in lenses.items())
        print_of_first: int | None = None
        for b, data in others:
            if data is first:
                continue
            print_of_first = _print(first) if print_of_first is None else print_of_first
            if _print(data) != print_of_first:
                raise BadInput(f"compare(...): the {name} of {a} and {b} differ: give all the same, in the same order")


def _require_same_loss(lenses: Mapping[str, Lens]) -> None:
    # The same losses of the first network's outputs: a description does not tell two functions apart
    (a, first), *others = lenses.items()
    problem = first.problem
    with problem.measuring(first.model), torch.no_grad():
        f, y = problem.run(first.model, problem.place(problem.probes[0]))
        f = f.to(torch.float64)
        mine = problem.loss.values(f, y)
        for b, lens in others:
            theirs = lens.problem.loss.values(f, y)
            if not torch.allclose(mine, theirs, rtol=1e-6, atol=1e-12, equal_nan=True):
                at = int((mine - theirs).abs().argmax())
                raise BadInput(
                    f"compare(...): the losses of {a} and {b} differ: {float(mine[at]):.6g} and "
                    f"{float(theirs[at]):.6g} for the same outputs of a sample; {SAME_LOSS}"
                )


def _print(data: Data) -> int:
    found = 0
    for batch in data.chunks(FORWARD_CHUNK):
        for leaf in tree_leaves(batch):
            found = checksum(leaf, found) if isinstance(leaf, Tensor) else found
    return found


def remarks(lenses: Mapping[str, Lens]) -> tuple[str, ...]:
    """Return the allowed differences, one sentence each."""
    told = []
    sizes = {name: sum(p.numel() for p in lens.problem.model.parameters()) for name, lens in lenses.items()}
    shapes = [[(name, p.shape) for name, p in lens.problem.model.named_parameters()] for lens in lenses.values()]
    if any(shape != shapes[0] for shape in shapes):
        each = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
        told.append(
            f"The networks differ in architecture (parameters: {each}): measures that sum over parameters or layers, "
            f"or use units of a layer's features, also depend on the architecture itself."
        )
    for what, values in {
        "precision": {name: str(lens.problem.dtype).removeprefix("torch.") for name, lens in lenses.items()},
        "combinations of outputs": {name: str(lens.probes or "all") for name, lens in lenses.items()},
    }.items():
        if len(set(values.values())) > 1:
            told.append(f"They differ in {what}: {', '.join(f'{name} {value}' for name, value in values.items())}.")
    if len({tuple(sorted(lens.problem.parameters)) for lens in lenses.values()}) > 1 and not told:
        told.append("They differ in which parameters are measured.")
    return tuple(told)


def compare(
    lenses: Mapping[str, Lens],
    measures: Choice = None,
    *,
    anyway: bool = False,
    generator: torch.Generator | None = None,
    progress: Shown = None,
) -> Comparison:
    """Rank networks by each measure; 1 is the smallest value.

    All must be measured under the same loss on the same data, and all or none have held-out data. Every network sees
    the same random draws, so that what they share does not tell them apart.

    >>> import torch, flatlens as fl
    >>> nets = {"a": torch.nn.Linear(3, 2), "b": torch.nn.Linear(3, 2)}
    >>> data = (torch.ones(4, 3), torch.zeros(4, 2))
    >>> comparison = compare({name: fl.Lens(fl.Problem(net, "mse", data)) for name, net in nets.items()}, "mls")
    >>> comparison["mls", "a"].kind
    'exact'

    Args:
        lenses: The networks by the names to show.
        measures: Names or Measure objects; one alone is enough; or a preset of `measure`. None is "summary".
        anyway: Whether to do work that `measure` refuses because it takes long.
        generator: Draws the random numbers; seeded with 0 if None.
        progress: Called with (what, done, total); None shows a bar after two seconds, False shows none.

    Raises:
        BadInput: fewer than two networks, two names of one model object, or losses or data that differ.
    """
    require_alike(lenses)
    draws = drawing(generator, progress, "compare")
    asked = asked_for(measures)
    if all(one.card.family == RISK_FAMILY for one in asked.measures):
        names = ", ".join(one.key for one in asked.measures) or "none"
        mend = "name at least one other measure; loss, accuracy and gap are always shown"
        raise BadInput(f"{names} gives nothing to rank by", argument="measures", remedy=mend, call="compare")
    # Every network is measured with the same random draws
    seed = 0 if generator is None else int(torch.randint(2**40, (), generator=draws))
    reports = {}
    with shown(progress) as line:
        for done, (name, lens) in enumerate(lenses.items()):
            line("networks", done, len(lenses))
            together = asked.preset if asked.preset in PRESETS else [*asked.measures, *_beside(asked.measures, lens)]
            draw = torch.Generator().manual_seed(seed)
            reports[name] = measure(lens, together, anyway=anyway, generator=draw, progress=line)
        line("networks", len(lenses), len(lenses))
    # Ranked is what the networks have a number for, except the risk
    known = {row: one for row, one in asked.answers.items() if one.card.family != RISK_FAMILY}
    ranked = {row: one for row, one in known.items() if all((row, None) in report for report in reports.values())}
    return Comparison(reports, ranked, remarks(lenses))


def _beside(chosen: Iterable[Measure], lens: Lens) -> list[Measure]:
    # The risk and, with held-out data, the gap, which are always shown
    keys = {one.key for one in chosen}
    risk = [one for one in MEASURES.values() if one.card.family == RISK_FAMILY]
    return [one for one in risk if one.key not in keys and (lens.problem.test is not None or not one.held_out)]
