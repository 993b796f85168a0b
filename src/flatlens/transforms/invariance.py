"""fl.check_invariance: which of a network's numbers are unchanged when its weights change and its function does not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any, Self, overload

import pandas as pd
import torch
from torch import Tensor

from flatlens.column import Column
from flatlens.deprecated_names import FORMER_TRANSFORMS
from flatlens.errors import BadInput, UnknownName
from flatlens.estimate import Estimate, Progress
from flatlens.measures import MEASURES, Lens, Measure, PassMeasure, Run, about
from flatlens.measures.definition import RISK_FAMILY, Asked, Choice, asked_for, drawing
from flatlens.measures.pipeline import measure_with
from flatlens.problem import Problem
from flatlens.progress import LIMIT, Shown, Watch, by_key, count_of, listed, progress_shown
from flatlens.result import Result
from flatlens.transforms import attention, neurons  # noqa: F401  # their import registers their transforms
from flatlens.transforms.definition import TRANSFORMS, Moved, Transform, copied, with_model
from flatlens.transforms.wiring import read_wiring


@dataclass(frozen=True)
class Cell:
    """A number before and after a transform.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> problem = fl.Problem(net, "mse", (torch.ones(4, 3), torch.zeros(4, 2)))
    >>> cell = fl.check_invariance(fl.Lens(problem), ["mls"], transforms="permutation")[0]
    >>> cell.measure, cell.unchanged, cell.agrees
    ('mls', True, True)
    """

    measure: str  #: name of the measure, with its part
    transform: str
    before: float
    after: float
    change: float  #: relative to `before`
    stderr: float  #: standard error of after - before
    unchanged: bool | None
    """Whether before and after agree within rounding and error; None if a number is missing or unreliable."""
    declared: bool | None  #: whether it must be unchanged, by the literature and the measure's card; None: not said
    agrees: bool | None
    """Whether the number does what is declared.

    None if nothing is declared, and if a measure that is not declared unchanged is unchanged here: the claim is about
    networks in general.
    """
    note: str = ""


CELL_COLUMNS = [one.name for one in fields(Cell)]


@dataclass(frozen=True)
class Applied:
    """The effect of a transform on the network, and the proof.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> problem = fl.Problem(net, "mse", (torch.ones(4, 3), torch.zeros(4, 2)))
    >>> table = fl.check_invariance(fl.Lens(problem), ["mls"], transforms="permutation")
    >>> table.moved["permutation"].links
    ('0 -> 2',)
    """

    difference: float  #: max |f' - f| over the data
    links: tuple[str, ...]  #: links whose features moved, as `fc1 -> fc2`
    left: Mapping[str, str] = field(default_factory=dict)  #: layers whose features did not move, with the reason
    note: str = ""

    @classmethod
    def of(cls, moved: Moved) -> Applied:
        """Return the facts without the network."""
        return cls(moved.difference, moved.links, dict(moved.left), moved.note)


def possible(lens: Lens, transforms: str | Transform | Iterable[str | Transform] | None = None) -> list[Transform]:
    """Return the transforms, of those named or of all, that are valid in a network."""
    wiring = read_wiring(lens.problem, copied(lens.problem))
    return [one for one in named_transforms(transforms) if not one.offer(wiring).refused]


def named_transforms(transforms: str | Transform | Iterable[str | Transform] | None) -> list[Transform]:
    """Return transforms from names or transforms, one alone is enough; for None, those that are applied unasked.

    >>> named_transforms("layerwise"), len(named_transforms(None))
    ([layerwise], 12)
    """
    if transforms is None:
        return [one for one in TRANSFORMS.values() if one.default]
    found = TRANSFORMS.named(transforms, "check_invariance(transforms=...)")
    if not found:
        raise BadInput(f"check_invariance(transforms=[]): name at least one of {', '.join(TRANSFORMS)}")
    return list(dict.fromkeys(found))


STDERRS = 4.0  #: combined standard errors within which two estimates are equal
_SEARCHED = 1e-3  #: relative error of a search or an iteration
_SHORT = 0.1  #: relative difference; a smaller one may come from one search that stopped too early
UNDECIDED = "undecided: a search may have stopped short on one side; a smaller rtol decides"
ILL = "undecided: the smallest eigenvalues of some samples are rounding"

_TABLE_1 = ("layer_sharpness.kappa", "layer_sharpness.kappa_max"), ("layerwise", "permutation")
"""Parts of a measure whose card is about another number, and what they are invariant under: reparam2019 Table 1."""


class InvarianceReport(Result, Sequence[Cell]):
    """Cells, one a measure and transform; `frame()` is the table.

    `moved` maps a transform to what it did, with the proof that the outputs stayed the same; `left_out` maps a
    transform that does not apply to this network to the reason; `about` says what was measured.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).double()
    >>> problem = fl.Problem(net, "half_squared_error", (torch.ones(4, 3).double(), torch.zeros(4, 2).double()))
    >>> fl.check_invariance(fl.Lens(problem), ["mls"]).disagreeing
    []
    """

    _KIND = "invariance report"

    def __init__(
        self, cells: Iterable[Cell], moved: Mapping[str, Applied], left_out: Mapping[str, str], about: Mapping[str, Any]
    ) -> None:
        self._cells = list(cells)
        self.moved = dict(moved)
        self.left_out = dict(left_out)
        self.about = dict(about)

    @property
    def answer(self) -> list[str]:
        """The answer in at most three sentences: what is not as declared, what stays, the largest change, the proof."""
        return answer_of_invariance(self._cells, self.moved, self.left_out, self.about)

    @overload
    def __getitem__(self, which: int | tuple[str, str]) -> Cell: ...

    @overload
    def __getitem__(self, which: slice) -> list[Cell]: ...

    def __getitem__(self, which: int | tuple[str, str] | slice) -> Cell | list[Cell]:
        """Return a cell by its position, or by (measure, transform)."""
        if not isinstance(which, tuple):
            return self._cells[which]
        for cell in self._cells:
            if (cell.measure, cell.transform) == which:
                return cell
        if which[1] in self.left_out:
            raise UnknownName(f"transform {which[1]} does not apply to this network: {self.left_out[which[1]]}")
        known = [name for cell in self._cells for name in (cell.measure, cell.transform)]
        unknown = next((name for name in which if name not in known), str(which))
        raise UnknownName.among("cell", unknown, set(known), where="of this table")

    def __len__(self) -> int:
        return len(self._cells)

    @property
    def disagreeing(self) -> list[Cell]:
        """Return the numbers that changed though they are declared unchanged: an error in flatlens, or in a theorem."""
        return [cell for cell in self._cells if cell.agrees is False]

    def frame(self) -> pd.DataFrame:
        """Return the tidy table: one row per measure and transform."""
        return pd.DataFrame([asdict(cell) for cell in self._cells], columns=CELL_COLUMNS)

    def _content(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        moved = {name: asdict(one) for name, one in self.moved.items()}
        return {"rows": [asdict(cell) for cell in self._cells], "moved": moved, "left_out": self.left_out}, {}

    @classmethod
    def _restored(cls, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        moved = {name: Applied(**{**one, "links": tuple(one["links"])}) for name, one in content["moved"].items()}
        moved = {FORMER_TRANSFORMS.get(name, name): one for name, one in moved.items()}
        left_out = {FORMER_TRANSFORMS.get(name, name): why for name, why in content["left_out"].items()}
        rows = [
            {**row, "measure": str(Column.parse(row["measure"])),
             "transform": FORMER_TRANSFORMS.get(row["transform"], row["transform"])}
            for row in content["rows"]
        ]  # fmt: skip
        return cls([Cell(**row) for row in rows], moved, left_out, content["about"])


def cell_of(transform: Transform, one: Measure, row: str, a: Estimate, b: Estimate, dtype: torch.dtype) -> Cell:
    """Return the cell of one number, before (a) and after (b)."""
    stderr, must = math.hypot(*(e.stderr for e in (a, b) if e.margin)), must_stay(one, row, transform)
    cell = Cell(row, transform.name, a.value, b.value, math.nan, math.nan, None, must, None)
    if a.kind == "undefined" or b.kind == "undefined":
        lost = (a.kind == "undefined") != (b.kind == "undefined")
        note = f"undefined{' on one side only' if lost else ''}: {a.note or b.note}"
        return replace(cell, agrees=False if lost and must else None, note=note)
    # Unchanged is what differs by rounding, by what a search leaves open, or by standard errors
    eps, searched = torch.finfo(dtype).eps, max(_left_open(one, a), _left_open(one, b))
    slack = max(64 * eps**0.5, searched)
    off = abs(b.value - a.value)
    size = 0.0 if math.isinf(off) else max(abs(a.value), abs(b.value))
    rounding = 0.0 if must is False else 8 * eps  # of a number that is 0 on both sides, and must be
    unchanged = a.value == b.value or off <= slack * size + rounding + STDERRS * stderr
    change = (b.value - a.value) / abs(a.value) if a.value else math.copysign(math.inf, b.value)
    change = 0.0 if a.value == b.value else change
    cell = replace(cell, change=change, stderr=stderr)
    # Small changes of what must stay may come from a search, or from the smallest eigenvalues
    if must and not unchanged and searched and off <= _SHORT * size:
        return replace(cell, note=UNDECIDED)
    if must and not unchanged and one.card.family == "compression" and (off <= _SEARCHED * size or math.isinf(off)):
        return replace(cell, note=ILL)
    if unchanged and must is False:
        return replace(cell, unchanged=True, note="unchanged here, but not in general")
    return replace(cell, unchanged=unchanged, agrees=None if must is None else unchanged == must)


def must_stay(one: Measure, row: str, transform: Transform) -> bool | None:
    """Return whether the number of this row must be unchanged by the transform; None if nothing is declared."""
    part = Column.parse(row).part
    if transform.declared_as is None:
        at_input = isinstance(one, PassMeasure) and one.place == one.answer == "input"
        of_function = at_input or one.card.family == RISK_FAMILY
        return True if of_function and not part else None
    if f"{one.card.name}.{part}" in _TABLE_1[0]:
        return transform.declared_as in _TABLE_1[1]
    if part and not (isinstance(one, PassMeasure) and one.place != "input"):
        return None
    return transform.declared_as in one.invariant_under


def _left_open(one: Measure, estimate: Estimate) -> float:
    # The relative error at which a search or an iteration stops
    rtol = dict(one.options).get("rtol")
    found = max(_SEARCHED, 2 * rtol) if isinstance(rtol, float) else _SEARCHED
    return 0.0 if estimate.kind in ("exact", "estimate") else found


def check_invariance(
    lens: Lens,
    measures: Choice = None,
    transforms: str | Transform | Iterable[str | Transform] | None = None,
    *,
    anyway: bool = False,
    generator: torch.Generator | None = None,
    progress: Shown = None,
) -> InvarianceReport:
    """Measure a network before and after each transform of its weights that leaves its function alone.

    The network itself is not touched: copies in float64 are moved, and their outputs on all the data are compared with
    its own. Random draws are the same on either side. Unchanged means: within rounding (about 1e-6), what a search
    leaves open (0.1%), and 4 combined standard errors.

    Args:
        lens: The network.
        measures: Names or Measure objects; one alone is enough; or a preset of `measure`. None is "pass".
        transforms: Names or Transform objects; one alone is enough. None is every one that is valid in this network.
        anyway: Whether to do work that `measure` refuses because it takes long.
        generator: Draws the random numbers; seeded with 0 if None.
        progress: Called with (what, done, total); None shows a bar after two seconds, False shows none.

    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)).double()
    >>> from flatlens import Problem
    >>> lens = Lens(Problem(net, "mse", (torch.ones(4, 2).double(), torch.zeros(4, 1).double())))
    >>> report = check_invariance(lens, ["weight_norm", "kappa_trace"], "layerwise")
    >>> [report[name, "layerwise"].unchanged for name in ("weight_norm", "kappa_trace")]
    [False, True]
    """
    if not isinstance(lens, Lens):
        got = type(lens).__name__
        raise BadInput(f"expected a Lens, got {got}: check_invariance(Lens(problem))", call="check_invariance")
    lens.require_fresh()
    asked = asked_for("pass" if measures is None else measures, held_out=lens.problem.test is not None)
    moves = named_transforms(transforms)
    if not asked.measures:
        needed = "name at least one measure, or leave measures out for all of one pass"
        raise BadInput(needed, argument="measures", value=[], call="check_invariance")
    draws = drawing(generator, progress, "check_invariance")
    lens.problem.peers.same_draws(draws)
    seeds = [int(torch.randint(2**40, (), generator=draws)) for _ in range(2)]
    # In float64 if possible: in float32, a change of a percent could pass as rounding
    problem = lens.problem
    if problem.dtype != torch.float64:
        with suppress(BadInput):  # forward() may need its own precision
            problem = with_model(problem, copied(problem).double(), torch.float64)
    # Transforms that are valid in this network, and its numbers before and after each
    wiring = read_wiring(problem, copied(problem))
    left_out = {one.name: why for one in moves if (why := one.offer(wiring).refused)}
    moves = [one for one in moves if one.name not in left_out]
    with progress_shown(progress) as line:
        numbers = partial(_numbers, lens, seed=seeds[0], anyway=anyway, progress=line)
        before = numbers(problem, asked) if moves else {}
        found: dict[str, list[Cell]] = {row: [] for row in before}
        applied = {}
        for done, one in enumerate(moves, start=1):
            moved = one.apply(problem, torch.Generator().manual_seed(seeds[1]))
            after = numbers(moved.problem, asked)
            applied[one.name] = Applied.of(moved)
            for row in [row for row in before if row in after]:
                (measured, a), (_, b) = before[row], after[row]
                found[row].append(cell_of(one, measured, row, a, b, problem.dtype))
            line("transforms", done, len(moves))
    cells = [cell for of_row in found.values() for cell in of_row]
    precision = {"dtype": str(problem.dtype).removeprefix("torch."), "arithmetic": problem.arithmetic}
    return InvarianceReport(cells, applied, left_out, about(lens) | precision)


def _numbers(
    lens: Lens, problem: Problem, asked: Asked, *, seed: int, anyway: bool, progress: Progress
) -> dict[str, tuple[Measure, Estimate]]:
    """The network's answers, and their parts with a declaration, by row."""
    # Each side looks afresh and draws afresh, so that neither searches from where the other ended
    fresh = Lens(problem, outputs=lens.probes or "exact")
    together = [one for one in asked.measures if not one.on_request]
    runs: list[Choice] = ["pass"] if asked.preset == "pass" else [together] if together else []
    runs += [[one] for one in asked.measures if one.on_request]
    known = {one.key: one for one in asked.measures}
    found = {}
    for each in runs:
        watch = Watch(progress, math.inf if anyway else LIMIT)
        report = measure_with(fresh, each, Run(torch.Generator().manual_seed(seed), watch, thorough=True))
        for (row, layer), estimate in report.items():
            one = known[Column.parse(row).measure]
            if layer is None and (row == one.key or must_stay(one, row, TRANSFORMS["layerwise"]) is not None):
                found[row] = one, estimate
    return found


