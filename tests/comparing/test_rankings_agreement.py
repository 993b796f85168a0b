"""How far rankings agree: which measures count, W beside statistics.kendall_w, tau beside scipy's."""

import numpy as np
import pandas as pd
import pytest
from checkpoints import TEST, lens, network
from scipy import stats

import flatlens as fl
from flatlens.comparing.rankings import agreement
from flatlens.estimate import Estimate
from flatlens.statistics import kendall_w

A, B, C, D = "abcd"


def table(**rows):
    return {name: dict(zip(A + B + C + D, map(Estimate, row), strict=False)) for name, row in rows.items()}


def gaps(*values, stderr=0.0):
    return {name: Estimate(value, stderr, "estimate") for name, value in zip("abcd", values, strict=False)}


def test_w_is_of_the_measures_that_point_somewhere():
    rows = table(one=[1, 2, 3, 4], two=[10, 30, 20, 40], norm=[4, 3, 2, 1], three=[2, 3, 9, 7.0])
    found = agreement(rows, {"one", "two", "three"}, {"one", "two", "norm"}, {}, 1e-9)
    assert found.counted == ["one", "two", "three"]
    assert "not necessarily better" in found.left_out["norm"]
    assert found.overall.value == kendall_w([[1, 2, 3, 4], [1, 3, 2, 4], [1, 2, 4, 3]]).value
    assert found.surviving.value == kendall_w([[1, 2, 3, 4], [1, 3, 2, 4]]).value


def test_a_measure_in_other_units_does_not_vote_twice():
    rows = table(one=[1, 2, 4.0, 3], same=[10, 20, 40, 30], other=[1, 2, 4.1, 3])
    found = agreement(rows, set(rows), set(rows), {}, 1e-9)
    assert found.counted == ["one", "other"]
    assert found.left_out["same"] == "on these networks equal to one times a constant"
    reversed_ = agreement(table(one=[1, 2, 4.0], minus=[-1, -2, -4.0]), {"one", "minus"}, set(), {}, 1e-9)
    assert reversed_.counted == ["one", "minus"]
    assert reversed_.overall.value == 0


def test_small_values_are_no_twins():
    """All near 0 beside the largest: that is not proportion."""
    rows = table(one=[1e-6, 2e-6, 3e-6, 1], other=[3e-6, 2e-6, 1e-6, 1])
    assert agreement(rows, set(rows), set(), {}, 1e-4).counted == ["one", "other"]


@pytest.mark.parametrize("many", [2, 4])
def test_networks_that_no_measure_tells_apart_are_one_sentence(many):
    rows = table(one=[3.0] * many, two=[0.0] * many, norm=[5.0] * many, broken=[float("nan")] * many)
    found = agreement(rows, {"one", "two"}, set(), gaps(*[0.1] * many), 1e-9)
    assert found.equal
    assert found.remarks == ("All networks have equal values: are these the same weights?",)
    unknown = agreement(table(broken=[float("nan")] * many), {"broken"}, set(), {}, 1e-9)
    assert not unknown.equal


def test_a_measure_with_one_value_ranks_nothing_and_is_nobodys_twin():
    rows = table(one=[1, 2, 4.0, 3], two=[2, 1, 4.0, 3], same=[7.0] * 4, other=[9.0] * 4)
    found = agreement(rows, set(rows), set(), {}, 1e-9)
    assert not found.equal
    assert found.counted == ["one", "two"]
    assert found.left_out == dict.fromkeys(["same", "other"], "the same value on all networks")


def test_tau_with_the_gap_is_scipys():
    rows = table(one=[1, 2, 4, 3], two=[1, 1, 2, 3.0], flat=[1, 1, 1, 1.0])
    found = agreement(rows, set(rows), set(rows), gaps(0.1, 0.3, 0.2, 0.4), 1e-9).gap.set_index("measure")
    for name in ("one", "two"):
        values = [e.value for e in rows[name].values()]
        assert found.loc[name, "tau"] == pytest.approx(stats.kendalltau(values, [0.1, 0.3, 0.2, 0.4]).statistic)
    assert np.isnan(found.loc["flat", ["tau", "p"]].astype(float)).all()


