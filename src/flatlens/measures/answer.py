"""The answer of a report: how well the network fits, what is unusual about it, how certain the numbers are, what next.

Every sentence is a template filled with numbers of the report, or with what `about` says: `constant`, the best fit by
outputs that are the same for all samples, the origin of the weights, and what `state_of` finds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from flatlens.column import Column
from flatlens.estimate import Estimate, Key, Kind
from flatlens.measures.definition import MEASURES, RESCALINGS, RISK_FAMILY, named
from flatlens.measures.lens import Lens
from flatlens.progress import count_of, listed

UNTRAINED = "random"  #: the first word on the weights of an untrained network, in `about["origin"]`
FITS = 0.1  #: ratio of the loss to that of constant outputs up to which the network fits
HARDLY = 0.95  #: ratio of the loss to that of constant outputs from which the network hardly fits
FAR = 2.0  #: ratio of the loss to that of constant outputs from which the preparation is in doubt
DESCENT = 0.1  #: share of the loss by which one gradient step lowers it where the network is not at a minimum
LOST = 0.5  #: share of the samples without a response in some direction of the outputs from which it is unusual
DEAD = 0.1  #: share of a layer's features that are constant from which it is unusual
_MOST = 3  #: names that a sentence lists
_COMPARED = 6  #: names by which networks can be compared, or not, that a sentence lists
_FEW = 3  #: numbers of a report up to which each is described
EXAMPLE = "adaptive_sharpness"  #: a measure that no rescaling changes


def answer(estimates: Mapping[Key, Estimate], about: Mapping[str, Any]) -> list[str]:
    """Return at most three sentences on the network's numbers."""
    rows = {name: e for (name, layer), e in estimates.items() if layer is None}
    whole = {
        name: e for name, e in rows.items() if not Column.parse(name).part or Column.parse(name).measure not in rows
    }
    unusual = _unusual(whole, about)
    sentences = [_fit(whole, about), f"Unusual: {'; '.join(unusual)}." if unusual else "", _certain(whole, about)]
    return [sentence for sentence in [*sentences, _to_compare(whole)] if sentence][:3]


def state_of(lens: Lens, estimates: Mapping[Key, Estimate]) -> dict[str, Any]:
    """Gradient's norm, and the layer with the most constant features: one backward and one forward pass."""
    if lens.problem.sharded:
        return {}
    found: dict[str, Any] = {}
    if estimates.get(("sharpness", None), Estimate(math.nan)) > 0:
        gradient = lens.attempted(lambda: lens.gradient, "the gradient")
        if not isinstance(gradient, str):
            found["gradient_norm"] = math.sqrt(sum(float(part.double().square().sum()) for part in gradient.values()))
    scales = lens.attempted(lambda: lens.planned(lens.feature_scale), "the features' spread")
    if not isinstance(scales, str):
        inner = list(lens.plan.weights.items())[1:]  # the first layer reads the data
        counts = [(lens.constant_features(at), w.adapter.features(w.matrix.W), at) for at, w in inner if at in scales]
        if counts:
            constant, features, layer = max(counts, key=lambda row: row[0] / row[1])
            found["constant_features"] = {"layer": layer, "constant": constant, "features": features}
    return found


def _fit(rows: Mapping[str, Estimate], about: Mapping[str, Any]) -> str:
    """Return whether the network fits the data: with numbers, where its loss is among the rows."""
    loss, accuracy, constant = rows.get("loss"), rows.get("accuracy"), about.get("constant")
    if has_random_weights(about):
        return "The network is untrained: its weights are random."
    if loss is None or not math.isfinite(loss.value):
        return ""
    share = math.nan if accuracy is None or accuracy.kind == "undefined" else accuracy.value
    right = "" if math.isnan(share) else f", its accuracy {100 * share:.3g}%"
    if constant is None:
        return f"The loss of the network is {loss:.3g}{right}."
    reached = f"the best constant prediction has a loss of {constant['loss']:.3g}"
    ratio = _ratio(rows, about)
    if ratio > FAR:
        question = "Is it trained, and with this preparation of the data?"
        return f"The network does not fit these data: its loss is {loss:.3g}{right}, and {reached}. {question}"
    if hardly_fits(loss.value, share, about):
        return f"The network hardly fits these data: its loss is {loss:.3g}{right}, and {reached}. Is it trained?"
    if ratio > 1:
        confident = "the network's wrong predictions are very confident"
        return f"The loss of the network is {loss:.3g}{right}, and {reached}: {confident}."
    gap, held_out = rows.get("generalisation_gap"), ""
    if gap is not None and gap.kind != "undefined":
        held_out = f"; the gap to held-out data is {gap:.3g}" + (f" ± {gap.margin:.2g}" if gap.margin else "")
    if ratio > FITS:
        return f"The loss of the network is {loss:.3g}{right}, and {reached}{held_out}."
    return f"The network fits the data: its loss is {loss:.3g}{right}, and {reached}{held_out}."


def has_random_weights(about: Mapping[str, Any]) -> bool:
    """Return whether the origin of the weights says that they are random."""
    return str(about.get("origin", {}).get("weights", "")).startswith(UNTRAINED)


