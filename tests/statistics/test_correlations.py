"""Correlations beside scipy's, on ties; intervals that cover, p-values that are uniform; exclusions are told."""

import itertools
import math
from functools import partial

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from flatlens.errors import BadInput, UnknownName
from flatlens.statistics import all_pairs, correlate, kendall, pearson, permutations, resamples, spearman
from flatlens.statistics.correlations import permuted_values
from flatlens.statistics.inference import clustered
from flatlens.statistics.resampling import generator

SCIPY = {"pearson": stats.pearsonr, "spearman": stats.spearmanr, "kendall": stats.kendalltau}
OURS = {"pearson": pearson, "spearman": spearman, "kendall": kendall}


@pytest.fixture
def tied():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 6, size=25).astype(float)
    return x, np.round(x + 2 * rng.normal(size=25))


@pytest.mark.parametrize("name", OURS)
def test_the_value_is_scipys_with_ties(tied, name):
    assert correlate(*tied, name, resampled=0).value == pytest.approx(SCIPY[name](*tied).statistic, abs=1e-12)


@pytest.mark.parametrize("name", OURS)
def test_every_resample_is_scipys_on_the_repeated_points(tied, name):
    counts = resamples(25, 1, 20)
    repeated = [[np.repeat(v, c.astype(int)) for v in tied] for c in counts]
    expected = [SCIPY[name](*pair).statistic for pair in repeated]
    np.testing.assert_allclose(OURS[name](*tied, counts), expected, atol=1e-12)


@pytest.mark.parametrize("name", OURS)
def test_every_permutation_is_the_coefficient_of_the_permuted_points(tied, name):
    orders = permutations(25, 2, 20)
    assert (np.sort(orders, axis=1) == np.arange(25)).all()
    expected = [SCIPY[name](tied[0], tied[1][order]).statistic for order in orders]
    np.testing.assert_allclose(
        permuted_values(name, *tied, orders), expected, atol=1e-6 if name == "kendall" else 1e-12
    )


@pytest.mark.parametrize("name", OURS)
def test_the_interval_is_close_to_scipys_bca(tied, name):
    ours = correlate(*tied, name, resampled=4000, permuted=0)
    theirs = stats.bootstrap(
        tied, lambda a, b: SCIPY[name](a, b).statistic, paired=True, vectorized=False, n_resamples=1500,
        rng=np.random.default_rng(3),
    ).confidence_interval  # fmt: skip
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.04)
    assert "BCa" in ours.method


@pytest.mark.parametrize("name", OURS)
def test_p_is_that_of_all_orders(name):
    """Of 5 points all 120 orders can be gone through."""
    x, y = np.arange(5.0), np.array([2.0, 1.0, 3.0, 5.0, 4.0])
    everything = stats.permutation_test(
        (y,), lambda b: SCIPY[name](x, b).statistic, permutation_type="pairings", n_resamples=np.inf
    )
    assert correlate(x, y, name, resampled=0, permuted=20000).p == pytest.approx(everything.pvalue, abs=0.015)


def test_fewer_than_six_networks_have_no_bootstrap_interval():
    x, y = np.array([1.0, 2, 3, 4, 5, 6]), np.array([1.0, 3, 2, 4, 6, 5])
    found = correlate(x[:5], y[:5])
    assert (found.value, found.p) == (pytest.approx(0.8), pytest.approx(10 / 120))
    assert np.isnan([found.low, found.high]).all()
    assert (found.note, found.method) == ("fewer than 6 networks: no interval", "p: two-sided, all 120 permutations")
    six = correlate(x, y)
    assert six.low < six.value < six.high
    assert six.note == ""


@pytest.mark.parametrize("name", ["spearman", "kendall"])
def test_a_column_of_two_values_in_few_units_has_no_interval(name):
    found = correlate([0, 0, 0, 1, 1, 1], [1, 2, 3, 4, 6, 5], name, units=range(6))
    assert "only 20 orders" in found.note
    assert np.isnan(found.p)
    assert correlate([0, 0, 0, 1, 1, 1], [1, 2, 3, 4, 6, 5], "pearson", units=range(6)).low > 0


def test_p_never_is_zero_and_says_what_it_must():
    x = np.arange(30.0)
    assert correlate(x, x, resampled=0, permuted=99).p == pytest.approx(0.01)


