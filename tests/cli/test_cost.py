"""What is told of time and memory before work starts, and the refusal of what does not fit."""

import json
import re
from pathlib import Path

import pytest
from builders import Gauge, lens_in_chunks

import flatlens as fl
from flatlens import cli, forecast
from flatlens.cli import terminal

NET = """
import torch
from torch import nn
def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
x = torch.linspace(-1, 1, 160).reshape(40, 4).sin()
def samples(): return x, torch.arange(40) % 3
"""


@pytest.fixture
def net(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    return ["measure", "net.py:build", "--data", "net.py:samples", "--loss", "cross_entropy", "--measures", "mls"]


@pytest.fixture
def lens():
    return lens_in_chunks()


def test_work_that_lasts_is_announced_with_its_memory(net, capsys, monkeypatch):
    monkeypatch.setattr(terminal, "DELAY", 0.0)
    assert cli.run(net) == 0
    out, err = capsys.readouterr()
    assert "67 parameters, 40 samples, 1 forward and 3 backward passes: " in err
    assert "GiB of memory (" in err
    monkeypatch.setattr(terminal, "DELAY", 1000.0)
    assert cli.run(net) == 0
    again, err = capsys.readouterr()
    assert err == ""
    assert out == again  # the trials leave no trace in the numbers


@pytest.mark.parametrize("command", ["bounds", "invariance"])
def test_the_other_commands_announce_too(net, capsys, monkeypatch, command):
    monkeypatch.setattr(terminal, "DELAY", 0.0)
    options = ["--measures", "mls"] if command == "invariance" else ["--bounds", "mls_chain"]
    assert cli.run([command, *net[1:-2], *options]) == 0
    assert "40 samples" in capsys.readouterr().err


def test_a_dry_run_says_how_long_and_ends(net, capsys, monkeypatch):
    for command, *options in (
        ["measure", *net[1:]],
        ["bounds", *net[1:-2]],
        ["invariance", *net[1:]],
        ["compare", net[1], *net[1:]],
    ):
        assert cli.run([command, *options, "--dry-run"]) == 0
        text = " ".join(capsys.readouterr().out.split("Only trials on a few samples were run")[0].split())
        took = r"(about \d+ s|less than 1 s) and [\d.]+ GiB for .*67 parameters on 40 samples: 1 forward and 3 backward"
        assert re.match(took, text)
        assert ("measurements of" in text) == (command in ("invariance", "compare"))
    assert cli.run([*net, "--dry-run", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert " for 1 number of 67 parameters on 40 samples: " in answer["answer"][0]
    assert {row["measure"] for row in answer["measures"]} == {"mls", "the pass", "the rest", "the checks"}
    assert "estimates" not in answer


def test_a_dry_run_runs_the_network_on_few_samples(net, capsys, monkeypatch):
    with Path("net.py").open("a") as file:
        file.write("""
class Few(nn.Sequential):
    def forward(self, x):
        assert len(x) < 40
        return super().forward(x)
def few(): return Few(*build())
def ignored(): return x, torch.cat([torch.full((20,), -100), torch.arange(20) % 3])
""")
    assert cli.run(["measure", "net.py:few", *net[2:], "--dry-run"]) == 0
    groups = ["--group", "a=net.py:few,net.py:few", "--group", "b=net.py:few,net.py:few"]
    assert cli.run(["compare", *groups, *net[2:], "--dry-run"]) == 0
    assert " 4 measurements of 1 number of 67 parameters on 40 samples" in " ".join(capsys.readouterr().out.split())
    # the first samples have no labels: more are tried
    assert cli.run(["measure", "net.py:build", "--data", "net.py:ignored", *net[4:], "--dry-run"]) == 0
    assert cli.run([*net, "--measures", "ml", "--dry-run"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_does_not_fit_is_refused_in_one_line(net, capsys, monkeypatch):
    monkeypatch.setattr(forecast, "meter", lambda device: Gauge(left=10))
    assert cli.run(net) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    for word in ("memory", "--outputs 2", "--anyway"):
        assert word in err
    assert cli.run([*net, "--anyway"]) == 0


def test_smaller_chunks_are_advised_where_they_would_do(lens, monkeypatch):
    monkeypatch.setattr(forecast, "meter", lambda device: Gauge(left=30_000))  # one sample takes some 1400 bytes
    with pytest.raises(fl.errors.BadInput, match=r"--memory 1MiB"):
        terminal.announce(lens, lambda few: None)


def test_json_stays_json_where_work_is_announced(net, capsys, monkeypatch):
    monkeypatch.setattr(terminal, "DELAY", 0.0)
    assert cli.run([*net, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["about"]["n"] == 40


@pytest.mark.slow
@pytest.mark.parametrize("case", ["lenet", "transformer", "file"])
def test_what_is_announced_is_used(case):
    pytest.importorskip("psutil")
    from benchmarks import machine

    assert 0.75 <= machine.answer("announced", "measured", case)["ratio"] <= 1.33


def test_samples_that_no_trial_can_take_are_measured_all_the_same(net, capsys):
    with Path("net.py").open("a") as file:
        file.write("def ignored(): return x, torch.cat([torch.full((20,), -100), torch.arange(20) % 3])\n")
        file.write("def batch(): return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False))\n")
    assert cli.run(["measure", "net.py:build", "--data", "net.py:ignored", *net[4:]]) == 0
    own_statistics = ["--batchnorm", "train", "--ghost-batch", "20"]
    assert cli.run(["measure", "net.py:batch", *net[2:], *own_statistics]) == 0
    assert "mls" in capsys.readouterr().out
