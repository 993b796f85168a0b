"""How well `flatlens measure` announces its memory: `python -m benchmarks.announced [CASE ...]`.

Each case in a process of its own, by the command line: what it announced, the most bytes resident from then on (the
network, the data and the results included), and the one over the other. Ten minutes on two cores.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks import machine
from benchmarks.timed import mlp
from flatlens import cli
from flatlens.cli import inputs, terminal
from flatlens.memory import OfProcess
from flatlens.models import LeNet5

Pair = tuple[Tensor, Tensor]


def noise(n: int, *shape: int, classes: int) -> Pair:
    """Return n samples and their labels."""
    drawn = torch.Generator().manual_seed(0)
    return torch.randn(n, *shape, generator=drawn), torch.randint(classes, (n,), generator=drawn)


class Tokens(nn.Module):
    """Two blocks of a transformer over 32 tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(16, 64)
        block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, 10) of tokens (n, 32, 16)."""
        out: Tensor = self.head(self.blocks(self.embed(x)).mean(1))
        return out


class Rows(Dataset[Pair]):
    """Rows of a file of float32, read when they are asked for."""

    def __init__(self, path: Path, width: int) -> None:
        self.path, self.width = path, width

    def __len__(self) -> int:
        return self.path.stat().st_size // (4 * self.width)

    def __getitem__(self, number: int) -> Pair:
        x = np.fromfile(self.path, np.float32, self.width, offset=4 * self.width * number)
        return torch.from_numpy(x), torch.tensor(number % 10)


WIDTH, ROWS = 512, 20_000


def in_a_file() -> Rows:
    """Return 39 MiB of noise, on disk."""
    path = Path(tempfile.gettempdir()) / "flatlens_announced.f32"
    drawn = np.random.default_rng(0)
    with path.open("wb") as file:
        for _ in range(ROWS // 1000):
            file.write(drawn.standard_normal((1000, WIDTH), np.float32).tobytes())
    return Rows(path, WIDTH)


@dataclass(frozen=True)
class Case:
    """A network, its data and what the pass may take."""

    what: str
    build: Callable[[], nn.Module]
    samples: Callable[[], Pair | Rows]
    memory: str = "1GiB"


CASES = {
    "samples": Case(
        "MLP 4-8-3, 1,000,000 samples", lambda: mlp(4, 8, 3, seed=0), lambda: noise(1_000_000, 4, classes=3), "256MiB"
    ),
    "weights": Case(
        "MLP 784-5632-7680-128-10 of 49 million parameters, 16 samples",
        lambda: mlp(784, 5632, 7680, 128, 10, seed=0),
        lambda: noise(16, 784, classes=10),
        "512MiB",
    ),
    "outputs": Case(
        "MLP 64-128-10000, 256 samples", lambda: mlp(64, 128, 10_000, seed=0), lambda: noise(256, 64, classes=10_000)
    ),
    "lenet": Case(
        "LeNet-5, 1000 images of 3 x 32 x 32",
        lambda: LeNet5().build(),
        lambda: noise(1000, 3, 32, 32, classes=10),
        "256MiB",
    ),
    "transformer": Case(
        "transformer of two blocks, 256 samples of 32 tokens", Tokens, lambda: noise(256, 32, 16, classes=10)
    ),
    "file": Case(
        "MLP 512-32-10, 20,000 samples in a file of 39 MiB", lambda: mlp(WIDTH, 32, 10, seed=0), in_a_file, "32MiB"
    ),
}


def measured(name: str, **changes: Any) -> dict[str, Any]:
    """Run one case by the command line, in this process; `changes` are those of a smaller one."""
    case = CASES[name] = replace(CASES[name], **changes)
    gauge = OfProcess()
    peaks: list[Any] = []
    found: list[Any] = []

    def announce(lens: Any, work: Any, **options: Any) -> None:
        peaks.append(gauge.peak())  # of the making of the problem
        found.append(terminal.announce(lens, work, **options))
        peaks.append(gauge.peak())  # once the trials are over

    inputs.announce = announce  # type: ignore[attr-defined, assignment]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "case.py"
        told = f"from benchmarks.announced import CASES\ncase = CASES[{name!r}]\n"
        file.write_text(f"{told}build, samples = case.build, case.samples\n")
        start = time.perf_counter()
        words = ["measure", f"{file}:build", "--data", f"{file}:samples", "--loss", "cross_entropy"]
        if status := cli.run([*words, "--memory", case.memory]):
            raise SystemExit(status)
    announced, used = found[0].peak, max(*peaks, gauge.peak())
    return {
        "case": case.what,
        "memory": case.memory,
        "announced_mib": round(announced / 2**20),
        "used_mib": round(used / 2**20),
        "ratio": round(announced / used, 2),
        "peaks_mib": [round(peak / 2**20) for peak in (*peaks, gauge.peak())],
        "seconds": round(time.perf_counter() - start, 1),
    }


if __name__ == "__main__":
    machine.measure_cases("announced", CASES, __doc__)
