"""Measuring needs none of the packages of `flatlens[study]`; what does need them says so in one line."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).parents[1]
MODULES = {"altair", "jinja2", "loky", "PIL", "sklearn", "vl_convert", "yaml"}
BLOCK = f"""
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {MODULES!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""
USER = """
import torch

def build():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))

def samples():
    return torch.linspace(-1, 1, 30).reshape(10, 3), torch.arange(10) % 2
"""
ARGUMENTS = ("net.py:build", "--weights", "net.safetensors", "--data", "net.py:samples", "--loss", "cross_entropy")
REFUSED = {
    "study digits --out study": "'altair'",
    "reproduce X4 --out x4": "'altair'",
    f"measure {' '.join(ARGUMENTS)} --page page.html": "'altair'",
    "measure net.py:build --data digits --loss mse": "'sklearn'",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bare")
    (folder / "net.py").write_text(USER)
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    save_file(layers.state_dict(), folder / "net.safetensors")
    return folder


def bare(code, folder):
    """Run code in a process that cannot import the packages of the extra."""
    return subprocess.run([sys.executable, "-c", BLOCK + code], cwd=folder, capture_output=True, text=True)


def statuses(commands, folder):
    """Run command lines in one such process; the exit status of each, and what it wrote."""
    code = f"from flatlens.cli import run\nfor words in {commands!r}:\n    print('STATUS', run(words), flush=True)"
    found = bare(code, folder)
    assert found.returncode == 0, found.stderr
    return [line.split()[1] for line in found.stdout.splitlines() if line.startswith("STATUS")], found


def test_the_blocked_packages_are_those_of_the_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {"PIL": "pillow", "sklearn": "scikit-learn", "vl_convert": "vl-convert-python", "yaml": "pyyaml"}
    extra = {line.partition(">=")[0] for line in project["optional-dependencies"]["study"]}
    assert extra == {names.get(module, module) for module in MODULES}
    assert not extra & {line.partition(">=")[0] for line in project["dependencies"]}


def test_a_network_is_measured_in_python(folder):
    code = """
import flatlens as fl
from net import build, samples
lens = fl.Lens(fl.Problem(build(), "cross_entropy", samples()))
assert fl.measure(lens)["relative_flatness_ggn.sum"].value > 0
assert len(fl.check_bounds(lens).frame()) and len(fl.check_invariance(lens, ["mls"]).frame())
import flatlens.data, flatlens.experiments, flatlens.models, flatlens.report.measure, flatlens.training
assert "torch._dynamo" not in sys.modules, "two seconds of import"
"""
    found = bare(code, folder)
    assert found.returncode == 0, found.stderr


def test_the_commands_that_measure_work(folder):
    other = " --weights net.safetensors"
    commands = [
        f"measure {' '.join(ARGUMENTS)}",
        f"measure {' '.join(ARGUMENTS)} --json",
        f"bounds {' '.join(ARGUMENTS)} --bounds mls_chain",
        f"invariance {' '.join(ARGUMENTS)} --measures mls",
        f"compare {' '.join(ARGUMENTS)}{other}",
        *(f"list {kind}" for kind in ("measures", "bounds", "transforms", "experiments")),
    ]
    ended, found = statuses([command.split() for command in commands], folder)
    assert ended == ["0"] * len(commands), found.stderr
    printed = found.stdout.split("STATUS 0\n")[1]
    estimates = json.loads(printed)["estimates"]
    assert {row["measure"] for row in estimates} > {"relative_flatness_ggn.sum", "mls"}


def test_what_needs_the_extra_names_it_in_one_line_and_writes_nothing(folder):
    before = sorted(folder.iterdir())
    ended, found = statuses([command.split() for command in REFUSED], folder)
    assert ended == ["2"] * len(REFUSED)
    told = [line for line in found.stderr.splitlines() if "so far" not in line]
    assert len(told) == len(REFUSED)
    for line, module in zip(told, REFUSED.values(), strict=True):
        assert line.startswith("flatlens: ")
        assert "pip install 'flatlens[study]'" in line
        assert f"No module named {module}" in line
    assert sorted(path for path in folder.iterdir() if path.name != "__pycache__") == [
        path for path in before if path.name != "__pycache__"
    ]


def test_worker_processes_name_the_extra(folder):
    code = """
from flatlens.experiments.runner import run_all
run_all([1], print, lambda *_: None)
"""
    found = bare(code, folder)
    assert found.stderr.splitlines()[-1].startswith(
        "flatlens.errors.MissingExtra: work in several processes needs the extra 'study'"
    )
