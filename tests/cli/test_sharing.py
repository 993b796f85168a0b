"""`torchrun -m flatlens measure`: the same numbers, one voice, and no hang where a process fails or dies."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

NETWORK = """
import time
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10))

def unseeded():
    torch.seed()
    return nn.Linear(64, 10)

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = build()

    def forward(self, x):
        print("working", flush=True)
        time.sleep(0.1)
        return self.net(x)

def samples():
    torch.manual_seed(1)
    return torch.randn(600, 64), torch.arange(600) % 10

def spoiled():
    x, y = samples()
    x[400] = torch.nan  # in the second batch of 256
    return torch.utils.data.DataLoader(list(zip(x, y)), batch_size=256)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """(command line) -> a running process; its whole group is ended after the test."""
    (tmp_path / "net.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    begun = []

    def of(*arguments, count=1):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)] if count > 1 else []
        begun.append(
            subprocess.Popen(
                [sys.executable, *launcher, "-m", "flatlens", *arguments],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return begun[-1]

    yield of
    for process in begun:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def measure(network, data="net.py:samples", *more):
    return ("measure", f"net.py:{network}", "--data", data, "--loss", "cross_entropy", *more)


def said(errors):
    """What flatlens itself says beside its progress; torchrun tells of a failure in its own words, too."""
    return [line for line in errors.splitlines() if line.startswith("flatlens:") and not line.endswith(" so far")]


@pytest.mark.parametrize("count", [2, 3])
def test_the_first_process_says_what_one_alone_says(start, tmp_path, count):
    command = measure("build", "net.py:samples", "--measures", "mls,hessian_trace", "--json")
    alone, shared = (
        start(*command, "--save", f"{n}.safetensors", count=n).communicate(timeout=300) for n in (1, count)
    )
    one, many = (json.loads(out)["estimates"] for out, _ in (alone, shared))
    assert [row["value"] for row in many] == pytest.approx([row["value"] for row in one], rel=1e-6)
    lines = said(shared[1])  # on a busy machine, how far it is, too: in one voice
    assert lines[-1] == f"flatlens: report saved in {count}.safetensors"
    assert len(lines) == len(set(lines))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (measure("build", "net.py:spoiled"), "1 of 256 samples contain NaN or inf"),
        (measure("unseeded"), "the weights of rank 1 differ from those of rank 0"),
        (measure("build", "net.py:samples", "--measures", "nonsense"), "no measure is called 'nonsense'"),
        (("bounds", "net.py:build"), "`flatlens bounds` cannot use several processes"),
    ],
)
def test_what_goes_wrong_is_said_once(start, command, words):
    process = start(*command, count=2)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 1  # torchrun's own
    assert not out
    (line,) = said(errors)
    assert words in line


@pytest.mark.parametrize("dies", [0, 1])
def test_a_process_that_dies_ends_all_with_one_line(start, dies):
    process = start(*measure("Slow", "net.py:samples", "--measures", "average_sharpness"), count=2)
    assert process.stderr.readline()
    deadline = time.monotonic() + 60
    while len(ranks := ranks_of(process.pid)) < 2 or not all(ranks.values()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(3)
    os.kill(ranks[str(dies)], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    (line,) = said(errors)
    assert "another process (rank) stopped" in line


def ranks_of(parent):
    """Process of each rank."""
    found = {}
    children = subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True, check=False).stdout.split()
    for child in children:
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        known = dict(part.split(b"=", 1) for part in variables if b"=" in part)
        if b"RANK" in known:
            found[known[b"RANK"].decode()] = int(child)
    return found
