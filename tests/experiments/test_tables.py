"""Tables of a study: seeds are no settings, wherever they stand in a table."""

import pandas as pd
import pytest

from flatlens.experiments import Study
from flatlens.experiments.tables import groupings, setting_of, unit_column, without_seeds
from flatlens.models import MLP

NETWORKS = pd.DataFrame(
    {
        "model": ["MLP(widths=(8,), seed=0)", "MLP(widths=(8,), seed=1)", "LeNet5(seed=0)", "LeNet5(seed=1)"],
        "batchnorm+seed": ["(True, 0)", "(True, 1)", "(False, 0)", "(False, 1)"],
        "lr": [0.1, 0.1, 0.1, 0.2],
        "seed": [0, 1, 0, 1],
    }
)
"""As older tables have them: the seed is inside the text of other settings."""


def test_seeds_in_the_text_of_settings_are_left_out():
    assert without_seeds(NETWORKS, ["model", "batchnorm+seed", "lr", "seed"]).to_dict("list") == {
        "model": ["MLP(widths=(8,))"] * 2 + ["LeNet5()"] * 2,
        "batchnorm": ["True", "True", "False", "False"],
        "lr": ["0.1", "0.1", "0.1", "0.2"],
    }


def test_no_networks_at_all_have_no_settings_either():
    """All of them diverged: the columns are empty, of numbers."""
    assert without_seeds(NETWORKS.iloc[:0].astype({"lr": float}), ["lr", "batchnorm+seed"]).empty
    pairs = pd.DataFrame({"lr": [], "batch_size": [], "lr+batch_size+seed": [], "seed": []}, dtype=float)
    assert list(without_seeds(pairs, ["lr+batch_size+seed"])) == ["lr+batch_size"]


def test_a_column_of_its_own_counts_before_the_text_of_several():
    known = NETWORKS.assign(batchnorm=["a", "b", "c", "d"])
    assert without_seeds(known, ["batchnorm+seed"])["batchnorm"].tolist() == ["a", "b", "c", "d"]


def test_networks_that_differ_in_their_seed_alone_are_one_group():
    groups = groupings(NETWORKS, ["model", "lr", "seed"])
    assert {name: group.tolist() for name, group in groups.items()} == {
        "model": [1, 1, 0, 0],
        "model, lr": [2, 2, 0, 1],
        "seed": [0, 1, 0, 1],
    }


def test_no_networks_are_no_groups():
    for group in groupings(NETWORKS[:0], ["model", "batchnorm+seed", "seed"]).values():
        assert group.empty


@pytest.mark.parametrize(
    ("axes", "column"),
    [
        (["lr"], "key"),
        (["lr", "seed"], "seed"),
        (["batchnorm+seed"], "seed"),
        (["training.seed"], "seed"),
        (["lr", "model.seed"], "model.seed"),
        (["data.seed+model.seed"], "data.seed+model.seed"),
        (["lr+model.seed"], "key"),
    ],
)
def test_units_are_seeds_where_they_vary(axes, column):
    assert unit_column(axes) == column


def test_a_cell_has_a_seed_only_if_no_other_column_has_it():
    base = Study.digits("smoke").setting("seed", 1).base
    for seed, shown in ((1, False), (2, True), (12, True)):
        one = Study("", base, ()).setting("model", MLP(64, (8,), 10, seed=seed)).base
        assert ("seed=" in setting_of(one, "model")) is shown
