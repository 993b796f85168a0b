"""`flatlens path` and `flatlens plane`: the answer first, pages offline, one line for every mistake."""

import json
from pathlib import Path

import pytest
import torch

import flatlens as fl
from flatlens import cli

NET = """
import torch
from torch import nn

def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()

def wide(): return nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3)).double()
def broken():
    net = build()
    net[0].weight.data[0, 0] = float("nan")
    return net

x = torch.linspace(-1, 1, 80).reshape(20, 4).sin().double()
def samples(): return x, torch.arange(20) % 3
"""
OPTIONS = ["--data", "net.py:samples", "--loss", "cross_entropy"]


@pytest.fixture(autouse=True)
def _net(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    names: dict[str, object] = {}
    exec(NET, names)
    for number in range(4):
        net, (x, y) = names["build"](number), names["samples"]()
        optimiser = torch.optim.Adam(net.parameters(), 0.05)
        for _ in range(100):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            optimiser.step()
        torch.save(net.state_dict(), f"{number}.pt")
    net.load_state_dict(torch.load("0.pt"))
    twin = fl.transforms.permutation.apply(fl.Problem(net, "cross_entropy", names["samples"]())).model
    torch.save(twin.state_dict(), "twin.pt")


def test_the_first_line_of_a_path_says_whether_it_is_one_basin(capsys):
    command = ["path", "net.py:build", "--weights", "0.pt,twin.pt", *OPTIONS, "--points", "5"]
    assert cli.run([*command, "--match-neurons", "--page", "path.html", "--save", "path.safetensors"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("One basin: the weights are the same along the line after matching neurons.")
    assert "Not shown: " in out
    page = Path("path.html").read_text()
    assert "<svg" in page
    assert "a lower path may exist" in page
    assert "http" not in page.split("<main>")[1].replace("http://www.w3.org", "")
    assert fl.LossPath.load("path.safetensors")["matched line"].high == 0.0
    assert cli.run([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["path"] for row in found["paths"]] == ["line"]
    assert found["looks"][0]["t"] == 0.0
    assert len(found["looks"]) == found["paths"][0]["looks"]


def test_strict_ends_with_1_unless_a_path_joins(capsys):
    command = ["path", "net.py:build", *OPTIONS, "--points", "5", "--strict", "--weights"]
    assert cli.run([*command, "0.pt", "--weights", "0.pt"]) == 0
    assert cli.run([*command, "0.pt", "--weights", "1.pt", "--rtol", "1e-6"]) == 1


def test_the_first_line_of_a_plane_says_how_far_the_quadratic_holds(capsys):
    command = ["plane", "net.py:build", "--weights", "0.pt", *OPTIONS, "--points", "3"]
    assert cli.run([*command, "--page", "plane.html", "--save", "plane.safetensors"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("The quadratic holds along the eigenvector of ")
    assert "a valley that turns looks closed" in " ".join(out.split())
    assert Path("plane.html").read_text().count("<svg") >= 2
    assert tuple(fl.LossPlane.load("plane.safetensors").loss.shape) == (3, 3)
    assert cli.run([*command, "--directions", "random", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["plane"]) == 9
    assert {row["direction"] for row in found["quadratic"]} == {"random direction 1", "random direction 2"}
    assert cli.run([*command, "--checkpoints", "1.pt,2.pt", "--checkpoints", "3.pt", "--page", "plane.html"]) == 0
    assert "principal components of 3 checkpoints" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("path", "net.py:build", "--weights", "0.pt"), "expected at least two networks"),
        (("path", "net.py:build", "--weights", "0.pt,1.pt,2.pt"), "MODEL: expected two networks, got 3"),
        (("path", "net.py:build", "net.py:wide"), "MODEL, the second: the shapes differ: '0.weight' has (8, 4) and"),
        (("path", "net.py:build", "net.py:broken"), "entries of '0.weight' are NaN or inf"),
        (("path", "net.py:build", "--weights", "0.pt,1.pt", "--bends", "-1"), "--bends -1: expected a whole number"),
        (("plane", "net.py:broken"), "entries of '0.weight' are NaN or inf"),
        (("plane", "net.py:build", "--rtol", "0"), "--rtol 0.0: expected a positive number"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_one_line(command, told, refused):
    assert told in refused(*command, *OPTIONS)
