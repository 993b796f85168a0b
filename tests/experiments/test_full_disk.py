"""A full disk, a real one of 200 kB: one line, nothing finished is lost, and with room the same bytes."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from small_study import quietly, small_study, tables

from flatlens import cli
from flatlens.errors import BadFolder
from flatlens.experiments import run_study, settings
from flatlens.experiments.store import Store
from flatlens.training import run as run_module

STUDY = small_study(networks=6, steps=200)


def mount(folder, size):
    """False where this is not allowed."""
    options = f"size={size}"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0


def resize(folder, size):
    subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)


@pytest.fixture
def disk(tmp_path):
    """A disk that has room for three networks or so."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("a small disk can only be mounted by root on Linux")
    if not mount(folder, "200k"):
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    return quietly(STUDY, tmp_path_factory.mktemp("quiet") / "out")


def finished(out):
    """The networks there, each read back whole."""
    store = Store.open(out)
    keys = store.finished(settings.key for settings in STUDY.networks())
    return {key: store.read(key) for key in keys}


def test_a_study_on_a_full_disk_is_one_line_and_goes_on_when_there_is_room(disk, quiet):
    out = disk / "out"
    with ThreadPoolExecutor(1) as executor:
        with pytest.raises(BadFolder, match="No space left on device") as caught:
            run_study(STUDY, out, executor=executor)
        assert "\n" not in str(caught.value)
        before = finished(out)
        assert 0 < len(before) < len(STUDY.networks())
        assert not list((out / "networks").glob(".*"))  # what did not fit is gone again

        with pytest.raises(BadFolder, match="No space left on device"):  # still full
            run_study(STUDY, out, executor=executor)
        assert set(finished(out)) >= set(before)
        resize(disk, "4m")
        run_study(STUDY, out, executor=executor)
    assert tables(out) == quiet
    assert not (out / "failed").exists()
    assert not list((out / "training").iterdir())


def test_a_checkpoint_that_does_not_fit_is_one_line_and_the_last_one_is_taken_up(disk, quiet, monkeypatch):
    monkeypatch.setattr(run_module, "INTERVAL", 0.0)
    out = disk / "out"
    store = Store.create(out, STUDY)
    (disk / "other").write_bytes(b"x" * (disk_free(disk) - 30_000))  # one checkpoint and a bit
    with ThreadPoolExecutor(1) as executor:
        with pytest.raises(BadFolder, match=r"checkpoint .* cannot be written: No space left on device"):
            run_study(STUDY, out, executor=executor)
        assert not list(out.rglob("*.partial"))
        assert store.failed(settings.key for settings in STUDY.networks()) == []
        resize(disk, "4m")
        run_study(STUDY, out, executor=executor)
    assert tables(out) == quiet


def disk_free(disk):
    stat = os.statvfs(disk)
    return stat.f_bavail * stat.f_frsize


@pytest.mark.parametrize("to_the_end", [False, pytest.param(True, marks=pytest.mark.slow)])  # the page takes a while
def test_from_the_command_line_it_is_status_2(disk, quiet, monkeypatch, capsys, to_the_end):
    monkeypatch.setattr(settings.Study, "digits", classmethod(lambda cls, scale="laptop": STUDY))
    out = disk / "out"
    command = ["study", "digits", "--out", str(out), "--workers", "1"]
    assert cli.run(command) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert "No space left on device" in errors[-1]
    assert sum(line.startswith("flatlens: ") for line in errors) == len(errors)  # progress, then this one line
    assert sum("No space" in line for line in errors) == 1
    if not to_the_end:
        return
    before = finished(out)
    resize(disk, "64m")
    assert cli.run(command) == 0
    assert set(before) < set(finished(out))
    assert tables(out) == quiet
