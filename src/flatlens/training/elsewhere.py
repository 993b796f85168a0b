"""A training that another program did: its weights file, and what is known about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flatlens.plain import Options
from flatlens.training.losses import LossName, TrainingLoss

RESULTS = ("loss", "accuracy", "test_loss", "test_accuracy", "generalisation_gap")
"""Facts about a network that are results, not settings."""


@dataclass(frozen=True)
class TrainedElsewhere:
    """The settings of a network that was trained elsewhere: a checkpoint, and the facts beside it.

    `known` has any facts by name: settings such as "lr" and "batch_size", and results such as "generalisation_gap",
    which take the place of those measured.
    """

    weights: str  #: the file, with its whole path
    contents: str  #: hash of the file
    loss: LossName = "cross_entropy"
    known: Mapping[str, Any] = Options()
    seed: int | None = None  #: of the training, where it is known

    def __post_init__(self) -> None:
        object.__setattr__(self, "known", Options(self.known))
        TrainingLoss(self.loss)

    @property
    def objective(self) -> TrainingLoss:
        """The loss under which the network is measured."""
        return TrainingLoss(self.loss)

    def steps(self, samples: int) -> int:
        """Return the number of steps that it takes here: none."""
        return 0

    @property
    def settings(self) -> dict[str, Any]:
        """Return all that is known but the results."""
        return {name: value for name, value in self.known.items() if name not in RESULTS}

    @property
    def results(self) -> dict[str, Any]:
        """Return the known results."""
        return {name: value for name, value in self.known.items() if name in RESULTS}
