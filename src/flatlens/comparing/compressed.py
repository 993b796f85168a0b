"""The result of fl.compression: its rows, their rank correlations, a plan, and the answer in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import pandas as pd
from scipy.stats import spearmanr
from torch import Tensor

from flatlens.errors import BadInput
from flatlens.progress import count_of, listed
from flatlens.result import Result

UNCOMPRESSED = "kept"  #: in a plan, a weight that stays as it is
EXPECTED_WITHIN = 1.5  #: a forecast that is not flagged is expected within this factor of the rise
_NAMED = 4  #: layers that a sentence names
_FEWEST = 5  #: layers whose ranks a sentence speaks of


@dataclass(frozen=True)
class CompressedLayer:
    """The change of one weight under a scheme, its forecast and measured rise; of all together, `layer` is empty."""

    layer: str
    scheme: str
    size: float  #: bits after, over bits before
    distance: float  #: ||dw|| / ||w||
    first_order: float  #: g^T dw
    second_order: float  #: dw^T H dw / 2
    forecast: float  #: the sum of both
    forecast_stderr: float  #: standard error over samples
    rest: float  #: what higher orders are expected to add, by size
    extrapolated: float  #: the forecast with higher orders, from losses at a quarter, half and three quarters of dw
    valid: bool  #: whether the forecast is expected to hold within a factor of 1.5
    rise: float  #: measured rise of the loss
    rise_stderr: float  #: standard error over samples
    squared_change: float  #: ||dw||^2, a baseline
    trace_change: float  #: mean of H's diagonal times ||dw||^2, a baseline (HAWQ's)
    note: str = ""  #: why the forecast is flagged

    @property
    def upper(self) -> float:
        """Return the upper end of the rise's 95% interval; the rise itself where there is one sample."""
        return self.rise + (1.96 * self.rise_stderr if math.isfinite(self.rise_stderr) else 0.0)


