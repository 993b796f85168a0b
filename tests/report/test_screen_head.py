"""The head of every screen and page says which weights, data, samples and preparation were measured."""

import html
from pathlib import Path

import pytest
import torch
from builders import NET

import flatlens as fl
from flatlens import cli
from flatlens.report.invariance import write_invariance_page
from flatlens.report.screen import head_of_page, head_of_screen


@pytest.mark.parametrize("command", ["measure", "bounds", "invariance", "compress", "compare"])
def test_screen_and_page_of_every_command_state_the_origin(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    names: dict[str, object] = {}
    exec(NET, names)
    state = names["build"]().state_dict()
    torch.save(state, "one.pt")
    torch.save({name: 2 * tensor for name, tensor in state.items()}, "two.pt")
    files = ["--weights", "one.pt,two.pt" if command == "compare" else "one.pt"]
    options = ["--data", "net.py:samples", "--samples", "12", "--loss", "half_squared_error", "--page", "page.html"]
    assert cli.run([command, "net.py:build", *files, *options]) == 0
    screen = " ".join(capsys.readouterr().out.split())
    page = html.unescape(Path("page.html").read_text())
    assert "12 samples, 3 outputs, 2 layers, half squared error" in screen
    assert "12 samples, 3 outputs, 2 layers, half squared error." in page
    weights = (
        {"weights of one": "one.pt", "weights of two": "two.pt"} if command == "compare" else {"weights": "one.pt"}
    )
    for what, words in {**weights, "data": "net.py:samples; 12 of 20 samples, drawn with seed 0"}.items():
        assert f"{what}: {words}" in screen
        assert f"<dt>{what}</dt><dd>{words}</dd>" in page


def test_invariances_name_the_precision_that_they_were_measured_in(tmp_path):
    """A network in float32 is copied to float64."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    lens = fl.Lens(fl.Problem(net, "mse", (torch.ones(4, 2), torch.zeros(4, 1))))
    found = fl.check_invariance(lens, ["weight_norm"], "layerwise")
    assert "on cpu in float64, torch" in write_invariance_page(found, tmp_path / "page.html").read_text()
    assert fl.measure(lens, "weight_norm").about["dtype"] == "float32"


RANDOM = {"n": 1, "origin": {"weights": "random (seed 0)", "preparation": "images / 255"}}
TRAINED = {"n": 1, "origin": {"weights": "a.pt", "preparation": "images / 255"}}


@pytest.mark.parametrize(
    ("abouts", "told"),
    [
        ({"": TRAINED}, []),
        ({"": RANDOM}, ["Untrained: the weights are random."]),
        ({"a": TRAINED, "b": RANDOM}, ["Untrained: the weights of b are random."]),
        ({"a": RANDOM, "b": RANDOM}, ["Untrained: the weights of a, b are random."]),
    ],
)
def test_untrained_networks_are_named_once(abouts, told):
    page, screen = head_of_page(abouts), [str(line) for line in head_of_screen(abouts)]
    assert page["facts"] == screen[0] == "1 sample"
    assert page["untrained"] == told == screen[1 + len(page["origins"]) :]
    assert ("preparation", "images / 255") in page["origins"]


def test_an_answer_that_says_untrained_says_it_alone() -> None:
    answer = ["The network is untrained: its weights are random."]
    assert "untrained" not in " ".join(map(str, head_of_screen({"": RANDOM}, answer)[1:])).lower()
    assert "Untrained: the weights are random." in map(str, head_of_screen({"": RANDOM}, ["mls is 2."]))


@pytest.mark.parametrize(("count", "lines"), [(6, 7), (7, 2)])
def test_many_different_weights_are_counted_on_a_screen_and_listed_on_a_page(count, lines):
    abouts = {str(i): {"origin": {"weights": f"{i}.pt", "data": "digits"}} for i in range(count)}
    screen = [str(line) for line in head_of_screen(abouts)]
    assert len(screen) == 1 + lines
    assert screen[-1] == "data: digits"
    assert len(head_of_page(abouts)["origins"]) == count + 1
