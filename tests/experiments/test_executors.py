"""The sweep on a real Dask scheduler and worker processes on loopback, and what it says when there is none."""

import gc
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import psutil
import pytest
from dask_cluster import dask_cluster
from small_study import small_study, tables

from flatlens.errors import BadInput
from flatlens.experiments import executors, run_study
from flatlens.experiments.executors import SlurmSettings, dask_executor, slurm_executor
from flatlens.experiments.runner import run_all

pytest.importorskip("distributed")

from distributed import Client
from distributed.utils import LoopRunner

STUDY = small_study(networks=6, steps=500)


@pytest.fixture(scope="module")
def cluster():
    with dask_cluster() as started:
        yield started


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    out = tmp_path_factory.mktemp("quiet") / "out"
    run_study(STUDY, out, workers=1)
    return tables(out)


@contextmanager
def get_executor(address):
    """As a user of Dask would."""
    with Client(address, set_as_default=False) as client:
        yield client.get_executor()


def writer(folder, deaths=(), raises=()):
    """A closure, so that it travels by value: workers cannot import this file."""
    folder = str(folder)

    def run(task):
        import os
        import pathlib
        import signal
        import time

        if task in raises:
            raise ValueError("no such luck")
        if task in deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)
        (pathlib.Path(folder) / f"{task}.done").write_text(os.environ["OMP_NUM_THREADS"])

    return run


def done(folder):
    return sorted(int(p.stem) for p in folder.glob("*.done"))


def test_a_study_gives_the_same_bytes_as_on_this_machines_processes(cluster, quiet, tmp_path):
    with dask_executor(cluster.address) as executor:
        run_study(STUDY, tmp_path / "out", executor=executor)
    assert tables(tmp_path / "out") == quiet
    assert pd.read_csv(tmp_path / "out" / "relations.csv")["pearson"].notna().any()  # not all missing


def test_a_killed_worker_takes_nothing_along(cluster, quiet, tmp_path):
    networks, killed = tmp_path / "out" / "networks", []

    def kill_one():
        while not (networks.is_dir() and any(p.name[0] != "." for p in networks.iterdir())):
            time.sleep(0.01)
        nanny = psutil.Process(cluster.processes[-1].pid)
        victim = max(nanny.children(), key=lambda p: p.cpu_times().user)
        victim.kill()
        killed.append(victim.pid)

    thread = threading.Thread(target=kill_one)
    thread.start()
    with dask_executor(cluster.address) as executor:
        run_study(STUDY, tmp_path / "out", executor=executor)
    thread.join()
    assert killed
    assert tables(tmp_path / "out") == quiet
    assert not (tmp_path / "out" / "failed").exists()


@pytest.mark.parametrize("raw", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_fails_is_noted_and_the_rest_goes_on(cluster, tmp_path, raw):
    noted = {}
    function = writer(tmp_path, deaths={3}, raises={5})
    with get_executor(cluster.address) if raw else dask_executor(cluster.address) as executor:
        run_all(range(8), function, noted.__setitem__, executor=executor, pack=2)
    assert done(tmp_path) == [0, 1, 2, 4, 6, 7]
    assert set(noted) == {3, 5}
    assert "KilledWorker" in noted[3]
    assert "no such luck" in noted[5]


@pytest.mark.parametrize("raw", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_lost_scheduler_is_one_line_and_what_is_finished_is_kept(quiet, tmp_path, raw):
    out = tmp_path / "out"
    with dask_cluster(workers=1) as cluster:

        def lose():
            while not (out / "networks").is_dir() or sum(p.name[0] != "." for p in (out / "networks").iterdir()) < 2:
                time.sleep(0.01)
            cluster.kill(cluster.processes[0])

        thread = threading.Thread(target=lose)
        thread.start()
        with (
            pytest.raises(BadInput, match=r"the Dask scheduler at tcp://127.* is gone.*kept") as caught,
            get_executor(cluster.address) if raw else dask_executor(cluster.address) as executor,
        ):
            run_study(STUDY, out, executor=executor)
        thread.join()
    assert "\n" not in str(caught.value)
    assert not (out / "failed").exists()
    with ThreadPoolExecutor(1) as executor:
        assert run_study(STUDY, out, executor=executor).failed == []
    assert tables(out) == quiet


def test_workers_of_other_versions_are_refused_unless_mixed(cluster, monkeypatch):
    here = executors.versions()
    monkeypatch.setattr(executors, "versions", lambda: {**here, "torch": "9.9"})
    with (
        pytest.raises(BadInput, match=r"the Dask worker tcp://.* has other versions \(torch .* there, 9\.9 here\)"),
        dask_executor(cluster.address),
    ):
        pass
    with dask_executor(cluster.address, mixed=True) as executor:
        assert executor.submit(os.getpid).result() > 0


def test_a_worker_of_other_versions_that_comes_later_ends_the_sweep(cluster):
    with Client(cluster.address, set_as_default=False) as client:
        executor = executors.OnDask(client, cluster.address)
        executor._here = {**executors.versions(), "torch": "9.9"}
        with pytest.raises(BadInput, match=r"the worker processes failed \(the Dask worker .* has other versions"):
            run_all(range(3), print, print, executor=executor)


def test_a_client_that_is_collected_while_another_starts_does_not_stop_it(cluster, monkeypatch):
    start, found = LoopRunner._start_unlocked, []

    def collecting(self):
        if gc.isenabled():  # as it may happen at any moment
            gc.collect()
        start(self)

    def another():
        with dask_executor(cluster.address) as executor:
            found.append(executor.submit(os.getpid).result())

    class Left:  # as a Client that waits for an answer no more
        def __init__(self):
            self.itself = self

        def __del__(self):
            LoopRunner().stop()

    monkeypatch.setattr(LoopRunner, "_start_unlocked", collecting)
    Left()
    thread = threading.Thread(target=another, daemon=True)
    thread.start()
    thread.join(60)
    assert found


def test_a_call_that_is_cancelled_says_so_and_one_thread_is_kept_to(cluster):
    def threads():
        import threadpoolctl

        return {pool["num_threads"] for pool in threadpoolctl.threadpool_info()}

    with dask_executor(cluster.address) as executor:
        assert executor.submit(threads).result() <= {1}
        slow = executor.submit(time.sleep, 60)
        assert slow.cancel()
        with pytest.raises(CancelledError):
            slow.result()


@pytest.mark.slow
def test_workers_of_many_threads_and_no_workers_are_refused(monkeypatch):
    monkeypatch.setattr(executors, "WORK_WITHIN", 0.5)
    with dask_cluster(workers=0) as cluster:
        with pytest.raises(BadInput, match="has no worker: start some"), dask_executor(cluster.address):
            pass
        monkeypatch.setattr(executors, "WORK_WITHIN", 60.0)
        cluster.start_workers(1, threads=2)
        with pytest.raises(BadInput, match="runs 2 tasks in one process"), dask_executor(cluster.address):
            pass


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "no such host", "tcp://[::1"])
def test_nobody_there_is_one_line(monkeypatch, address):
    monkeypatch.setattr(executors, "ANSWER_WITHIN", 1.0)
    with pytest.raises(BadInput, match="no Dask scheduler answers at") as caught, dask_executor(address):
        pass
    assert address in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["distributed", "dask_jobqueue"])