class Compression(Result):
    """Forecast and measured rises by layer and scheme, and a plan: `frame()`, `correlations()`, `plan`, `answer`.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    >>> problem = fl.Problem(net, "cross_entropy", (torch.eye(3).double(), torch.tensor([0, 1, 0])))
    >>> found = fl.compression(fl.Lens(problem), ["int8", "int4"])
    >>> found["0", "int8"].rise < 1e-2, found["", "int4"].size < 0.5, found.plan["layers"]["0"]["parameter"]
    (True, True, '0.weight')
    """

    _KIND = "compression"

    def __init__(self, rows: Iterable[CompressedLayer], plan: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        self.rows = list(rows)
        self.plan = dict(plan)  #: what each layer becomes, as JSON can hold it (docs/compress.md has the fields)
        self.about = dict(about)

    def __getitem__(self, key: tuple[str, str]) -> CompressedLayer:
        """Return the row of (layer, scheme); the layer "" is all together."""
        for row in self.rows:
            if (row.layer, row.scheme) == key:
                return row
        raise BadInput(f"no layer and scheme {key!r}: frame() has all", call="Compression")

    @property
    def answer(self) -> list[str]:
        """The answer in at most three sentences: what can be compressed at what cost, how certain, what is left out."""
        return [_first(self.plan, self.about), _second(self), _third(self)]

    def frame(self) -> pd.DataFrame:
        """Return a row for each layer and scheme."""
        return pd.DataFrame(
            [asdict(row) for row in self.rows], columns=[field.name for field in fields(CompressedLayer)]
        )

    def correlations(self) -> pd.DataFrame:
        """Return, by scheme, Spearman's correlation of the layers' rises with both forecasts and both baselines.

        `extrapolated` is the forecast with higher orders. `valid` counts the forecasts that are not flagged, `within`
        those of them within 1.5 times the rise.
        """
        rows = []
        for scheme in dict.fromkeys(row.scheme for row in self.rows):
            of = [row for row in self.rows if row.scheme == scheme and row.layer]
            valid = [row for row in of if row.valid]
            ranks = {name: _ranked([getattr(row, name) for row in of], [row.rise for row in of]) for name in _RANKED}
            within = sum(_close(row.forecast, row.rise) for row in valid)
            rows.append({"scheme": scheme, "layers": len(of), **ranks, "valid": len(valid), "within": within})
        return pd.DataFrame(rows, columns=["scheme", "layers", *_RANKED, "valid", "within"])

    def _displayed(self) -> pd.DataFrame:
        shown = self.frame()[
            ["layer", "scheme", "size", "distance", "forecast", "rise", "rise_stderr", "valid", "note"]
        ]
        return shown.assign(
            layer=shown["layer"].replace("", "all"), valid=shown["valid"].map({True: "yes", False: "no"})
        )

    def _content(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {"rows": [asdict(row) for row in self.rows], "plan": self.plan}, {}

    @classmethod
    def _restored(cls, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        return cls([CompressedLayer(**row) for row in content["rows"]], content["plan"], content["about"])


_RANKED = ("forecast", "extrapolated", "squared_change", "trace_change")


def _ranked(x: Sequence[float], y: Sequence[float]) -> float:
    if len(x) < 3 or len(set(x)) == 1 or len(set(y)) == 1:
        return math.nan
    return float(spearmanr(x, y).statistic)


def _close(forecast: float, rise: float) -> bool:
    return forecast == rise or (forecast * rise > 0 and 1 / EXPECTED_WITHIN <= forecast / rise <= EXPECTED_WITHIN)


# The answer


def _changes(of: Mapping[str, Any], loss: str = "the loss") -> str:
    """Return how a measured rise changes the loss, with its margin.

    >>> _changes({"rise": 0.0123, "rise_stderr": 0.001}), _changes({"rise": -0.01, "rise_stderr": math.nan})
    ('raises the loss by 0.012 ± 0.002', 'lowers the loss by 0.01')
    """
    margin = 1.96 * of["rise_stderr"]
    verb = "raises" if of["rise"] >= 0 else "lowers"
    return f"{verb} {loss} by {abs(of['rise']):.2g}" + (f" ± {margin:.1g}" if math.isfinite(margin) else "")


def _first(plan: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """Return which layers can be compressed, or what a budget costs, as measured for all together."""
    layers = plan["layers"]
    used = {name: of["scheme"] for name, of in layers.items() if of["scheme"] != UNCOMPRESSED}
    held = f" ({_changes(plan['held_out'], 'the held-out loss')})" if plan["held_out"] else ""
    costs = _changes(plan, f"the loss of {plan['loss']:.3g}") + held
    if plan.get("budget") is not None:
        counts = [f"{list(used.values()).count(name)} in {name}" for name in dict.fromkeys(used.values())]
        counts += [f"{len(layers) - len(used)} {UNCOMPRESSED}"] if len(used) < len(layers) else []
        uniform = plan["uniform"]
        beside = "no uniform scheme is as small" if uniform is None else (
            f"{uniform['scheme']} everywhere ({1 - uniform['size']:.0%} smaller) {_changes(uniform, 'it')}"
        )  # fmt: skip
        return (
            f"{1 - plan['size']:.0%} smaller {costs}: of {count_of(len(layers), 'layer')} {listed(counts)}; {beside}."
        )
    target, level = plan["scheme"], f"tolerated: {plan['level']:.2g}"
    others = [name for name in layers if name not in used]
    if not used:
        return f"No layer of {len(layers)} can certainly go to {target} ({level}; the loss is {plan['loss']:.3g})."
    rest = f"; not {listed(others, _NAMED)}" if others else ""
    return f"{len(used)} of {count_of(len(layers), 'layer')} can go to {target} together, which {costs}; {level}{rest}."


def _second(found: Compression) -> str:
    """Return how far the forecast can be trusted: its ranks over layers, and how many forecasts are flagged."""
    table = found.correlations()
    known = table["forecast"][table["layers"] >= _FEWEST].dropna()
    single = [row for row in found.rows if row.layer]
    flagged = sum(not row.valid for row in single)
    told = f"{flagged} of {count_of(len(single), 'forecast')} {'is' if flagged == 1 else 'are'} flagged"
    if known.empty:
        return f"Too few layers for a rank correlation of forecast and measured rise; {told}."
    ranks = f"{known.mean():.2f}" + (f" ({known.min():.2f} to {known.max():.2f} by scheme)" if len(known) > 1 else "")
    return f"Over layers the forecast has a mean rank correlation of {ranks} with the measured rise; {told}."


def _third(found: Compression) -> str:
    """Return what is not known: other samples, activations, and how badly layers add up."""
    joint = min((row for row in found.rows if not row.layer), key=lambda row: row.size)
    summed = sum(row.rise for row in found.rows if row.layer and row.scheme == joint.scheme)
    stopped = "" if found.plan.get("ended", True) else (
        f"; exchanges stopped after {count_of(found.plan['trials'], 'trial')}, so a better plan may exist"
    )  # fmt: skip
    return (
        f"Weights alone, on these {found.about['n']:,} samples: quantised activations are not forecast. All layers in "
        f"{joint.scheme} together cost {joint.rise:.2g}, the sum of single layers is {summed:.2g}{stopped}."
    )
