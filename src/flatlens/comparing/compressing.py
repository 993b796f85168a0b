"""fl.compression: what the loss pays for fewer bits, entries or ranks in each weight; forecast, and measured beside it.

    forecast = g^T dw + 1/2 dw^T H dw,    dw what the scheme changes, g and H the gradient and the Hessian of the risk

The terms are those of `comparing.expansion`, in a float64 copy. Whether they hold is tested on the way, without the
measured rise: R(t), the risk along t dw less its terms, is measured at a quarter, at half and at three quarters of the
change. Two rules say what it is at t = 1 (`_rest`), and the larger counts. A forecast is flagged where that exceeds a
quarter of it: it may then be more than 1.5 times the rise, or less than two thirds of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple, Self

import pandas as pd
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize

from flatlens.comparing.allocation import Allocation, LayerOption, allocated, exchanged, largest_group
from flatlens.comparing.expansion import RiskTerms, expanded, sample_losses, widened_task
from flatlens.comparing.schemes import Scheme, in_matrix, output_axis, schemes_named
from flatlens.curvature import Hessian
from flatlens.curvature.space import dot
from flatlens.errors import BadInput, BadModel, Give
from flatlens.estimate import Progress
from flatlens.grams.data_pass import random_signs
from flatlens.measures import Lens, about
from flatlens.measures.definition import drawing
from flatlens.perturbation.autograd_check import coarsest_inside
from flatlens.problem import Problem
from flatlens.problem.eval_context import copy_of
from flatlens.problem.problem import chosen_parameters
from flatlens.progress import Shown, by_key, count_of, listed, progress_shown
from flatlens.result import Result
from flatlens.version import __version__

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
        # how far the forecast can be trusted: its ranks over layers, and how many forecasts are flagged
        table, single = self.correlations(), [row for row in self.rows if row.layer]
        known = table["forecast"][table["layers"] >= _FEWEST].dropna()
        flagged = sum(not row.valid for row in single)
        told = f"{flagged} of {count_of(len(single), 'forecast')} {'is' if flagged == 1 else 'are'} flagged"
        ranks = f"{known.mean():.2f}" + f" ({known.min():.2f} to {known.max():.2f} by scheme)" * (len(known) > 1)
        second = f"Over layers the forecast has a mean rank correlation of {ranks} with the measured rise; {told}."
        if known.empty:
            second = f"Too few layers for a rank correlation of forecast and measured rise; {told}."
        # what is not known: other samples, activations, and how badly layers add up
        joint = min((row for row in self.rows if not row.layer), key=lambda row: row.size)
        summed = sum(row.rise for row in single if row.scheme == joint.scheme)
        third = (
            f"Weights alone, on these {self.about['n']:,} samples: quantised activations are not forecast. All layers "
            f"in {joint.scheme} together cost {joint.rise:.2g}, the sum of single layers is {summed:.2g}"
        )
        if not self.plan.get("ended", True):
            trials = count_of(self.plan["trials"], "trial")
            third += f"; exchanges stopped after {trials}, so a better plan may exist"
        return [_first(self.plan), second, f"{third}."]

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
            rises, ranks = [row.rise for row in of], dict.fromkeys(_RANKED, math.nan)
            for name in _RANKED if len(of) >= 3 and len(set(rises)) > 1 else ():
                forecasts = [getattr(row, name) for row in of]
                ranks[name] = float(spearmanr(forecasts, rises).statistic) if len(set(forecasts)) > 1 else math.nan
            within = sum(
                row.forecast == row.rise
                or (row.forecast * row.rise > 0 and 1 / EXPECTED_WITHIN <= row.forecast / row.rise <= EXPECTED_WITHIN)
                for row in valid
            )
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


def _changes(of: Mapping[str, Any], loss: str = "the loss") -> str:
    """Return how a measured rise changes the loss, with its margin.

    >>> _changes({"rise": 0.0123, "rise_stderr": 0.001}), _changes({"rise": -0.01, "rise_stderr": math.nan})
    ('raises the loss by 0.012 ± 0.002', 'lowers the loss by 0.01')
    """
    margin = 1.96 * of["rise_stderr"]
    verb = "raises" if of["rise"] >= 0 else "lowers"
    return f"{verb} {loss} by {abs(of['rise']):.2g}" + (f" ± {margin:.1g}" if math.isfinite(margin) else "")


def _first(plan: Mapping[str, Any]) -> str:
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


_ALLOWED = 1 / 4  #: share of a forecast up to which its expected rest, itself up to a third off, leaves it within 1.5
_GROWTH = (4.0, 16.0)  #: least and largest growth of the rest when the change doubles
_LEVEL = 0.01  #: tolerated rise, as a share of the loss of constant outputs
_PROBES = 8  #: random signs for the traces of the baseline
_ROUNDINGS = 64  #: units in the last place of the risk below which a change is rounding
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class _Weight(NamedTuple):
    label: str  #: the layer's name; the parameter's where a layer has several
    parameter: str
    axis: int  #: that has the output channels
    stored: int  #: bits of an entry
    tied: tuple[str, ...]  #: other names of the parameter


def compression(
    lens: Lens | Problem,
    schemes: str | Scheme | Iterable[str | Scheme] | None = None,
    *,
    budget: float | None = None,
    level: float | None = None,
    trials: int | None = None,
    earlier: Compression | None = None,
    generator: torch.Generator | None = None,
    progress: Shown = None,
) -> Compression:
    """Compress each weight by each scheme: forecast what the loss pays, measure it, and plan which weights go how low.

    Weights of two or more axes are compressed, one at a time and all together: those of linear layers, convolutions,
    embeddings and attention, frozen ones too, tied ones once, and a parametrised one as the network uses it. Biases and
    norms stay. Activations are not quantised, and nothing is forecast about that. The network stays as it is: copies in
    float64 are changed. A layer takes, for each scheme, a Hessian product and four forward passes over the data.

    Without a budget the plan gives the scheme of the fewest bits to the largest group of layers that keeps the rise,
    measured for all together, certainly (95%) below `level`. With a budget it gives each layer one of the quantising
    schemes, or none: the smallest sum of the layers' rises within the budget (exact), then exchanges of one or two
    layers as long as these lower the loss, measured for all together. Each trial of an exchange is a forward pass.

    Args:
        lens: The network, its data and loss, and its parameters if they are named.
        schemes: `int8`, `int4`, `float8`, each also with `(by='tensor')` or by groups, `(group=32)`;
            `prune(share=0.5)`, `low_rank(share=0.5)`. None stands for `comparing.schemes.DEFAULT`.
        budget: The share of the network's size in bits that may remain.
        level: The tolerated rise of the loss. None stands for 1% of the loss of the best constant outputs, or of the
            loss itself where that is unknown.
        trials: With a budget, the number of losses that exchanges may measure; the plan says whether it sufficed. None
            stands for twelve rounds over all layers and schemes.
        earlier: A result of the same lens, whose rows are taken over: another plan then takes its own losses alone. Its
            schemes stand for None.
        generator: Draws the signs for the traces of the baseline; seeded with 0 if None.
        progress: Called with (what, done, total); None shows a bar after two seconds, False shows none.

    Raises:
        BadInput: The network cannot be copied or has no such weight, the budget cannot be met, a scheme is unknown,
            `earlier` was measured on other layers or samples.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> data = (torch.eye(2, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64))
    >>> found = fl.compression(fl.Problem(net, "mse", data), "int4")["weight", "int4"]
    >>> round(found.forecast / found.rise, 9), found.valid  # a quadratic
    (1.0, True)
    """
    # what is asked, and what cannot be done
    given, problem = widened_task(lens, "lens", "compression")
    if problem.coupled:
        raise BadInput("samples are coupled, but a compressed network is run in eval mode", argument="lens",
                       call="compression", remedy=(Give("batchnorm", "eval"), " measures it so"))  # fmt: skip
    if earlier is not None and schemes is None:
        schemes = list(dict.fromkeys(row.scheme for row in earlier.rows))
    asked, draws = schemes_named(schemes), drawing(generator, progress, "compression")
    for name, value, most in (("budget", budget, 1.0), ("level", level, math.inf)):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value <= most):
            told = "a share between 0 and 1" if name == "budget" else "a number above 0"
            raise BadInput(f"expected {told}", argument=name, value=value, call="compression")
    if trials is not None and (isinstance(trials, bool) or not isinstance(trials, int) or trials < 1):
        raise BadInput("expected a whole number of at least 1", argument="trials", value=trials, call="compression")
    if budget is not None and not any(one.quantises for one in asked):
        raise BadInput(
            "a budget takes schemes with fewer bits, such as int8 and int4", argument="schemes", call="compression"
        )

    # a copy to differentiate, one whose weights move, and the weights
    model, folded = _folded(problem)
    work = _Work(problem, model, given, draws)
    with progress_shown(progress) as line:
        if earlier is None:
            rows = work.rows(asked, line)
        else:  # the rows on the same layers and samples are taken over
            same = [weight.label for weight in work.weights] == earlier.about["layers"]
            if not same or abs(work.risk - earlier.about["risk"]) > work.rounding:
                raise BadInput("measured on other layers, weights or samples", argument="earlier", call="compression")
            if missing := [one.name for one in asked if one.name not in {row.scheme for row in earlier.rows}]:
                raise BadInput(f"has no {listed(missing, 4)}", argument="earlier", call="compression")
            rows = [row for row in earlier.rows if row.scheme in {one.name for one in asked}]
        constant = work.risk if problem.constant is None else problem.constant.loss
        usual = _LEVEL * max(constant, 0.0) or _LEVEL * abs(work.risk) or _LEVEL
        level = usual if level is None else float(level)
        chosen, why = (
            _within(work, rows, asked, level) if budget is None else _cheapest(work, rows, asked, budget, trials, line)
        )
        # what each layer becomes, and what all together cost
        rise, stderr = work.rise(chosen)
        test, held_out = problem.test, None
        if test is not None:
            rises = work.rise(chosen, problem.changed(data=test))
            held_out = dict(zip(("rise", "rise_stderr"), rises, strict=True))
        alone = {(row.layer, row.scheme): row.rise for row in rows}
        saved = sum(work.size(w) - work.size(w, chosen[w.label]) for w in work.weights if w.label in chosen)
        layers: dict[str, dict[str, Any]] = {}
        for weight in work.weights:
            one = chosen.get(weight.label)
            quantised = one if one is not None and one.quantises else None
            layers[weight.label] = {
                "parameter": weight.parameter, "tied": list(weight.tied),
                "shape": list(work.here[weight.parameter].shape), "scheme": UNCOMPRESSED if one is None else one.name,
                "bits": weight.stored if quantised is None else quantised.bits,
                "by": None if quantised is None else quantised.by,
                "group": None if one is None else one.group or None,
                "axis": weight.axis, "rise_alone": 0.0 if one is None else alone[weight.label, one.name],
            }  # fmt: skip
    plan = {
        "flatlens": __version__, "of": "weights alone: activations are not quantised", **why,
        "size": 1 - saved / work.total, "loss": work.risk, "rise": rise, "rise_stderr": stderr, "held_out": held_out,
        "sum_of_rises": sum(layer["rise_alone"] for layer in layers.values()), "layers": layers,
    }  # fmt: skip
    facts = {**about(given), "layers": [weight.label for weight in work.weights], "dtype": "float64", "risk": work.risk,
             "level": level, "budget": budget, "folded": folded, "rounding": work.rounding}  # fmt: skip
    return Compression(rows, plan, facts)


def _folded(problem: Problem) -> tuple[nn.Module, list[str]]:
    """Return a copy of the network whose weights are those that it computes with, and the names of folded ones."""
    own = problem.measured()
    model, folded = copy_of(own, "compression").eval(), list[str]()
    for name, module in list(model.named_modules()):
        if not parametrize.is_parametrized(module):
            continue
        # by hand: torch's own function changes the class of the module, which the user's network shares
        values = {weight: getattr(module, weight).detach().clone() for weight in module.parametrizations}
        del module.parametrizations
        module.__class__ = parametrize.type_before_parametrizations(module)
        for weight, value in values.items():
            module.register_parameter(weight, nn.Parameter(value))
            folded.append(".".join(filter(None, (name, weight))))
    if folded:
        before, after = sample_losses(problem, own), sample_losses(problem, model)
        if not torch.allclose(before, after, rtol=1e-6, atol=1e-12):
            raise BadModel(f"with {listed(folded, 4)} folded, the network has another loss")
    return model, folded


def _parts_of(name: str) -> str:
    """Return how the names of the parameters begin that make a parametrised one of this name."""
    layer, _, own = name.rpartition(".")
    return f"{layer}.parametrizations.{own}.".removeprefix(".")


def _stored(lens: Lens, name: str) -> int:
    """Return the bits of an entry of a parameter; of a folded one, those of the parameters that make it."""
    made_of = _parts_of(name)
    named = dict(lens.problem.model.named_parameters(remove_duplicate=False))
    own = named.get(name, next((p for other, p in named.items() if other.startswith(made_of)), None))
    return 8 * (own if own is not None else torch.empty(0)).element_size()


class _Work:
    """The weights of one network: what schemes make of them, the terms of the risk along that, and measured losses."""

    def __init__(self, problem: Problem, model: nn.Module, lens: Lens, draws: torch.Generator) -> None:
        self.problem, self.model = problem, model  # in float64
        # the weights: of two or more axes, each once; all, unless the problem names its parameters
        asked = lens.problem.parameters
        whole = asked == chosen_parameters(lens.problem.model, "trainable")
        names = by_key((id(p), name) for name, p in model.named_parameters(remove_duplicate=False))
        self.weights: list[_Weight] = []
        for name, p in model.named_parameters():
            layer, _, own = name.rpartition(".")
            module, label = model.get_submodule(layer), layer if own == "weight" and layer else name
            if not whole and not any(one == name or one.startswith(_parts_of(name)) for one in asked):
                continue
            if p.is_floating_point() and p.ndim > 1 and p.numel() and not isinstance(module, _NORMS):
                axis, tied = output_axis(module, own), tuple(names[id(p)][1:])
                self.weights.append(_Weight(label, name, axis, _stored(lens, name), tied))
        if not self.weights:
            what = "there is no weight of two or more axes among the parameters"
            raise BadInput(what, argument="lens", call="compression")
        # a copy whose weights move, and the loss where they are
        self._trial = copy_of(model, "compression")
        self.here = {name: p.detach() for name, p in model.named_parameters()}
        self._moving = dict(self._trial.named_parameters())
        self._compressed: dict[str, Scheme] = {}  #: layers of that copy, by label
        self.total = sum(p.numel() * _stored(lens, name) for name, p in self.here.items())  #: bits of the network
        self.losses = sample_losses(problem, model)
        self.risk = float(self.losses.mean())
        inside = torch.finfo(coarsest_inside(problem, model)).eps
        self.rounding = _ROUNDINGS * inside * float(self.losses.abs().mean())
        self._draws = draws

    def size(self, weight: _Weight, scheme: Scheme | None = None) -> int:
        """Return the bits of a weight, compressed or as it is."""
        p = self.here[weight.parameter]
        d = p.shape[weight.axis]
        return weight.stored * p.numel() if scheme is None else scheme.size(d, p.numel() // d, weight.stored)

    def change(self, weight: _Weight, scheme: Scheme) -> Tensor | None:
        """Return dw; None where the scheme leaves nothing of the weight."""
        p = self.here[weight.parameter].detach()
        made = in_matrix(scheme, p, weight.axis)
        return None if made is None else made - p

    def measured(self, step: Mapping[str, Tensor], share: float) -> Tensor:
        """Return each sample's loss after `share` of a step, (n,)."""
        self._compress({})
        with torch.no_grad():
            for name, d in step.items():
                self._moving[name].add_(d, alpha=share)
        try:
            return sample_losses(self.problem, self._trial)
        finally:
            with torch.no_grad():
                for name in step:
                    self._moving[name].copy_(self.here[name])

    def _compress(self, chosen: Mapping[str, Scheme]) -> None:
        """Compress the layers of the copy whose weights move; those that already are so stay."""
        for weight in self.weights:
            one = chosen.get(weight.label)
            if one != self._compressed.get(weight.label):
                d = None if one is None else self.change(weight, one)
                here = self.here[weight.parameter]
                with torch.no_grad():
                    self._moving[weight.parameter].copy_(here if d is None else here + d)
        self._compressed = dict(chosen)

    def step(self, chosen: Mapping[str, Scheme]) -> dict[str, Tensor]:
        """Return the change of every weight that is compressed, by parameter; `chosen` is by label."""
        changes = {weight.parameter: self.change(weight, chosen[weight.label]) for weight in self.weights
                   if weight.label in chosen}  # fmt: skip
        return {name: d for name, d in changes.items() if d is not None}

    def rise(self, chosen: Mapping[str, Scheme], problem: Problem | None = None) -> tuple[float, float]:
        """Return (measured rise of the loss, its standard error over samples) with some layers compressed."""
        here = self.losses if problem is None else sample_losses(problem, self.model)
        self._compress(chosen)
        return _over_samples(sample_losses(problem or self.problem, self._trial) - here)

    def rows(self, schemes: Sequence[Scheme], progress: Progress) -> list[CompressedLayer]:
        """Return every layer under every scheme, then all layers together under each."""
        found = []
        for done, weight in enumerate(self.weights):
            progress("layers", done, len(self.weights) + 1)
            changes = {one: self.change(weight, one) for one in schemes}
            steps = {one: {weight.parameter: d} for one, d in changes.items() if d is not None}
            terms = expanded(self.problem, self.model, list(steps.values()))
            found += [
                self._row(weight.label, one, step, own) for (one, step), own in zip(steps.items(), terms, strict=True)
            ]
        progress("layers", len(self.weights), len(self.weights) + 1)
        for one in schemes:
            if step := self.step({weight.label: one for weight in self.weights}):
                (own,) = expanded(self.problem, self.model, [step])
                found.append(self._row("", one, step, own))
        progress("layers", len(self.weights) + 1, len(self.weights) + 1)
        return found

    def _row(self, layer: str, scheme: Scheme, step: Mapping[str, Tensor], terms: RiskTerms) -> CompressedLayer:
        # the loss after a quarter of the change, half, three quarters, and all
        quarter, half, most, whole = (self.measured(step, share) - self.losses for share in (0.25, 0.5, 0.75, 1.0))
        first, second = sum(terms.first.values()), sum(terms.second.values())
        forecast = first + second
        rest, higher = _rest(
            *(float(change.mean()) - first * share - second * share**2
              for share, change in ((0.25, quarter), (0.5, half), (0.75, most)))
        )  # fmt: skip
        note = "" if rest <= _ALLOWED * abs(forecast) else f"higher orders: about {rest:.2g}"
        note = "rounding" if 0 < abs(forecast) <= self.rounding else note
        rise, stderr = _over_samples(whole)
        _, by_sample = _over_samples(6 * half - 8 * quarter)  # both terms of each sample, but for third orders
        of = [weight for weight in self.weights if weight.parameter in step]
        lengths = {w.parameter: dot([step[w.parameter]], [step[w.parameter]]) for w in of}
        norm = sum(dot([self.here[w.parameter]], [self.here[w.parameter]]) for w in of)
        size = sum(self.size(w, scheme) for w in of) / sum(self.size(w) for w in of)
        return CompressedLayer(
            layer, scheme.name, size,
            math.sqrt(sum(lengths.values()) / norm) if norm else 0.0, first, second, forecast, by_sample, rest,
            forecast + higher,
            not note, rise, stderr, sum(lengths.values()),
            sum(self._traces[name] * length for name, length in lengths.items()), note,
        )  # fmt: skip

    @cached_property
    def _traces(self) -> dict[str, float]:
        """Return the mean of the Hessian's diagonal for each weight: of products with random signs, for all at once."""
        names = [weight.parameter for weight in self.weights]
        operator, total = Hessian(self.problem, names, model=self.model), dict.fromkeys(names, 0.0)
        for _ in range(_PROBES):
            signs = {name: random_signs(p.shape, p, self._draws) for name, p in operator.space.parameters.items()}
            for name, product in operator(signs).items():
                total[name] += dot([signs[name]], [product]) / product.numel() / _PROBES
        return total


