"""fl.compare: several networks, measured in the same way and ranked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from flatlens.comparing.alike import remarks, require_alike
from flatlens.comparing.comparison import Comparison
from flatlens.comparing.direction import RISK_FAMILY
from flatlens.errors import BadInput
from flatlens.estimate import Progress
from flatlens.measures import MEASURES, Lens, Measure, measure, named
from flatlens.problem.checks import drawing
from flatlens.progress import or_line


def compare(
    lenses: Mapping[str, Lens],
    measures: str | Measure | Iterable[str | Measure] | None = None,
    *,
    anyway: bool = False,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Rank networks by each measure; 1 is the smallest value.

    All must be measured under the same loss on the same data, and all or none have held-out data. Every network sees
    the same random draws, so that what they share does not tell them apart.

    Args:
        lenses: The networks by the names to show.
        measures: Names or Measure objects; one alone is enough. None is every exact one-pass measure.
        anyway: Whether to do work that `measure` refuses because it takes long.
        generator: Draws the random numbers; seeded with 0 if None.
        progress: Called with (what, done, total); None shows a line if stderr is a terminal.

    Raises:
        BadInput: fewer than two networks, two names of one model object, or losses or data that differ.
    """
    require_alike(lenses)
    draws = drawing(generator, progress, "compare")
    chosen = None if measures is None else _ranking(named(measures))
    progress = or_line(progress)
    seed = 0 if generator is None else int(torch.randint(2**40, (), generator=draws))
    reports = {}
    for done, (name, lens) in enumerate(lenses.items()):
        if progress:
            progress("networks", done, len(lenses))
        asked = None if chosen is None else [*chosen, *_beside(chosen, lens)]
        draw = torch.Generator().manual_seed(seed)
        reports[name] = measure(lens, asked, anyway=anyway, generator=draw, progress=progress)
    if progress:
        progress("networks", len(lenses), len(lenses))
    keys = {key for report in reports.values() for key, layer in report if layer is None}
    ranked = [one for one in (MEASURES.values() if chosen is None else chosen) if one.card.family != RISK_FAMILY]
    return Comparison(reports, {one.key: one for one in ranked if one.key in keys}, remarks(lenses))


def _ranking(chosen: list[Measure]) -> list[Measure]:
    """Return the requested measures; refuse a list with nothing to rank by."""
    if all(one.card.family == RISK_FAMILY for one in chosen):
        asked = ", ".join(one.key for one in chosen) or "none"
        raise BadInput(f"compare(measures=...): {asked} gives nothing to rank by: name at least one other measure; "
                       f"loss, accuracy and gap are always shown")  # fmt: skip
    return chosen


def _beside(chosen: list[Measure], lens: Lens) -> list[Measure]:
    """Return the risk and, with held-out data, the gap, which are always shown."""
    keys = {one.key for one in chosen}
    risk = [one for one in MEASURES.values() if one.card.family == RISK_FAMILY]
    return [one for one in risk if one.key not in keys and (lens.problem.test is not None or not one.held_out)]
