"""Groups of networks compared: a terminal screen and a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Group, RenderableType

from flatlens.comparing import GroupComparison, direction
from flatlens.progress import by_key, count_of
from flatlens.report.cards import number
from flatlens.report.screen import Fitted, head_of_screen, remark
from flatlens.statistics import GroupDifference
from flatlens.training.settings import RESULTS

FLAT = "Flatness, by invariant measures: smaller is flatter"
COMPRESSED = "Sensitivity and compression, by invariant measures: smaller is less sensitive, or more compressed"
FIT = "Loss and accuracy"
_OTHERS = "Other measures: not invariant, or smaller is not necessarily better"


def group_screen(found: GroupComparison) -> RenderableType:
    """The screen of `flatlens compare --group`: the answer, the groups, and the difference by each measure."""
    # The difference by each measure; of several groups beside the first, which group it is
    several, first = len(found.groups) > 2, next(iter(found.groups))
    title = f"Compared with {first}" if several else f"{list(found.groups)[1]} compared with {first}"
    table = Fitted(title, names=["measure", *(["group"] if several else [])], values=["change", "95% interval", "p"])
    for heading, rows in sections(found).items():
        table.section(heading)
        for one in rows:
            cells = [change(one), interval_in_words(one), number(one.p_holm, 2)]
            table.row(one.name, *([one.group] if several else []), *cells)
    remarks = (remark(f"\n{head}: ", words) for head, words in notes(found))
    return Group(*head_of_screen(found.about, found.answer), _groups(found), table, *remarks)


def _groups(found: GroupComparison) -> Fitted:
    table = Fitted("The groups: medians over their networks", names=["group"], values=["networks", "left out"])
    rows = medians(found)
    for name in (columns := [name for name in RESULTS if any(name in row for row in rows.values())]):
        table.column(name.replace("_", " ").removeprefix("generalisation "))
    for group, row in rows.items():
        left = sum(network in found.not_ranked for network in found.groups[group])
        cells = [number(row[name]) if name in row else "-" for name in columns]
        table.row(group, str(len(found.groups[group])), str(left or ""), *cells)
    return table


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
    said += [("Note", f"{why}: {_few(names)}") for why, names in missing.items()]
    return [*said, *(("Note", remark) for remark in found.networks.notes)]


def _few(names: Sequence[str], most: int = 5) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(names[:most]) + (f" and {count_of(len(names) - most, 'other')}" if len(names) > most else "")


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
        columns=RESULTS,
        left_out=list(found.not_ranked.values()),
        sections=shown,
        notes=notes(found),
        number=number,
    )
