"""The cards of measures in words, by the names of rows and columns, and the page docs/measures.md made of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from itertools import chain

from flatlens.column import Column
from flatlens.estimate import Estimate
from flatlens.measures import HEADWISE, LAYERWISE, MEASURES, NEURONWISE, PERMUTATION, Card, Measure, PassMeasure, named
from flatlens.measures.definition import GRADIENTS_OF_SAMPLES, PAPERS, in_preset

#: A move of the weights that leaves the network's function as it is: (name on a card, short, in words).
MOVES = (
    (LAYERWISE, "layer", "layer-wise rescaling"),
    (NEURONWISE, "neuron", "neuron-wise rescaling"),
    (PERMUTATION, "order", "permuting the neurons"),
    (HEADWISE, "head", "changing the basis of attention heads"),
)

SIGNS = {"lower bound": "≥", "upper bound": "≤"}
"""The sign before a value that is a bound, by the kind of its estimate."""


def with_error(estimate: Estimate, value: str) -> str:
    """Return `value`, the estimate's in words, with its sign if it is a bound, and with its 95% interval.

    >>> with_error(Estimate(5.4, 8.0, "estimate"), "5.4"), with_error(Estimate(2.0, kind="lower bound"), "2")
    ('5.4 ± 16', '≥2')
    """
    return f"{SIGNS.get(estimate.kind, '')}{value}" + (f" ± {estimate.margin:.2g}" if estimate.margin else "")


def number(value: float, digits: int = 3) -> str:
    """Return a number in few characters.

    >>> number(0.0000123456), number(12345.6, 2), number(float("nan")), number(1e10)
    ('1.23e-5', '1.2e4', '-', '1e10')
    """
    if value != value:
        return "-"
    digit, e, power = f"{value:.{digits}g}".partition("e")
    return f"{digit}e{int(power)}" if e else digit


FAMILIES = {
    "sharpness": "Size of the derivatives of the outputs, and so of the risk, with respect to the parameters.",
    "sensitivity": "Size of the derivatives of the outputs with respect to the input.",
    "compression": "Volume and dimensions of the image of a small ball of inputs.",
    "flatness": "Curvature of the risk along a layer's own weights, in units of these weights.",
    "normalised": "Sharpness in units of the parameters: of each one, of rows and columns, of whole matrices.",
    "norms": "Sizes of weights, features and outputs, for comparison.",
    "hessian": "Eigenvalues, traces and the spectrum of the second derivatives.",
    "perturbation": "Changes of the risk and the outputs at a finite distance: at other weights, features and inputs.",
    "data": "How well the sample represents its distribution, and whether labels are constant near it.",
    "generalisation": "The risk, and the gap between training and held-out data.",
}
"""The common property of each family's measures, in the order in which families are listed."""

BRACES = {
    r"\\math(?:rm|cal)\{(\w+)\}": r"\1",
    r"([_^])\{(\w+)\}(?=\\)": r"\1\2 ",
    r"([_^])\{(\w+)\}": r"\1\2",
    r"\\overline\{([^{}]*)\}": r"mean(\1)",
    r"\\sqrt\{([^{}]*)\}": r"√(\1)",
    r"\\partial ": "∂",
}
WORDS = {
    **{r"\lambda": "λ", r"\kappa": "κ", r"\rho": "ρ", r"\sigma": "σ", r"\theta": "θ", r"\phi": "φ", r"\tau": "τ"},
    **{r"\eta": "η", r"\Sigma": "Σ", r"\partial": "∂", r"\sum": "Σ", r"\max": "max", r"\min": "min", r"\log": "log"},
    **{r"\|": "‖", r"\,": " ", r"\leq": "≤", r"\ell": "ℓ", r"\delta": "δ", "^2": "²", "^T": "ᵀ"},
}
"""The LaTeX commands of the cards' symbols, as characters."""

