"""Statistics that hold one correlation against another, on tables whose correlations are known."""

import numpy as np
import pytest
from fake_study import fake_result

from flatlens.papers.contrasts import (
    changed,
    mean_of,
    rising,
    side_by_side,
    steadier,
    strength,
    stronger,
    unchanged,
    weaker,
)
from flatlens.papers.evidence import correlated, reached
from flatlens.papers.experiment import conclusion_of

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


def z(columns, x):
    return np.arctanh(r(columns, x))


def test_the_stronger_correlation_is_told_with_its_margin():
    columns = noisy()
    both = stronger(TABLE, ["near"], ["far"], "gap")(results(**columns))
    assert both.parts["r of near"].value == pytest.approx(r(columns, "near"))
    found = both.parts["near less far"]
    assert found.value == pytest.approx(z(columns, "near") - z(columns, "far"))
    assert 0 < found.low < found.value < found.high
    assert found.leave_one_out[0] < found.value < found.leave_one_out[1]
    assert stronger(TABLE, ["far"], ["near"], "gap")(results(**columns)).parts["far less near"].high < 0


def test_a_correlation_stronger_than_several_is_stronger_than_each():
    three = noisy() | {"other": noisy()["gap"] + 3 * np.random.default_rng(1).normal(size=60)}
    among = stronger(TABLE, ["near"], ["far", "other"], "gap")(results(**three))
    assert set(among.parts) == {"r of near", "near less far", "near less other"}
    least = min(r(three, "near"), *(z(three, "near") - z(three, name) for name in ("far", "other")))
    assert among.value == pytest.approx(least)  # the case that decides
    assert conclusion_of(among, "above", 0.0) == "reproduced"
    one_is_not = stronger(TABLE, ["near", "other"], ["near", "far"], "gap")(results(**three))
    assert conclusion_of(one_is_not, "above", 0.0) == "not reproduced"


def test_sizes_of_correlations_have_no_sign():
    columns = noisy() | {"against": -noisy()["near"]}
    found = strength(TABLE, "against", "gap")(results(**columns))
    assert found.value == pytest.approx(r(columns, "near"))
    assert 0 < found.low < found.value < found.high
    margin = weaker(TABLE, ["far"], ["near", "against"], "gap")(results(**columns))
    assert margin.value == pytest.approx(z(columns, "near") - z(columns, "far"))
    assert conclusion_of(margin, "above", 0.0) == "reproduced"


def test_no_correlation_below_zero_is_the_stronger_one():
    """Of two columns that go against the gap neither is the better one: not the nearer to 0, nor the larger by size."""
    columns = noisy() | {"against": -noisy()["near"], "less": -noisy()["far"]}
    for mine, other in (("less", "against"), ("against", "less"), ("against", "far")):
        found = stronger(TABLE, [mine], [other], "gap")(results(**columns))
        assert conclusion_of(found, "above", 0.0) == "not reproduced"
    found = weaker(TABLE, ["less"], ["against"], "gap")(results(**columns))
    assert conclusion_of(found, "above", 0.0) == "reproduced"


def test_a_positive_correlation_that_weakens_is_one_above_zero():
    columns = noisy() | {"against": -noisy()["near"], "less": -noisy()["far"]}
    for mine, other, outcome in (("far", "near", "reproduced"), ("less", "against", "not reproduced")):
        found = weaker(TABLE, [mine], [other], "gap", positive=True)(results(**columns))
        assert set(found.parts) == {f"r of {other}", f"{other} less {mine}"}
        assert conclusion_of(found, "above", 0.0) == outcome


def test_correlations_that_differ_less_among_themselves_are_steadier():
    columns = noisy() | {"same": 3 * noisy()["near"]}
    found = steadier(TABLE, ["near", "same"], ["near", "far"], "gap")(results(**columns))
    spread = np.var([z(columns, "near"), z(columns, "far")], ddof=1)
    assert 0.9 * spread < found.value < spread  # errors add the rest
    assert found.low > 0
    assert steadier(TABLE, ["near", "far"], ["near", "same"], "gap")(results(**columns)).high < 0


def test_rows_with_a_missing_value_are_left_out_and_counted():
    columns = noisy()
    columns["far"][:3] = np.nan
    found = stronger(TABLE, ["near"], ["far"], "gap")(results(**columns)).parts["near less far"]
    assert (found.n, found.left_out) == (57, 3)
    nothing = weaker(TABLE, ["near"], ["nowhere"], "gap")(results(**columns))
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
    setting = np.repeat([1.0, 2.0, 4.0], 40)
    gap, noise = rng.normal(size=(2, 120))
    columns = {"c": setting, "x": gap + 3 * noise / setting**2, "gap": gap, "seed": np.tile(range(40), 3)}
    found = rising(TABLE, "c", "x", "gap")(results(**columns))
    each = [np.arctanh(np.corrcoef(columns["x"][setting == c], gap[setting == c])[0, 1]) for c in (1, 2, 4)]
    assert found.value == pytest.approx(np.polyfit([1, 2, 4], each, 1)[0])
    assert found.units == 40
    assert 0 < found.low < found.value < found.high
    falling = rising(TABLE, "c", "x", "gap")(results(**columns | {"c": -setting}))
    assert falling.value == pytest.approx(-found.value)
    alone = rising(TABLE, "c", "x", "gap")(results(**columns | {"c": np.ones(120)}))
    assert np.isnan(alone.value)


def test_what_grows_is_told_from_what_shrinks():
    columns = {"before": [1.0, 2.0, 4.0, 8.0, 1.0, 3.0, -1.0], "after": [2.0, 5.0, 7.0, 17.0, 2.5, 5.5, 1.0]}
    found = changed(TABLE, "before", "after")(results(**columns))
    assert found.value == pytest.approx(np.log([2, 2.5, 1.75, 17 / 8, 2.5, 5.5 / 3]).mean())
    assert found.n == 6  # the ratio below 0 has no logarithm
    assert found.low > 0
    assert changed(TABLE, "after", "before")(results(**columns)).value == pytest.approx(-found.value)


def test_networks_of_one_seed_stand_beside_one_another():
    columns = {"start": ["high", "low"] * 3, "seed": [0, 0, 1, 1, 2, 2], "mls": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}
    found = side_by_side(TABLE, "start")(results(**columns, outcome=["finished"] * 5 + ["diverged"]))
    assert found["seed"].tolist() == [0, 1, 2]
    assert found["mls, high"].tolist() == [1, 3, 5]
    assert found["mls, low"].tolist()[:2] == [2, 4]
    assert np.isnan(found["mls, low"].iloc[2])
