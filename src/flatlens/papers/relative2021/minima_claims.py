"""Claims of relative2021 about the minima of LeNet5: section 6, Fig. 5 to 8, C.2."""

from __future__ import annotations

import re

from flatlens.papers.contrasts import stronger, unchanged, weaker
from flatlens.papers.evidence import correlated
from flatlens.papers.predictions import Prediction, PredictionKind
from flatlens.papers.relative2021.lenets import CODED, OF_ANOTHER, RIGHT, THEOREM_4, minima
from flatlens.papers.remarks import LEAST_CHANGE, STRONG

FLAT, TRACE, FISHER_RAO, PAC_BAYES, NORM = RIGHT
SECTION_6, C_2 = "relative2021 section 6, Fig. 5", "relative2021 C.2"

STRONGLY = "the novel relative flatness measure correlates strongly with generalization"
HIGHER = "relative flatness has higher correlation than all the competing measures"
WEAKEST = "only the Fisher-Rao norm is reparameterization invariant but shows the weakest correlation"
INVARIANT = (
    "both our proposed relative flatness and the Fisher-Rao norm are invariant to these reparameterization"  # sic
)
CHANGED = "these reparameterizations change traditional measures of flatness"
DECLINES = "For all other measures, the correlation with generalization declines substantially"
NEURONS = "Relative flatness and the Fisher-Rao norm are also invariant under neuron-wise reparameterizations"
NEURONS_BREAK = "which could be used to further break the correlation for the other measures"
PREPROCESSED = (
    "Using a simple preprocessing step (a neuron-wise reparameterization with the variance over the sample), our "
    "proposed measure becomes independent of all neuron-wise reparameterizations"
)
ANOTHER_LAYER = "It keeps the high correlation value, but due to less optimal feature space we observe smaller number"

_CODE = "The authors' code computes the measures of Fig. 5 otherwise than the text defines them."
_TWO_SENTENCES = (
    "C.2 names no exception; section 4 does: 'except for neuron-wise reparameterizations of the feature layer'. Every "
    "layer is moved here."
)
_NO_NUMBER = "The text names no least value; App. C of reparam2019, by the same authors, calls 0.7 strong."


def predictions() -> tuple[Prediction, ...]:
    """Return the predictions of X18."""
    return (*_correlations(), *_invariances(), *_declines(), *_another_layer())


def _correlations() -> list[Prediction]:
    rows = [
        Prediction(
            "flatness", "Relative flatness correlates positively with the generalisation gap.",
            SECTION_6, correlated(minima, FLAT, "gap"),
            kind="claim", quote=STRONGLY,
        ),
        Prediction(
            "flatness.ranks", "So do their ranks: Spearman's correlation.",
            SECTION_6, correlated(minima, FLAT, "gap", "spearman"),
            quote=STRONGLY, reason="The text does not say which correlation; one network can make or hide Pearson's.",
        ),
        Prediction(
            "flatness.strong",
            f"Relative flatness correlates strongly with the generalisation gap, r at least {STRONG:g}.",
            SECTION_6, correlated(minima, FLAT, "gap"), "above", STRONG,
            quote=STRONGLY, reason=_NO_NUMBER, headline=True,
        ),
        Prediction(
            "stronger", "Relative flatness correlates more strongly with it than each of the four other measures.",
            SECTION_6, stronger(minima, [FLAT], [TRACE, FISHER_RAO, PAC_BAYES, NORM], "gap"),
            kind="claim", quote=HIGHER, headline=True,
        ),
        Prediction(
            "fisher_rao.weakest", "The Fisher-Rao norm shows the weakest correlation.",
            "relative2021 section 6", weaker(minima, [FISHER_RAO], [FLAT, TRACE, PAC_BAYES, NORM], "gap"),
            kind="claim", quote=WEAKEST,
        ),
    ]  # fmt: skip
    for mine, others, coded in ((FLAT, (TRACE, FISHER_RAO, PAC_BAYES, NORM), ""), (CODED[0], CODED[1:], ".as_coded")):
        rows += [
            Prediction(
                f"stronger_than.{_slug(other)}{coded}",
                f"Relative flatness correlates more strongly with it than: {other.removesuffix(' (code)')}"
                f"{', both as the authors compute them in their code' if coded else ''}.",
                SECTION_6, stronger(minima, [mine], [other], "gap"),
                kind="reading" if coded else "claim", quote=HIGHER, reason=_CODE if coded else "",
            )
            for other in others
        ]  # fmt: skip
    return rows


