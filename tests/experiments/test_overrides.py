from dataclasses import dataclass, replace

import pytest

from flatlens.data import clusters, digits, eight_points, patches
from flatlens.errors import BadInput, UnknownName
from flatlens.experiments import Study
from flatlens.experiments.overrides import paths, value_of, vary
from flatlens.experiments.settings import Axis, fitted
from flatlens.models import MLP, LeNet5, SmallVGG
from flatlens.training import SAM, InputJacobian, RelativeFlatness, Training


@dataclass(frozen=True)
class Pair:
    first: Training
    second: Training


NETWORK = Study.digits("smoke").networks()[0]


def test_a_setting_is_found_by_its_last_name_or_its_whole_path():
    assert paths(NETWORK, "lr") == ("training.optimiser.lr",)
    assert paths(NETWORK, "loss_below") == ("training.until.loss_below",)
    assert paths(NETWORK, "seed") == ("model.seed", "training.seed")
    assert paths(NETWORK, "data.seed") == ("data.seed",)
    assert vary(NETWORK, "lr", 0.7).training.optimiser.lr == 0.7
    both = vary(NETWORK, "seed", 9)
    assert (both.model.seed, both.training.seed, both.data.seed) == (9, 9, 0)
    assert value_of(both, "seed") == 9


def test_settings_that_go_together_are_set_together():
    both = vary(NETWORK, "batch_size+lr", (7, 0.3))
    assert (both.training.batch_size, both.training.optimiser.lr) == (7, 0.3)
    assert value_of(both, "batch_size+lr") == (7, 0.3)
    assert paths(NETWORK, "lr+seed") == ("training.optimiser.lr", "model.seed", "training.seed")
    for value in ((7,), 7):
        with pytest.raises(BadInput, match="must have 2 parts"):
            vary(NETWORK, "batch_size+lr", value)


def test_an_axis_of_pairs_is_no_grid_of_both():
    study = replace(Study.digits("smoke"), axes=(Axis("batch_size+lr", ((8, 0.1), (4, 0.05))), Axis("seed", (0, 1))))
    pairs = [(n.training.batch_size, n.training.optimiser.lr) for n in study.networks()]
    assert pairs == [(8, 0.1), (8, 0.1), (4, 0.05), (4, 0.05)]
    assert Study.from_json(study.as_json()) == study
    with pytest.raises(BadInput, match=r"both set training\.optimiser\.lr"):
        study.over("lr", 0.1, 0.2)


def test_settings_inside_settings_and_inside_tuples_can_be_varied():
    one = vary(NETWORK, "penalties", (InputJacobian(0.1), RelativeFlatness(0.2)))
    two = vary(one, "penalties.1.coefficient", 0.5)
    assert [p.coefficient for p in two.training.penalties] == [0.1, 0.5]
    assert value_of(two, "penalties.1.coefficient") == 0.5
    assert vary(vary(NETWORK, "ascent", SAM(0.1)), "rho", 0.3).training.ascent == SAM(0.3)


def test_what_is_not_there_or_not_clear_is_said():
    with pytest.raises(UnknownName, match="did you mean lr"):
        vary(NETWORK, "lrr", 0.1)
    with pytest.raises(UnknownName, match="unknown setting 'rho'"):
        vary(NETWORK, "rho", 0.1)
    with pytest.raises(BadInput, match=r"'momentum' could be .* or .*: write the whole name"):
        paths(Pair(NETWORK.training, NETWORK.training), "momentum")
    with pytest.raises(BadInput, match="lr=-1"):
        vary(NETWORK, "lr", -1.0)


def test_networks_are_the_product_of_the_axes_each_once():
    study = Study.digits("smoke").over("lr", 0.2, 0.1).over("seed", 1, 0).over("activation", "tanh", "relu")
    found = [
        (n.training.optimiser.lr, n.training.batch_size, n.training.seed, n.model.activation) for n in study.networks()
    ]
    assert found[:3] == [(0.1, 4, 0, "tanh"), (0.1, 4, 0, "relu"), (0.1, 4, 1, "tanh")]
    assert len(found) == len(set(found)) == len({n.key for n in study.networks()}) == 16


def test_a_setting_of_all_is_no_axis_any_more():
    study = Study.digits("smoke").setting("lr", 0.3)
    assert [axis.name for axis in study.axes] == ["batch_size", "seed"]
    assert {n.training.optimiser.lr for n in study.networks()} == {0.3}


def test_axes_that_clash_or_are_empty_are_refused():
    with pytest.raises(BadInput, match=r"both set model\.seed"):
        Study.digits("smoke").over("model.seed", 3)
    with pytest.raises(BadInput, match="each of them once"):
        Axis("lr", (0.1, 0.1))
    with pytest.raises(BadInput, match="at least one value"):
        Axis("lr", ())


def test_architectures_take_the_sizes_of_the_data():
    assert fitted(MLP(1, (8,), 1), digits(train=20)) == MLP(64, (8,), 10)
    assert fitted(MLP(1, (8,), 5), eight_points()) == MLP(1, (8,), 1)
    assert fitted(MLP(1, (8,), 5), clusters(n=10, test=10)) == MLP(8, (8,), 2)
    assert fitted(LeNet5(), patches(train=10, test=10)) == LeNet5(classes=2)
    assert fitted(SmallVGG(), patches(train=10, test=10)).classes == 2
    assert fitted(MLP(1, (8,), 5), patches(train=10, test=10, flat=True)).inputs == 3072
    with pytest.raises(BadInput, match="takes images"):
        fitted(LeNet5(), digits(train=20))
    with pytest.raises(BadInput, match="flat=True"):
        fitted(MLP(1, (8,), 5), patches(train=10, test=10))
