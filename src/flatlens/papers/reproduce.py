"""Run an experiment into a folder, test its predictions, and read it back."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any, Unpack

from flatlens.errors import BadFolder, BadInput, UnknownName
from flatlens.estimate import Progress
from flatlens.experiments.folders import refuse_foreign
from flatlens.experiments.settings import Study
from flatlens.experiments.store import Store
from flatlens.experiments.study import RunOptions, load_study, run_study
from flatlens.files import write_whole
from flatlens.papers import EXPERIMENTS
from flatlens.papers.experiment import SCALES, Experiment, Plot, Scale
from flatlens.papers.halves import halves
from flatlens.papers.predictions import Conclusion, Outcome, Results, counted, replicated
from flatlens.papers.rerun import rerun

MARK = "experiment.json"
AGAIN = "again"
"""Name of the folder, inside an experiment's, of the re-run with other seeds and sizes."""
RERUN = f"{AGAIN}/"
"""Beginning of the names of its studies."""


@dataclass(frozen=True, eq=False)  # eq would compare tables
class Reproduction:
    """The results of an experiment."""

    experiment: Experiment
    scale: Scale
    results: Results
    outcomes: tuple[Outcome, ...]
    plots: tuple[Plot, ...]
    again: tuple[Outcome, ...] = ()  #: those of the re-run, one per prediction; empty if not run
    halves: tuple[tuple[Outcome, Outcome], ...] = ()
    """Those of both halves of the units, one pair per prediction; at desk scale, which has no re-run."""
    second: Results = field(default_factory=dict)  #: the studies of the re-run; empty if not run

    def claims(self) -> list[dict[str, Any]]:
        """Return every claim with its outcome and that of its replication, as plain values."""
        return [
            outcome.as_json()
            | {"decided": replicated(outcome, again, pair or ())}
            | ({"again": again.as_json()} if again else {})
            | ({"halves": [half.as_json() for half in pair]} if pair else {})
            for outcome, again, pair in zip_longest(self.outcomes, self.again, self.halves)
        ]

    @property
    def networks(self) -> int:
        """Number of networks in all studies."""
        return sum(len(result.networks) for result in self.results.values())

    @property
    def hours(self) -> float:
        """Hours that all networks took on two processors; 0 where they are not known."""
        return sum(result.seconds for result in self.results.values()) / 3600 / 2

    @property
    def counts(self) -> dict[Conclusion, int]:
        """Number of predictions with each conclusion."""
        return counted(self.outcomes)

    @property
    def unfinished(self) -> int:
        """Networks that have neither finished nor failed."""
        return sum(result.unfinished for result in self.results.values())


def experiment_of(name: str) -> Experiment:
    """Return the experiment of a row of the catalogue.

    Raises:
        UnknownName: there is no such experiment.
    """
    if name.upper() not in EXPERIMENTS:
        raise UnknownName.among("experiment", name, EXPERIMENTS)
    return EXPERIMENTS[name.upper()]


def reproduce(
    name: str,
    out: str | os.PathLike[str],
    *,
    scale: Scale = "laptop",
    again: bool = False,
    known: Results = MappingProxyType({}),
    progress: Progress | None = None,
    **options: Unpack[RunOptions],
) -> Reproduction:
    """Run every study of an experiment into `out/<study>`, and test its predictions.

    A second call continues after an interruption. Writes claims.json into `out`.

    Args:
        name: the catalogue's row, "X4".
        out: a new or empty folder, or one where this experiment was begun.
        scale: "smoke", "laptop", "desk" or "paper".
        again: run all studies a second time with other seeds and 1.5 times as many samples, into `out/again`: a
            claim is decided where the two runs agree.
        known: studies of an earlier run by name, as of `read_studies`: their networks are not trained again.
        progress: as for `run_study`.
        options: the other options of `run_study`.

    Raises:
        BadInput: an unknown scale; UnknownName: an unknown experiment.
        BadFolder: as `run_study`, or `out` holds another experiment.
    """
    experiment, out = experiment_of(name), Path(out)
    if scale not in SCALES:
        raise UnknownName.among("scale", scale, SCALES)
    studies = experiment.studies(scale)
    _mark(out, experiment, scale)

    def run(studies: Mapping[str, Study]) -> Results:
        return {
            name: run_study(one, out / name, known=known.get(name), progress=progress, **options)
            for name, one in studies.items()
        }

    results = run(studies)
    if again:
        run({f"{RERUN}{study}": rerun(settings) for study, settings in studies.items()})
    return _written(out, concluded(experiment, scale, results, _of_rerun(out, results)))