def test_what_is_not_installed_is_one_line(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    entered = dask_executor("tcp://127.0.0.1:9") if missing == "distributed" else slurm_executor(SlurmSettings())
    with (
        pytest.raises(
            BadInput, match=rf"a run on a cluster needs the extra 'dask', pip install 'flatlens\[dask\]' .*{missing}"
        ),
        entered,
    ):
        pass


def test_slurm_that_is_not_there_is_one_line(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(BadInput, match="`sbatch` is not found"), slurm_executor(SlurmSettings()):
        pass


def test_slurm_leaves_interrupts_as_they_were(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    for name in [name for name in sys.modules if name.partition(".")[0] == "dask_jobqueue"]:
        monkeypatch.delitem(sys.modules, name)  # its import alone sets a handler
    monkeypatch.setenv("PATH", "/nonexistent")
    try:
        with pytest.raises(BadInput), slurm_executor(SlurmSettings()):
            pass
        assert "dask_jobqueue.runner" in sys.modules
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name", ["jobs", "cores"])
def test_at_least_one_job_and_core(name):
    with pytest.raises(BadInput, match=rf"{name}=0"):
        SlurmSettings(**{name: 0})


WORKERS = """
from flatlens.experiments.executors import WorkerProcesses

def neighbour():
    import queue, random, token
    return queue.__name__ + random.__name__ + token.__name__

if __name__ == "__main__":
    with WorkerProcesses(2) as workers:
        print(*(future.result() for future in [workers.submit(neighbour) for _ in range(2)]))
"""

NETWORK = """
import layers, torch

def samples():
    return torch.randn(40, 3), torch.randint(2, (40,))

def build(seed=0):
    import late
    return torch.nn.Sequential(layers.first(), late.second())
"""


@pytest.fixture
def hostile(tmp_path):
    """A folder with a file for every module of Python that `python -m` does not import itself; each leaves a mark."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    early = subprocess.run(
        [sys.executable, "-c", "import runpy, sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    ).stdout.split()
    for name in sys.stdlib_module_names - {*early, "__future__", "__main__", "antigravity", "this"}:
        if importlib.util.find_spec(name) is None:  # of another system
            continue
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'a').write({name!r} + ' ')\n")
    return folder


def test_workers_import_nothing_from_the_folder_they_start_in(hostile, tmp_path):
    for package in ("torch", "numpy", "loky", "cloudpickle", "flatlens"):
        shutil.copy(hostile / "queue.py", hostile / f"{package}.py")
    (tmp_path / "program.py").write_text(WORKERS)
    ran = subprocess.run(
        [sys.executable, tmp_path / "program.py"], cwd=hostile, capture_output=True, text=True, timeout=300
    )
    assert ran.stdout.split() == ["queuerandomtoken"] * 2, ran.stderr
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "start", [[sys.executable, "-m", "flatlens"], [str(Path(sys.executable).with_name("flatlens"))]]
)
def test_a_study_imports_the_files_beside_the_users_own_and_no_others(hostile, tmp_path, start):
    (hostile / "net.py").write_text(NETWORK)
    (hostile / "layers.py").write_text("import torch\ndef first(): return torch.nn.Linear(3, 4)\n")
    (hostile / "late.py").write_text("import torch\ndef second(): return torch.nn.Linear(4, 2)\n")
    command = [
        "study",
        "net.py:samples",
        "--model",
        "net.py:build",
        "--set",
        "max_steps=3",
        "--set",
        "seed=0:2",
        "--json",
    ]
    ran = subprocess.run(
        [*start, *command, "--measures", "mls", "--out", str(tmp_path / "out")],
        cwd=hostile, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert len(json.loads(ran.stdout)["networks"]) == 2
    assert not (tmp_path / "mark").exists()