SHORT_MEANINGS = {
    "loss": "mean loss over the data",
    "accuracy": "share of samples classified correctly",
    "test_loss": "mean loss over the held-out data",
    "test_accuracy": "share of held-out samples classified correctly",
    "generalisation_gap": "test loss minus training loss",
    "sharpness": "curvature of the loss in its steepest direction of the parameters",
    "hessian_trace": "sum of the loss's curvatures over all directions of the parameters",
    "relative_flatness": "curvature along the weights of a layer, in units of these weights",
    "relative_flatness_ggn": "curvature along the weights of a layer, in units of these weights",
    "adaptive_sharpness": "curvature along each parameter in units of its value, summed",
    "adaptive_sharpness_ggn": "curvature along each parameter in units of its value, summed",
    "mls": "largest response of the outputs to a small change of the input",
    "jacobian_norm": "the same response at the most sensitive sample",
    "log_volume": "log of the volume to which a small ball of inputs is mapped",
    "local_dimension": "number of directions in which the outputs respond to the input",
    "weight_norm": "size of the weights of all linear layers together",
}
"""The meaning of the numbers that most people ask for, in a line of a narrow screen."""

RUN_WHEN_NAMED = "by name, or with the presets all and family:NAME"


def spelling(name: str) -> str:
    """Return the measure, with its options, that a row or column belongs to: without its part and its layer.

    >>> [spelling(n) for n in ("local_volume(top_k=3)[fc1]", "relative_flatness.sum", "mls[fc1]")]
    ['local_volume(top_k=3)', 'relative_flatness', 'mls']
    """
    return Column.parse(name).measure


def in_short(name: str) -> str:
    """Return the meaning of a row in a short line; "" where it has none.

    >>> in_short("weight_norm"), in_short("weight_norm.spectral")
    ('size of the weights of all linear layers together', '')
    """
    column = Column.parse(name)
    summed = ", summed over layers" if column.part == "sum" else ""
    return SHORT_MEANINGS.get(column.name, "") + summed if not column.part or summed else ""


def card_of(name: str, cards: Sequence[Card]) -> Card | None:
    """Return the card of the measure that `name` belongs to."""
    return next((card for card in cards if card.name == Column.parse(name).name), None)


def invariances_of(name: str, card: Card) -> tuple[bool, ...]:
    """Return for each of MOVES whether the measure `name`, with this card, stays the same; an option may change that.

    >>> from flatlens.measures import catalogue
    >>> [invariances_of(n, card_of(n, catalogue())) for n in ("mls", "ggn_trace")]
    [(True, True, True, True), (False, False, True, False)]
    """
    under = card.invariant_under
    if card.name in MEASURES:  # results that are older than a transform do not know it
        under = named([spelling(name)])[0].invariant_under
    return tuple(move in under for move, _, _ in MOVES)


def by_family() -> dict[str, list[Measure]]:
    """Return the catalogue's measures by family, in the order of FAMILIES; unknown families come last."""
    measures = MEASURES.values()
    families = dict.fromkeys([*FAMILIES, *(one.card.family for one in measures)])
    found = {family: [one for one in measures if one.card.family == family] for family in families}
    return {family: members for family, members in found.items() if members}


def plain(symbol: str) -> str:
    r"""Return a card's LaTeX in characters that a terminal shows; "" if it has an unknown command.

    >>> [plain(s) for s in (r"\lambda_{max}(H)", r"\overline{\|x\|^2 \|Jf\|_2^2}", r"\frac{1}{2}")]
    ['λ_max(H)', 'mean(‖x‖² ‖Jf‖_2²)', '']
    """
    for pattern, letters in BRACES.items():
        symbol = re.sub(pattern, letters, symbol)
    for word, letters in WORDS.items():
        symbol = symbol.replace(word, letters)
    return "" if "\\" in symbol else " ".join(symbol.split())


def runs(measure: Measure) -> str:
    """Return in words which presets of `flatlens.measure` run the measure, apart from all and its family.

    >>> [runs(MEASURES[name]) for name in ("mls", "sharpness", "nmls", "ggn_norm")]
    ['summary, pass', 'summary', 'pass', 'by name, or with the presets all and family:NAME']
    """
    presets = [preset for preset in ("summary", "pass") if in_preset(measure, preset)]
    if not presets:
        return "by name" if measure.by_name else RUN_WHEN_NAMED
    said = [", ".join(presets) + (", where there is held-out data" if measure.held_out else "")]
    if isinstance(measure, PassMeasure) and measure.curvature is not None:
        said.append(f"at layers below a smooth activation {RUN_WHEN_NAMED}")
    if isinstance(measure, PassMeasure) and measure.needs & GRADIENTS_OF_SAMPLES:
        said.append(f"in large networks with shared weights {RUN_WHEN_NAMED}")
    return "; ".join(said)


