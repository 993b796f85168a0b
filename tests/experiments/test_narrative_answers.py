"""The three lines at the top of a study, from tables whose relations are known."""

import pandas as pd
import pytest

from flatlens.experiments import Study
from flatlens.experiments.narrative import BEWARE, SURELY, WHAT, answers, closest
from flatlens.experiments.tables import COLUMNS

STUDY = Study.digits("smoke").over("seed", *range(8))
GAP = "generalisation gap"


def relations(**found):
    rows = [
        {"x": GAP, "y": name, "n": 32, "units": units, "pearson": r, "pearson_low": low, "pearson_high": high}
        for name, (r, low, high, units) in found.items()
    ]
    return pd.DataFrame(rows)


def within(**found):
    rows = [
        {"x": name, "y": GAP, "group": "lr, batch_size", "groups": 4}
        | {"pearson": r, "pearson_low": low, "pearson_high": high}
        for name, (r, low, high) in found.items()
    ]
    return pd.DataFrame(rows, columns=["x", "y", "group", "groups", "pearson", "pearson_low", "pearson_high"])


def by_kind(**found):
    rows = [
        {
            "kind": kind,
            "quantity": name,
            "coefficient": "Pearson r",
            "value": (low + high) / 2,
            "low": low,
            "high": high,
        }
        for name, kinds in found.items()
        for kind, (low, high) in kinds.items()
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def told(overall, inside=None, left_out=0, unfinished=0, kinds=None):
    inside, kinds = within() if inside is None else inside, by_kind() if kinds is None else kinds
    return dict(answers(STUDY, overall, inside, kinds, left_out, unfinished))


def test_what_goes_with_the_gap_is_the_strongest_whose_interval_leaves_out_zero():
    overall = relations(MLS=(0.9, -0.2, 1.0, 8), NMLS=(0.7, 0.3, 0.9, 8), **{"GGN trace": (-0.8, -0.9, -0.5, 8)})
    said = told(overall)
    closest_one = "GGN trace, Pearson r = -0.80 [-0.90, -0.50]"
    assert (
        said[WHAT]
        == f"Across 32 networks, 1 of 3 measures clearly goes with it, and 1 against it, most closely {closest_one}."
    )
    assert closest(["MLS", "NMLS", "GGN trace"], overall) == "GGN trace"
    assert "over 8 independent seeds, so they are rough." in said[SURELY]
    assert said[BEWARE] == "A correlation is no proof of a cause."


def test_where_no_interval_leaves_out_zero_none_does():
    said = told(relations(MLS=(0.9, -0.2, 1.0, 8), NMLS=(0.7, -0.3, 0.9, 8)))
    closest_one = "MLS, Pearson r = 0.90 [-0.20, 1.00]"
    assert said[WHAT] == f"Across 32 networks, none of 2 measures clearly go with it. The closest is {closest_one}."


def test_what_is_lost_among_networks_trained_alike_is_said():
    overall = relations(MLS=(0.9, 0.2, 1.0, 8), NMLS=(0.7, 0.3, 0.9, 8))
    said = told(overall, within(MLS=(0.1, -0.5, 0.6), NMLS=(0.6, 0.1, 0.9)), left_out=2, unfinished=1)
    alike = "Within a fixed learning rate and batch size, where only the seed differs, "
    assert said[SURELY].endswith(f"{alike}1 of 2 measures clearly goes with the gap.")
    assert f"{alike}the relation of MLS is no longer clear: the settings may move both sides." in said[BEWARE]
    assert said[BEWARE].startswith("1 network of the study not finished yet. 2 networks left out of every relation.")


@pytest.mark.parametrize("units", [1, 2])
def test_without_intervals_nothing_is_sure(units):
    said = told(relations(MLS=(0.9, float("nan"), float("nan"), units)))
    assert "nothing here is sure" in said[SURELY]
    assert "none of 1 measure clearly go with it" in said[WHAT]


def test_without_a_gap_there_is_no_answer():
    said = told(relations(MLS=(float("nan"),) * 3 + (8,)))
    assert "No measure can be compared" in said[WHAT]
    assert closest(["MLS"], relations(MLS=(float("nan"),) * 3 + (8,))) is None


def test_a_sign_that_is_another_in_another_kind_of_networks_is_said():
    turned = {"VGG11": (-0.6, -0.2), "ResNet18": (0.1, 0.5), "LeNet": (-0.3, 0.4)}
    overall = relations(MLS=(0.3, 0.1, 0.5, 8))
    one = told(
        overall, kinds=by_kind(MLS=turned, NMLS={"": (-0.9, -0.8), "VGG11": (0.1, 0.5), "ResNet18": (-0.4, 0.2)})
    )
    assert "MLS goes with the gap in one kind of networks and against it in another (ResNet18, VGG11)." in one[BEWARE]
    two = told(overall, kinds=by_kind(MLS=turned, NMLS=turned))
    assert "2 measures go with the gap in one kind of networks" in two[BEWARE]
    assert "kind" not in told(overall, kinds=by_kind(MLS={"VGG11": (float("nan"),) * 2, "LeNet": (0.1, 0.2)}))[BEWARE]
