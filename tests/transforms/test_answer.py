"""Every sentence of the answer of a table of invariance is said where it is true, and not where it is not."""

from dataclasses import replace

import pytest
import torch

import flatlens as fl
from flatlens.transforms import Cell, InvarianceReport
from flatlens.transforms.invariance import Applied

STAYS = Cell("mls", "layerwise", 2.0, 2.0, 0.0, 0.0, True, True, True)
MOVES = Cell("ggn_trace", "layerwise", 2.0, 6.0, 2.0, 0.0, False, False, True)
DONE = Applied(3e-16, ("0 -> 2",))


def said(*cells: Cell) -> str:
    found = InvarianceReport(cells, {"layerwise": DONE}, {}, {"n": 20}).answer
    assert len(found) <= 3
    return " ".join(found)


def test_numbers_that_stay_compare_networks_and_others_do_not() -> None:
    told = said(STAYS, MOVES)
    assert (
        "1 of 2 numbers is invariant under 1 function-preserving change of the weights: networks can "
        "be compared by mls." in told
    )
    assert "1 number changes, ggn_trace by a factor of 3 under layerwise: do not compare networks by it." in told
    assert "change," not in said(STAYS)
    assert "can be compared" not in said(MOVES)
    assert said(MOVES).startswith("No number is invariant under 1 function-preserving change")


def test_a_number_that_stays_here_alone_compares_nothing() -> None:
    assert "can be compared" not in said(replace(STAYS, declared=False))


@pytest.mark.parametrize(("after", "factor"), [(0.5, "by a factor of 4 "), (-2.0, ""), (float("nan"), "")])
def test_the_largest_factor_is_up_or_down_where_there_is_one(after: float, factor: str) -> None:
    assert f"1 number changes, ggn_trace {factor}under layerwise" in said(replace(MOVES, after=after))


def test_the_number_that_changes_most_is_named() -> None:
    more = replace(MOVES, measure="nmls", after=20.0)
    assert "2 numbers change, nmls by a factor of 10 under layerwise: do not compare networks by them." in said(
        MOVES, more
    )


def test_the_risk_and_parts_are_not_counted() -> None:
    loss, part = replace(STAYS, measure="loss"), replace(STAYS, measure="mls.max")
    assert "1 of 1 number is invariant" in said(loss, part, STAYS)
    assert (
        said(loss)
        == "On all 20 samples the outputs differ by 3e-16 at most; 1 declaration could be checked, and holds."
    )


def test_the_proof_says_what_is_undecided() -> None:
    open_ = replace(STAYS, unchanged=None, agrees=None, note="undecided: a search may have stopped short")
    assert said(STAYS, open_).endswith("1 declaration could be checked, and holds; 1 cell is undecided.")
    assert "undecided" not in said(STAYS)


def test_what_is_not_as_declared_comes_first() -> None:
    assert said(replace(STAYS, unchanged=False, agrees=False, after=3.0), MOVES).startswith(
        "Not as declared: mls under layerwise; an error in flatlens or in a theorem: please report it."
    )
    assert "Not as declared" not in said(STAYS, MOVES)


def test_without_a_transform_the_reasons_are_the_answer() -> None:
    found = InvarianceReport([], {}, {"permutation": "no link is found", "layerwise": "no link is found"}, {}).answer
    assert found == ["No function-preserving change of the weights applies to this network: no link is found."]


def test_the_table_of_a_network_answers() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).double()
    problem = fl.Problem(net, "mse", (torch.randn(4, 3).double(), torch.zeros(4, 2).double()))
    table = fl.check_invariance(fl.Lens(problem), ["mls", "ggn_trace"], "layerwise")
    assert table.answer[0].endswith("networks can be compared by mls.")
    assert table.answer[1].startswith("1 number changes, ggn_trace by a factor of ")
    assert " ".join(repr(table).split()).startswith(table.answer[0])
