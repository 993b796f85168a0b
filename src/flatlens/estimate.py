"""A measured number with its error, kind and cost, and the table of many."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from numbers import Real
from typing import Any, Literal, Self, TypeAlias

import pandas as pd
from torch import Tensor

from flatlens.column import Column
from flatlens.deprecated_names import warn
from flatlens.errors import UnknownName
from flatlens.progress import Progress as Progress
from flatlens.result import Result, of_report

Kind: TypeAlias = Literal["exact", "estimate", "lower bound", "upper bound", "undefined"]
WITHOUT_ERROR: frozenset[Kind] = frozenset({"lower bound", "upper bound", "undefined"})


@dataclass(frozen=True, eq=False)  # eq would compare tensors
class Estimate:
    """A number with its error, its kind and its cost.

    `float(e)` and `f"{e:.3f}"` give its value, by which estimates are ordered; `==` compares identities.

    >>> Estimate(2.0, source="compression Def. 3.7")
    2 (exact)
    >>> Estimate(2.0, stderr=0.5, kind="estimate")
    2 +- 0.98 (estimate)
    >>> e = Estimate(2.0, kind="lower bound")
    >>> f"{e:.3f}", e > 1, e.stderr, sorted([e, Estimate(1.0)])[0]
    ('2.000', True, nan, 1 (exact))
    """

    value: float
    stderr: float = 0.0  #: value +- 1.96 stderr is a 95% interval; 0 when exact, NaN for bounds and undefined
    kind: Kind = "exact"
    note: str = ""  #: why undefined, the share of samples left out, what was assumed
    samples: Tensor | None = None  #: per-sample values, (n,) float64, in the order of the data
    arrays: Mapping[str, Tensor] = field(default_factory=dict)  #: vectors and curves by name
    source: str = ""  #: the paper and the equation of the definition
    unit: str = ""
    seconds: float = 0.0  #: duration for all rows of its measure, in the first; passes are in about["seconds"]
    products: int = 0  #: curvature-vector products used

    def __post_init__(self) -> None:
        if self.kind in WITHOUT_ERROR or (self.kind == "exact" and math.isnan(self.stderr)):  # a bound made exact
            object.__setattr__(self, "stderr", math.nan if self.kind in WITHOUT_ERROR else 0.0)

    @property
    def margin(self) -> float:
        """Half-width of the 95% interval, 1.96 stderr; 0 for bounds and undefined."""
        return 0.0 if self.kind in WITHOUT_ERROR else 1.96 * self.stderr

    def __repr__(self) -> str:
        error = f" +- {self.margin:.2g}" if self.margin else ""
        note = f"; {self.note}" if self.note else ""
        return f"{self.value:.6g}{error} ({self.kind}{note})"

    def __float__(self) -> float:
        return float(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec) if spec else repr(self)

    def __lt__(self, other: Estimate | float) -> bool:
        return self.value < float(other) if isinstance(other, Estimate | Real) else NotImplemented

    def __le__(self, other: Estimate | float) -> bool:
        return self.value <= float(other) if isinstance(other, Estimate | Real) else NotImplemented

    def __gt__(self, other: Estimate | float) -> bool:
        return self.value > float(other) if isinstance(other, Estimate | Real) else NotImplemented

    def __ge__(self, other: Estimate | float) -> bool:
        return self.value >= float(other) if isinstance(other, Estimate | Real) else NotImplemented


Key: TypeAlias = tuple[str, str | None]
"""(measure, layer), or (measure, None) for the network's answer."""

Answer: TypeAlias = "Callable[[Mapping[Key, Estimate], Mapping[str, Any]], list[str]]"
"""Makes a report's answer from its estimates and its `about`."""


