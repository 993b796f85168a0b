"""Kendall's W beside a worked example, its formula with ties, and Friedman's test."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from flatlens.errors import BadInput
from flatlens.statistics import concordance, kendall_w


def test_the_textbook_example():
    """Three judges, six entries (after Siegel 1956: executives rank applicants): sums 8, 14, 11, 11, 11, 8."""
    ranks = [[1, 6, 3, 2, 5, 4], [1, 5, 6, 4, 2, 3], [6, 3, 2, 5, 4, 1]]
    sums = np.sum(ranks, axis=0)
    assert sums.tolist() == [8, 14, 11, 11, 11, 8]
    s = ((sums - 10.5) ** 2).sum()
    assert s == 25.5
    assert kendall_w(ranks, permuted=0).value == pytest.approx(12 * s / (3**2 * (6**3 - 6)))  # 0.16


def test_ties_are_corrected_for():
    """W = (12 sum R^2 - 3 m^2 n (n + 1)^2) / (m^2 n (n^2 - 1) - m sum(t^3 - t))."""
    scores = np.array([[1, 2, 2, 4, 5], [1, 1, 1, 2, 3], [3, 1, 2, 2, 9]])
    sums = stats.rankdata(scores, axis=1).sum(0)
    ties = (2**3 - 2) + (3**3 - 3) + (2**3 - 2)
    expected = (12 * (sums**2).sum() - 3 * 9 * 5 * 36) / (9 * 5 * 24 - 3 * ties)
    assert kendall_w(scores, permuted=0).value == pytest.approx(expected)


def test_it_is_friedmans_test():
    scores = np.random.default_rng(0).normal(size=(7, 5))
    friedman = stats.friedmanchisquare(*scores.T)
    found = kendall_w(scores, permuted=0)
    assert found.value == pytest.approx(friedman.statistic / (7 * 4))
    assert found.p == pytest.approx(friedman.pvalue)
    assert "chi-square, 4 degrees" in found.method


def test_the_ends():
    order = np.arange(5.0)
    assert kendall_w([order, order**3, np.exp(order)]).value == 1
    assert kendall_w([order, -order]).value == 0


def test_p_of_two_rankings_of_three_is_that_of_all_orders():
    """Of the 6 orders of a second ranking, one agrees wholly: p = 1/6."""
    assert kendall_w([[1, 2, 3], [1, 2, 3]], permuted=20000).p == pytest.approx(1 / 6, abs=0.01)


def test_p_is_right_where_rankings_have_nothing_in_common():
    rng = np.random.default_rng(1)
    ps = np.array([kendall_w(rng.normal(size=(4, 6)), permuted=199, seed=i).p for i in range(400)])
    assert stats.kstest(ps, "uniform").pvalue > 0.01
    assert (ps <= 0.05).mean() < 0.09


def test_rankings_that_say_nothing_are_left_out_and_told():
    scores = pd.DataFrame([[1, 2, 3], [1, 2, 3], [4, 4, 4], [1, np.nan, 2]])
    found = kendall_w(scores)
    assert found.value == 1
    assert found.note == "2 rankings; 1 left out: a value is missing; 1 left out: all networks tie"
    assert np.isnan(kendall_w(scores.iloc[1:]).value)
    assert "at least 2 are needed" in kendall_w(scores.iloc[1:]).note
    assert np.isnan(kendall_w(np.full((3, 4), np.nan)).value)


def test_ranks_that_are_ranks_already_are_taken_as_they_are():
    ranks = [[1.5, 2.0, 2.5], [1.0, 2.0, 3.0]]  # 1 and 3 apart, 2 undecided with both
    assert kendall_w(ranks, ranked=True, permuted=0).value == pytest.approx(2 * 1.5**2 / (2 * (0.5 + 2)))
    assert float(concordance(np.array(ranks))) == pytest.approx(0.9)
    assert kendall_w(ranks, permuted=0).value == 1


def test_one_network_cannot_be_ranked():
    with pytest.raises(BadInput, match="at least 2 networks"):
        kendall_w([[1], [2]])
