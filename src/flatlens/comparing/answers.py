"""The answer of a comparison, of networks or of groups of networks: at most three sentences, filled with numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product

from flatlens.comparing.fit import FIT_POINTS, FIT_TIMES, NotRanked, at_chance, held_out, no_fit
from flatlens.comparing.rankings import Place
from flatlens.estimate import Estimate, Report
from flatlens.progress import count_of, listed
from flatlens.statistics import GroupDifference
from flatlens.statistics.inference import FEWEST_DESCRIBED

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
    """Sentences: what is the case, how certain, what next; `excluded` networks are not ranked."""
    with_loss = {name: report for name, report in reports.items() if ("loss", None) in report}
    unfit = no_fit(with_loss)
    held = held_out({name: report for name, report in reports.items() if name not in unfit})
    ranked = [name for name in reports if name not in excluded]
    rest = [f"Not ranked: {with_reasons(list(excluded.values()))}."] if excluded else []
    rest = [sentence(none)] if (none := untrained(reports)) else rest
    # without held-out losses flatness and compression decide, or nothing does
    if held is None:
        parts = [_leader(flat, "flattest", "flatness"), _leader(compressed, "most compressed", "compression")]
        if len(ranked) >= 2:
            first = sentence("; ".join(filter(None, parts))) if any(parts) else NO_MEASURE
        elif ranked:
            first = f"No other network fits the training data as well as {ranked[0]}: nothing to rank."
        else:
            first = "No network is ranked."
        held_out_known = any(("test_loss", None) in report for report in reports.values())
        return [first, *rest, *([] if held_out_known else [_NEXT])]
    # the best by held-out loss against those that it may not differ from, else against the next best
    best, undecided = held.best, held.undecided
    other = undecided[0] if undecided else held.others[0]
    loss, its = (reports[name]["test_loss"].value for name in (best, other))
    low, high = held.interval[other]
    interval = f"{held.difference[other]:.3g} [{low:.3g}, {high:.3g}]"
    if undecided:
        first = (
            f"The held-out loss does not decide between {listed([best, *undecided], 4)}: {loss:.3g} for {best}, "
            f"{its:.3g} for {other}, difference {interval} (95%)."
        )
        return [first, *rest, f"Flatness does not decide such a case: {EVIDENCE}, least of all among seeds."]
    accuracies = [reports[name]["test_accuracy"] for name in (best, other) if ("test_accuracy", None) in reports[name]]
    known = [f"{one.value:.1%}" for one in accuracies if one.value == one.value]
    accuracy = f"; accuracy {known[0]} against {known[1]}" if len(known) == 2 else ""
    first = (
        f"{best} has the lowest held-out loss: {loss:.3g} against {its:.3g} for {other}, difference {interval} "
        f"(95%){accuracy}."
    )
    # whether flatness says the same
    if best not in ranked or len(ranked) < 2:
        rest.append(f"Flatness is not compared: no other network fits the training data as well as {best}.")
    elif flat:
        agree = [name == best for name in flat.values()]
        verdict = "agrees" if all(agree) else "agrees in part" if any(agree) else "does not agree"
        rest.append(f"Flatness {verdict}: {_leader(flat, 'flattest', 'flatness')}.")
    return [first, *rest]


def of_coefficient(reports: Mapping[str, Report], ranked: Sequence[str], row: str) -> str:
    """Return which of the ranked networks is simpler by its local learning coefficient, and how certain that is."""
    known = sorted((name for name in ranked if reports[name][row].kind != "undefined"), key=lambda n: reports[n][row])
    lost = [name for name in ranked if name not in known]
    if len(ranked) < 2:
        return "Which network is simpler is open: fewer than two fit the training data equally well."
    if len(known) < 2:
        why = "; ".join(f"that of {name} is undefined, as {reports[name][row].note}" for name in lost[:1])
        return f"Which network is simpler by the local learning coefficient is open: {why}."
    first, second = known[:2]
    a, b = (reports[name][row] for name in (first, second))
    apart, margin = b.value - a.value, math.hypot(a.margin, b.margin)
    values = f"{a:.3g} ± {a.margin:.2g} against {b:.3g} ± {b.margin:.2g} of {second}"
    difference = f"difference {apart:.3g} [{apart - margin:.3g}, {apart + margin:.3g}] (95%)"
    losses = " and ".join(f"{reports[name]['loss']:.3g}" for name in (first, second))
    at = f"; training losses {losses}" if all(("loss", None) in reports[name] for name in (first, second)) else ""
    falls = {name: reports[name].get((f"{row}.fall", None), Estimate(0.0)) for name in (first, second)}
    off = [name for name, fall in falls.items() if fall.value > reports[name][row].margin]
    at += f"; not at a minimum (`.fall`): {listed(off)}" if off else ""
    verdict = (
        f"{first} is simpler than {second}" if apart > margin else f"Which of {first} and {second} is simpler is open"
    )
    return f"{verdict}: local learning coefficient {values}, {difference}{at}."


NO_MEASURE = "Which network is flatter is open: no measure that decides is invariant to what differs between them."
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


def _leader(smallest: Smallest, adjective: str, noun: str) -> str:
    """Return the clause that names the flattest network and counts its measures; empty without a measure."""
    votes, n = Counter(name for name in smallest.values() if name is not None), len(smallest)
    undecided = n - votes.total()
    if not n:
        return ""
    several = f"{f'all {n}' if n > 2 else 'both'} invariant measures"
    by = several if n > 1 else f"the invariant measure {''.join(smallest)}"
    if len(votes) == 1 and not undecided:
        return f"{next(iter(votes))} is the {adjective} by {by}"
    counts = ", ".join(f"{name} by {count}" for name, count in votes.most_common())
    if len(votes) > 1:
        more = f", {undecided} undecided" if undecided else ""
        return f"the {n} invariant measures of {noun} disagree: the {adjective} is {counts}{more}"
    return f"{undecided} of {n} invariant measures of {noun} do not decide{f' ({counts})' if votes else ''}"


# ---- groups of networks

_OPEN = "Which group is flatter is open: no measure that decides is invariant to what differs between the networks."
_WORDS = {
    "flat": ("flatness", "flatter", "sharper"),
    "sensitivity": ("sensitivity", "less sensitive", "more sensitive"),
    "compression": ("compression", "more compressed", "less compressed"),
}
"""By meaning of a small value, or by family: the noun, and the adjectives for smaller and larger values."""

Meanings = Mapping[str, tuple[str, str]]
"""By measure that decides: the meaning of a small value, "flat" or "compressed", and the measure's family."""


