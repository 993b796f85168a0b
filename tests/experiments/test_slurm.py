"""A study on a real Slurm of one node, started here on loopback: the same bytes as on this machine's processes."""

import os
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest
from small_study import quietly, small_study, tables

from flatlens.errors import BadInput
from flatlens.experiments import run_study
from flatlens.experiments.executors import SlurmSettings, slurm_executor

SCRIPTS = Path(__file__).parent / "slurm"
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch")
STUDY = small_study(networks=8, steps=3000)
SETTINGS = SlurmSettings(jobs=2, memory="1GiB", walltime="00:10:00", interface="lo", queue="main")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def slurm():
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed (Debian: apt-get install slurmctld slurmd slurm-client munge)")
    if os.geteuid() != 0:
        pytest.skip("slurmd has to be started by root")
    pytest.importorskip("dask_jobqueue")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(Path(folder) / "slurm.conf"))
        try:
            subprocess.run([SCRIPTS / "start.sh", folder, "2"], check=True, stdout=subprocess.DEVNULL)
            yield folder
        finally:
            subprocess.run([SCRIPTS / "stop.sh", folder], check=True)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    return quietly(STUDY, tmp_path_factory.mktemp("quiet") / "out")


def jobs():
    answer = subprocess.run(["squeue", "--noheader", "--format=%i"], check=True, capture_output=True, text=True)
    return answer.stdout.split()


def test_a_study_on_two_jobs_gives_the_same_bytes(slurm, quiet, tmp_path):
    with slurm_executor(SETTINGS) as executor:
        in_jobs = {executor.submit(os.getenv, "SLURM_JOB_ID").result() for _ in range(2)}
        run_study(STUDY, tmp_path / "out", executor=executor)
    assert None not in in_jobs
    assert tables(tmp_path / "out") == quiet
    end = time.monotonic() + 120
    while jobs():  # they end with the executor
        assert time.monotonic() < end
        time.sleep(0.2)


def test_a_job_that_is_cancelled_is_replaced_and_the_study_goes_on(slurm, quiet, tmp_path):
    networks, cancelled = tmp_path / "out" / "networks", []

    def cancel():
        while not (networks.is_dir() and any(p.name[0] != "." for p in networks.iterdir())):
            time.sleep(0.02)
        cancelled.extend(jobs())
        subprocess.run(["scancel", *cancelled], check=True)

    thread = threading.Thread(target=cancel)
    thread.start()
    with slurm_executor(SETTINGS) as executor:
        run_study(STUDY, tmp_path / "out", executor=executor)
    thread.join()
    assert cancelled
    assert tables(tmp_path / "out") == quiet
    assert not (tmp_path / "out" / "failed").exists()


def test_what_slurm_refuses_is_one_line(slurm):
    for settings in (SlurmSettings(queue="nonsense", interface="lo"), SlurmSettings(cores=10_000, interface="lo")):
        with pytest.raises(BadInput, match=r"Slurm refused the jobs \(") as caught, slurm_executor(settings):
            pass
        assert "\n" not in str(caught.value)


def test_an_interface_that_is_not_there_is_one_line(slurm):
    with (
        pytest.raises(BadInput, match="no scheduler for Slurm's workers"),
        slurm_executor(SlurmSettings(interface="nonsense0")),
    ):
        pass
