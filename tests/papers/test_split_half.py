"""Halves of the units: no network in both, none in neither, and a seed in the same half in every study."""

from dataclasses import fields, replace
from types import SimpleNamespace

import pandas as pd
from fake_study import fake_result

from flatlens.experiments.result import StudyResult
from flatlens.papers.experiment import Prediction
from flatlens.papers.reproduction import concluded, split_half
from flatlens.statistics import Statistic

TABLES = ("layers", "curves", "histories", "functions", "values")


def result(columns):
    """The result of a study that was never run: every table has two rows a network."""
    found = fake_result(columns)
    rows = pd.DataFrame({"key": found.networks["key"].repeat(2)})
    empty = dict.fromkeys((field.name for field in fields(StudyResult)), None)
    return StudyResult(**empty | dict.fromkeys(TABLES, rows) | vars(found))


def test_every_other_seed_in_every_study():
    one, other = result({"seed": [0, 0, 3, 3, 7, 8], "lr": [1, 2, 1, 2, 1, 1]}), result({"seed": [8, 7, 3, 0]})
    even, odd = split_half({"one": one, "other": other})
    assert even["one"].networks["seed"].tolist() == [0, 0, 7]
    assert odd["one"].networks["seed"].tolist() == [3, 3, 8]
    assert even["other"].networks["seed"].tolist() == [7, 0]
    assert odd["one"].histories["key"].tolist() == ["k2", "k2", "k3", "k3", "k5", "k5"]
    assert replace(odd["one"], networks=one.networks).networks is one.networks  # the whole is as it was


def test_a_seed_that_a_study_lacks_changes_no_half():
    even, odd = split_half({"one": result({"seed": [0, 3, 7, 8]}), "other": result({"seed": [3, 7, 8]})})
    assert even["other"].networks["seed"].tolist() == [7]
    assert odd["other"].networks["seed"].tolist() == [3, 8]


def test_a_seed_of_another_name():
    """The networks of one `model.seed` are one unit, and stay in one half."""
    one = result({"seed": [0] * 6, "model.seed": [0, 0, 1, 1, 2, 2], "lr": [1, 2] * 3})
    axes = [{"name": "model.seed", "values": [0, 1, 2]}, {"name": "lr", "values": [1, 2]}]
    even, odd = split_half({"one": replace(one, settings={**one.settings, "axes": axes})})
    assert even["one"].networks["model.seed"].tolist() == [0, 0, 2, 2]
    assert odd["one"].networks["model.seed"].tolist() == [1, 1]


def test_networks_where_the_seed_does_not_vary():
    even, odd = split_half({"one": result({"lr": [1, 2, 3]})})
    assert even["one"].networks["lr"].tolist() == [1, 3]
    assert odd["one"].networks["lr"].tolist() == [2]


def test_each_prediction_is_weighed_on_each_half():
    mean = Prediction("mean", "", "", lambda results: Statistic("mean", results["one"].networks["lr"].mean(), 3))
    experiment = SimpleNamespace(predictions=(mean,), plots=lambda _: [])
    results = {"one": result({"seed": [0, 1, 2, 3], "lr": [1.0, -2.0, 3.0, -4.0]})}
    ((even, odd),) = concluded(experiment, "desk", results, {}).halves
    assert (even.statistic.value, odd.statistic.value) == (2.0, -3.0)
    assert (even.sided, odd.sided) == ("reproduced", "not reproduced")
