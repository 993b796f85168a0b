import contextlib
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import pandas as pd
import psutil
import pytest
import torch

from flatlens import files as files_module
from flatlens.errors import BadFolder
from flatlens.estimate import Estimate, Report
from flatlens.experiments import Study, load_study
from flatlens.experiments.store import Record, Store, refuse_foreign
from flatlens.files import write_checksums

STUDY = Study.digits("smoke")
NETWORK = STUDY.networks()[0]


def record(settings=NETWORK, loss=0.5):
    return Record(
        settings=settings,
        result={"outcome": "converged", "steps": 3, "loss": loss, "layers": ["fc1"], "versions": {"torch": "1"}},
        curves={name: torch.arange(2) for name in ("step", "loss", "accuracy", "test_loss")},
        weights={"fc1.weight": torch.ones(2, 2)},
        report=Report({("mls", None): Estimate(2.0)}, {"n": 5}),
    )


KEPT = {"json": ("checksums", "config", "result"), "safetensors": ("curves", "report", "weights")}


@pytest.fixture
def store(tmp_path):
    return Store.create(tmp_path / "out", STUDY)


def test_what_is_written_is_read(store):
    store.write(record())
    back = store.read(NETWORK.key)
    assert back.settings == NETWORK
    assert back.result == record().result
    assert back.report["mls"].value == 2.0
    assert torch.equal(back.weights["fc1.weight"], torch.ones(2, 2))
    assert sorted(p.name for p in store.folder(NETWORK.key).iterdir()) == [
        "checksums.json",
        "config.json",
        "curves.safetensors",
        "report.safetensors",
        "result.json",
        "weights.safetensors",
    ]
    assert len({p.stat().st_mode for p in store.folder(NETWORK.key).iterdir()}) == 1
    assert store.finished([NETWORK.key, "other"]) == [NETWORK.key]
    assert store.study() == STUDY


def test_the_first_of_two_that_computed_the_same_network_is_kept(store):
    store.write(record(loss=1.0))
    store.write(record(loss=2.0))
    assert store.read(NETWORK.key).result["loss"] == 1.0
    assert [p.name for p in (store.out / "networks").iterdir()] == [NETWORK.key]


def test_a_run_that_fails_half_way_leaves_nothing(store, monkeypatch):
    monkeypatch.setattr(Report, "save", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store.write(record())
    assert list((store.out / "networks").iterdir()) == []


def test_a_full_disk_is_one_line_and_loses_nothing_finished(store, monkeypatch):
    store.write(record())

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files_module.os, "fsync", full)
    with pytest.raises(BadFolder, match="No space left on device") as caught:
        store.write(record(STUDY.networks()[1]))
    assert "\n" not in str(caught.value)
    assert [p.name for p in (store.out / "networks").iterdir()] == [NETWORK.key]
    store.read(NETWORK.key)


