"""Networks measured in the same way, ranked by each measure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Self, overload

import pandas as pd
import torch
from torch import Tensor

from flatlens.comparing.answers import NO_MEASURE, answer_of, first_of, of_coefficient
from flatlens.comparing.fit import NotRanked, not_ranked
from flatlens.comparing.rankings import ALL_EQUAL, Agreement, Place, agreement, all_equal, not_counted, places
from flatlens.deprecated_names import present_measure, warn
from flatlens.errors import BadInput, UnknownName
from flatlens.estimate import Estimate, Report
from flatlens.measures import FUNCTION, Card, Measure, named
from flatlens.measures.definition import RESCALINGS
from flatlens.problem.forward import REDUCED_PRECISION
from flatlens.result import Result, of_report
from flatlens.training.settings import RESULTS

SMALL = {
    **dict.fromkeys(("sharpness", "flatness", "normalised", "hessian", "perturbation"), "flat"),
    **dict.fromkeys(("sensitivity", "compression"), "compressed"),
}
"""The meaning of a small value, by family. For norms and the sample's own properties there is none."""
NEITHER = frozenset({"interpolation_gap", "gradient_noise_scale"})  # a difference of traces; no curvature


def direction(card: Card) -> str:
    """Return the meaning of a small value, "flat" or "compressed"; "" if not known.

    >>> from flatlens.measures import MEASURES
    >>> [direction(MEASURES[name].card) for name in ("ggn_trace", "mls", "weight_norm")]
    ['flat', 'compressed', '']
    """
    return "" if card.name in NEITHER else SMALL.get(card.family, "")


COEFFICIENT = "local_learning_coefficient"  #: asked for by name, it is the first sentence of the answer

_COLUMNS = ["measure", "model", "value", "stderr", "kind", "rank", "undecided_with", "small_means", "invariant", "note"]
DIFFERENT = "differ in architecture"  #: in the note that says so


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
    same_architecture: bool = True

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
        found = {name: places(row, self.rounding) for name, row in self._ranked_estimates.items()}
        return {name: {model: of.get(model, Place(math.nan)) for model in self.reports} for name, of in found.items()}

    @cached_property
    def _ranked_estimates(self) -> dict[str, dict[str, Estimate]]:
        ranked = self.ranked
        return {measure: {name: self.reports[name][measure] for name in ranked} for measure in self.measures}

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
        """The answer in at most three sentences: the best network by held-out loss, the flattest, how certain."""
        if all_equal(self._ranked_estimates, self.rounding):
            return list(ALL_EQUAL)
        found = answer_of(self.reports, self.not_ranked, self._smallest("flat"), self._smallest("compressed"))
        coefficient = next((row for row, one in self.measures.items() if one.card.name == COEFFICIENT), None)
        if coefficient is None:
            return found
        flatness = found if len(self.measures) > 1 else [one for one in found if one != NO_MEASURE]
        return [of_coefficient(self.reports, self.ranked, coefficient), *flatness][:3]

    def _smallest(self, meaning: str) -> dict[str, str | None]:
        """Return the network with the smallest value by each invariant measure of a meaning; None where it is open."""
        pointing = [name for name, one in self.measures.items() if direction(one.card) == meaning]
        ignored = not_counted(self._ranked_estimates, pointing, self.rounding)
        names = [name for name in pointing if name not in ignored and self.invariant(name)]
        return {name: first_of(self.places[name]) for name in names}

    def invariant(self, measure: str) -> bool:
        """Return whether a measure is invariant to what differs: the weights' scales, or the architecture, too."""
        return self.measures[measure].invariant_under >= (RESCALINGS if self.same_architecture else FUNCTION)

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

    def is_invariant(self, measure: str) -> bool:
        """Return whether both rescalings of the weights leave the measure unchanged: it is about the function."""
        return self.measures[measure].invariant_under >= RESCALINGS

    def survives(self, measure: str) -> bool:
        """Deprecated name of `is_invariant`."""
        warn("a method of Comparison", "survives", "is_invariant")
        return self.is_invariant(measure)

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
        """Return one row per network: loss, accuracy, mean ranks; the test loss and the gap with standard errors.

        The mean ranks are over the measures that `agreement` counts, and over those invariant under both rescalings.
        """
        counted = self.agreement().counted
        ranks = self.ranks()
        rows: list[dict[str, Any]] = []
        for model, report in self.reports.items():
            row: dict[str, Any] = {"model": model}
            row |= {name: report[name].value for name in RESULTS if (name, None) in report}
            for name, stderr in (("generalisation_gap", "gap_stderr"), ("test_loss", "test_loss_stderr")):
                row |= {stderr: report[name].stderr} if (name, None) in report else {}
            row["mean_rank"] = ranks.loc[counted, model].mean()
            row["mean_rank_surviving"] = ranks.loc[[name for name in counted if self.is_invariant(name)], model].mean()
            rows.append(row)
        return pd.DataFrame(rows)

    def agreement(self) -> Agreement:
        """Return how far the rankings agree with each other and, with held-out data, with the gap."""
        return self._agreement

    @cached_property
    def _agreement(self) -> Agreement:
        reports = {name: self.reports[name] for name in self.ranked}
        gaps = {name: r["generalisation_gap"] for name, r in reports.items() if ("generalisation_gap", None) in r}
        surviving = [name for name in self.measures if self.is_invariant(name)]
        pointing = [name for name, one in self.measures.items() if direction(one.card)]
        return agreement(self._ranked_estimates, pointing, surviving, gaps, self.rounding)

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
            raise UnknownName.among("measure", measure, self.measures, where="in this comparison")
        found = self.estimates(str(measure))
        if model is None:
            return found
        if model not in found:
            raise UnknownName.among("network", model, found, where="in this comparison")
        return found[model]

    def __iter__(self) -> Iterator[str]:
        return iter(self.measures)

    def __len__(self) -> int:
        return len(self.measures)

    _displayed = ranks

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
        content = {"reports": rows, "measures": measures, "notes": self.notes}
        return {**content, "same_architecture": self.same_architecture}, tensors

    @classmethod
    def _restored(cls, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        reports = {}
        for number, (name, rows) in enumerate(content["reports"].items()):
            start = f"{number}/"
            arrays = {key.removeprefix(start): tensor for key, tensor in tensors.items() if key.startswith(start)}
            reports[name] = Report._restored({**rows, "about": content["about"][name]}, arrays)
        measures = {}
        for former, row in content["measures"].items():
            # the measure that flatlens knows, or one without a function that has the card of the user's own
            name = present_measure(former)
            card = Card(**{**row["card"], "invariant_under": frozenset(row["card"]["invariant_under"])})
            own = replace(card, invariant_under=frozenset(row["invariant_under"]))
            measures[name] = Measure(own, _lost, tuple((option, value) for option, value in row["options"]))
            with suppress(BadInput):
                measures[name] = known if (known := named(name)[0]).card == card else measures[name]
        notes = tuple(content["notes"])
        of_notes = not any(DIFFERENT in note for note in notes)  # schema 1 has only notes
        return cls(reports, measures, notes, content.get("same_architecture", of_notes))


def _lost(*_arguments: object, **_options: object) -> Estimate:
    raise BadInput("this measure comes from a saved comparison, which has its values and not its function")