_MOST = 3  #: names that a sentence lists


def answer_of_invariance(
    cells: Sequence[Cell], moved: Mapping[str, Applied], left_out: Mapping[str, str], about: Mapping[str, Any]
) -> list[str]:
    """Return at most three sentences on what stayed and what changed.

    >>> answer_of_invariance([], {}, {"permutation": "no link is found"}, {})
    ['No function-preserving change of the weights applies to this network: no link is found.']
    """
    if not moved:
        reasons = "; ".join(dict.fromkeys(left_out.values()))
        return [f"No function-preserving change of the weights applies to this network: {reasons}."]
    wrong = [f"{cell.measure} under {cell.transform}" for cell in cells if cell.agrees is False]
    ours = "an error in flatlens or in a theorem: please report it"
    told = f"Not as declared: {listed(wrong, _MOST)}; {ours}." if wrong else ""
    # How it is known that the function stayed, and whether numbers do what is declared
    samples = f"all {count_of(about['n'], 'sample')}" if "n" in about else "the data"
    proof = f"On {samples} the outputs differ by {max(done.difference for done in moved.values()):.1g} at most"
    checked = sum(cell.agrees is True for cell in cells)
    undecided = sum(cell.note.startswith("undecided") for cell in cells)
    held = f"{count_of(checked, 'declaration')} could be checked, and hold{'s' * (checked == 1)}" if checked else ""
    left = f"{undecided} cell{'s are' if undecided > 1 else ' is'} undecided" if undecided else ""
    proof = f"{'; '.join(filter(None, (proof, held, left)))}."
    return [sentence for sentence in (told, *_moves(cells, moved), proof) if sentence][:3]


