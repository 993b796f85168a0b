"""The answer of a comparison of networks: at most three sentences, filled with its numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from flatlens.comparing.fit import HeldOut, NotRanked, at_chance, held_out, no_fit
from flatlens.comparing.rankings import Place
from flatlens.estimate import Report
from flatlens.progress import count_of, listed

EVIDENCE = "no measure correlates with the generalisation gap in every population of docs/papers"
_SMALL = ("the", "no", "left", "held-out", "whether", "an", "compare")  #: first words of clauses that are not names
_MOST = 3  #: number of networks that are named with a reason

Smallest = Mapping[str, str | None]
"""By measure, the network that certainly has the smallest value; None where that is open."""


def first_of(places: Mapping[str, Place]) -> str | None:
    """The network that certainly has the smallest value.

    >>> first_of({"a": Place(2.0), "b": Place(1.0)}), first_of({"a": Place(1.5, ("b",)), "b": Place(1.5, ("a",))})
    ('b', None)
    """
    return next((name for name, place in places.items() if place.rank == 1 and not place.open), None)


def answer_of(
    reports: Mapping[str, Report], excluded: Mapping[str, NotRanked], flat: Smallest, compressed: Smallest
) -> list[str]:
    """Sentences: what is the case, how certain, what next.

    Args:
        reports: by network.
        excluded: the networks that are not ranked.
        flat: by invariant measure of flatness, the flattest of the ranked networks.
        compressed: by invariant measure of sensitivity or compression, the network with the smallest value.
    """
    with_loss = {name: report for name, report in reports.items() if ("loss", None) in report}
    unfit = no_fit(with_loss)
    held = held_out({name: report for name, report in reports.items() if name not in unfit})
    ranked = [name for name in reports if name not in excluded]
    rest = [f"Not ranked: {with_reasons(list(excluded.values()))}."] if excluded else []
    rest = [sentence(none)] if (none := untrained(reports)) else rest
    if held is not None:
        return [_of_held_out(held, reports), *rest, *_agrees(held, ranked, flat)]
    if len(ranked) < 2:
        first = (
            f"No other network fits the training data as well as {ranked[0]}: nothing to rank."
            if ranked
            else "No network is ranked."
        )
    else:
        parts = [_leader(flat, "flattest", "flatness"), _leader(compressed, "most compressed", "compression")]
        first = sentence("; ".join(filter(None, parts))) if any(parts) else _NO_MEASURE
    held_out_known = any(("test_loss", None) in report for report in reports.values())
    return [first, *rest, *([] if held_out_known else [_NEXT])]


_NO_MEASURE = "Which network is flatter is open: no measure that decides is invariant to what differs between them."
_NEXT = "Flatness alone does not show which network generalises best: give held-out data (test=..., --test)."


def sentence(clause: str) -> str:
    """The clause as a sentence; a name at its start keeps its letters.

    >>> sentence("the data decide"), sentence("sgd1 is the flattest")
    ('The data decide.', 'sgd1 is the flattest.')
    """
    first, _, others = clause.partition(" ")
    return f"{first.capitalize() if first in _SMALL else first} {others}."


def with_reasons(rows: Sequence[NotRanked]) -> str:
    """Networks with the reasons why they are not ranked; those beyond three are counted."""
    more = [f"and {count_of(len(rows) - _MOST, 'other network')}"] if len(rows) > _MOST else []
    return "; ".join([*(f"{row.network} ({row.reason})" for row in rows[:_MOST]), *more])


def untrained(reports: Mapping[str, Report]) -> str:
    """A clause that no network is trained; empty if one is."""
    known = [report for report in reports.values() if ("loss", None) in report]
    if not known or not all(map(at_chance, known)):
        return ""
    losses = sorted(report["loss"].value for report in known)
    return f"no network is trained: training losses {losses[0]:.3g} to {losses[-1]:.3g}, no better than chance"


def _of_held_out(held: HeldOut, reports: Mapping[str, Report]) -> str:
    best, undecided = held.best, held.undecided
    other = undecided[0] if undecided else held.others[0]
    loss, its = (reports[name]["test_loss"].value for name in (best, other))
    low, high = held.interval[other]
    interval = f"{held.difference[other]:.3g} [{low:.3g}, {high:.3g}]"
    if undecided:
        return (
            f"The held-out loss does not decide between {listed([best, *undecided], 4)}: {loss:.3g} for {best}, "
            f"{its:.3g} for {other}, difference {interval} (95%)."
        )
    accuracies = [reports[name]["test_accuracy"] for name in (best, other) if ("test_accuracy", None) in reports[name]]
    known = [f"{one.value:.1%}" for one in accuracies if one.value == one.value]
    accuracy = f"; accuracy {known[0]} against {known[1]}" if len(known) == 2 else ""
    return (
        f"{best} has the lowest held-out loss: {loss:.3g} against {its:.3g} for {other}, difference {interval} "
        f"(95%){accuracy}."
    )


def _agrees(held: HeldOut, ranked: Sequence[str], flat: Smallest) -> list[str]:
    if held.undecided:
        return [f"Flatness does not decide such a case: {EVIDENCE}, least of all among seeds."]
    if held.best not in ranked or len(ranked) < 2:
        return [f"Flatness is not compared: no other network fits the training data as well as {held.best}."]
    if not flat:
        return []
    agree = [name == held.best for name in flat.values()]
    verdict = "agrees" if all(agree) else "agrees in part" if any(agree) else "does not agree"
    return [f"Flatness {verdict}: {_leader(flat, 'flattest', 'flatness')}."]


def _leader(smallest: Smallest, adjective: str, noun: str) -> str:
    """Return the clause that names the flattest network and counts its measures; empty without a measure."""
    votes, n = Counter(name for name in smallest.values() if name is not None), len(smallest)
    undecided = n - votes.total()
    by = (
        f"{f'all {n}' if n > 2 else 'both'} invariant measures"
        if n > 1
        else f"the invariant measure {''.join(smallest)}"
    )
    if not n:
        return ""
    if len(votes) == 1 and not undecided:
        return f"{next(iter(votes))} is the {adjective} by {by}"
    counts = ", ".join(f"{name} by {count}" for name, count in votes.most_common())
    if len(votes) > 1:
        more = f", {undecided} undecided" if undecided else ""
        return f"the {n} invariant measures of {noun} disagree: the {adjective} is {counts}{more}"
    return f"{undecided} of {n} invariant measures of {noun} do not decide{f' ({counts})' if votes else ''}"
