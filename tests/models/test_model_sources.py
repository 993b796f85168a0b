"""MODEL: networks from the user's files and from packages that may not be there."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flatlens.errors import BadInput, BadModel, MissingExtra
from flatlens.models import external
from flatlens.models.external import load_model

MINE = """
from torch import nn
def build(): return nn.Linear(3, 2)
def wide(width): return nn.Linear(width, 2)
def defaulted(width=5): return nn.Linear(width, 2)
class Net(nn.Linear):
    def __init__(self): super().__init__(4, 2)
ready = nn.Linear(6, 2)
def nothing(): pass
number = 3
def broken(): raise RuntimeError("two\\nlines")
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return str(tmp_path / "mine.py")


@pytest.mark.parametrize(("name", "inputs"), [("build", 3), ("defaulted", 5), ("Net", 4), ("ready", 6)])
def test_what_makes_a_network(mine, name, inputs):
    named = load_model(f"{mine}:{name}")
    assert named.network.in_features == inputs
    assert (named.preparation, named.remark) == (None, "")


@pytest.mark.parametrize(
    ("name", "words"),
    [("wide", "needs the arguments width"), ("nothing", "NoneType"), ("number", "int"), ("broken", "two lines")],
)
def test_what_does_not(mine, name, words):
    with pytest.raises(BadInput, match=words) as caught:
        load_model(f"{mine}:{name}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spec", ["resnet18", "", "timm:", "hf:", "mine"])
def test_a_form_that_is_none_lists_the_forms(mine, spec, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadModel, match=r"file\.py:NAME.*timm:NAME"):
        load_model(spec)
    if spec == "mine":
        with pytest.raises(BadModel, match=r"did you mean mine\.py:NAME"):
            load_model(spec)


@pytest.mark.parametrize(("spec", "package", "extra"), [("timm:vit", "timm", "timm"), ("hf:x", "transformers", "hf")])
def test_a_missing_package_gives_the_command(monkeypatch, spec, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"pip install 'flatlens\[{extra}\]'") as caught:
        load_model(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("lacking", ["torchvision", "package_of_nobody"])
def test_what_a_package_lacks_is_named_not_the_package(monkeypatch, tmp_path, lacking):
    (tmp_path / "timm").mkdir()
    (tmp_path / "timm" / "__init__.py").write_text(f"import {lacking}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    monkeypatch.setitem(sys.modules, lacking, None)
    with pytest.raises(BadModel, match=f"timm is installed, but {lacking} is missing") as caught:
        load_model("timm:resnet18")
    assert f"install the {lacking}" in str(caught.value)
    assert "pip install" not in str(caught.value)


def test_a_torchvision_of_another_torch_is_said(monkeypatch):
    def broken(package: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(external, "import_module", broken)
    with pytest.raises(BadModel, match=r"nms does not exist\): install the torchvision that fits torch"):
        load_model("timm:resnet18")


@pytest.fixture
def timm(monkeypatch):
    """A stand-in that knows two networks, one of them untrained; the real one is in tests/timm."""
    asked = []

    def create_model(name: str, pretrained: bool, **options: int) -> nn.Module:
        asked.append((name, pretrained, options))
        if pretrained and name == "resnet_broken":
            raise OSError("We couldn't connect\nto the hub")
        return nn.Linear(torch.randint(1, 1000, ()), 2)

    settings = {"input_size": (3, 8, 8), "interpolation": "bicubic", "crop_pct": 0.9, "crop_mode": "center",
                "mean": (0.5,), "std": (0.25,)}  # fmt: skip
    known = ["vit_tiny", "vit_small", "resnet_broken"]
    fake = SimpleNamespace(
        create_model=create_model,
        is_model=known.__contains__,
        list_models=lambda: known,
        is_model_pretrained=lambda name: name != "vit_small",
        data=SimpleNamespace(
            resolve_model_data_config=lambda model: settings, create_transform=lambda **options: options
        ),
    )
    monkeypatch.setitem(sys.modules, "timm", fake)
    monkeypatch.setattr("flatlens.models.external.reachable", lambda: True)
    return asked


def test_timm_is_asked_for_its_weights_unless_others_are_wanted(timm):
    trained = load_model("timm:vit_tiny(num_classes=10)")
    assert (trained.weights, trained.remark) == ("timm's, from the hub", "")
    load_model("timm:vit_tiny", "none")
    untrained = load_model("timm:vit_tiny", "random")
    assert "random" in untrained.weights
    assert timm == [("vit_tiny", True, {"num_classes": 10}), ("vit_tiny", False, {}), ("vit_tiny", False, {})]


def test_random_weights_where_there_are_none_are_said_and_come_from_one_seed(timm):
    state = torch.get_rng_state()
    first, second = load_model("timm:vit_small"), load_model("timm:vit_small")
    assert "random" in first.weights
    assert "no trained weights for vit_small" in first.remark
    assert first.network.in_features == second.network.in_features
    assert torch.equal(torch.get_rng_state(), state)


def test_a_failed_download_is_one_line(timm):
    with pytest.raises(BadInput, match=r"timm:resnet_broken .*--weights FILE.*couldn't connect to the hub") as caught:
        load_model("timm:resnet_broken")
    assert "\n" not in str(caught.value)


def test_a_hub_out_of_reach_is_said_with_what_to_do(timm, monkeypatch):
    monkeypatch.setattr("flatlens.models.external.reachable", lambda: False)
    with pytest.raises(BadModel, match=r"hub cannot be reached: give --weights FILE.*--weights random"):
        load_model("timm:resnet_broken")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("timm:vit_tny", "did you mean vit_tiny"),
        ("timm:vit_tiny(10)", "NAME=VALUE with plain values"),
        ("timm:vit_tiny(n=open('x'))", "NAME=VALUE with plain values"),
        ("timm:vit_tiny(n=1", "NAME=VALUE with plain values"),
    ],
)
def test_a_name_or_an_option_that_is_none(timm, spec, words):
    with pytest.raises(BadInput, match=words) as caught:
        load_model(spec)
    assert "\n" not in str(caught.value)
    assert not timm
