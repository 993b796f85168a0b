"""A Dask scheduler and its workers, real processes on loopback."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ENVIRONMENT = {
    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0",  # a task that kills its worker is given up at once
    "OMP_NUM_THREADS": "2",  # flatlens itself has to keep to one
}


@dataclass
class Cluster:
    folder: Path
    address: str = ""
    processes: list[subprocess.Popen] = field(default_factory=list)

    def start(self, command, *arguments):
        with (self.folder / f"{command}.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"distributed.cli.dask_{command}", *arguments, "--no-dashboard"],
                **{"stdout": log, "stderr": log, "env": os.environ | ENVIRONMENT, "start_new_session": True},
            )
        self.processes.append(process)
        return process

    def start_scheduler(self):
        file = self.folder / "scheduler.json"
        scheduler = self.start("scheduler", "--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(file))
        end = time.monotonic() + 60
        while not file.exists() or not file.read_text():
            assert time.monotonic() < end, (self.folder / "scheduler.log").read_text()
            time.sleep(0.05)
        self.address = json.loads(file.read_text())["address"]
        return scheduler

    def start_workers(self, number, threads=1):
        return self.start(
            *("worker", self.address, "--nworkers", str(number), "--nthreads", str(threads), "--memory-limit", "0"),
            *("--local-directory", str(self.folder), "--host", "127.0.0.1"),
        )

    def kill(self, process):
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            one.send_signal(signal.SIGKILL)
        process.wait()
        self.processes.remove(process)


@contextmanager
def dask_cluster(workers=2, threads=1):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        cluster = Cluster(Path(folder))
        try:
            cluster.start_scheduler()
            if workers:
                cluster.start_workers(workers, threads)
            yield cluster
        finally:
            for process in reversed(list(cluster.processes)):
                cluster.kill(process)