def test_leftovers_of_the_dead_are_swept_and_those_of_the_living_kept(store):
    dead, unmourned = (subprocess.Popen([sys.executable, "-c", ""]) for _ in range(2))
    dead.wait()
    while psutil.Process(unmourned.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    host = files_module.host()
    networks = store.out / "networks"
    pids = {"dead": dead.pid, "unmourned": unmourned.pid, "living": os.getpid()}
    names = {who: f".abc.{host}.{pid}.12345678.partial" for who, pid in pids.items()}
    names["elsewhere"] = ".abc.other-host.1.12345678.partial"
    for name in names.values():
        (networks / name).mkdir()
        (networks / name / "result.json").write_text("{")
    Store.create(store.out, STUDY)
    assert {p.name for p in networks.iterdir()} == {names["living"], names["elsewhere"]}
    for name in names.values():
        if (networks / name).exists():
            os.utime(networks / name, (1, 1))  # years old: no process writes for so long
    Store.create(store.out, STUDY)
    assert list(networks.iterdir()) == []
    unmourned.wait()


def test_the_same_study_may_come_back_and_grow(store):
    Store.create(store.out, STUDY)
    grown = STUDY.over("seed", 0, 1, 2).over("momentum", 0, 0.9)
    Store.create(store.out, grown)
    assert store.study() == STUDY.over("seed", 0, 1, 2).over("momentum", 0.0, 0.9)  # as the base spells it
    Store.create(store.out, grown)


def test_a_study_without_networks_that_are_there_is_refused_with_their_names(store):
    names = r"lr 0.05, batch_size 4, seed 0; lr 0.05, batch_size 4, seed 1; lr 0.05, batch_size 16, seed 0; 5 more"
    apart = r"lr: \[0.05, 0.1\] there, \[0.3\] requested: include them, too, or choose another --out"
    with pytest.raises(BadFolder, match=rf"holds 8 networks that this study does not have \({names}\): {apart}"):
        Store.create(store.out, STUDY.over("lr", 0.3))
    steps = r"base.training.max_steps: 10000 there, 500 requested"
    with pytest.raises(BadFolder, match=rf"holds 8 networks .*: {steps}: include them, too, or choose another --out"):
        Store.create(store.out, STUDY.over("seed", 0, 1, 2).setting("max_steps", 500))
    one = STUDY.over("lr", 0.05).over("batch_size", 4).over("seed", 0)
    Store.create(store.out.parent / "one", one)
    with pytest.raises(BadFolder, match=rf"holds 1 network that .* \({one.networks()[0].key}\): .*: include it, too"):
        Store.create(store.out.parent / "one", one.setting("momentum", 0.5))
    assert store.study() == STUDY


def test_foreign_files_are_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(BadFolder, match=r"thesis\.tex"):
        Store.create(tmp_path, STUDY)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(BadFolder, match="is a file"):
        Store.create(tmp_path / "thesis.tex", STUDY)
    with pytest.raises(BadFolder):
        Store.create(tmp_path / "thesis.tex" / "below", STUDY)


def test_what_another_process_has_just_begun_is_not_foreign(tmp_path):
    (tmp_path / "networks").mkdir()
    refuse_foreign(tmp_path, "study.json", ("networks",), "study")
    with pytest.raises(BadFolder, match=r"holds other files \(networks\) and no study"):
        refuse_foreign(tmp_path, "study.json", (), "study")
    (tmp_path / "study.json").write_text("{}")
    refuse_foreign(tmp_path, "study.json", (), "study")


def test_networks_without_their_study_are_refused(store):
    store.write(record())
    (store.out / "study.json").unlink()
    with pytest.raises(BadFolder, match=r"holds other files \(networks\) and no study"):
        Store.create(store.out, STUDY)
    shutil.rmtree(store.folder(NETWORK.key))
    assert Store.create(store.out, STUDY).study() == STUDY


def test_a_folder_without_a_study_is_not_opened(tmp_path):
    with pytest.raises(BadFolder, match="holds no study"):
        Store.open(tmp_path)


@pytest.mark.parametrize("file", ["result.json", "report.safetensors", "weights.safetensors", "curves.safetensors"])
@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_damaged_network_is_one_line_that_says_how_to_mend(store, file, damage):
    store.write(record())
    path = store.folder(NETWORK.key) / file
    path.write_bytes(path.read_bytes()[:5]) if damage == "cut" else path.unlink()
    with pytest.raises(BadFolder, match="remove") as caught:
        store.read(NETWORK.key)
    assert str(store.folder(NETWORK.key)) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_network_without_files_is_one_line_with_one_advice(store):
    store.folder(NETWORK.key).mkdir()
    for read in (store.read, lambda key: store.refuse_other_versions([key], {})):
        with pytest.raises(BadFolder, match="is damaged") as caught:
            read(NETWORK.key)
        assert str(caught.value).count("run the study again") == 1


@pytest.mark.parametrize("file", [f"{name}.{end}" for end, names in KEPT.items() for name in names])
def test_no_flipped_bit_is_read(store, file):
    store.write(record())
    path = store.folder(NETWORK.key) / file
    whole = path.read_bytes()
    for bit in (*range(0, 8 * len(whole), 8 * len(whole) // 40), 8 * len(whole) - 1):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(BadFolder, match="remove that folder and run the study again") as caught:
            store.read(NETWORK.key)
        assert str(store.folder(NETWORK.key)) in str(caught.value)
        assert "\n" not in str(caught.value)
    path.write_bytes(whole)
    assert store.read(NETWORK.key).report["mls"].value == 2.0


def test_a_network_without_checksums_is_read(store):
    store.write(record())
    (store.folder(NETWORK.key) / "checksums.json").unlink()
    assert store.read(NETWORK.key).report["mls"].value == 2.0


@pytest.mark.parametrize("text", ["", "[1]", '{"name": "digits"}'])
def test_a_damaged_study_file_is_one_line(store, text):
    (store.out / "study.json").write_text(text)
    with pytest.raises(BadFolder, match=r"study\.json"):
        store.study()


def test_other_versions_are_refused_by_name(store):
    store.write(record())
    store.refuse_other_versions([NETWORK.key], {"torch": "1"})
    with pytest.raises(BadFolder, match=r"torch 1 there, 2 here.*--mixed"):
        store.refuse_other_versions([NETWORK.key], {"torch": "2"})


def test_failures_are_noted_until_the_run_succeeds(store):
    store.write_failure(NETWORK, "Traceback\n  somewhere\nValueError: no\n")
    assert store.failures([NETWORK.key]) == [(NETWORK.key, "ValueError: no")]
    assert "somewhere" in json.loads((store.out / "failed" / NETWORK.key / "failed.json").read_text())["traceback"]
    store.write(record())
    assert store.failures([NETWORK.key]) == []
    assert not (store.out / "failed").exists()


def test_tables_keep_every_digit(store):
    store.write_table("table.csv", pd.DataFrame({"value": [0.1, 1 / 3]}))
    text = (store.out / "table.csv").read_text()
    assert text == "value\n0.10000000000000001\n0.33333333333333331\n"


def test_an_unwritable_folder_is_one_line(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(BadFolder, match="Permission denied"):
        Store.create(tmp_path / "out", STUDY)


@pytest.mark.parametrize("seed", range(4))
def test_a_folder_under_the_name_of_another_network_is_never_counted(store, seed):
    """One network's folder over another's, in its place, or with another's settings in it."""
    drawn = random.Random(seed)
    one, other, third = drawn.sample(STUDY.networks(), 3)
    for settings in (one, other):
        store.write(record(settings))
    way = ("over", "instead", "renamed", "settings")[seed]
    if way in ("over", "instead"):
        shutil.rmtree(store.folder(other.key))
        shutil.copytree(store.folder(one.key), store.folder(other.key))
    elif way == "renamed":
        store.folder(one.key).rename(store.folder(third.key))
    else:
        (store.folder(other.key) / "config.json").write_text(json.dumps(one.as_json()))
        (store.folder(other.key) / "checksums.json").unlink()
        write_checksums(store.folder(other.key))
    wrong = third if way == "renamed" else other
    with pytest.raises(BadFolder, match=f"{wrong.key}' is damaged .it holds the network {one.key}, .*: remove that"):
        store.read(wrong.key)
    with pytest.raises(BadFolder, match="copied or renamed"):
        load_study(store.out)


WRONG = (None, "x", 3, -0.5, [], [1], {}, {"a": 1}, [["fc1"]], True)


@pytest.mark.parametrize("seed", range(6))
def test_results_of_other_types_are_one_line(store, seed):
    """Their checksums may fit: whoever sends a study can write them."""
    drawn, good = random.Random(seed), record().result
    refused = 0
    for name in (*good, "seconds_training", "trained_alone"):
        store.write(record())
        folder = store.folder(NETWORK.key)
        (folder / "result.json").write_text(json.dumps(good | {name: drawn.choice(WRONG)}))
        (folder / "checksums.json").unlink()
        write_checksums(folder)
        for read in (
            lambda: store.read(NETWORK.key),
            lambda: store.refuse_other_versions([NETWORK.key], {"torch": "1"}),
        ):
            with contextlib.suppress(BadFolder):  # any other error is a fault
                read()
                continue
            refused += 1
        shutil.rmtree(folder)
    assert refused > 5


@pytest.mark.parametrize("seed", range(4))
def test_curves_of_other_shapes_are_one_line(store, seed):
    drawn, curves = random.Random(seed), dict(record().curves)
    shape = drawn.choice([(3,), (), (2, 2), (0,)])
    curves[drawn.choice(list(curves))] = torch.zeros(shape)
    store.write(replace(record(), curves=curves))
    with pytest.raises(BadFolder, match="the curves step, loss, accuracy, test_loss must have one length"):
        store.read(NETWORK.key)
    curves.pop(drawn.choice(["loss", "accuracy", "test_loss"]))
    shutil.rmtree(store.folder(NETWORK.key))
    store.write(replace(record(), curves=curves))
    with pytest.raises(BadFolder, match="must have one length"):
        store.read(NETWORK.key)
