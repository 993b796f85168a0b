"""`torchrun -m flatlens measure`: the same numbers, one voice, and no hang where a process fails or dies."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flatlens.cli import processes, run

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
    own = [line for line in errors.splitlines() if line.startswith("flatlens:")]
    return [line for line in own if not line.endswith((" so far", " left"))]


def values(told):
    return [row["value"] for row in json.loads(told)["estimates"]]


def test_the_first_process_says_what_one_alone_says(start, capsys):
    command = measure("build", "net.py:samples", "--measures", "mls,hessian_trace", "--json")
    out, errors = start(*command, "--save", "shared.safetensors", count=3).communicate(timeout=300)
    assert run(command) == 0
    assert values(out) == pytest.approx(values(capsys.readouterr().out), rel=1e-6)
    lines = said(errors)  # on a busy machine, how far it is, too: in one voice
    assert lines[-1] == "flatlens: report saved in shared.safetensors"
    assert len(lines) == len(set(lines))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (measure("build", "net.py:spoiled"), "1 of 256 samples contain NaN or inf"),
        (measure("unseeded"), "the weights of rank 1 differ from those of rank 0"),
        (measure("build", "net.py:samples", "--measures", "nonsense"), "unknown measure 'nonsense'"),
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


VARIABLES = {"RANK": ("0", "1", "x", ""), "WORLD_SIZE": ("2", "8", "", "-1"), "LOCAL_RANK": ("0",),
             "MASTER_ADDR": ("127.0.0.1", "nowhere.invalid"), "MASTER_PORT": ("1", "x")}  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_variables_of_another_program_make_no_command_wait(seed, tmp_path):
    drawn = random.Random(seed)
    (tmp_path / "net.py").write_text(NETWORK)
    left_out = drawn.choice([(), ("MASTER_ADDR", "MASTER_PORT"), ("LOCAL_RANK",)])
    known = {name: drawn.choice(values) for name, values in VARIABLES.items() if name not in left_out}
    command = drawn.choice([("--help",), ("list", "measures"), measure("build", "net.py:samples", "--measures", "mls")])
    helped = ("--help",) if seed % 2 else ("measure", "--help")
    for arguments, more in ((command, {}), (helped, {"TORCHELASTIC_RUN_ID": "1"})):
        process = subprocess.run(
            [sys.executable, "-m", "flatlens", *arguments],
            env={**os.environ, **known, **more},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (process.returncode, said(process.stderr)) == (0, []), (arguments, known)
        assert process.stdout


def test_processes_of_another_launcher_share_when_asked(tmp_path, monkeypatch, capsys):
    (tmp_path / "net.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    known = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    command = measure("build", "net.py:samples", "--measures", "mls", "--json")
    one, other = (
        subprocess.Popen(
            [sys.executable, "-m", "flatlens", *command, "--ranks"],
            env={**os.environ, **known, "RANK": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    )
    (first, _), (second, _) = one.communicate(timeout=200), other.communicate(timeout=200)
    assert not second
    assert run(command) == 0
    assert values(first) == pytest.approx(values(capsys.readouterr().out), rel=1e-6)


@pytest.mark.parametrize("known", [{}, {"RANK": "0"}, {"RANK": "x", "WORLD_SIZE": "2"}])
def test_to_join_needs_the_variables(known, monkeypatch, capsys):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    assert run(["measure", "net.py:build", "--ranks"]) == 2
    assert "--ranks reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT" in capsys.readouterr().err


@pytest.mark.parametrize("host", [True, False])
def test_one_that_waits_says_so_and_gives_up(host, monkeypatch, capfd):
    """Rank 0 hosts the place where they meet; rank 1 looks for a host that never comes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    known = {"RANK": "01"[not host], "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in {**known, "TORCHELASTIC_RUN_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(processes, "SILENT", 0.2)
    monkeypatch.setattr(processes, "PATIENCE", 2.0)
    monkeypatch.setattr(processes, "_store", None)
    monkeypatch.setattr(sys, "argv", ["flatlens", "measure", "net.py:build"])
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert run(["measure", "net.py:build"]) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("flatlens:")]
    assert "waits for the others, at most 2 s" in lines[0]
    assert "did not meet the others" in lines[-1]
