"""Networks of one seed are one unit; a study without seeds has a unit per network; other units are named."""

import pandas as pd
import pytest
from fake_study import fake_result

from flatlens.errors import BadInput
from flatlens.papers.evidence import UNIT, independent, labelled, reached, studied, units_in, word_of


def test_networks_of_one_seed_are_one_unit():
    result = fake_result({"seed": [0, 1, 0, 1], "model": list("aabb")})
    assert reached("s")({"s": result})[UNIT].tolist() == ["seed 0", "seed 1", "seed 0", "seed 1"]
    models = independent(reached("s"), "architecture", ["model"])({"s": result})
    assert models[UNIT].tolist() == ["architecture a", "architecture a", "architecture b", "architecture b"]
    both = independent(reached("s"), "run", ["model", "seed"])({"s": result})
    assert both[UNIT].nunique() == 4
    assert word_of(both[UNIT]) == "run"
    assert word_of(pd.concat([both[UNIT], models[UNIT]])) == "unit"


def test_without_seeds_each_network_is_a_unit():
    result = fake_result({"lr": [0.1, 0.2]})
    assert reached("s")({"s": result})[UNIT].tolist() == ["network k0", "network k1"]


def test_seeds_of_a_joint_axis_are_seeds():
    result = fake_result({"seed": [0, 1]})
    result.settings["axes"] = [{"name": "data.seed+model.seed+training.seed", "values": [[0, 0, 0], [1, 1, 1]]}]
    assert reached("s")({"s": result})[UNIT].tolist() == ["seed 0", "seed 1"]


def test_quantities_have_the_units_of_their_networks():
    columns = {"key": list("abc"), "seed": [0, 0, 1]}
    values = pd.DataFrame(columns).assign(included=[True, False, True], MLS=1.0)
    assert studied("s")({"s": fake_result(columns, values=values)})[UNIT].tolist() == ["seed 0", "seed 1"]


def test_what_is_missing_is_said_in_one_line():
    table = pd.DataFrame({"x": [1.0]})
    with pytest.raises(BadInput, match="no column 'unit'"):
        units_in(table)
    with pytest.raises(BadInput, match="the table has x"):
        labelled(table, ["seed"])