def group_answer(
    differences: Sequence[GroupDifference],
    meanings: Meanings,
    left_out: Sequence[NotRanked] = (),
    untrained: str = "",
    *,
    paired: bool,
) -> list[str]:
    """Sentences: which group is flatter and less sensitive than the first one, how certain, what next.

    `differences` are of each column, "loss", "accuracy" and "test_loss" too; `untrained` is a clause.
    """
    # which group fits the data worse, and what the measures that decide say of the others
    groups = dict.fromkeys(one.group for one in differences)
    rows = {group: [one for one in differences if one.group == group] for group in groups}
    unequal = {group: clause for group, of in rows.items() if (clause := unequal_fit(of))}
    clauses: dict[str, list[str]] = {"flat": [], "compressed": []}
    for meaning, group in product(clauses, groups):
        deciding = [one for one in rows[group] if meanings.get(one.name, ("", ""))[0] == meaning]
        if deciding:
            told = _value(deciding[0], paired) if group in unequal else _verdict(deciding, meanings, paired)
            clauses[meaning].append(told)
    parts = list(clauses.values())
    if unequal:
        so = "smaller values need not mean a flatter minimum or less sensitivity"
        parts = [[f"{'; '.join(unequal.values())}, so {so}"], [*clauses["flat"], *clauses["compressed"]]]
    sentences = [sentence("; ".join(part)) for part in parts if part]
    if not any(clauses.values()):
        sentences.append(_OPEN)
    # what is left out, the held-out loss, and what to do next
    last = [untrained] if untrained else []
    last += [f"left out: {with_reasons(left_out)}"] if left_out else []
    held_out = [one for one in differences if one.name == "test_loss"]
    for one in held_out:
        certain = f"Holm-corrected p = {one.p_holm:.2g}" if one.significant else "not significant"
        last.append(f"the held-out loss of {one.group} is {_told(one)} ({certain})")
    if any(one.p != one.p and one.n < FEWEST_DESCRIBED for one in differences if one.name in meanings):
        last.append(f"an interval needs {FEWEST_DESCRIBED} networks a group")
    elif unequal:
        last.append("compare networks of equal training loss")
    elif not held_out:
        last.append("held-out data (test=..., --test) shows which group generalises better")
    return [*sentences, *([sentence("; ".join(last))] if last else [])]


