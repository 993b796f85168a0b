"""A description of the machine for every result, and the timing of contestants in turn."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import torch

RESULTS = Path(__file__).parent / "results"
BUSY = os.getloadavg()[0]  #: load before the benchmark runs


def describe() -> dict[str, Any]:
    """Return the machine, the versions, the threads and the load."""
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


def merged(path: Path, rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Return the rows of a CSV file with these in place of its own that have the same values in some columns."""
    if not path.exists():
        return rows
    before = pd.read_csv(path)
    if rows.empty:
        return before
    new = pd.MultiIndex.from_frame(rows[by])
    return pd.concat([before[~pd.MultiIndex.from_frame(before[by]).isin(new)], rows], ignore_index=True)


def interleaved(
    contestants: dict[str, Callable[[], Any]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Return seconds of each contestant, run in turn so that a busy moment affects all alike.

    One warm-up round is not counted. On a busy machine `time.process_time` tells more, with one thread.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(repeats + 1):
        for name, run in contestants.items():
            gc.collect()
            start = clock()
            run()
            if turn:
                seconds[name].append(clock() - start)
    return seconds


def spread(seconds: list[float]) -> dict[str, float]:
    """Return the median and the quartiles."""
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else 3 * seconds
    return {"median": round(middle, 4), "quartile_low": round(low, 4), "quartile_high": round(high, 4)}


def beside_the_floor(seconds: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Return by contestant its spread, the ratio of its median to the floor's, and the range of ratios in turn."""
    least = statistics.median(seconds["floor"])
    found: dict[str, dict[str, Any]] = {}
    for who, times in seconds.items():
        ratios = sorted(mine / one for mine, one in zip(times, seconds["floor"], strict=True))
        found[who] = {
            **spread(times),
            "ratio_to_floor": round(statistics.median(times) / least, 3),
            "ratios_in_turn": [round(ratios[0], 3), round(ratios[-1], 3)],
        }
    return found


def each_network(name: str, outputs: int, chosen: dict[str, Callable[[], dict[str, Any]]], *, whole: bool) -> Path:
    """Measure networks one by one, and save after each; unless `whole`, earlier results of the others are kept."""
    networks, path = {} if whole else earlier(name).get("networks", {}), RESULTS / f"{name}.json"
    for network, measured in chosen.items():
        networks[network] = {"machine": describe(), **measured()}
        print(network, json.dumps(networks[network], indent=1))
        path = save(name, {"outputs": outputs, "networks": networks})
    return path


def resident() -> int:
    """Return the bytes resident now."""
    return int(psutil.Process().memory_info().rss)


def growth(run: Callable[[], Any], every: float = 0.002) -> int:
    """Return the most bytes resident while `run` runs, above the size just before.

    The size is sampled, as the process's own peak may be from earlier.
    """
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
    """Return the last line that a fresh process prints, which holds no memory from before."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def answer(module: str, function: str, *arguments: object) -> Any:
    """Return what a function of the benchmarks returns in a fresh process; print it to stderr."""
    code = f"import json\nfrom benchmarks import {module}\nprint(json.dumps({module}.{function}{arguments!r}))"
    found = json.loads(in_a_child(code))
    print(found, file=sys.stderr)
    return found


def measure_cases(module: str, cases: Iterable[str], doc: str | None) -> None:
    """Measure the cases named on the command line, or all, each in a fresh process; keep those that lie there."""
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("cases", nargs="*", choices=[[], *cases], help="all, where none is named")
    rows = earlier(module).get("rows", {})
    for name in options.parse_args().cases or cases:
        rows[name] = answer(module, "measured", name)
        save(module, {"rows": rows})


def earlier(name: str) -> dict[str, Any]:
    """Return the saved result, or an empty one."""
    path = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def save(name: str, result: dict[str, Any]) -> Path:
    """Write a result together with the description of its machine."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": describe(), **result}, indent=1) + "\n")
    print(f"written to {path}", file=sys.stderr)
    return path
