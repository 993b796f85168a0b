"""`flatlens compare`: checkpoints in, ranks out; one line for every mistake."""

import json
from pathlib import Path

import pytest
import torch

from flatlens import cli
from flatlens.cli.networks import unique

NET = """
import torch
from torch import nn

def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()

def second(): return build(1)
def five(): return nn.Sequential(nn.Linear(4, 5)).double()
def broken():
    net = build()
    net[0].weight.data[0, 0] = float("nan")
    return net

x = torch.linspace(-1, 1, 80).reshape(20, 4).sin().double()
def samples(): return x, torch.arange(20) % 3
def held_out(): return x + 0.3, (torch.arange(20) + 1) % 3
def noise(): return torch.randn(20, 4).double(), torch.arange(20) % 3
"""
OPTIONS = ["--data", "net.py:samples", "--loss", "cross_entropy"]


@pytest.fixture(autouse=True)
def _net(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    names: dict[str, object] = {}
    exec(NET, names)
    for number in range(3):
        net = names["build"](number)
        torch.save(net.state_dict(), f"epoch{number}.pt")
    state = net.state_dict()
    torch.save({k: 10 * v if k.startswith("0") else v / 10 if k == "2.weight" else v for k, v in state.items()},
               "rescaled.pt")  # fmt: skip
    torch.save({"other": torch.ones(2)}, "foreign.pt")


def weights(*files):
    return [part for file in files for part in ("--weights", file)]


def compared(capsys, *arguments):
    assert cli.run(["compare", *arguments, *OPTIONS, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_several_weights_of_one_network(capsys):
    found = compared(capsys, "net.py:build", *weights("epoch0.pt", "epoch2.pt", "rescaled.pt"))
    ranks = {(row["measure"], row["model"]): row["rank"] for row in found["ranks"]}
    assert ranks["mls", "epoch2"] == ranks["mls", "rescaled"]
    assert ranks["weight_norm", "epoch2"] < ranks["weight_norm", "rescaled"]
    assert [row["model"] for row in found["networks"]] == ["epoch0", "epoch2", "rescaled"]
    assert found["agreement"]["all"]["networks"] == 3
    assert found["agreement"]["with_gap"] == []


def test_the_screen_says_who_and_by_how_much(capsys):
    assert cli.run(["compare", "net.py:build", *weights("epoch0.pt,epoch1.pt"), *OPTIONS, "--measures", "pass"]) == 0
    out, err = capsys.readouterr()
    assert "flatlens: 2 measurements" in err or not err  # told where the machine is slow
    assert "epoch0" in out
    assert "Kendall's W" in out
    assert max(map(len, out.splitlines())) <= 100


def test_several_models_and_their_names(capsys):
    found = compared(capsys, "net.py:build", "net.py:second", "--name", "first, last", "--measures", "mls")
    assert {row["model"] for row in found["ranks"]} == {"first", "last"}
    found = compared(capsys, "net.py:build", "net.py:second", *weights("epoch0.pt", "epoch2.pt"))
    assert {row["model"] for row in found["ranks"]} == {"epoch0", "epoch2"}


def test_held_out_data_brings_the_gap(capsys):
    found = compared(capsys, "net.py:build", "net.py:second", "--test", "net.py:held_out", "--measures", "mls")
    assert all(row["generalisation_gap"] is not None for row in found["networks"])
    assert [row["measure"] for row in found["agreement"]["with_gap"]] == ["mls"]


def test_the_data_are_read_once_for_all(capsys):
    """A function that draws new samples at each call gives all networks the same ones."""
    command = ["compare", "net.py:build", "net.py:second", "--data", "net.py:noise", "--loss", "cross_entropy"]
    assert cli.run([*command, "--measures", "mls", "--json"]) == 0
    json.loads(capsys.readouterr().out)


def test_a_page_is_written(capsys):
    assert cli.run(["compare", "net.py:build", "net.py:second", *OPTIONS, "--page", "page.html"]) == 0
    assert "page written: page.html" in capsys.readouterr().err
    assert "2 networks compared" in Path("page.html").read_text()


def test_the_seed_decides(capsys):
    def value(seed):
        arguments = ["--measures", "average_sharpness", "--seed", seed]
        return compared(capsys, "net.py:build", "net.py:second", *arguments)["ranks"][0]["value"]

    assert value("1") == value("1") != value("2")


@pytest.mark.parametrize(("labels", "short"), [
    (["a.pt", "b.pt"], ["a", "b"]),
    (["runs/x/networks/1", "runs/y/networks/1"], ["x/networks/1", "y/networks/1"]),
    (["net.py:build", "timm:resnet18"], ["build", "timm:resnet18"]),
    (["a.pt", "a.safetensors"], ["a.pt", "a.safetensors"]),
    (["net.py:build"] * 3, ["build 1", "build 2", "build 3"]),
    (["runs/a/", "runs/b/"], ["a", "b"]),
])  # fmt: skip
def test_short_names(labels, short):
    assert unique(labels) == short


@pytest.mark.parametrize(("arguments", "words"), [
    ([*OPTIONS], "expected at least two networks, got 0 MODELs"),
    (["net.py:build", *OPTIONS], "got 1 MODEL and 0 --weights: name two"),
    (["net.py:build", *weights("epoch0.pt"), *OPTIONS], "got 1 MODEL and 1 --weights"),
    (["net.py:build", "net.py:second", *weights("epoch0.pt"), *OPTIONS], "--weights: 1 for 2 MODELs"),
    (["net.py:build", "net.py:five", *OPTIONS], "outputs of build: 3, of five: 5"),
    (["net.py:build", "net.py:broken", *OPTIONS], "NaN"),
    (["net.py:build", "net.py:broken", *OPTIONS], "[broken]"),
    (["net.py:build", "net.py:nothing", *OPTIONS], "nothing"),
    (["net.py:build", *weights("epoch0.pt", "none.pt"), *OPTIONS], "none.pt"),
    (["net.py:build", *weights(",".join(["a" * 20] * 20)), *OPTIONS], f"no file '{'a' * 20}'"),  # too long for a name
    (["net.py:build", *weights("epoch0.pt", "foreign.pt"), *OPTIONS], "foreign.pt does not fit the network"),
    (["net.py:build", "net.py:second", "--loss", "mse"], "--data is missing"),
    (["net.py:build", "net.py:second", *OPTIONS, "--test", "net.py:nothing"], "nothing"),
    (["net.py:build", "net.py:second", *OPTIONS, "--name", "a"], "--name a: expected 2 different names"),
    (["net.py:build", "net.py:second", *OPTIONS, "--name", "a,a"], "--name a,a"),
    (["net.py:build", "net.py:second", *OPTIONS, "--measures", "mlss"], "did you mean mls"),
    (["net.py:build", "net.py:second", *OPTIONS, "--measures", "loss"], "name at least one other measure"),
    (["net.py:build", "net.py:second", *OPTIONS, "--page", "no/page.html"], "there is no folder no"),
    (["net.py:build", "net.py:second", *OPTIONS, "--strict"], "--strict"),
])  # fmt: skip
def test_a_mistake_is_one_line_and_2(refused, arguments, words):
    assert words in refused("compare", *arguments)


def test_it_explains_itself_with_an_example(capsys):
    assert cli.run(["compare", "--help"]) == 0
    assert "flatlens compare" in capsys.readouterr().out.split("Usage:")[1].partition("example:")[2]


def grouped(*groups):
    return [part for group in groups for part in ("--group", group)]


def test_groups_of_weights_are_compared_in_pairs(capsys):
    arguments = ["net.py:build", *grouped("old=epoch0.pt,epoch1.pt,epoch2.pt", "new=epoch1.pt,epoch2.pt,rescaled.pt")]
    found = compared(capsys, *arguments, "--paired", "--measures", "mls,ggn_trace")
    assert found["groups"] == {"old": ["old 1", "old 2", "old 3"], "new": ["new 1", "new 2", "new 3"]}
    assert found["paired"]
    rows = {row["measure"]: row for row in found["differences"]}
    assert {"mls", "ggn_trace", "loss", "accuracy"} <= rows.keys()
    assert rows["mls"]["decides"]
    assert not rows["ggn_trace"]["decides"]
    assert found["answer"]
    assert all({"network", "reason", "loss", "accuracy"} == row.keys() for row in found["not_ranked"])


def test_groups_on_screen_and_page(capsys):
    arguments = [*grouped("a=net.py:build,net.py:second", "b=net.py:second,net.py:build"), *OPTIONS]
    assert cli.run(["compare", *arguments, "--measures", "mls", "--page", "page.html"]) == 0
    assert "b compared with a" in capsys.readouterr().out
    assert "2 groups of networks compared" in Path("page.html").read_text()


@pytest.mark.parametrize(("arguments", "words"), [
    (["net.py:build", *grouped("a", "b=epoch0.pt")], "--group a: expected NAME=FILE,FILE"),
    (["net.py:build", *grouped("a=epoch0.pt")], "expected at least two groups"),
    (["net.py:build", *grouped("a=epoch0.pt,epoch1.pt", "b=epoch2.pt"), "--paired"], "of one size with --paired"),
    (["net.py:build", "net.py:second", "--paired"], "expected at least two groups"),
    (["net.py:build", "net.py:second", *grouped("a=epoch0.pt", "b=epoch2.pt")], "give at most one MODEL"),
    (["net.py:build", *grouped("a=epoch0.pt", "b=epoch2.pt"), "--name", "x,y"], "neither --weights nor --name"),
    (["net.py:build", *grouped("a=epoch0.pt", "b=none.pt")], "none.pt"),
])  # fmt: skip
def test_a_mistake_in_groups_is_one_line_and_2(refused, arguments, words):
    assert words in refused("compare", *arguments, *OPTIONS)
