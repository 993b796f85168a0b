"""`flatlens invariance`: the numbers of one network that depend on how its weights are written."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

from flatlens.cli.bar import MEASURING, READING, TRYING, Bar, write_page
from flatlens.cli.cost import announce
from flatlens.cli.inputs import Inputs, generator_of
from flatlens.cli.names import Names, all_names
from flatlens.cli.output import Flag, Json, Whole, require_page, show, show_json, stdout_to_stderr
from flatlens.cli.trust import require_trust
from flatlens.progress import no_progress


def invariance(
    model: str,
    /,
    *,
    inputs: Inputs = Inputs(),  # noqa: B008 (frozen)
    measures: Names = (),
    transforms: Names = (),
    page: Path | None = None,
    seed: Whole = 0,
    strict: Annotated[bool, Flag] = False,
    as_json: Json = False,
) -> int:
    """Change the weights of one network without changing its function, and see which of its numbers stay.

    For example:

        flatlens invariance net.py:build --weights net.pt --data net.py:samples --loss cross_entropy
        flatlens invariance runs/digits/networks/0123456789ab --measures relative_flatness,hessian_trace

    Args:
        model: As for `flatlens measure`.
        inputs: The network's data, loss and weights, and how to measure.
        measures: The measures, separated by commas, or repeat the option; `flatlens list measures` has the names.
            Without it: all that one pass over the data gives.
        transforms: The transforms, in the same form; `flatlens list transforms` has the names. Without it: all that are
            valid in this network.
        page: Write the table, and what each transform did, as an HTML page.
        seed: Seed of random factors and permutations, and of estimates.
        strict: Exit with 1 if a number changes that is declared to stay: an error in flatlens, or in a theorem.
        as_json: Print JSON.
    """
    require_page(page)
    require_trust([model], inputs.how.trust)
    with stdout_to_stderr(), Bar(stage=READING) as bar:
        import flatlens as fl
        from flatlens.transforms import TRANSFORMS

        problem = inputs.problem(model)
        lens, generator = fl.Lens(problem), generator_of(seed)
        asked, moves = all_names(measures, "--measures") or None, all_names(transforms, "--transforms") or None
        bar.stage(TRYING)
        work = partial(fl.measure, measures=asked, progress=no_progress)
        announce(lens, work, times=1 + len(moves or TRANSFORMS), anyway=inputs.how.anyway)
        bar.stage(MEASURING)
        found = fl.check_invariance(lens, asked, moves, anyway=inputs.how.anyway, generator=generator, progress=bar)
        if page is not None:
            from flatlens.report.invariance import write_invariance_page

            write_page(page, bar, lambda: write_invariance_page(found, page))
    if as_json:
        applied = {name: asdict(one) for name, one in found.moved.items()}
        rows = found.frame().to_dict("records")
        show_json({"about": found.about, "transforms": applied, "left_out": found.left_out, "cells": rows})
    else:
        from flatlens.report.invariance import invariance_screen

        show(invariance_screen(found))
    return 1 if strict and found.disagreeing else 0
