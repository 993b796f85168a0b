"""MODEL: networks from the user's files and from packages that may not be there."""

import sys
from types import SimpleNamespace

import pytest
from torch import nn

from flatlens.errors import BadInput, BadModel
from flatlens.models.sources import load_model

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
    assert load_model(f"{mine}:{name}").in_features == inputs


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
    with pytest.raises(BadModel, match=rf"pip install 'flatlens\[{extra}\]'") as caught:
        load_model(spec)
    assert "\n" not in str(caught.value)


def test_timm_is_asked_for_its_weights_unless_a_file_is_given(monkeypatch):
    asked = []

    def create_model(name: str, pretrained: bool) -> nn.Module:
        asked.append((name, pretrained))
        return nn.Linear(2, 2)

    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create_model))
    load_model("timm:vit_tiny")
    load_model("timm:vit_tiny", pretrained=False)
    assert asked == [("vit_tiny", True), ("vit_tiny", False)]


def test_a_failed_download_is_one_line(monkeypatch):
    def create_model(name: str, pretrained: bool) -> nn.Module:
        raise OSError("We couldn't connect\nto the hub")

    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create_model))
    with pytest.raises(BadInput, match=r"timm:vit .*--weights FILE.*couldn't connect to the hub") as caught:
        load_model("timm:vit")
    assert "\n" not in str(caught.value)


def test_transformers_loads_safetensors_alone(monkeypatch):
    asked = {}

    class Net(nn.Linear):
        def __init__(self, config: object) -> None:
            super().__init__(2, 2)

        @classmethod
        def from_pretrained(cls, name: str, use_safetensors: bool) -> "Net":
            asked[name] = use_safetensors
            return cls(None)

    config = SimpleNamespace(from_pretrained=lambda name: SimpleNamespace(architectures=["Net"]))
    fake = SimpleNamespace(AutoConfig=config, Net=Net)
    monkeypatch.setitem(sys.modules, "transformers", fake)
    assert isinstance(load_model("hf:some/net"), Net)
    assert asked == {"some/net": True}
    assert isinstance(load_model("hf:other/net", pretrained=False), Net)
    assert "other/net" not in asked
    del fake.Net
    with pytest.raises(BadModel, match="no architecture 'Net'"):
        load_model("hf:some/net")
