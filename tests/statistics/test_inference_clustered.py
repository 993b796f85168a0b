"""Intervals over independent units, against a literal jackknife; and corrections for several claims at once."""

import numpy as np
import pytest
from scipy.stats import false_discovery_control, spearmanr, t

from flatlens.statistics import Statistic, benjamini_hochberg, clustered, holm, in_cases, pearson, spearman
from flatlens.statistics.inference import MOST_GROUPS

RNG = np.random.default_rng(0)
UNITS = np.repeat(range(7), 3)
X = np.repeat(RNG.normal(size=7), 3) + RNG.normal(size=21)
Y = X + RNG.normal(size=21)


def literal(coefficient, units, fisher):
    """Value, interval and one-sided p above 0 by leaving out each unit in a loop."""
    to, back = (np.arctanh, np.tanh) if fisher else (lambda v: v, lambda v: v)
    names = np.unique(units)
    at = to(coefficient(np.ones(len(units), dtype=bool)))
    left = np.array([to(coefficient(units != name)) for name in names])
    error = np.sqrt((len(names) - 1) / len(names) * ((left - at) ** 2).sum())
    reach = t.ppf(0.975, len(names) - 1) * error
    return back(at), back(at - reach), back(at + reach), t.sf(at / error, len(names) - 1)


def test_a_correlation_follows_the_literal_jackknife_of_fishers_z():
    found = clustered("r", lambda n: pearson(X, Y, n), UNITS, unit="seed", fisher=True)
    value, low, high, p = literal(lambda kept: np.corrcoef(X[kept], Y[kept])[0, 1], UNITS, fisher=True)
    assert (found.value, found.low, found.high, found.tails(0.0)[0]) == pytest.approx((value, low, high, p))
    assert found.tails(value)[0] == pytest.approx(0.5)
    for end, tail in ((found.low, 0), (found.high, 1)):  # p and interval say the same
        assert found.tails(end)[tail] == pytest.approx(0.025)


def test_ranks_have_to_agree():
    found = clustered("r", lambda n: pearson(X, Y, n), UNITS, fisher=True, ranks=lambda n: spearman(X, Y, n))
    value, *_, p_ranks = literal(lambda kept: spearmanr(X[kept], Y[kept])[0], UNITS, fisher=True)
    *_, p = literal(lambda kept: np.corrcoef(X[kept], Y[kept])[0, 1], UNITS, fisher=True)
    assert found.of_ranks == pytest.approx(value)
    assert found.tails(0.0)[0] == pytest.approx(max(p, p_ranks / 2))
    x, y = np.arange(40.0) % 7, np.arange(40.0) % 3
    x[[0, 1, 2]] = y[[0, 1, 2]] = 1000.0, 1010.0, 1020.0  # three outliers make r
    outliers = clustered("r", lambda n: pearson(x, y, n), range(40), fisher=True, ranks=lambda n: spearman(x, y, n))
    assert outliers.low > 0.9
    assert outliers.tails(0.0)[0] > 0.025


def test_a_size_has_no_sign():
    found = clustered("|r|", lambda n: pearson(X, -Y, n), UNITS, fisher=True, folded=True)
    plain = clustered("r", lambda n: pearson(X, Y, n), UNITS, fisher=True)
    assert (found.value, found.low, found.high) == pytest.approx((plain.value, plain.low, plain.high))
    weak = clustered("|m|", lambda n: n @ np.array([1.0, -1.2, 1, -0.7, 1, -1]) / n.sum(1), range(6), folded=True)
    assert weak.low == 0.0 < weak.value < weak.high


def test_many_units_are_left_out_in_groups():
    x = RNG.normal(size=1000)
    found = clustered("mean", lambda n: n @ x / n.sum(1), range(1000))
    assert found.units == 1000
    assert f"{MOST_GROUPS - 1} degrees" in found.method
    assert found.high - found.low == pytest.approx(2 * 1.96 * x.std() / np.sqrt(1000), rel=0.15)


@pytest.mark.parametrize("labels", [range(400), [f"net {i}" for i in range(400)]])
def test_the_order_of_many_units_does_not_count(labels):
    """Neighbours of opposite values would cancel in each group, if neighbours were joined."""
    x = np.tile([-1.0, 1.0], 200) + 0.1 * RNG.normal(size=400)
    found = clustered("mean", lambda n: n @ x / n.sum(1), labels)
    assert found.high - found.low == pytest.approx(2 * 1.97 * x.std() / np.sqrt(400), rel=0.15)
    order = RNG.permutation(400)
    units = np.array(labels)[order]
    moved = clustered("mean", lambda n: n @ x[order] / n.sum(1), units)
    assert (moved.low, moved.high) == pytest.approx((found.low, found.high), abs=1e-12)


def test_more_units_have_more_degrees_of_freedom():
    x = np.array([1.0, 2, 3, 6, 2, 1])
    found = clustered("mean", lambda n: n @ x / n.sum(1), range(6))
    error = x.std(ddof=1) / np.sqrt(6)
    assert found.grown(1.0)(0.0) == found.tails(0.0)
    assert found.grown(3.0)(0.0)[0] == pytest.approx(t.sf(x.mean() / error * np.sqrt(3), 17))
    assert found.grown(900.0)(2.4)[0] == pytest.approx(t.sf(0.1 / error * 30, MOST_GROUPS - 1))
    alike = clustered("mean", lambda n: n @ np.ones(6) / n.sum(1), range(6))
    assert (alike.tails(0.0)[0], alike.grown(2.0)(0.0)[0]) == (0.5**6, 0.5**12)