class Report(Result, Mapping[Key, Estimate]):
    """Estimates by measure and layer: `report["mls"]` is the network's answer, `report["mls", "fc3"]` one layer's.

    `about` tells what was measured: loss, samples, outputs, layers in execution order, versions, device.

    >>> report = Report({("mls", None): Estimate(2.0), ("mls", "fc1"): Estimate(3.0)}, {"n": 5})
    >>> report["mls"].value, report["mls", "fc1"].value
    (2.0, 3.0)
    """

    _KIND = "report"

    def __init__(
        self, estimates: Mapping[Key, Estimate], about: Mapping[str, Any], answer: Sequence[str] | Answer = ()
    ) -> None:
        self._estimates = dict(estimates)
        self.about = dict(about)
        self._answer = answer

    @property
    def answer(self) -> list[str]:
        """The answer in at most three sentences; empty for a report that was put together by hand."""
        if callable(self._answer):  # made when it is first read
            self._answer = self._answer(self._estimates, self.about)
        return list(self._answer)

    def __getitem__(self, key: str | Key) -> Estimate:
        pair = self._as_kept(key)
        if pair is None:
            raise UnknownName(f"report[{key!r}]: expected a measure's name, or (measure, layer): report['mls', 'fc1']")
        measure, layer = pair
        if pair not in self._estimates and (present := str(Column.parse(measure))) != measure:
            warn(f"report[{measure!r}]", "the measure", present)
            measure, pair = present, (present, layer)
        if pair in self._estimates:
            return self._estimates[measure, layer]
        if measure not in self.measures():
            raise self._without(measure)
        layers = [at for name, at in self._estimates if name == measure and at is not None]
        if layer is None:
            raise self._without(measure)
        if layer in self.about.get("layers", ()):
            missing = f"this report has no value of {measure!r} at {layer!r}"
            raise UnknownName(missing, remedy=f'fl.measure(lens, ["{Column.parse(measure).measure}"]) computes it')
        raise UnknownName.among("layer", str(layer), layers, where=f"in the values of {measure}")

    def _without(self, name: str) -> UnknownName:
        """Return the error for a measure that this report lacks: it says how to get one of the catalogue."""
        column = Column.parse(name)
        there = [Column.parse(one) for one, layer in self._estimates if layer is None]
        known = {one.name for one in there if one.part or not column.part}  # a summary has no parts of its measures
        if name in self.measures():  # of single layers alone
            known.discard(column.name)
        catalogue = import_module("flatlens.measures").MEASURES  # by name, as it lies above
        if column.name in known or column.name not in catalogue:
            return UnknownName.among("measure", name, self.measures(), where="in this report")
        return UnknownName(f"this report has no {name!r}", remedy=f'fl.measure(lens, ["{column.measure}"]) computes it')

    def __iter__(self) -> Iterator[Key]:
        return iter(self._estimates)

    def __len__(self) -> int:
        return len(self._estimates)

    def __contains__(self, key: object) -> bool:
        pair = self._as_kept(key)
        return pair is not None and (
            pair in self._estimates or (str(Column.parse(pair[0])), pair[1]) in self._estimates
        )

    def _as_kept(self, key: object) -> Key | None:
        """Return a key with the options of its measure as this report writes them; None for what is not a key."""
        measure, layer = key if isinstance(key, tuple) and len(key) == 2 else (key, None)
        if not (isinstance(measure, str) and isinstance(layer, str | None)):
            return None
        column = Column.parse(measure)
        spelled = self.about.get("spelled", {}).get(column.measure)
        return (str(replace(column, measure=spelled)) if spelled else measure), layer

    def measures(self) -> list[str]:
        """Return the measures' names, in the order they were asked for."""
        return list(dict.fromkeys(name for name, _ in self._estimates))

    def plot(self) -> Any:
        """Return an Altair chart (report.figures); a notebook shows it by itself."""
        return of_report("figures.picture")(self)

    def __repr__(self) -> str:
        text: str = of_report("measure.printed")(self)
        return text

    def _repr_html_(self) -> str:
        html: str = of_report("measure.folded")(self)
        return html

    def frame(self) -> pd.DataFrame:
        """Return a tidy table: one row for each estimate; `layer` is empty for the network's answer."""
        columns = ["measure", "layer", "value", "stderr", "kind", "source", "unit", "seconds", "products", "note"]
        rows = [
            {"measure": name, "layer": layer or "", **{c: getattr(e, c) for c in columns[2:]}}
            for (name, layer), e in self._estimates.items()
        ]
        return pd.DataFrame(rows, columns=columns)

    def _content(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        tensors: dict[str, Tensor] = {}
        rows = []
        for number, ((name, layer), e) in enumerate(self._estimates.items()):
            arrays = {"samples": e.samples, **{f"arrays.{k}": v for k, v in e.arrays.items()}}
            held = {k: v for k, v in arrays.items() if v is not None}
            tensors |= {f"{number}/{k}": v.detach().cpu().contiguous().clone() for k, v in held.items()}
            scalars = {
                f: getattr(e, f) for f in ("value", "stderr", "kind", "note", "source", "unit", "seconds", "products")
            }
            rows.append({"measure": name, "layer": layer, **scalars})
        return {"rows": rows, "answer": self.answer}, tensors

    @classmethod
    def _restored(cls, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        arrays: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            row, _, key = name.partition("/")
            arrays.setdefault(row, {})[key] = tensor
        estimates: dict[Key, Estimate] = {}
        for number, scalars in enumerate(content["rows"]):
            mine = arrays.get(str(number), {})
            samples = mine.pop("samples", None)
            mine = {key.removeprefix("arrays."): tensor for key, tensor in mine.items()}
            measured = str(Column.parse(scalars.pop("measure"))), scalars.pop("layer")
            estimates[measured] = Estimate(**scalars, samples=samples, arrays=mine)
        return cls(estimates, content["about"], content.get("answer", ()))


def undefined(note: str) -> Estimate:
    """Return an undefined estimate with the reason: its value is NaN, never a guess."""
    return Estimate(float("nan"), kind="undefined", note=note)


def with_note(estimate: Estimate, note: str) -> Estimate:
    """Return the estimate with a further note."""
    return replace(estimate, note=joined_notes(estimate.note, note))


def joined_notes(*notes: str) -> str:
    """Return those notes that say something as one."""
    return "; ".join(note for note in notes if note)