def _moves(cells: Sequence[Cell], moved: Mapping[str, Applied]) -> list[str]:
    """Return which numbers stay under all transforms, and which change."""
    rows, own = by_key((cell.measure, cell) for cell in cells), {}
    for name, each in rows.items():  # those that are no risk, and no part of a measure that has a row
        column = Column.parse(name)
        risk = column.name in MEASURES and MEASURES[column.name].card.family == RISK_FAMILY
        if not risk and (not column.part or column.measure not in rows):
            own[name] = each
    # a number that stays here alone, and not in general, compares nothing
    stay = [name for name, each in own.items() if all(cell.unchanged and cell.declared is not False for cell in each)]
    change = [name for name, each in own.items() if any(cell.unchanged is False for cell in each)]
    plural = "" if len(moved) == 1 else "s"
    under = f"under {len(moved)} function-preserving change{plural} of the weights"
    if not own:
        return []
    found = [f"No number is invariant {under}."]
    if stay:
        which = f"{len(stay)} of {count_of(len(own), 'number')} {'is' if len(stay) == 1 else 'are'} invariant"
        found = [f"{which} {under}: networks can be compared by {listed(stay, _MOST)}."]
    if change:
        factors = {(cell.measure, cell.transform): _factor(cell) for name in change for cell in own[name]}
        worst = max(factors, key=lambda key: factors[key])
        by = f" by a factor of {factors[worst]:.3g}" if factors[worst] > 1 else ""
        which = f"{count_of(len(change), 'number')} change{'s' * (len(change) == 1)}, {worst[0]}{by} under {worst[1]}"
        found.append(f"{which}: do not compare networks by {'it' if len(change) == 1 else 'them'}.")
    return found


def _factor(cell: Cell) -> float:
    """Return by what factor a number changes, up or down; 1 where it stays, or where no factor says it."""
    if cell.unchanged is not False or not cell.before * cell.after > 0:
        return 1.0
    ratio = cell.after / cell.before
    return max(ratio, 1 / ratio) if math.isfinite(ratio) else 1.0
