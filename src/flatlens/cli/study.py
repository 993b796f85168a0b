"""`flatlens study` and `flatlens report`: a population of networks, and its page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from flatlens.cli.bar import Bar
from flatlens.cli.output import Flag, bullets, note, show, show_json, stdout_to_stderr
from flatlens.errors import BadInput, UnknownName

if TYPE_CHECKING:
    from flatlens.experiments.study import StudyResult

STUDIES = {
    "digits": "4-layer ReLU networks on scikit-learn's digits, by learning rate, batch size and seed: "
    "`flatlens study digits --out DIR`",
}
EXPECTED = {"smoke": "8 networks, under 30 s", "laptop": "48 networks, about 5 minutes"}


def study(
    data: str,
    /,
    *,
    out: Path,
    scale: Literal["smoke", "laptop"] = "laptop",
    workers: int = 2,
    mixed: Annotated[bool, Flag] = False,
    strict: Annotated[bool, Flag] = False,
    as_json: Annotated[bool, Flag, Parameter(name="--json")] = False,
) -> int:
    """Train a population of networks, measure each, relate the measures to generalisation, write the page.

    Stopped at any moment, the same command carries on where it was, and ends in the same digits. For example:

        flatlens study digits --out runs/digits
        flatlens study digits --out runs/quick --scale smoke

    Args:
        data: The data set: `digits`.
        out: The folder for the networks, the tables, the figures and report.html.
        scale: `smoke` is 8 small networks in seconds, `laptop` 48 in minutes.
        workers: Processes that train and measure, one thread each.
        mixed: Carry on a study that was begun with other versions of the software.
        strict: Exit with 1 if a network failed or did not reach interpolation.
        as_json: Print JSON.
    """
    if data not in STUDIES:
        raise UnknownName.among("data set to study", data, STUDIES)
    if workers < 1:
        raise BadInput(f"--workers {workers}: at least 1 is needed")
    from flatlens.experiments.study import Study, run_study
    from flatlens.report import write_study_page

    expected = f"{data} at {scale} scale: {EXPECTED[scale]} on two cores, about 0.5 GiB of memory for each worker"
    try:
        with stdout_to_stderr(), Bar(expected) as bar:
            result = run_study(Study.digits(scale), out, workers=workers, progress=bar, mixed=mixed)
            files = write_study_page(result, out, progress=bar)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the finished networks are kept, and the same command carries on") from None
    _conclude(result, files, as_json)
    return int(strict and bool(result.failed or result.excluded))


def report(
    folder: Path,
    /,
    *,
    as_json: Annotated[bool, Flag, Parameter(name="--json")] = False,
) -> None:
    """Rebuild a study's page and figures from its networks' folders; nothing is trained.

    For example:

        flatlens report runs/digits

    Args:
        folder: The study's folder, given to `flatlens study` as --out.
        as_json: Print JSON.
    """
    from flatlens.experiments.study import load_study, write_tables
    from flatlens.report import write_study_page

    with stdout_to_stderr(), Bar() as bar:
        result = load_study(folder)
        write_tables(result, folder)
        files = write_study_page(result, folder, progress=bar)
    _conclude(result, files, as_json)


def _conclude(result: StudyResult, files: list[Path], as_json: bool) -> None:
    page = next((path for path in files if path.suffix == ".html"), files[0])
    if as_json:
        show_json({"page": page, "files": files, **_facts(result)})
        return
    converged = len(result.networks) - len(result.excluded)
    show(f"{len(result.networks)} networks, {converged} of them converged\n", bullets(result.findings))
    for key, why in result.excluded:
        note(f"network {key} is left out of the relations: {why}")
    for key, why in result.failed:
        note(f"network {key} failed: {why}")
    show(f"\n{page}")


def _facts(result: StudyResult) -> dict[str, Any]:
    return {
        "networks": result.networks.to_dict("records"),
        "relations": result.relations.to_dict("records"),
        "findings": result.findings,
        "excluded": [{"key": key, "why": why} for key, why in result.excluded],
        "failed": [{"key": key, "why": why} for key, why in result.failed],
        "unfinished": result.unfinished,
        "settings": result.settings,
        "versions": result.versions,
    }
