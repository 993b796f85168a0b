import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from user_study import NET

from flatlens.data import UserData
from flatlens.errors import BadData, BadInput, UnknownName
from flatlens.experiments import Study, run_study
from flatlens.experiments.narrative import trained_alike
from flatlens.experiments.specification import study_of
from flatlens.experiments.tables import kinds_of
from flatlens.models import MLP, LeNet5, UserNetwork
from flatlens.training import SAM, SGD, RelativeFlatness, Until


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
        (("batch_size", "batchsize"), "unknown setting 'batchsize' of Training: did you mean batch_size"),
        (("label_smoothing: [0", "label_smoothin: [0"), "did you mean"),
        (("mls,", "mlss,"), "did you mean mls"),
        (("data: {name: digits, train: 100}", ""), "names no data"),
        (("[0, 0.5]", "[0, 0]"), "each of them once"),
        (("widths=(16,)", "width=16"), "unknown setting 'width' of MLP: did you mean widths"),
        (("optimiser: SGD(lr=0.1)", "lr: 0.2"), r"lr is a setting of the optimiser: write optimiser: SGD\(lr=0.2\)"),
        (("SGD(lr=0.1)", "SGD(momentum=0.9)"), "SGD needs lr"),
        (("[mls,", "[] # [mls,"), "measures: expected something like"),
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


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A folder with a user's data and networks in net.py."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "net.py").write_text(NET)
    return folder


SMALL = ["max_steps=20"]


@pytest.mark.parametrize("labels", ["2 * (x[:, 0] > 0).long() - 1", "torch.arange(9)", "torch.eye(9).long()"])
def test_whole_numbers_that_are_no_labels_say_how_to_mend_the_users_function(tmp_path, labels):
    head = "import torch\ndef build(): return torch.nn.Linear(2, 2)\ndef samples():\n    x = torch.randn(9, 2)\n"
    (tmp_path / "net.py").write_text(f"{head}    return x, {labels}\n")
    with pytest.raises(
        BadData, match=r"^data: net.py:samples: expected labels from 0 to 1, .*y.float\(\).*argmax"
    ) as caught:
        study_of(f"{tmp_path}/net.py:samples", model=f"{tmp_path}/net.py:build", settings=["seed=0:2"])
    assert "\n" not in str(caught.value)


def test_arguments_of_the_users_function_are_settings_and_axes(own, tmp_path):
    settings = ["width=4,8", "activation=tanh", "seed=0:2", "lr=0.1", *SMALL]
    study = study_of(f"{own}/net.py:samples", model=f"{own}/net.py:build", settings=settings, measures=["mls", "loss"])
    assert [(n.model.options["width"], n.model.seed, n.training.seed) for n in study.networks()] == [
        *[(4, 0, 0), (4, 1, 1), (8, 0, 0), (8, 1, 1)]
    ]
    assert {n.model.options["activation"] for n in study.networks()} == {"tanh"}
    assert [q.column for q in study.quantities if q.role == "setting"] == ["width"]
    assert Study.from_json(study.as_json()) == study
    with ThreadPoolExecutor(1) as executor:
        result = run_study(study, tmp_path / "out", executor=executor)
    assert result.networks["width"].tolist() == [4, 4, 8, 8]
    assert result.varied == ["width", "seed"]
    assert result.failed == []
    assert result.networks["mls"].gt(0).all()


def test_an_end_of_training_that_is_given_is_the_only_one(own):
    samples, build = f"{own}/net.py:samples", f"{own}/net.py:build"

    def training(*settings):
        return study_of(samples, model=build, settings=["seed=0:2", *settings]).networks()[-1].training

    assert (training("max_steps=20").until, training("max_steps=20").max_steps) == (Until(), 20)
    assert (training("max_epochs=3,4").max_epochs, training("max_epochs=3,4").max_steps) == (4, None)
    assert training("max_steps=20", "loss_below=0.1").until == Until(loss_below=0.1)
    assert training().until != Until()  # otherwise to interpolation


def test_data_are_read_once_before_a_study_begins(own, tmp_path, monkeypatch):
    counting = "\n\ndef counted():\n    Path('read.txt').open('a').write('x')\n    return samples()\n"
    (tmp_path / "net.py").write_text("from pathlib import Path\n" + (own / "net.py").read_text() + counting)
    monkeypatch.chdir(tmp_path)
    study = study_of("net.py:counted", model="net.py:build", settings=["train=8", "data.test=4", *SMALL])
    assert Path("read.txt").read_text() == "x"
    assert (study.base.data.train, study.base.data.test) == (8, 4)


