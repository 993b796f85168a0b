"""Every command on a terminal of 60, 80 and 120 columns: no line is wider, and no number is cut."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flatlens import cli

WIDTHS = (60, 80, 120)
NETWORK = """
import torch
from torch import nn

def a_long_name_of_a_network_that_was_trained_with_stochastic_gradient_descent(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential()
    net.add_module("a_very_long_name_of_a_layer_without_any_dots_in_it", nn.Linear(4, 8))
    net.add_module("relu", nn.ReLU())
    net.add_module("encoder_layers_0_self_attention_output_projection", nn.Linear(8, 1))
    with torch.no_grad():
        net[0].weight.mul_(1e-18)
        net[2].weight.mul_(1e-9)
    return net

def another_long_name_of_a_network_that_was_trained_with_sharpness_aware_minimisation():
    return a_long_name_of_a_network_that_was_trained_with_stochastic_gradient_descent(1)

x = torch.linspace(-1, 1, 160).reshape(40, 4).sin() * 1e12
y = x[:, :1] / 3e5

def samples(): return x, y

def held_out(): return x[:20] / 2, y[:20] / 9
"""
MODELS = [f"net.py:{line[4:].partition('(')[0]}" for line in NETWORK.splitlines() if line.startswith("def a")]
DATA = ["--data", "net.py:samples", "--test", "net.py:held_out", "--loss", "half_squared_error"]
MEASURED = ["--measures", "mls,weight_norm,log_volume,relative_flatness,generalisation_gap"]
COMMANDS = {
    "measure": [MODELS[0], *DATA, *MEASURED],
    "compare": [*MODELS, *DATA, *MEASURED],
    "bounds": [MODELS[0], *DATA, "--bounds", "linear_stability,mls_chain"],
    "invariance": [MODELS[0], *DATA, *MEASURED],
    "compress": [MODELS[0], *DATA],
    "path": [*MODELS, *DATA[:2], *DATA[4:], "--match-neurons", "--points", "3"],  # it takes no held-out data
    "plane": [MODELS[0], *DATA, "--points", "3"],
    "list": ["measures"],
    "data": ["list"],
}
TRAINED = {
    "study": ["digits", "--scale", "smoke", "--out", "study", "--measures", "mls,sharpness", "--set", "lr=0.1"],
    "reproduce": ["X3", "--scale", "smoke", "--out", "x3", "--workers", "1"],
}
RUN = """
import fcntl, json, struct, sys, termios
from flatlens import cli
import flatlens.report, flatlens.report.reproduction
flatlens.report.write_study_page = flatlens.report.reproduction.write_atlas = lambda *given, **options: []
for width in map(int, sys.argv[1].split(",")):
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    for command in json.loads(sys.argv[2]):
        print(f"@@@ {command[0]} {width}", flush=True)
        assert cli.run(command) == 0
"""
NUMBER = re.compile(r"(?<![\\w.:/-])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.]*\w)")


def screens(folder: Path, commands: list[list[str]]) -> dict[tuple[str, int], str]:
    """Run commands in a terminal of each width, and return what is seen on it."""
    ours, theirs = pty.openpty()
    settings = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", RUN, ",".join(map(str, WIDTHS)), json.dumps(commands)],
        cwd=folder, env=settings | {"TERM": "xterm-256color"}, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 2**16)
        except OSError:  # Linux says so at the end
            break
        if not part:
            break
        seen += part
    assert process.wait() == 0, seen.decode()[-2000:]
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode()).replace("\r\n", "\n")
    _, *parts = re.split(r"^@@@ (\w+) (\d+)\n", text, flags=re.MULTILINE)
    return {(name, int(width)): screen for name, width, screen in zip(*[iter(parts)] * 3, strict=True)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("widths")
    (found / "net.py").write_text(NETWORK)
    return found


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[tuple[str, int], str]:
    return screens(folder, [[name, *options] for name, options in COMMANDS.items()])


def numbers(value: object) -> Iterator[float]:
    """Yield all numbers in a JSON document."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from numbers(each)
    elif isinstance(value, str):
        yield from map(float, NUMBER.findall(value))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def spellings(value: float) -> set[str]:
    """Return a number, its share and its error as a screen may round them: 4.1e+12, 4.095e12, 1e-5."""
    found = {f"{each:.{digits}g}" for each in (value, 1.96 * value, value + 1) for digits in (1, 2, 3, 4)}
    found.add(f"{value + 1:.0e}")
    return found | {re.sub(r"e([-+])0?", lambda e: "e" + e[1].strip("+"), each) for each in found}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_line_is_wider_than_the_terminal(command: str, width: int, seen: dict[tuple[str, int], str]) -> None:
    lines = seen[command, width].splitlines()
    assert len(lines) > 5
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if "…" in line or "..." in line]


@pytest.mark.parametrize("command", ["measure", "compare", "bounds", "invariance"])
def test_every_number_is_whole(
    command: str,
    seen: dict[tuple[str, int], str],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    assert cli.run([command, *COMMANDS[command], "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    known = set().union(*map(spellings, numbers(answer)))
    shown = {width: set(NUMBER.findall(seen[command, width])) for width in WIDTHS}
    large = {number for number in shown[120] if "e" in number}
    assert len(large) > 2  # the numbers that a narrow screen would cut
    assert large <= known
    assert all({number for number in shown[width] if "e" in number} <= large for width in WIDTHS)  # columns may go
    if command == "measure":
        of_network = [row["value"] for row in answer["estimates"] if not row["layer"] and row["value"] is not None]
        assert min(of_network) < -1e12
        for value in of_network:
            assert all(f"{value:.4g}" in shown[width] for width in WIDTHS), value


def test_studies_and_reproductions_fit_too(folder: Path) -> None:
    found = screens(folder, [[name, *options] for name, options in TRAINED.items()])
    assert len(found) == len(TRAINED) * len(WIDTHS)
    for (command, width), text in found.items():
        lines = text.splitlines()
        assert max(map(len, lines)) <= width, command
        assert "…" not in text
        words = set(NUMBER.findall(found[command, 120]))
        assert words <= set(NUMBER.findall(text)), (command, width)  # no number is folded
