"""What all trials of a network agree on: where samples lie, and through which operations a parameter acts."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn

from flatlens.grams.made import lookups_of
from flatlens.grams.record import made_reads
from flatlens.grams.rows import Rows
from flatlens.grams.structure import Structure
from flatlens.grams.trial import Trial
from flatlens.operations.reads import Read
from flatlens.problem import Problem


class AgreedFacts:
    """The facts on which all trials agree, less those of places that are distrusted."""

    def __init__(
        self,
        problem: Problem,
        model: nn.Module,
        trials: list[Trial],
        structure: Structure,
        distrusted: Collection[str],
    ) -> None:
        self.problem, self.model = problem, model
        self.trials, self.first, self.structure = trials, trials[0], structure
        self.distrusted = distrusted
        self.parameters = {name: p for name, p in model.named_parameters() if name in self.first.tape.reads}
        places = [name for name in self.first.rows if not name.startswith("input:") and name not in distrusted]
        found = {name: self._rows(name) for name in places}
        self.rows = {name: rows for name, rows in found.items() if rows is not None}
        self.axes, self.unplaced = self._axes()

    def _rows(self, name: str) -> Rows | None:
        """Return the first arrangement of a place's samples that is possible in every trial that has the place.

        None if there is none, or if a sample has several rows at a call and nothing tells which.
        """
        there = [trial for trial in self.trials if name in trial.rows]
        possible = [rows for rows in there[0].rows[name] if all(rows in trial.rows[name] for trial in there)]
        unclear = any(trial.unclear(name, possible) for trial in there)
        return possible[0] if possible and not unclear else None

    def _axes(self) -> tuple[dict[str, int], dict[str, str]]:
        """Return the axis of samples in each call's input, and for the other calls the reason why there is none."""
        axes: dict[str, int] = {}
        unplaced: dict[str, str] = {}
        for key in (*self.structure.calls, *sorted(self.structure.varying_calls)):
            rows = self.rows.get(f"x:{key}")
            if key in self.structure.varying_calls:
                unplaced[key] = "the layer is not called in the same way on every batch"
            elif rows is None or rows.order != "outer":
                unplaced[key] = "its calls do not have the samples of a batch separately along one axis"
            else:
                axes[key] = rows.axis
        return axes, unplaced

    def acts_through(self, parameter: str) -> tuple[str, ...] | None:
        """Return the operations through which a parameter acts; None if one is unknown or has no known samples."""
        if self.structure.reads[parameter] is None:
            return None
        return self._known(self.first.tape.reads[parameter] or ())

    def acts_through_made(self, parameter: str) -> tuple[str, ...] | None:
        """Return the operations that read the tensors made from a parameter; None if one has no known samples."""
        if parameter not in self.structure.made:
            return None
        return self._known(made_reads(self.first.tape, parameter)) or None

    def _known(self, reads: Iterable[Read]) -> tuple[str, ...] | None:
        """Return the names of operations; None if one has no known samples."""
        operations = tuple(self.first.names[read.node] for read in reads)
        return operations if all(operation in self.rows for operation in operations) else None

    def made_entries(self, parameter: str) -> int:
        """Return the entries of a sample's derivatives in a parameter and in the tensors made from it."""
        lookups = lookups_of(self.first.tape, parameter)
        own = sum(lookup.shape.numel() for lookup in lookups) or self.parameters[parameter].numel()
        return own + sum(made.shape.numel() for made in self.first.tape.made[parameter] or ())