def _ratio(rows: Mapping[str, Estimate], about: Mapping[str, Any]) -> float:
    """Return the loss over that of constant outputs; NaN where one is not known."""
    constant = about.get("constant")
    return rows["loss"].value / constant["loss"] if constant and "loss" in rows else math.nan


def accuracy_by_chance(share: float, n: int) -> float:
    """Return the accuracy that n samples do not tell from that of one class for all."""
    return share + 1.96 * math.sqrt(share * (1 - share) / n)


def hardly_fits(loss: float, accuracy: float, about: Mapping[str, Any]) -> bool:
    """Return whether the best constant prediction has about this loss, and the accuracy, if any, is one by chance."""
    if not (constant := about.get("constant")):
        return False
    chance = accuracy_by_chance(constant["share"], about["n"])
    return bool(loss > HARDLY * constant["loss"] and not accuracy > chance)


def _unusual(rows: Mapping[str, Estimate], about: Mapping[str, Any]) -> list[str]:
    """Return what is unusual about the network, apart from its fit."""
    found = []
    loss, top, norm = rows.get("loss"), rows.get("sharpness"), about.get("gradient_norm")
    poor = has_random_weights(about) or _ratio(rows, about) > HARDLY  # no minimum is expected there
    if not poor and norm is not None and loss is not None and top is not None and loss > 0 and top > 0:
        descent = norm**2 / (2 * top.value)  # of the quadratic with the largest curvature in every direction
        if descent > DESCENT * loss.value:
            share = min(descent / loss.value, 1.0)
            step = f"a step along the gradient (norm {norm:.2g}) lowers the loss by about {share:.0%}"
            found.append(f"this is not a minimum, as {step}")
    if (dead := about.get("constant_features")) and dead["constant"] >= DEAD * dead["features"]:
        found.append(f"{dead['constant']} of {dead['features']} features that {dead['layer']} reads are constant")
    volume = rows.get("log_volume")
    if volume is not None and volume.samples is not None and "softmax" not in volume.note:  # there it is known
        lost = int((volume.samples == -torch.inf).sum())
        if lost >= LOST * len(volume.samples):
            found.append(f"at {lost} of {len(volume.samples)} samples the outputs do not respond in every direction")
    return found


def _certain(rows: Mapping[str, Estimate], about: Mapping[str, Any]) -> str:
    """Return how certain the numbers are: each one's error if they are few, else those that are not exact by kind."""
    samples = count_of(about["n"], "sample") if "n" in about else "samples"
    if len(rows) > _FEW:  # an accuracy without classes was not asked for
        rows = {name: e for name, e in rows.items() if e.kind != "undefined" or not _is_risk(name)}
    kinds: dict[Kind, list[str]] = {}
    for name, e in rows.items():
        kinds.setdefault(e.kind, []).append(name)
    if not rows:
        return ""
    if set(kinds) == {"exact"} and len(rows) > 1:
        return f"The {len(rows)} numbers are exact for these {samples}, up to rounding."
    if len(rows) <= _FEW:
        told = []
        for name, e in rows.items():
            how = {
                "exact": f"{e:.4g}, exact for these {samples}, up to rounding",
                "estimate": f"{e:.4g} ± {e.margin:.2g} (95% interval)",
                "lower bound": f"at least {e:.4g}",
                "upper bound": f"at most {e:.4g}",
                "undefined": "undefined",
            }[e.kind]
            told.append(f"{name} is {how}" + (f": {e.note}" if e.note and e.kind != "exact" else ""))
        return f"{'; '.join(told)}."
    exact = len(kinds.pop("exact", ()))
    told = [f"{exact} of {len(rows)} numbers {'is' if exact == 1 else 'are'} exact for these {samples}"]
    for kind, names in kinds.items():
        several = len(names) > 1
        form = kind if kind == "undefined" else f"{kind}s" if several else f"{'an' if kind[0] in 'eu' else 'a'} {kind}"
        each = [f"{name} (± {rows[name].margin:.2g})" if rows[name].margin else name for name in names]
        told.append(f"{listed(each, _MOST)} {'are' if several else 'is'} {form}")
    return f"{'; '.join(told)}."


def _is_risk(name: str) -> bool:
    one = MEASURES.get(Column.parse(name).name)
    return one is not None and one.card.family == RISK_FAMILY


def _to_compare(rows: Mapping[str, Estimate]) -> str:
    """Return by which numbers networks can be compared: the invariant ones, and which are not."""
    stable: list[str] = []
    changed: list[str] = []
    for name, e in rows.items():
        if Column.parse(name).name not in MEASURES or _is_risk(name) or e.kind == "undefined":
            continue
        (one,) = named([Column.parse(name).measure])
        (stable if one.invariant_under >= RESCALINGS else changed).append(name)
    if not stable:
        if not changed:
            return ""
        which = "an invariant measure" if EXAMPLE in changed else f"an invariant measure, such as {EXAMPLE}"
        moved = f"Rescaling the weights can change {listed(changed, _COMPARED)} without changing the function"
        return f"{moved}: compare networks by {which}."
    are = ("is", "are")[len(stable) > 1], ("is", "are")[len(changed) > 1]
    others = f"; {listed(changed, _COMPARED)} {are[1]} not" if changed else ""
    invariant = f"{listed(stable, _COMPARED)}, which {are[0]} invariant under layer-wise and neuron-wise rescaling"
    return f"Compare networks by {invariant}{others}."