def _rest(near: float, far: float, later: float) -> tuple[float, float]:
    """Return (the size of R(1) that is expected, an estimate of R(1) with its sign).

    Args:
        near: R(1/4).
        far: R(1/2).
        later: R(3/4).

    Where one order decides, R grows from 1/2 to 1 as from 1/4 to 1/2: by 8 for the third, by 16 for the fourth, and by
    4 where units of a ReLU network switch. Orders that cancel show no such growth: R is then the sum of these three
    that has the measured values, and R(t) / t^2 continues with a third difference of 0.

    >>> _rest(1 / 4**3, 1 / 2**3, 3**3 / 4**3)  # t^3
    (1.0, 1.0)
    >>> rest, higher = _rest(*(t**3 - 2 * t**4 for t in (0.25, 0.5, 0.75)))  # 0 at half
    >>> round(rest, 9), round(higher, 9)
    (1.0, -1.0)
    """
    grows = far / near if near else _GROWTH[1]
    growth = min(max(grows, _GROWTH[0]), _GROWTH[1]) if grows > 0 else _GROWTH[1]
    higher = 16 * near - 12 * far + 16 / 3 * later
    return max(growth * max(abs(far), _GROWTH[0] * abs(near)), abs(higher)), higher


def _over_samples(changes: Tensor) -> tuple[float, float]:
    """Return the mean over samples, and its standard error; NaN for one sample."""
    n = len(changes)
    return float(changes.mean()), float(changes.std()) / n**0.5 if n > 1 else math.nan


