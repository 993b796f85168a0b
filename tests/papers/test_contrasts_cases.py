"""Statistics over cases, on tables whose relations are known in each."""

import numpy as np
import pandas as pd
import pytest
from fake_study import fake_result

from flatlens.papers.contrasts import (
    across,
    alike,
    by_part,
    first_change,
    in_each_case,
    margin,
    mean_correlation,
    of_each_case,
    ranked,
    with_over_without,
)
from flatlens.papers.evidence import along, reached
from flatlens.papers.experiment import conclusion_of

TABLE = reached("s")


def results(**columns):
    return {"s": fake_result(columns)}


def three_cases(n=40):
    """x follows y at three strengths, z at none, and the cases' own levels differ by far more than either varies."""
    rng = np.random.default_rng(0)
    case = np.repeat(["a", "b", "c"], n)
    y, noise, z = rng.normal(size=(3, 3 * n))
    x = y + noise * np.repeat([0.2, 1.0, 3.0], n)
    level = np.repeat([0.0, 100.0, 200.0], n)
    return {"case": case, "x": x + level, "y": y - level, "z": z}


def eight_cases(of_x, of_z, shared=0.0, n=40, seed=0):
    """In each case x and z follow y, each as strongly as is given, and share noise."""
    rng = np.random.default_rng(seed)
    y, noise, more, common = rng.normal(size=(4, 8 * n))
    x, other = (np.repeat(b, n) * y + own + shared * common for b, own in ((of_x, noise), (of_z, more)))
    return {"case": np.repeat(list("abcdefgh"), n), "x": x, "z": other, "y": y}


def r(columns, case, x, y="y"):
    mine = columns["case"] == case
    return np.corrcoef(columns[x][mine], columns[y][mine])[0, 1]


def z(columns, case, x):
    return np.arctanh(r(columns, case, x))


def test_correlations_are_of_each_case_and_never_of_all_together():
    columns = three_cases()
    of = {case: r(columns, case, "x") for case in "abc"}
    assert np.corrcoef(columns["x"], columns["y"])[0, 1] < -0.9
    found = across(TABLE, [("x", "y")], mean_correlation, "r")(results(**columns))
    assert found.value == pytest.approx(np.tanh(np.mean(np.arctanh(list(of.values())))))
    assert found.low < found.value < found.high
    assert found.n == 120
    each = in_each_case(TABLE, [("x", "y")], "r")(results(**columns))
    assert {case: part.value for case, part in each.parts.items()} == pytest.approx(of)
    assert each.value == pytest.approx(min(of.values()))


def test_one_relation_is_held_against_another_case_by_case():
    columns = three_cases()
    pairs = [("x", "y"), ("z", "y")]
    margins = {c: z(columns, c, "x") - z(columns, c, "z") for c in "abc"}
    found = across(TABLE, pairs, margin, "margin")(results(**columns))
    assert found.value == pytest.approx(np.mean(list(margins.values())))
    assert found.low > 0
    each = in_each_case(TABLE, pairs, "margin")(results(**columns))
    assert {case: part.value for case, part in each.parts.items()} == pytest.approx(margins)


@pytest.mark.parametrize(("sign", "outcome"), [(1, "reproduced"), (-1, "not reproduced")])
def test_the_larger_correlation_may_have_to_be_above_0_itself(sign, outcome):
    columns = eight_cases(of_x=np.full(8, sign), of_z=np.full(8, -5.0))
    pairs = [("x", "y"), ("z", "y")]
    for alone, own in (
        (across(TABLE, pairs, margin, "m"), across(TABLE, pairs, margin, "m", own=True)),
        (in_each_case(TABLE, pairs, "m"), in_each_case(TABLE, pairs, "m", own=True)),
    ):
        assert conclusion_of(alone(results(**columns)), "above", 0.0) == "reproduced"
        found = own(results(**columns))
        assert conclusion_of(found, "above", 0.0) == outcome
        assert len(found.parts) in (2, 16)
    of_x = {f"correlation of the former: {case}": r(columns, case, "x") for case in "abcdefgh"}
    differences = {f"difference: {case}": z(columns, case, "x") - z(columns, case, "z") for case in "abcdefgh"}
    assert {case: part.value for case, part in found.parts.items()} == pytest.approx(of_x | differences)
    assert found.value == pytest.approx(min(*of_x.values(), *differences.values()))


