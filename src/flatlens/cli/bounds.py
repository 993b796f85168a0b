"""`flatlens bounds`: the theorems that apply to one network, and how tight they are on it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from flatlens.cli.bar import MEASURING, READING, TRYING, Bar, write_page
from flatlens.cli.cost import announce
from flatlens.cli.inputs import Inputs, generator_of
from flatlens.cli.names import Names, all_names
from flatlens.cli.output import Flag, Json, Whole, require_page, show, show_json, stdout_to_stderr
from flatlens.cli.trust import require_trust
from flatlens.errors import BadInput
from flatlens.progress import no_progress

if TYPE_CHECKING:
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
    seed: Whole = 0,
    strict: Annotated[bool, Flag] = False,
    as_json: Json = False,
) -> int:
    """Check on one network the inequalities that tie flatness, compression and generalisation together.

    For example:

        flatlens bounds net.py:build --weights net.pt --data net.py:samples --loss half_squared_error --page bounds.html

    Args:
        model: As for `flatlens measure`.
        inputs: The network's data, loss and weights, and how to measure.
        bounds: The bounds to check, separated by commas, or repeat the option; `flatlens list bounds` has the names.
            Without it: all that one pass over the data can check.
        assume: Assumptions that samples cannot check and that you declare to hold, such as `convex_support`; shown as
            declared.
        delta: A radius, in the input's units, within which the samples cover the data's support.
        distribution: The distribution that the data was drawn from: uniform on the unit cube or on the unit sphere, in
            the dimension of the input. Other distributions, and a target function: in Python.
        page: Write an HTML page, with a picture of the chain from sensitivity to sharpness.
        seed: Seed of the random numbers.
        strict: Exit with 1 if a bound is violated.
        as_json: Print JSON.
    """
    require_page(page)
    require_trust([model], inputs.how.trust)
    with stdout_to_stderr(), Bar(stage=READING) as bar:
        import flatlens as fl

        problem = inputs.problem(model)
        lens, generator = fl.Lens(problem, outputs="exact"), generator_of(seed)
        check = partial(
            fl.check_bounds,
            bounds=all_names(bounds, "--bounds") or None,
            assume=all_names(assume, "--assume"),
            distribution=_law(distribution, problem),
            delta=delta,
        )
        bar.stage(TRYING)
        announce(lens, partial(check, progress=no_progress), anyway=inputs.how.anyway)
        bar.stage(MEASURING)
        found = check(lens, anyway=inputs.how.anyway, generator=generator, progress=bar)
        if page is not None:
            from flatlens.report.bounds import write_bounds_page

            write_page(page, bar, lambda: write_bounds_page(found, page))
    if as_json:
        show_json({"about": found.about, "bounds": found.frame().to_dict("records")})
    else:
        from flatlens.report.bounds import bounds_screen

        show(bounds_screen(found))
    return 1 if strict and found.violated else 0


def _law(name: str | None, problem: Problem) -> Distribution | None:
    """Return the distribution of that name, in the dimension of the data."""
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
