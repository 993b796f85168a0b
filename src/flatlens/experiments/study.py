"""Run a study into a folder, and read it back."""

from __future__ import annotations

import os
from pathlib import Path

from flatlens.estimate import Progress
from flatlens.experiments.result import StudyResult
from flatlens.experiments.settings import Quantity, Study

__all__ = ["Quantity", "Study", "StudyResult", "load_study", "run_study"]


def run_study(
    study: Study,
    out: str | os.PathLike[str],
    *,
    workers: int = 2,
    progress: Progress | None = None,
    mixed: bool = False,
) -> StudyResult:
    """Train and measure every network of the study that `out` does not hold yet, then relate them all.

    Killed and called again it carries on, and ends in the same digits. Beside the networks' folders it leaves
    table.csv and relations.csv in `out`.

    Raises:
        BadFolder: `out` holds another study or other files, cannot be written, or was begun with other versions (which
            `mixed` allows).
    """
    raise NotImplementedError(Path(out))


def load_study(out: str | os.PathLike[str]) -> StudyResult:
    """The result of a study from its folders alone, complete or not.

    Raises:
        BadFolder: `out` holds no study, or no finished network.
    """
    raise NotImplementedError(Path(out))
