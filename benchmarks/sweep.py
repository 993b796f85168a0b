"""The cost of a sweep beside its networks, and the gain of a second worker: `python -m benchmarks.sweep [--pairs 5]`.

Each turn runs the same digits networks with one worker and with two, into a new folder each, one thread per worker. The
clock starts when every worker has finished a first network that is not counted: then processes have started and torch
is imported. Throughput is the number of counted networks over the seconds from there to the last one. The overhead of a
run is the single worker's seconds, minus those that result.json records for training and measuring, over its networks:
reading the data, building the network, writing the folder, distributing the work. Progress is watched, as from the
command line. To show how busy the machine was, two bare processes that only count are timed against one, beside each
pair: this is the most that two workers can reach.

`--study 100` runs instead the digits study with seeds enough for 100 networks, two workers, and tells what a thousand
would take: trained in stacks, measured and written, without the tables over all networks.

`--measured` tells the most that one batched pass over a stack of 16 networks could gain in measuring them: the time of
one network on its samples, over a sixteenth of its time on 16 times as many. Its calls are then as many as a stack's,
and its products as large; a stack's products are 16 smaller ones each, and no faster.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flatlens as fl
from benchmarks import machine
from flatlens.data import digits, patches
from flatlens.experiments import Study
from flatlens.experiments.network import ComputeInto, one_thread
from flatlens.experiments.overrides import vary
from flatlens.experiments.runner import run_all
from flatlens.experiments.settings import NetworkSettings, StudyScale
from flatlens.experiments.store import Store
from flatlens.experiments.study import packs
from flatlens.models import MLP, Architecture, LeNet5, SmallVGG
from flatlens.training import SGD, Training, train
from flatlens.training.stack import LANES, Member, train_together

SPIN = 20_000_000
STEPS = 1000
"""Steps of each training: equal, so that no worker idles at the end because of a longer last network."""

DENSE = MLP(64, (64, 64, 64), 10)
STUDIED = ["mls", "relative_flatness", "ggn_trace", "local_volume", "loss"]
POPULATIONS = (
    ("MLP, batch 4", DENSE, 4, 48, 6000),
    ("MLP, batch 16", DENSE, 16, 48, 6000),
    ("MLP, batch 64", DENSE, 64, 48, 6000),
    ("LeNet, batch 16", LeNet5(classes=2), 16, 2, 100),
    ("SmallVGG, batch 16", SmallVGG(classes=2), 16, 2, 30),
)


@dataclass(frozen=True)
class Together:
    """Compute a network; the first one of each worker waits until every worker has started."""

    compute: ComputeInto
    first: tuple[str, ...]

    def __call__(self, settings: NetworkSettings) -> None:
        """Compute the network."""
        meeting = self.compute.store.out.parent
        if settings.key in self.first:
            (meeting / settings.key).touch()
            while not all((meeting / key).exists() for key in self.first):
                time.sleep(0.01)
        self.compute(settings)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--networks", type=int, default=24, help="counted ones, an even number")
    parser.add_argument("--together-only", action="store_true", help="populations alone, without workers")
    parser.add_argument("--study", type=int, default=0, help="networks of a digits study, in place of all else")
    parser.add_argument(
        "--measured", action="store_true", help="what measuring a stack could gain, in place of all else"
    )
    options = parser.parse_args(arguments)
    if options.measured:
        rows = [measured_together(n, measures) for n in (600, 1197) for measures in (STUDIED, None)]
        print(json.dumps(rows, indent=1))
        machine.save("measured_together", {"lanes": LANES, "rows": rows})
        return
    if options.study:
        print(json.dumps(whole_study(options.study), indent=1))
        return
    found = [population(*one) for one in POPULATIONS]
    if options.together_only:
        print(json.dumps(found, indent=1))
        machine.save("population", {"populations": found})
        return
    pairs = []
    for _ in range(options.pairs):
        pairs.append(pair(options.networks))
        print(pairs[-1], file=sys.stderr, flush=True)
    short = [overhead(40) for _ in range(3)]
    result = {
        "networks": options.networks,
        "speed_up": round(statistics.median(p["speed_up"] for p in pairs), 3),
        "speed_up_of_bare_processes": round(statistics.median(p["speed_up_of_bare_processes"] for p in pairs), 3),
        "overhead_ms": round(statistics.median(p["overhead_ms"] for p in pairs), 2),
        "overhead_ms_short_runs": round(statistics.median(p["overhead_ms"] for p in short), 2),
        "pairs": pairs,
        "short_runs": short,
        "populations": found,
    }
    print(json.dumps(result, indent=1))
    machine.save("sweep", result)


def whole_study(networks: int) -> dict[str, float]:
    """Return the time and the memory of a digits study of so many networks on two workers, and of a thousand."""
    grid = Study.digits("laptop")
    each = len(grid.over("seed", 0).networks())
    study = grid.over("seed", *range(-(-networks // each)))
    chosen = study.networks()[:networks]
    with tempfile.TemporaryDirectory() as folder:
        store = Store.create(Path(folder) / "out", study)
        begun = time.perf_counter()
        run_all(
            chosen, ComputeInto(store, together=LANES), _fail, workers=2,
            pack=lambda left: packs(left, together=LANES, hands=2, pack=1),
        )  # fmt: skip
        seconds = time.perf_counter() - begun
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = children.ru_utime + children.ru_stime
    return {
        "networks": networks,
        "seconds": round(seconds, 1),
        "minutes_for_1000": round(seconds / networks * 1000 / 60, 1),
        "minutes_for_1000_by_processor_time": round(processor / 2 / networks * 1000 / 60, 1),
        "peak_mib_of_a_worker": round(children.ru_maxrss / 2**10, 1),
        "load_average": os.getloadavg()[0],
    }


def measured_together(n: int, measures: list[str] | None, repeats: int = 5) -> dict[str, Any]:
    """Return how much faster at most a stack of `LANES` networks is measured than each alone, by processor time."""
    split, net = digits(train=n), DENSE.build()

    def on(times: int) -> Callable[[], object]:
        problem = fl.Problem(net, "cross_entropy", (split.x.repeat(times, 1), split.y.repeat(times)))
        return lambda: fl.measure(fl.Lens(problem), measures)

    with one_thread():
        taken = machine.interleaved({"alone": on(1), "stacked": on(LANES)}, repeats, time.process_time)
    alone, stacked = (statistics.median(taken[who]) for who in ("alone", "stacked"))
    return {
        "n": len(split.x),
        "measures": measures or "default report",
        "ms_alone": round(1000 * alone, 1),
        "times_at_most": round(LANES * alone / stacked, 2),
    }


def population(name: str, model: Architecture, batch: int, networks: int, steps: int) -> dict[str, Any]:
    """Return networks a minute, together and alone, by the clock and the processor's time; the better of two turns."""
    split = digits(train=600) if isinstance(model, MLP) else patches(train=200, test=100)

    def member(seed: int) -> Member:
        training = Training(SGD(0.05), batch_size=batch, loss="half_squared_error", max_steps=steps, seed=seed)
        return Member(vary(model, "seed", seed).build(), split.train, training, split.test)

    def together() -> str:
        return next(iter({one.why_alone for one in train_together([member(seed) for seed in range(networks)], 16)}))

    def alone() -> str:
        for seed in range(few):
            one = member(seed)
            train(one.model, one.data, one.settings, test=one.test)
        return ""

    few, why, rates = max(networks // 8, 1), "", {"together": [0.0, 0.0], "alone": [0.0, 0.0]}
    turns = (("together", together, networks), ("alone", alone, few))
    with one_thread():
        for what, run, count in (*turns, *turns):
            begun = time.perf_counter(), time.process_time()
            why = run() or why
            for place, seconds in enumerate((time.perf_counter() - begun[0], time.process_time() - begun[1])):
                rates[what][place] = max(rates[what][place], 60 * count / seconds)
    row = {
        "population": name,
        "networks": networks,
        "steps": steps,
        "together_per_minute": round(rates["together"][0], 1),
        "alone_per_minute": round(rates["alone"][0], 1),
        "times": round(rates["together"][0] / rates["alone"][0], 2),
        "times_of_processor": round(rates["together"][1] / rates["alone"][1], 2),
        "why_alone": why,
    }
    print(row, file=sys.stderr, flush=True)
    return row


def pair(networks: int) -> dict[str, float]:
    """Time one worker, then two, on the same networks."""
    load = os.getloadavg()[0]
    study = fixed("laptop", STEPS).over("seed", *range(networks + 2))
    bare = spinning(1) * 2 / spinning(2)
    one, two = sweep(study.networks(), study, 1, networks), sweep(study.networks(), study, 2, networks)
    return {
        "speed_up": round(one["seconds"] / two["seconds"], 3),
        "speed_up_of_bare_processes": round(bare, 3),
        "overhead_ms": one["overhead_ms"],
        "seconds_one": round(one["seconds"], 2),
        "seconds_two": round(two["seconds"], 2),
        "load_average_before": round(load, 2),
    }


def overhead(networks: int) -> dict[str, float]:
    """Return the overhead in runs of a fraction of a second, where packing and distributing cost most."""
    study = fixed("smoke", 50).over("seed", *range(networks + 2))
    return sweep(study.networks(), study, 1, networks)


def fixed(scale: StudyScale, steps: int) -> Study:
    """Return the digits study in the middle of its grid, with `steps` steps for every training."""
    study = Study.digits(scale).over("lr", 0.1).over("batch_size", 16)
    return study.setting("until.loss_below", None).setting("until.accuracy", None).setting("max_steps", steps)


def sweep(settings: list[NetworkSettings], study: Study, workers: int, networks: int) -> dict[str, float]:
    """Return the seconds for `networks` networks, without the first of each worker."""
    first, counted = settings[-workers:], settings[:networks]
    clock: dict[int, float] = {}

    def progress(what: str, done: int, total: int) -> None:
        if what == "networks":
            clock.setdefault(done, time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        store = Store.create(Path(folder) / "out", study)
        keys = {one.key: one for one in settings}
        function = Together(ComputeInto(store, tell=True), tuple(one.key for one in first))
        run_all(
            [*first, *counted],
            function,
            _fail,
            workers=workers,
            progress=progress,
            in_progress=lambda: store.in_progress(keys),
        )
        inside = sum(_seconds(store, one.key) for one in counted)
    seconds = clock[workers + networks] - clock[workers]
    return {"seconds": seconds, "overhead_ms": round(1000 * (seconds * workers - inside) / networks, 2)}


def spinning(processes: int) -> float:
    """Return the seconds until this many processes have each finished counting, without their start."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(processes + 1)
    started = [context.Process(target=_spin, args=(barrier,)) for _ in range(processes)]
    for process in started:
        process.start()
    barrier.wait()
    start = time.perf_counter()
    barrier.wait()
    seconds = time.perf_counter() - start
    for process in started:
        process.join()
    return seconds


def _spin(barrier: Any) -> None:
    barrier.wait()
    for _ in range(SPIN):
        pass
    barrier.wait()


def _fail(settings: NetworkSettings, trace: str) -> None:
    raise RuntimeError(trace)


def _seconds(store: Store, key: str) -> float:
    result: dict[str, Any] = store.read(key).result
    return float(result["seconds_training"] + result["seconds_measuring"])


if __name__ == "__main__":
    main()
