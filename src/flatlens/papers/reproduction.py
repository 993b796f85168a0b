"""Run an experiment into a folder, test its predictions, replicate them, and read it all back, also from an archive.

A replication is a replication with other seeds and sizes, or a split-half check: each half of the units by itself. An
archive is a zip file that holds experiment.json and the tables of each study, from which it is weighed and drawn
again.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any, Unpack

from flatlens.errors import BadFolder, BadInput, UnknownName
from flatlens.estimate import Progress
from flatlens.experiments.overrides import TOGETHER, last_field
from flatlens.experiments.result import StudyResult, opened_archive, read_studies_in, write_member, write_study
from flatlens.experiments.settings import Axis, Study
from flatlens.experiments.store import Store, refuse_foreign
from flatlens.experiments.study import RunOptions, load_study, run_study
from flatlens.experiments.tables import OF_NETWORKS
from flatlens.files import write_whole
from flatlens.papers import EXPERIMENTS
from flatlens.papers.evidence import column_of_units
from flatlens.papers.experiment import (
    NO_OUTCOMES,
    SCALES,
    Conclusion,
    Experiment,
    Outcome,
    Plot,
    Results,
    Scale,
    counted,
    replicated,
)
from flatlens.progress import count_of
from flatlens.statistics.inference import FEWEST_UNITS

SHIFT = 1000
"""Number added to every seed."""

_SIZES = ("train", "test")
SIZE = 1.5
"""Factor on the numbers of training and test samples, where a study sets them."""

IN_WORDS = f"every seed {SHIFT} higher, {SIZE:g} times as many samples"


def rerun(study: Study) -> Study:
    """Return the study with other seeds and 1.5 times as many samples.

    >>> second = rerun(Study.digits("smoke"))
    >>> second.base.data.train, second.base.data.seed, second.axes[-1].values
    (300, 1000, (1000, 1001))
    """
    axes = []
    for axis in study.axes:
        names = [last_field(name) for name in axis.name.split(TOGETHER)]
        rows = axis.values if len(names) > 1 else [(value,) for value in axis.values]
        values = [tuple(map(_another, row, names)) for row in rows]
        axes.append(Axis(axis.name, tuple(values if len(names) > 1 else (value for (value,) in values))))
    return replace(study, base=_another(study.base), axes=tuple(axes))


def _another(value: Any, name: str = "") -> Any:
    """Return a setting, or settings, of the re-run; `name` is the field's."""
    if name == "seed":
        return value + SHIFT
    if name in _SIZES and value is not None:
        return round(SIZE * value)
    if isinstance(value, tuple):
        return tuple(map(_another, value))
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{field.name: _another(getattr(value, field.name), field.name) for field in fields(value)})


HALVES = "each half of the independent units (every other seed)"


def split_half(results: Results) -> tuple[Results, Results]:
    """Return the results of every other unit: seeds in order; networks, by their keys, if no seed varies.

    The seed may be any that the study varies, such as `model.seed`. A seed is in the same half in every study, so that
    what its networks share stays in one half. Keys are hashes: their order has nothing to do with the settings.
    """
    of_seeds = [one.networks[column] for one in results.values() if (column := column_of_units(one)) != "key"]
    seeds = {seed for column in of_seeds for seed in column}
    every_other = set(sorted(seeds)[::2])
    halves: tuple[dict[str, StudyResult], dict[str, StudyResult]] = {}, {}
    for name, result in results.items():
        units = result.networks[column := column_of_units(result)]
        first = units.rank(method="dense") % 2 == 1 if column == "key" else units.isin(every_other)
        tables = {table: getattr(result, table) for table in (*OF_NETWORKS, "values")}
        for half, mine in zip(halves, (first, ~first), strict=True):
            keys = result.networks.loc[mine, "key"]
            kept = {one: table[table["key"].isin(keys)] for one, table in tables.items() if len(table)}
            half[name] = replace(result, **{one: table.reset_index(drop=True) for one, table in kept.items()})
    return halves


MARK = "experiment.json"
AGAIN = "again"
"""Name of the folder, inside an experiment's, of the re-run with other seeds and sizes."""
RERUN = f"{AGAIN}/"
"""Beginning of the names of its studies."""


