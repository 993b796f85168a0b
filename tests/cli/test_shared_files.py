"""Pages, tables and saved results name files without their folders: people send them to others."""

import json
import random
from pathlib import Path

import pytest
import torch

from flatlens import cli
from flatlens.estimate import Report
from flatlens.experiments import load_study
from flatlens.experiments.result import opened_archive, read_studies_in
from flatlens.experiments.store import Store

CODE = """
import torch
from torch import nn

def samples():
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    return x, (x[:, :2].sum(1) > 0).long()

def build(width=4, broken=0):
    if broken:
        open({missing!r})
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 2))

def loss():
    return nn.CrossEntropyLoss()
"""


@pytest.fixture
def secret(tmp_path):
    """A folder with a network, data and weights in it, whose name nobody has to see; files are written elsewhere."""
    folder = tmp_path / "of-ada-lovelace" / "secret"
    folder.mkdir(parents=True)
    (folder / "net.py").write_text(CODE.format(missing=str(folder / "none.txt")))
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    for name in ("a.pt", "b.pt"):
        torch.save(net.state_dict(), folder / name)
    return folder


def files_with(folder, words):
    """The files below a folder that contain one of these words, and the text around it."""
    found = {}
    for file in (file for file in folder.rglob("*") if file.is_file()):
        content = file.read_bytes()
        for word in words:
            if (at := content.find(word.encode())) >= 0:
                found[file.name] = content[max(0, at - 40) : at + 60]
    return found


@pytest.mark.parametrize("command", ["measure", "bounds", "invariance", "compare"])
@pytest.mark.parametrize("seed", range(2))
def test_pages_json_and_saved_reports_name_no_folders(secret, tmp_path, capsys, command, seed):
    drawn = random.Random(f"{command}{seed}")
    out = tmp_path / "out"
    out.mkdir()
    weights = [secret / "a.pt", secret / "b.pt"][: 1 + (command == "compare")]
    given = [f"{secret / 'net.py'}:build", "--data", f"{secret / 'net.py'}:samples"]
    given += [word for file in weights for word in ("--weights", str(file))]
    given += ["--loss", drawn.choice(["cross_entropy", f"{secret / 'net.py'}:loss"])]
    given += ["--test", f"{secret / 'net.py'}:samples"] * drawn.randrange(2)
    given += ["--samples", "20"] * drawn.randrange(2)
    given += ["--measures", "mls"] * (command != "bounds") + ["--page", str(out / "page.html")]
    if command == "measure":
        given += ["--save", str(out / "saved.safetensors"), "--after", str(out / "pairs")]
    assert cli.run([command, *given, "--json"]) == 0, capsys.readouterr().err
    (out / "data.json").write_text(capsys.readouterr().out)
    assert files_with(out, ["lovelace", str(Path.home()) + "/", str(tmp_path)]) == {}
    assert "net.py:samples" in (out / "page.html").read_text()
    assert "a.pt" in (out / "page.html").read_text()
    if command == "measure":
        assert Report.load(out / "saved.safetensors").about["origin"]["weights"] == "a.pt"


def test_a_study_names_no_folders_in_what_it_shows(secret, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["study", f"{secret / 'net.py'}:samples", "--model", f"{secret / 'net.py'}:build", "--out", str(out)]
    command += ["--set", "max_steps=3", "--set", "width=3,4", "--set", "broken=0,1", "--measures", "mls", "--json"]
    assert cli.run([*command, "--workers", "1"]) == 0, capsys.readouterr().err
    told = json.loads(capsys.readouterr().out)
    del told["page"], told["files"]  # where they are written
    (out / "data.json").write_text(json.dumps(told))
    result = load_study(out)
    assert [why for _, why in result.failed] == [result.failed[0][1]] * 2
    assert "none.txt" in result.failed[0][1]
    store = Store.create(tmp_path / "kept", result_study := Store.open(out).study())
    store.keep(result, [settings.key for settings in result_study.networks()], None)
    with opened_archive(tmp_path / "kept" / "known.zip", "tables") as archive:
        (back,) = read_studies_in(archive).values()
        (out / "result.json").write_bytes(archive.read("0/result.json"))
    assert back.settings == result.settings
    private = {file: file.read_bytes() for file in (out / "study.json", *(out / "networks").rglob("config.json"))}
    for file in private:  # with these the study goes on, and its networks are measured again
        file.unlink()
    found = files_with(out, ["lovelace", str(Path.home()) + "/", str(tmp_path)])
    assert {name: text for name, text in found.items() if name not in ("failed.json", "config.json")} == {}
