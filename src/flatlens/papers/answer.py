"""The answer of a reproduction: at most three sentences, filled with the outcomes of its claims.

Of the main claims (of all claims, if the experiment has none), theorems aside, how many are reproduced; how certain
that is; what differs from the paper, or what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flatlens.papers.experiment import Conclusion, Experiment, Outcome, Scale, counted_conclusions, replicated
from flatlens.progress import count_of
from flatlens.statistics.inference import FEWEST_UNITS

MOST_NAMED = 2
"""Number of claims that are not reproduced which the answer names."""


class Reproduced(Protocol):
    """An experiment and the outcomes of its predictions, as a `Reproduction` has them."""

    @property
    def experiment(self) -> Experiment:
        """The recipe."""

    @property
    def scale(self) -> Scale:
        """The scale of its studies."""

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """The outcome of each prediction."""

    @property
    def again(self) -> tuple[Outcome, ...]:
        """Outcomes of the re-run; empty without one."""

    @property
    def halves(self) -> tuple[tuple[Outcome, Outcome], ...]:
        """Outcomes in both halves of the units; empty without a split-half check."""

    @property
    def unfinished(self) -> int:
        """Number of networks that are not finished."""


def answer_of_claims(found: Sequence[Reproduced]) -> list[str]:
    """Return at most three sentences on one experiment or several: what is the case, how certain, what next."""
    main = [pair for one in found for pair in _main(one)]
    return [_what(found, main), _certain(found, main), *_next(found)]


def _main(one: Reproduced) -> list[tuple[Outcome, Conclusion]]:
    """Return the main claims with their conclusions: those that a replication agrees with, if there was one."""
    every = list(range(len(one.outcomes)))
    headlines = [at for at in every if one.outcomes[at].prediction.headline]
    claims = headlines or [at for at in every if one.outcomes[at].prediction.kind != "theorem"] or every
    return [(one.outcomes[at], _concluded(one, at)) for at in claims]


def _concluded(one: Reproduced, at: int) -> Conclusion:
    again, halves = one.again[at] if one.again else None, one.halves[at] if one.halves else ()
    outcome = one.outcomes[at]
    return replicated(outcome, again, halves) if again or halves else outcome.conclusion


def _what(found: Sequence[Reproduced], main: Sequence[tuple[Outcome, Conclusion]]) -> str:
    counts = counted_conclusions(conclusion for _, conclusion in main)
    others = [f"{number} {c}" for c, number in counts.items() if c in _ALWAYS or (number and c != "reproduced")]
    kind = "main claim" if all(outcome.prediction.headline for outcome, _ in main) else "claim"
    told = ", ".join([f"{counts['reproduced']} of {count_of(len(main), kind)} reproduced", *others])
    who = found[0].experiment.id if len(found) == 1 else count_of(len(found), "experiment")
    scales = " and ".join(dict.fromkeys(one.scale for one in found))
    failed = [outcome.prediction.says.rstrip(".") for outcome, c in main if c == "not reproduced"][:MOST_NAMED]
    named = f"; not reproduced: {'; '.join(failed)}" if failed else ""
    return f"{who} at {scales} scale: {told}{named}."


_ALWAYS = ("not reproduced", "open")
"""Conclusions that are counted even if none has them, as the reproduced ones."""


def _certain(found: Sequence[Reproduced], main: Sequence[tuple[Outcome, Conclusion]]) -> str:
    known = [s for outcome, _ in main if (s := outcome.statistic).units is not None and s.n]
    least, most = (end((s.units or 0 for s in known), default=0) for end in (min, max))
    units = f"{least}" if least == most else f"{least} to {most}"
    words = dict.fromkeys(s.unit or "unit" for s in known)
    unit = next(iter(words)) if len(words) == 1 else "unit"
    over = f"over {units} independent {unit}{'' if most == 1 else 's'}" if known else "over networks"
    few = f", and fewer than {FEWEST_UNITS} give none" if least < FEWEST_UNITS and known else ""
    return f"How certain: 95% intervals {over}{few}; {_replication(found, main)}."


def _replication(found: Sequence[Reproduced], main: Sequence[tuple[Outcome, Conclusion]]) -> str:
    if not any(one.again or one.halves for one in found):
        return "no replication (--again runs one)"
    decided = [(outcome, c) for outcome, c in main if outcome.conclusion not in ("open", "not tested")]
    agree = sum(c == outcome.conclusion for outcome, c in decided)
    ways = {bool(one.again) for one in found if one.again or one.halves}
    way = (
        "a replication" if len(ways) > 1 else "a replication with other seeds" if True in ways else "a split-half check"
    )
    return (
        f"{way} agrees with {agree} of {count_of(len(decided), 'decided claim')}" if decided else "no claim is decided"
    )


def _next(found: Sequence[Reproduced]) -> list[str]:
    """Return what differs from the paper, and what to do next; one sentence, if there is anything to say."""
    unfinished = sum(one.unfinished for one in found)
    parts = [f"{count_of(unfinished, 'network')} not finished: the same command continues"] if unfinished else []
    differ = [sentence.rstrip(".") for one in found for sentence in one.experiment.differs.get(one.scale, ())]
    if len(found) > 1 and differ:
        parts.append(f"{count_of(len(differ), 'difference')} from the papers in all, listed with each experiment")
    elif differ:
        more = f" ({len(differ) - 1} more)" if len(differ) > 1 else ""
        parts.append(f"differs from the paper: {differ[0]}{more}")
    if (scale := found[0].scale) in _LARGER and not unfinished:
        parts.append(f"next: --scale {_LARGER[scale]}")
    told = "; ".join(parts)
    return [f"{told[0].upper()}{told[1:]}."] if told else []


_LARGER: dict[Scale, Scale] = {"smoke": "laptop", "laptop": "desk"}