def load_reproduction(out: str | os.PathLike[str]) -> Reproduction:
    """Return an experiment from its folders alone, complete or not; write claims.json again.

    Raises:
        BadFolder: `out` holds no experiment, or no network of one of its studies is finished.
    """
    out = Path(out)
    experiment, scale = _marked(out)
    results = {study: load_study(out / study) for study in experiment.studies(scale)}
    return _written(out, concluded(experiment, scale, results, _of_rerun(out, results)))


def _weighed(experiment: Experiment, results: Results) -> tuple[Outcome, ...]:
    """Return the outcome of each prediction."""
    return tuple(prediction.weigh(results) for prediction in experiment.predictions)


def concluded(experiment: Experiment, scale: Scale, results: Results, second: Results) -> Reproduction:
    """Return the reproduction with these studies, and those of its re-run: weigh each prediction, draw each figure."""
    outcomes, again = _weighed(experiment, results), _weighed(experiment, second) if second else ()
    pairs = _of_halves(experiment, results) if scale == "desk" else ()
    return Reproduction(experiment, scale, results, outcomes, tuple(experiment.plots(results)), again, pairs, second)


def _written(out: Path, found: Reproduction) -> Reproduction:
    """Write claims.json; return the reproduction."""
    write_whole(out / "claims.json", json.dumps(found.claims(), indent=1) + "\n")
    return found


def _of_rerun(out: Path, results: Results) -> Results:
    """Return the studies of the re-run; none, unless all are complete."""
    folders = {study: out / AGAIN / study for study in results}
    if not all(map(_over, folders.values())):
        return {}
    return {study: load_study(folder) for study, folder in folders.items()}


def _over(folder: Path) -> bool:
    """Return whether the folder holds a study of which no network is left to run, and one at least has finished."""
    if not (folder / "study.json").is_file():
        return False
    store = Store.open(folder)
    keys = [settings.key for settings in store.study().networks()]
    finished = store.finished(keys)
    return 0 < len(finished) == len(keys) - len(store.failed(keys))


def _of_halves(experiment: Experiment, results: Results) -> tuple[tuple[Outcome, Outcome], ...]:
    """Return the outcomes of both halves of the units, one pair per prediction."""
    one, other = (_weighed(experiment, half) for half in halves(results))
    return tuple(zip(one, other, strict=True))


def is_reproduction(out: Path) -> bool:
    """Return whether the folder holds an experiment."""
    return (out / MARK).is_file()


def _mark(out: Path, experiment: Experiment, scale: Scale) -> None:
    """Write into the folder which experiment it holds; two processes may do so at the same time."""
    if not is_reproduction(out):
        refuse_foreign(out, MARK, (), "experiment")
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / MARK, json.dumps({"experiment": experiment.id, "scale": scale}) + "\n")
    there, at = _marked(out)
    if (there.id, at) != (experiment.id, scale):
        raise BadFolder(f"the output folder {str(out)!r} already holds {there.id} at {at} scale: name another --out")


def _marked(out: Path) -> tuple[Experiment, Scale]:
    if not is_reproduction(out):
        raise BadFolder(f"{str(out)!r} holds no experiment (no {MARK} in it): name the folder given as --out")
    try:
        return from_mark(json.loads((out / MARK).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, BadInput) as error:
        raise BadFolder(f"{str(out / MARK)!r} cannot be read ({error}): name another --out") from error


def from_mark(plain: Mapping[str, Any]) -> tuple[Experiment, Scale]:
    """Return the experiment and the scale that an experiment.json names.

    Raises:
        BadInput: an unknown one; KeyError: one is missing.
    """
    experiment, scale = experiment_of(plain["experiment"]), plain["scale"]
    if scale not in SCALES:
        raise UnknownName.among("scale", str(scale), SCALES)
    return experiment, scale


def selected(names: Sequence[str]) -> list[Experiment]:
    """Return the experiments of these names, each once; all experiments where one of the names is "all"."""
    chosen = [experiment_of(name) for name in names if name.lower() != "all"]
    every = len(chosen) < len(names)
    return list(EXPERIMENTS.values() if every else {one.id: one for one in chosen}.values())
