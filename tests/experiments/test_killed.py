"""kill -9 of a worker, then of the whole study: the same command again ends in the same bytes."""

import contextlib
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil
import pytest
import torch

from flatlens.experiments import Study, run_study
from flatlens.experiments.network import ComputeInto
from flatlens.experiments.settings import DataSettings
from flatlens.experiments.store import Store
from flatlens.files import write_whole
from flatlens.training import checkpoint
from flatlens.training import run as run_module
from flatlens.training.step import Stepper

STUDY = replace(
    Study.digits("smoke"),
    data=DataSettings("digits", train=40),
    widths=(16,),
    lrs=(0.05,),
    batch_sizes=(4,),
    seeds=(0, 1, 2, 3, 4, 5),
    loss_below=0.0,  # never reached: so that each takes a while
    max_steps=3000,
)
CODE = """
import json, sys
from flatlens.experiments import Study, run_study
run_study(Study.from_json(json.loads(sys.argv[1])), sys.argv[2], workers=2)
"""


def start(out):
    return subprocess.Popen([sys.executable, "-c", CODE, json.dumps(STUDY.as_json()), str(out)])


def wait_until(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def finished(out):
    return [p for p in (out / "networks").glob("*") if not p.name.startswith(".")]


def workers(process):
    """Its worker processes, those that have begun to compute; not the tracker of resources beside them."""
    computing = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # just killed
            if "resource_tracker" not in " ".join(child.cmdline()) and child.cpu_times().user > 0.5:
                computing.append(child)
    return computing


def test_killed_and_started_again_it_ends_in_the_same_bytes(tmp_path):
    with ThreadPoolExecutor(1) as executor:
        run_study(STUDY, tmp_path / "quiet", executor=executor)

    out = tmp_path / "killed"
    study = start(out)
    wait_until(lambda: finished(out))
    workers(study)[0].kill()
    before = len(finished(out))
    wait_until(lambda: len(finished(out)) >= before + 2)  # it went on by itself: one more may have been under way
    assert study.poll() is None
    orphans = workers(study)
    study.kill()
    study.wait()
    wait_until(lambda: not any(o.is_running() and o.status() != psutil.STATUS_ZOMBIE for o in orphans), 30)
    assert len(finished(out)) < len(STUDY.networks())
    assert not (out / "table.csv").exists()

    assert start(out).wait(120) == 0
    for name in ("table.csv", "relations.csv"):
        assert (out / name).read_bytes() == (tmp_path / "quiet" / name).read_bytes()
    assert not list(out.rglob("*.partial"))


def test_a_training_under_way_is_taken_up_and_its_checkpoint_goes_when_the_network_is_there(tmp_path, monkeypatch):
    settings = STUDY.networks()[0]
    stores = [Store.create(tmp_path / name, STUDY) for name in ("quiet", "killed")]
    ComputeInto(stores[0])(settings)

    def killed(path, content):
        written.append(write_whole(path, content))
        if len(written) == 3:
            raise KeyboardInterrupt

    written = []
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "INTERVAL", 0.05)
        patch.setattr(checkpoint, "write_whole", killed)
        with pytest.raises(KeyboardInterrupt):
            ComputeInto(stores[1])(settings)
    assert stores[1].checkpoint(settings.key).exists()
    assert not stores[1].finished([settings.key])

    steps = []
    monkeypatch.setattr(Stepper, "take", lambda self, *a, take=Stepper.take: steps.append(1) or take(self, *a))
    ComputeInto(stores[1])(settings)
    assert 0 < len(steps) < STUDY.max_steps
    a, b = (store.read(settings.key) for store in stores)
    assert all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)
    assert all(torch.equal(a.curves[name], b.curves[name]) for name in a.curves)
    assert not list((stores[1].out / "training").iterdir())


@pytest.mark.slow
def test_two_at_once_in_one_folder_do_not_disturb_each_other(tmp_path):
    both = [start(tmp_path / "out") for _ in range(2)]
    assert [process.wait(240) for process in both] == [0, 0]
    assert len(finished(tmp_path / "out")) == len(STUDY.networks())
    assert start(tmp_path / "alone").wait(120) == 0
    assert (tmp_path / "out" / "table.csv").read_bytes() == (tmp_path / "alone" / "table.csv").read_bytes()
