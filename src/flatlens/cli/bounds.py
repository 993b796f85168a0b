"""`flatlens bounds`: which theorems speak of one network, and how tight they are on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from flatlens.cli.bar import Bar
from flatlens.cli.inputs import Inputs
from flatlens.cli.measure import split_names
from flatlens.cli.output import Flag, note, require_writable, show, show_json, stdout_to_stderr


def bounds(
    model: str,
    /,
    *,
    inputs: Inputs = Inputs(),  # noqa: B008 (frozen)
    bounds: Annotated[Sequence[str], Parameter(negative="", show_default=False)] = (),
    assume: Annotated[Sequence[str], Parameter(negative="", show_default=False)] = (),
    page: Path | None = None,
    seed: int = 0,
    strict: Annotated[bool, Flag] = False,
    as_json: Annotated[bool, Flag, Parameter(name="--json")] = False,
) -> int:
    """Check on one network the inequalities that tie flatness, compression and generalisation together.

    For example:

        flatlens bounds net.py:build --weights net.pt --data net.py:samples --loss half_squared_error --page bounds.html

    Args:
        model: As of `flatlens measure`.
        bounds: Which ones, with commas between or the option repeated; `flatlens list bounds` has the names. Without
            it: all that one pass over the data serves.
        assume: What no sample can check and you vouch for, such as `convex_support`; shown as declared.
        page: Write an HTML page, with the chain from sensitivity to sharpness as a picture.
        seed: Of random draws.
        strict: Exit with 1 if a bound is violated: an error in flatlens, or in a theorem.
        as_json: Print JSON.
    """
    import torch

    import flatlens as fl

    require_writable(page, "--page")
    problem = inputs.problem(model)
    chosen, vouched = ([name for part in parts for name in split_names(part)] for parts in (bounds, assume))
    with stdout_to_stderr(), Bar() as bar:
        lens = fl.Lens(problem, outputs="exact")
        found = fl.check_bounds(
            lens, chosen or None, assume=vouched, generator=torch.Generator().manual_seed(seed), progress=bar
        )
    about = fl.measures.about(lens)
    if page is not None:
        from flatlens.report.bounds import write_bounds_page

        note(f"page written: {write_bounds_page(found, about, page)}")
    if as_json:
        show_json({"about": about, "bounds": found.frame().to_dict("records")})
    else:
        from flatlens.report.bounds import bounds_screen

        show(bounds_screen(found))
    return 1 if strict and found.violated else 0
