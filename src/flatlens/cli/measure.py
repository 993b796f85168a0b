"""`flatlens measure`: one network, its numbers, and which of them to trust."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from flatlens.cli.bar import DELAY, Bar, in_words
from flatlens.cli.inputs import Inputs
from flatlens.cli.output import Flag, note, show, show_json, stdout_to_stderr
from flatlens.errors import BadFolder

if TYPE_CHECKING:
    from flatlens.problem import Problem


def measure(
    model: str,
    /,
    *,
    inputs: Inputs = Inputs(),  # noqa: B008 (frozen)
    measures: Annotated[Sequence[str], Parameter(negative="", show_default=False)] = (),
    save: Path | None = None,
    seed: int = 0,
    as_json: Annotated[bool, Flag, Parameter(name="--json")] = False,
) -> None:
    """Measure one network, and say which of its numbers survive a rescaling of the weights.

    For example:

        flatlens measure net.py:build --weights net.pt --data net.py:samples --loss cross_entropy
        flatlens measure runs/digits/networks/0123456789ab --measures mls --measures "local_volume(top_k=3)"

    Args:
        model: `file.py:NAME`, a function without arguments that returns the network; the folder of a study's network
            (OUT/networks/KEY); `timm:NAME`; `hf:NAME` or `hf:FOLDER`.
        measures: What to measure, with commas between or the option repeated; `flatlens list measures` has the names.
            Without it: all that one pass over the data gives.
        save: Keep the report, per-sample values and all, in this file; `flatlens.Report.load` reads it.
        seed: Of the random numbers that estimates are drawn with; exact measures use none.
        as_json: Print JSON.
    """
    import torch

    import flatlens as fl

    if save is not None and not save.absolute().parent.is_dir():  # told now, not after the work
        raise BadFolder(f"--save {save}: there is no folder {save.parent}")
    problem = inputs.problem(model)
    names = [name for part in measures for name in split_names(part)]
    with stdout_to_stderr(), Bar(_expected(problem)) as bar:
        found = fl.measure(fl.Lens(problem), names or None, generator=torch.Generator().manual_seed(seed), progress=bar)
    if save is not None:
        found.save(save)
        note(f"report saved in {save}")
    if as_json:
        show_json({"about": found.about, "estimates": found.frame().to_dict("records")})
        return
    from flatlens.report.tables import measure_screen

    show(measure_screen(found, fl.catalogue()))


def split_names(text: str) -> list[str]:
    """The names in a comma-separated list; a comma between brackets belongs to a measure's options.

    >>> split_names("mls, local_volume(top_k=3, log=True),nmls")
    ['mls', 'local_volume(top_k=3, log=True)', 'nmls']
    """
    names, depth = [""], 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            names.append("")
        else:
            names[-1] += letter
    return [name.strip() for name in names if name.strip()]


def _expected(problem: Problem) -> str:
    """What work that lasts consists of, and about how long it takes; empty for short work."""
    import torch

    from flatlens.problem import measuring

    batch = problem.place(next(problem.data.chunks(256)))
    model = problem.measured()
    start = time.monotonic()
    with measuring(model), torch.no_grad():
        outputs, _ = problem.run(model, batch)
    # A backward pass costs about two forward ones.
    seconds = (time.monotonic() - start) / len(outputs) * problem.n * (1 + 2 * problem.outputs)
    if seconds < DELAY:
        return ""
    size = f"{sum(p.numel() for p in problem.model.parameters()):,} parameters, {problem.n:,} samples"
    passes = f"1 forward and {problem.outputs} backward passes"
    return f"{size}, {passes}: about {in_words(seconds)}, in about {problem.memory / 2**30:.2g} GiB of memory"
