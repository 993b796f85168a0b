"""Groups of networks, such as SGD and SAM: differences of each measure, with intervals over networks or pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import pandas as pd
from torch import Tensor

from flatlens.comparing.answers import group_answer, untrained
from flatlens.comparing.comparison import Comparison, direction
from flatlens.comparing.fit import NotRanked, as_row, no_fit, worse_fit
from flatlens.comparing.rankings import proportional
from flatlens.errors import UnknownName
from flatlens.result import Result, of_report
from flatlens.statistics import GroupDifference, group_differences
from flatlens.statistics.group_differences import as_frame
from flatlens.statistics.statistic import Array
from flatlens.training.settings import RESULTS, SHARES


@dataclass(frozen=True, eq=False, repr=False)  # == would compare reports
class GroupComparison(Result):
    """Groups of networks compared with the first one: `groups["mls"]` has a difference for each other group.

    A ratio of geometric means where all values are positive, else a difference of means. With pairs (the same seed in
    each group) the 95% interval is Student's over pairs, else Welch's over networks. Holm's correction is over the
    measures that decide: they are invariant to what differs between the networks, and a direction is known. The
    held-out loss is among them. The other measures are corrected on their own, and the answer does not use them.

    A network that does not fit the data as well as its group (the one of median training loss), by the rule for single
    networks, is left out, with its pair.

    >>> import torch, flatlens as fl
    >>> data = (torch.ones(4, 3), torch.zeros(4, 2))
    >>> def nets(): return [fl.Lens(fl.Problem(torch.nn.Linear(3, 2), "mse", data)) for _ in range(3)]
    >>> fl.compare(measures="mls", groups={"a": nets(), "b": nets()})["mls"][0].scale
    'ratio'
    """

    _KIND = "group comparison"

    networks: Comparison  #: of all networks, by name
    groups: Mapping[str, Sequence[str]]  #: names of the networks of each group; the first group is the reference
    paired: bool = False  #: whether the networks at the same place of each group are a pair

    @cached_property
    def about(self) -> dict[str, Any]:  # type: ignore[override]  # it cannot be set
        """The facts of each network's measurement, by network."""
        return self.networks.about

    @cached_property
    def not_ranked(self) -> dict[str, NotRanked]:
        """Networks that are left out because they fit the data worse than their group, with the reason."""
        reports = {name: report for name, report in self.networks.reports.items() if ("loss", None) in report}
        reasons = no_fit(reports)
        for names in self.groups.values():
            known = [name for name in names if name in reports and name not in reasons]
            fit = sorted(known, key=lambda name: reports[name]["loss"].value)
            if fit:
                median = fit[(len(fit) - 1) // 2]
                reasons |= {name: worse_fit(reports[name], reports[median], median) for name in fit}
        return {name: as_row(name, reports[name], why) for name, why in reasons.items() if why}

    @cached_property
    def deciding(self) -> list[str]:
        """Invariant measures with a known direction, each one once, and the held-out loss."""
        measures = self.networks.measures
        names = [name for name in measures if self.networks.invariant(name) and direction(measures[name].card)]
        kept: list[str] = []
        for name in names:
            values = self._column(name)
            if not any(proportional(values, self._column(other), self.networks.rounding) for other in kept):
                kept.append(name)
        return [*kept, *(["test_loss"] if np.isfinite(self._column("test_loss")).any() else [])]

    @cached_property
    def differences(self) -> list[GroupDifference]:
        """Differences of each measure between each group and the first, those that decide first."""
        fit = [name for name in RESULTS if np.isfinite(self._column(name)).any()]
        names = list(dict.fromkeys([*self.deciding, *self.networks.measures, *fit]))
        logarithms = [name for name, one in self.networks.measures.items() if one.card.unit == "log"]
        places = [place for of in self.groups.values() for place in range(len(of))]
        return group_differences(
            {name: self._column(name) for name in names},
            [group for group, of in self.groups.items() for _ in of],
            places if self.paired else None,
            first=self.deciding,
            untested=[name for name in fit if name not in self.deciding],
            linear=[*SHARES, *logarithms],
        )

    def _column(self, name: str) -> Array:
        # One number per network, group after group; NaN where a network is left out
        reports = [(network, self.networks.reports[network]) for of in self.groups.values() for network in of]
        return np.array([
            report[name].value if (name, None) in report and network not in self.not_ranked else np.nan
            for network, report in reports
        ])  # fmt: skip

    def __getitem__(self, measure: str) -> list[GroupDifference]:
        """Differences of one measure, by group."""
        found = [one for one in self.differences if one.name == measure]
        if not found:
            known = {one.name for one in self.differences}
            raise UnknownName.among("measure", measure, known, where="in this comparison")
        return found

    def plot(self) -> Any:
        """An Altair chart of the ratios with their intervals; a notebook shows it by itself."""
        return of_report("figures.picture")(self)

    def frame(self) -> pd.DataFrame:
        """Tidy table: one row per measure and group.

        `value` is the ratio (group / reference) or the difference (group - reference), as `scale` says, with its 95%
        interval. `p_holm` is corrected within the rows that decide, and within the others. `small_means` is "flat",
        "compressed" or empty.
        """
        table = as_frame(self.differences).rename(columns={"name": "measure"})
        cards = {name: one.card for name, one in self.networks.measures.items()}
        table["decides"] = table["measure"].isin(self.deciding)
        table["small_means"] = [direction(cards[name]) if name in cards else "" for name in table["measure"]]
        return table

    @cached_property
    def answer(self) -> list[str]:
        """The answer in at most three sentences: the flatter group, the less sensitive one, how certain, what next."""
        cards = {name: self.networks.measures[name].card for name in self.deciding if name in self.networks.measures}
        meanings = {name: (direction(card), card.family) for name, card in cards.items()}
        left_out = list(self.not_ranked.values())
        return group_answer(self.differences, meanings, left_out, untrained(self.networks.reports), paired=self.paired)

    def _displayed(self) -> pd.DataFrame:
        return self.frame()[["measure", "group", "value", "low", "high", "scale", "p_holm", "n"]]

    def _content(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        content, tensors = self.networks._content()
        groups = {name: list(of) for name, of in self.groups.items()}
        return {**content, "groups": groups, "paired": self.paired}, tensors

    @classmethod
    def _restored(cls, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        return cls(Comparison._restored(content, tensors), content["groups"], content["paired"])
