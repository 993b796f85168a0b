import pytest

from flatlens.errors import BadInput, UnknownName
from flatlens.experiments import Study
from flatlens.experiments.building import study_of
from flatlens.models import MLP, LeNet5
from flatlens.training import SAM, SGD, RelativeFlatness


def test_a_name_alone_is_the_study_of_that_name():
    assert study_of("digits", scale="smoke") == Study.digits("smoke")


def test_settings_are_for_all_networks_or_axes():
    study = study_of("digits", settings=["lr=0.05,0.1", "seed=0:3", "batch_size=8", "ascent=SAM(0.1)"], scale="smoke")
    assert [(axis.name, axis.values) for axis in study.axes] == [("lr", (0.05, 0.1)), ("seed", (0, 1, 2))]
    assert all(n.training.batch_size == 8 and n.training.ascent == SAM(0.1) for n in study.networks())
    assert study.networks()[0].model.inputs == 64


def test_axes_of_all_kinds():
    study = study_of("digits", settings=["activation=relu,tanh", "widths=(8,),(16,16)", "ascent=None,SAM(0.1)"])
    assert len(study.networks()) == 8
    assert {n.model.widths for n in study.networks()} == {(8,), (16, 16)}
    assert [q.name for q in study.quantities if q.role == "setting"] == []


def test_a_setting_that_is_a_number_is_compared_with_what_is_measured():
    study = study_of("digits", settings=["label_smoothing=0,0.5", "lr=0.1,0.2"])
    assert [(q.name, q.column) for q in study.quantities if q.role == "setting"] == [
        ("label smoothing", "label_smoothing"),
        ("learning rate (log)", "lr"),
    ]


def test_networks_take_their_sizes_from_the_data():
    assert study_of("patches", settings=["train=10", "data.test=10"]).base.model.classes == 2
    assert study_of("digits", model="MLP(widths=(8,), activation=tanh)").base.model == MLP(64, (8,), 10, "tanh")
    lenet = study_of("patches", model="LeNet5", settings=["train=10", "data.test=10"])
    assert lenet.base.model == LeNet5(classes=2)
    assert "relative_flatness[conv1]" in {q.column for q in lenet.quantities}


YAML = """
name: smoothing
data: {name: digits, train: 100}
model: MLP(widths=(16,))
training:
  optimiser: SGD(lr=0.1)
  batch_size: 16
  loss: cross_entropy
  until: {loss_below: 0.1}
  penalties: ["RelativeFlatness(0.01, all)"]
  max_epochs: 5
set:
  label_smoothing: [0, 0.5]
  seed: 0:2
  activation: tanh
measures: [mls, relative_flatness, generalisation_gap]
"""


def test_a_yaml_file_is_a_study(tmp_path):
    file = tmp_path / "study.yaml"
    file.write_text(YAML)
    study = study_of(str(file))
    assert (study.name, study.base.data.train, study.base.model.activation) == ("smoothing", 100, "tanh")
    assert study.base.training.optimiser == SGD(0.1)
    assert study.base.training.penalties == (RelativeFlatness(0.01, "all"),)
    assert study.base.training.max_epochs == 5
    assert study.base.measures == ("mls", "relative_flatness", "generalisation_gap")
    assert [(axis.name, axis.values) for axis in study.axes] == [("label_smoothing", (0, 0.5)), ("seed", (0, 1))]
    more = study_of(str(file), settings=["seed=7", "lr=0.1,0.2"])
    assert [axis.name for axis in more.axes] == ["label_smoothing", "lr"]
    assert {n.training.seed for n in more.networks()} == {7}
    assert Study.from_json(study.as_json()) == study


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("name:", "nome:"), "no part 'nome'"),
        (("digits", "digit"), "did you mean digits"),
        (("MLP(", "MPL("), "did you mean MLP"),
        (("batch_size", "batchsize"), "training: .*batchsize"),
        (("label_smoothing: [0", "label_smoothin: [0"), "did you mean"),
        (("mls,", "mlss,"), "did you mean mls"),
        (("data: {name: digits, train: 100}", ""), "names no data"),
        (("[0, 0.5]", "[0, 0]"), "each of them once"),
        (("widths=(16,)", "width=16"), "unexpected keyword"),
    ],
)
def test_a_slip_in_a_yaml_file_is_one_line(tmp_path, change, said):
    file = tmp_path / "study.yaml"
    file.write_text(YAML.replace(*change))
    with pytest.raises(BadInput, match=said) as caught:
        study_of(str(file))
    assert "\n" not in str(caught.value)


def test_slips_on_the_command_line_are_one_line():
    for options, error, said in [
        ({"data": "digit"}, UnknownName, "did you mean digits"),
        ({"data": "digits", "settings": ["lrr=1"]}, UnknownName, "did you mean lr"),
        ({"data": "digits", "settings": ["lr"]}, BadInput, "NAME=VALUE"),
        ({"data": "digits", "model": "LeNet5"}, BadInput, "takes images"),
        ({"data": "digits", "model": "relu"}, BadInput, "is not an architecture"),
        ({"data": "none.yaml"}, BadInput, "cannot be read"),
    ]:
        with pytest.raises(error, match=said):
            study_of(**options)
