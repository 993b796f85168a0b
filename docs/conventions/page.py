"""The page in Markdown."""

from __future__ import annotations

import torch

import flatlens as fl
from conventions import data, eigenvalues, flatness, inputs, norms, perturbation, risk, steps, traces
from conventions.networks import BATCHES, TEST, TRAIN, Networks
from conventions.sources import CODE
from conventions.table import ENTRIES, Agreed, Convention, Entry, Quantity
from flatlens.report.cards import FAMILIES, by_family

FILLED_BY = (
    risk,
    inputs,
    traces,
    eigenvalues,
    steps,
    flatness,
    norms,
    perturbation,
    data,
)  # importing them fills ENTRIES

PREFACE = """\
# Conventions

One name often stands for several numbers: a sum or a mean, squared or not, one layer or all. **Before you compare a
number with a published one, find its row.** For every measure this page lists the conventions in use, flatlens's first,
with the value of each on one small network (`python docs/conventions > docs/conventions.md` writes it).

*Ratio*: the row's value divided by flatlens's, and its formula where theory gives one. *for scale*: found in no
source. n: samples, N: outputs, P: parameters, L: weight layers, m: inputs of a layer, d: its outputs.
[measures.md](measures.md) defines the measures and [lists the papers](measures.md#sources) behind the names,
and the [last section](#public-code-that-was-read) has the code."""

NETWORKS = f"""\
All on scikit-learn's digits: {TRAIN} for training, {TEST} for the test. Where batches matter, they have {BATCHES[0]}
samples, and the last one {BATCHES[-1]}. float64, Adam, fixed seeds. Rows with random numbers show one draw, always the
same."""


GLANCE = "For each quantity: the published convention whose value is furthest from that of flatlens."

CODE_PREFACE = """\
What the names in the tables compute, in these files at these commits. Later versions may differ."""


Made = list[tuple[Entry, Quantity | Agreed]]


def computed() -> tuple[Networks, Made]:
    """The networks, and every section of the page, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        networks = Networks()
        return networks, [(entry, entry.make(networks)) for entry in ENTRIES if entry.ready]
    finally:
        torch.set_num_threads(threads)


def page(networks: Networks, made: Made) -> str:
    """Everything."""
    sections: list[str] = []
    shown: list[Quantity] = []
    covered = {name for entry in ENTRIES for name in entry.measures}
    for family, measures in by_family().items():
        mine = [one for entry, one in made if fl.measures.MEASURES[entry.measures[0]].card.family == family]
        here = [one for one in mine if isinstance(one, Quantity)]
        shown += here
        sections += [f"## Family: {family}", FAMILIES.get(family, "")]
        sections += [block for one in here for block in _section(one)]
        sections += _agreed([one for one in mine if isinstance(one, Agreed)])
        rest = [f"`{one.card.name}`" for one in measures if one.card.name not in covered]
        sections += [f"Not compared with other libraries: {', '.join(rest)}."] if rest else []
    blocks = [PREFACE, "## The networks", _networks(networks), NETWORKS, "## At a glance", GLANCE, _glance(shown)]
    blocks += [*sections, "## Public code that was read", CODE_PREFACE, _code()]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _section(quantity: Quantity) -> list[str]:
    rows = [[r.text, r.found_in, number(r.value), _ratio(quantity, r)] for r in quantity.rows]
    value = f"value (`{quantity.network}`{quantity.at})"
    heading = ["convention", "found in", value, "difference" if quantity.difference else "ratio"]
    return [
        f"### {quantity.name}",
        f"flatlens: {quantity.used}. {quantity.why}",
        _table(heading, rows, "llrr"),
    ]


def _ratio(quantity: Quantity, row: Convention) -> str:
    told = number(quantity.ratio(row))
    return told if row is quantity.rows[0] or row.exactly in ("", told) else f"{told} = {row.exactly}"


def _glance(quantities: list[Quantity]) -> str:
    rows = []
    for one in quantities:
        row = one.furthest()
        if row is not None:
            told = number(one.ratio(row))
            rows.append([one.name, row.text, f"{told} (difference)" if one.difference else told])
    return _table(["quantity", "furthest convention", "ratio"], rows, "llr")


def _agreed(measures: list[Agreed]) -> list[str]:
    if not measures:
        return []
    rows = [[f"`{one.measure}`", one.remark, f"`{one.network}`", number(one.value)] for one in measures]
    return ["### No other convention found", _table(["measure", "found in", "network", "value"], rows, "lllr")]


def _networks(networks: Networks) -> str:
    rows = [
        [
            f"`{net.name}`",
            words,
            f"`{net.loss}`",
            number(net("loss")),
            number(net("accuracy")),
            number(net("test_accuracy")),
        ]
        for net, words in networks.all()
    ]
    return _table(["name", "layers", "loss", "training loss", "accuracy", "test accuracy"], rows, "lllrrr")


def _code() -> str:
    rows = [[f"`{name}`" if name.islower() else name, *rest] for name, *rest in CODE]
    return _table(["name", "repository", "file", "version"], rows, "llll")


def _table(heading: list[str], rows: list[list[str]], aligned: str) -> str:
    rule = ["---:" if one == "r" else "---" for one in aligned]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in [heading, rule, *rows]
    )


def number(value: float) -> str:
    """Four digits."""
    return f"{value:.4g}"
