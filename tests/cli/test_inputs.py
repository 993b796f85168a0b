"""The network of a study that somebody sent runs no Python file unless the user says so."""

import io
import json
import random
import sys

import pytest
import torch
from safetensors.torch import save_file

from flatlens import cli
from flatlens.cli.inputs import code_in
from flatlens.data.sources import UserData, _contents
from flatlens.experiments.settings import Axis, NetworkSettings, Study
from flatlens.models import MLP, UserNetwork
from flatlens.training import SGD, Training
from flatlens.user_code import code_of

CODE = """
from pathlib import Path
import torch
Path({mark!r}).touch()

def build():
    Path({mark!r}).touch()
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))

def samples():
    Path({mark!r}).touch()
    return torch.eye(3).repeat(4, 1), torch.arange(12) % 2
"""
COMMANDS = ("measure", "bounds", "invariance", "compress", "compare")


def received(tmp_path, parts):
    """A study of one network, whose settings name code for some of its parts; the network's folder."""
    tmp_path.mkdir(exist_ok=True)
    file, mark = tmp_path / "net.py", tmp_path / "mark"
    file.write_text(CODE.format(mark=str(mark)))
    pair = torch.eye(3).repeat(4, 1), torch.arange(12) % 2
    held_out = f"{file}:samples" if "held_out" in parts else None
    data = UserData(
        f"{file}:samples", _contents(pair, pair if held_out else None), held_out, test=None if held_out else 0
    )
    settings = Study.digits("smoke").networks()[0]
    model = UserNetwork(f"{file}:build", code_of(file)) if "model" in parts else MLP(3, (4,), 2)
    training = Training(SGD(0.1), loss="cross_entropy", max_steps=1)
    settings = NetworkSettings(settings.data if parts == {"model"} else data, model, training, measures=("mls",))
    folder = tmp_path / "networks" / settings.key
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings.as_json()))
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    built = net if "model" in parts else MLP(3, (4,), 2).build()
    save_file(built.state_dict(), folder / "weights.safetensors")
    study = Study("mine", settings, (Axis("lr", (0.1,)),))
    (tmp_path / "study.json").write_text(json.dumps(study.as_json()))
    return folder, mark


PARTS = [{"model"}, {"data"}, {"data", "held_out"}, {"model", "data"}, {"model", "data", "held_out"}]


@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: "-".join(sorted(parts)))
@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_terminal_nothing_runs_and_the_file_is_named(tmp_path, refused, command, parts, monkeypatch):
    folder, mark = received(tmp_path, parts)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    line = refused(command, *[str(folder)] * (1 + (command == "compare")))
    assert str(tmp_path / "net.py") in line
    assert "read it, then add --trust" in line
    assert not mark.exists()


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("answer", ["", "n", "N", "no", "maybe", "yesterday", "y", "YES"])
def test_in_a_terminal_it_asks(tmp_path, capsys, monkeypatch, answer):
    folder, mark = received(tmp_path, {"model", "data"})
    monkeypatch.setattr(sys, "stdin", Terminal(answer and f"{answer}\n"))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    status = cli.run(["measure", str(folder), "--measures", "mls"])
    yes = answer.lower() in ("y", "yes")
    assert (status, mark.exists()) == ((0, True) if yes else (2, False))
    error = capsys.readouterr().err
    assert f"{tmp_path / 'net.py'}:build" in error
    assert ("nothing was run" in error) == (not yes)


@pytest.mark.parametrize("command", COMMANDS)
def test_with_trust_it_runs(tmp_path, capsys, command):
    folder, mark = received(tmp_path, {"model", "data"})
    again = [str(folder)] * (1 + (command == "compare"))
    measures = [] if command in ("bounds", "compress") else ["--measures", "mls"]
    assert cli.run([command, *again, *measures, "--trust"]) == 0, capsys.readouterr().err
    assert mark.exists()


@pytest.mark.parametrize("seed", range(5))
def test_code_is_found_wherever_the_settings_name_it(tmp_path, seed):
    """At any depth, whatever the source looks like."""
    drawn = random.Random(seed)
    kind, key = drawn.choice([("UserNetwork", "source"), ("UserData", "source"), ("UserData", "held_out")])
    source = drawn.choice(["net.py:build", "/a/net.py", "package.module:build", "x", ["net.py"], 3])
    inner = {"type": kind, key: source}
    for _ in range(drawn.randrange(4)):
        inner = drawn.choice([{"type": "MLP", "a": inner}, [1, inner], {"b": [inner]}])
    (tmp_path / "config.json").write_text(json.dumps(inner))
    assert code_in(tmp_path / "config.json") == [str(source)]


@pytest.mark.parametrize("text", ["", "[", "3", "null", "[" * 5000, "\0", '{"type": "MLP"}'])
def test_settings_that_cannot_be_read_name_none(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert code_in(tmp_path / "config.json") == []
    assert code_in(tmp_path / "nothing") == []


@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: "-".join(sorted(parts)))
def test_a_study_is_opened_and_reported_without_running_anything(tmp_path, capsys, monkeypatch, parts):
    from flatlens import report as pages
    from flatlens.estimate import Estimate, Report
    from flatlens.experiments.store import Record, Store

    folder, mark = received(tmp_path / "from", parts)
    settings = NetworkSettings.from_json(json.loads((folder / "config.json").read_text()))
    study = Study.from_json(json.loads((tmp_path / "from" / "study.json").read_text()))
    store = Store.create(tmp_path / "to", study)
    result = {"outcome": "finished", "steps": 1, "loss": 0.1, "accuracy": 1.0, "layers": ["0"], "versions": {}}
    result |= {"seconds_training": 1.0, "seconds_measuring": 1.0}
    curves = {name: torch.zeros(2) for name in ("step", "loss", "accuracy", "test_loss")}
    report = Report({("mls", None): Estimate(2.0), ("generalisation_gap", None): Estimate(0.1)}, {})
    store.write(Record(settings, result, curves, {"a": torch.ones(1)}, report))
    if parts != PARTS[-1]:  # the page, whose figures take seconds, is drawn where all parts are the user's
        monkeypatch.setattr(pages, "write_study_page", lambda result, out, **options: [out / "report.html"])
    assert cli.run(["report", str(tmp_path / "to")]) == 0, capsys.readouterr().err
    assert "1 networks" in capsys.readouterr().out
    assert not mark.exists()
