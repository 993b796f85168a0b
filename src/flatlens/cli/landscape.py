"""The commands on what lies between and around networks: `flatlens path` and `flatlens plane`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from flatlens.cli.inputs import How, Inputs, generator_of, split_names
from flatlens.cli.networks import Compared, Files, reading
from flatlens.cli.terminal import Flag, Json, Whole, or_cost, page_beside, require_own, saved, show, show_json
from flatlens.errors import BadInput

if TYPE_CHECKING:
    from flatlens.problem import Problem


@Parameter(name="*")
@dataclass(frozen=True)
class Between:
    """Two checkpoints of one architecture, and their data."""

    data: str | None = None
    """The data, as for `flatlens measure`; the same for both. Networks of studies have their own, which must agree."""

    loss: str | None = None
    """The loss, as for `flatlens measure`; the same for both."""

    weights: Files = ()
    """Weights to load, as for `flatlens measure`: one file for each MODEL, in order, or two for one MODEL; separated by
    commas, or repeat the option."""

    how: How = How()  # noqa: RUF009 (frozen)

    def problems(self, models: Sequence[str]) -> tuple[Problem, Problem]:
        """Return the problem of either network; the data is read once."""
        several = Compared(data=self.data, loss=self.loss, weights=self.weights, how=self.how)
        found = list(several.problems(models, {}).values())
        if len(found) != 2:
            raise BadInput(f"expected two networks, got {len(found)}", argument="model")
        return found[0], found[1]


@or_cost
def path_between(
    *models: str,
    pair: Between = Between(),
    match_neurons: Annotated[bool, Flag] = False,
    bends: Whole = 0,
    points: Whole = 17,
    steps: Whole = 500,
    lr: float = 0.01,
    batch_size: Whole = 128,
    rtol: float = 0.02,
    page: Path | None = None,
    save: Path | None = None,
    seed: Whole = 0,
    strict: Annotated[bool, Flag] = False,
    as_json: Json = False,
) -> int:
    """Measure the loss between two checkpoints: are they in one basin, and how certain is it?

    For example:

        flatlens path net.py:build --weights a.pt --weights b.pt --data net.py:samples --loss cross_entropy
        flatlens path net.py:build --weights a.pt,b.pt --data digits --match-neurons --bends 1 --page path.html

    BatchNorm's statistics are computed anew at every point.

    Args:
        models: Two, as for `flatlens measure`; or one, with two --weights.
        pair: Two checkpoints of one architecture, and their data.
        match_neurons: Put the neurons of the second network in the order nearest to those of the first.
        bends: Bends of a Bezier curve that is trained between them; 0 is the line alone.
        points: Number of even looks at each path; more are added where the maximum may lie.
        steps: Steps that train the curve.
        lr: Learning rate of Adam for the bends.
        batch_size: Samples of each step.
        rtol: The rise above the chord up to which a path joins them, as a share of the loss of constant outputs.
        page: Write an HTML page, with a picture.
        save: Save the result in this file; `flatlens.LossPath.load` reads it.
        seed: Seed of the samples that train the curve.
        strict: Exit with 1 unless a path joins them.
        as_json: Print JSON.
    """
    require_own(save, "--save")
    with reading(models, pair.how, page) as bar:
        import flatlens as fl
        from flatlens.report.landscape import landscape_screen, write_landscape_page

        first, second = pair.problems(models)
        options: dict[str, Any] = {"match_neurons": match_neurons, "bends": bends, "points": points, "steps": steps,
                                   "lr": lr, "batch_size": batch_size, "rtol": rtol}  # fmt: skip
        lens = fl.Lens(first)
        pair.how.announced(bar, lens, partial(fl.path, b=second, **options))
        found = fl.path(lens, second, **options, generator=generator_of(seed), progress=bar)
        kept = saved(found, save, "result")
        page_beside(page, bar, partial(write_landscape_page, found))
    if as_json:
        show_json({
            "answer": found.answer, "joined": found.joined, "about": found.about,
            "paths": found.table().to_dict("records"), "looks": found.frame().to_dict("records"),
        })  # fmt: skip
    else:
        show(landscape_screen(found))
    return 2 if not kept else 1 if strict and found.joined is not True else 0


@or_cost
def plane_around(
    model: str,
    /,
    *,
    inputs: Inputs = Inputs(),  # noqa: B008 (frozen)
    directions: Literal["eigenvectors", "random"] = "eigenvectors",
    checkpoints: Files = (),
    points: Whole = 21,
    extent: float | None = None,
    rtol: float = 0.1,
    page: Path | None = None,
    save: Path | None = None,
    seed: Whole = 0,
    as_json: Json = False,
) -> int:
    """Measure the loss around a network, on a plane and along its two directions: how far does its quadratic hold?

    For example:

        flatlens plane net.py:build --weights net.pt --data net.py:samples --loss cross_entropy --page plane.html
        flatlens plane net.py:build --weights 9.pt --checkpoints 1.pt,3.pt,6.pt --data net.py:samples

    Args:
        model: As for `flatlens measure`.
        inputs: The network's data, loss and weights, and how to measure.
        directions: The two leading eigenvectors of the Hessian, or random ones with the norm of each filter.
        checkpoints: Weights of earlier moments of the training, in order: the plane then has the two principal
            components of their differences from the network. Separated by commas, or repeat the option.
        points: Number of points along each direction.
        extent: The largest number of steps of either direction. Without it: as far as the network's loss matters.
        rtol: The difference up to which the quadratic holds, as a share of its second order.
        page: Write an HTML page, with pictures.
        save: Save the result in this file; `flatlens.LossPlane.load` reads it.
        seed: Seed of random directions, and of the search for eigenvectors.
        as_json: Print JSON.
    """
    require_own(save, "--save")
    with reading([model], inputs.how, page) as bar:
        import flatlens as fl
        from flatlens.models.weights import load_weights
        from flatlens.problem.eval_context import copy_of
        from flatlens.report.landscape import landscape_screen, write_landscape_page

        problem = inputs.problem(model)
        lens, along = fl.Lens(problem), []
        for file in [Path(one) for given in checkpoints for one in split_names(str(given))]:
            network = copy_of(problem.model, "--checkpoints")
            load_weights(network, file, inputs.how.prefix)
            along.append(network)
        work = partial(fl.plane, directions=along or directions, points=points, extent=extent, rtol=rtol)
        inputs.how.announced(bar, lens, work)
        found = work(lens, generator=generator_of(seed), progress=bar)
        kept = saved(found, save, "result")
        page_beside(page, bar, partial(write_landscape_page, found))
    if as_json:
        show_json({
            "answer": found.answer, "about": found.about, "quadratic": found.table().to_dict("records"),
            "slices": found.slice_frame().to_dict("records"), "plane": found.frame().to_dict("records"),
        })  # fmt: skip
    else:
        show(landscape_screen(found))
    return 0 if kept else 2
