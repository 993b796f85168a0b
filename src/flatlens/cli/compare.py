"""`flatlens compare`: several checkpoints, ranked by each measure, and how far the rankings agree."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from flatlens.cli.bar import MEASURING, READING, TRYING, Bar, write_page
from flatlens.cli.cost import announce
from flatlens.cli.inputs import How, Inputs, generator_of
from flatlens.cli.names import Names, all_names, split_names
from flatlens.cli.output import Json, Whole, require_page, show, show_json, stdout_to_stderr
from flatlens.cli.trust import require_trust
from flatlens.errors import BadInput
from flatlens.progress import no_progress

if TYPE_CHECKING:
    from flatlens.comparing import Comparison
    from flatlens.problem import Problem
    from flatlens.statistics import Statistic

Files = Annotated[Sequence[Path], Parameter(negative="", show_default=False)]


@Parameter(name="*")
@dataclass(frozen=True)
class Compared:
    """The networks to compare, and their data."""

    data: str | None = None
    """The data, as for `flatlens measure`; the same for all. Networks of studies have their own, which must agree."""

    test: str | None = None
    """Held-out data in the same forms: shows the generalisation gap, and each measure's agreement with it."""

    loss: str | None = None
    """The loss, as for `flatlens measure`; the same for all."""

    weights: Files = ()
    """Weights to load, as for `flatlens measure`: one file for each MODEL, in order, or several for one MODEL;
    separated by commas, or repeat the option."""

    name: Names = ()
    """Names for the networks, in order, separated by commas, or repeat the option. Without it: the parts in which their
    files or folders differ."""

    how: How = How()  # noqa: RUF009 (frozen)

    def problems(self, models: Sequence[str]) -> dict[str, Problem]:
        """Return a problem for every checkpoint, by name; the data is read once."""
        pairs = self._checkpoints(models)
        names = self._names(pairs)
        found: dict[str, Problem] = {}
        for name, (model, weights) in zip(names, pairs, strict=True):
            inputs = Inputs(self.data, self.test, self.loss, weights, self.how)
            try:
                found[name] = inputs.problem(model, next(iter(found.values()), None))
            except BadInput as error:
                raise BadInput(f"{error} [{name}]") from error
        return found

    def _checkpoints(self, models: Sequence[str]) -> list[tuple[str, Path | None]]:
        """Return each network's MODEL and weights."""
        files = [file for given in self.weights for file in _files_in(given)]
        if len(models) == 1 and len(files) >= 2:
            return [(models[0], file) for file in files]
        if len(models) < 2:
            found = f"{len(models)} MODEL{'' if len(models) == 1 else 's'} and {len(files)} --weights"
            raise BadInput(
                f"MODEL: at least two networks are needed, got {found}: name two, or one with several --weights"
            )
        if files and len(files) != len(models):
            read = [model for model in models if Path(model).is_file() and Path(model).suffix not in ("", ".py")]
            mend = f" ({read[0]} was read as a MODEL: repeat --weights before each file)" if read else ""
            raise BadInput(
                f"--weights: {len(files)} for {len(models)} MODELs: give one for each, in order, or none{mend}"
            )
        return [(model, files[at] if files else None) for at, model in enumerate(models)]

    def _names(self, pairs: Sequence[tuple[str, Path | None]]) -> list[str]:
        """Return the given names, or the parts in which the checkpoints' names differ."""
        given = all_names(self.name, "--name")
        if given:
            if len(given) != len(pairs) or len(set(given)) != len(given):
                raise BadInput(
                    f"--name {','.join(given)}: {len(pairs)} different names are needed, one for each network"
                )
            return given
        labels = [model if file is None else str(file) for model, file in pairs]
        if len({model for model, _ in pairs}) > 1 and len(set(labels)) < len(pairs):
            labels = [model if file is None else f"{model} {file}" for model, file in pairs]
        return unique(labels)


def _files_in(given: Path) -> list[Path]:
    """Return the files that an option names, separated by commas; a file with commas in its name is one."""
    if os.path.exists(given):  # noqa: PTH110 (Path.exists fails where the whole list is too long for a name)
        return [given]
    return [Path(name) for name in split_names(str(given))]