@dataclass(frozen=True, eq=False, repr=False)  # eq would compare tables, repr show them
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

    def __repr__(self) -> str:
        """Return the answer, then the experiment and its number of networks."""
        name = f"<Reproduction of {self.experiment.id}: {count_of(self.networks, 'network')}>"
        return "\n".join([*self.answer, "", name])

    @property
    def answer(self) -> list[str]:
        """The answer in at most three sentences: how many claims are reproduced, how certain, what differs."""
        return answer_of_claims([self])

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

    def hours(self, outcome: Outcome) -> float:
        """Hours on two processors that the studies took which an outcome reads; 0 where they are not known."""
        return sum(self.results[study].seconds for study in outcome.studies) / 3600 / 2

    @property
    def counts(self) -> dict[Conclusion, int]:
        """Number of predictions with each conclusion."""
        return counted(outcome.conclusion for outcome in self.outcomes)

    @property
    def unfinished(self) -> int:
        """Networks that have neither finished nor failed."""
        return sum(result.unfinished for result in self.results.values())


def answer_of_claims(found: Sequence[Reproduction]) -> list[str]:
    """Return at most three sentences on one experiment or several: what is the case, how certain, what next."""
    # The main claims with their conclusions: those that a replication agrees with, if there was one
    main = []
    for one in found:
        every = list(range(len(one.outcomes)))
        headlines = [at for at in every if one.outcomes[at].prediction.headline]
        for at in headlines or [at for at in every if one.outcomes[at].prediction.kind not in NO_OUTCOMES] or every:
            outcome, again = one.outcomes[at], one.again[at] if one.again else None
            halves = one.halves[at] if one.halves else ()
            main.append((outcome, replicated(outcome, again, halves) if again or halves else outcome.conclusion))
    # What is the case: some conclusions are counted even if no claim has them
    counts, always = counted(conclusion for _, conclusion in main), ("not reproduced", "open")
    others = [f"{number} {c}" for c, number in counts.items() if c in always or (number and c != "reproduced")]
    kind = "main claim" if all(outcome.prediction.headline for outcome, _ in main) else "claim"
    told = ", ".join([f"{counts['reproduced']} of {count_of(len(main), kind)} reproduced", *others])
    who = found[0].experiment.id if len(found) == 1 else count_of(len(found), "experiment")
    scales = " and ".join(dict.fromkeys(one.scale for one in found))
    failed = [outcome.prediction.says.rstrip(".") for outcome, c in main if c == "not reproduced"][:2]
    named = f"; not reproduced: {'; '.join(failed)}" if failed else ""
    # How certain that is: the units of the intervals, and the replication
    known = [s for outcome, _ in main if (s := outcome.statistic).units is not None and s.n]
    least, most = (end((s.units or 0 for s in known), default=0) for end in (min, max))
    units = f"{least}" if least == most else f"{least} to {most}"
    words = dict.fromkeys(s.unit or "unit" for s in known)
    unit = next(iter(words)) if len(words) == 1 else "unit"
    over = f"over {units} independent {unit}{'' if most == 1 else 's'}" if known else "over networks"
    few = f", and fewer than {FEWEST_UNITS} give none" if least < FEWEST_UNITS and known else ""
    certain = f"How certain: 95% intervals {over}{few}; {_replication(found, main)}."
    # What differs from the paper, and what to do next, if there is anything to say
    unfinished = sum(one.unfinished for one in found)
    parts = [f"{count_of(unfinished, 'network')} not finished: the same command continues"] if unfinished else []
    differ = [sentence.rstrip(".") for one in found for sentence in one.experiment.differs.get(one.scale, ())]
    if len(found) > 1 and differ:
        parts.append(f"{count_of(len(differ), 'difference')} from the papers in all, listed with each experiment")
    elif differ:
        more = f" ({len(differ) - 1} more)" if len(differ) > 1 else ""
        parts.append(f"differs from the paper: {differ[0]}{more}")
    larger = {"smoke": "laptop", "laptop": "desk"}.get(found[0].scale)
    if larger and not unfinished:
        parts.append(f"next: --scale {larger}")
    next_step = "; ".join(parts)
    last = [f"{next_step[0].upper()}{next_step[1:]}."] if parts else []
    return [f"{who} at {scales} scale: {told}{named}.", certain, *last]


