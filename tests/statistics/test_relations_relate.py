"""fl.relate: a table's correlations, their target and units, kept in one file and drawn."""

import numpy as np
import pandas as pd
import pytest

import flatlens as fl
from flatlens.errors import BadInput, UnknownName
from flatlens.statistics import relate_all

DRAWS = np.random.default_rng(0)
TABLE = pd.DataFrame(
    {
        "name": [f"net {i}" for i in range(12)],
        "seed": [i % 6 for i in range(12)],
        "mls": DRAWS.normal(size=12),
        "generalisation_gap": DRAWS.normal(size=12),
        "sharpness": DRAWS.normal(size=12),
    }
)


def test_the_pairs_are_those_of_the_columns_of_numbers_over_units():
    found = fl.relate(TABLE, units="seed")
    numbers = TABLE[["mls", "generalisation_gap", "sharpness"]]
    pd.testing.assert_frame_equal(found.frame(), relate_all(numbers, TABLE["seed"]))
    assert set(found.frame()["units"]) == {6}
    alone = fl.relate(TABLE.drop(columns="seed"))
    assert set(alone.frame()["units"]) == {12}


def test_the_target_is_the_gap_or_the_last_column_or_the_one_that_is_named():
    found = fl.relate(TABLE, units="seed")
    assert found.of()["y"].tolist() == ["generalisation_gap"] * 2
    assert found.of()["x"].tolist() == ["mls", "sharpness"]
    assert found.of("mls")["x"].tolist() == ["generalisation_gap", "sharpness"]
    other = fl.relate(TABLE.rename(columns={"generalisation_gap": "gap"}), units="seed")
    assert set(other.of()["y"]) == {"sharpness"}
    with pytest.raises(UnknownName, match="did you mean mls"):
        found.of("ml")


@pytest.mark.parametrize("of", [list, np.array, tuple, lambda seeds: pd.Series(list(seeds), index=range(50, 62))])
def test_units_may_be_labels_of_the_rows(of):
    given = fl.relate(TABLE.drop(columns="seed"), units=of(TABLE["seed"]))
    pd.testing.assert_frame_equal(given.frame(), fl.relate(TABLE, units="seed").frame())
    assert given.about["units"] == "one label for each row"


def test_columns_that_are_no_numbers_are_left_out_and_named():
    waits = pd.to_timedelta([*range(11), None], unit="s")
    numbers = TABLE[["mls", "sharpness"]]
    odd = numbers.assign(wait=waits, z=1j, text=[str(v) for v in numbers["mls"]], old=numbers["mls"].astype(object))
    found = fl.relate(odd)
    assert found.about["columns"] == ["mls", "sharpness"]
    assert found.about["left_out"]["old"] == "numbers stored as objects: convert them with pd.to_numeric"
    assert found.about["left_out"]["z"] == "no numbers: complex128"
    assert set(found.about["left_out"]) == {"wait", "z", "text", "old"}
    with pytest.raises(BadInput, match=r"got mls \(left out: old: numbers stored as objects"):
        fl.relate(odd[["mls", "old"]])


def test_numbered_columns_are_asked_for_by_their_number():
    table = pd.DataFrame({0: TABLE["mls"], 1: TABLE["sharpness"], 2: TABLE["seed"]})
    found = fl.relate(table, units=2)
    assert found.of(0)["x"].tolist() == ["1"]
    assert found.of("0").equals(found.of(0))


def test_it_is_saved_and_drawn(tmp_path):
    found = fl.relate(TABLE, units="seed")
    found.save(tmp_path / "relations")
    again = fl.Relations.load(tmp_path / "relations")
    pd.testing.assert_frame_equal(again.frame(), found.frame())
    assert again.about == {
        "rows": 12,
        "columns": ["mls", "generalisation_gap", "sharpness"],
        "units": "seed",
        "left_out": {"name": f"no numbers: {TABLE['name'].dtype}"},
    }
    drawn = [row for rows in found.plot().to_dict()["datasets"].values() for row in rows if "value" in row]
    of = found.of()
    assert {(row["quantity"], row["value"]) for row in drawn} == {
        *zip(of["x"], of["pearson"], strict=True),
        *zip(of["x"], of["kendall"], strict=True),
    }
    found.plot("mls").to_dict(validate=True)


def test_what_is_no_table_is_one_line():
    with pytest.raises(BadInput, match="expected a pandas DataFrame, got dict"):
        fl.relate({"mls": [1.0]})
    with pytest.raises(BadInput, match="expected at least two columns of numbers with names of their own, got mls"):
        fl.relate(TABLE[["mls", "name"]])
    with pytest.raises(UnknownName, match="unknown column 'seeds' in this table: did you mean seed"):
        fl.relate(TABLE, units="seeds")
    with pytest.raises(BadInput, match=r"expected one label for each of 12 rows, got 3"):
        fl.relate(TABLE, units=[1, 2, 3])
    twice = pd.DataFrame(np.c_[DRAWS.normal(size=(8, 2)), range(8), range(8)], columns=["a", "b", "u", "u"])
    with pytest.raises(BadInput, match="expected one column of this name, the table has several"):
        fl.relate(twice, units="u")
    fl.relate(TABLE[["mls", "sharpness"]].head(2)).plot().to_dict(validate=True)  # too few rows for a correlation
