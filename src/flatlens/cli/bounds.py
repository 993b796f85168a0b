"""`flatlens bounds`: which theorems speak of one network, and how tight they are on it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from flatlens.cli.bar import Bar
from flatlens.cli.cost import announce
from flatlens.cli.inputs import Inputs
from flatlens.cli.names import Names, all_names
from flatlens.cli.output import Flag, note, require_writable, show, show_json, stdout_to_stderr
from flatlens.errors import BadInput

if TYPE_CHECKING:
    from flatlens.bounds import BoundsReport
    from flatlens.distributions import Distribution
    from flatlens.problem import Problem


def bounds(
    model: str,
    /,
    *,
    inputs: Inputs = Inputs(),  # noqa: B008 (frozen)
    bounds: Names = (),
    assume: Names = (),
    delta: float | None = None,
    distribution: Literal["cube", "sphere"] | None = None,
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
        delta: A radius, in the input's units, within which the samples cover the data's support.
        distribution: What the data was drawn from, uniformly: the unit cube, or the unit sphere, of the input's
            dimension. Others, and a target function, from Python.
        page: Write an HTML page, with the chain from sensitivity to sharpness as a picture.
        seed: Of random draws.
        strict: Exit with 1 if a bound is violated.
        as_json: Print JSON.
    """
    import torch

    import flatlens as fl

    require_writable(page, "--page")
    problem = inputs.problem(model)
    with stdout_to_stderr(), Bar() as bar:
        lens = fl.Lens(problem, outputs="exact")
        check = partial(
            fl.check_bounds,
            bounds=all_names(bounds) or None,
            assume=all_names(assume),
            distribution=_law(distribution, problem),
            delta=delta,
        )
        announce(lens, check, anyway=inputs.anyway)
        found = check(lens, generator=torch.Generator().manual_seed(seed), progress=bar)
    _show(found, fl.measures.about(lens), page, as_json)
    return 1 if strict and found.violated else 0


def _law(name: str | None, problem: Problem) -> Distribution | None:
    """The distribution of that name in the dimension of the data."""
    from torch import Tensor

    from flatlens.distributions import Cube, Sphere

    if name is None:
        return None
    batch = next(problem.data.chunks(1))
    x = batch[0] if isinstance(batch, tuple) else batch
    if not isinstance(x, Tensor):
        raise BadInput(f"--distribution {name}: one tensor of inputs is needed")
    M = x[0].numel()
    return Cube(M) if name == "cube" else Sphere(M - 1)


def _show(found: BoundsReport, about: dict[str, Any], page: Path | None, as_json: bool) -> None:
    """The page, and JSON or the screen."""
    from flatlens.report.bounds import bounds_screen, write_bounds_page

    if page is not None:
        note(f"page written: {write_bounds_page(found, about, page)}")
    if as_json:
        show_json({"about": about, "bounds": found.frame().to_dict("records")})
    else:
        show(bounds_screen(found))
