"""The argument `measures=`: names, or a preset: the summary, all of the pass, all but what runs by name, a family."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from flatlens.errors import BadInput, UnknownName
from flatlens.measures.definition import MEASURES, Measure, named

Choice: TypeAlias = "str | Measure | Iterable[str | Measure] | None"
"""The argument `measures=`: a preset, names, or measures; None is the summary."""

SUMMARY = (
    "loss", "accuracy", "test_loss", "test_accuracy", "generalisation_gap",
    "sharpness", "hessian_trace", "relative_flatness_ggn.sum", "adaptive_sharpness_ggn",
    "mls", "jacobian_norm", "log_volume", "local_dimension", "weight_norm",
)  # fmt: skip
"""The network's numbers in the summary, by row."""

PRESETS = ("summary", "pass", "all")
FAMILY = "family:"  #: begins a preset: all measures of a family, "family:flatness"

SAME_ALWAYS = {"parameter_jacobian_frobenius": "interpolation_sharpness"}
SAME_WHERE_AFFINE = {"relative_flatness": "relative_flatness_ggn", "neuron_flatness": "neuron_flatness_ggn"}
SAME_WITHOUT_CURVATURE = {"hessian_trace": "ggn_trace", "adaptive_sharpness": "adaptive_sharpness_ggn"}
"""Measures with the value of another one: always; where the outputs are affine in each layer's weight; where they are
affine in each parameter. A preset has the second one alone."""


@dataclass(frozen=True)
class Asked:
    """The measures that a call asks for.

    >>> asked_for("family:compression").preset, [one.key for one in asked_for("mls").measures]
    ('family:compression', ['mls'])
    """

    measures: tuple[Measure, ...]
    preset: str = ""  #: empty for names
    spelled: Mapping[str, str] = field(default_factory=dict)  #: the name of a row, by the caller's spelling

    @property
    def brief(self) -> bool:
        """Return whether these are the summary's measures, whose products are limited."""
        return self.preset == "summary"

    @property
    def in_full(self) -> bool:
        """Return whether measures take products at single layers, and samples' gradients in large shared weights."""
        return self.preset not in ("summary", "pass")

    @property
    def answers(self) -> dict[str, Measure]:
        """The row of each measure's number of the network."""
        if self.brief:
            found = {row: MEASURES[row.partition(".")[0]] for row in SUMMARY}
            return {row: one for row, one in found.items() if one in self.measures}
        return {one.key: one for one in self.measures}

    def shows(self, row: str, layer: str | None) -> bool:
        """Return whether the report has this row: the summary has one number of each measure, and its layers."""
        return not self.brief or (row in SUMMARY if layer is None else row in _STEMS)


_STEMS = frozenset(row.partition(".")[0] for row in SUMMARY)


def asked_for(measures: Choice, held_out: bool = True) -> Asked:
    """Return the measures of a preset, or the named ones.

    Args:
        measures: "summary", "pass", "all", "family:NAME", names or measures; None is "summary".
        held_out: Whether there is held-out data, without which a preset leaves out the measures that need it.

    Raises:
        UnknownName: no preset, family or measure has this name.
    """
    given = "summary" if measures is None else measures
    each = [given] if isinstance(given, str | Measure) else list(given) if isinstance(given, Iterable) else []
    for text in [one for one in each if isinstance(one, str)]:
        if text.startswith(FAMILY):
            families = dict.fromkeys(one.card.family for one in MEASURES.values())
            if text.removeprefix(FAMILY) not in families:
                raise UnknownName.among("family", text.removeprefix(FAMILY), families)
        elif text not in PRESETS:
            # a name that is not spelled like a measure; its options are read below
            if text not in MEASURES and (text.isidentifier() or ":" in text.partition("(")[0]):
                raise UnknownName.among("measure", text, [*MEASURES, *PRESETS])
            continue
        if len(each) > 1:
            raise BadInput("a preset cannot be combined with names", argument="measures", value=text,
                           remedy="give it alone, or name every measure", call="measure")  # fmt: skip
    if len(each) == 1 and isinstance(preset := each[0], str) and (preset in PRESETS or preset.startswith(FAMILY)):
        possible = (one for one in MEASURES.values() if held_out or not one.held_out)
        return Asked(tuple(one for one in possible if in_preset(one, preset)), preset)
    found = named(each or given)
    pairs = zip(each, found, strict=False)
    spelled = {text: one.key for text, one in pairs if isinstance(text, str) and text != one.key}
    return Asked(tuple(found), spelled=spelled)


def in_preset(one: Measure, preset: str) -> bool:
    """Return whether a measure belongs to a preset.

    >>> [in_preset(MEASURES["sharpness"], preset) for preset in ("summary", "pass", "all", "family:hessian")]
    [True, False, True, True]
    """
    if one.by_name:
        return False
    if preset == "summary":
        return one.card.name in _STEMS
    if preset == "pass":
        return not one.on_request and one.card.name not in SAME_ALWAYS | SAME_WHERE_AFFINE
    return preset == "all" or one.card.family == preset.removeprefix(FAMILY)
