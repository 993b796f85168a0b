"""fl.check_invariance: which of a network's numbers are unchanged when its weights change and its function does not."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from flatlens.column import Column
from flatlens.errors import BadInput
from flatlens.estimate import Estimate, Progress
from flatlens.measures import MEASURES, Lens, Measure, about, measure, named
from flatlens.problem import Problem
from flatlens.problem.checks import drawing
from flatlens.progress import or_line
from flatlens.transforms.cells import Applied, Cell, InvarianceReport, compare, declared
from flatlens.transforms.registry import TRANSFORMS, named_transforms
from flatlens.transforms.transform import Transform, copied, with_model
from flatlens.transforms.wiring import read_wiring


def check_invariance(
    lens: Lens,
    measures: str | Measure | Iterable[str | Measure] | None = None,
    transforms: str | Transform | Iterable[str | Transform] | None = None,
    *,
    anyway: bool = False,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> InvarianceReport:
    """Measure a network before and after each transform of its weights that leaves its function alone.

    The network itself is not touched: copies in float64 are moved, and their outputs on all the data are compared with
    its own. Random draws are the same on either side. Unchanged means: within rounding (about 1e-6), what a search
    leaves open (0.1%), and 4 combined standard errors.

    Args:
        lens: The network.
        measures: Names or Measure objects; one alone is enough. None is every default measure.
        transforms: Names or Transform objects; one alone is enough. None is every one that is valid in this network.
        anyway: Whether to do work that `measure` refuses because it takes long.
        generator: Draws the random numbers; seeded with 0 if None.
        progress: Called with (what, done, total); None shows a line if stderr is a terminal.

    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)).double()
    >>> from flatlens import Problem
    >>> lens = Lens(Problem(net, "mse", (torch.ones(4, 2).double(), torch.zeros(4, 1).double())))
    >>> report = check_invariance(lens, ["weight_norm", "kappa_trace"], "layerwise")
    >>> [report[name, "layerwise"].unchanged for name in ("weight_norm", "kappa_trace")]
    [False, True]
    """
    if not isinstance(lens, Lens):
        got = type(lens).__name__
        raise BadInput(f"check_invariance(...): a Lens is needed, got {got}: check_invariance(Lens(problem))")
    lens.require_fresh()
    asked, moves = None if measures is None else named(measures), named_transforms(transforms)
    if asked == []:
        raise BadInput(
            "check_invariance(measures=[]): name at least one measure, or leave measures out for all of one pass"
        )
    draws, progress = drawing(generator, progress, "check_invariance"), or_line(progress)
    lens.problem.peers.same_draws(draws)
    seeds = [int(torch.randint(2**40, (), generator=draws)) for _ in range(2)]
    numbers = partial(_numbers, lens, seed=seeds[0], anyway=anyway, progress=progress)
    problem = in_double(lens.problem)
    wiring = read_wiring(problem, copied(problem))
    left_out = {one.name: why for one in moves if (why := one.offer(wiring).refused)}
    moves = [one for one in moves if one.name not in left_out]
    before = numbers(problem, asked) if moves else {}
    found: dict[str, list[Cell]] = {row: [] for row in before}
    applied = {}
    for done, one in enumerate(moves, start=1):
        moved = one.apply(problem, torch.Generator().manual_seed(seeds[1]))
        after = numbers(moved.problem, asked)
        applied[one.name] = Applied.of(moved)
        for row in [row for row in before if row in after]:
            (measured, a), (_, b) = before[row], after[row]
            found[row].append(compare(one, measured, row, a, b, problem.dtype))
        if progress is not None:
            progress("transforms", done, len(moves))
    cells = [cell for of_row in found.values() for cell in of_row]
    return InvarianceReport(cells, applied, left_out, about(lens) | _precision(problem))


def in_double(problem: Problem) -> Problem:
    """Return the problem in float64 if possible: in float32, a change of a percent could pass as rounding."""
    if problem.dtype == torch.float64:
        return problem
    try:
        return with_model(problem, copied(problem).double(), torch.float64)
    except BadInput:  # forward() needs its own precision
        return problem


def _precision(measured: Problem) -> dict[str, str]:
    """Return what `about` says of precision, of the problem that was measured in place of the lens's own."""
    return {"dtype": str(measured.dtype).removeprefix("torch."), "arithmetic": measured.arithmetic}


def _numbers(
    lens: Lens, problem: Problem, asked: list[Measure] | None, *, seed: int, anyway: bool, progress: Progress | None
) -> dict[str, tuple[Measure, Estimate]]:
    """Return the network's answers, and their parts with a declaration, by row.

    Each side looks afresh and draws afresh, so that neither searches from where the other ended.
    """
    fresh = Lens(problem, outputs=lens.probes or "exact")
    together = None if asked is None else [one for one in asked if not one.on_request]
    runs = [] if together == [] else [together]
    runs += [[one] for one in asked or [] if one.on_request]
    known = {one.key: one for one in (MEASURES.values() if asked is None else asked)}
    found = {}
    for each in runs:
        draw = torch.Generator().manual_seed(seed)
        report = measure(fresh, each, anyway=anyway, generator=draw, progress=progress)
        for (row, layer), estimate in report.items():
            one = _measure_of(row, known)
            if layer is None and (row == one.key or _is_declared(one, row)):
                found[row] = one, estimate
    return found


def _measure_of(row: str, known: dict[str, Measure]) -> Measure:
    """Return the measure that a row is a part of.

    >>> _measure_of("kappa_trace.max", MEASURES).key
    'kappa_trace'
    """
    return known[Column.parse(row).measure]


def _is_declared(one: Measure, row: str) -> bool:
    return declared(one, row, TRANSFORMS["layerwise"]) is not None
