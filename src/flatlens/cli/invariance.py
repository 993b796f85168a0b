"""`flatlens invariance`: which of one network's numbers are artefacts of how its weights are written."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from flatlens.cli.bar import DRAWING, MEASURING, READING, TRYING, Bar
from flatlens.cli.cost import announce
from flatlens.cli.inputs import Inputs, generator_of
from flatlens.cli.names import Names, all_names
from flatlens.cli.output import Flag, note, require_page, show, show_json, stdout_to_stderr


def invariance(
    model: str,
    /,
    *,
    inputs: Inputs = Inputs(),  # noqa: B008 (frozen)
    measures: Names = (),
    transforms: Names = (),
    page: Path | None = None,
    seed: int = 0,
    strict: Annotated[bool, Flag] = False,
    as_json: Annotated[bool, Flag, Parameter(name="--json")] = False,
) -> int:
    """Move the weights of one network without moving its function, and see which of its numbers stay.

    For example:

        flatlens invariance net.py:build --weights net.pt --data net.py:samples --loss cross_entropy
        flatlens invariance runs/digits/networks/0123456789ab --measures relative_flatness,hessian_trace

    Args:
        model: As of `flatlens measure`.
        measures: Which ones, with commas between or the option repeated; `flatlens list measures` has the names.
            Without it: all that one pass over the data gives.
        transforms: Which ones, likewise; `flatlens list transforms` has the names. Without it: all that are valid in
            this network.
        page: Write the table, and what each transform did, as an HTML page.
        seed: Of random factors and orders, and of the draws of estimates.
        strict: Exit with 1 if a number moves that is declared to stay: an error in flatlens, or in a theorem.
        as_json: Print JSON.
    """
    require_page(page)
    with stdout_to_stderr(), Bar(stage=READING) as bar:
        import flatlens as fl
        from flatlens.transforms import TRANSFORMS

        problem = inputs.problem(model)
        lens, generator = fl.Lens(problem), generator_of(seed)
        asked, moves = all_names(measures) or None, all_names(transforms) or None
        bar.stage(TRYING)
        work = partial(fl.measure, measures=asked)
        announce(lens, work, times=1 + len(moves or TRANSFORMS), anyway=inputs.anyway)
        bar.stage(MEASURING)
        found = fl.check_invariance(lens, asked, moves, generator=generator, progress=bar)
        if page is not None:
            from flatlens.report.invariance import write_invariance_page

            bar.stage(DRAWING)
            note(f"page written: {write_invariance_page(found, page)}")
    if as_json:
        applied = {name: asdict(one) for name, one in found.moved.items()}
        rows = found.frame().to_dict("records")
        show_json({"about": found.about, "transforms": applied, "left_out": found.left_out, "cells": rows})
    else:
        from flatlens.report.invariance import invariance_screen

        show(invariance_screen(found))
    return 1 if strict and found.disagreeing else 0
