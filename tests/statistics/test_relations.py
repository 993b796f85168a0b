from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from flatlens.statistics import (
    clustered,
    correlate,
    kendall,
    pearson,
    relate_all,
    relate_within,
    resamples,
    with_interval,
    within_groups,
)


@pytest.fixture
def points():
    rng = np.random.default_rng(0)
    x = rng.normal(size=30)
    return x, np.round(x + rng.normal(size=30), 1), rng.integers(0, 5, size=30).astype(float)


@pytest.mark.parametrize(("ours", "scipys"), [(pearson, stats.pearsonr), (kendall, stats.kendalltau)])
def test_every_resample_agrees_with_scipy_on_the_repeated_points(points, ours, scipys):
    x, _, ties = points
    counts = resamples(30, 1, number=20)
    expected = [scipys(np.repeat(x, c.astype(int)), np.repeat(ties + x, c.astype(int))).statistic for c in counts]
    np.testing.assert_allclose(ours(x, ties + x, counts), expected, atol=1e-12)


def test_large_offsets_cost_no_digits(points):
    x, y, _ = points
    everyone = np.ones((1, 30))
    np.testing.assert_allclose(pearson(x + 1e6, y * 1e-9, everyone), pearson(x, y, everyone), rtol=1e-8)


def test_the_interval_of_the_same_resamples_is_scipys_bca():
    """Skewed numbers, so that bias and acceleration count; scipy takes resamples that were drawn before."""
    x = np.random.default_rng(5).exponential(size=25)
    counts = resamples(25, 6, number=4000)

    def mean(c):
        return c @ x / c.sum(1)

    ours = with_interval(mean, counts)
    drawn = SimpleNamespace(bootstrap_distribution=mean(counts))
    theirs = stats.bootstrap((x,), np.mean, n_resamples=0, bootstrap_result=drawn, method="BCa").confidence_interval
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-12)
    plain = np.quantile(mean(counts), [0.025, 0.975])
    assert (np.abs(plain - [theirs.low, theirs.high]) > 1e-3).all()


def test_interval_agrees_with_scipys_bca(points):
    x, y, _ = points
    counts = resamples(30, 2, number=9999)
    ours = with_interval(lambda c: pearson(x, y, c), counts)
    method = stats.BootstrapMethod(n_resamples=9999, method="BCa", rng=np.random.default_rng(3))
    theirs = stats.pearsonr(x, y).confidence_interval(method=method)
    assert ours.n == 30
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.02)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(4)
    covered = 0
    for number in range(200):
        x = rng.normal(size=40)
        y = 0.6 * x + 0.8 * rng.normal(size=40)
        counts = resamples(40, number, number=500)
        interval = with_interval(lambda c, x=x, y=y: pearson(x, y, c), counts)
        covered += interval.low <= 0.6 <= interval.high
    assert (
        175 <= covered <= 199
    )  # 95% of 200 is 190, its standard deviation 3; bootstraps of 40 points fall short a little


def test_a_table_relates_every_pair_and_a_constant_column_is_undefined(points):
    x, y, ties = points
    table = pd.DataFrame({"x": x, "y": y, "ties": ties, "constant": 0.1 + 0 * x})
    relations = relate_all(table).set_index(["x", "y"])
    assert len(relations) == 6
    assert relations.loc[("x", "y"), "pearson"] == pytest.approx(stats.pearsonr(x, y).statistic)
    assert relations.loc[("y", "ties"), "kendall"] == pytest.approx(stats.kendalltau(y, ties).statistic)
    assert relations.xs("constant", level="y").filter(like="pearson").isna().all(axis=None)
    assert relations.xs("constant", level="y").filter(like="kendall").isna().all(axis=None)


def test_points_that_are_not_finite_are_left_out_of_their_pairs_only(points):
    x, y, ties = points
    table = pd.DataFrame({"x": x, "y": y, "ties": ties})
    table.loc[:2, "x"] = [np.nan, np.inf, -np.inf]
    relations = relate_all(table).set_index(["x", "y"])
    assert list(relations["n"]) == [27, 27, 30]
    assert relations.loc[("x", "y"), "pearson"] == pytest.approx(stats.pearsonr(x[3:], y[3:]).statistic)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_too_few_points_have_no_correlation(n):
    table = pd.DataFrame({"x": np.arange(float(n)), "y": np.arange(float(n))})
    row = relate_all(table).iloc[0]
    assert row["n"] == n
    assert row.drop(["x", "y", "n", "units"]).isna().all()


def test_perfect_agreement_has_a_point_for_an_interval():
    table = pd.DataFrame({"x": np.arange(9.0), "y": 2 * np.arange(9.0)})
    row = relate_all(table).iloc[0]
    assert (row["pearson"], row["pearson_low"], row["kendall"]) == pytest.approx((1, 1, 1))


def test_intervals_are_over_units():
    rng = np.random.default_rng(9)
    seeds = pd.Series(np.repeat(list("abcd"), 12))
    table = pd.DataFrame({name: np.repeat(rng.normal(size=4), 12) + 0.1 * rng.normal(size=48) for name in "xy"})
    alone, row = relate_all(table).iloc[0], relate_all(table, seeds).iloc[0]
    assert (alone["units"], row["units"], row["n"]) == (48, 4, 48)
    for coefficient in ("pearson", "kendall"):
        assert row[coefficient] == alone[coefficient]
        assert row[f"{coefficient}_high"] - row[f"{coefficient}_low"] > 2 * (
            alone[f"{coefficient}_high"] - alone[f"{coefficient}_low"]
        )
    expected = clustered("r", lambda n: pearson(*table.to_numpy().T, n), seeds, fisher=True, fewest=3)
    assert (row["pearson_low"], row["pearson_high"]) == (expected.low, expected.high)
    within = relate_within(table, "y", {"seed": seeds}, seeds).iloc[0]
    assert within["units"] == 4
    assert np.isfinite(within["pearson_low"])
    two = relate_all(table, seeds.replace({"c": "a", "d": "b"})).iloc[0]
    assert np.isnan(two["pearson_low"])  # two units say nothing of their spread


