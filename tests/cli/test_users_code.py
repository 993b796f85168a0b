"""The user's code fails while it is measured: one line with its file and line; --traceback shows the rest."""

import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from flatlens import cli

NET = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
y = torch.arange(300) % 3
odd = x.index_fill(0, torch.tensor(290), 9.0)

class Net(nn.Module):
    def __init__(self, how=""):
        super().__init__()
        self.how, self.fc = how, nn.Linear(4, 3)

    def forward(self, x):
        if self.how and (x > 8).any():
            if self.how == "exit":
                sys.exit(3)
            raise ValueError("cannot\\n\\x1b[31mread")
        return self.fc(x)

class Data(Dataset):
    def __init__(self, how):
        self.how = how

    def __len__(self):
        return 300

    def __getitem__(self, i):
        if i == 290 and self.how == "raises":
            raise KeyError("lost")
        if i == 290 and self.how == "exits":
            sys.exit("bye")
        if i == 290 and self.how == "ragged":
            return x[i, :3], y[i]
        return x[i], y[i]

def collate(items):
    if any(bool((a > 8).any()) for a, b in items):
        raise RuntimeError("no batch")
    return torch.stack([a for a, b in items]), torch.stack([b for a, b in items])

def build(): return Net()
def raising(): return Net("raise")
def exiting(): return Net("exit")
def pair(): return x, y
def odd_pair(): return odd, y
def raises(): return Data("raises")
def exits(): return Data("exits")
def ragged(): return Data("ragged")
def loader(): return DataLoader(TensorDataset(odd, y), 32, collate_fn=collate)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("late.py").write_text(NET.lstrip("\n"))


CASES = [
    ("raising", "odd_pair", "ValueError: cannot", 18),
    ("exiting", "odd_pair", "SystemExit: 3", 17),
    ("build", "raises", "KeyError: 'lost'", 30),
    ("build", "exits", "SystemExit: bye", 32),
    ("build", "loader", "RuntimeError: no batch", 39),
]


@pytest.mark.parametrize(("model", "data", "words", "line"), CASES)
def test_one_line_with_the_users_own_file_and_line(folder, refused, model, data, words, line):
    said = refused("measure", f"late.py:{model}", "--data", f"late.py:{data}", "--loss", "cross_entropy")
    assert words in said
    assert f"late.py, line {line}" in said
    assert "--traceback" in said
    assert "\x1b" not in said


def test_samples_that_do_not_fit_together(folder, refused):
    said = refused("measure", "late.py:build", "--data", "late.py:ragged", "--loss", "cross_entropy")
    assert "290" in said


def test_the_rest_is_shown_on_request(folder, capsys):
    words = ["measure", "late.py:raising", "--data", "late.py:odd_pair", "--loss", "cross_entropy", "--traceback"]
    assert cli.run(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback (most recent call last)" in err
    assert "line 18, in forward" in err
    assert "\x1b" not in err
    assert err.splitlines()[-1].startswith("flatlens: ")


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (TypeError("at\nodds"), 1, "TypeError: at odds: an unexpected error (please report it"),
        (MemoryError(), 2, "out of memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), 2, "--samples"),
        (OSError(28, "No space left on device", "x.html"), 2, "No space left on device: x.html"),
    ],
)
def test_what_nobody_foresaw_is_one_line_too(folder, capsys, monkeypatch, error, status, words):
    monkeypatch.setattr(sys.modules["flatlens.cli.networks"], "generator_of", Mock(side_effect=error))
    assert cli.run(["measure", "late.py:build", "--data", "late.py:pair", "--loss", "cross_entropy"]) == status
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_a_mistake_is_not_blamed_on_the_users_code(folder, refused):
    said = refused("measure", "late.py:build", "--data", "late.py:pair", "--loss", "cross_entropy", "--memory", "much")
    assert "--traceback" not in said