# The plan: what each layer becomes


def _within(
    work: _Work, rows: Sequence[CompressedLayer], schemes: Sequence[Scheme], level: float
) -> tuple[dict[str, Scheme], dict[str, Any]]:
    """Return the largest group of layers whose measured rise stays below the level, under the scheme of fewest bits.

    Layers join in the order of their own rises.
    """
    target = min((one for one in schemes if one.quantises), key=lambda one: one.bits, default=schemes[0])
    own = sorted((row for row in rows if row.layer and row.scheme == target.name), key=lambda row: row.upper)
    order = [row.layer for row in own if row.upper <= level]

    def fits(few: int) -> bool:
        rise, stderr = work.rise(dict.fromkeys(order[:few], target))
        return rise + (1.96 * stderr if math.isfinite(stderr) else 0.0) <= level

    few = largest_group(len(order), fits)
    return dict.fromkeys(order[:few], target), {"scheme": target.name, "level": level}


def _cheapest(
    work: _Work,
    rows: Sequence[CompressedLayer],
    schemes: Sequence[Scheme],
    budget: float,
    trials: int | None,
    progress: Progress,
) -> tuple[dict[str, Scheme], dict[str, Any]]:
    """Return the scheme of each layer within a budget: by the sum of the layers' rises, then by exchanges."""
    quantising = [one for one in schemes if one.quantises]
    alone = {(row.layer, row.scheme): row.rise for row in rows}
    options = [
        [
            LayerOption(work.size(w), 0.0),
            *(LayerOption(work.size(w, one), alone[w.label, one.name]) for one in quantising),
        ]
        for w in work.weights
    ]
    rest = work.total - sum(of[0].size for of in options)  # biases, norms and all else that stays
    room = math.floor(budget * work.total) - rest

    def schemes_of(choice: Allocation) -> dict[str, Scheme]:
        return {w.label: quantising[at - 1] for w, at in zip(work.weights, choice, strict=True) if at}

    start = allocated(options, room)
    found = exchanged(options, room, start, lambda choice: work.rise(schemes_of(choice))[0], progress, trials)
    first, _ = work.rise(schemes_of(start))
    # one scheme for all layers that fits, the one of the smallest rise
    uniform = [row for row in rows if not row.layer and any(row.scheme == one.name for one in quantising)]
    sizes = {row.scheme: (rest + row.size * (work.total - rest)) / work.total for row in uniform}
    fitting = min((row for row in uniform if sizes[row.scheme] <= budget), key=lambda row: row.rise, default=None)
    beside = None if fitting is None else {
        "scheme": fitting.scheme, "size": sizes[fitting.scheme],
        "rise": fitting.rise, "rise_stderr": fitting.rise_stderr,
    }  # fmt: skip
    return schemes_of(found.choice), {
        "budget": budget, "uniform": beside, "before_exchange": first,
        "exchanges": found.made, "trials": found.trials, "ended": found.ended,
    }  # fmt: skip
