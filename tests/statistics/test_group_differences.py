"""Differences between groups: scipy's intervals, Holm's correction, and networks of one unit that count once."""

import numpy as np
import pytest
from scipy import stats

from flatlens.errors import BadInput
from flatlens.statistics import group_differences
from flatlens.statistics.group_differences import as_frame

RNG = np.random.default_rng(0)
A, B = RNG.normal(3, 1, 8), RNG.normal(4, 1, 8)
GROUPS, PAIRS = ["SGD"] * 8 + ["SAM"] * 8, [*range(8)] * 2


def one(values, groups=GROUPS, *arguments, **options):
    (found,) = group_differences({"x": values}, groups, *arguments, **options)
    return found


def test_the_paired_interval_is_students():
    found, test = one(np.r_[A, B], GROUPS, PAIRS, linear=["x"]), stats.ttest_rel(B, A)
    assert (found.group, found.reference, found.scale, found.n) == ("SAM", "SGD", "difference", 8)
    assert found.value == pytest.approx((B - A).mean())
    assert [found.low, found.high] == pytest.approx([*test.confidence_interval()])
    assert found.p == pytest.approx(test.pvalue)
    assert found.smaller == (B < A).sum()


def test_the_interval_of_independent_networks_is_welchs():
    found, test = one(np.r_[A, B], linear=["x"]), stats.ttest_ind(B, A, equal_var=False)
    assert [found.low, found.high, found.p] == pytest.approx([*test.confidence_interval(), test.pvalue])
    assert found.n == 16


def test_positive_numbers_are_compared_as_a_ratio_and_others_are_not():
    for pairs in (PAIRS, None):
        ratio, logs = one(np.exp(np.r_[A, B]), GROUPS, pairs), one(np.r_[A, B], GROUPS, pairs, linear=["x"])
        assert ratio.scale == "ratio"
        assert np.log([ratio.value, ratio.low, ratio.high]) == pytest.approx([logs.value, logs.low, logs.high])
        assert ratio.p == pytest.approx(logs.p)
    assert one(np.r_[A, B] - 3.5, GROUPS, PAIRS).scale == "difference"


def test_the_order_of_the_rows_does_not_count_and_an_unpaired_network_is_left_out():
    order = RNG.permutation(16)
    rows = np.r_[A, B], np.array(GROUPS), np.array(PAIRS)
    first = one(*(row[np.argsort(order == np.argmin(order))] for row in rows), linear=["x"])
    shuffled = one(*(np.r_[row[:1], row[1:][np.argsort(order[1:])]] for row in rows), linear=["x"])
    assert first.value == pytest.approx(shuffled.value)
    missing = np.r_[A, B]
    missing[3] = np.nan
    found = one(missing, GROUPS, PAIRS, linear=["x"])
    assert found.value == pytest.approx(np.delete(B - A, 3).mean())
    assert (found.n, found.note) == (7, "1 pair left out: a value is missing")
    assert one(missing, linear=["x"]).note == "1 network left out: a value is missing"


def test_networks_of_one_seed_count_once():
    """Three learning rates a seed: the pairs are (seed, learning rate), the units are seeds."""
    seeds, rates = np.tile(np.repeat(range(6), 3), 2), np.tile(range(3), 12)
    x = RNG.normal(size=36) + np.r_[np.zeros(18), np.repeat(RNG.normal(size=6), 3)]
    pairs = [f"{seed} {rate}" for seed, rate in zip(seeds, rates, strict=True)]
    found = one(x, ["a"] * 18 + ["b"] * 18, pairs, seeds, linear=["x"])
    test = stats.ttest_1samp((x[18:] - x[:18]).reshape(6, 3).mean(1), 0)
    assert (found.n, found.p) == (6, pytest.approx(test.pvalue))


def test_holms_correction_is_over_what_decides_and_over_the_rest_apart():
    values = {name: np.r_[A, A + shift + RNG.normal(0, 0.1, 8)] for name, shift in (("u", 1), ("v", 0.1), ("w", 0))}
    values["fit"] = values["u"]
    found = {d.name: d for d in group_differences(values, GROUPS, PAIRS, first=["u", "v"], untested=["fit"])}
    p = sorted([found["u"].p, found["v"].p])
    assert sorted([found["u"].p_holm, found["v"].p_holm]) == pytest.approx([2 * p[0], max(2 * p[0], p[1])])
    assert found["w"].p_holm == found["w"].p
    assert np.isnan(found["fit"].p_holm)
    assert found["fit"].p == found["u"].p
    assert not found["fit"].significant


def test_each_group_is_compared_with_the_first():
    found = group_differences({"x": np.r_[A, B, B + 1]}, [*GROUPS, *["none"] * 8], [*PAIRS, *range(8)])
    assert [(d.group, d.reference) for d in found] == [("SAM", "SGD"), ("none", "SGD")]
    frame = as_frame(found)
    assert frame["group"].tolist() == ["SAM", "none"]
    assert frame["p_holm"].notna().all()


def test_none_reads_none():
    found = one(np.r_[A, B], [None] * 8 + ["SAM"] * 8)
    assert found.reference == "none"


@pytest.mark.parametrize(("values", "pairs", "note"), [
    ([1, 2, 3, 4], [0, 1, 0, 1], "fewer than 3 independent units"),
    ([1, 2, 3, 4], None, "fewer than 3 networks in a group"),
    ([1, 1, 1, 2, 2, 2], None, "the values within each group are equal"),
    ([1, 2, 3, 2, 3, 4], [0, 1, 2, 0, 1, 2], "all values without one pair agree: too few units for an interval"),
])  # fmt: skip
def test_too_little_for_an_interval_is_told_and_nothing_is_significant(values, pairs, note):
    half = len(values) // 2
    found = one(values, ["a"] * half + ["b"] * half, pairs, linear=["x"])
    assert found.note == note
    assert np.isnan([found.low, found.high, found.p, found.p_holm]).all()
    assert np.isfinite(found.value)
    assert not found.significant


def test_one_group_is_refused():
    with pytest.raises(BadInput, match="expected at least two groups, got a"):
        one([1, 2], ["a", "a"])
