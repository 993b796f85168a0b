"""The mean of one number per network: over units, with Student's interval, or the exact one of two values."""

import numpy as np
import pytest
from scipy.stats import binomtest, t, ttest_1samp

from flatlens.statistics import average, share
from flatlens.statistics.inference import clopper_pearson
from flatlens.statistics.statistic import NAN

RNG = np.random.default_rng(0)


def test_networks_that_are_their_own_units_have_students_interval():
    x = RNG.normal(1.0, 2.0, 9)
    found, expected = average([*x, NAN]), ttest_1samp(x, 0.0)
    assert (found.value, found.n, found.units, found.left_out) == (pytest.approx(x.mean()), 9, 9, 1)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval()))
    assert found.p == pytest.approx(expected.pvalue)
    above, below = found.tails(0.7)
    assert above == pytest.approx(ttest_1samp(x, 0.7, alternative="greater").pvalue)
    assert above + below == pytest.approx(1)


def test_networks_of_one_unit_count_once():
    of_units = RNG.normal(size=7)
    x, units = np.repeat(of_units, 5) + np.tile([-0.1, 0.1, 0.0, 0.0, 0.0], 7), np.repeat(list("abcdefg"), 5)
    found, alone = average(x, units, unit="seed"), average(of_units)
    assert (found.n, found.units, found.unit) == (35, 7, "seed")
    assert (found.low, found.high, found.p) == pytest.approx((alone.low, alone.high, alone.p))
    assert found.leave_one_out == pytest.approx(alone.leave_one_out)


def test_unequal_units_follow_the_jackknife():
    x, units = np.array([1.0, 2, 4, 3, 5, 2, 8, 1]), np.array([0, 0, 1, 2, 3, 4, 5, 5])
    found = average(x, units)
    left_out = np.array([x[units != u].mean() for u in range(6)])
    error = np.sqrt(5 / 6 * ((left_out - x.mean()) ** 2).sum())
    assert found.high - found.value == pytest.approx(t.ppf(0.975, 5) * error)


def test_fewer_than_six_units_have_no_interval():
    found = average([1.0, 2.0, 3.0] * 5, list("abcde") * 3, unit="seed")
    assert found.value == 2.0
    assert np.isnan([found.low, found.high, found.p]).all()
    assert found.tails is None
    assert found.note == "fewer than 6 independent units"
    nothing = average([NAN] * 3)
    assert (nothing.n, nothing.note) == (0, "no network is left")


