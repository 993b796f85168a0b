"""Checkpoints, or groups of networks, compared: terminal screens, and pages."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
from rich.console import Group, RenderableType
from rich.text import Text

from flatlens.comparing import Agreement, Comparison, GroupComparison, direction
from flatlens.progress import by_key, count_of
from flatlens.report.cards import SIGNS, number
from flatlens.report.screen import Fitted, head_of_screen, remark
from flatlens.statistics import GroupDifference, Statistic
from flatlens.training.settings import RESULTS

ACROSS = 6  #: largest number of networks with a column each on a screen
INVARIANT = "Invariant under rescaling of the weights"
CHANGE = "* Not invariant: a rescaling of the weights that keeps the function changes the measure"
NO_DIRECTION = "Smaller is not necessarily better"


def compare_screen(comparison: Comparison) -> RenderableType:
    """Return the screen of `flatlens compare`: the networks, their ranks and values, how far the measures agree."""
    heads, agreement = headings(comparison), comparison.agreement()
    numbered = list(heads) != comparison.models

    # the networks, with the means of their ranks
    networks = Fitted("The networks", values=[""] * numbered, between=1)
    networks.column("network", "name")
    rows = comparison.networks()
    shown = {"loss": "loss", "accuracy": "accuracy", "test_loss": "test loss ± 95%", "generalisation_gap": "gap ± 95%"}
    columns = [name for name in shown if name in rows and rows[name].notna().any()]
    means = {"mean_rank": "mean rank", "mean_rank_surviving": "without *"} if agreement.has_ranks else {}
    for name in [*(shown[column] for column in columns), *means.values()]:
        networks.column(name)
    for head, row in zip(heads, rows.to_dict("records"), strict=True):
        cells = {name: number(row[name], 2 if name == "generalisation_gap" else 3) for name in columns}
        for name, stderr in {"test_loss": "test_loss_stderr", "generalisation_gap": "gap_stderr"}.items():
            cells |= {name: f"{cells[name]} ± {number(1.96 * row[stderr], 1)}"} if name in cells else {}
        ranks = [number(row[name], 2) for name in means]
        networks.row(*([head] if numbered else []), str(row["model"]), *cells.values(), *ranks)
    parts = [*head_of_screen(comparison.about, comparison.answer), networks]
    if len(heads) > ACROSS:
        more = f"\n{len(heads)} networks: their ranks and values by each measure are in --page and --json."
        return Group(*parts, Text(more), _key(comparison))

    # by measure a row of ranks, and one of values
    gap = agreement.gap.set_index("measure")
    ranked = Fitted("Ranks: 1 is the smallest value", names=["measure"], between=1)
    for column in [*heads, *(["τ gap", "p"] if len(gap) else [])]:
        ranked.column(column, least=5)
    values, digits = Fitted("Values", names=["measure"], values=heads, between=1), 3 if len(heads) < 5 else 2

    def heading(name: str) -> str:
        if not direction(comparison.measures[name].card):
            return NO_DIRECTION
        return INVARIANT if comparison.is_invariant(name) else CHANGE

    groups = by_key((heading(name), name) for name in comparison.measures)
    for group in (INVARIANT, CHANGE, NO_DIRECTION):
        if group in groups:
            ranked.section(group)
        for name in groups.get(group, ()):
            places = [rank_text(place.rank, bool(place.open)) for place in comparison.places[name].values()]
            with_gap = [number(gap[c].get(name, float("nan")), 2) for c in ("tau", "p")] if len(gap) else []
            ranked.row(marked(comparison, name), *places, *with_gap)
            estimates = comparison.estimates(name).values()
            signs = [SIGNS.get(e.kind, "") for e in estimates]
            alike = len(set(signs)) == 1  # then once, beside the name: it leaves the columns narrow
            told = [
                f"{'' if alike else sign}{number(e.value, digits)}" for sign, e in zip(signs, estimates, strict=True)
            ]
            values.row(f"{marked(comparison, name)} {signs[0] if alike else ''}".rstrip(), *told)
    return Group(*parts, *([ranked] if agreement.has_ranks else []), values, _key(comparison))


def headings(comparison: Comparison) -> list[str]:
    """Return the networks' names if they are short enough to stand above columns, else numbers."""
    models = comparison.models
    room = 36 // len(models) - 1
    return models if max(map(len, models)) <= room else [str(number) for number in range(1, len(models) + 1)]


def marked(comparison: Comparison, name: str) -> str:
    """Return the measure's name, with a star if a rescaling of the weights changes it."""
    return name if comparison.is_invariant(name) else f"{name} *"


def rank_text(rank: float, undecided: bool) -> str:
    """Return a rank in words; ~ marks a shared one.

    >>> rank_text(1.0, False), rank_text(2.5, True), rank_text(float("nan"), False)
    ('1', '2.5~', '-')
    """
    return "-" if rank != rank else f"{rank:g}{'~' if undecided else ''}"


