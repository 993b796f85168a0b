"""The commands that train networks: `flatlens study` and its `report`, and `flatlens reproduce`.

Mistyped names are refused before torch is imported, which takes seconds: they are read from flatlens' own source.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from flatlens.cli import terminal
from flatlens.cli.inputs import Names, all_names
from flatlens.cli.processes import patient
from flatlens.cli.terminal import WHOLE, Flag, Json, Whole, note, or_cost, show, show_json, stdout_to_stderr
from flatlens.errors import BadFolder, BadInput, UnknownName
from flatlens.progress import Bar, count_of, in_words
from flatlens.user_code import YAML, is_userfile

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from flatlens.experiments.result import StudyResult
    from flatlens.experiments.settings import Study
    from flatlens.experiments.study import RunOptions
    from flatlens.papers.experiment import Experiment, Results, Scale
    from flatlens.papers.reproduction import Reproduction


DATA_SETS = (
    "digits", "patches", "clusters", "inverted_clusters", "eight_points", "waves_interval", "waves_square",
    "waves_cube", "waves_circle", "waves_sphere", "waves_sheet", "imagenet", "mnist", "fashion_mnist", "cifar10",
    "cifar100",
)  # fmt: skip
NETWORKS = ("MLP", "LeNet5", "VGG11", "SmallVGG", "ResNet18", "ViT", "CoordinateNet", "Published")
SOURCE = Path(__file__).parent.parent


def measures() -> set[str]:
    """Return the names of all measures: functions with a decorator in the modules of measures."""
    return {
        node.name
        for node in _nodes("measures/*.py")
        if isinstance(node, ast.FunctionDef) and any(isinstance(each, ast.Call) for each in node.decorator_list)
        if not node.name.startswith("_")  # those that others read
    }


def settings() -> set[str]:
    """Return the names of all settings: fields of dataclasses of training, networks and data."""
    return {
        field.target.id
        for node in _nodes("training/*.py", "models/*.py", "data/*.py", "experiments/settings.py")
        if isinstance(node, ast.ClassDef) and node.decorator_list
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def _nodes(*patterns: str) -> Iterator[ast.stmt]:
    for pattern in patterns:
        for file in sorted(SOURCE.glob(pattern)):
            yield from ast.parse(file.read_text()).body


def require_names(data: str, model: str | None, names: Sequence[str], given: Sequence[str]) -> None:
    """Refuse at once a mistyped data set, architecture or measure, or setting among those `given` as NAME=VALUE."""
    yaml = data.endswith(YAML)
    if yaml and not Path(data).expanduser().is_file():
        raise BadInput(f"the study {data!r} cannot be read: there is no such file")
    if not (yaml or is_userfile(data) or Path(data).expanduser().is_dir()) and data not in DATA_SETS:
        raise UnknownName.among("data set", data, DATA_SETS, where="(not a folder or file.py:NAME either)")
    architecture = (model or "").partition("(")[0].strip()
    if architecture.isidentifier() and architecture not in NETWORKS:
        raise UnknownName.among("architecture", architecture, NETWORKS)
    for name in names:
        if name.partition("(")[0].strip() not in measures():
            raise UnknownName.among("measure", name.partition("(")[0].strip(), measures())
    if yaml or is_userfile(architecture) or any(each.startswith("model=") and is_userfile(each) for each in given):
        return  # the arguments of a function of the user's are settings
    for each in given:
        for name in each.partition("=")[0].split("+"):
            last = name.strip().rpartition(".")[2]
            if last.isidentifier() and last not in settings():
                raise UnknownName.among("setting", name.strip(), settings())


@Parameter(name="*")
@dataclass(frozen=True)
class Running:
    """The processes or machines that train and measure networks."""

    workers: Whole = 2
    """Processes that train and measure, one thread each."""

    dask: str | None = None
    """The address of a Dask scheduler whose workers see the same folder."""

    slurm: str | None = None
    """Run in jobs of Slurm, such as `jobs=8,cores=4,memory=8GiB,walltime=02:00:00,queue=short`."""

    pack: Whole = 1
    """Networks given to a worker at a time, of those that are trained alone; more for very short ones on many
    machines."""

    together: Annotated[int | Literal["off"] | None, WHOLE] = None
    """Networks of one kind that are trained together in one stack, 16 by default, if a trial finds that faster; the
    results are the same to the last digit. `off`: each alone."""

    retry_failed: Annotated[bool, Flag] = False
    """Re-run the networks that ended in an error."""

    mixed: Annotated[bool, Flag] = False
    """Continue a study that was begun with other versions of the software."""

    dry_run: Annotated[bool, Flag] = False
    """Say how many networks are left, how long they take and how much memory, from a trial of one, and end."""

    def check(self) -> None:
        """Refuse impossible values before anything is imported or written."""
        for name, number in (("workers", self.workers), ("pack", self.pack)):
            if number < 1:
                raise BadInput(f"--{name} {number}: expected at least 1")
        if isinstance(self.together, int) and self.together < 1:
            raise BadInput(f"--together {self.together}: a number of networks, at least 1, or off")
        if self.dask is not None and self.slurm is not None:
            raise BadInput("--dask and --slurm: give only one of them")

    @contextmanager
    def started(self) -> Iterator[RunOptions]:
        """Yield the keyword arguments of `run_study`; an interrupt says that nothing is lost."""
        try:
            with stdout_to_stderr(), self._executor() as executor:
                options: RunOptions = {"workers": self.workers, "executor": executor, "pack": self.pack,
                                       "retry_failed": self.retry_failed, "mixed": self.mixed}  # fmt: skip
                if self.together is not None:
                    options["together"] = 1 if self.together == "off" else self.together
                yield options
        except KeyboardInterrupt:
            raise KeyboardInterrupt("the finished networks are kept, and the same command continues") from None

    @contextmanager
    def _executor(self) -> Iterator[Executor | None]:
        """Yield the executor to run on; None for processes of this machine."""
        if self.dask is None and self.slurm is None:
            yield None
            return
        from flatlens.experiments.executors import SlurmSettings, dask_executor, slurm_executor
        from flatlens.settings_json import made

        if self.dask is not None:
            with dask_executor(self.dask, mixed=self.mixed) as executor:
                yield executor
            return
        # settings such as `jobs=8,queue=short`; no value may contain a comma
        known = {field.name: field for field in fields(SlurmSettings)}
        given: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in (self.slurm or "").split(","))):
            name, equals, value = part.partition("=")
            if not equals:
                raise BadInput(f"--slurm {part}: write NAME=VALUE, with commas between")
            if name not in known:
                raise UnknownName.among("setting", name, known, where="of --slurm")
            number = isinstance(known[name].default, int) and value.isdecimal()
            given[name] = int(value) if number else (value,) if isinstance(known[name].default, tuple) else value
        settings = made(SlurmSettings, given)
        # within these seconds jobs of Slurm are cancelled
        with patient(20.0), slurm_executor(settings, mixed=self.mixed) as executor:
            yield executor


STUDIES = {
    "digits": "4-layer ReLU networks on scikit-learn's digits, by learning rate, batch size and seed: "
    "`flatlens study digits --out DIR`",
}
SECONDS = {"smoke": 3.0, "laptop": 0.7}  #: seconds for a network of the digits study, with two workers
USUAL_SHARE = 0.95  #: of them, the share of training
Settings = Annotated[Sequence[str], Parameter(name="--set", negative="", show_default=False, allow_leading_hyphen=True)]


@or_cost
def study(
    data: str,
    /,
    *,
    out: Path,
    model: str | None = None,
    test: str | None = None,
    checkpoints: str | None = None,
    settings: Settings = (),
    measures: Names = (),
    scale: Literal["smoke", "laptop"] = "laptop",
    running: Running = Running(),
    strict: Annotated[bool, Flag] = False,
    as_json: Json = False,
) -> int:
    """Train a population of networks, measure each, correlate the measures with generalisation, write the page.

    If it is stopped at any moment, the same command continues, with the same digits in the end. A command with more
    seeds, values or axes adds to what the folder holds. For example:

        flatlens study digits --out runs/digits
        flatlens study digits --out runs/digits --set seed=0:20
        flatlens study digits --out runs/quick --scale smoke
        flatlens study patches --out runs/vgg --model SmallVGG --set lr=0.02,0.05 --set seed=0:6
        flatlens study net.py:samples --out runs/mine --model net.py:build --set width=8,16,32 --set seed=0:6
        flatlens study net.py:samples --out runs/theirs --model net.py:build --checkpoints runs.csv
        flatlens study study.yaml --out runs/mine --workers 8

    Args:
        data: A data set (`flatlens data list`), data of your own as for `flatlens measure` (`file.py:NAME`, or a folder
            of images or texts), or a YAML file that describes a study.
        out: The folder for the networks, the tables, the figures and report.html.
        model: The architecture, such as `MLP(widths=(64, 64), activation=tanh)`, `SmallVGG` or `VGG11(width=0.25)`; its
            inputs and outputs come from the data. Or `file.py:NAME`, a function that returns a new network: its
            arguments are settings, too.
        test: Held-out data of your own, in the same forms. Without any, a fifth of your samples is held out; none with
            --checkpoints.
        checkpoints: Networks that were trained elsewhere, which are measured only: a table (.csv, .tsv, .json) with a
            column `weights` and any others, such as lr, seed and gap; or a folder of files such as lr=0.1_seed=0.pt.
        settings: A setting of all networks (`batch_size=16`, `ascent=SAM(0.1)`), or an axis of the grid (`lr=0.05,0.1`,
            `seed=0:6`, `model=SmallVGG,LeNet5`). Repeat it for more. Without an axis: `lr=0.02,0.05,0.1` and
            `seed=0:3`, but for what you set; if you give one, only yours count.
        measures: The measures, separated by commas. Without it: those that run by default, except seven that add
            little to others, such as `relative_flatness_ggn` and `output_norm`.
        scale: `smoke` takes seconds, `laptop` minutes.
        running: The processes or machines to run on.
        strict: Exit with 1 if a network failed or did not reach the end of its training.
        as_json: Print JSON.
    """
    running.check()
    require_names(data, model, all_names(measures, "--measures"), settings)
    with stdout_to_stderr(), Bar(stage="reading the data") as bar:
        from flatlens.experiments.specification import study_of
        from flatlens.experiments.store import Store

        chosen = study_of(
            data,
            model=model,
            test=test,
            checkpoints=checkpoints,
            settings=settings,
            measures=all_names(measures, "--measures"),
            scale=scale,
            begun=Store(out).begun(),
        )
        from flatlens.experiments.study import run_study
        from flatlens.report import write_study_page

        if running.dry_run:
            bar.stage("a trial")
            left = _left([(chosen, out)], set(), running.workers)
            raise terminal.DryRun(partial(_show_left, chosen.name, left))
        # what it will take; of the digits study the seconds are known
        networks, memory = len(chosen.networks()), "about 0.5 GiB of memory for each worker"
        name, told = chosen.name, count_of(networks, "network")
        if (each := _usual(chosen)) is not None:
            name += f" at {chosen.scale} scale"
            told += f", about {in_words(each * networks)} on two cores"
        elif not any("+" in axis.name for axis in chosen.axes):
            told += f" ({' x '.join(f'{len(axis.values)} {axis.name}' for axis in chosen.axes)})"
        bar.announcement = f"{name}: {told}, {memory}"
        bar.stage("correlating the measures")
        with running.started() as options:
            result = run_study(chosen, out, progress=bar, **options)
        files = list[Path]()
        kept = terminal.written("--out", lambda: files.extend(write_study_page(result, out, progress=bar)))
    _conclude(result, files, as_json)
    return 2 if not kept else int(strict and bool(result.failed or result.excluded))


def report(folder: Path, /, *, as_json: Json = False) -> int:
    """Rebuild a study's tables, page and figures from its networks' folders; nothing is trained.

    For example:

        flatlens report runs/digits

    Args:
        folder: The study's folder, given to `flatlens study` as --out.
        as_json: Print JSON.
    """
    with stdout_to_stderr(), Bar(stage="correlating the measures") as bar:
        from flatlens.experiments.study import load_study, write_tables
        from flatlens.report import write_study_page

        result = load_study(folder, again=True)
        write_tables(result, folder)
        files = list[Path]()
        kept = terminal.written(
            "the page", lambda: files.extend(write_study_page(result, folder, again=True, progress=bar))
        )
    _conclude(result, files, as_json)
    return 0 if kept else 2


def track(history: Path, /, *, page: Path | None = None, batch_size: int | None = None, as_json: Json = False) -> None:
    """Show a training run from its tracker's history: is it at its edge of stability, and since when?

    For example:

        flatlens track run.csv --page run.html

    Args:
        history: The CSV file that `Tracker.save` wrote.
        page: Write an HTML page with a picture of each measure.
        batch_size: Samples of a training step, to show beside the gradient's noise scale.
        as_json: Print JSON.
    """
    terminal.require_page(page)
    if batch_size is not None and batch_size < 1:
        raise BadInput(f"--batch-size {batch_size}: expected at least 1")
    with stdout_to_stderr(), Bar(stage="reading the history") as bar:
        from flatlens.report.tracked import tracked_screen, write_tracked_page
        from flatlens.tracking.history import answer_of_run, load_history

        if not history.is_file():
            raise BadFolder(f"{str(history)!r}: there is no such file; Tracker.save(path) writes it")
        found = load_history(history)
        found.attrs |= {} if batch_size is None else {"batch_size": batch_size}
        terminal.page_beside(page, bar, partial(write_tracked_page, found))
    if as_json:
        show_json({"answer": answer_of_run(found), "rows": found.drop(columns="seconds").to_dict("records")})
    else:
        show(tracked_screen(found))


def _usual(chosen: Study) -> float | None:
    """Return the seconds that a network of the digits study takes with two workers; None for another study."""
    own = chosen.scale in SECONDS and chosen.base == type(chosen).digits(chosen.scale).base  # type: ignore[arg-type]
    return SECONDS[chosen.scale] if own else None


@dataclass(frozen=True)
class Left:
    """The networks of studies that are still to train, and what they are expected to take."""

    networks: int  #: of all studies
    left: int
    workers: int
    at_most: bool  #: whether every training was counted with all its steps, although it may end earlier
    seconds: float  #: with these workers
    training: float  #: the share of the seconds that training takes
    memory: int | None  #: bytes of one worker; None where they cannot be read


TRIAL = 20.0  #: seconds in which a network of a study may be trained and measured, to see what it takes


def _left(where: Sequence[tuple[Study, Path]], known: set[str], workers: int) -> Left:
    """Return what is left of studies, from a trial of each in this process."""
    from flatlens.experiments.network import Cost, cost_of, tried
    from flatlens.experiments.store import Store
    from flatlens.memory import OfProcess

    every, at_most, cost = 0, False, Cost(0, 0.0, 0.0)
    for study, place in where:
        networks = study.networks()
        done = known.union(Store(place.absolute()).finished([one.key for one in networks]))
        left = [one for one in networks if one.key not in done]
        every += len(networks)
        # one network to its end, if it is quick; else some steps of it, and all that it may take
        if (each := _usual(study)) is not None:
            one: Cost | None = Cost(1, 2 * each * USUAL_SHARE, 2 * each * (1 - USUAL_SHARE))
        else:
            one = tried(left[len(left) // 2], TRIAL) if left else None
        if one is not None:
            cost += Cost(len(left), len(left) * one.training, len(left) * one.measuring)
        elif left:
            cost, at_most = cost + cost_of([study], done), True
    hands = max(1, min(workers, cost.networks))
    return Left(every, cost.networks, hands, at_most, cost.seconds / hands, cost.share, OfProcess().peak())


def _show_left(name: str, left: Left, as_json: bool) -> int:
    """Print what is left in place of the work."""
    from flatlens.memory import in_gib

    memory = "" if left.memory is None else f", in about {in_gib(left.memory)} of memory each"
    most = "at most " * left.at_most
    time = f"{most}about {in_words(left.seconds)}" if left.seconds >= 1 else "less than 1 s"
    takes = f"{time} with {count_of(left.workers, 'worker')}{memory}; {left.training:.0%} of it is training"
    answer = [f"{name}: {left.left} of {count_of(left.networks, 'network')} left to train and measure."]
    nothing = "Nothing is left to train or measure: tables are written again, existing pictures are kept."
    answer += [f"This takes {takes}."] if left.left else [nothing]
    if as_json:
        show_json({"answer": answer, **asdict(left)})
    else:
        show(*answer)
    return 0


def _conclude(result: StudyResult, files: list[Path], as_json: bool) -> None:
    page = next((path for path in files if path.suffix == ".html"), None)
    if as_json:
        excluded, failed = ([{"key": key, "why": why} for key, why in of] for of in (result.excluded, result.failed))
        tables = {name: getattr(result, name).to_dict("records") for name in ("networks", "relations", "differences")}
        show_json({
            "page": page, "files": files, "answer": result.answer, **tables, "findings": result.findings,
            "excluded": excluded, "failed": failed, "unfinished": result.unfinished, "settings": result.settings,
            "versions": result.versions,
        })  # fmt: skip
        return
    reached, outcomes = len(result.networks) - len(result.excluded), set(result.networks["outcome"])
    end = "completed training" if "finished" in outcomes else "converged"
    how = "all trained outside flatlens" if "trained elsewhere" in outcomes else f"{reached} of them {end}"
    networks = count_of(len(result.networks), "network")
    show(*result.answer, f"\n{networks}, {how}\n", terminal.bullets(result.findings))
    for key, why in result.excluded:
        note(f"network {key} is excluded from the correlations: {why}")
    for why, number in result.alone:
        note(f"{count_of(number, 'network')} trained alone: {why}")
    for key, why in result.failed:
        note(f"network {key} failed: {why}")
    if result.failed:
        note("add --retry-failed to the same command to run the failed networks again")
    if page is not None:
        show(f"\n{page}")


@or_cost
def reproduce(
    *experiments: str,
    out: Path,
    scale: Literal["smoke", "laptop", "desk", "paper"] = "laptop",
    again: Annotated[bool, Flag] = False,
    tables: Path | None = None,
    running: Running = Running(),
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
        raise BadInput("name an experiment, such as X4 (see `flatlens list experiments`), or all")
    running.check()
    with stdout_to_stderr(), Bar(stage="reading the experiments") as bar:
        from flatlens.papers import reproduction as module
        from flatlens.papers.reproduction import known_studies
        from flatlens.papers.summary import rows_of
        from flatlens.report.reproduction import write_atlas

        chosen = module.selected(experiments)
        alone = len(chosen) == 1 and "all" not in map(str.lower, experiments)
        folders = [out] if alone else [out / one.id for one in chosen]
        if not alone and module.is_reproduction(out):
            raise BadFolder(f"the output folder {str(out)!r} already holds one experiment: name another --out")
        # networks in the tables of an earlier run are not trained again
        earlier = [known_studies(one, scale, tables) for one in chosen]
        planned = [_planned(one, scale, again) for one in chosen]
        if running.dry_run:
            bar.stage("a trial of each study")
            known_keys = {key for known in earlier for key in _keys(known)}
            each = zip(folders, planned, strict=True)
            where = [(study, folder / name) for folder, studies in each for name, study in studies.items()]
            said = f"{', '.join(one.id for one in chosen)} at {scale} scale"
            raise terminal.DryRun(partial(_show_left, said, _left(where, known_keys, running.workers)))
        for one, known, studies in zip(chosen, earlier, planned, strict=True):
            if tables is not None:
                keys = {network.key for study in studies.values() for network in study.networks()}
                done = _keys(known)
                note(f"{one.id} at {scale} scale: {str(tables)!r} has {len(keys & done)} of its {len(keys)} networks")
        # each experiment announces its own work, then runs it
        found = []
        with running.started() as options:
            for one, folder, known, studies in zip(chosen, folders, earlier, planned, strict=True):
                bar.stage(f"{one.id}: a trial, then its data and its statistics")
                work = _expected_reproduce(list(studies.values()), scale, running.workers, known)
                bar.announcement = f"{one.id} at {scale} scale: {work}"
                run = partial(module.reproduce, scale=scale, again=again, known=known, progress=bar)
                found.append(run(one.id, folder, **options))
            bar.stage(terminal.DRAWING)
            files = list[Path]()
            kept = terminal.written("--out", lambda: files.extend(write_atlas(found, out, folders, progress=bar)))
    _conclude_reproduce(found, files, as_json)
    told = (row.decided if again else row.outcome.conclusion for mine in rows_of(found) for row in mine)
    return 2 if not kept else int(strict and "not reproduced" in told)


def _planned(one: Experiment, scale: Scale, again: bool) -> dict[str, Study]:
    """Return the studies of an experiment by their folder's name, and with `again` those of its re-run."""
    from flatlens.papers.reproduction import RERUN, rerun

    studies = one.studies(scale)
    return {**studies, **({f"{RERUN}{name}": rerun(study) for name, study in studies.items()} if again else {})}