def compare(
    *models: str,
    compared: Compared = Compared(),
    measures: Names = (),
    page: Path | None = None,
    seed: Whole = 0,
    as_json: Json = False,
) -> None:
    """Rank several checkpoints by each measure, and say how far the rankings agree.

    For example:

        flatlens compare net.py:build --weights epoch1.pt --weights epoch9.pt --data net.py:samples --loss cross_entropy
        flatlens compare runs/digits/networks/0123456789ab runs/digits/networks/ba9876543210 --page compared.html

    Args:
        models: Two or more, as for `flatlens measure`; or one, with several --weights.
        compared: The networks to compare, and their data.
        measures: The measures to rank by, separated by commas, or repeat the option; `flatlens list measures` has the
            names. Without it: all that one pass over the data gives.
        page: Write an HTML page, with a picture of the ranks.
        seed: Seed of the random numbers of estimates, the same for every network.
        as_json: Print JSON.
    """
    require_page(page)
    require_trust(models, compared.how.trust)
    with stdout_to_stderr(), Bar(stage=READING) as bar:
        import flatlens as fl

        problems = compared.problems(models)
        lenses = {name: fl.Lens(problem) for name, problem in problems.items()}
        generator = generator_of(seed)
        bar.stage(TRYING)
        names, anyway = all_names(measures, "--measures") or None, compared.how.anyway
        work = partial(fl.measure, measures=names, progress=no_progress)
        announce(next(iter(lenses.values())), work, times=len(lenses), anyway=anyway)
        bar.stage(MEASURING)
        found = fl.compare(lenses, names, anyway=anyway, generator=generator, progress=bar)
        if page is not None:
            from flatlens.report.compare import write_compare_page

            write_page(page, bar, lambda: write_compare_page(found, page))
    if as_json:
        show_json(_json(found))
        return
    from flatlens.report.compare import compare_screen

    show(compare_screen(found))


def unique(labels: Sequence[str]) -> list[str]:
    """Return short names that differ, without shared folders and a shared ending; numbered if all are equal.

    >>> unique(["runs/a/epoch1.pt", "runs/a/epoch9.pt"]), unique(["net.py:wide", "net.py:deep"])
    (['epoch1', 'epoch9'], ['wide', 'deep'])
    >>> unique(["a/last.pt", "b/last.pt"]), unique(["net.py:build", "net.py:build"])
    (['a/last', 'b/last'], ['build 1', 'build 2'])
    """
    parts = [label.replace(".py:", "/").rstrip("/").split("/") for label in labels]
    endings = {Path(part[-1]).suffix for part in parts}
    if len(endings) == 1 and "" not in endings and all("." not in ending[1:] for ending in endings):
        parts = [[*part[:-1], Path(part[-1]).stem] for part in parts]
    for length in range(1, max(map(len, parts)) + 1):
        short = ["/".join(part[-length:]) for part in parts]
        if len(set(short)) == len(labels):
            return short
    last = [part[-1] for part in parts]
    return [f"{name} {number}" for number, name in enumerate(last, 1)]


def _json(found: Comparison) -> dict[str, Any]:
    agreement = found.agreement()
    return {
        "answer": found.answer,
        "not_ranked": [asdict(one) for one in found.not_ranked.values()],
        "about": found.about,
        "ranks": found.frame().to_dict("records"),
        "networks": found.networks().to_dict("records"),
        "agreement": {
            "all": _statistic(agreement.overall),
            "survive_rescalings": _statistic(agreement.surviving),
            "left_out": agreement.left_out,
            "taus": agreement.taus.to_dict("index"),
            "with_gap": agreement.gap.to_dict("records"),
            "remarks": agreement.remarks,
        },
        "notes": found.notes,
    }


def _statistic(one: Statistic) -> dict[str, Any]:
    return {"kendall_w": one.value, "p": one.p, "networks": one.n, "method": one.method, "note": one.note}
