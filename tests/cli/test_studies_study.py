"""`flatlens study` and `flatlens report`, end to end on a study of four tiny networks."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path

import pytest

from flatlens import cli, report
from flatlens.cli import studies
from flatlens.experiments import settings, study

TINY = (
    settings.Study.digits("smoke")
    .setting("data.train", 60)
    .setting("widths", (16,))
    .setting("until.loss_below", 0.05)
    .over("lr", 0.1)
    .over("batch_size", 4, 8)
    .over("seed", 0, 1)
)


def blank_page(result: study.StudyResult, out: Path, **_options: object) -> list[Path]:
    """In place of the page, whose figures take seconds to draw."""
    (out / "report.html").write_text(f"{len(result.networks)} networks")
    return [out / "report.html", out / "figures" / "gap.png"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(settings.Study, "digits", classmethod(lambda cls, scale="laptop": replace(TINY, scale=scale)))
    monkeypatch.setattr(report, "write_study_page", blank_page)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A finished study, its page drawn in earnest."""
    folder = tmp_path_factory.mktemp("study") / "digits"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings.Study, "digits", classmethod(lambda cls, scale="laptop": replace(TINY, scale=scale)))
        command = ["study", "digits", "--out", str(folder), "--scale", "smoke", "--strict", "--workers", "1"]
        assert cli.run(command) == 0
    shutil.copy(folder / "report.html", folder.parent / "first.html")
    return folder


def test_a_study_leaves_its_page_and_tables(out):
    for name in ("table.csv", "relations.csv", "study.json"):
        assert (out / name).stat().st_size > 0
    assert len(list((out / "networks").iterdir())) == 4
    assert "</html>" in (out.parent / "first.html").read_text()
    assert list((out / "figures").glob("*.png"))


def test_the_same_command_again_does_nothing_twice_and_concludes(out, capsys):
    before = (out / "table.csv").read_bytes()
    assert cli.run(["study", "digits", "--out", str(out), "--scale", "smoke"]) == 0
    printed, err = capsys.readouterr()
    assert (out / "table.csv").read_bytes() == before
    assert "4 networks, 4 of them converged" in printed
    assert printed.strip().endswith("report.html")
    assert err == ""  # nothing is left to do, so nothing to announce


