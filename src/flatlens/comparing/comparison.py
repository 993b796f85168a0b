"""What a comparison found, as tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd
import torch

from flatlens.comparing.agreement import Agreement, agreement
from flatlens.comparing.direction import direction
from flatlens.comparing.ranking import Place, places
from flatlens.estimate import Estimate, Report
from flatlens.measures import LAYERWISE, NEURONWISE, Measure
from flatlens.problem.checks import REDUCED_PRECISION

COLUMNS = ["measure", "model", "value", "stderr", "kind", "rank", "undecided_with", "small_means", "invariant", "note"]
BESIDE = ("loss", "accuracy", "test_loss", "test_accuracy", "generalisation_gap")
RESCALINGS = frozenset({LAYERWISE, NEURONWISE})


@dataclass(frozen=True, eq=False)  # eq would compare reports
class Comparison:
    """Networks ranked by each measure."""

    reports: Mapping[str, Report]  #: by network, with layers, parts and samples
    measures: Mapping[str, Measure]  #: the ranked ones, by the name of their row
    notes: tuple[str, ...] = ()  #: what differs between the networks beside their weights

    @property
    def models(self) -> list[str]:
        """The networks' names, in the order given."""
        return list(self.reports)

    @cached_property
    def places(self) -> dict[str, dict[str, Place]]:
        """By measure and network, the rank and whom it cannot be told from."""
        return {name: places(self.estimates(name), self.rounding) for name in self.measures}

    @property
    def rounding(self) -> float:
        """Values closer than this, relatively, tie: half the digits of the coarsest network's precision (a volume loses
        as many in nearly singular Jacobians)."""
        kinds = {str(report.about["dtype"]).removeprefix("torch.") for report in self.reports.values()}
        coarse = {str(report.about.get("arithmetic", "full")) for report in self.reports.values()} - {"full"}
        eps = [torch.finfo(getattr(torch, kind)).eps for kind in kinds] + [REDUCED_PRECISION[kind] for kind in coarse]
        return math.sqrt(max(eps))

    def estimates(self, measure: str) -> dict[str, Estimate]:
        """One measure's estimates by network."""
        return {name: report[measure] for name, report in self.reports.items()}

    def survives(self, measure: str) -> bool:
        """Whether both rescalings of the weights leave it alone, so that it speaks of the function."""
        return self.measures[measure].invariant_under >= RESCALINGS

    def frame(self) -> pd.DataFrame:
        """Tidy: a row a measure and network.

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
        return pd.DataFrame(rows, columns=COLUMNS)

    def ranks(self) -> pd.DataFrame:
        """The ranks, a row a measure and a column a network."""
        found = {name: {model: place.rank for model, place in row.items()} for name, row in self.places.items()}
        return pd.DataFrame.from_dict(found, orient="index", columns=self.models, dtype=float)

    def networks(self) -> pd.DataFrame:
        """A row a network: loss, accuracy, with held-out data the gap and its standard error; and its mean rank over
        the measures that `agreement` counts, and over those of them that survive both rescalings."""
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
        """How far the rankings agree with each other, and with held-out data with the gap."""
        return self._agreement

    @cached_property
    def _agreement(self) -> Agreement:
        gaps = {name: r["generalisation_gap"] for name, r in self.reports.items() if ("generalisation_gap", None) in r}
        surviving = [name for name in self.measures if self.survives(name)]
        pointing = [name for name, one in self.measures.items() if direction(one.card)]
        estimates = {name: self.estimates(name) for name in self.measures}
        return agreement(estimates, pointing, surviving, gaps, self.rounding)

    def __repr__(self) -> str:
        return self.ranks().to_string(max_rows=60)