@pytest.mark.parametrize("n", [1, 8, 500])
def test_the_interval_of_a_share_is_scipys(n):
    for k in {0, 1, n // 3, n}:
        assert clopper_pearson(k, n) == pytest.approx(tuple(binomtest(k, n).proportion_ci(method="exact")), abs=1e-11)
    assert clopper_pearson(0, n) <= clopper_pearson(0.5, n) <= clopper_pearson(1, n)


@pytest.mark.parametrize("k", [0, 1, 5, 8])
def test_two_values_have_the_exact_binomial_interval(k):
    x = np.repeat([1.0, 0.0], [k, 8 - k])
    expected = binomtest(k, 8).proportion_ci()
    found = average(x, shares=True)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    for than in (0.2, 0.5):
        above, below = found.tails(than)
        assert above == pytest.approx(binomtest(k, 8, than, alternative="greater").pvalue)
        assert below == pytest.approx(binomtest(k, 8, than, alternative="less").pvalue)
    if 0 < k < 8:
        signs = average(2 * x - 1)
        assert (signs.low, signs.high) == pytest.approx((2 * expected.low - 1, 2 * expected.high - 1))
        assert signs.tails(0.0)[0] == pytest.approx(binomtest(k, 8, alternative="greater").pvalue)


def test_units_that_all_agree_are_a_sign_test():
    assert average([-1.0] * 6).tails(0.0) == pytest.approx((1 - 0.5**6, 0.5**6))
    assert average([-1.0] * 6).tails(-1.0) == (0.5, 0.5)
    agreeing = average([1.0] * 6, correlations=True)
    assert agreeing.tails(0.5) == (pytest.approx(0.75**6), 1.0)  # its interval begins at .08
    assert average([0.0] * 6, correlations=True).value == 0.0


def test_one_unit_beside_zeros_is_no_evidence():
    """Units at the number that is tested do not count in a sign test: of six, one is left."""
    found = average([0.0] * 5 + [1.0], correlations=True)
    assert found.tails(0.0)[0] == 0.5
    assert average([0.5] * 5 + [1.0]).tails(0.0)[0] == 0.5**6


def test_units_of_unequal_size_keep_the_mean_over_networks():
    found = average([1.0] * 7 + [1.0, 0.0, 0.0, 0.0, 0.0], units=list("aaaaaaabcdef"), correlations=True)
    assert found.value == pytest.approx(8 / 12)


def test_units_that_agree_have_a_binomial_interval_whatever_their_sizes():
    found = average([1.0] * 13, units=list("aaaaaaabcdefg"), shares=True)
    assert (found.low, found.high) == pytest.approx(tuple(binomtest(7, 7).proportion_ci()))
    mixed = average([1.0] * 24 + [0.0] * 16, cases=["a"] * 24 + ["b"] * 16)
    assert mixed.value == pytest.approx(0.5)


def test_a_kind_with_more_networks_does_not_count_for_more():
    """Two kinds of means -1 and 1 with 24 and 16 seeds, and no noise beside that between kinds."""
    seeds, kinds = [*range(24), *range(16)], ["a"] * 24 + ["b"] * 16
    rng = np.random.default_rng(0)
    x = np.where(np.array(kinds) == "a", -1.0, 1.0) + 0.1 * rng.normal(size=40)
    found = average(x, seeds, cases=kinds)
    assert found.value == pytest.approx((x[:24].mean() + x[24:].mean()) / 2)
    assert found.low < found.value < found.high
    assert found.high - found.low < 0.1  # the mix of kinds is no noise
    equal = [*range(16)] * 2, ["a"] * 16 + ["b"] * 16
    plain, by_kind = average(x[8:], equal[0]), average(x[8:], equal[0], cases=equal[1])
    assert (plain.value, plain.low, plain.high) == pytest.approx((by_kind.value, by_kind.low, by_kind.high))


def test_units_of_one_value_have_the_interval_of_a_sign_test():
    """Of six units that agree, the share on their side of 0 is at least .541, so the mean at least 2 x .541 - 1."""
    least = 2 * binomtest(6, 6).proportion_ci().low - 1
    found = average([1.0] * 6, correlations=True)
    assert (found.low, found.high) == pytest.approx((least, 1.0))
    assert found.p == pytest.approx(2 * 0.5**6)
    found = average([-1.0] * 6, correlations=True)
    assert (found.low, found.high) == pytest.approx((-1.0, -least))
    assert average([1.0] * 6, shares=True).low == pytest.approx(binomtest(6, 6).proportion_ci().low)


@pytest.mark.parametrize(
    ("value", "than", "side"),
    [(1.01, 1.5, 1), (1.01, 0.99, 0), (1.0, 1.5, 1), (-0.2, -0.3, 0), (-0.2, -0.1, 1), (0.0, -0.5, 0), (0.0, 1e-6, 1)],
)
@pytest.mark.parametrize("of", [{}, {"shares": True}, {"correlations": True}])
def test_all_units_on_one_side_of_a_number_are_a_sign_test_against_it(value, than, side, of):
    """p says what the interval says: that of eight units of one value is this value."""
    found = average([value] * 8, **of)
    outside = than > max(value, 1.0) or than < min(value, 0.0)
    if not of or (outside and "shares" in of):
        assert found.tails(than)[side] == pytest.approx(0.5**8)
    assert found.tails(than)[1 - side] > 0.5
    assert (found.tails(than)[side] <= 0.025) == (found.low > than if side == 0 else found.high < than)
    if not of:
        assert found.low == found.high == value


@pytest.mark.parametrize(("values", "than"), [([1 / 3, 1.0, 1.0, 1.0, 1.0, 1.0], 0.0), ([0.0, 1.0] * 4, 1.5)])
def test_no_p_is_0(values, than):
    found = average(values)
    assert min(found.tails(than)) == 0.5 ** len(values)


def test_a_share_is_of_units_in_which_all_hold():
    found = share([1, 1, 1, 0, 1, 1, 1, 1, NAN], list("aabbcdefg"), name="order", unit="seed")
    expected = binomtest(5, 6).proportion_ci()
    assert (found.value, found.low, found.high) == pytest.approx((5 / 6, expected.low, expected.high))
    assert (found.n, found.units, found.left_out) == (8, 6, 1)