def _key(comparison: Comparison) -> Text:
    """Return the lines below the tables: the agreement, what is not counted or undefined, and the marks."""
    agreement, text = comparison.agreement(), Text()

    def say(head: str, body: str) -> None:
        text.append(f"\n{head}: ", style="bold").append(body, style="not bold")

    # whether the measures agree, and which networks or measures do not count for that
    rankings, remarks, left_out = _conclusions(agreement)
    if rankings:
        say("Agreement", "; ".join(rankings) + ".")
    for line in (*remarks, *comparison.notes):
        text.append(f"\n{line}", style="not bold")
    for why, names in left_out.items():
        say("Not counted", f"{', '.join(names)}: {why}")

    # the measures that are undefined, and on which networks, by reason
    places = by_key(
        (e.note, (name, model))
        for name in comparison.measures
        for model, e in comparison.estimates(name).items()
        if e.kind == "undefined"
    )
    for why, pairs in places.items():
        at = by_key(pairs)
        everywhere = [name for name, models in at.items() if models == comparison.models]
        told = [f"{', '.join(everywhere)} on every network"] if everywhere else []
        told += [f"{name} on {', '.join(models)}" for name, models in at.items() if name not in everywhere]
        say("Undefined", f"{'; '.join(told)}: {why}")

    # the marks, where the tables have them
    if not agreement.has_ranks:
        say("*", "not invariant under rescaling of the weights. ≥, ≤: a bound.")
        return text
    say(
        "rank",
        "1 is the smallest value, flattest or most compressed where the measure has a direction. ~: a shared rank, "
        "because values are tied or 95% intervals overlap. *: not invariant under rescaling of the weights, so ranks "
        "also depend on their scales. ≥, ≤: a bound, ranked by its value.",
    )
    if len(agreement.gap):
        say(
            "τ gap",
            "Kendall's tau-b of the measure with the generalisation gap over these networks, and its p-value. "
            "Each p is for one measure alone: by chance one in twenty is below 0.05.",
        )
    return text


def _conclusions(agreement: Agreement) -> tuple[list[str], tuple[str, ...], dict[str, list[str]]]:
    """Return W in words, remarks, and measures that are not counted by reason; nothing where all rank alike."""
    if not agreement.informative:
        return [], (), {}
    left_out = by_key((why, name) for name, why in agreement.left_out.items())
    return [told(w) for w in (agreement.overall, agreement.surviving)], agreement.remarks, left_out


def told(w: Statistic) -> str:
    """Return Kendall's W in words.

    >>> told(Statistic("Kendall's W", 0.5, 4, p=0.02, note="3 rankings"))
    "Kendall's W = 0.50 (3 rankings of 4 networks, p = 0.02)"
    """
    if w.value != w.value:
        return f"{w.name}: undefined ({w.note})"
    rankings, _, more = w.note.partition("; ")
    said = "; ".join(part for part in (f"{rankings} of {w.n} networks, p = {w.p:.2g}", more) if part)
    return f"{w.name} = {w.value:.2f} ({said})"


def write_compare_page(comparison: Comparison, path: Path) -> Path:
    """Write one HTML file that needs no network: the ranks as a picture, the networks, the agreement, every value."""
    from flatlens.report.figures.compared import values_figure
    from flatlens.report.figures.measured import ranks_figure, taus_figure  # not above: the screen draws nothing
    from flatlens.report.page import write_page

    agreement = comparison.agreement()
    rankings, remarks, left_out = _conclusions(agreement)
    return write_page(
        "compare",
        path,
        comparison.about,
        answer=comparison.answer,
        figures=[
            values_figure(comparison),
            *([ranks_figure(comparison)] if agreement.has_ranks else []),
            *([taus_figure(comparison)] if len(agreement.taus) > 1 and agreement.has_ranks else []),
        ],
        cards={name: one.card for name, one in comparison.measures.items()},
        models=comparison.models,
        networks=_records(comparison.networks()),
        agreement=agreement,
        told=rankings,
        remarks=remarks,
        method=agreement.overall.method,
        left_out=left_out,
        notes=comparison.notes,
        gap=_records(agreement.gap),
        rows=_records(comparison.frame()),
        marked={name: marked(comparison, name) for name in comparison.measures},
        number=number,
        rank_text=rank_text,
    )


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(key): value for key, value in row.items()} for row in table.to_dict("records")]


FLAT = "Flatness, by invariant measures: smaller is flatter"
COMPRESSED = "Sensitivity and compression, by invariant measures: smaller is less sensitive, or more compressed"
FIT = "Loss and accuracy"
_OTHERS = "Other measures: not invariant, or smaller is not necessarily better"