def _replication(found: Sequence[Reproduction], main: Sequence[tuple[Outcome, Conclusion]]) -> str:
    ways = {bool(one.again) for one in found if one.again or one.halves}
    decided = [(outcome, c) for outcome, c in main if outcome.conclusion not in ("open", "not tested")]
    if not ways:
        return "no replication (--again runs one)"
    if not decided:
        return "no claim is decided"
    agree = sum(c == outcome.conclusion for outcome, c in decided)
    of_one = "a replication with other seeds" if True in ways else "a split-half check"
    way = "a replication" if len(ways) > 1 else of_one
    return f"{way} agrees with {agree} of {count_of(len(decided), 'decided claim')}"


def experiment_of(name: str) -> Experiment:
    """Return the experiment of a row of the catalogue, if there is one."""
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
    # write into the folder which experiment it holds; two processes may do so at the same time
    if not is_reproduction(out):
        refuse_foreign(out, MARK, (), "experiment")
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / MARK, json.dumps({"experiment": experiment.id, "scale": scale}) + "\n")
    there, at = _marked(out)
    if (there.id, at) != (experiment.id, scale):
        raise BadFolder(f"the output folder {str(out)!r} already holds {there.id} at {at} scale: name another --out")

    def run(studies: Mapping[str, Study]) -> Results:
        return {
            name: run_study(one, out / name, known=known.get(name), progress=progress, **options)
            for name, one in studies.items()
        }

    results = run(studies)
    if again:
        run({f"{RERUN}{study}": rerun(settings) for study, settings in studies.items()})
    return _concluded_in(out, experiment, scale, results)


def load_reproduction(out: str | os.PathLike[str], *, ended: bool = False) -> Reproduction:
    """Return an experiment from its folders alone, complete or not; write claims.json again.

    Args:
        out: the folder of the experiment.
        ended: leave out the studies that have not run to the end.

    Raises:
        BadFolder: `out` holds no experiment, or no network of one of its studies is finished.
    """
    out = Path(out)
    experiment, scale = _marked(out)
    studies = [study for study in experiment.studies(scale) if not ended or _over(out / study)]
    if not studies:
        raise BadFolder(f"{str(out)!r}: no study of {experiment.id} has run to the end")
    return _concluded_in(out, experiment, scale, {study: load_study(out / study) for study in studies})


def concluded(experiment: Experiment, scale: Scale, results: Results, second: Results) -> Reproduction:
    """Return the reproduction with these studies, and those of its re-run: weigh each prediction, draw each figure."""

    def weighed(of: Results) -> tuple[Outcome, ...]:
        return tuple(prediction.weigh(of) for prediction in experiment.predictions)

    again = weighed(second) if second else ()
    pairs = tuple(zip(*map(weighed, split_half(results)), strict=True)) if scale == "desk" else ()
    plots = tuple(experiment.plots(results))
    return Reproduction(experiment, scale, results, weighed(results), plots, again, pairs, second)


def _concluded_in(out: Path, experiment: Experiment, scale: Scale, results: Results) -> Reproduction:
    """Conclude with the re-run in the folder, if all of it has run to the end; write claims.json."""
    again = {study: out / AGAIN / study for study in results}
    second = {study: load_study(folder) for study, folder in again.items()} if all(map(_over, again.values())) else {}
    found = concluded(experiment, scale, results, second)
    write_whole(out / "claims.json", json.dumps(found.claims(), indent=1) + "\n")
    return found


def _over(folder: Path) -> bool:
    if not (folder / "study.json").is_file():
        return False
    store = Store.open(folder)
    keys = [settings.key for settings in store.study().networks()]
    finished = store.finished(keys)
    return 0 < len(finished) == len(keys) - len(store.failed(keys))


def is_reproduction(out: Path) -> bool:
    """Return whether the folder holds an experiment."""
    return (out / MARK).is_file()


