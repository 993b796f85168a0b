"""`flatlens reproduce`: the papers' figures and tables, with an outcome for each claim."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from flatlens.cli.bar import DRAWING, Bar
from flatlens.cli.output import Flag, Json, note, show, show_json, stdout_to_stderr, written
from flatlens.cli.running import Running
from flatlens.errors import BadFolder, BadInput
from flatlens.progress import in_words

if TYPE_CHECKING:
    from flatlens.experiments.settings import Study
    from flatlens.papers.experiment import Experiment, Scale
    from flatlens.papers.predictions import Results
    from flatlens.papers.reproduce import Reproduction


def reproduce(
    *experiments: str,
    out: Path,
    scale: Literal["smoke", "laptop", "desk", "paper"] = "laptop",
    again: Annotated[bool, Flag] = False,
    tables: Path | None = None,
    running: Running = Running(),  # noqa: B008 (frozen)
    strict: Annotated[bool, Flag] = False,
    as_json: Json = False,
) -> int:
    """Reproduce figures and tables of the papers: train, measure, draw, and check each claim.

    If it is stopped at any moment, the same command continues. For example:

        flatlens reproduce X4 --out runs/x4
        flatlens reproduce all --scale smoke --out runs/atlas

    Args:
        experiments: Rows of the catalogue (`flatlens list experiments`), or `all`.
        out: The folder for the runs, the tables, the figures and report.html; several experiments have one each in it.
        scale: `smoke` takes seconds, `laptop` minutes; `desk` is the published setting, made smaller, on the published
            data, and takes minutes to hours; `paper` is the published setting.
        again: Run each experiment a second time, with other seeds and 1.5 times as many samples: a claim is decided
            if both runs agree.
        tables: The tables of an earlier run, such as docs/tables/X4-desk.zip, or a folder of such files: networks with
            the same settings are not trained again.
        running: The processes or machines to run on.
        strict: Exit with 1 if a claim is not reproduced; with --again if both runs say so.
        as_json: Print JSON.
    """
    if not experiments:
        raise BadInput("name an experiment, such as X4 (`flatlens list experiments` has them), or all")
    running.check()
    with stdout_to_stderr(), Bar(stage="reading the experiments") as bar:
        from flatlens.papers import reproduce as module
        from flatlens.papers.archive import known_studies
        from flatlens.papers.summary import rows_of
        from flatlens.report.reproduction import write_atlas

        chosen = module.selected(experiments)
        alone = len(chosen) == 1 and "all" not in map(str.lower, experiments)
        folders = [out] if alone else [out / one.id for one in chosen]
        if not alone and module.is_reproduction(out):
            raise BadFolder(f"the output folder {str(out)!r} already holds one experiment: name another --out")
        earlier = [known_studies(one, scale, tables) for one in chosen]
        planned = [_planned(one, scale, again) for one in chosen]
        for one, known, studies in zip(chosen, earlier, planned, strict=True):
            if tables is not None:
                keys, done = {network.key for study in studies for network in study.networks()}, _keys(known)
                note(f"{one.id} at {scale} scale: {str(tables)!r} has {len(keys & done)} of its {len(keys)} networks")
        found = []
        with running.started() as options:
            for one, folder, known, studies in zip(chosen, folders, earlier, planned, strict=True):
                bar.stage(f"{one.id}: a trial, then its data and its statistics")
                bar.announcement = f"{one.id} at {scale} scale: {_expected(studies, scale, running.workers, known)}"
                found.append(
                    module.reproduce(one.id, folder, scale=scale, again=again, known=known, progress=bar, **options)
                )
            bar.stage(DRAWING)
            files = list[Path]()
            kept = written("--out", lambda: files.extend(write_atlas(found, out, folders, progress=bar)))
    _conclude(found, files, as_json)
    told = (row.decided if again else row.outcome.conclusion for mine in rows_of(found) for row in mine)
    return 2 if not kept else int(strict and "not reproduced" in told)


def _planned(one: Experiment, scale: Scale, again: bool) -> list[Study]:
    """Return the studies of an experiment, and those of its second run."""
    from flatlens.papers.rerun import rerun

    studies = list(one.studies(scale).values())
    return studies + [rerun(study) for study in studies] * again


def _keys(known: Results) -> set[str]:
    """Return the keys of the networks in the tables of an earlier run."""
    return {key for study in known.values() for key in study.networks["key"]}


def _expected(studies: Sequence[Study], scale: Scale, workers: int, known: Results) -> str:
    """Return the expected work in words; for data of the papers, from a trial of each study that is not known."""
    done = _keys(known)
    from flatlens.papers.experiment import ON_PAPERS_DATA

    if scale not in ON_PAPERS_DATA:
        return f"{sum(network.key not in done for study in studies for network in study.networks())} networks"
    from flatlens.experiments.cost import cost_of

    cost = cost_of(studies, done)
    most = in_words(cost.seconds / min(workers, max(cost.networks, 1)))
    share = cost.training / cost.seconds if cost.seconds else 0.0
    return f"{cost.networks} networks, at most about {most} with {workers} workers, {share:.0%} of it training"


def _conclude(found: list[Reproduction], files: list[Path], as_json: bool) -> None:
    if as_json:
        show_json({"page": files[0] if files else None, "files": files, "experiments": [_facts(one) for one in found]})
        return
    from flatlens.papers.summary import rows_of
    from flatlens.report.fitted import Fitted

    for one, rows in zip(found, rows_of(found), strict=True):
        second = ["decided"] * bool(one.again or one.halves) + ["re-run"] * bool(one.again)
        second += ["halves"] * bool(one.halves)
        table = Fitted(f"{one.experiment.id}: {one.experiment.title}")
        for heading in ("claim", "kind", "outcome", *second, "statistic", "n"):
            table.column(heading, "name")
        for row in rows:
            v = row.outcome
            replication: list[str] = [row.decided] if row.again or row.halves else []
            replication += [row.again.conclusion] if row.again else []
            replication += [" and ".join(half.statistic.in_words for half in row.halves)] if row.halves else []
            table.row(v.prediction.says, v.prediction.kind, v.conclusion, *replication, v.statistic.in_words,
                          v.statistic.size)  # fmt: skip
        show(table)
        for difference in one.experiment.differs.get(one.scale, ()):
            note(f"{one.experiment.id} differs from the paper: {difference}")
        if one.unfinished:
            note(f"{one.experiment.id}: {one.unfinished} networks are not finished")
    if files:
        show(f"\n{files[0]}")


def _facts(one: Reproduction) -> dict[str, Any]:
    return {
        "id": one.experiment.id,
        "scale": one.scale,
        "differs": list(one.experiment.differs.get(one.scale, ())),
        "claims": one.claims(),
        "unfinished": one.unfinished,
    }
