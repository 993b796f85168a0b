"""What every result says of where it was measured, and how two things are timed against each other."""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

RESULTS = Path(__file__).parent / "results"
BUSY = os.getloadavg()[0]  #: before anything here has run


def describe() -> dict[str, Any]:
    """The machine, the versions, the threads and how busy it was."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load_average_before": round(BUSY, 2),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def interleaved(contestants: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each contestant, run in turn so that a busy moment hits all alike; one warm-up round is not
    counted."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(repeats + 1):
        for name, run in contestants.items():
            gc.collect()
            start = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def spread(seconds: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else 3 * seconds
    return {"median": round(middle, 4), "quartile_low": round(low, 4), "quartile_high": round(high, 4)}


def resident() -> int:
    """Bytes resident now."""
    return int(psutil.Process().memory_info().rss)


def growth(run: Callable[[], Any], every: float = 0.002) -> int:
    """The most bytes resident while `run` runs, over the size just before; sampled: the process's own peak is older."""
    before = most = resident()
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(every):
            most = max(most, resident())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        run()
    finally:
        done.set()
        watcher.join()
    return most - before


def in_a_child(code: str) -> str:
    """The last line that a process of its own prints, in which nothing was held before."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def earlier(name: str) -> dict[str, Any]:
    """The result that lies there, or nothing."""
    path = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def save(name: str, result: dict[str, Any]) -> Path:
    """Write a result beside the description of its machine."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": describe(), **result}, indent=1) + "\n")
    return path