def test_relations_are_held_against_each_other_by_their_size_alone():
    columns = three_cases()
    pairs = [("z", "y"), ("x", "y")]
    columns["x"] = np.where(columns["case"] == "a", -columns["x"], columns["x"])  # its strongest one, against y
    signed, sized = (in_each_case(TABLE, pairs, "margin", size=size)(results(**columns)) for size in (False, True))
    assert signed.parts["a"].value == pytest.approx(z(columns, "a", "z") - z(columns, "a", "x"))
    assert signed.parts["a"].low > 0
    assert sized.parts["a"].value == pytest.approx(abs(z(columns, "a", "z")) - abs(z(columns, "a", "x")))
    assert sized.parts["a"].high < 0


def test_what_holds_in_the_mean_of_cases_may_not_in_each():
    """Case a rises with p in each of its ten seeds, case b falls by less: the mean rises, b does not."""
    p = np.tile([0.0, 1.0, 2.0], 20)
    x = np.where(np.arange(60) < 30, p, np.tile([0.0, -1.0, -0.5], 20))
    columns = {"case": np.repeat(["a", "b"], 30), "p": p, "x": x, "seed": np.tile(np.repeat(np.arange(10), 3), 2)}
    found = of_each_case(TABLE, lambda case: along(case, "p", "x", ["seed"]), "tau")(results(**columns))
    assert {case: part.value for case, part in found.parts.items()} == pytest.approx({"a": 1.0, "b": -1 / 3})
    assert conclusion_of(along(TABLE, "p", "x", ["case", "seed"])(results(**columns)), "above", 0.0) == "reproduced"
    assert conclusion_of(found, "above", 0.0) == "not reproduced"
    assert found.parts["b"].name == "tau: b"


def test_a_claim_about_all_cases_fails_with_one_and_about_some_holds_with_one():
    columns = three_cases()
    columns["x"] = np.where(columns["case"] == "a", -columns["x"], columns["x"])
    every, some = (in_each_case(TABLE, [("x", "y")], "r", holds)(results(**columns)) for holds in ("all", "some"))
    assert conclusion_of(every, "above", 0.0) == "not reproduced"
    assert conclusion_of(some, "above", 0.0) == "reproduced"
    below = in_each_case(TABLE, [("x", "y")], "r", "some", "below")(results(**columns))
    assert conclusion_of(below, "below", 0.0) == "reproduced"
    assert below.value == pytest.approx(r(columns, "a", "x"))


def test_a_part_of_the_networks_is_held_against_all_of_them():
    columns = three_cases()
    columns["kept"] = np.tile([1.0, 0.0], 60)
    columns["x"] = np.where(columns["kept"] == 1, columns["x"], columns["x"] - 5 * columns["y"])
    part = {name: values[columns["kept"] == 1] for name, values in columns.items()}
    found = by_part(TABLE, lambda t: t["kept"] == 1, "x", "y", "r")(results(**columns))
    assert found.value == pytest.approx(np.mean([z(part, c, "x") - z(columns, c, "x") for c in "abc"]))
    assert found.low > 0
    assert found.n == 120
    pooled = {name: values[:40] for name, values in columns.items() if name != "case"}  # no cases: one of all
    alone = by_part(TABLE, lambda t: t["kept"] == 1, "x", "y", "r")(results(**pooled))
    assert alone.value == pytest.approx(z(part, "a", "x") - z(columns, "a", "x"))


def test_ranks_are_of_each_case():
    columns = three_cases()
    columns["x"] = columns["x"] ** 3
    found = across(ranked(TABLE, ("x", "y")), [("x", "y")], mean_correlation, "rho")(results(**columns))
    table = pd.DataFrame(columns)
    expected = [mine["x"].corr(mine["y"], "spearman") for _, mine in table.groupby("case")]
    assert found.value == pytest.approx(np.tanh(np.mean(np.arctanh(expected))))