def _invariances() -> list[Prediction]:
    """Return what each reparametrisation leaves unchanged."""
    rows = [
        Prediction(
            f"{_slug(name)}.invariant", f"{_title(name)}: layer-wise reparametrisation does not change it.",
            f"{C_2}, Fig. 7", unchanged(minima, name, f"moved {name}"), "below", LEAST_CHANGE,
            kind="theorem", quote=INVARIANT,
        )
        for name in (FLAT, FISHER_RAO)
    ]  # fmt: skip
    rows += [
        Prediction(
            f"{_slug(name)}.not_invariant",
            f"{_title(name)}: layer-wise reparametrisation changes it, by more than rounding.",
            "relative2021 section 1", unchanged(minima, name, f"moved {name}"), "above", LEAST_CHANGE,
            kind="claim" if name == TRACE else "reading", quote=CHANGED,
            reason="" if name == TRACE else "The text says it of measures of flatness; Fig. 7 shows it of this one.",
        )
        for name in (TRACE, PAC_BAYES, NORM)
    ]  # fmt: skip
    rows += [
        Prediction(
            f"{_slug(FLAT)}.neuronwise",
            f"{_title(FLAT)}: invariant to neuron-wise reparametrisation, the feature layer's included.",
            C_2, unchanged(minima, FLAT, f"neurons moved {FLAT}"), "below", LEAST_CHANGE,
            quote=NEURONS, reason=_TWO_SENTENCES,
        ),
        Prediction(
            f"{_slug(FISHER_RAO)}.neuronwise",
            f"{_title(FISHER_RAO)}: invariant to neuron-wise reparametrisation, of every layer.",
            C_2, unchanged(minima, FISHER_RAO, f"neurons moved {FISHER_RAO}"), "below", LEAST_CHANGE,
            kind="theorem", quote=NEURONS,
        ),
    ]  # fmt: skip
    rows.append(
        Prediction(
            "normalised.neuronwise",
            "Relative flatness of features divided by their standard deviation: invariant to neuron-wise "
            "reparametrisation.",
            "relative2021 section 4, Thm 4", unchanged(minima, THEOREM_4, f"neurons moved {THEOREM_4}"), "below",
            LEAST_CHANGE, quote=PREPROCESSED,
            reason="The text divides by the variance, for which it does not hold (docs/slips_relative.md).",
        )
    )  # fmt: skip
    return rows


def _declines() -> list[Prediction]:
    """Return what happens to the other measures' correlations."""
    moves: tuple[tuple[str, str, str, str, PredictionKind, str, str], ...] = (
        ("declines", "moved", "Layer-wise reparametrisation", f"{C_2}, Fig. 7", "claim", DECLINES, ""),
        ("declines.neuronwise", "neurons moved", "Neuron-wise reparametrisation", C_2, "reading", NEURONS_BREAK,
         "The text says that such moves 'could be used' so; these are ours, drawn at random."),
    )  # fmt: skip
    return [
        Prediction(
            f"{_slug(name)}.{row}", f"{after} weakens the positive correlation of {_with_article(name)} with the gap.",
            place, weaker(minima, [f"{prefix} {name}"], [name], "gap", positive=True),
            kind=kind, quote=quote, reason=reason,
        )
        for row, prefix, after, place, kind, quote, reason in moves
        for name in (TRACE, PAC_BAYES, NORM)
    ]  # fmt: skip


def _another_layer() -> list[Prediction]:
    place = f"{C_2}, Fig. 8"
    return [
        Prediction(
            "another_layer",
            "Relative flatness of another fully connected layer correlates positively with the gap.",
            place, correlated(minima, OF_ANOTHER, "gap"),
            kind="claim", quote=ANOTHER_LAYER,
        ),
        Prediction(
            "another_layer.strong", f"It keeps the high correlation, r at least {STRONG:g}.",
            place, correlated(minima, OF_ANOTHER, "gap"), "above", STRONG,
            quote=ANOTHER_LAYER, reason=_NO_NUMBER,
        ),
        Prediction(
            "another_layer.less",
            "Its correlation is smaller than that of the penultimate layer's features, which is above 0.",
            place, weaker(minima, [OF_ANOTHER], [FLAT], "gap", positive=True),
            kind="claim", quote=ANOTHER_LAYER,
        ),
    ]  # fmt: skip


def _with_article(name: str) -> str:
    return f"the {name} measure" if name == PAC_BAYES else f"the {name}"


def _title(name: str) -> str:
    return name[0].upper() + name[1:]


def _slug(name: str) -> str:
    return re.sub(r"\W+", "_", name.replace(" (code)", "").replace("'s", "")).lower()
