import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from flatlens.errors import BadInput, UnknownName
from flatlens.experiments import Quantity, Study
from flatlens.experiments.network import measure_network
from flatlens.experiments.quantities import LEFT_OUT
from flatlens.experiments.settings import Axis, DataSettings, NetworkSettings
from flatlens.measures import MEASURES
from flatlens.training import SGD, Until


def test_the_laptop_scale_is_the_grid_it_says():
    networks = Study.digits("laptop").networks()
    assert len(networks) == len({n.key for n in networks}) == 3 * 3 * 11
    assert {n.training.optimiser.lr for n in networks} == {0.05, 0.1, 0.2}
    assert {n.training.batch_size for n in networks} == {4, 16, 64}
    assert all(n.model.seed == n.training.seed for n in networks)
    assert len({n.data for n in networks}) == 1
    order = [(n.training.optimiser.lr, n.training.batch_size, n.training.seed) for n in networks]
    assert order == sorted(order)


@pytest.mark.parametrize("scale", ["smoke", "laptop"])
def test_settings_survive_json(scale):
    study = Study.digits(scale)
    assert Study.from_json(json.loads(json.dumps(study.as_json()))) == study
    network = study.networks()[3]
    back = NetworkSettings.from_json(json.loads(json.dumps(network.as_json())))
    assert back == network
    assert back.key == network.key


def test_the_key_is_of_the_settings_alone_and_of_all_of_them():
    network = replace(Study.digits("smoke").networks()[0], measures=("mls", "loss"))
    assert network.key == "00097dc6693b"  # the same today as in any other process, on any machine
    others = [
        replace(network, training=replace(network.training, loss="cross_entropy")),
        replace(network, measures=network.measures[:1]),
        replace(network, data=replace(network.data, seed=1)),
        replace(network, model=replace(network.model, seed=1)),
        replace(network, training=replace(network.training, until=Until(loss_below=1e-4, accuracy=1.0))),
        replace(network, dtype="float32"),
    ]
    assert len({network.key, *(o.key for o in others)}) == 7


def test_unknown_names_and_foreign_json_are_refused():
    with pytest.raises(UnknownName, match="laptop"):
        Study.digits("labtop")
    with pytest.raises(UnknownName, match="digits"):
        DataSettings("digit", train=10)
    with pytest.raises(BadInput, match="these settings do not describe a study"):
        Study.from_json({**Study.digits().as_json(), "colour": "red"})


def test_quantities_are_undefined_rather_than_wrong():
    networks = pd.DataFrame({"value": [4.0, 0.0, -1.0, np.nan]})
    root = Quantity("root", "value", "sqrt").of(networks)
    log = Quantity("log", "value", "log").of(networks)
    np.testing.assert_array_equal(root, [2.0, 0.0, np.nan, np.nan])
    np.testing.assert_allclose(log, [np.log(4), np.nan, np.nan, np.nan])
    assert Quantity("missing", "other").of(networks).isna().all()


def test_a_study_measures_and_compares_all_that_needs_no_products_and_says_something_new():
    study = Study.digits("smoke")
    left_out = {*LEFT_OUT, *(name for name, one in MEASURES.items() if one.on_request)}
    assert set(study.base.measures) == set(MEASURES) - left_out
    axes = {q.column for q in study.quantities}
    assert axes >= {name for name in study.base.measures if MEASURES[name].card.family != "generalisation"}


def test_what_a_study_leaves_out_as_the_same_number_is_the_same_number():
    network = Study.digits("smoke").networks()[0]
    split = network.data.load()
    model = network.model.build()
    alike = {name: why.removeprefix("the same number as ") for name, why in LEFT_OUT.items() if "same number" in why}
    report = measure_network(model, split, replace(network, measures=(*alike, *network.measures)))
    found = {
        name: report[twin.partition(" of ")[0], "fc1"] if " of " in twin else report[twin]
        for name, twin in alike.items()
    }
    assert len(found) == 4
    for name, twin in found.items():
        assert report[name].value == pytest.approx(twin.value, rel=1e-10), name


def test_an_axis_has_each_value_once_however_it_is_written():
    for values in ((1, 1.0, 0.5), (SGD(1), SGD(1.0)), ((1, 2), (1.0, 2)), (np.float64(0.1), 0.1), ("a", "a")):
        with pytest.raises(BadInput, match="each of them once"):
            Axis("lr", values)
    for values in ((1, True), (0, False, None), ("1", 1), (SGD(1), SGD(1, 0.9)), ((1, 2), (2, 1))):
        assert Axis("lr", values).values == values
