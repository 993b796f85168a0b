"""Every sentence of the answer of a table of bounds is said where it is true, and not where it is not."""

from dataclasses import replace

import pytest
import torch

import flatlens as fl
from flatlens.bounds import BOUNDS, BoundsReport, Verdict
from flatlens.bounds.check import answer_of_bounds

HELD = Verdict("mls_chain", "fc1", 0.5, 1.0, 0.5, 0.5, "holds", "", 0.0, "", "")
OFF = replace(HELD, bound="residual_bound", status="not applicable", assumption="identity_skips: no residual block")


def said(*verdicts: Verdict) -> str:
    found = BoundsReport(verdicts).answer
    assert len(found) <= 3
    return " ".join(found)


def test_claims_are_counted_by_verdict() -> None:
    assert said(HELD).startswith("1 of 1 claim holds on this network. ")
    both = said(HELD, HELD, OFF, replace(HELD, status="undecided"))
    assert both.startswith("2 of 4 claims hold on this network; 1 is not applicable; 1 is undecided. ")
    assert said(OFF, OFF).startswith("None of 2 claims holds on this network; 2 are not applicable. ")
    assert answer_of_bounds([]) == []


def test_the_tightest_is_named_and_how_many_are_near_equality() -> None:
    tight = replace(HELD, bound="nmls_bound", layer=None, tightness=0.96)
    told = said(HELD, tight)
    assert "The tightest is nmls_bound (left side 96% of the right); 2 claims are within a factor of 10" in told
    assert "1 claim is within a factor of 10" in said(HELD, replace(tight, tightness=1e-18))
    assert "none is within a factor of 10 of equality: they say little here" in said(replace(HELD, tightness=0.05))
    assert "tightest" not in said(OFF)
    assert "tightest" not in said(replace(HELD, tightness=float("nan")))


def test_a_bound_above_the_largest_loss_is_called_vacuous_and_is_not_the_tightest() -> None:
    empty = replace(
        HELD, bound="relative_generalisation", tightness=0.9, note="vacuous: no gap exceeds the largest loss, 2"
    )
    assert "The tightest is mls_chain at fc1" in said(HELD, empty)
    assert said(HELD, empty).endswith("; relative_generalisation is vacuous.")
    assert "vacuous" not in said(HELD)


def test_an_assumption_that_only_a_declaration_settles_is_proposed() -> None:
    waiting = replace(OFF, bound="lipschitz_bound", assumption="convex_support: neither checked nor declared")
    assert said(HELD, waiting).endswith(
        "If it holds here, declare convex_support with assume=, which decides lipschitz_bound."
    )
    assert "declare" not in said(HELD, OFF)
    assert "declare" not in said(HELD, replace(waiting, assumption="known_density: neither checked nor declared"))


def test_bounds_that_must_be_named_are_named_after_a_check_of_the_others() -> None:
    named = [name for name, one in BOUNDS.items() if one.on_request]
    others = [replace(HELD, bound=name) for name in BOUNDS if name not in named]
    told = said(*others)
    assert f"{len(named)} bounds need more than a pass and must be named: {named[0]}, " in told
    assert "must be named" not in said(HELD)
    assert "must be named" not in said(*others, *(replace(HELD, bound=name) for name in named))


def test_where_nothing_holds_the_most_frequent_reason_is_said() -> None:
    other = replace(OFF, assumption="known_density: no distribution was given")
    assert said(OFF, other, other).endswith(
        "The assumption that fails most often is known_density: no distribution was given."
    )
    assert "most often" not in said(HELD, OFF)


@pytest.mark.parametrize("assumption", ["", "declared, not checked: convex_support"])
def test_a_violation_comes_first_with_its_cause(assumption: str) -> None:
    wrong = replace(HELD, status="violated", assumption=assumption)
    first = BoundsReport([HELD, wrong]).answer[0]
    assert first.startswith("Violated: mls_chain; ")
    assert ("an assumption that you declared is false" in first) == bool(assumption)
    assert first.endswith("an error in flatlens or in a theorem: please report it.")
    assert "Violated" not in said(HELD)


def test_the_table_of_a_network_answers() -> None:
    net = torch.nn.Linear(3, 2).double()
    problem = fl.Problem(net, "half_squared_error", (torch.randn(4, 3).double(), torch.zeros(4, 2).double()))
    table = fl.check_bounds(fl.Lens(problem), "linear_stability")
    held = sum(v.status == "holds" for v in table)
    assert table.answer[0].startswith(f"{held} of {len(table)} claims hold")
    assert " ".join(repr(table).split()).startswith(table.answer[0])
