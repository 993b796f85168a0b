"""The page docs/measures.md, written from the measures themselves."""

from __future__ import annotations

import inspect
import re

from flatlens.measures import Measure, PassMeasure
from flatlens.report.cards import FAMILIES, MOVES, by_family, runs

PREFACE = """\
# The measures

`flatlens list measures --markdown` writes this page from the code: change a measure's docstring, not the page.
[choosing.md](choosing.md) says which measure answers which question, and lists the papers behind the names of the
sources. [glossary.md](glossary.md) defines the terms.

L is the risk, the mean loss over the data, and f the network. n: samples, N: outputs, P: parameters. For a sample i:
C_i is the output Hessian, the second derivative of its loss in the outputs; K_i and G_i are the Gram matrices of the
derivatives of the outputs with respect to the parameters (df/dtheta df/dtheta^T, N x N) and to the input. For a linear
layer: W is its weight (d x m), phi its m input features, J_p the output Jacobian at position p of the layer's output. A
convolution is a linear layer at every position of the image, with m = in k k. The contributions of the positions to a
weight are summed before anything is squared; the same holds for token-wise layers and for modules called twice.
Beyond 128 outputs, volumes and `local_dimension` need `outputs="exact"`, and `nmls` runs only when it is named.
*Part*: a name with a dot, `report["weight_norm.spectral"]`. *Option*: `"local_volume(top_k=3)"`."""


def page() -> str:
    """Return every measure by family, with its card and its docstring, in Markdown."""
    families = by_family()
    index = [f"| {family} | {', '.join(f'[`{m}`](#{m})' for m in members)} |" for family, members in families.items()]
    blocks = [PREFACE, "\n".join(["| family | measures |", "|---|---|", *index])]
    for family, members in families.items():
        blocks += [f"## Family: {family}", FAMILIES.get(family, ""), *(_entry(one) for one in members)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _entry(measure: Measure) -> str:
    """Return one measure's section."""
    card = measure.card
    meaning, *body = (inspect.getdoc(measure.compute) or "").split("\n\n")
    facts = {
        "Network's number": _number(measure),
        "Unit": card.unit,
        "Source": card.source,
        "Cost": card.cost,
        "Run": runs(measure),
        "Survives": _survived(measure),
        "Options": ", ".join(f"`{name}={default!r}`" for name, default in measure.defaults().items()),
        'With `batchnorm="train"`': "defined" if measure.works_coupled else "",
    }
    return "\n\n".join([
        f"### `{card.name}`",
        f"$`{card.symbol}`$",
        *(_escaped(" ".join(paragraph.split())) for paragraph in (meaning, *body)),
        "\n".join(f"- {name}: {fact if '`' in fact else _escaped(fact)}" for name, fact in facts.items() if fact),
    ])  # fmt: skip


def _number(measure: Measure) -> str:
    """Return how the network's answer is taken, and its other parts."""
    if not isinstance(measure, PassMeasure):
        return ""
    if measure.answer == "input":
        return "at its input; by layer through that layer"
    if measure.answer == "last":
        return "the last linear layer's; `.sum` and `.max` are over layers"
    return "the sum over layers" + ("; the largest as `.max`" if measure.place != "input" else "")


def _survived(measure: Measure) -> str:
    """Return the moves under which the measure stays the same, and the options that change this."""
    cases = {"": measure.card.invariant_under}
    for (name, value), under in (measure.invariances or {}).items():
        cases[f" with `{name}={value!r}`"] = under
    told = [
        (", ".join(words for move, _, words in MOVES if move in under) or "nothing") + option
        for option, under in cases.items()
    ]
    return "; ".join(told)


def _escaped(text: str) -> str:
    r"""Return plain-text formulas with Markdown's marks of emphasis and tags escaped; code stays as it is.

    >>> _escaped("||W||_F * <w_s, v> of `a_*b`")
    '||W||\\_F \\* \\<w_s, v> of `a_*b`'
    """
    parts = text.split("`")
    parts[::2] = [re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|[*<]", r"\\\g<0>", part) for part in parts[::2]]
    return "`".join(parts)