def test_json_is_all_there_is_on_stdout(out, capsys):
    assert cli.run(["study", "digits", "--out", str(out), "--scale", "smoke", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["page"] == str(out / "report.html")
    assert len(found["networks"]) == 4
    assert found["findings"]
    assert 0 < len(found["answer"]) <= 3
    assert found["settings"]["scale"] == "smoke"
    assert cli.run(["study", "digits", "--out", str(out), "--scale", "smoke"]) == 0
    assert " ".join(capsys.readouterr().out.split()).startswith(" ".join(found["answer"]))


def test_report_rebuilds_the_page_and_concludes_alike(out, capsys):
    assert cli.run(["study", "digits", "--out", str(out), "--scale", "smoke"]) == 0
    first = capsys.readouterr().out
    (out / "report.html").unlink()
    assert cli.run(["report", str(out)]) == 0
    assert capsys.readouterr().out == first
    assert (out / "report.html").read_text() == "4 networks"


def test_another_study_in_the_folder(out, refused, monkeypatch):
    other = TINY.setting("widths", (8,))
    monkeypatch.setattr(settings.Study, "digits", classmethod(lambda cls, scale="laptop": replace(other, scale=scale)))
    assert "that this study does not have" in refused("study", "digits", "--out", str(out), "--scale", "laptop")


@pytest.mark.parametrize("make", ["file", "foreign", "absent"])
def test_a_folder_that_is_no_study(tmp_path, refused, make):
    target = tmp_path / "out"
    if make == "file":
        target.write_text("")
    if make == "foreign":
        target.mkdir()
        (target / "thesis.tex").write_text("")
    command = ["report", str(target)] if make == "absent" else ["study", "digits", "--out", str(target)]
    assert str(target) in refused(*command)


def test_training_for_a_number_of_steps_does_not_converge_but_ends(monkeypatch, tmp_path, capsys):
    endless = TINY.setting("until.loss_below", None).setting("until.accuracy", None).setting("max_steps", 3)
    monkeypatch.setattr(settings.Study, "digits", classmethod(lambda cls, scale="laptop": endless.over("seed", 0)))
    assert cli.run(["study", "digits", "--out", str(tmp_path / "out"), "--workers", "1"]) == 0
    assert "of them completed training\n" in capsys.readouterr().out


def test_strict_is_1_when_a_network_missed(monkeypatch, tmp_path, capsys):
    hurried = TINY.setting("max_steps", 3).over("seed", 0)
    monkeypatch.setattr(settings.Study, "digits", classmethod(lambda cls, scale="laptop": hurried))
    command = ["study", "digits", "--out", str(tmp_path / "out"), "--workers", "1"]
    assert cli.run([*command, "--strict"]) == 1
    assert cli.run(command) == 0
    assert "excluded from the correlations" in capsys.readouterr().err


def test_a_full_disk_is_one_line(monkeypatch, tmp_path, capsys):
    def full(*_args: object, **_options: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path))

    monkeypatch.setattr(study, "run_study", full)
    assert cli.run(["study", "digits", "--out", str(tmp_path / "out")]) == 2
    assert "No space left on device" in capsys.readouterr().err.splitlines()[-1]


def test_a_page_that_cannot_be_written_takes_no_findings(monkeypatch, tmp_path, capsys):
    def full(*_args: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(settings.Study, "digits", classmethod(lambda cls, scale="laptop": TINY))
    command = ["study", "digits", "--out", str(tmp_path / "out"), "--workers", "1"]
    monkeypatch.setattr(import_module("flatlens.report"), "write_study_page", full)
    assert cli.run(command) == 2
    out, err = capsys.readouterr()
    assert "4 networks" in out
    assert "No space left on device" in err


def test_an_interrupt_is_130_and_one_line(monkeypatch, tmp_path, capsys):
    def interrupted(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "run_study", interrupted)
    assert cli.run(["study", "digits", "--out", str(tmp_path / "out")]) == 130
    line = "flatlens: stopped: the finished networks are kept, and the same command continues\n"
    assert capsys.readouterr() == ("", line)


@pytest.mark.slow
def test_ctrl_c_is_130_and_the_same_command_carries_on(tmp_path):
    """A real interrupt, to the whole group of processes as a terminal sends it."""
    command = [sys.executable, "-m", "flatlens", "study", "digits", "--scale", "smoke", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        wait_for_a_network(tmp_path / "out" / "networks", running)
        os.killpg(running.pid, signal.SIGINT)
        out, err = running.communicate(timeout=120)
    finally:
        running.kill()
    assert running.returncode == 130, err
    assert out == ""
    assert "the same command continues" in err.splitlines()[-1]
    assert "Traceback" not in err


def wait_for_a_network(folder: Path, running: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and running.poll() is None:
        if folder.is_dir() and any(not p.name.startswith(".") for p in folder.iterdir()):
            return
        time.sleep(0.05)
    raise AssertionError(f"no network appeared (exit status {running.poll()})")


YAML = """
name: two by two
data: {name: digits, train: 60}
model: MLP(widths=(12,))
training: {optimiser: SGD(lr=0.1), batch_size: 16, loss: cross_entropy, max_epochs: 3}
set: {label_smoothing: [0, 0.5], seed: 0:2}
measures: [mls, relative_flatness, generalisation_gap]
"""


def test_a_yaml_file_is_run_and_carried_on(tmp_path, capsys):
    file = tmp_path / "study.yaml"
    file.write_text(YAML)
    command = ["study", str(file), "--out", str(tmp_path / "out"), "--workers", "1", "--json"]
    assert cli.run(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["networks"]) == 4
    assert {row["label_smoothing"] for row in told["networks"]} == {0, 0.5}
    assert {row["outcome"] for row in told["networks"]} == {"finished"}
    assert all(row["relative_flatness"] > 0 for row in told["networks"])
    assert "label smoothing" in {row["x"] for row in told["relations"]} | {row["y"] for row in told["relations"]}
    assert cli.run(command) == 0
    other = ["study", str(file), "--out", str(tmp_path / "out"), "--set", "lr=0.2"]
    assert cli.run(other) == 2
    told = capsys.readouterr().err
    assert "holds 4 networks that this study does not have (label_smoothing 0, seed 0; label_smoothing 0," in told
    assert "base.training.optimiser.lr: 0.1 there, 0.2 requested: include them, too, or choose another --out" in told


def test_settings_on_the_command_line(tmp_path, capsys):
    command = ["study", "digits", "--out", str(tmp_path / "out"), "--workers", "1", "--json", "--scale", "smoke"]
    command += ["--model", "MLP(widths=(8,))", "--set", "train=50", "--set", "max_steps=30", "--set", "lr=0.05,0.1"]
    command += ["--set", "activation=tanh", "--measures", "mls,generalisation_gap"]
    assert cli.run(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["lr"] for row in told["networks"]] == [0.05, 0.1]
    assert {row["outcome"] for row in told["networks"]} == {"finished"}
    assert told["settings"]["base"]["model"]["activation"] == "tanh"


NET = """
import torch
from torch import nn
print("the user's file prints")

def samples():
    x = torch.randn(60, 3)
    return x, (x[:, 0] > 0).long()

def build(width=4):
    print("and the user's function prints")
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2))
"""


def test_a_study_of_ones_own_and_then_of_its_networks_as_checkpoints(tmp_path, capfd, monkeypatch):
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    own = ["study", "net.py:samples", "--model", "net.py:build", "--workers", "1", "--json"]
    trained = ["--out", "out", "--set", "width=4,6", "--set", "seed=0:2", "--set", "max_steps=30", "--set", "lr=0.1"]
    assert cli.run([*own, *trained, "--set", "loss_below=None", "--set", "accuracy=None"]) == 0
    printed = capfd.readouterr()
    told = json.loads(printed.out)  # what workers print goes to stderr
    assert "the user's function prints" in printed.err
    assert [(row["width"], row["seed"]) for row in told["networks"]] == [(4, 0), (4, 1), (6, 0), (6, 1)]
    assert {row["outcome"] for row in told["networks"]} == {"finished"}
    rows = [
        f"out/networks/{row['key']},{row['width']},{row['seed']},{row['generalisation_gap']}"
        for row in told["networks"]
    ]
    (tmp_path / "runs.csv").write_text("\n".join(["weights,width,seed,gap", *rows]))
    assert cli.run([*own, "--out", "again", "--checkpoints", "runs.csv"]) == 0
    again = json.loads(capfd.readouterr().out)
    assert [row["weight_norm"] for row in again["networks"]] == [row["weight_norm"] for row in told["networks"]]
    assert [row["generalisation_gap"] for row in again["networks"]] == [
        pytest.approx(row["generalisation_gap"], rel=1e-12) for row in told["networks"]
    ]
    for folder in ("out", "again"):  # the latter has no held-out data
        network = next((tmp_path / folder / "networks").iterdir())
        assert cli.run(["measure", str(network), "--measures", "mls"]) == 2  # nothing of the user's runs unasked
        assert "net.py:build: read it, then add --trust to run it" in capfd.readouterr().err
        assert cli.run(["measure", str(network), "--measures", "mls", "--trust"]) == 0
    capfd.readouterr()
    (tmp_path / "net.py").write_text(NET + "\n")
    assert cli.run([*own, "--out", "third"]) == 2
    assert "has changed since this process read it" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--set", "lrr=1"], "unknown setting 'lrr': did you mean lr"),
        (["--set", "lr"], "write NAME=VALUE"),
        (["--model", "LeNet5"], "takes images, and the data is rows of 64 numbers"),
        (["--measures", "mlss"], "did you mean mls"),
        (["--dask", "tcp://x", "--slurm", "jobs=2"], "give only one of them"),
        (["--slurm", "jobs"], "write NAME=VALUE"),
        (["--slurm", "nodes=2"], "unknown setting 'nodes' of --slurm"),
        (["--slurm", "jobs=x"], "SlurmSettings(jobs='x'): expected a whole number"),
        (["--pack", "0"], "--pack 0: expected at least 1"),
        (["--pack", "1.5"], "--pack: 1.5 is a fraction: give a whole number"),
        (["--workers", "1.5"], "--workers: 1.5 is a fraction: give a whole number"),
        (["--together", "2.5"], "--together: 2.5 is a fraction: give a whole number"),
    ],
)
def test_a_slip_is_one_line_and_begins_nothing(tmp_path, capsys, options, said):
    assert cli.run(["study", "digits", "--out", str(tmp_path / "out"), *options]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_names_that_are_checked_before_torch_is_imported_are_those_that_there_are(tmp_path):
    from flatlens.data.sources import IMAGES, SYNTHETIC
    from flatlens.experiments.quantities import Quantity
    from flatlens.experiments.settings import KNOWN, Axis, Study
    from flatlens.measures import MEASURES
    from flatlens.models import ARCHITECTURES as KINDS

    assert set(studies.DATA_SETS) == {*SYNTHETIC, *IMAGES}
    assert set(studies.NETWORKS) == {kind.__name__ for kind in KINDS} - {"UserNetwork"}
    assert studies.measures() >= set(MEASURES)
    every = {field.name for kind in KNOWN.values() if kind not in (Study, Axis, Quantity) for field in fields(kind)}
    assert studies.settings() >= every | {option for _, options in SYNTHETIC.values() for option in options}
    for slip, said in (
        (["digit"], "did you mean digits"),
        (["digits", "--model", "MPL"], "did you mean MLP"),
        (["digits", "--measures", "mlss"], "unknown measure 'mlss': did you mean mls, nmls"),
        (["digits", "--set", "lrr=0.1"], "unknown setting 'lrr': did you mean lr"),
        (["none.yaml"], "cannot be read: there is no such file"),
    ):
        code = f"import sys; from flatlens.cli import run; run({['study', *slip, '--out', str(tmp_path / 'x')]!r})"
        code += "; sys.exit('torch' in sys.modules)"
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert said in found.stderr
        assert found.returncode == 0, "torch was imported, which takes seconds"


def test_a_dry_run_says_what_is_left_and_trains_nothing(out, tmp_path, capsys, monkeypatch):
    command = ["study", "digits", "--scale", "smoke", "--dry-run", "--out"]
    assert cli.run([*command, str(out)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "digits: 0 of 4 networks left to train and measure."
    assert second == "Nothing is left to train or measure: tables are written again, existing pictures are kept."
    monkeypatch.setattr(studies, "SECONDS", {})
    assert cli.run([*command, str(tmp_path / "new"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["networks"], found["left"], found["workers"], found["at_most"]) == (4, 4, 2, False)
    assert 0 < found["seconds"] < 600
    assert 0 < found["training"] < 1
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(studies, "TRIAL", 0.0)  # no training ends within it
    assert cli.run([*command, str(tmp_path / "new")]) == 0
    assert re.search(r"This takes (at most about \d+ s|less than 1 s) with 2 workers", capsys.readouterr().out)
