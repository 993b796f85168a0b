"""kill -9 of a worker, or of the whole study, at random moments: the same command again ends in the same bytes."""

import contextlib
import json
import random
import subprocess
import sys
import time

import psutil
import pytest
import torch
from small_study import quietly, small_study, tables
from user_study import NET

from flatlens.experiments.network import ComputeInto
from flatlens.experiments.specification import study_of
from flatlens.experiments.store import Store
from flatlens.files import write_whole
from flatlens.training import run as run_module
from flatlens.training.run import Stepper

LONG = small_study(networks=6, steps=3000)
CODE = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from flatlens.experiments import Study, run_study
executor = ThreadPoolExecutor(1) if sys.argv[3] == "thread" else None
run_study(Study.from_json(json.loads(sys.argv[1])), sys.argv[2], workers=2, executor=executor, retry_failed=True)
"""


def start(study, out, where="processes"):
    return subprocess.Popen([sys.executable, "-c", CODE, json.dumps(study.as_json()), str(out), where])


def finished(out):
    return [p for p in (out / "networks").glob("*") if not p.name.startswith(".")]


def workers(process, busy=0.0):
    """Its worker processes that have computed for `busy` seconds; not the tracker of resources beside them."""
    found = []
    with contextlib.suppress(psutil.Error):  # just ended
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "resource_tracker" not in " ".join(child.cmdline()) and child.cpu_times().user >= busy:
                    found.append(child)
    return found


def wait_until(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def kill(study, chance=None):
    """One of the workers that `chance` draws, else the parent; what was killed, None if it has ended by itself."""
    if chance is None:
        study.kill()
        study.wait()
        return "parent"
    while study.poll() is None:
        if there := workers(study):
            with contextlib.suppress(psutil.Error):  # it has just ended
                chance.choice(there).kill()
                return "worker"
        time.sleep(0.01)
    return None


def finish(study, out):
    """Once more, undisturbed."""
    assert start(study, out).wait(600) == 0
    assert not list(out.rglob("*.partial"))
    assert not list((out / "training").iterdir())
    return tables(out)


def test_killed_three_times_it_ends_in_the_same_bytes(tmp_path):
    out, chance = tmp_path / "killed", random.Random(0)
    study = start(LONG, out)
    wait_until(lambda: finished(out))
    assert kill(study, chance) == "worker"
    before = len(finished(out))
    wait_until(lambda: len(finished(out)) >= before + 2)  # it went on by itself: one more may have been under way
    assert study.poll() is None
    orphans = workers(study)
    assert kill(study) == "parent"
    wait_until(lambda: not any(o.is_running() and o.status() != psutil.STATUS_ZOMBIE for o in orphans), 30)
    assert len(finished(out)) < len(LONG.networks())
    assert not (out / "table.csv").exists()
    study = start(LONG, out)
    wait_until(lambda: workers(study) or study.poll() is not None)
    kill(study, chance)
    study.wait(120)
    assert finish(LONG, out) == quietly(LONG, tmp_path / "quiet")


def test_ones_own_study_killed_twice_ends_in_the_same_bytes(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    settings = [
        "width=4,8",
        "seed=0:2",
        "lr=0.05",
        "batch_size=4",
        "max_steps=2500",
        "loss_below=None",
        "accuracy=None",
    ]
    own = study_of(f"{tmp_path}/net.py:samples", model=f"{tmp_path}/net.py:build", settings=settings, measures=["mls"])
    out, chance = tmp_path / "killed", random.Random(0)
    study = start(own, out)
    wait_until(lambda: workers(study, busy=1.0) or study.poll() is not None)
    assert kill(study, chance) == "worker"
    wait_until(lambda: finished(out) or study.poll() is not None)
    kill(study)
    assert not (out / "table.csv").exists()
    assert finish(own, out) == quietly(own, tmp_path / "quiet")


@pytest.mark.slow
def test_killed_at_fifty_random_moments_it_ends_in_the_same_bytes(tmp_path):
    whole, chance = small_study(networks=20, steps=6000), random.Random(7)
    out, killed, early = tmp_path / "killed", [], 0
    study = start(whole, out)
    while len(killed) < 50:
        of_worker = chance.random() < 0.5
        if of_worker:
            wait_until(lambda: workers(study) or study.poll() is not None)  # noqa: B023
        time.sleep(chance.uniform(0.0, 3.0 if of_worker else 6.0))
        if study.poll() is None and (what := kill(study, chance if of_worker else None)):
            killed.append(what)
            early += len(finished(out)) < 20
        if study.poll() is not None:
            study = start(whole, out)  # killed, or finished: then only its tables are written again
    before = len(finished(out))
    kill(study)
    print(f"{killed.count('parent')} parents, {killed.count('worker')} workers; {early} before the last network")
    print(f"{before} of 20 networks were there after the last of them")
    assert min(killed.count("parent"), killed.count("worker")) >= 10
    assert finish(whole, out) == quietly(whole, tmp_path / "quiet")


def test_a_training_under_way_is_taken_up_and_its_checkpoint_goes_when_the_network_is_there(tmp_path, monkeypatch):
    settings = LONG.networks()[0]
    stores = [Store.create(tmp_path / name, LONG) for name in ("quiet", "killed")]
    ComputeInto(stores[0])(settings)

    def killed(path, content):
        written.append(write_whole(path, content))
        if len(written) == 3:
            raise KeyboardInterrupt

    written = []
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "INTERVAL", 0.05)
        patch.setattr(run_module, "write_whole", killed)
        with pytest.raises(KeyboardInterrupt):
            ComputeInto(stores[1])(settings)
    assert stores[1].checkpoint(settings.key).exists()
    assert not stores[1].finished([settings.key])

    steps = []
    monkeypatch.setattr(Stepper, "take", lambda self, *a, take=Stepper.take: steps.append(1) or take(self, *a))
    ComputeInto(stores[1])(settings)
    assert 0 < len(steps) < settings.training.max_steps
    a, b = (store.read(settings.key) for store in stores)
    assert all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)
    assert all(torch.equal(a.curves[name], b.curves[name]) for name in a.curves)
    assert not list((stores[1].out / "training").iterdir())


@pytest.mark.slow
def test_two_at_once_in_one_folder_do_not_disturb_each_other(tmp_path):
    study = small_study(networks=8, steps=600)
    both = [start(study, tmp_path / "out", "thread") for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    assert len(finished(tmp_path / "out")) == 8
    assert tables(tmp_path / "out") == quietly(study, tmp_path / "alone")


@pytest.mark.slow
def test_two_sweeps_of_two_workers_in_one_folder_do_not_disturb_each_other(tmp_path):
    both = [start(LONG, tmp_path / "out") for _ in range(2)]
    assert [process.wait(240) for process in both] == [0, 0]
    assert len(finished(tmp_path / "out")) == len(LONG.networks())
    assert tables(tmp_path / "out") == quietly(LONG, tmp_path / "alone")