def test_sizes_of_the_data_reach_the_users_function_and_the_rest_is_asked_for(own):
    samples, deep = f"{own}/net.py:samples", f"{own}/net.py:deep"
    study = study_of(samples, model=deep, settings=["depth=1,2", *SMALL])
    assert study.base.model.options == {"inputs": 9, "outputs": 2, "depth": 1}
    assert study_of(samples, model=f"{deep}(depth=2)").base.model.options["depth"] == 2
    with pytest.raises(BadInput, match=r"net\.py:deep needs the arguments depth: give defaults, or"):
        study_of(samples, model=deep)


def test_the_users_data_go_with_an_architecture_and_the_users_network_with_a_data_set(own):
    study = study_of(f"{own}/net.py:samples", model="MLP(widths=(8,))", settings=SMALL)
    assert study.base.model == MLP(9, (8,), 2)
    assert study.base.data.flat  # images become rows by themselves
    assert (
        study_of("patches", model="MLP(widths=(8,))", settings=["train=10", "data.test=10"]).base.model.inputs == 3072
    )
    with pytest.raises(BadInput, match="takes rows of numbers"):
        study_of("patches", model="MLP(widths=(8,))", settings=["train=10", "data.test=10", "flat=False"])
    sized = study_of("digits", model=f"{own}/net.py:deep(depth=1)", settings=["train=50"])
    assert sized.base.model.options["inputs"] == 64


def test_architectures_are_an_axis():
    study = study_of("digits", settings=["seed=3,4", "model=MLP(widths=(8,)),MLP", "train=50", *SMALL])
    assert [n.model for n in study.networks()] == [
        MLP(64, widths, 10, seed=seed) for widths in ((8,), (64, 64, 64)) for seed in (3, 4)
    ]
    assert study.varied == ["model", "seed"]
    assert Study.from_json(study.as_json()) == study
    for models, said in (("relu,MLP", "'relu' is not an architecture"), ("LeNet5,SmallVGG", "LeNet5 takes images")):
        with pytest.raises(BadInput, match=said):
            study_of("digits", settings=[f"model={models}"])


def test_shared_settings_are_those_of_each_architecture_whatever_their_order():
    models, size = "model=SmallVGG,LeNet5", ["train=20", "data.test=20", *SMALL]
    for settings in ([models, "init=kaiming_uniform"], ["init=kaiming_uniform", models]):
        study = study_of("patches", settings=[*settings, "seed=3", *size])
        assert {(n.model.init, n.model.seed, n.training.seed) for n in study.networks()} == {("kaiming_uniform", 3, 3)}
        assert {n.model.classes for n in study.networks()} == {2}
    for settings, said in (
        (["model=SmallVGG,MLP"], "MLP takes rows of numbers and SmallVGG images: that makes two studies"),
        (["model=SmallVGG,SmallVGG"], "each of them once"),
        (["model+lr=(SmallVGG,0.1),(LeNet5,0.2)"], "an axis of their own"),
        (["model="], "at least one value"),
        (["model=,"], "at least one value"),
        (
            ["model=VGG11,LeNet5", "batchnorm=False"],
            "LeNet5 has no such setting, and every architecture",
        ),
        (["model=VGG11,LeNet5", "batchnorm=False,True"], "LeNet5 has no such setting"),
        (["model"], "write NAME=VALUE"),
    ):
        with pytest.raises(BadInput, match=said):
            study_of("patches", settings=[*settings, *size])


def test_the_users_functions_are_an_axis_and_kinds_of_networks(own, tmp_path):
    samples, build, deep = (f"{own}/net.py:{name}" for name in ("samples", "build", "deep"))
    models = f"model={build}(width=4),{deep}(depth=1)"
    study = study_of(samples, settings=[models, "seed=0:4", "lr=0.1", *SMALL], measures=["mls", "generalisation_gap"])
    with ThreadPoolExecutor(1) as executor:
        result = run_study(study, tmp_path / "out", executor=executor)
    networks = result.networks
    assert networks["model"].nunique() == 2  # seeds have a column of their own
    assert networks["model"].str.startswith(("net.py:build(", "net.py:deep(")).all()
    assert kinds_of(networks).unique().tolist() == ["net.py:build", "net.py:deep"]
    assert result.gap_correlations["kind"].unique().tolist() == ["", "net.py:build", "net.py:deep"]
    assert result.within.set_index("group").loc["model", "groups"] == 2
    assert set(trained_alike(study)) == {"model", "seed"}
    assert "same weights" not in trained_alike(study)["seed"]
    with pytest.raises(BadInput, match=r"net\.py:deep needs the arguments depth"):
        study_of(samples, settings=[f"model={own}/net.py:build,{own}/net.py:deep"])
    (tmp_path / "net.py").write_text((own / "net.py").read_text() + "\n# another one")
    with pytest.raises(BadInput, match=r"net\.py:build\(width=4, activation='relu'\) is listed twice"):
        study_of(samples, settings=[f"model={build}(width=4),{tmp_path}/net.py:build(width=4)"])
    with pytest.raises(BadInput, match=r"narrow|shapes|mat1"):
        study_of(samples, settings=[f"model={build},{own}/net.py:narrow"])  # before any worker begins
    twice = study_of(samples, settings=[f"model={own}/net.py:deep,{own}/net.py:deeper", "depth=3,4", *SMALL])
    assert [n.model.options["depth"] for n in twice.networks()] == [3, 4, 3, 4]


