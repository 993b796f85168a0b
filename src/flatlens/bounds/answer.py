"""The answer of a table of bounds: how many hold, which one says most, and what to declare next."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from flatlens.bounds.context import DECLARABLE
from flatlens.bounds.definition import BOUNDS, Verdict
from flatlens.column import Column
from flatlens.progress import count_of, listed

NEAR = 0.1  #: share of the right side that the left one reaches at least where a bound says something
_VACUOUS = "vacuous"  #: in the note of a bound that no network violates
MOST = 3  #: names that a sentence lists
UNDECLARED = "neither checked nor declared"


def answer(verdicts: Sequence[Verdict]) -> list[str]:
    """Return at most three sentences on the claims.

    >>> held = Verdict("mls_chain", "fc1", 0.5, 1.0, 0.5, 0.5, "holds", "", 0.0, "", "")
    >>> for sentence in answer([held]):
    ...     print(sentence)
    1 of 1 claim holds on this network.
    The tightest is mls_chain at fc1 (left side 50% of the right); 1 claim is within a factor of 10 of equality.
    """
    if not verdicts:
        return []
    violated = [v for v in verdicts if v.status == "violated"]
    wrong = f"Violated: {listed(_names(violated), MOST)}; {cause(violated)}." if violated else ""
    return [sentence for sentence in (wrong, _counted(verdicts), _said(verdicts), _next(verdicts)) if sentence][:3]


def cause(violated: Sequence[Verdict]) -> str:
    """Return the meaning of a violated bound; the user's own declarations come first."""
    declared = list(dict.fromkeys(v.assumption for v in violated if v.assumption))
    ours = "an error in flatlens or in a theorem: please report it"
    return f"either an assumption that you declared is false ({'; '.join(declared)}), or {ours}" if declared else ours


def _names(verdicts: Sequence[Verdict]) -> list[str]:
    return list(dict.fromkeys(v.bound for v in verdicts))


def _counted(verdicts: Sequence[Verdict]) -> str:
    count = {status: sum(v.status == status for v in verdicts) for status in ("holds", "not applicable", "undecided")}
    others = [f"{count[s]} {'is' if count[s] == 1 else 'are'} {s}" for s in ("not applicable", "undecided") if count[s]]
    claims = count_of(len(verdicts), "claim")
    told = f"{count['holds'] or 'None'} of {claims} hold{'s' * (count['holds'] <= 1)} on this network"
    return f"{'; '.join([told, *others])}."


def _said(verdicts: Sequence[Verdict]) -> str:
    """Return which of the bounds that hold says most, and which ones say nothing."""
    held = [v for v in verdicts if v.status == "holds"]
    known = [v for v in held if math.isfinite(v.tightness) and _VACUOUS not in v.note]
    empty = _names([v for v in held if _VACUOUS in v.note])
    nothing = f"{listed(empty, MOST)} {'is' if len(empty) == 1 else 'are'} vacuous" if empty else ""
    if not known:
        return f"{nothing}." if nothing else ""
    best = max(known, key=lambda v: v.tightness)
    at = f"{best.bound}{f' at {best.layer}' if best.layer else ''}"
    near = sum(v.tightness >= NEAR for v in known)
    told = f"The tightest is {at} (left side {100 * best.tightness:.3g}% of the right)"
    far = f"within a factor of {1 / NEAR:.0f} of equality"
    some = f"{count_of(near, 'claim')} {'is' if near == 1 else 'are'} {far}"
    return f"{'; '.join(filter(None, (told, some if near else f'none is {far}: they say little here', nothing)))}."


def _next(verdicts: Sequence[Verdict]) -> str:
    """Return what decides more claims: an assumption to declare, the one that fails most often, bounds to name."""
    waiting: dict[str, list[Verdict]] = {}
    for v in verdicts:
        name, _, why = v.assumption.partition(": ")
        if v.status == "not applicable" and name in DECLARABLE and why == UNDECLARED:
            waiting.setdefault(name, []).append(v)
    if not waiting and any(v.status != "not applicable" for v in verdicts):
        asked = {Column.parse(v.bound).measure for v in verdicts}
        others = [name for name, one in BOUNDS.items() if one.on_request and name not in asked]
        by_default = {name for name, one in BOUNDS.items() if not one.on_request} <= asked
        more = f"{count_of(len(others), 'bound')} need{'s' * (len(others) == 1)} more than a pass and must be named"
        return f"{more}: {listed(others, MOST)}." if by_default and others else ""
    if not waiting:
        (why, _), *_ = Counter(v.assumption for v in verdicts).most_common(1)
        return f"The assumption that fails most often is {why}."
    decided = listed(_names([v for each in waiting.values() for v in each]), MOST)
    return f"If it holds here, declare {listed(list(waiting), MOST)} with assume=, which decides {decided}."