def test_with_a_setting_over_without_it():
    with_and_without = {0: (2.0, 4.0, 12.0), 1: (1.0, 3.0, 3.0), 2: (5.0, 5.0, 5.0), 3: (1.0, 0.5, 1.5)}
    columns = {
        "seed": np.repeat(list(with_and_without), 3),
        "decay": [0.0, 1.0, 2.0] * 4,
        "gap": [value for values in with_and_without.values() for value in values],
    }
    found = with_over_without(TABLE, "decay", "gap", ["seed"])(results(**columns))
    assert found.value == pytest.approx((np.log(8 / 2) + np.log(3 / 1)) / 4)


def test_two_relations_that_are_strong_in_the_same_cases():
    columns = eight_cases(np.linspace(0, 2, 8), np.zeros(8))
    same = across(TABLE, [("x", "y"), ("y", "x")], alike, "alike")(results(**columns))
    assert same.value == pytest.approx(1.0)
    assert np.isnan(across(TABLE, [("x", "y"), ("y", "x")], alike, "alike")(results(**three_cases())).value)
    both = eight_cases(np.linspace(0, 2, 8), np.linspace(0, 2, 8))
    assert across(TABLE, [("x", "y"), ("z", "y")], alike, "alike")(results(**both)).value > 0.8


def test_errors_that_two_relations_share_do_not_make_them_alike():
    """x and z follow y in other cases, and share most of their noise: only their errors correlate."""
    found, raw = [], []
    for seed in range(40):
        columns = eight_cases(np.tile([0, 1.2], 4), np.repeat([0, 1.2], 4), shared=3.0, n=24, seed=seed)
        found.append(across(TABLE, [("x", "y"), ("z", "y")], alike, "alike")(results(**columns)).value)
        raw.append(np.corrcoef([[z(columns, c, name) for c in "abcdefgh"] for name in ("x", "z")])[0, 1])
    assert np.mean(raw) > 0.35
    assert abs(np.nanmedian(found)) < 0.2


def test_a_case_without_a_relation_is_left_out():
    columns = three_cases()
    columns["x"] = np.where(columns["case"] == "c", 1.0, columns["x"])
    found = across(TABLE, [("x", "y")], mean_correlation, "r")(results(**columns))
    assert found.value == pytest.approx(np.tanh(np.mean([z(columns, c, "x") for c in "ab"])))
    assert (found.n, found.excluded) == (80, (("no correlation in their case", 40),))
    nothing = across(TABLE, [("x", "y")], mean_correlation, "r")(results(**columns | {"x": np.ones(120)}))
    assert np.isnan(nothing.value)
    each = in_each_case(TABLE, [("x", "y")], "r")(results(**columns))
    assert conclusion_of(each, "above", -0.9) == "open"  # one case is open
    assert "no interval for c" in each.note


def blocks(**columns):
    """Five groups of networks, three values of a setting in each."""
    return results(seed=np.repeat(range(5), 3), p=[2.0, 0.0, 1.0] * 5, **columns)


def test_what_a_setting_does_is_seen_among_networks_alike_but_for_it():
    level = np.repeat([1.0, 10.0, 100.0, 1000.0, 1e4], 3)
    falling = level * np.array([1.0, 4.0, 2.0] * 5)
    assert along(TABLE, "p", "x", ["seed"])(blocks(x=falling)).value == -1.0
    once_up = falling * np.where(np.arange(15) == 0, 3.0, 1.0)  # the first group: 4, 2, 3
    found = along(TABLE, "p", "x", ["seed"])(blocks(x=once_up))
    assert found.value == pytest.approx((-1 / 3 - 4) / 5)
    assert found.n == 15


def test_the_first_step_is_from_the_smallest_value_to_the_next():
    x = np.array([8.0, 4.0, 2.0] * 5) * np.repeat([1.0, 2.0, 3.0, 4.0, 5.0], 3)
    found = first_change(TABLE, "p", "x", ["seed"])(blocks(x=x))
    assert (found.value, found.n) == (pytest.approx(-np.log(2)), 10)
    x[1] = np.nan  # not measured at the smallest value: nothing to compare with
    found = first_change(TABLE, "p", "x", ["seed"])(blocks(x=x))
    assert (found.value, found.n) == (pytest.approx(-np.log(2)), 8)
    assert found.excluded == (("x is missing", 1), ("undefined among those alike in seed", 1))
