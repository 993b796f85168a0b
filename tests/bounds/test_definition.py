"""How a claim is weighed."""

import math

import pytest
import torch

from flatlens.bounds import Assumption, Claim
from flatlens.bounds.definition import bound, weigh

LAW = bound(id="own", symbol="", source="nowhere")(lambda context: iter(()))


def verdict(lhs, rhs, **more):
    return weigh(LAW, Claim(torch.as_tensor(lhs), torch.as_tensor(rhs), **more))


def test_the_sides_are_shown_where_they_come_nearest():
    found = verdict([1.0, 3.0, 2.0], [2.0, 4.0, 20.0])
    assert (found.lhs, found.rhs, found.slack, found.tightness) == (3.0, 4.0, 1.0, 0.75)
    assert (found.status, found.violated_share, found.assumption) == ("holds", 0.0, "")


def test_the_share_of_samples_that_violate_is_counted():
    found = verdict([1.0, 3.0, 5.0, 2.0], [2.0, 2.0, 2.0, 2.0])
    assert (found.status, found.violated_share, found.lhs) == ("violated", 0.5, 5.0)


@pytest.mark.parametrize(
    ("lhs", "rhs", "tightness", "status"),
    [
        (0.0, 2.0, 0.0, "holds"),
        (-3.0, 2.0, -1.5, "holds"),
        (-4.0, -2.0, 0.5, "holds"),
        (-2.0, -4.0, 2.0, "violated"),
        (1.0, -1.0, math.inf, "violated"),
        (1.0, 0.0, math.inf, "violated"),
        (-1.0, 0.0, 0.0, "holds"),
        (1.0, math.inf, 0.0, "holds"),
    ],
)
def test_tightness_is_above_one_just_where_the_bound_is_violated(lhs, rhs, tightness, status):
    found = verdict(lhs, rhs)
    assert (found.tightness, found.status) == (tightness, status)
    assert (found.tightness > 1) == (found.status == "violated")


def test_nothing_below_nothing_holds_and_says_no_more():
    found = verdict(0.0, 0.0)
    assert found.status == "holds"
    assert math.isnan(found.tightness)
    assert verdict([0.0, 1.0], [0.0, 4.0]).tightness == 0.25  # a dead sample does not pass for a tight one


def test_rounding_is_no_violation_and_more_is_one():
    assert verdict(1.0 + 5e-7, 1.0).status == "holds"
    assert verdict(1.0 + 5e-6, 1.0).status == "violated"
    assert verdict(1.0 + 5e-6, 1.0, rounding=1e-5).status == "holds"
    assert verdict(1e-160, 0.0).status == "holds"  # its square is no number


def test_logarithms_are_compared_as_they_are():
    found = verdict(math.log(2.0), math.log(8.0), logs=True)
    assert found.tightness == pytest.approx(0.25)
    assert found.slack == pytest.approx(math.log(4.0))
    assert found.note == "in logarithms"
    assert verdict(-1000.0 + 1e-3, -1000.0, logs=True).status == "violated"  # a factor 1.001, however small both are


def test_the_logarithm_of_nothing():
    assert verdict([-math.inf, -1.0], [0.0, 0.0], logs=True).tightness == pytest.approx(math.exp(-1))
    none = verdict(-math.inf, -math.inf, logs=True)
    assert none.status == "holds"
    assert math.isnan(none.tightness)
    assert verdict(0.0, -math.inf, logs=True).status == "violated"


@pytest.mark.parametrize(
    ("slack", "status"), [(0.5, "undecided"), (-0.5, "undecided"), (3.0, "holds"), (-3.0, "violated")]
)
def test_within_the_error_of_an_estimate_nothing_is_decided(slack, status):
    assert verdict(10.0, 10.0 + slack, stderr=1.0).status == status


def test_a_failed_assumption_is_named_and_the_sides_are_shown_all_the_same():
    premises = (Assumption("fine", True), Assumption("broken", False, "3 of 4"), Assumption("also", False, "no"))
    found = verdict([2.0, 1.0], [1.0, 1.0], assumptions=premises)
    assert (found.status, found.assumption) == ("not applicable", "broken: 3 of 4")
    assert (found.lhs, found.rhs, found.violated_share) == (2.0, 1.0, 0.5)


def test_what_is_neither_checked_nor_declared_does_not_apply():
    found = verdict(1.0, 2.0, assumptions=(Assumption("convex_support", None, declared=True),))
    assert (found.status, found.assumption) == ("not applicable", "convex_support: neither checked nor declared")


def test_what_was_declared_is_shown_as_such():
    premises = (Assumption("checked", True), Assumption("convex_support", True, declared=True))
    found = verdict(1.0, 2.0, assumptions=premises)
    assert (found.status, found.assumption) == ("holds", "declared, not checked: convex_support")


def test_a_side_that_is_no_number_decides_nothing():
    found = verdict([1.0, math.nan], [2.0, 2.0])
    assert (found.status, found.tightness) == ("not applicable", 0.5)
    assert "NaN" in found.assumption
    assert math.isnan(verdict(math.nan, math.nan).tightness)


@pytest.mark.parametrize(("lhs", "rhs"), [(math.inf, 1.0), (1.0, -math.inf), ([1.0, math.inf], 2.0)])
def test_a_side_that_overflows_decides_nothing(lhs, rhs):
    found = verdict(lhs, rhs)
    assert (found.status, found.assumption) == ("not applicable", "numbers: a side is NaN or overflows")
    assert found.tightness == math.inf


def test_one_number_can_stand_against_many():
    assert verdict([1.0, 2.0, 3.0], 4.0).tightness == 0.75
    assert verdict(3.0, [4.0, 6.0]).tightness == 0.75
