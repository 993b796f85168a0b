"""The command line's own promises: instant help, clean stdout, one line for every mistake, exit status."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
from rich.console import Console

import flatlens
from flatlens import cli
from flatlens.cli import terminal
from flatlens.cli.terminal import show_json
from flatlens.errors import BadInput, StaleLens
from flatlens.measures import MEASURES
from flatlens.measures.definition import SUMMARY
from flatlens.report.cards import FAMILIES, by_family, page, plain
from flatlens.result import SCHEMA


def test_help_leaves_torch_alone():
    code = "import sys, flatlens.cli as c; c.run(['--help']); print([m in sys.modules for m in ('torch', 'pandas')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[False, False]"
    assert "study" in done.stdout


@pytest.mark.parametrize("command", ["measure", "bounds", "invariance", "compress", "compare"])
@pytest.mark.parametrize("option", ["--seed", "--samples"])
def test_a_fraction_for_a_whole_number_is_refused(capsys, command, option):
    assert cli.run([command, "net.py:build", option, "1.5"]) == 2
    told = capsys.readouterr().err
    assert f"{option}: 1.5 is a fraction: give a whole number" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("measure", "--measures"),
        ("bounds", "--bounds"),
        ("bounds", "--assume"),
        ("invariance", "--measures"),
        ("invariance", "--transforms"),
        ("compress", "--schemes"),
        ("compare", "--measures"),
        ("compare", "--name"),
    ],
)
@pytest.mark.parametrize("empty", ["", " , "])
def test_an_empty_list_of_names_is_refused_before_the_work(refused, tmp_path, monkeypatch, command, option, empty):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(
        "import torch\ndef build(): return torch.nn.Linear(2, 1)\ndef data(): return torch.ones(2, 2), torch.ones(2)\n"
    )
    models = ["net.py:build"] * (2 if command == "compare" else 1)
    line = refused(command, *models, "--data", "net.py:data", "--loss", "mse", option, empty)
    assert f"{option}: expected at least one name: give one, or leave the option out" in line


def test_help_imports_nothing_that_is_slow():
    slow = {"torch", "numpy", "scipy", "pandas", "altair"}
    program = f"import sys; from flatlens import cli; cli.run(['--help']); print({slow} & sys.modules.keys(), end='')"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert told.stdout.endswith("set()")


@pytest.mark.parametrize("command", ["study", "measure", "list", "report"])
def test_every_command_explains_itself_with_an_example(capsys, command):
    assert cli.run([command, "--help"]) == 0
    assert f"flatlens {command}" in capsys.readouterr().out.split("Usage:")[1].partition("example:")[2]


def test_version(capsys):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == flatlens.__version__


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["meazure"], "measure"),
        (["study"], "DATA"),
        (["study", "digits"], "--out"),
        (["study", "digits", "--out", "x", "--scale", "huge"], "laptop"),
        (["study", "digits", "--out", "x", "--workers", "many"], "int"),
        (["study", "digits", "--out", "x", "--workers", "0"], "--workers 0"),
        (["study", "digit", "--out", "x"], "did you mean digits"),
        (["measure"], "MODEL"),
        (["measure", "m.py:f", "--datum", "digits"], "--data"),
        (["list", "colours"], "measures"),
        (["measure", "m.py:f", "--prefix", "net."], "--weights"),
        (["measure", "m.py:f", "--loss", "mse"], "--data is missing"),
        (["measure", "m.py:f", "--data", "digits", "--loss", "mse"], "no file 'm.py'"),
        (["measure", "m.py:f", "--save", "nowhere/at/all.safetensors"], "no folder"),
        (["measure", "m.py:f", "--save", "."], "--save .: this is a folder: name a file in it"),
        (["bounds", "m.py:f", "--page", "."], "--page .: this is a folder: name a file in it"),
        (["measure", "m.py:f", "my", "net.pt"], "unexpected argument 'my', 'net.pt' (an option needs its name"),
    ],
)
def test_a_mistake_is_one_line_and_2(refused, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert words in refused(*arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (BadInput("the data\n is empty", argument="data"), 2, "flatlens: --data: the data is empty\n"),
        (StaleLens("the model changed"), 2, "flatlens: the model changed\n"),
        (OSError(28, "No space left on device", "runs/x"), 2, "No space left on device: runs/x; free some space"),
        (PermissionError(13, "Permission denied", "/root/x"), 2, "flatlens: Permission denied: /root/x\n"),
        (KeyboardInterrupt(), 130, "flatlens: stopped\n"),
        (KeyboardInterrupt("the same command continues"), 130, "flatlens: stopped: the same command continues\n"),
    ],
)
def test_errors_become_status_and_line(capsys, monkeypatch, error, status, words):
    monkeypatch.setattr(cli, "app", Mock(side_effect=error))
    assert cli.run(["measure"]) == status
    out, err = capsys.readouterr()
    assert words in err
    assert err.count("\n") == 1
    assert out == ""


def test_a_bug_is_not_dressed_up_as_bad_input(capsys, monkeypatch):
    monkeypatch.setattr(cli, "app", Mock(side_effect=ZeroDivisionError("no\nway")))
    assert cli.run(["measure"]) == 1
    assert capsys.readouterr().err.startswith("flatlens: ZeroDivisionError: no way: an unexpected error")
    assert cli.run(["measure", "--traceback"]) == 1
    assert capsys.readouterr().err.startswith("Traceback (most recent call last)")


@pytest.mark.parametrize("kind", ["transforms", "bounds"])
def test_other_kinds_are_listed(capsys, kind):
    assert cli.run(["list", kind, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["flatlens"]) == (SCHEMA, flatlens.__version__)
    rows = found[kind]
    assert rows
    assert all(row["name"] and row["meaning"] and row["source"] for row in rows)
    assert cli.run(["list", kind]) == 0
    assert rows[0]["name"] in capsys.readouterr().out


def test_experiments_are_listed(capsys):
    assert cli.run(["list", "experiments"]) == 0
    assert "digits" in capsys.readouterr().out
    cli.run(["list", "experiments", "--json"])
    names = [row["name"] for row in json.loads(capsys.readouterr().out)["experiments"]]
    assert names[0] == "digits"
    assert {"X1", "X4"} <= set(names)


def test_measures_are_listed(capsys):
    assert cli.run(["list", "measures"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert cli.run(["list", "measures", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["measures"]
    assert {"mls", "relative_flatness", "interpolation_sharpness"} <= {row["name"] for row in rows}
    assert all(row["name"] in text for row in rows)
    assert all(isinstance(row["invariant_under"], list) for row in rows)
    named = {row["name"] for row in rows if row["run"].startswith("by name")}
    summary = {row["name"] for row in rows if row["run"].startswith("summary")}
    assert "ggn_norm" in named
    assert "sharpness" in summary
    assert set(re.findall(r"([a-z]\w+) \* ", text)) == named
    assert set(re.findall(r"([a-z]\w+) # ", text)) == summary == {row.partition(".")[0] for row in SUMMARY}


@pytest.mark.parametrize("columns", [100, 160])
def test_the_list_of_measures_fits_its_width_and_loses_nothing(capsys, monkeypatch, columns):
    monkeypatch.setattr("rich.console.Console", partial(Console, width=columns, force_terminal=True, no_color=True))
    assert cli.run(["list", "measures"]) == 0
    text = re.sub("\x1b[^m]*m", "", capsys.readouterr().out)
    assert max(map(len, text.splitlines())) <= columns
    squeezed = "".join(text.split())  # what is wrapped stands beside another column
    assert "…" not in squeezed
    for name, one in MEASURES.items():
        assert name in squeezed
        assert plain(one.card.symbol).partition(" ")[0] in squeezed
    if columns == 160:
        assert "Size of the outputs' response to the parameters: mean_i ||df/dtheta||_F^2." in text


def test_every_symbol_has_letters_and_every_family_its_words():
    assert all(plain(one.card.symbol) for one in MEASURES.values())
    assert set(by_family()) == set(FAMILIES)
    assert sum(map(len, by_family().values())) == len(MEASURES)


def test_a_measure_of_ones_own_is_listed_in_a_family_of_its_own(monkeypatch):
    own = MEASURES["mls"]
    own = replace(own, card=replace(own.card, family="own"))
    monkeypatch.setattr("flatlens.report.cards.MEASURES", {"own": own, "nmls": MEASURES["nmls"]})
    assert list(by_family()) == ["sensitivity", "own"]


def test_the_page_of_measures_is_printed(capsys, refused):
    assert cli.run(["list", "measures", "--markdown"]) == 0
    assert capsys.readouterr().out == page()
    assert "--markdown" in refused("list", "experiments", "--markdown")
    assert "--markdown" in refused("list", "measures", "--markdown", "--json")


def test_a_reader_that_has_seen_enough_is_no_error():
    script = f"{sys.executable} -m flatlens list experiments --json | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_json_has_no_nan(capsys):
    show_json({"a": [float("nan"), float("inf"), 1.5], "b": None})
    told = {"schema": SCHEMA, "flatlens": flatlens.__version__}
    assert json.loads(capsys.readouterr().out) == {**told, "a": [None, None, 1.5], "b": None}
    import numpy as np

    assert terminal.plain(np.float64("nan")) is None
    assert terminal.plain({"n": np.int64(3), "ok": np.bool_(True)}) == {"n": 3, "ok": True}


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_output_that_the_shell_has_closed_is_no_error(closed):
    script = f"{sys.executable} -m flatlens list experiments --json {closed}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert closed != "2>&-" or json.loads(done.stdout)


@pytest.mark.parametrize("words", [["list", "measures"], ["list", "measures", "--json"], ["reproduce", "--help"]])
def test_a_closed_pipe_is_no_error_of_ours(words):
    with subprocess.Popen(
        [sys.executable, "-c", "from flatlens.cli import main; main()", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        running.stdout.close()  # as `| head` does
        assert running.stderr.read() == b""
        assert running.wait() == 141
