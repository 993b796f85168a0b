"""Partial correlation and correlation within groups: beside their formulas, and beside regressions made by hand."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from flatlens.errors import BadInput
from flatlens.statistics import (
    correlate,
    partial_correlation,
    permutations,
    relate_within,
    resamples,
    within_groups,
)
from flatlens.statistics.correlations import _partial, _under_null


@pytest.fixture
def xyz():
    rng = np.random.default_rng(0)
    z = rng.normal(size=40)
    return 2 * z + rng.normal(size=40), z - rng.normal(size=40), z


@pytest.mark.parametrize(("name", "theirs"), [("pearson", stats.pearsonr), ("spearman", stats.spearmanr)])
def test_one_control_is_the_textbook_formula(xyz, name, theirs):
    x, y, z = xyz
    xy, xz, yz = (theirs(a, b).statistic for a, b in ((x, y), (x, z), (y, z)))
    expected = (xy - xz * yz) / np.sqrt((1 - xz**2) * (1 - yz**2))
    found = partial_correlation(x, y, pd.DataFrame({"z": z}), name, resampled=0, permuted=0)
    assert found.value == pytest.approx(expected, abs=1e-12)
    assert "given z" in found.name


def residual(v, controls):
    design = np.column_stack([np.ones(len(v)), controls])
    return v - design @ np.linalg.lstsq(design, v, rcond=None)[0]


def test_several_controls_are_two_regressions(xyz):
    x, y, z = xyz
    controls = np.column_stack([z, z**2, 1e6 + np.arange(40.0)])
    expected = stats.pearsonr(residual(x, controls), residual(y, controls)).statistic
    found = partial_correlation(x, y, pd.DataFrame(controls), resampled=0, permuted=0)
    assert found.value == pytest.approx(expected, abs=1e-9)


def test_a_control_named_twice_counts_once(xyz):
    x, y, z = xyz
    one, two = (partial_correlation(x, y, pd.DataFrame(c), resampled=50, permuted=50)
                for c in ({"z": z}, {"z": z, "again": 3 * z - 1}))  # fmt: skip
    assert (two.value, two.low, two.p) == pytest.approx((one.value, one.low, one.p), abs=1e-7)


@pytest.mark.parametrize("ranked", [False, True])
def test_every_resample_is_the_formula_on_the_repeated_points(xyz, ranked):
    counts = resamples(40, 1, 10)
    theirs = stats.spearmanr if ranked else stats.pearsonr
    for row, found in zip(counts, _partial(np.stack(xyz), ranked, counts), strict=True):
        x, y, z = (np.repeat(v, row.astype(int)) for v in xyz)
        xy, xz, yz = (theirs(a, b).statistic for a, b in ((x, y), (x, z), (y, z)))
        assert found == pytest.approx((xy - xz * yz) / np.sqrt((1 - xz**2) * (1 - yz**2)), abs=1e-9)


def test_under_the_null_each_order_is_regressed_anew(xyz):
    """Freedman and Lane: y made of what z explains and a permuted rest, and z taken out of it again."""
    x, y, z = xyz
    orders = permutations(40, 3, 10)
    rest = residual(y, z)
    expected = [stats.pearsonr(residual(x, z), residual(y - rest + rest[order], z)).statistic for order in orders]
    np.testing.assert_allclose(_under_null(np.stack(xyz), orders, False), expected, atol=1e-12)


def test_a_common_cause_is_taken_out():
    rng = np.random.default_rng(1)
    z = rng.normal(size=60)
    x, y = z + 0.3 * rng.normal(size=60), z + 0.3 * rng.normal(size=60)
    assert correlate(x, y, "pearson").p < 0.01
    left = partial_correlation(x, y, pd.DataFrame({"z": z}))
    assert left.low < 0 < left.high
    assert left.p > 0.05


@pytest.mark.parametrize("name", ["pearson", "spearman"])
def test_p_is_uniform_where_only_the_control_acts(name):
    rng = np.random.default_rng(2)
    ps = []
    for number in range(300):
        z = rng.normal(size=20)
        x, y = z + 0.5 * rng.normal(size=20), z + 0.5 * rng.normal(size=20)
        control = pd.DataFrame({"z": z})
        ps.append(partial_correlation(x, y, control, name, resampled=0, permuted=99, seed=number).p)
    assert np.mean(np.array(ps) <= 0.05) < 0.10
    if name == "pearson":  # of ranks a control is taken out in part only
        assert stats.kstest(ps, "uniform").pvalue > 0.01


def test_what_is_undefined_says_why(xyz):
    x, y, z = xyz
    few = partial_correlation(x[:4], y[:4], pd.DataFrame({"z": z[:4]}))
    assert "4 networks are left, at least 5 are needed" in few.note
    assert "one of the two completely" in partial_correlation(2 * z, y, pd.DataFrame({"z": z})).note
    assert "x is constant" in partial_correlation(0 * x, y, pd.DataFrame({"z": z})).note
    missing = partial_correlation(x, y, pd.DataFrame({"z": np.where(np.arange(40) < 3, np.nan, z)}), resampled=0)
    assert missing.excluded == (("control z is missing", 3),)


def test_mistakes_are_told(xyz):
    x, y, z = xyz
    with pytest.raises(BadInput, match="at least one other column to control for"):
        partial_correlation(x, y, pd.DataFrame(index=range(40)))
    with pytest.raises(BadInput, match="expected numbers"):
        partial_correlation(x, y, pd.DataFrame({"z": ["a"] * 40}))
    with pytest.raises(BadInput, match="unknown partial correlation 'kendall'"):
        partial_correlation(x, y, pd.DataFrame({"z": z}), "kendall")


def test_within_groups_is_the_studys_own():
    rng = np.random.default_rng(3)
    groups = np.repeat(["a", "b", "c"], 10)
    x = rng.normal(size=30)
    table = pd.DataFrame({"x": x + 9 * (groups == "b"), "y": rng.normal(size=30) - x - 9 * (groups == "b")})
    theirs = relate_within(table, "y", {"g": pd.Series(groups)}).iloc[0]
    ours = within_groups(table["x"], table["y"], groups)
    assert ours.value == theirs["pearson"]  # that interval resamples networks, the study's is Student's
    assert theirs["pearson_low"] < ours.value < theirs["pearson_high"]
    assert ours.note == "3 groups"
    assert ours.p < 0.01


def test_within_groups_p_is_not_moved_by_the_groups_levels():
    rng = np.random.default_rng(4)
    ps = []
    for number in range(300):
        groups = np.repeat([0, 1, 2], 6)
        x, y = 20 * groups + rng.normal(size=18), 20 * groups + rng.normal(size=18)
        ps.append(within_groups(x, y, groups, resampled=0, permuted=99, seed=number).p)
    assert stats.kstest(ps, "uniform").pvalue > 0.01


def test_groups_that_leave_too_few_are_told():
    found = within_groups(np.arange(12.0), np.arange(12.0), np.arange(12) // 2)
    assert "12 networks in 6 groups, which leave 6 points" in found.note
    constant = within_groups(np.repeat([0.0, 1.0], 8), np.arange(16.0), np.repeat([0, 1], 8))
    assert "constant within each group" in constant.note
    missing = within_groups(np.arange(16.0), np.arange(16.0), [None, *"aaaaaaaabbbbbbb"], resampled=0, permuted=0)
    assert missing.excluded == (("group is missing", 1),)


@pytest.mark.parametrize(("name", "theirs"), [("pearson", stats.pearsonr), ("spearman", stats.spearmanr)])
def test_over_units_it_is_computed_again_without_each(xyz, name, theirs):
    units = np.arange(len(xyz[0])) % 8

    def fishers(kept):
        x, y, z = (v[kept] for v in xyz)
        xy, xz, yz = (theirs(a, b).statistic for a, b in ((x, y), (x, z), (y, z)))
        return np.arctanh((xy - xz * yz) / np.sqrt((1 - xz**2) * (1 - yz**2)))

    x, y, z = xyz
    found = partial_correlation(x, y, pd.DataFrame({"z": z}), name, units=units, unit="seed")
    at, without = fishers(units >= 0), np.array([fishers(units != unit) for unit in range(8)])
    reach = stats.t.ppf(0.975, 7) * np.sqrt(7 / 8 * ((without - at) ** 2).sum())
    assert (found.low, found.high) == pytest.approx((np.tanh(at - reach), np.tanh(at + reach)), rel=1e-6)
    assert (found.units, found.unit) == (8, "seed")


@pytest.mark.parametrize("far", [1e8, 1e17, 1e30])
def test_a_far_network_leaves_the_others_as_they_are(xyz, far):
    """Without it the resamples and the units left out are no constants, however far away it is."""
    near, apart = (
        [np.append(values, end) for values, end in zip(xyz, (distance, 0.0, 0.0), strict=True)]
        for distance in (1e6, far)
    )
    found = [partial_correlation(x, y, pd.DataFrame({"z": z}), permuted=0) for x, y, z in (near, apart)]
    assert (found[1].low, found[1].high) == pytest.approx((found[0].low, found[0].high), abs=1e-3)
    over = [partial_correlation(x, y, pd.DataFrame({"z": z}), units=range(len(x))) for x, y, z in (near, apart)]
    assert over[1].leave_one_out == pytest.approx(over[0].leave_one_out, abs=1e-3)


@pytest.mark.parametrize("far", [1e3, 1e6])
def test_a_network_far_in_x_and_in_a_control_is_no_explanation(xyz, far):
    x, y, z = (np.append(values, end) for values, end in zip(xyz, (far, 0.0, far), strict=True))
    residuals = [v - np.linalg.lstsq(np.c_[np.ones_like(z), z], v)[0] @ np.c_[np.ones_like(z), z].T for v in (x, y)]
    found = partial_correlation(x, y, pd.DataFrame({"z": z}), resampled=0, permuted=0)
    assert found.value == pytest.approx(stats.pearsonr(*residuals).statistic, abs=1e-6)


def test_what_controls_explain_is_found_whatever_their_sizes_and_levels():
    rng = np.random.default_rng(0)
    for _ in range(40):
        controls = rng.normal(size=(20, 3)) * 10.0 ** rng.uniform(-6, 6, 3) + 10.0 ** rng.uniform(-3, 4, 3)
        controls[0] *= 1e5
        x = (controls / controls.std(0)) @ rng.normal(size=3) + 1
        found = partial_correlation(x, rng.normal(size=20), pd.DataFrame(controls, columns=list("abc")), resampled=0)
        assert found.note == "the controls explain one of the two completely"


def test_over_units_what_the_controls_explain_is_told():
    x = np.arange(9.0)
    found = partial_correlation(x, x**2, pd.DataFrame({"z": 2 * x}), units=range(9))
    assert np.isnan(found.value)
    assert found.note == "the controls explain one of the two completely"
    assert partial_correlation(x, x, pd.DataFrame({"z": x * 0}), units=range(9)).units == 9
