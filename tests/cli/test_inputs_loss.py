"""A loss that is not given is chosen from the targets, and the choice is said."""

from pathlib import Path

import pytest

from flatlens import cli

NET = """
import torch
from torch import nn
def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3))
def other():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 3))
x = torch.linspace(-1, 1, 40).reshape(10, 4).sin()
def labels(): return x, torch.arange(10) % 3
def numbers(): return torch.utils.data.TensorDataset(x, x[:, :3])
def yes(): return x, x[:, :3] > 0
"""
COMMANDS = {
    "measure": ["net.py:build", "--measures", "mls"],
    "compare": ["net.py:build", "net.py:other", "--measures", "mls"],
    "bounds": ["net.py:build", "--bounds", "mls_chain"],
    "invariance": ["net.py:build", "--measures", "mls"],
}


@pytest.fixture(autouse=True)
def net(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("data", "loss"), [("labels", "cross_entropy"), ("numbers", "half_squared_error")], ids=["labels", "numbers"]
)
def test_it_is_chosen_and_said(command, data, loss, capsys):
    options = [command, *COMMANDS[command], "--data", f"net.py:{data}", "--json"]
    assert cli.run(options) == 0
    chosen, err = capsys.readouterr()
    assert err.count(f"flatlens: --loss: {loss}, chosen from the targets") == 1
    assert cli.run([*options, "--loss", loss]) == 0
    given, err = capsys.readouterr()
    assert "chosen" not in err
    seconds = '"seconds"'
    assert [line for line in chosen.splitlines() if seconds not in line][:5] == given.splitlines()[:5]
    assert f'"loss": "{loss}"' in chosen


def test_it_is_asked_for_where_the_targets_do_not_say(refused):
    words = "--loss is missing, and the targets are neither"
    assert words in refused("measure", "net.py:build", "--data", "net.py:yes")