@pytest.mark.parametrize("name", OURS)
def test_p_is_uniform_where_there_is_nothing(name):
    rng = np.random.default_rng(5)
    ps = [correlate(*rng.normal(size=(2, 12)), name, resampled=0, permuted=99, seed=i).p for i in range(400)]
    # Kendall's values are few, and equal ones count against it: its p may be too large, never too small
    side = "greater" if name == "kendall" else "two-sided"
    assert stats.kstest(ps, "uniform", alternative=side).pvalue > 0.01
    assert 0.02 < np.mean(np.array(ps) <= 0.05) < 0.085  # 0.05, four standard deviations of 0.011


@pytest.mark.parametrize(("name", "truth"), [("pearson", 0.6), ("spearman", 0.5818), ("kendall", 0.4097)])
def test_intervals_cover_the_truth_about_as_often_as_they_say(name, truth):
    rng = np.random.default_rng(6)
    covered = 0
    for number in range(300):
        x, noise = rng.normal(size=(2, 40))
        found = correlate(x, 0.6 * x + 0.8 * noise, name, resampled=500, permuted=0, seed=number)
        covered += found.low <= truth <= found.high
    assert 0.90 <= covered / 300 <= 0.985


def test_whoever_is_left_out_is_told_once_with_the_reason():
    x = [np.nan, np.inf, 1, 2, 3, 4, 5, 0.0]
    y = [np.nan, 1.0, -np.inf, 1, 2, 3, 4, 1]
    found = correlate(x, y, names=("mls", "gap"), log=["mls"], resampled=0, permuted=0)
    assert found.n == 4
    told = {"mls is missing": 1, "mls is infinite": 1, "gap is infinite": 1,
            "mls is not positive, and has no logarithm": 1}  # fmt: skip
    assert dict(found.excluded) == told
    assert found.left_out == 4
    assert "1 left out: gap is infinite" in repr(found)
    assert correlate(x, y, names=("mls", "gap"), resampled=0, permuted=0).n == 5


def test_a_logarithm_changes_pearson_alone():
    x = np.exp(np.arange(6.0))
    kept = {name: correlate(x, np.arange(6.0), name, log=["x"], resampled=0).value for name in OURS}
    assert kept == pytest.approx({"pearson": 1, "spearman": 1, "kendall": 1})
    assert correlate(x, np.arange(6.0), "pearson", resampled=0).value < 0.9


@pytest.mark.parametrize(("x", "note"), [
    ([1.0, 2.0, 3.0], "3 networks are left, at least 4 are needed"),
    ([], "0 networks are left"),
    ([2.0] * 9, "x is constant"),
    ([np.nan] * 9, "0 networks are left"),
])  # fmt: skip
@pytest.mark.parametrize("name", OURS)
def test_what_is_undefined_says_why(x, note, name):
    found = correlate(x, np.arange(float(len(x))), name)
    assert np.isnan([found.value, found.low, found.high, found.p]).all()
    assert note in found.note


def test_a_table_gives_every_pair_and_the_same_as_one_pair():
    rng = np.random.default_rng(7)
    table = pd.DataFrame(rng.normal(size=(20, 4)), columns=list("abcd"))
    table.loc[3, "d"] = np.nan
    table["flat"] = 1.0
    found = all_pairs(table, resampled=200, permuted=50).set_index(["x", "y", "statistic"])
    assert len(found) == 10 * 3
    for x, y, name in (("a", "b", "kendall"), ("c", "d", "spearman")):
        alone = correlate(table[x], table[y], name, names=(x, y), resampled=200, permuted=50)
        row = found.loc[(x, y, name)]
        assert tuple(row[["value", "low", "high", "p"]]) == (alone.value, alone.low, alone.high, alone.p)
    assert (found.loc[("a", "d", "kendall")][["n", "left_out"]] == [19, 1]).all()
    assert found.loc[("a", "d", "kendall"), "why"] == "1 left out: d is missing"
    assert found.loc[("a", "flat", "pearson"), "note"] == "flat is constant"