def test_a_network_without_a_gap_is_left_out_of_tau_with_the_gap():
    rows, nan = table(one=[1, 9, 3, 2], other=[3, 0, 1, 2]), float("nan")
    found = agreement(rows, set(rows), set(rows), gaps(0.1, nan, 0.3, 0.2), 1e-9)
    three = table(one=[1, 3, 2], other=[3, 1, 2])
    without = agreement(three, set(three), set(three), gaps(0.1, 0.3, 0.2), 1e-9)
    pd.testing.assert_frame_equal(found.gap, without.gap)
    assert found.gap["tau"].tolist() == [1, -1]
    assert f"Excluded from tau with the gap (no finite generalisation gap): {B}." in found.remarks
    assert not any("finite" in remark for remark in without.remarks)
    assert agreement(rows, set(rows), set(rows), gaps(*[nan] * 4), 1e-9).gap.empty


def test_p_with_the_gap_is_that_of_all_orders():
    """Four networks in the gap's order: 2 of 24 orders are as extreme."""
    found = agreement(table(one=[1, 2, 3, 4]), {"one"}, set(), gaps(1, 2, 3, 4), 1e-9).gap
    assert found.loc[0, "tau"] == 1
    assert found.loc[0, "p"] == pytest.approx(2 / 24, abs=0.03)


def test_taus_of_pairs_are_scipys_and_leave_out_what_is_undefined():
    rows = table(one=[1, 2, 4, 3], two=[1, 1, 2, 3.0], broken=[1, 2, float("nan"), 4])
    taus = agreement(rows, set(rows), set(rows), {}, 1e-9).taus
    assert list(taus) == ["one", "two"]
    assert taus.loc["one", "two"] == pytest.approx(stats.kendalltau([1, 2, 4, 3], [1, 1, 2, 3]).statistic)
    assert taus.loc["one", "one"] == 1


def test_an_open_order_counts_for_neither():
    rows = {"sure": {n: Estimate(float(i)) for i, n in enumerate("abc")},
            "noisy": {"a": Estimate(0.0, 1.0), "b": Estimate(1.0, 1.0), "c": Estimate(50.0, 1.0)}}  # fmt: skip
    found = agreement(rows, set(rows), set(rows), {}, 1e-9)
    assert found.taus.loc["sure", "noisy"] == pytest.approx(2 / np.sqrt(3 * 2))
    assert found.overall.value == kendall_w([[1, 2, 3], [1.5, 1.5, 3]], ranked=True).value


def test_few_networks_are_told_to_say_little():
    found = agreement(table(one=[1, 2], two=[1, 2.5], three=[3, 1.0]), {"one", "two", "three"}, set(), {}, 1e-9)
    told = " ".join(found.remarks)
    assert "W says little about 2 networks: they have only 2 orders" in told
    assert "a is smaller by 2 measures, b by 1; no ties." in told
    four = agreement(table(one=[1, 2, 3, 4], two=[1, 2, 4, 3.5]), {"one", "two"}, set(), {}, 1e-9)
    assert "24 orders" in " ".join(four.remarks)
    assert four.overall.p > 0.05


def test_gaps_that_the_test_data_cannot_tell_apart_are_told():
    found = agreement(table(one=[1, 2, 3]), {"one"}, set(), gaps(0.1, 0.11, 5.0, stderr=0.1), 1e-9)
    assert "overlap for 1 of 3 pairs" in found.remarks[-1]
    assert not any("overlap" in r for r in agreement(table(one=[1, 2]), {"one"}, set(), gaps(1, 2), 1e-9).remarks)


def test_one_ranking_agrees_with_nobody():
    found = agreement(table(one=[1, 2, 3]), {"one"}, set(), {}, 1e-9)
    assert np.isnan(found.overall.value)
    assert "agreement of the rankings is undefined" in found.remarks[0]


def test_of_real_networks(three):
    found = three.agreement()
    assert 0 <= found.overall.value <= 1
    assert found.overall.n == 3
    assert set(found.counted) | set(found.left_out) == set(three.measures)
    assert not any("equal to" in why for why in found.left_out.values())  # no number twice
    assert set(found.gap["measure"]) <= set(three.measures)
    assert len(found.gap) == len(found.taus)
    # b and c are one function: their gaps are one number, and no measure may tell them apart by it
    assert found.gap.set_index("measure").loc["mls", "tau"] in (-1, 1)


def test_measures_that_agree_with_the_gap_by_construction():
    """The risk itself is not ranked, but a network's own loss makes the gap: a sanity check of signs."""
    lenses = {str(seed): lens(network(seed), test=TEST) for seed in range(5)}
    found = fl.compare(lenses, ["mls"])
    gap = [report["generalisation_gap"].value for report in found.reports.values()]
    values = [report["mls"].value for report in found.reports.values()]
    assert found.agreement().gap.loc[0, "tau"] == pytest.approx(stats.kendalltau(values, gap).statistic)
