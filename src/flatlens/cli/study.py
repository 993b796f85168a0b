"""`flatlens study` and `flatlens report`: a population of networks, and its page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from flatlens.cli.bar import Bar
from flatlens.cli.known import require_names
from flatlens.cli.names import Names, all_names
from flatlens.cli.output import Flag, Json, bullets, note, show, show_json, stdout_to_stderr, written
from flatlens.cli.running import Running
from flatlens.progress import in_words

if TYPE_CHECKING:
    from flatlens.experiments.study import Study, StudyResult

STUDIES = {
    "digits": "4-layer ReLU networks on scikit-learn's digits, by learning rate, batch size and seed: "
    "`flatlens study digits --out DIR`",
}
SECONDS = {"smoke": 3.0, "laptop": 0.7}
"""Seconds for a network of the digits study, with two workers."""
Settings = Annotated[Sequence[str], Parameter(name="--set", negative="", show_default=False, allow_leading_hyphen=True)]


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
    running: Running = Running(),  # noqa: B008 (frozen)
    strict: Annotated[bool, Flag] = False,
    as_json: Json = False,
) -> int:
    """Train a population of networks, measure each, correlate the measures with generalisation, write the page.

    If it is stopped at any moment, the same command continues, with the same digits in the end. For example:

        flatlens study digits --out runs/digits
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
        from flatlens.experiments.building import study_of

        chosen = study_of(
            data,
            model=model,
            test=test,
            checkpoints=checkpoints,
            settings=settings,
            measures=all_names(measures, "--measures"),
            scale=scale,
        )
        from flatlens.experiments.study import run_study
        from flatlens.report import write_study_page

        bar.announcement = _expected(chosen)
        bar.stage("relating the networks")
        with running.started() as options:
            result = run_study(chosen, out, progress=bar, **options)
        files = list[Path]()
        kept = written("--out", lambda: files.extend(write_study_page(result, out, progress=bar)))
    _conclude(result, files, as_json)
    return 2 if not kept else int(strict and bool(result.failed or result.excluded))


def report(
    folder: Path,
    /,
    *,
    as_json: Json = False,
) -> int:
    """Rebuild a study's tables, page and figures from its networks' folders; nothing is trained.

    For example:

        flatlens report runs/digits

    Args:
        folder: The study's folder, given to `flatlens study` as --out.
        as_json: Print JSON.
    """
    with stdout_to_stderr(), Bar(stage="relating the networks") as bar:
        from flatlens.experiments.study import load_study, write_tables
        from flatlens.report import write_study_page

        result = load_study(folder)
        write_tables(result, folder)
        files = list[Path]()
        kept = written("the page", lambda: files.extend(write_study_page(result, folder, progress=bar)))
    _conclude(result, files, as_json)
    return 0 if kept else 2


def _expected(chosen: Study) -> str:
    """Return what work follows, in words."""
    memory = "about 0.5 GiB of memory for each worker"
    if chosen.base == _digits(chosen):
        networks = len(chosen.networks())
        told = f"{networks} networks, about {in_words(SECONDS[chosen.scale] * networks)}"
        return f"{chosen.name} at {chosen.scale} scale: {told} on two cores, {memory}"
    if any("+" in axis.name for axis in chosen.axes):
        return f"{chosen.name}: {len(chosen.networks())} networks, {memory}"
    axes = " x ".join(f"{len(axis.values)} {axis.name}" for axis in chosen.axes)
    return f"{chosen.name}: {len(chosen.networks())} networks ({axes}), {memory}"


def _digits(chosen: Study) -> object:
    """Return the settings of the digits study of the same scale; None if there is none."""
    return type(chosen).digits(chosen.scale).base if chosen.scale in SECONDS else None  # type: ignore[arg-type]


def _conclude(result: StudyResult, files: list[Path], as_json: bool) -> None:
    page = next((path for path in files if path.suffix == ".html"), None)
    if as_json:
        show_json({"page": page, "files": files, **_facts(result)})
        return
    reached, outcomes = len(result.networks) - len(result.excluded), set(result.networks["outcome"])
    end = "reached the end of their training" if "finished" in outcomes else "converged"
    how = "all trained elsewhere" if "trained elsewhere" in outcomes else f"{reached} of them {end}"
    show(f"{len(result.networks)} networks, {how}\n", bullets(result.findings))
    for key, why in result.excluded:
        note(f"network {key} is left out of the correlations: {why}")
    for why, number in result.alone:
        note(f"{number} networks were trained alone: {why}")
    for key, why in result.failed:
        note(f"network {key} failed: {why}")
    if result.failed:
        note("the same command with --retry-failed runs what failed again")
    if page is not None:
        show(f"\n{page}")


def _facts(result: StudyResult) -> dict[str, Any]:
    return {
        "networks": result.networks.to_dict("records"),
        "relations": result.relations.to_dict("records"),
        "answers": [{"what": what, "answer": line} for what, line in result.answers],
        "findings": result.findings,
        "excluded": [{"key": key, "why": why} for key, why in result.excluded],
        "failed": [{"key": key, "why": why} for key, why in result.failed],
        "unfinished": result.unfinished,
        "settings": result.settings,
        "versions": result.versions,
    }