def _marked(out: Path) -> tuple[Experiment, Scale]:
    if not is_reproduction(out):
        raise BadFolder(f"{str(out)!r} holds no experiment (no {MARK} in it): name the folder given as --out")
    try:
        return from_mark(json.loads((out / MARK).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, BadInput) as error:
        raise BadFolder(f"{str(out / MARK)!r} cannot be read ({error}): name another --out") from error


def from_mark(plain: Mapping[str, Any]) -> tuple[Experiment, Scale]:
    """Return the experiment and the scale that an experiment.json names; KeyError where one is missing."""
    experiment, scale = experiment_of(plain["experiment"]), plain["scale"]
    if scale not in SCALES:
        raise UnknownName.among("scale", str(scale), SCALES)
    return experiment, scale


def selected(names: Sequence[str]) -> list[Experiment]:
    """Return the experiments of these names, each once; all experiments where one of the names is "all"."""
    chosen = [experiment_of(name) for name in names if name.lower() != "all"]
    every = len(chosen) < len(names)
    return list(EXPERIMENTS.values() if every else {one.id: one for one in chosen}.values())


WHAT = "the archive of a reproduction"
_SCHEMA = 1
"""Number of the form of an archive; it grows when a reader must change. Archives without it have the first."""


def save_archive(found: Reproduction, path: str | os.PathLike[str]) -> Path:
    """Write the tables of a reproduction, and of its re-run, into one zip file; return its path."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        mark = {"experiment": found.experiment.id, "scale": found.scale, "schema": _SCHEMA}
        write_member(archive, MARK, json.dumps(mark).encode())
        for prefix, results in (("", found.results), (RERUN, found.second)):
            for name, result in results.items():
                write_study(archive, f"{prefix}{name}", result)
    return write_whole(Path(path), content.getvalue())


def load_archive(path: str | os.PathLike[str]) -> Reproduction:
    """Return a reproduction from its archive: weighed anew by the present predictions, with its figures' data.

    Predictions about studies that the archive lacks are not tested.

    Raises:
        BadFolder: the file is not an archive, or a damaged one.
    """
    experiment, scale, studies = read_studies(path)
    if not studies.keys() & experiment.studies(scale).keys():
        raise BadFolder(f"{str(path)!r} does not hold {WHAT}: none of the studies of {experiment.id} is in it")
    again = {name.removeprefix(RERUN): result for name, result in studies.items() if name.startswith(RERUN)}
    return concluded(experiment, scale, {n: r for n, r in studies.items() if not n.startswith(RERUN)}, again)


def read_studies(path: str | os.PathLike[str]) -> tuple[Experiment, Scale, Results]:
    """Return the experiment, its scale and its studies; the studies of the re-run are named "again/...".

    Raises:
        BadFolder: the file is not an archive, or a damaged one.
    """
    with opened_archive(path, WHAT) as archive:
        mark = json.loads(archive.read(MARK))
        if mark.get("schema", _SCHEMA) != _SCHEMA:
            raise BadInput(
                f"it has the form {mark['schema']!r}, of another version of flatlens; this one reads {_SCHEMA}"
            )
        experiment, scale = from_mark(mark)
        return experiment, scale, read_studies_in(archive, [MARK])


def archive_name(experiment: str, scale: str) -> str:
    """Return the name of an experiment's archive in a folder of archives: "X4-desk.zip"."""
    return f"{experiment}-{scale}.zip"


def known_studies(experiment: Experiment, scale: Scale, place: Path | None) -> Results:
    """Return the studies of an experiment in an archive, or in a folder of archives; empty if it has none.

    Raises:
        BadInput: there is nothing at `place`, or it is the archive of another experiment or scale.
        BadFolder: it is not an archive, or a damaged one.
    """
    if place is None:
        return {}
    if not place.exists():
        raise BadInput(f"there is no file or folder {str(place)!r}")
    file = place / archive_name(experiment.id, scale) if place.is_dir() else place
    if not file.exists():
        return {}
    there, at, studies = read_studies(file)
    if (there.id, at) != (experiment.id, scale):
        raise BadInput(f"{str(file)!r} holds {there.id} at {at} scale, not {experiment.id} at {scale} scale")
    return studies
