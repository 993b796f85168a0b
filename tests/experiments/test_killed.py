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

from flatlens.experiments import Study, run_study
from flatlens.experiments.settings import DataSettings

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


@pytest.mark.slow
def test_two_at_once_in_one_folder_do_not_disturb_each_other(tmp_path):
    both = [start(tmp_path / "out") for _ in range(2)]
    assert [process.wait(240) for process in both] == [0, 0]
    assert len(finished(tmp_path / "out")) == len(STUDY.networks())
    assert start(tmp_path / "alone").wait(120) == 0
    assert (tmp_path / "out" / "table.csv").read_bytes() == (tmp_path / "alone" / "table.csv").read_bytes()
