"""Statistics that hold one correlation against another, on tables whose correlations are known."""

import numpy as np
import pytest
from fake_study import fake_result

from flatlens.papers.contrasts import (
    changed,
    mean_of,
    off,
    rising,
    side_by_side,
    steadier,
    strength,
    stronger,
    stronger_in_size,
    unchanged,
    weakest,
)
from flatlens.papers.evidence import correlated, reached

TABLE = reached("s")


def results(**columns):
    return {"s": fake_result(columns)}


def noisy(n=60):
    rng = np.random.default_rng(0)
    gap, noise = rng.normal(size=n), rng.normal(size=(2, n))
    return {"gap": gap, "near": gap + 0.2 * noise[0], "far": gap + 2 * noise[1]}


def r(columns, x):
    return np.corrcoef(columns[x], columns["gap"])[0, 1]


def test_networks_that_did_not_get_there_are_left_out():
    columns = noisy(8) | {"outcome": ["converged", "out of steps", "finished", "diverged"] * 2}
    kept = TABLE(results(**columns))
    assert kept["outcome"].tolist() == ["converged", "finished"] * 2
    assert correlated(TABLE, "near", "gap")(results(**columns)).n == 4


def test_the_stronger_correlation_is_told_with_its_margin():
    columns = noisy()
    found = stronger(TABLE, ["near"], ["far"], "gap")(results(**columns))
    assert found.value == pytest.approx(r(columns, "near") - r(columns, "far"))
    assert 0 < found.low < found.value < found.high
    assert stronger(TABLE, ["far"], ["near"], "gap")(results(**columns)).high < 0
    three = columns | {"against": -columns["gap"]}
    among = stronger(TABLE, ["near"], ["far", "against"], "gap")(results(**three))
    assert among.value == pytest.approx(found.value)
    least = stronger(TABLE, ["near", "against"], ["far"], "gap")(results(**three))
    assert least.value == pytest.approx(-1 - r(columns, "far"))


def test_the_weakest_is_the_smallest_of_them():
    columns = noisy()
    found = weakest(TABLE, ["near", "far"], "gap")(results(**columns))
    assert found.value == pytest.approx(r(columns, "far"))
    assert found.low < found.value < found.high


def test_sizes_of_correlations_have_no_sign():
    columns = noisy() | {"against": -noisy()["near"]}
    found = strength(TABLE, "against", "gap")(results(**columns))
    assert found.value == pytest.approx(r(columns, "near"))
    assert 0 < found.low < found.value < found.high
    margin = stronger_in_size(TABLE, ["near", "against"], ["far"], "gap")(results(**columns))
    assert margin.value == pytest.approx(r(columns, "near") - r(columns, "far"))
    assert stronger(TABLE, ["near", "against"], ["far"], "gap")(results(**columns)).value < 0 < margin.low


def test_correlations_that_differ_less_among_themselves_are_steadier():
    columns = noisy() | {"same": 3 * noisy()["near"]}
    found = steadier(TABLE, ["near", "same"], ["near", "far"], "gap")(results(**columns))
    assert found.value == pytest.approx(r(columns, "near") - r(columns, "far"))
    assert found.low > 0
    assert steadier(TABLE, ["near", "far"], ["near", "same"], "gap")(results(**columns)).high < 0


def test_rows_with_a_missing_value_are_left_out_and_counted():
    columns = noisy()
    columns["far"][:3] = np.nan
    found = stronger(TABLE, ["near"], ["far"], "gap")(results(**columns))
    assert (found.n, found.left_out) == (57, 3)
    nothing = stronger(TABLE, ["near"], ["nowhere"], "gap")(results(**columns))
    assert (nothing.n, nothing.note) == (0, "no network is left")


def test_what_a_move_leaves_is_0():
    before = np.array([1.0, 2.0, 3.0, 4.0])
    same = unchanged(TABLE, "before", "after")(results(before=before, after=before * (1 + 1e-9)))
    assert 0 < same.value < 1e-8
    moved = unchanged(TABLE, "before", "after")(results(before=before, after=before * [2, 0.5, 2, 0.5]))
    assert moved.value == pytest.approx(np.log(2))


def test_a_mean_is_over_the_rows():
    found = mean_of(TABLE, "x")(results(x=[1.0, 2.0, 3.0, 6.0]))
    assert (found.value, found.n) == (3.0, 4)


def test_a_correlation_that_rises_with_a_setting():
    rng = np.random.default_rng(0)
    setting = np.repeat([1.0, 2.0, 3.0], 40)
    gap, noise = rng.normal(size=(2, 120))
    found = rising(TABLE, "c", "x", "gap")(results(c=setting, x=gap + 3 * noise / setting**2, gap=gap))
    assert found.value == found.high == 1.0
    assert found.low > 0
    falling = rising(TABLE, "c", "x", "gap")(results(c=-setting, x=gap + 3 * noise / setting**2, gap=gap))
    assert falling.value == -1.0
    alone = rising(TABLE, "c", "x", "gap")(results(c=np.ones(120), x=noise, gap=gap))
    assert np.isnan(alone.value)


def test_what_grows_is_told_from_what_shrinks():
    columns = {"before": [1.0, 2.0, 4.0, 8.0, -1.0], "after": [2.0, 5.0, 7.0, 17.0, 1.0]}
    found = changed(TABLE, "before", "after")(results(**columns))
    assert found.value == pytest.approx(np.log([2, 2.5, 1.75, 17 / 8]).mean())
    assert found.n == 4  # the ratio below 0 has no logarithm
    assert found.low > 0
    assert changed(TABLE, "after", "before")(results(**columns)).value == pytest.approx(-found.value)


def test_networks_of_one_seed_stand_beside_one_another():
    columns = {"start": ["high", "low"] * 3, "seed": [0, 0, 1, 1, 2, 2], "mls": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}
    found = side_by_side(TABLE, "start")(results(**columns, outcome=["finished"] * 5 + ["diverged"]))
    assert found["seed"].tolist() == [0, 1, 2]
    assert found["mls, high"].tolist() == [1, 3, 5]
    assert found["mls, low"].tolist()[:2] == [2, 4]
    assert np.isnan(found["mls, low"].iloc[2])


@pytest.mark.parametrize("side", [-1, 1])
def test_a_published_mean_is_met_or_not(side):
    values = 10 + np.random.default_rng(1).normal(size=40)
    far = off(TABLE, "x", 10 + 5 * side, 2.0)(results(x=values))
    assert far.value == pytest.approx(abs(values.mean() - 10 - 5 * side) / 2)
    assert 2 < far.low < far.value < far.high < 3
    near = off(TABLE, "x", 10 + 0.1 * side, 2.0)(results(x=values))
    assert near.high < 0.5
    assert off(TABLE, "x", 0.0, 1.0)(results(x=[np.nan] * 5)).n == 0
