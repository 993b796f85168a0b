"""All pairs of 20 quantities in seconds, and the coverage of the intervals: `python -m benchmarks.statistics`.

Timing: 100 networks, 20 quantities with ties and gaps, 1000 resamples, one thread, beside scipy's own bootstrap of one
pair. Coverage: pairs of normal values with correlation 0.6 (Pearson, also partial), whose Spearman and Kendall
coefficients are known; granulated Kendall on 3 x 3 x 3 grids, whose true value is a mean over many. Some minutes.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from benchmarks import machine
from flatlens import statistics as fs

RHO = 0.6
TRUTHS = {
    "pearson": RHO,
    "spearman": 6 / math.pi * math.asin(RHO / 2),
    "kendall": 2 / math.pi * math.asin(RHO),
    "partial": RHO,
}


def table(n: int = 100, columns: int = 20) -> pd.DataFrame:
    """Return related columns, some rounded, some with gaps."""
    rng = np.random.default_rng(0)
    found = pd.DataFrame(rng.normal(size=(n, columns)) + rng.normal(size=(n, 1))).rename(columns=str)
    found["0"] = found["0"].round()
    found.loc[:4, "1"] = np.nan
    return found


def timing(repeats: int) -> dict[str, Any]:
    data = table()
    contestants = {
        "all pairs, intervals": lambda: fs.all_pairs(data),
        "all pairs, intervals and 999 permutations": lambda: fs.all_pairs(data, permuted=999),
    }
    seconds = machine.interleaved(contestants, repeats)
    start = time.process_time()  # processor time, too: a busy machine lengthens the wall-clock time
    fs.all_pairs(data)
    cpu = time.process_time() - start
    x, y = data["2"].to_numpy(), data["3"].to_numpy()
    start = time.perf_counter()
    method = stats.BootstrapMethod(n_resamples=1000, method="BCa", rng=np.random.default_rng(0))
    stats.pearsonr(x, y).confidence_interval(method=method)
    one = time.perf_counter() - start
    start = time.perf_counter()
    stats.bootstrap((x, y), lambda a, b: stats.kendalltau(a, b).statistic, paired=True, n_resamples=1000,
                    vectorized=False, rng=np.random.default_rng(0))  # fmt: skip
    kendall = time.perf_counter() - start
    return {
        "n": 100, "columns": 20, "pairs": 190, "resamples": 1000,
        **{name: machine.spread(taken) for name, taken in seconds.items()},
        "all pairs, intervals, seconds of processor": round(cpu, 4),
        "scipy_seconds_one_pair": {"pearson": one, "kendall": kendall},
    }  # fmt: skip


def pair(rng: np.random.Generator, n: int) -> tuple[Any, Any]:
    x = rng.normal(size=n)
    return x, RHO * x + math.sqrt(1 - RHO**2) * rng.normal(size=n)


def one_correlation(name: str, n: int, number: int) -> fs.Statistic:
    rng = np.random.default_rng([n, number])
    x, y = pair(rng, n)
    if name == "partial":
        z = rng.normal(size=n)
        return fs.partial_correlation(x + z, y - z, pd.DataFrame({"z": z}), resampled=1000, permuted=0, seed=number)
    return fs.correlate(x, y, name, resampled=1000, permuted=0, seed=number)  # type: ignore[arg-type]


def grid(number: int, replicates: int) -> tuple[Any, Any, pd.DataFrame]:
    rng = np.random.default_rng([7, number])
    axes = pd.MultiIndex.from_product([range(3), range(3), range(3), range(replicates)], names=["a", "b", "c", "seed"])
    frame = axes.to_frame(index=False)
    x = frame[["a", "b", "c"]].sum(axis=1).to_numpy() + rng.normal(size=len(frame))
    return x, frame["a"] + 0.5 * frame["b"] + rng.normal(size=len(frame)), frame[["a", "b", "c"]]


def psi(number: int, replicates: int, resampled: int) -> fs.Statistic:
    return fs.granulated_kendall(*grid(number, replicates), resampled=resampled, permuted=0, seed=number)


def share(found: Iterator[fs.Statistic], truth: float) -> dict[str, float]:
    kept = [one for one in found if one.low == one.low]
    return {
        "below": sum(one.high < truth for one in kept) / len(kept),
        "above": sum(one.low > truth for one in kept) / len(kept),
        "coverage": sum(one.low <= truth <= one.high for one in kept) / len(kept),
    }


def coverage(repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {"repeats": repeats, "nominal": 0.95, "standard_error": (0.95 * 0.05 / repeats) ** 0.5}
    for name, truth in TRUTHS.items():
        for n in (10, 20, 50, 100):
            found[f"{name}, n = {n}"] = share((one_correlation(name, n, i) for i in range(repeats)), truth)
            print(name, n, found[f"{name}, n = {n}"], flush=True)
    for replicates in (1, 3):
        truth = float(np.mean([psi(10**6 + i, replicates, 0).value for i in range(2000)]))
        row = share((psi(i, replicates, 1000) for i in range(repeats)), truth)
        found[f"granulated, {27 * replicates} networks"] = row
        print("granulated", replicates, truth, row, flush=True)
    return found


def level(repeats: int) -> dict[str, float]:
    """Return how often p <= 0.05 where there is no relation."""
    tests: dict[str, Callable[[np.random.Generator], fs.Statistic]] = {
        "pearson": lambda g: fs.correlate(g.normal(size=15), g.normal(size=15), "pearson", resampled=0, seed=g),
        "spearman": lambda g: fs.correlate(g.normal(size=15), g.normal(size=15), "spearman", resampled=0, seed=g),
        "kendall": lambda g: fs.correlate(g.normal(size=15), g.normal(size=15), resampled=0, seed=g),
        "partial": lambda g: fs.partial_correlation(
            g.normal(size=15), g.normal(size=15), pd.DataFrame({"z": g.normal(size=15)}), resampled=0, seed=g
        ),
        "kendall_w": lambda g: fs.kendall_w(g.normal(size=(4, 6)), permuted=999, seed=g),
        "kendall_w, chi-square": lambda g: fs.kendall_w(g.normal(size=(4, 6)), permuted=0),
    }
    found = {}
    for number, (name, test) in enumerate(tests.items()):
        ps = [test(np.random.default_rng([9, number, i])).p for i in range(repeats)]
        found[name] = float(np.mean(np.array(ps) <= 0.05))
        print("level", name, found[name], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="of the timing")
    parser.add_argument("--simulations", type=int, default=1000, help="of the coverage")
    options = parser.parse_args()
    timed = timing(options.repeats)
    print(timed)
    result = {
        "timing": timed,
        "coverage": coverage(options.simulations),
        "rejected at 0.05": level(options.simulations),
    }
    machine.save("statistics", result)


if __name__ == "__main__":
    main()
