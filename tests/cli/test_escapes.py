"""Names may hold what a terminal obeys: it never gets there."""

from pathlib import Path

import pytest
import torch
from rich.table import Table

from flatlens import cli
from flatlens.cli.terminal import note, show
from flatlens.progress import Bar, visible

RED = "fc\x1b[31mred\x1b]0;mine\x07\x9b1m\u202e"
NET = f"""
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module({RED!r}, nn.Linear(4, 3))

    def forward(self, x):
        return getattr(self, {RED!r})(x)

def samples():
    return torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3
"""
ORDERS = set("\x1b\x07\x9b\u202e")


@pytest.fixture
def net(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET, encoding="utf-8")
    return ["net.py:Net", "--data", "net.py:samples", "--loss", "cross_entropy"]


@pytest.mark.parametrize("command", [["measure", "--layers", "fc"], ["measure", "--json"], ["bounds"], ["invariance"]])
def test_names_of_layers(net, capsys, command):
    assert cli.run([*command[:1], *net, *command[1:]]) == 0
    out, err = capsys.readouterr()
    assert "red" in out
    assert not ORDERS & set(out + err)


def test_names_of_tensors(net, refused):
    torch.save({RED: torch.ones(1)}, "w.pt")
    assert not ORDERS & set(refused("measure", *net, "--weights", "w.pt"))


@pytest.mark.parametrize("option", ["--device", "--loss", "--measures", "--weights", "--layers", "--outputs", "--set"])
def test_what_was_typed(net, refused, option):
    assert not ORDERS & set(refused("measure", *net, option, f"{RED}?"))


def test_notes_tables_and_bars(capsys):
    table = Table("name")
    table.add_row(RED)
    show(table, RED)
    note(RED)
    with Bar(delay=0, pause=0) as bar:
        bar(RED, 1, 2)
    out, err = capsys.readouterr()
    assert not ORDERS & set(out + err)
    assert out.count("red") == 2
    assert err.count("red") == 2


def test_what_is_harmless_stays():
    text = "κ_Tr → 3.5 \t é\n漢字"
    assert visible(text) == text
