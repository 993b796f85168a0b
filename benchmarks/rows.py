"""Results as rows of one table, and as promises that hold or are broken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks import machine

TASKS = {
    "eigenvalue": "Largest eigenvalue of the Hessian",
    "trace": "Trace of the Hessian",
    "gauss_newton": "Trace of the Gauss-Newton matrix, by parameter",
    "relative_flatness": "Relative flatness",
}
MOST = {
    "pass": {"256 hidden": 1.3, "2048 hidden": 1.1},
    "three measures": {"256 hidden": 1.5, "2048 hidden": 1.2, "ViT": 1.2, "BERT": 1.2, "GPT-2": 0.9, "MLP": 0.85,
                       "LeNet": 1.0},
    "summary": {"MLP": 1.3, "LeNet": 1.3, "VGG": 1.3, "ResNet": 1.3, "ViT": 1.3},
}  # fmt: skip
"""The most floors that each contestant may take, by a part of the network's name."""

PASS, DEFINITIONS = "The pass beside its floor", "The definitions read literally"


@dataclass(frozen=True)
class Row:
    """The result of a contestant at a task on a network."""

    task: str
    network: str
    who: str
    seconds: dict[str, float]  #: median, quartile_low, quartile_high
    value: float | None = None
    error: float | None = None  #: relative error, root mean square over runs
    products: float | None = None
    memory: float | None = None  #: MiB, growth above the size just before
    ratio: float | None = None  #: ratio to the network's first row, or to flatlens
    failed: str = ""

    @property
    def ours(self) -> bool:
        """Return whether it is flatlens."""
        return self.who.startswith(("flatlens", "pass", "with diagonals", "fl.measure"))


@dataclass(frozen=True)
class Promise:
    """A condition on the results, and what was measured."""

    says: str
    where: str
    measured: str
    kept: bool


def rows() -> Iterator[Row]:
    """Yield the rows of all results."""
    for name, network in _passes("threads 1").items():
        for who, r in network["contestants"].items():
            where = f"{name}, n = {network['n']}, {network['floor']}"
            yield Row(PASS, where, who, _seconds(r), memory=r.get("memory_growth_mib"), ratio=r["ratio_to_floor"])
    found = machine.earlier("definitions")
    for who, seconds in found.get("seconds", {}).items():
        yield Row(DEFINITIONS, f"MLP {'-'.join(map(str, found['widths']))}, n = {found['n']}", who, seconds,
                  ratio=found["flatlens_times_as_fast_as"].get(who))  # fmt: skip
    curvature = machine.earlier("curvature")
    for task, title in TASKS.items():
        networks = curvature.get("tasks", {}).get(task, {}).get("networks", {})
        for name, network in networks.items():
            for who, r in network["contestants"].items():
                where = f"{name}, n = {curvature['n']}"
                if "failed" in r:
                    yield Row(title, where, who, {}, failed=r["failed"])
                    continue
                yield Row(title, where, who, _seconds(r), r["value"], r["relative_error"], r["products"],
                          r.get("memory_growth_mib"))  # fmt: skip


def _passes(threads: str) -> dict[str, Any]:
    """Return what was timed beside the floor with these threads, by network."""
    networks = machine.earlier("one_pass").get("networks", {})
    return {name: network[threads] for name, network in networks.items() if threads in network}


def _seconds(r: dict[str, Any]) -> dict[str, float]:
    spread = r.get("seconds", r)
    return {key: spread[key] for key in ("median", "quartile_low", "quartile_high") if key in spread}


def promises() -> Iterator[Promise]:
    """Yield the conditions on the results."""
    for name, network in _passes("threads 1").items():
        for who, most in MOST.items():
            for held in [held for part, held in most.items() if part in name]:
                r = network["contestants"][who]
                low, high = r["ratios_in_turn"]
                told = f"{r['ratio_to_floor']:.2f} (each turn {low:.2f} to {high:.2f})"
                yield Promise(f"{who}: at most {held} of the floor", name, told, r["ratio_to_floor"] <= held)
        few, told = (1.5 if network["n"] >= 1000 else 2.0), network["problem_in_forward_passes"]
        yield Promise(f"Problem takes at most {few} forward passes", name, f"{told:.2f}", told <= few)
    growth = machine.earlier("growth").get("kinds", {})
    for kind in [kind for kind in growth if kind.startswith("samples")]:
        exponent = growth[kind]["pass"]["exponent"]
        low, high = exponent["interval"]
        told, kept = f"{exponent['value']:.3f} [{low:.3f}, {high:.3f}]", low <= 1.05 and high >= 0.95
        yield Promise("time goes with the samples to a power whose interval, not wider than 0.2, meets [0.95, 1.05]",
                      growth[kind]["what"].partition(",")[0], told, kept and high - low <= 0.2)  # fmt: skip
    if found := machine.earlier("definitions"):
        network = f"MLP {'-'.join(map(str, found['widths']))}, n = {found['n']}"
        ratio = found["flatlens_times_as_fast_as"]["literal, each by itself"]
        shared = found["flatlens_times_as_fast_as"]["literal, from one loop"]
        yield Promise("all of one pass is 100 times as fast as the definitions read literally, each by itself", network,
                      f"{ratio:.0f} times ({shared:.0f} where they share one loop)", ratio >= 100)  # fmt: skip
        ratio = found["relative_flatness_times_as_fast"]
        yield Promise("relative flatness is 100 times as fast as a literal Definition 3", network,
                      f"{ratio:,} times", ratio >= 100)  # fmt: skip
    for what, r in machine.earlier("memory").get("rows", {}).items():
        told = f"{r['share_of_memory']:.2f} of it ({r['growth_mib']} MiB)"
        yield Promise(f"memory='{r['memory']}' is kept within a fifth", f"{r['network']}, n = {r['n']}, {what}", told,
                      r["share_of_memory"] <= 1.2)  # fmt: skip