def test_a_yaml_file_has_several_architectures(own, tmp_path):
    for models in ("MLP(widths=(8,)),MLP(widths=(8, 8))", ["MLP(widths=(8,))", "MLP(widths=(8, 8))"]):
        (tmp_path / "study.yaml").write_text(json.dumps({"data": "digits", "set": {"model": models}}))
        study = study_of(str(tmp_path / "study.yaml"))
        assert sorted(n.model.widths for n in study.networks()) == [(8,), (8, 8)]
    for models in ("net.py:build(width=4), net.py:deep(depth=1)", ["net.py:build(width=4)", "net.py:deep(depth=1)"]):
        (own / "study.yaml").write_text(json.dumps({"data": "net.py:samples", "set": {"model": models}}))
        study = study_of(str(own / "study.yaml"))
        assert [n.model.source.rpartition(":")[2] for n in study.networks()] == ["build", "deep"]


def test_a_yaml_file_names_files_beside_it(own):
    (own / "own.yaml").write_text(
        "data: {name: net.py:samples, train: 40, seed: 3}\ntest: net.py:held_out\nmodel: net.py:build(width=5)\n"
        "training: {optimiser: SGD(lr=0.1), max_epochs: 2, batch_size: 8}\nset: {width: [4, 6], seed: 0:2}\n"
    )
    study = study_of(str(own / "own.yaml"))
    assert isinstance(study.base.data, UserData)
    assert isinstance(study.base.model, UserNetwork)
    assert (study.base.data.train, study.base.data.seed, study.base.model.options["width"]) == (40, 3, 5)
    assert len(study.base.data.load().test_x) == 20
    assert [axis.values for axis in study.axes] == [(4, 6), (0, 1)]


def test_slips_with_ones_own_files_are_one_line_before_anything_starts(own):
    samples, build = f"{own}/net.py:samples", f"{own}/net.py:build"
    for options, said in [
        ({"model": f"{own}/net.py:narrow"}, r"forward failed on the first sample"),
        ({"model": f"{own}/net.py:buld"}, "did you mean build"),
        ({"model": f"{own}/nets.py:build"}, "there is no file"),
        ({"model": build, "settings": ["widht=4,8"]}, "did you mean width"),
        ({"model": f"{build}(8)"}, "by name"),
        ({"model": build, "test": f"{own}/net.py:none"}, "unknown function 'none' in .*"),
        ({"model": build, "settings": ["data.train=500"]}, "train=500: the data has 64 samples"),
    ]:
        with pytest.raises(BadInput, match=said) as caught:
            study_of(samples, **options)
        assert "\n" not in str(caught.value)
    with pytest.raises(BadInput, match="--test: digits has its own test data"):
        study_of("digits", model=build, test=samples)


@pytest.mark.parametrize("given", [["lr=0.5"], ["optimiser=Adam(0.001)"]])
def test_default_axes_leave_the_users_settings_alone(given):
    study = study_of("digits", settings=[*given, "max_steps=5"], scale="smoke")
    assert [axis.name for axis in study.axes] == ["seed"]
    with pytest.raises(BadInput, match="give one several"):
        study_of("digits", settings=[*given, "seed=3", "max_steps=5"], scale="smoke")


@pytest.mark.parametrize("samples", [0, 1000])
def test_too_many_samples_are_refused_before_training(samples):
    with pytest.raises(BadInput, match="training samples: 1 to 200 can be measured"):
        study_of("digits", settings=["seed=0:2", f"samples={samples}"], scale="smoke")