def _keys(known: Results) -> set[str]:
    return {key for study in known.values() for key in study.networks["key"]}


def _expected_reproduce(studies: Sequence[Study], scale: Scale, workers: int, known: Results) -> str:
    """Return the expected work in words; for data of the papers, from a trial of each study that is not known."""
    done = _keys(known)
    from flatlens.papers.experiment import ON_PAPERS_DATA

    if scale not in ON_PAPERS_DATA:
        return count_of(sum(network.key not in done for study in studies for network in study.networks()), "network")
    from flatlens.experiments.network import cost_of

    cost = cost_of(studies, done)
    most = f"{in_words(cost.seconds / min(workers, max(cost.networks, 1)))} with {count_of(workers, 'worker')}"
    return f"{count_of(cost.networks, 'network')}, at most about {most}, {cost.share:.0%} of it training"


def _conclude_reproduce(found: list[Reproduction], files: list[Path], as_json: bool) -> None:
    from flatlens.papers.reproduction import answer_of_claims

    # JSON has every claim with its numbers
    if as_json:
        experiments = [
            {
                "id": one.experiment.id, "scale": one.scale, "answer": one.answer,
                "differs": list(one.experiment.differs.get(one.scale, ())), "claims": one.claims(),
                "unfinished": one.unfinished,
            }
            for one in found
        ]  # fmt: skip
        page = files[0] if files else None
        show_json({"answer": answer_of_claims(found), "page": page, "files": files, "experiments": experiments})
        return
    from flatlens.papers.summary import rows_of
    from flatlens.report.screen import Fitted

    # the screen: the answer, then a table of claims for each experiment, and below it what differs from the paper
    show(*answer_of_claims(found))
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
        if one.scale == "desk" and one.experiment.protocol:
            settings = count_of(len(one.experiment.protocol), "setting")
            note(f"{one.experiment.id}: {settings} as printed and here, in a table on the page")
        if one.unfinished:
            note(f"{one.experiment.id}: {count_of(one.unfinished, 'network')} not finished")
    if files:
        show(f"\n{files[0]}")
