"""Several processes that share the samples say what one says, and end together."""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from flatlens.problem import Ranks
from flatlens.problem.batches import joined
from flatlens.problem.data import Data

PROGRAM = Path(__file__).parent / "ranks_program.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
MEASURES = (
    "mls,representation_mls,relative_flatness,neuron_flatness,sharpness,hessian_trace,average_sharpness,loss,test_loss"
)


def environment(**more):
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def values(tmp_path, count, cases):
    """What the first of so many processes leaves of each case."""
    out = tmp_path / f"{count}.json"
    command = [*TORCHRUN, str(count), str(PROGRAM), str(out), json.dumps(cases)]
    subprocess.run(command, check=True, env=environment(), timeout=900, capture_output=True)
    return json.loads(out.read_text())


def alone():
    """(case) -> what one process finds."""
    spec = spec_from_file_location("ranks_program", PROGRAM)
    program = module_from_spec(spec)
    spec.loader.exec_module(program)
    return program.measured


def require_same(one, many):
    assert one.keys() == many.keys()
    for name, (value, stderr) in one.items():
        assert many[name][0] == pytest.approx(value, rel=1e-6, abs=1e-12, nan_ok=True), name
        assert many[name][1] == pytest.approx(stderr, rel=1e-6, abs=1e-12, nan_ok=True), name


@pytest.mark.parametrize(
    ("count", "cases"),
    [
        pytest.param(2, [(30, "40KB", 0)], id="two, chunks of a few samples"),
        pytest.param(
            3,
            [(31, "1GiB", 12), (20, "1GiB", 12), (10, "1GiB", 0)],
            id="three: batches of 12, 12 and 7; one without a batch; two of them without a sample",
        ),
    ],
)
def test_ranks_give_what_one_process_gives(tmp_path, count, cases):
    cases = [(*case, MEASURES) for case in cases]
    for case, many in zip(cases, values(tmp_path, count, cases), strict=True):
        one = alone()(*case)
        require_same(one, many)
        assert sum(math.isfinite(value) for value, _ in one.values()) > 2 * case[0] + 20


@pytest.mark.slow
def test_every_measure_is_the_same(tmp_path):
    one, (two,) = alone()(50, "40KB", 0), values(tmp_path, 2, [(50, "40KB", 0)])
    require_same(one, two)
    assert sum(math.isfinite(value) for value, _ in one.values()) > 350


UNLIKE = {
    "weights": "NotAlike .* the weights of rank 1 differ from those of rank 0, the first in '0.weight'",
    "running statistics": "NotAlike .* the buffers of rank 1 .* '1.running_mean': .* running statistics .* broadcast",
    "values": r"BadData Problem\(data=...\): the values of rank 1 differ",
    "held-out values": r"BadData Problem\(test=...\): the values of rank 1 differ",
    "shapes": "BadData .* the shapes of rank 1 differ",
    "sampler": "BadData .* the loader picks other samples in rank 1 .* DistributedSampler",
    "first batch": "BadData .* the first samples of rank 1 differ",
    "length": "BadData .* the numbers of samples of rank 1 differ",
    "budget": r"BadInput Tracker\(budget=...\): processes that measure together",
    "forward": "forward failed .* a large feature",
    "why": "once_differentiable",
    "tracked": "^the buffers of rank 1",
}


def test_what_differs_between_ranks_is_the_first_one_s_or_refused_by_both(tmp_path):
    """An error of one alone is met by both: none waits for the other."""
    command = [*TORCHRUN, "2", str(Path(__file__).parent / "unlike_program.py"), str(tmp_path)]
    subprocess.run(command, check=True, env=environment(), timeout=300, capture_output=True)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first["shared"] == pytest.approx(first["alone"], rel=1e-6)
    assert [first.pop("shown"), second.pop("shown")] == [2, 0]
    assert first == second
    for what, words in UNLIKE.items():
        assert re.search(words, first[what]), what
    assert first["remembered"] == [3.0, 1.0]
    assert first["kinds"] == ["undefined", "exact", "exact"]
    for name in ("one", "own0", "own1"):
        assert len((tmp_path / f"{name}.csv").read_text().splitlines()) == 3, name


class Counted(Dataset):
    """Which samples were asked for is seen."""

    def __init__(self, n):
        self.n, self.read = n, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.read.append(i)
        return torch.full((2,), float(i)), torch.tensor([0.0])


class Stream(IterableDataset):
    def __iter__(self):
        return ((torch.full((2,), float(i)), torch.tensor([0.0])) for i in range(25))


SOURCES = {
    "tensors": lambda: (torch.arange(25.0)[:, None].expand(25, 2), torch.zeros(25, 1)),
    "loader": lambda: DataLoader(Counted(25), batch_size=10),
    "stream": lambda: DataLoader(Stream(), batch_size=10),
}


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("most", [3, 10, 100])
@pytest.mark.parametrize("source", SOURCES)
def test_shares_are_the_data_each_sample_once_and_in_order(source, most, size):
    data = Data(SOURCES[source](), "data=...")
    parts = [dict(data.shared(most, Ranks(rank, size))) for rank in range(size)]
    every = {number: batch for part in parts for number, batch in part.items()}
    assert len(every) == sum(map(len, parts))
    assert joined([every[number] for number in sorted(every)])[0][:, 0].tolist() == list(range(25))
    assert dict(data.shared(most, Ranks())).keys() == every.keys()


def test_a_rank_reads_its_own_batches_of_a_loader_alone():
    dataset = Counted(25)
    data = Data(DataLoader(dataset, batch_size=10), "data=...")
    for _ in range(2):
        assert [batch[0][:, 0].tolist() for _, batch in data.shared(100, Ranks(1, 2))] == [list(range(10, 20))]
    assert dataset.read == 2 * list(range(10, 20))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_a_rank_that_dies_is_noticed_without_a_launcher():
    """Two bare processes that keep adding up; one is killed."""
    program = (
        "import torch; from flatlens.problem import Ranks; ranks = Ranks.joined(); print('joined', flush=True)\n"
        "while True: ranks.total(torch.ones(3))"
    )
    known = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    first, second = (
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=environment(RANK=rank, **known),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    )
    try:
        assert first.stdout.readline() == second.stdout.readline() == "joined\n"
        time.sleep(0.5)
        second.send_signal(signal.SIGKILL)
        _, errors = first.communicate(timeout=60)
        assert first.returncode == 1
        assert "flatlens.errors.LostRank: another process (rank) stopped" in errors.splitlines()[-1]
    finally:
        first.kill()
        second.kill()