def test_within_groups_the_groups_own_levels_do_not_count():
    rng = np.random.default_rng(5)
    groups = np.repeat(np.arange(4), 10)
    inside = rng.normal(size=40)
    table = pd.DataFrame({"x": 10.0 * groups + inside, "y": 10.0 * groups - inside + 0.3 * rng.normal(size=40)})
    assert relate_all(table).loc[0, "pearson"] > 0.9
    row = relate_within(table, "y", {"group": pd.Series(groups)}).iloc[0]
    residuals = table - table.groupby(groups).transform("mean")
    assert row["pearson"] == pytest.approx(stats.pearsonr(residuals["x"], residuals["y"]).statistic)
    assert row["pearson_high"] < -0.8
    assert (row["groups"], row["n"]) == (4, 40)


@pytest.mark.parametrize("level", [1e6, 1e9, 1e12])
def test_levels_of_groups_far_apart_are_no_constants(level):
    rng = np.random.default_rng(5)
    groups, x = np.arange(30) % 3, np.round(rng.normal(size=30), 2)
    y = x + rng.normal(size=30)
    near, far = (pearson(x + at * groups, y, np.ones((1, 30)), groups) for at in (0.0, level))
    assert far == pytest.approx(near, abs=level * 1e-14)
    constant = np.where(groups == 1, 0.1 + 0.2, 0.3) + level * groups
    assert np.isnan(pearson(constant, y, np.ones((1, 30)), groups))
    assert within_groups(x + level * groups, y, groups).value == pytest.approx(near[0], abs=level * 1e-14)


def test_a_column_that_is_constant_up_to_rounding_has_no_coefficient():
    row = relate_all(pd.DataFrame({"a": 1 + 1e-16 * np.arange(8), "b": np.arange(8.0)})).iloc[0]
    assert row[["pearson", "kendall", "kendall_low"]].isna().all()


def test_two_values_in_few_units_have_no_interval_of_kendalls_tau():
    table = pd.DataFrame({"batchnorm": [0.0, 0, 0, 1, 1, 1], "gap": np.arange(6.0)})
    row = relate_all(table).iloc[0]
    assert row["kendall"] == pytest.approx(stats.kendalltau(*table.to_numpy().T).statistic)
    assert np.isnan(row["kendall_low"])
    assert row["pearson_low"] > 0


def test_a_number_and_its_text_are_two_units():
    table = pd.DataFrame({"a": np.arange(8.0), "b": np.arange(8.0) ** 2})
    assert relate_all(table, pd.Series([1, "1", 2, "2", 3, "3", 4, "4"], dtype=object))["units"][0] == 8


def test_groups_that_leave_too_few_points_are_undefined():
    rng = np.random.default_rng(8)
    table = pd.DataFrame({"x": rng.normal(size=16), "y": rng.normal(size=16)})
    by = {size: pd.Series(np.arange(16) // size) for size in (2, 4)}  # 8 and 12 points left
    rows = relate_within(table, "y", {str(size): groups for size, groups in by.items()}).set_index("group")
    assert rows["pearson"].isna().to_dict() == {"2": True, "4": False}


def test_groups_of_one_leave_nothing_to_relate():
    x, y, each = np.random.default_rng(6).normal(size=12), np.arange(12.0), np.arange(12)
    assert np.isnan(pearson(x, y, np.ones((1, 12)), groups=each)).all()


def test_an_outlier_leaves_the_interval_as_it_is_in_other_units() -> None:
    """Without it a resample is no constant, however far away it was."""
    near, far = (np.array([1, 2, 3, 4, 5, far, 6, 7.0]) for far in (1e4, 1e8))
    b = np.array([0.5, 0.4, 0.31, 0.2, 0.1, 0.6, 0.3, 0.35])
    intervals = [correlate(a, b, "pearson") for a in (near, far)]
    assert intervals[0].low == pytest.approx(intervals[1].low, abs=0.01)
    frames = [relate_all(pd.DataFrame({"a": a, "b": b})) for a in (near, far)]
    assert frames[0]["pearson_low"][0] == pytest.approx(frames[1]["pearson_low"][0], abs=1e-3)


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_sizes_near_the_ends_of_float64(size: float) -> None:
    b = [1.0, 3, 2, 4, 5, 9]
    found, plain = (relate_all(pd.DataFrame({"a": np.arange(6.0) * scale, "b": b})) for scale in (size, 1.0))
    assert found["pearson"][0] == pytest.approx(plain["pearson"][0], rel=1e-12)


def test_rows_without_a_unit_are_left_out() -> None:
    table = pd.DataFrame({"a": [1, 2, 3, 4.5, 5, 6], "b": [1.0, 3, 2, 4, 5, 9]})
    found = relate_all(table, units=pd.Series([1, 1, 2, 2, np.nan, np.nan]))
    assert (found["n"][0], found["units"][0]) == (4, 2)
