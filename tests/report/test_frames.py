from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatlens.experiments.overrides import IDENTITY
from flatlens.report import frames
from flatlens.report.figures.study import two_ticks


def test_values_carry_the_transform_and_who_counts(laptop):
    data = frames.value_frame(laptop)
    assert len(data) == 48
    assert list(data.columns) == [*IDENTITY, "outcome", "included", *(q.name for q in laptop.quantities)]
    np.testing.assert_allclose(data["sqrt sharpness"] ** 2, laptop.networks["interpolation_sharpness"])
    np.testing.assert_allclose(np.exp(data["network volume"]), laptop.networks["network_volume"])
    assert data.loc[~data["included"], "outcome"].tolist() == ["out of steps"]


def test_infinite_values_become_missing(laptop):
    values = laptop.values.copy()
    values.loc[0, "MLS"] = np.inf
    assert np.isnan(frames.value_frame(replace(laptop, values=values))["MLS"][0])


def test_a_pair_is_found_either_way_round(laptop):
    pairs = frames.relation_frame(laptop).set_index(["x", "y"])
    assert pairs.loc[("MLS", "NMLS"), "pearson"] == pairs.loc[("NMLS", "MLS"), "pearson"]
    assert len(pairs) == 12 * 11


def test_the_strongest_relation_with_the_gap_comes_first(laptop):
    data = frames.gap_relations(laptop)
    assert set(zip(data["coefficient"], data["alike"], strict=True)) == {
        ("Pearson r", ""),
        ("Kendall τ", ""),
        ("Pearson r", "learning rate"),
    }
    assert set(data["quantity"][:3]) == {"relative flatness, first layer"}  # it is the gap, made up
    assert "test loss" not in set(data["quantity"])
    pearson = data.loc[(data["coefficient"] == "Pearson r") & (data["alike"] == ""), "value"]
    assert pearson.is_monotonic_decreasing
    assert "log learning rate" in set(data["quantity"])


def test_measures_leave_out_scores_and_settings(laptop):
    names = {q.name for q in frames.measures_of(laptop)}
    assert "MLS" in names
    assert names.isdisjoint({"generalisation gap", "test loss", "learning rate", "batch size"})


def test_profiles_keep_execution_order_and_drop_what_is_undefined(laptop):
    layers = laptop.layers.copy()
    layers.loc[0, "value"] = np.nan
    data = frames.profile_frame(replace(laptop, layers=layers))
    assert len(data) == len(layers) - 1
    one = data[(data["measure"] == "mls") & (data["key"] == laptop.networks["key"][5])]
    assert one["layer"].tolist() == ["fc1", "fc2", "fc3", "fc4"]
    assert not data.loc[data["key"] == laptop.excluded[0][0], "included"].any()


def test_median_profiles_leave_out_the_excluded(make_result):
    result = make_result(lrs=(0.1,), batch_sizes=(4,), seeds=4, excluded=1)
    data = frames.profile_frame(result)
    middle = frames.middle_profiles(data).query("measure == 'mls' and layer == 'fc1'")["value"].item()
    kept = data.query("measure == 'mls' and layer == 'fc1' and included")["value"]
    assert len(kept) == 3
    assert middle == pytest.approx(kept.median())


def test_curves_are_thinned_but_keep_their_ends(make_result):
    result = make_result(lrs=(0.1,), batch_sizes=(4,), seeds=2, steps=3000)
    data = frames.curve_frame(result)
    for _, one in data.groupby("key"):
        assert len(one) <= frames.POINTS_PER_CURVE + 2
        assert one["step"].iloc[[0, -1]].tolist() == [50, 2999 * 50]
        assert one["step"].is_monotonic_increasing


def test_a_diverged_curve_ends_where_the_loss_does(laptop):
    curves = laptop.curves.copy()
    mine = curves["key"] == laptop.networks["key"][0]
    curves.loc[mine & (curves["step"] > 500), "loss"] = np.inf
    data = frames.curve_frame(replace(laptop, curves=curves))
    assert data.loc[data["key"] == laptop.networks["key"][0], "step"].max() == 500


@pytest.mark.parametrize("x", [[1.0, 1.0, 1.0], [1.0, np.nan, 2.0], []])
def test_no_line_where_none_is_defined(x):
    assert frames.regression_line(pd.Series(x, dtype=float), pd.Series(x, dtype=float)).empty


def test_the_line_is_the_least_squares_one():
    rng = np.random.default_rng(1)
    x, y = rng.normal(1e4, 1, 50), rng.normal(size=50)
    slope, offset = np.polyfit(x - 1e4, y, 1)
    line = frames.regression_line(pd.Series(x), pd.Series(y))
    np.testing.assert_allclose(line["y"], slope * (line["x"] - 1e4) + offset, rtol=1e-9)


def test_histogram_counts_every_value():
    values = pd.Series([*np.linspace(0, 1, 31), np.nan])
    assert frames.histogram(values)["count"].sum() == 31
    assert frames.histogram(pd.Series([2.0, 2.0]))["count"].sum() == 2
    assert frames.histogram(pd.Series([np.nan])).empty


@given(
    middle=st.floats(1e-320, 1e308) | st.just(0.0),
    sign=st.sampled_from([-1.0, 1.0]),
    apart=st.floats(-20, 3).map(lambda power: 10.0**power),
    shares=st.lists(st.floats(-1, 1), min_size=1, max_size=12),
)
def test_values_however_near_or_large_are_counted_within_their_axis(middle, sign, apart, shares):
    values = pd.Series(sign * min(middle, 1e305) * (1 + apart * np.array(shares)))
    low, high = frames.padded_range(values)
    bars, ticks = frames.histogram(values), two_ticks(low, high)
    assert bars["count"].sum() == len(values)
    assert (bars["low"].iloc[0], bars["high"].iloc[-1]) == pytest.approx((low, high), rel=1e-9)
    assert (bars["high"] > bars["low"]).all()
    assert all(low < tick < high for tick in ticks)
    assert len(set(ticks)) == len(ticks) == 2
