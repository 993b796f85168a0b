"""fl.compare: networks, or groups of networks, measured in the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Literal, overload

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from flatlens.comparing.comparison import DIFFERENT, Comparison
from flatlens.comparing.groups import GroupComparison
from flatlens.errors import BadInput
from flatlens.measures import MEASURES, Lens, measure
from flatlens.measures.definition import PRESETS, RISK_FAMILY, Choice, asked_for, drawing
from flatlens.problem import Problem
from flatlens.problem.batches import FORWARD_CHUNK, checksum
from flatlens.problem.data import Data
from flatlens.progress import Shown, progress_shown

SAME_LOSS = "they must be measured under one loss"


def require_alike(lenses: Mapping[str, Lens]) -> None:
    """Refuse networks that are not measured on the same task and data; name the first two that differ."""
    if not isinstance(lenses, Mapping) or not all(isinstance(lens, Lens) for lens in lenses.values()):
        such = 'such as compare({"a": Lens(...), "b": Lens(...)})'
        raise BadInput(f"expected a dict of name -> Lens, {such}", call="compare")
    if len(lenses) < 2:
        raise BadInput(f"expected at least two networks, got {len(lenses)}", call="compare")
    for (a, first), (b, second) in combinations(lenses.items(), 2):
        if first.problem.model is second.problem.model:
            raise BadInput(
                f"compare(...): {a} and {b} use the same model object: make one model for each checkpoint "
                f"(copy.deepcopy, or load the weights into a new one)"
            )
    (a, first), *others = lenses.items()
    for b, lens in others:
        for (what, mine, advice), (_, theirs, _) in zip(_facts(first.problem), _facts(lens.problem), strict=True):
            if mine != theirs:
                raise BadInput(f"{what} of {a}: {mine}, of {b}: {theirs}; {advice}", call="compare")
    # the same bytes in the same order; a shared data object is read once
    for which, name in (("data", "data"), ("test", "held-out data")):
        given = {model: getattr(lens.problem, which) for model, lens in lenses.items()}
        differing = [b for b, data in given.items() if data is not given[a]]
        expected = _print(given[a]) if differing else 0
        if others_data := [b for b in differing if _print(given[b]) != expected]:
            pair = f"{a} and {others_data[0]}"
            raise BadInput(f"the {name} of {pair} differ: give all the same, in the same order", call="compare")
    # the same losses of the first network's outputs: a description does not tell two functions apart
    problem = first.problem
    with problem.measuring(first.model), torch.no_grad():
        f, y = problem.run(first.model, problem.place(problem.probes[0]))
        f = f.to(torch.float64)
        of_first = problem.loss.values(f, y)
        for b, lens in others:
            losses = lens.problem.loss.values(f, y)
            if not torch.allclose(of_first, losses, rtol=1e-6, atol=1e-12, equal_nan=True):
                at = int((of_first - losses).abs().argmax())
                raise BadInput(
                    f"compare(...): the losses of {a} and {b} differ: {float(of_first[at]):.6g} and "
                    f"{float(losses[at]):.6g} for the same outputs of a sample; {SAME_LOSS}"
                )


def _facts(problem: Problem) -> list[tuple[str, object, str]]:
    # What must be equal, its value, and the advice if it is not
    ghost = "eval" if problem.ghost_batch is None else f"train, ghost_batch={problem.ghost_batch}"
    held_out = "none" if problem.test is None else "given"
    return [
        ("loss", problem.loss.description, SAME_LOSS),
        ("samples", problem.n, "they must be measured on the same data"),
        ("outputs", problem.outputs, "they must answer the same task"),
        ("held-out data", held_out, "give the same test data to all, or to none"),
        ("batchnorm", ghost, "give all the same batchnorm and ghost_batch"),
    ]


def _print(data: Data) -> int:
    found = 0
    for batch in data.chunks(FORWARD_CHUNK):
        for leaf in tree_leaves(batch):
            found = checksum(leaf, start=found) if isinstance(leaf, Tensor) else found
    return found


def same_architecture(lenses: Mapping[str, Lens]) -> bool:
    """Return whether the networks have parameters of the same names and shapes."""
    shapes = [[(name, p.shape) for name, p in lens.problem.model.named_parameters()] for lens in lenses.values()]
    return all(shape == shapes[0] for shape in shapes)


@overload
def compare(
    lenses: Mapping[str, Lens],
    measures: Choice = None,
    *,
    groups: None = None,
    paired: Literal[False] = False,
    anyway: bool = False,
    generator: torch.Generator | None = None,
    progress: Shown = None,
) -> Comparison: ...


@overload
def compare(
    lenses: None = None,
    measures: Choice = None,
    *,
    groups: Mapping[str, Sequence[Lens]],
    paired: bool = False,
    anyway: bool = False,
    generator: torch.Generator | None = None,
    progress: Shown = None,
) -> GroupComparison: ...


def compare(
    lenses: Mapping[str, Lens] | None = None,
    measures: Choice = None,
    *,
    groups: Mapping[str, Sequence[Lens]] | None = None,
    paired: bool = False,
    anyway: bool = False,
    generator: torch.Generator | None = None,
    progress: Shown = None,
) -> Comparison | GroupComparison:
    """Compare networks, or groups of networks: an answer, ranks or differences by each measure.

    All must be measured under the same loss on the same data, and all or none have held-out data. Every network sees
    the same random draws, so that what they share does not tell them apart.

    >>> import torch, flatlens as fl
    >>> data = (torch.ones(4, 3), torch.zeros(4, 2))
    >>> def lens(): return fl.Lens(fl.Problem(torch.nn.Linear(3, 2), "mse", data))
    >>> compare({"a": lens(), "b": lens()}, "mls")["mls", "a"].kind
    'exact'
    >>> compare(None, "mls", groups={"a": [lens() for _ in range(3)], "b": [lens() for _ in range(3)]})["mls"][0].scale
    'ratio'

    Args:
        lenses: The networks by the names to show; 1 is the rank of the smallest value.
        measures: Names or Measure objects; one alone is enough; or a preset of `measure`. None is "summary".
        groups: Instead of `lenses`, the networks of each group, such as one network per seed; each group is compared
            with the first one.
        paired: Whether the networks at the same place of each group are a pair: they share a seed.
        anyway: Whether to do work that `measure` refuses because it takes long.
        generator: Draws the random numbers; seeded with 0 if None.
        progress: Called with (what, done, total); None shows a bar after two seconds, False shows none.

    Raises:
        BadInput: fewer than two networks, two names of one model object, losses or data that differ, or pairs that are
            not complete.
    """
    if (lenses is None) == (groups is None):
        raise BadInput("give either networks or groups of networks", argument="groups", call="compare")
    if groups is None:
        assert lenses is not None
        if paired:
            raise BadInput("only groups have pairs", argument="paired", value=True, call="compare")
        return _networks(lenses, measures, anyway, generator, progress)
    such = 'such as compare(groups={"SGD": [Lens(...), ...], "SAM": [Lens(...), ...]})'
    if not isinstance(groups, Mapping) or not all(isinstance(of, Sequence) for of in groups.values()):
        raise BadInput(f"expected a dict of name -> list of Lens, {such}", argument="groups", call="compare")
    sizes = {str(name): len(of) for name, of in groups.items()}
    each = ", ".join(f"{name} has {size}" for name, size in sizes.items())
    if len(sizes) < 2 or min(sizes.values()) < 1:
        raise BadInput(f"compare(groups=...): expected at least two groups of networks{f': {each}' if each else ''}")
    if paired and len(set(sizes.values())) > 1:
        raise BadInput(f"compare(paired=True): pairs need groups of one size: {each}")
    names = {group: tuple(f"{group} {number}" for number in range(1, len(of) + 1)) for group, of in groups.items()}
    every = {name: lens for group, of in groups.items() for name, lens in zip(names[group], of, strict=True)}
    return GroupComparison(_networks(every, measures, anyway, generator, progress), names, paired)


def _networks(
    lenses: Mapping[str, Lens],
    measures: Choice,
    anyway: bool,
    generator: torch.Generator | None,
    progress: Shown,
) -> Comparison:
    # what is asked can be ranked by
    require_alike(lenses)
    draws = drawing(generator, progress, "compare")
    asked = asked_for(measures)
    if all(one.card.family == RISK_FAMILY for one in asked.measures):
        names = ", ".join(one.key for one in asked.measures) or "none"
        mend = "name at least one other measure; loss, accuracy and gap are always shown"
        raise BadInput(f"{names} gives nothing to rank by", argument="measures", remedy=mend, call="compare")
    # every network is measured with the same random draws; the risk and, with held-out data, the gap are always shown
    seed = 0 if generator is None else int(torch.randint(2**40, (), generator=draws))
    keys = {one.key for one in asked.measures}
    risk = [one for one in MEASURES.values() if one.card.family == RISK_FAMILY and one.key not in keys]
    reports = {}
    with progress_shown(progress) as line:
        for done, (name, lens) in enumerate(lenses.items()):
            line("networks", done, len(lenses))
            more = [one for one in risk if lens.problem.test is not None or not one.held_out]
            together = asked.preset if asked.preset in PRESETS else [*asked.measures, *more]
            draw = torch.Generator().manual_seed(seed)
            reports[name] = measure(lens, together, anyway=anyway, generator=draw, progress=line)
        line("networks", len(lenses), len(lenses))
    # ranked is what the networks have a number for, except the risk
    known = {row: one for row, one in asked.answers.items() if one.card.family != RISK_FAMILY}
    ranked = {row: one for row, one in known.items() if all((row, None) in report for report in reports.values())}
    # the differences that are allowed have a sentence each
    told, alike = [], same_architecture(lenses)
    if not alike:
        sizes = {name: sum(p.numel() for p in lens.problem.model.parameters()) for name, lens in lenses.items()}
        told.append(
            f"The networks {DIFFERENT} (parameters: {', '.join(f'{name} {size:,}' for name, size in sizes.items())}): "
            "measures that sum over parameters or layers, or use units of a layer's features, also depend on the "
            "architecture itself."
        )
    for what, values in {
        "precision": {name: str(lens.problem.dtype).removeprefix("torch.") for name, lens in lenses.items()},
        "combinations of outputs": {name: str(lens.probes or "all") for name, lens in lenses.items()},
    }.items():
        if len(set(values.values())) > 1:
            told.append(f"They differ in {what}: {', '.join(f'{name} {value}' for name, value in values.items())}.")
    if len({tuple(sorted(lens.problem.parameters)) for lens in lenses.values()}) > 1 and not told:
        told.append("They differ in which parameters are measured.")
    return Comparison(reports, ranked, tuple(told), alike)