def ranked(x, y, units=None, **options):
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    units = range(len(x)) if units is None else units
    return clustered("rho", lambda n: spearman(x, y, n), units, fisher=True, fewest=3, ordered=(x, y), **options)


def test_p_is_at_least_one_over_the_number_of_orders():
    y = np.array([1.0, 2, 3, 4, 6, 5])
    halves = ranked([0, 0, 0, 1, 1, 1], y)
    assert halves.tails is None
    assert halves.note == "the values have only 20 orders: too few for an interval"
    assert ranked(range(6), y).tails(0.0)[0] >= 1 / 720
    third = ranked([0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 2, 3, *range(5, 11)])
    assert third.tails(0.0)[0] == pytest.approx(1 / 84)
    assert third.grown(2.0)(0.0)[0] == pytest.approx(1 / 84**2)


def test_orders_of_several_networks_a_unit_are_those_of_units_and_within_them():
    units, y = np.repeat(range(6), 2), np.repeat([1.0, 2, 3, 4, 6, 5], 2) + np.tile([0, 0.1], 6)
    of_units = ranked(np.repeat([0, 0, 0, 1, 1, 1], 2), y, units)
    assert "only 20 orders" in of_units.note
    crossed = ranked(np.tile([0, 1], 6), y + np.tile([0, 9], 6), units)  # 2 orders in each of six units: 64
    assert "only 64 orders" in crossed.note
    assert ranked(np.tile([0, 1], 7), np.arange(14) % 2 * 9 + np.arange(14), np.repeat(range(7), 2)).tails is not None


def test_ranks_beside_a_correlation_have_their_own_orders():
    x, y = np.array([0.0, 0, 0, 1, 1, 1]), np.array([1.0, 2, 3, 4, 6, 5])
    found = clustered("r", lambda n: pearson(x, y, n), range(6), fisher=True, ranks=lambda n: spearman(x, y, n),
                      ordered=(x, y))  # fmt: skip
    assert found.low > 0
    assert found.tails(0.0)[0] == pytest.approx(1 / 40)


def test_what_is_undefined_has_no_interval():
    constant = clustered("r", lambda n: pearson(np.ones(8), np.arange(8.0), n), range(8), fisher=True)
    assert np.isnan(constant.value)
    assert constant.note
    x = np.array([1.0, 0, 0, 0, 0, 0])
    without_one = clustered("r", lambda n: pearson(x, np.arange(6.0), n), range(6), fisher=True)
    assert np.isfinite(without_one.value)
    assert without_one.tails is None
    assert "undefined without one network" in without_one.note


def part(above, value=0.5):
    return Statistic("r", value, 9, 0.1, 0.9, units=9, tails=lambda _: (above, 1 - above))


def test_all_cases_or_some_case():
    strong, weak, against = part(0.001), part(0.03, 0.2), part(0.995, -0.5)
    every = in_cases({"a": strong, "b": weak}, "all", "r")
    assert every.tails(0.0) == (0.03, 1.0)
    assert in_cases({"a": part(0.02), "b": part(0.024)}, "all", "r").tails(0.0)[0] == 0.024  # no correction
    assert (every.value, every.n) == (0.2, 9)
    assert in_cases({"a": strong, "b": strong, "c": weak}, "all", "r").tails(0.0)[0] == pytest.approx(0.03)
    failed = in_cases({"a": strong, "b": against}, "all", "r")
    assert failed.tails(0.0)[1] == pytest.approx(0.01)  # twice .005
    some = in_cases({"a": strong, "b": against}, "some", "r")
    assert some.tails(0.0)[0] == pytest.approx(0.002)
    assert some.value == 0.5
    below = in_cases({"a": strong, "b": against}, "some", "r", "below")
    assert below.tails(0.0)[1] == pytest.approx(0.01)
    assert below.value == -0.5
    assert in_cases({"a": part(0.98), "b": part(0.99)}, "some", "r").tails(0.0)[1] == pytest.approx(0.02)
    open_one = in_cases({"a": strong, "b": Statistic("r", 0.1, 3)}, "all", "r")
    assert open_one.tails(0.0) == (1.0, 1.0)
    assert "no interval for b" in open_one.note
    assert in_cases({"a": Statistic("r", 0.1, 3)}, "all", "r").tails is None


def test_corrections_for_several_claims():
    p = np.array([0.01, 0.04, 0.03, 0.2])
    assert holm(p) == pytest.approx([0.04, 0.09, 0.09, 0.2])
    assert holm(np.array([0.2, 0.9, 0.6])) == pytest.approx([0.6, 1.0, 1.0])
    drawn = RNG.random(30) ** 3
    assert benjamini_hochberg(drawn) == pytest.approx(false_discovery_control(drawn))
    with_nan = benjamini_hochberg(np.array([*p, np.nan]))
    assert with_nan[:4] == pytest.approx(false_discovery_control(p))
    assert np.isnan(with_nan[4])
