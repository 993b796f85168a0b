"""The definition of a bound: two sides, a source, and assumptions that can be checked; and its verdict."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch

from flatlens.bounds.context import Claim, Context, Inapplicable
from flatlens.errors import BadOption, UnknownName
from flatlens.registry import Registry, first_line, spelled

Status: TypeAlias = Literal["holds", "violated", "undecided", "not applicable"]


@dataclass(frozen=True)
class Bound:
    """A theorem, lemma or identity, with the function that makes its claims on a network.

    >>> from flatlens.bounds import BOUNDS
    >>> BOUNDS["linear_stability"].source
    'compression Eq. 5, 6'
    """

    name: str
    id: str  #: the catalogue's row
    symbol: str  #: LaTeX
    meaning: str
    source: str
    cost: str
    on_request: bool
    function: Callable[..., Iterator[Claim]] = field(repr=False, compare=False)
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def defaults(self) -> dict[str, Any]:
        """Return the options with their default values."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}

    def __call__(self, **options: Any) -> Bound:
        """Return the same bound with options set, which its name then contains.

        >>> from flatlens.bounds import BOUNDS
        >>> BOUNDS["linear_stability"](k=3).name
        'linear_stability(k=3)'
        """
        for name in options:
            if name not in self.defaults:
                raise UnknownName.among("option", name, self.defaults, where=f"of {self.name}")
        told = ", ".join(f"{name}={value!r}" for name, value in options.items())
        return replace(self, name=f"{self.name.partition('(')[0]}({told})", options=tuple(options.items()))

    def claims(self, context: Context) -> Iterator[Claim]:
        """Make the bound's claims on a network.

        Raises:
            BadOption: an option cannot be used.
        """
        try:
            yield from self.function(context, **dict(self.options))
        except Inapplicable as stopped:
            yield stopped.claim
        except BadOption as error:
            raise BadOption(f"bound {self.name}: {error}") from None


BOUNDS: Registry[Bound] = Registry("bound", Bound, rows="HB")
"""Every bound of the catalogue, by name; each module of bounds adds its own."""


def bound(
    *, id: str, symbol: str, source: str, cost: str = "one pass", on_request: bool = False
) -> Callable[[Callable[..., Iterator[Claim]]], Bound]:
    """Make a bound from a function of the context that yields claims; its docstring's first line is the meaning.

    Keyword-only arguments of the function are the bound's options.
    """

    def decorate(function: Callable[..., Iterator[Claim]]) -> Bound:
        made = Bound(function.__name__, id, symbol, first_line(function), source, cost, on_request, function)
        BOUNDS.add(made.name, id, made)
        return made

    return decorate


def read_bound(spelling: str) -> Bound:
    """Return the bound that is spelled as on the command line: `mls_chain`, `volume_bound(k=3)`."""
    try:
        name, options = spelled(spelling)
    except ValueError as error:
        raise UnknownName.among("bound", spelling, BOUNDS) from error
    if name not in BOUNDS:
        raise UnknownName.among("bound", name, BOUNDS)
    return BOUNDS[name](**options) if options else BOUNDS[name]


@dataclass(frozen=True, eq=False)
class Verdict:
    """The verdict on a claim, with the sides where they come nearest.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(3, 2)
    >>> problem = fl.Problem(net, "half_squared_error", (torch.ones(4, 3), torch.zeros(4, 2)))
    >>> verdict = fl.check_bounds(fl.Lens(problem), "linear_stability")[0]
    >>> verdict.bound, verdict.status, verdict.lhs <= verdict.rhs
    ('linear_stability', 'holds', True)
    """

    bound: str
    layer: str | None
    lhs: float
    rhs: float
    slack: float  #: rhs - lhs
    tightness: float  #: lhs / rhs, the largest over samples; NaN if both are 0 in all
    status: Status
    assumption: str  #: the first assumption that fails, or those that were declared
    violated_share: float  #: share of the samples that violate the inequality; 0 or 1 for a claim without samples
    source: str
    note: str


def weigh(one: Bound, claim: Claim) -> Verdict:
    """Return the verdict: compare the sides within rounding and error, and check whether the theorem applies."""
    lhs, rhs = (torch.as_tensor(side, dtype=torch.float64).cpu().reshape(-1) for side in (claim.lhs, claim.rhs))
    lhs, rhs = lhs.expand(max(len(lhs), len(rhs))), rhs.expand(max(len(lhs), len(rhs)))
    slack = torch.where(torch.isinf(lhs) & (lhs == rhs), 0.0, rhs - lhs)
    if not claim.logs:
        slack = torch.where(slack == -math.inf, math.nan, slack)  # a side that overflows says nothing
    size = torch.ones_like(lhs) if claim.logs else torch.maximum(lhs.abs(), rhs.abs())
    below = slack < -claim.rounding * size - (0.0 if claim.logs else claim.floor)
    # Tightness: lhs / rhs, above 1 exactly where lhs is above rhs; NaN where both are 0, which says nothing
    if claim.logs:
        zero = torch.isinf(lhs) & (lhs < 0)  # the logarithm of 0
        ratio = torch.where(zero, torch.where(lhs == rhs, math.nan, 0.0), torch.exp(lhs - rhs))
    else:
        of_negative = torch.where(lhs < 0, rhs / lhs, math.inf)
        at_zero = torch.where(lhs == 0, math.nan, torch.where(lhs > 0, math.inf, 0.0))
        ratio = torch.where(rhs > 0, lhs / rhs, torch.where(rhs < 0, of_negative, at_zero))
        ratio = torch.where(lhs.isnan() | rhs.isnan(), math.nan, ratio)
    worst = int(ratio.nan_to_num(nan=-math.inf, posinf=math.inf).argmax())
    # Whether the theorem applies, and whether error leaves the sign of the slack open
    failing = next((a for a in claim.assumptions if a.holds is not True), None)
    declared = [a.name for a in claim.assumptions if a.declared]
    assumption = f"declared, not checked: {', '.join(declared)}" if declared else ""
    status: Status = "violated" if bool(below.any()) else "holds"
    if failing is not None:
        why = failing.detail or ("fails" if failing.holds is False else "neither checked nor declared")
        status, assumption = "not applicable", f"{failing.name}: {why}"
    elif bool(slack.isnan().any()):
        status, assumption = "not applicable", "numbers: a side is NaN or overflows"
    elif claim.stderr > 0 and bool((slack.abs() <= 1.96 * claim.stderr).any()):
        status = "undecided"
    name = f"{one.name}.{claim.part}" if claim.part else one.name
    note = "; ".join(part for part in (claim.note, "in logarithms" if claim.logs else "") if part)
    left, right, between, tightness = (float(side[worst]) for side in (lhs, rhs, slack, ratio))
    return Verdict(
        name, claim.layer, left, right, between, tightness, status, assumption,
        float(below.to(torch.float64).mean()), one.source, note,
    )  # fmt: skip