def test_the_seed_decides_and_a_generator_will_do(tied):
    a, b, c = (correlate(*tied, seed=seed, resampled=300) for seed in (1, 1, 2))
    assert a == b != c
    assert correlate(*tied, seed=generator(1), resampled=300) == a
    assert correlate(*tied, seed=np.random.default_rng(1), resampled=300).value == a.value


def test_resamples_are_those_of_torch():
    """What studies on disk were drawn with."""
    torch = pytest.importorskip("torch")
    drawn = torch.randint(7, (50, 7), generator=torch.Generator().manual_seed(3)).numpy()
    expected = np.stack([np.bincount(row, minlength=7) for row in drawn])
    np.testing.assert_array_equal(resamples(7, 3, 50), expected)


@pytest.mark.parametrize("name", OURS)
def test_over_units_it_is_that_of_clustered(name):
    rng = np.random.default_rng(8)
    units = np.repeat(np.arange(7), 3)
    x, y = rng.normal(size=7)[units] + rng.normal(size=(2, 21))
    x[4] = np.nan
    found = correlate(x, y, name, units=units, unit="seed")
    there = np.isfinite(x)
    expected = clustered("", partial(OURS[name], x[there], y[there]), units[there], unit="seed", fisher=True)
    assert (found.value, found.low, found.high, found.p) == (expected.value, expected.low, expected.high, expected.p)
    assert (found.n, found.units, found.unit, found.why) == (20, 7, "seed", "1 left out: x is missing")
    alone = correlate(x, y, name, units=np.arange(21))
    assert alone.high - alone.low < found.high - found.low  # networks of one seed are alike, and are no evidence each


def test_over_units_a_constant_column_is_told():
    found = correlate([2.0] * 9, np.arange(9.0), units=range(9))
    assert (found.note, found.units) == ("x is constant", 9)


@pytest.mark.parametrize(("call", "told"), [
    (lambda: correlate([1, 2], [1, 2], units=[1]), "expected one label for each network, 2 of them; got 1"),
    (lambda: correlate([1, 2], [1, 2], "tau"), "unknown correlation 'tau'"),
    (lambda: correlate([1, 2], [1, 2, 3]), "x has shape \\(2,\\), y has shape \\(3,\\)"),
    (lambda: correlate(["a", "b"], [1, 2]), "column 'x': expected numbers"),
    (lambda: correlate([1, 2], [1, 2], log=["z"]), "unknown column 'z' in log="),
    (lambda: correlate([1, 2], [1, 2], permuted=-1), "permuted=-1"),
    (lambda: correlate([1, 2], [1, 2], names=("a", "a")), "two names"),
    (lambda: all_pairs(pd.DataFrame({"a": [1], "b": [1]}), ["tau"]), "unknown correlation"),
    (lambda: all_pairs(pd.DataFrame([[1, 2]], columns=["a", "a"])), "these column names occur twice: a"),
])  # fmt: skip
def test_mistakes_are_told(call, told):
    with pytest.raises(BadInput, match=told):
        call()
    assert issubclass(UnknownName, BadInput)


@pytest.mark.parametrize("name", ["pearson", "spearman", "kendall"])
@pytest.mark.parametrize("n", [4, 6])
def test_p_is_exact_for_few_networks(name, n):
    rng = np.random.default_rng(n)
    x, y = rng.normal(size=n), rng.integers(0, 4, size=n).astype(float)  # with ties
    own = abs(SCIPY[name](x, y).statistic)
    every = [abs(SCIPY[name](x, y[list(order)]).statistic) for order in itertools.permutations(range(n))]
    found = correlate(x, y, name, resampled=0)
    assert found.p == pytest.approx(np.mean(np.array(every) >= own - 1e-12), rel=1e-12)
    assert f"all {math.factorial(n)} permutations" in found.method


def test_the_smallest_p_of_six_networks_is_two_of_720():
    assert correlate(range(6), range(6), resampled=0).p == pytest.approx(2 / 720, rel=1e-12)


def test_every_order_within_groups():
    orders = permutations(6, 0, 99, np.array([0, 1, 0, 1, 1, 0]))
    assert len({tuple(order) for order in orders}) == len(orders) == 35
    assert (np.sort(orders[:, [0, 2, 5]], axis=1) == [0, 2, 5]).all()
    assert not (orders == np.arange(6)).all(1).any()
