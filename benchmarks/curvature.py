"""flatlens beside PyHessian, curvlinops with scipy's eigsh, hessian-eigenthings and BackPACK.

    python -m benchmarks.curvature [--repeats 3] [--threads 2] [--only eigenvalue trace gauss_newton relative_flatness]
                                   [--beside PyHessian]

The networks, data (n = 2000) and threads are the same for all; `benchmarks/peers` says how to install the others. Each
contestant reports its value, its relative error against a reference made without any of them (`peers/cases.py`; root
mean square over the runs, each with new random draws), its Hessian products, its wall-clock and processor seconds, and,
on trained networks, the growth of the resident size in a separate child process. All are run in turn. One that has used
more than `PATIENCE` seconds stops after two runs, one that has used more than `A_LONG_TIME` after one. `--only` leaves
the other tasks in the file as they were. Every task records its machine and its load. About a quarter of an hour.

On a busy machine threads wait for each other, which lengthens both the wall-clock and the processor seconds. There,
only processor seconds on one thread can be compared: with `--threads 1` the results have names of their own.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.peers import cases, contestants
from benchmarks.peers.cases import Case
from benchmarks.peers.contestants import LITERAL, REBUILT, Answer, Run

PATIENCE, A_LONG_TIME = 10.0, 15.0
PEERS = ["pyhessian", "curvlinops-for-pytorch", "hessian-eigenthings", "backpack-for-pytorch", "scipy"]
KINDS = {
    "eigenvalue": ["MLP", "LeNet"],
    "trace": ["MLP", "LeNet", "tanh MLP", "GELU MLP"],
    "gauss_newton": ["MLP", "LeNet"],
    "relative_flatness": ["LeNet"],
}
REFERENCES = {  # on ReLU networks the Gauss-Newton trace equals the Hessian's
    "eigenvalue": cases.top_eigenvalue,
    "trace": cases.hessian_trace,
    "gauss_newton": cases.hessian_trace,
    "relative_flatness": cases.relative_flatness,
}


@dataclass
class Record:
    """The results of all runs of one contestant."""

    answers: list[Answer] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    failed: str = ""

    def enough(self, repeats: int) -> bool:
        """Return whether no more runs are needed."""
        runs, taken = len(self.seconds), sum(self.seconds)
        tired = taken > PATIENCE and runs >= (1 if taken > A_LONG_TIME else 2)
        return bool(self.failed) or tired or runs == repeats


def in_turn(runs: dict[str, Run], repeats: int) -> dict[str, Record]:
    """Run everyone in turn; quick ones get a first round that is not counted."""
    records = {who: Record() for who in runs}
    for turn in range(repeats + 1):
        for who, run in runs.items():
            record = records[who]
            if record.enough(repeats):
                continue
            gc.collect()
            torch.manual_seed(turn)
            start, busy = time.perf_counter(), time.process_time()
            try:
                record.answers.append(run())
            except Exception as error:  # an exception of a library is its result here
                record.failed = reason(error)
                continue
            took = time.perf_counter() - start
            if turn or took > 2:
                record.seconds.append(took)
                record.processor.append(time.process_time() - busy)
    return records


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def compare(
    task: str, case: Case, reference: float, repeats: int, folder: Path, names: tuple[str, ...] = ("",)
) -> dict[str, Any]:
    """Compare one task on one network: a row for each contestant whose name begins with one of `names`."""
    runs: dict[str, Run] = {}
    failures: dict[str, str] = {}
    chosen = {who: make for who, make in contestants.of(task, case).items() if who.startswith(names)}
    for who, make in chosen.items():
        try:
            runs[who] = make(case)
        except Exception as error:
            failures[who] = reason(error)
    rows: dict[str, Any] = {who: {"failed": why} for who, why in failures.items()}
    for who, record in in_turn(runs, repeats).items():
        rows[who] = {"failed": record.failed} if record.failed else row(record, reference)
        if "trained" in case.name and not record.failed:
            rows[who]["memory_growth_mib"] = memory(task, case, who, folder)
    return {"reference": reference, "contestants": rows}


def row(record: Record, reference: float) -> dict[str, Any]:
    answers, seconds = record.answers, record.seconds
    errors = [a.value / reference - 1 for a in answers]
    products = [a.products for a in answers if a.products is not None]
    return {
        "value": answers[0].value,
        "relative_error": math.sqrt(statistics.fmean(e * e for e in errors)),
        "products": statistics.median(products) if products else None,
        "seconds": spread(seconds),
        "processor_seconds": round(statistics.median(record.processor), 4),
        "runs": len(seconds),
        **({"parts": answers[0].parts} if answers[0].parts else {}),
    }


def spread(seconds: list[float]) -> dict[str, float]:
    """Return the median and the quartiles; for two runs the quartiles are the two values."""
    if len(seconds) > 2:
        return machine.spread(seconds)
    ends = {"quartile_low": round(min(seconds), 4), "quartile_high": round(max(seconds), 4)}
    return {"median": round(statistics.median(seconds), 4), **(ends if len(seconds) == 2 else {})}


def memory(task: str, case: Case, who: str, folder: Path) -> float | None:
    """Return the growth of the resident size in MiB, measured in a separate child process."""
    code = (
        "import torch\n"
        "from benchmarks import machine\n"
        "from benchmarks.peers import cases, contestants\n"
        f"torch.set_num_threads({torch.get_num_threads()})\n"
        f"case = cases.load({str(folder / case.file)!r})\n"
        f"run = contestants.of({task!r}, case)[{who!r}](case)\n"
        "print(machine.growth(run))"
    )
    try:
        return round(int(machine.in_a_child(code)) / 2**20, 1)
    except subprocess.CalledProcessError:
        return None


def more_of_trace(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """Return errors of trace estimates: curvlinops from 100 single probes, flatlens over seeds with 4 probes each."""
    reference, result = found["reference"], {}
    try:
        samples = contestants.hutchinson_samples(case)
        apart = float(samples.std()) / abs(reference)
        needed = math.ceil((apart / 0.01) ** 2)
        four = found["contestants"]["curvlinops Hutchinson, 4"]["seconds"]["median"]
        result["curvlinops"] = {
            **{f"error_of_{k}": abs(float(samples[:k].mean()) / reference - 1) for k in (4, 30, 100)},
            **{f"rms_error_at_{k}": apart / math.sqrt(k) for k in (4, 30, 100)},
            "matvecs_for_rms_of_1_percent": needed,
            "seconds_for_rms_of_1_percent_extrapolated": four / 4 * needed,
        }
    except Exception as error:
        result["curvlinops"] = {"failed": reason(error)}
    if case.smooth:
        try:
            result["flatlens"] = {"rms_error_at_4_over_20_seeds": contestants.rms_error(case, reference, 4, 20)}
        except Exception as error:
            result["flatlens"] = {"failed": reason(error)}
    return result


def conclude(task: str, case: Case, found: dict[str, Any]) -> None:
    """Add the results of a task that are not rows."""
    rows = {who: r for who, r in found["contestants"].items() if "failed" not in r}
    median = {who: r["seconds"]["median"] for who, r in rows.items()}
    ours = next((who for who in rows if who.startswith("flatlens")), None)
    if task == "trace" and "trained" in case.name:
        found["probes"] = more_of_trace(case, found)
    for literal in (who for who in (LITERAL, REBUILT) if task == "relative_flatness" and who in rows):
        whole = rows[literal]["seconds_of_all_weights_extrapolated"] = rows[literal]["value"]
        rows[literal] |= {"value": None, "relative_error": None}
        found[f"{literal}: over flatlens, extrapolated"] = round(whole / median[ours], 1) if ours else None
    if task == "gauss_newton" and ours and len(rows) > 1:
        for clock, of in (("", median), ("_processor", {who: r["processor_seconds"] for who, r in rows.items()})):
            best = min(seconds for who, seconds in of.items() if who != ours)
            found[f"flatlens_over_better_backpack{clock}"] = round(of[ours] / best, 3)
        found["largest_gap_at_a_layer"] = gap(rows[ours]["parts"], rows[next(w for w in rows if w != ours)]["parts"])


def gap(layers: dict[str, float], parameters: dict[str, float]) -> float:
    """Return the relative difference between layers' traces and the sums of their parameters' traces."""
    of_layer = {layer: sum(v for name, v in parameters.items() if name.rpartition(".")[0] == layer) for layer in layers}
    return max(abs(value / of_layer[layer] - 1) for layer, value in layers.items())


def show(task: str, name: str, found: dict[str, Any]) -> None:
    print(f"\n{task}: {name}; reference {found['reference']:.7g}")
    heads = (
        f"{'value':>12} {'rel. error':>10} {'products':>8} {'seconds (quartiles), runs':>30} {'cpu s':>7} {'MiB':>8}"
    )
    print(f"  {'':36} {heads}")
    for who, r in found["contestants"].items():
        if "failed" in r:
            print(f"  {who:36} {r['failed']}")
            continue
        s = r["seconds"]
        value, error, products = (
            "" if r[key] is None else f"{r[key]:.{digits}g}"
            for key, digits in (("value", 6), ("relative_error", 2), ("products", 6))
        )
        between = f"({s['quartile_low']:.3g}..{s['quartile_high']:.3g})" if "quartile_low" in s else ""
        print(
            f"  {who:36} {value:>12} {error:>10} {products:>8} {s['median']:>9.3g} {between:>17} {r['runs']:>2} "
            f"{r['processor_seconds']:>7.3g} {r.get('memory_growth_mib') or '':>8}"
        )
    for key in [key for key in found if key not in ("reference", "contestants")]:
        print(f"  {key}: {json.dumps(found[key], indent=1) if isinstance(found[key], dict) else found[key]}")
    sys.stdout.flush()


def versions() -> dict[str, str]:
    """Return the peers' versions; print a line for each that is not installed."""
    found = {}
    for name in PEERS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
            print(f"{name} is not installed: its rows say so, the rest goes on", file=sys.stderr)
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS))
    options.add_argument("--beside", nargs="+", default=[""], help="contestants whose names begin so, besides flatlens")
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    result: dict[str, Any] = {"n": cases.N_SAMPLES, "repeats": chosen.repeats, "versions": versions()}
    tasks = machine.earlier("curvature").get("tasks", {})
    key = {task: f"{task}, one thread" if chosen.threads == 1 else task for task in chosen.only}
    tasks |= {key[task]: {"machine": machine.describe(), "networks": {}} for task in chosen.only}
    with tempfile.TemporaryDirectory() as folder:
        for kind in cases.BUILDERS:
            wanted = [task for task in chosen.only if kind in KINDS[task]]
            for case in cases.build([kind]) if wanted else []:
                cases.save(case, Path(folder))
                for task in wanted:
                    if task == "relative_flatness" and "trained" not in case.name:
                        continue
                    names = ("flatlens", *chosen.beside)
                    found = compare(task, case, REFERENCES[task](case), chosen.repeats, Path(folder), names)
                    conclude(task, case, found)
                    show(task, case.name, found)
                    tasks[key[task]]["networks"][case.name] = found
                machine.save("curvature", {**result, "tasks": tasks})


if __name__ == "__main__":
    main()