def unequal_fit(differences: Sequence[GroupDifference]) -> str:
    """Return the clause that names the group that fits the training data worse; empty if neither does.

    The rule is that for single networks: the interval of the training loss excludes equality and it is over twice as
    large, or that of the accuracy does and it is over 2 points lower.

    >>> unequal_fit([GroupDifference("loss", "SAM", "SGD", 0.25, 0.2, 0.5, "ratio")])
    'SGD fits the training data worse than SAM (its training loss is 4 [2, 5] times as large)'
    """
    for one in differences:
        excluded = one.low > _equal(one) or one.high < _equal(one)
        loss = one.name == "loss" and one.scale == "ratio" and max(one.value, 1 / one.value) > FIT_TIMES
        accuracy = one.name == "accuracy" and abs(one.value) > FIT_POINTS
        if excluded and (loss or accuracy):
            worse = (one.value > _equal(one)) == loss
            first, second = (one.group, one.reference) if worse else (one.reference, one.group)
            # told of the worse group, whichever the difference is of
            values = one.value, one.low, one.high
            if loss:
                value, *ends = values if worse else (1 / end if end else math.inf for end in values)
                told = "its training loss is {:.3g}{} times as large"
            else:
                value, *ends = map(abs, values)
                told = "its accuracy is lower by {:.3g}{}"
            low, high = sorted(ends)
            interval = f" [{low:.3g}, {high:.3g}]" if low == low else ""
            return f"{first} fits the training data worse than {second} ({told.format(value, interval)})"
    return ""


def _verdict(deciding: Sequence[GroupDifference], meanings: Meanings, paired: bool) -> str:
    # Flatter, sharper, not significantly different, or one by some measures and one by others
    significant = [one for one in deciding if one.significant]
    smaller = [one for one in significant if one.value < _equal(one)]
    larger = [one for one in significant if one.value > _equal(one)]
    shown = (significant or list(deciding))[0]
    kinds = dict.fromkeys(meanings[one.name] for one in significant or deciding)
    words = dict.fromkeys(_WORDS[family if meaning == "compressed" else meaning] for meaning, family in kinds)
    nouns, less, more = (" and ".join(each) for each in zip(*words, strict=True))
    if all(one.p != one.p for one in deciding):
        return f"whether {shown.group} is {less} than {shown.reference} is open: {_value(shown, paired)}"
    if not significant:
        return f"{shown.group} and {shown.reference} do not differ significantly in {nouns}: {_value(shown, paired)}"
    if smaller and larger:
        both = f"{smaller[0].name} is {_told(smaller[0])}, {larger[0].name} {_told(larger[0])}"
        return f"whether {shown.group} is {less} than {shown.reference} depends on the measure: {both}"
    by = f" by {len(significant)} of {len(deciding)} invariant measures" if len(deciding) > 1 else ""
    return f"{shown.group} is {less if smaller else more} than {shown.reference}{by}: {_value(shown, paired)}"


def _value(one: GroupDifference, paired: bool) -> str:
    if one.p != one.p:
        certain = f"{count_of(one.n, 'pair' if paired else 'network')}, no interval: {one.note}"
    else:
        of = f"smaller in {one.smaller} of {one.n} pairs" if paired else count_of(one.n, "network")
        certain = f"{of}, Holm-corrected p = {one.p_holm:.2g}"
    return f"{one.name} of {one.group} is {_told(one)} ({certain})"


def _equal(one: GroupDifference) -> float:
    return 1.0 if one.scale == "ratio" else 0.0


def _told(one: GroupDifference) -> str:
    """A ratio or a difference, with its interval, in words."""
    low, high = (one.low, one.high) if one.scale == "ratio" or one.value > 0 else (-one.high, -one.low)
    interval = f" [{low:.3g}, {high:.3g}]" if low == low else ""
    if one.scale == "ratio":
        return f"{one.value:.3g}{interval} times that of {one.reference}"
    return f"{'lower' if one.value < 0 else 'higher'} than that of {one.reference} by {abs(one.value):.3g}{interval}"
