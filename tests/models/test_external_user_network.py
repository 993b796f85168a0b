import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from flatlens import user_code
from flatlens.errors import BadInput, BadModel
from flatlens.models import UserNetwork
from flatlens.user_code import code_of, short

NET = """
import torch
from torch import nn
from helper import make

def build(width=8, activation="relu", seed=0, norm=nn.Identity, shape=(1, 2)):
    return make(4, width, 2)

def sized(inputs, outputs, depth=1):
    return nn.Sequential(*[nn.Linear(inputs, inputs) for _ in range(depth)], nn.Linear(inputs, outputs))

class Net(nn.Linear):
    def __init__(self, inputs=3, outputs=2):
        super().__init__(inputs, outputs)

ready = nn.Linear(2, 2)

def nothing():
    return 7

def broken(width=1):
    raise RuntimeError("no network today")
"""
HELPER = """
from torch import nn
import torch

def make(inputs, width, outputs):
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "helper.py").write_text(HELPER)
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    return tmp_path / "net.py"


def test_a_network_has_its_options_and_its_seed(file):
    one = UserNetwork.of(f"{file}:build", {"width": 5})
    assert one.options == {"width": 5, "activation": "relu", "shape": (1, 2)}  # a class is no setting
    before = torch.get_rng_state()
    a, b, c = one.build(), one.build(), replace(one, seed=1).build()
    assert torch.equal(torch.get_rng_state(), before)
    assert a[0].weight.shape == (5, 4)
    assert torch.equal(a[0].weight, b[0].weight)
    assert not torch.equal(a[0].weight, c[0].weight)
    assert len({one, pickle.loads(pickle.dumps(one)), replace(one, seed=1)}) == 2


def test_a_class_of_networks_and_sizes_of_the_data(file):
    assert UserNetwork.of(f"{file}:Net").build().weight.shape == (2, 3)
    sized = UserNetwork.of(f"{file}:sized")
    assert sized.options == {"inputs": None, "outputs": None, "depth": 1}
    assert sized.with_sizes({"inputs": 6, "outputs": 3, "classes": 3}).build()[-1].weight.shape == (3, 6)
    with pytest.raises(BadModel, match="needs the arguments outputs: give defaults, or write --set outputs=VALUE"):
        sized.with_sizes({"inputs": 6}).require_complete()


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("build", {"widht": 3}, "has no argument 'widht': it has width, activation, shape"),
        ("ready", {}, "a study needs a function that builds a new network"),
        ("missing", {}, "unknown function 'missing' in .*"),
    ],
)
def test_what_is_no_builder_is_refused(file, name, given, said):
    with pytest.raises(BadInput, match=said):
        UserNetwork.of(f"{file}:{name}", given)


def test_what_a_builder_returns_or_raises(file):
    with pytest.raises(BadModel, match="returned a int; it must return a torch"):
        UserNetwork.of(f"{file}:nothing").build()
    with pytest.raises(BadInput, match=r"raised RuntimeError: no network today \(net.py, line"):
        UserNetwork.of(f"{file}:broken").build()


@pytest.mark.parametrize("changed", ["net.py", "helper.py"])
def test_code_that_changed_is_refused(file, changed):
    one = UserNetwork.of(f"{file}:build")
    near = file.with_name(changed)
    near.write_text(near.read_text() + "\n# another\n")
    with pytest.raises(BadModel, match="has changed since this process read it"):
        one.build()
    code = (
        f"from flatlens.models import UserNetwork as U; U({one.source!r}, {one.code!r}, {dict(one.options)!r}).build()"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "net.py:build has changed since the study began" in other.stderr


def test_the_hash_is_of_the_code_and_of_the_files_beside_it_that_it_imports(tmp_path):
    (tmp_path / "pack").mkdir()
    files = {
        "top.py": "import os\nfrom pack.inner import thing\n",
        "pack/__init__.py": "",
        "pack/inner.py": "from .deep import thing\n",
        "pack/deep.py": "thing = 1\n",
        "other.py": "x = 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    first = code_of(tmp_path / "top.py")
    (tmp_path / "other.py").write_text("x = 2\n")
    assert code_of(tmp_path / "top.py") == first
    seen = {first}
    for name in ("pack/deep.py", "pack/__init__.py", "top.py"):
        (tmp_path / name).write_text(files[name] + "y = 1\n")
        seen.add(code_of(tmp_path / "top.py"))
    assert len(seen) == 4


def test_names_and_arguments():
    assert short("/a/b/net.py:build") == "net.py:build"
    assert user_code.arguments(lambda a, *rest, b=1, c=[1, "x"], d=print, **more: None) == {
        "a": None,
        "b": 1,
        "c": [1, "x"],
    }
