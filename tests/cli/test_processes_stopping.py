"""Ctrl-C and SIGTERM: one line, nobody else's complaints, and an end within two seconds."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flatlens.cli.processes import stoppable

NET = """
import sys, time, torch
from torch import nn

class Net(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what, self.fc = what, nn.Linear(4, 3)

    def forward(self, x):
        print("going", file=sys.stderr, flush=True)
        if self.what == "long":  # one call into torch of minutes
            torch.mm(torch.ones(20_000, 20_000), torch.ones(20_000, 20_000))
        while True:
            try:
                time.sleep(60)
            except BaseException:
                if self.what != "deaf":
                    raise

def waiting(): return Net("")
def deaf(): return Net("deaf")
def long(): return Net("long")
def samples(): return torch.randn(30, 4), torch.arange(30) % 3
"""


def started(words, until):
    """The process, when the line has been said."""
    process = subprocess.Popen(
        [sys.executable, "-m", "flatlens", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if until in line:
            return process
    raise AssertionError("it ended before")


def stopped(process, number):
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert out == ""
    return process.returncode, err.splitlines()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("what", ["waiting", "deaf", "long"])
def test_the_users_code_cannot_hold_it_up(tmp_path, monkeypatch, what, number):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    words = ["measure", f"net.py:{what}", "--data", "net.py:samples", "--loss", "cross_entropy"]
    status, lines = stopped(started(words, "going"), number)  # the work itself takes minutes more than its limit
    assert status == 128 + number
    said = [line for line in lines if line != "going" and not line.endswith(" so far")]  # on a busy machine
    assert said == ["flatlens: stopped"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_study_says_that_nothing_is_lost(tmp_path, number):
    process = started(["study", "digits", "--out", str(tmp_path / "out")], "at laptop scale")
    time.sleep(3)  # workers start
    status, lines = stopped(process, number)
    assert status == 128 + number
    assert lines[-1] == "flatlens: stopped: the finished networks are kept, and the same command continues"
    assert all(line.startswith("flatlens: ") for line in lines)
    assert not list(Path("/dev/shm").glob(f"sem.loky-{process.pid}-*"))


def test_leftover_semaphores_are_removed_in_silence():
    """One that is gone already, as if the command had been stopped between removing it and telling the tracker."""
    left = "from loky.backend import resource_tracker as tracker; import os; tracker.ensure_running()"
    with stoppable():
        code = f"{left}; tracker.register('/loky-none', 'semlock'); os._exit(0)"
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.stderr == ""
