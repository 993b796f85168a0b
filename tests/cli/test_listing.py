"""`flatlens data`: what there is, and what is said without a network."""

import json
import subprocess
import sys

import pytest

from flatlens import cli
from flatlens.data.sources import MEANINGS


def test_the_list_says_what_there_is_and_where(capsys, tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    (folder / "data_batch_1.bin").write_bytes(b"")  # present; whether it is sound shows when it is read
    assert cli.run(["data", "list", "--root", str(tmp_path), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["data"]}
    assert list(rows) == list(MEANINGS)
    assert rows["cifar10"]["present"] is True
    assert rows["cifar10"]["place"] == str(folder)
    assert (rows["mnist"]["present"], rows["mnist"]["place"]) == (False, str(tmp_path))
    assert (rows["digits"]["present"], rows["digits"]["place"]) == (True, None)
    assert cli.run(["data", "list", "--root", str(tmp_path)]) == 0
    text = "".join(capsys.readouterr().out.split())
    assert all(name in text for name in MEANINGS)
    assert f"binaryfiles:{folder}" in text


def test_the_list_reads_the_variable(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("FLATLENS_DATA", str(tmp_path))
    cli.run(["data", "list", "--json"])
    assert str(tmp_path) in capsys.readouterr().out


def test_mistakes_are_one_line(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "did you mean mnist, fashion_mnist" in refused("data", "fetch", "emnist")
    assert "NAME" in refused("data", "fetch")
    assert list(tmp_path.iterdir()) == []


def test_no_network_is_one_line_and_2(refused, monkeypatch, tmp_path):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    line = refused("data", "fetch", "cifar10", "--root", str(tmp_path / "sets"))
    assert "gave no answer" in line
    assert f"into {tmp_path / 'sets' / 'cifar10' / 'plain_text'}" in line
    assert list(tmp_path.iterdir()) == []


def test_a_missing_extra_is_one_line(refused, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install 'flatlens[data]'" in refused("data", "fetch", "cifar10", "--root", str(tmp_path))


def test_data_that_is_not_there_is_one_line_for_measure_too(refused, monkeypatch, tmp_path):
    monkeypatch.setenv("FLATLENS_DATA", str(tmp_path))
    (tmp_path / "m.py").write_text("import torch\ndef net(): return torch.nn.Linear(2, 2)\n")
    line = refused("measure", f"{tmp_path}/m.py:net", "--data", "cifar10", "--loss", "mse")
    assert line.startswith(f"flatlens: --data: cifar10: no CIFAR-10 in {tmp_path}, ")


@pytest.mark.parametrize("command", [["data"], ["data", "list"], ["data", "fetch"]])
def test_help_has_an_example(capsys, command):
    assert cli.run([*command, "--help"]) == 0
    out = capsys.readouterr().out
    assert "flatlens data" in out.partition("example:")[2]


def test_help_imports_nothing_heavy():
    heavy = ("torch", "huggingface_hub", "pyarrow", "PIL")
    code = (
        f"import sys, flatlens.cli as c; c.run(['data', 'fetch', '--help']); print([m in sys.modules for m in {heavy}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[False, False, False, False]"
