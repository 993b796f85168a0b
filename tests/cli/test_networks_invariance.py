"""`flatlens invariance`: a table in words on stdout, JSON for machines, one line for every mistake."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import flatlens as fl
from flatlens import cli
from flatlens.estimate import Estimate, undefined
from flatlens.measures import MEASURES
from flatlens.report.invariance import invariance_screen, write_invariance_page
from flatlens.transforms import TRANSFORMS, Applied, InvarianceReport
from flatlens.transforms.invariance import cell_of

NET = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).double()

def line():
    return nn.Sequential(nn.Linear(4, 3)).double()

x = torch.linspace(-1, 1, 80).reshape(20, 4).sin().double()
def samples(): return x, torch.arange(20) % 3
"""
OPTIONS = ["--data", "net.py:samples", "--loss", "cross_entropy"]


@pytest.fixture(autouse=True)
def _net(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)


def test_the_screen_says_in_words_what_stays(capsys):
    assert cli.run(["invariance", "net.py:build", *OPTIONS, "--strict"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert rows["mls"].count("yes") == 4
    assert rows["relative_flatness_ggn"].split()[2:4] == ["yes", "no"]
    assert "no x" in rows["ggn_trace"]
    assert "batchnorm_folding, batchnorm_scale: not applied here" in out
    assert "hold" in out
    assert "NO " not in out.replace("NO in capitals", "")
    assert max(map(len, out.splitlines())) <= 100
    assert len(out.splitlines()) < 80


def test_the_json_is_the_frame(capsys):
    command = ["invariance", "net.py:build", *OPTIONS, "--measures", "mls,local_volume(top_k=2)", "--json"]
    assert cli.run([*command, "--transforms", "layerwise,feature_normalization.published"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {cell["measure"] for cell in found["cells"]} == {"mls", "local_volume(top_k=2)"}
    assert set(found["transforms"]) == {"layerwise", "feature_normalization.published"}
    assert found["transforms"]["layerwise"]["links"] == ["0 -> 2", "2 -> 4"]
    assert found["transforms"]["layerwise"]["difference"] < 1e-12
    assert found["left_out"] == {}
    assert found["about"]["n"] == 20


def test_the_seed_decides(capsys):
    found = []
    for seed in (1, 1, 2):
        command = ["invariance", "net.py:build", *OPTIONS, "--measures", "ggn_trace", "--transforms", "neuronwise"]
        assert cli.run([*command, "--seed", str(seed), "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["cells"][0]["after"])
    assert found[0] == found[1] != found[2]


def test_nothing_to_move_is_said(capsys):
    assert cli.run(["invariance", "net.py:line", *OPTIONS, "--strict"]) == 0
    out, _ = capsys.readouterr()
    assert "not applied here. 0: its features are the network's outputs" in " ".join(out.split())


def wrong(*_args: object, **_options: object) -> InvarianceReport:
    cells = [
        cell_of(TRANSFORMS["layerwise"], MEASURES["mls"], "mls", Estimate(1.0), Estimate(after), torch.float64)
        for after in (3.0, 300.0, 1.01)
    ]
    cells = [replace(cell, measure=f"mls{number}") for number, cell in enumerate(cells)]
    return InvarianceReport(cells, {"layerwise": Applied(1e-16, ("0 -> 2",))}, {}, {"n": 20})


def test_strict_is_1_where_a_declaration_fails(capsys, monkeypatch):
    monkeypatch.setattr(fl, "check_invariance", wrong, raising=False)
    assert cli.run(["invariance", "net.py:build", *OPTIONS]) == 0
    out = capsys.readouterr().out
    assert "NO x3 " in out
    assert "NO x3e2" in out
    assert "NO +1.0%" in out
    assert "Not as declared: mls0 under layerwise" in out
    assert cli.run(["invariance", "net.py:build", *OPTIONS, "--strict"]) == 1
    assert cli.run(["invariance", "net.py:build", *OPTIONS, "--strict", "--json"]) == 1


def test_colours_are_not_alone():
    console = Console(width=100, force_terminal=True, color_system="standard")
    with console.capture() as captured:
        console.print(invariance_screen(wrong()))
    assert "\x1b[1;31mNO x3" in captured.get()


def test_it_explains_itself_with_an_example(capsys):
    assert cli.run(["invariance", "--help"]) == 0
    assert "flatlens invariance" in capsys.readouterr().out.split("Usage:")[1].partition("example:")[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["net.py:build", *OPTIONS, "--transforms", "layer-wise"], "did you mean layerwise"),
        (["net.py:build", *OPTIONS, "--measures", "mlss"], "did you mean mls"),
        (["net.py:build", *OPTIONS, "--transform", "layerwise"], "--transforms"),
        (["net.py:nothing", *OPTIONS], "nothing"),
    ],
)
def test_a_mistake_is_one_line_and_2(refused, arguments, words):
    assert words in refused("invariance", *arguments)


def test_transforms_are_listed(capsys):
    assert cli.run(["list", "transforms"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in TRANSFORMS)
    assert cli.run(["list", "transforms", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["transforms"]
    assert [row["name"] for row in rows] == list(TRANSFORMS)
    assert rows[0]["declared_as"] == "layerwise"
    assert [row["id"] for row in rows] == [f"R{n}" for n in (1, 2, 3, 4, 4, 5, 5, 6, 7, 8, 9, 9, 10)]


def test_a_page_says_undefined_and_explains_its_words(tmp_path):
    about = {"model": "Net", "device": "cpu", "dtype": "float64", "versions": {"torch": "2"}}
    missing = undefined("a reason")
    cell = cell_of(TRANSFORMS["layerwise"], MEASURES["mls"], "mls", missing, missing, torch.float64)
    report = InvarianceReport([cell], {"layerwise": Applied(0.0, ("0 -> 2",))}, {}, about)
    page = write_invariance_page(report, tmp_path / "page.html").read_text()
    assert '<td class="number">undefined</td>' in page
    assert "-: undefined before or after" in page
    assert "NO in capitals" in page