PREFACE = """\
# The measures

[Which measure?](choosing.md) says which measure answers which question; [terms](glossary.md). A tick in the table:
the network-level value, without options, is unchanged by this [transform](glossary.md#bounds-and-transforms).
`flatlens list measures --markdown` writes this page from the code."""

LETTERS = """\
## Symbols

- L: the risk, the mean loss over the data; f: the network; n: samples, N: outputs, P: parameters.
- For a sample i: C_i is the output Hessian, the second derivative of its loss in the outputs; K_i (N x N) and G_i are
  the Gram matrices of the derivatives of the outputs in the parameters, df/dtheta df/dtheta^T, and in the input.
- For a linear layer: W is its weight (d x m), phi its m input features, J_p the output Jacobian at position p of its
  output. A convolution is a linear layer at every position of the image, with m = in k k. Contributions of positions,
  and of calls of a module, are summed before anything is squared.
- *Part*: a name with a dot, `report["weight_norm.spectral"]`. *Option*: `"local_volume(top_k=3)"`.
- Beyond 128 outputs, volumes and `local_dimension` need `outputs="exact"`, and `nmls` runs only when it is named."""


def page() -> str:
    """Return every measure by family, with its card and its docstring, in Markdown."""
    families = by_family()
    heads = ("measure", "meaning", *(words for _, _, words in MOVES))
    index = [_row(heads), _row(("---",) * len(heads))]
    for one in chain.from_iterable(families.values()):
        ticks = ("✓" if move in one.card.invariant_under else "" for move, _, _ in MOVES)
        index.append(_row([f"[`{one}`](#{one})", _escaped(one.card.meaning).replace("|", r"\|"), *ticks]))
    blocks = [PREFACE, "\n".join(index), LETTERS]
    for family, members in families.items():
        blocks += [f"## Family: {family}", FAMILIES.get(family, ""), *map(_entry, members)]
    sources = [("name", "paper"), ("---", "---"), *PAPERS.items()]
    blocks += ["## Sources", "[References](references.md) cites them.", "\n".join(map(_row, sources))]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _entry(measure: Measure) -> str:
    card = measure.card
    options = {f" with `{name}={value!r}`": under for (name, value), under in (measure.invariances or {}).items()}
    under_what = {
        option: ", ".join(words for move, _, words in MOVES if move in under) or "nothing"
        for option, under in {"": card.invariant_under, **options}.items()
    }
    meaning, *body = (inspect.getdoc(measure.compute) or "").split("\n\n")
    facts = {
        "Network-level value": "",
        "Unit": card.unit,
        "Source": card.source,
        "Cost": card.cost,
        "Run": runs(measure),
        "Invariant under": "; ".join(f"{moves}{option}" for option, moves in under_what.items()),
        "Options": ", ".join(f"`{name}={default!r}`" for name, default in measure.defaults().items()),
        'With `batchnorm="train"`': "defined" if measure.works_coupled else "",
    }
    if isinstance(measure, PassMeasure):
        largest = "; the largest as `.max`" if measure.place != "input" else ""
        facts["Network-level value"] = {
            "input": "at its input; by layer through that layer",
            "last": "the last linear layer's; `.sum` and `.max` are over layers",
        }.get(measure.answer, f"the sum over layers{largest}")
    return "\n\n".join([
        f"### `{card.name}`",
        f"$`{card.symbol}`$",
        *(_escaped(" ".join(paragraph.split())) for paragraph in (meaning, *body)),
        "\n".join(f"- {name}: {fact if '`' in fact else _escaped(fact)}" for name, fact in facts.items() if fact),
    ])  # fmt: skip


def _escaped(text: str) -> str:
    r"""Return plain-text formulas with Markdown's marks of emphasis and tags escaped; code stays as it is.

    >>> _escaped("||W||_F * <w_s, v> of `a_*b`")
    '||W||\\_F \\* \\<w_s, v> of `a_*b`'
    """
    parts = text.split("`")
    parts[::2] = [re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|[*<]", r"\\\g<0>", part) for part in parts[::2]]
    return "`".join(parts)