def group_screen(found: GroupComparison) -> RenderableType:
    """The screen of `flatlens compare --group`: the answer, the groups, and the difference by each measure."""
    # the groups: medians over their networks
    groups = Fitted("The groups: medians over their networks", names=["group"], values=["networks", "left out"])
    columns = _columns(medians(found))
    for name in columns:
        groups.column(name.replace("_", " ").removeprefix("generalisation "))
    for group, row in medians(found).items():
        left = sum(network in found.not_ranked for network in found.groups[group])
        cells = [number(row[name]) if name in row else "-" for name in columns]
        groups.row(group, str(len(found.groups[group])), str(left or ""), *cells)

    # the difference by each measure; of several groups beside the first, which group it is
    several, first = len(found.groups) > 2, next(iter(found.groups))
    title = f"Compared with {first}" if several else f"{list(found.groups)[1]} compared with {first}"
    table = Fitted(title, names=["measure", *(["group"] if several else [])], values=["change", "95% interval", "p"])
    for heading, rows in sections(found).items():
        table.section(heading)
        for one in rows:
            cells = [change(one), interval_in_words(one), number(one.p_holm, 2)]
            table.row(one.name, *([one.group] if several else []), *cells)
    remarks = (remark(f"\n{head}: ", words) for head, words in notes(found))
    return Group(*head_of_screen(found.about, found.answer), groups, table, *remarks)


def _columns(rows: dict[str, dict[str, float]]) -> list[str]:
    return [name for name in RESULTS if any(name in row for row in rows.values())]


def medians(found: GroupComparison) -> dict[str, dict[str, float]]:
    """Loss, accuracy and gap of each group: the medians over the networks that are not left out."""
    rows: dict[str, dict[str, float]] = {}
    for group, networks in found.groups.items():
        reports = [found.networks.reports[name] for name in networks if name not in found.not_ranked]
        values = {name: [one[name].value for one in reports if (name, None) in one] for name in RESULTS}
        rows[group] = {name: median(of) for name, of in values.items() if of and of == of}
    return rows


def sections(found: GroupComparison) -> dict[str, list[GroupDifference]]:
    """The differences by what they say: flatness, sensitivity, fit, and measures that do not decide."""

    def heading(one: GroupDifference) -> str:
        if one.name in RESULTS:
            return FIT
        meaning = direction(found.networks.measures[one.name].card) if one.name in found.deciding else ""
        return {"flat": FLAT, "compressed": COMPRESSED}.get(meaning, _OTHERS)

    rows = by_key((heading(one), one) for one in found.differences)
    return {name: rows[name] for name in (FLAT, COMPRESSED, FIT, _OTHERS) if name in rows}


def change(one: GroupDifference) -> str:
    """A ratio or a difference in few characters.

    >>> change(GroupDifference("mls", "SAM", "SGD", 0.62, scale="ratio")), change(GroupDifference("gap", "a", "b", 0.1))
    ('×0.62', '+0.1')
    """
    return f"×{number(one.value)}" if one.scale == "ratio" else _signed(one.value)


def interval_in_words(one: GroupDifference) -> str:
    """The 95% interval in few characters; - where there is none."""
    if one.low != one.low:
        return "-"
    low, high = (number(end) if one.scale == "ratio" else _signed(end) for end in (one.low, one.high))
    return f"{low} to {high}"


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{number(value)}"


def notes(found: GroupComparison) -> list[tuple[str, str]]:
    """Explanations of the table: (subject, words)."""
    reference = next(iter(found.groups))
    how = "Student's t over pairs" if found.paired else "Welch's t over networks"
    said = [
        ("change", f"×: ratio of geometric means to {reference}; + and -: difference of means. Interval: {how}"),
        ("p", "two-sided, with Holm's correction over invariant measures and the test loss; others on their own"),
    ]
    missing = by_key((one.note, one.name) for one in found.differences if one.note)
    for why, names in missing.items():
        first, more = list(dict.fromkeys(names))[:5], len(set(names)) - 5
        others = f" and {count_of(more, 'other')}" if more > 0 else ""
        said.append(("Note", f"{why}: {', '.join(first)}{others}"))
    return [*said, *(("Note", remark) for remark in found.networks.notes)]


def write_group_page(found: GroupComparison, path: Path) -> Path:
    """Write one HTML file that needs no network: the answer, the groups, and the difference by each measure."""
    from flatlens.report.figures.compared import groups_figure  # not above: the screen draws nothing
    from flatlens.report.page import write_page

    shown = {
        heading: [
            {"one": one, "change": change(one), "interval": interval_in_words(one), "p": number(one.p_holm, 2)}
            for one in rows
        ]
        for heading, rows in sections(found).items()
    }
    return write_page(
        "groups",
        path,
        found.about,
        answer=found.answer,
        figures=[groups_figure(found)],
        cards={name: one.card for name, one in found.networks.measures.items()},
        groups=found.groups,
        medians=medians(found),
        columns=_columns(medians(found)),
        left_out=list(found.not_ranked.values()),
        sections=shown,
        notes=notes(found),
        number=number,
    )
