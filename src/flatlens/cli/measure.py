"""`flatlens measure`: the numbers of one network, and which of them to trust."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from flatlens.cli.bar import MEASURING, READING, TRYING, Bar, write_page
from flatlens.cli.cost import announce
from flatlens.cli.inputs import Inputs, generator_of
from flatlens.cli.names import Names, all_names
from flatlens.cli.output import (
    Flag,
    Json,
    Whole,
    note,
    require_own,
    require_page,
    show,
    show_json,
    stdout_to_stderr,
    written,
)
from flatlens.cli.trust import require_trust
from flatlens.errors import BadInput, UnknownName
from flatlens.files import require_writable
from flatlens.progress import no_progress

if TYPE_CHECKING:
    from flatlens.problem import Problem

PART = "part of a layer's name"


def measure(
    model: str,
    /,
    *,
    inputs: Inputs = Inputs(),  # noqa: B008 (frozen)
    measures: Names = (),
    outputs: str | None = None,
    attention_heads: Annotated[bool, Flag] = False,
    layers: str | None = None,
    page: Path | None = None,
    save: Path | None = None,
    after: Path | None = None,
    seed: Whole = 0,
    as_json: Json = False,
) -> int:
    """Measure one network, and say which of its numbers survive a rescaling of the weights.

    For example:

        flatlens measure net.py:build --weights net.pt --data net.py:samples --loss cross_entropy
        flatlens measure net.py:build --weights 9.pt --data net.py:samples --loss mse --measures sharpness --after pairs
        flatlens measure runs/digits/networks/0123456789ab --measures mls --measures "local_volume(top_k=3)"
        torchrun --nproc-per-node=2 -m flatlens measure timm:resnet18 --data photos/ --loss cross_entropy

    Under torchrun the processes share the samples; --memory holds for each, and the result is that of one process.
    With `--ranks` so do processes that another program started, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Args:
        model: `file.py:NAME` or `package.module:NAME`, a function without arguments that returns the network; the
            folder of a study's network (OUT/networks/KEY); `timm:NAME`; `hf:NAME` or `hf:FOLDER`.
        inputs: The network's data, loss and weights, and how to measure.
        measures: The measures, separated by commas, or repeat the option; `flatlens list measures` has the names.
            Without it: all that one pass over the data gives.
        outputs: `exact`, a backward pass for each of the network's outputs, or a number of random combinations that
            replace them: traces are then estimates, spectral norms lower bounds. Without it: exact up to 128 outputs,
            16 combinations for more.
        attention_heads: Give measures of weights for the projections and heads of attention, too: `attn.qkv/query`
            are the queries' rows in the weight of `attn.qkv`, `attn.qkv/query/0` those of the first head.
        layers: Show every value of the layers whose names contain this, such as `blocks.3.`; curvature
            products that are taken layer by layer are taken for these alone.
        page: Write an HTML page: every number, profiles over the depth, and the layers by block, with a search.
        save: Save the report with its per-sample values in this file; `flatlens.Report.load` reads it.
        after: Searches for eigenvectors start from those that an earlier measurement of the network left in this file,
            if it is there, and leave theirs in it: fewer products for checkpoint after checkpoint.
        seed: Seed of the random numbers of estimates; exact measures use none.
        as_json: Print JSON.
    """
    require_own(save, "--save")
    if after is not None:
        require_writable(after, f"--after {after}")
    require_page(page)
    require_trust([model], inputs.how.trust)
    with stdout_to_stderr(), Bar(stage=READING) as bar:
        import flatlens as fl
        from flatlens.measures.searches import Searches

        earlier = None if after is None or not after.exists() else Searches.load(after).pairs
        problem = inputs.problem(model)
        names = all_names(measures, "--measures")
        _require_layers(problem, layers)
        lens = fl.Lens(problem, outputs=_combinations(outputs), after=earlier, attention_heads=attention_heads)
        generator = generator_of(seed)
        bar.stage(TRYING)
        work = partial(fl.measure, measures=names or None, layers=layers)
        announce(lens, partial(work, progress=no_progress), anyway=inputs.how.anyway)
        bar.stage(MEASURING)
        found = work(lens, anyway=inputs.how.anyway, generator=generator, progress=bar)
        if problem.ranks.rank:  # only the first process writes and prints
            return 0
        kept = True
        if save is not None and (kept := written("--save", lambda: found.save(save))):
            note(f"report saved in {save}")
        if after is not None:
            searches = Searches(lens.remembered, {"model": found.about["model"], "origin": found.about["origin"]})
            kept &= written("--after", lambda: searches.save(after))
        if page is not None:
            from flatlens.report.measured import write_measure_page

            write_page(page, bar, lambda: write_measure_page(found, fl.catalogue(), page))
    if as_json:
        about = {name: value for name, value in found.about.items() if name != "seconds"}
        rows = found.frame()
        seconds = {**found.about["seconds"], **rows[rows["seconds"] > 0].set_index("measure")["seconds"].to_dict()}
        estimates = rows.drop(columns="seconds").to_dict("records")
        show_json({"about": about, "estimates": estimates, "seconds": seconds})
        return 0 if kept else 2
    from flatlens.report.tables import measure_screen

    show(measure_screen(found, fl.catalogue(), layers or ""))
    return 0 if kept else 2


def _require_layers(problem: Problem, wanted: str | None) -> None:
    """Check before the work that some layer's name contains `wanted`."""
    model = problem.model
    known = [name for name, _ in (*model.named_modules(), *model.named_parameters()) if name]
    if wanted is not None and not any(wanted in name for name in known):
        raise UnknownName(f"--layers: {UnknownName.among(PART, wanted, known)}")


def _combinations(outputs: str | None) -> Literal["exact"] | int | None:
    """Return the `outputs` argument of `Lens`."""
    if outputs is None:
        return None
    if outputs == "exact":
        return "exact"
    if not outputs.isdecimal() or len(outputs) > 9:
        raise BadInput(f"--outputs {outputs}: 'exact' or a number of combinations, such as 16, is needed")
    return int(outputs)
