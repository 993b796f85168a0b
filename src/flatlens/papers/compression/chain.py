"""X3: the steps of the bound from MLS to sharpness (Eq. 48's chain, first layer), for longer and longer training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import pandas as pd

from flatlens.experiments.settings import Axis, NetworkSettings, Study
from flatlens.papers.compression.networks import DIGITS, FIXED_BATCH, FIXED_LR, mlp, samples
from flatlens.papers.contrasts import mean_of
from flatlens.papers.evidence import Evidence, labelled, reached
from flatlens.papers.experiment import ON_PAPERS_DATA, SMOKE_ONLY, Experiment, Plot, Prediction, Results, Scale
from flatlens.papers.figures import BANDS, banded
from flatlens.papers.trajectories import correlated_changes
from flatlens.statistics.correlations import CoefficientName
from flatlens.training import SGD, Training

CHAIN = {
    "A": "mls_chain.A_B.lhs[fc1]",
    "B": "mls_chain.B_C.lhs[fc1]",
    "C": "mls_chain.C_D.lhs[fc1]",
    "D": "mls_chain.C_D.rhs[fc1]",
}
_FACTORS = {
    "B/A by W and J not aligned": ("mls_chain.A_B.aligned.rhs[fc1]", CHAIN["A"]),
    "B/A by the rank of J": (CHAIN["B"], "mls_chain.A_B.rank.lhs[fc1]"),
    "C/B by variation over samples": (CHAIN["C"], CHAIN["B"]),
    "D/C by the other weights": (CHAIN["D"], CHAIN["C"]),
}
"""The factors between the ends of the chain, one for each condition of G.1 under which a step is an equality."""
VARIATION_SIDES = ("mls_chain.B_C.variation.rhs[fc1]", "mls_chain.B_C.variation.lhs[fc1]")
"""Root mean square and mean over the samples of ||df/dW||_F / ||x||: their ratio is above 1 where it varies."""


def _x3(scale: Scale) -> Mapping[str, Study]:
    steps = {
        "smoke": (1, 40),
        "laptop": (1, 30, 100, 300, 1000, 3000, 10_000),
        "desk": (1, 100, 1000, 10_000, 30_000),
        "paper": (1, 100, 1000, 10_000, 100_000),
    }
    data, model = mlp(scale)
    looks = 10_000 if scale in ON_PAPERS_DATA else 10  # all images of a set take as long as many steps
    training = Training(
        SGD(FIXED_LR), batch_size=FIXED_BATCH, loss="half_squared_error", max_steps=1, check_every=looks
    )
    base = NetworkSettings(data, model, training, ("mls", "loss"), ("mls_chain",), samples=samples(data))
    seeds = {"smoke": 2, "laptop": 10, "desk": 10, "paper": 8}[scale]
    trained = Study("tightness", base, (Axis("max_steps", steps[scale]), Axis("seed", tuple(range(seeds)))))
    return {"tightness": trained}


_OfRun: TypeAlias = Callable[[pd.DataFrame, CoefficientName], float]
"""Returns a number of a run from correlations of this kind."""

_ROUNDED = 1 + 1e-9
"""Factor by which rounding may violate an inequality."""


def _steps(results: Results) -> pd.DataFrame:
    """Return the networks with how much wider and looser the chain's last step is than the other two, and `holds`.

    `wide` compares differences, `loose` logarithms of ratios; `holds` is 1 where no step decreases by more than
    rounding.
    """
    networks = reached("tightness")(results)
    a, b, c, d = (networks[column] for column in CHAIN.values())
    holds = (a <= b * _ROUNDED) & (b <= c * _ROUNDED) & (c <= d * _ROUNDED)
    return networks.assign(
        wide=(d - c) - np.maximum(b - a, c - b),
        loose=np.log(d / c) - np.maximum(np.log(b / a), np.log(c / b)),
        holds=holds.astype(float),
    )


def _over_runs(number: _OfRun, name: str) -> Evidence:
    """Return the mean over runs of a number of the logarithms of all columns, in the order of the steps of training.

    A run is the networks of one seed: they differ in the number of steps alone. The number's own of ranks has to agree.
    """

    def runs(results: Results) -> pd.DataFrame:
        networks = reached("tightness")(results)
        columns = [*CHAIN.values(), *VARIATION_SIDES]
        logs = networks[columns].astype(float).apply(np.log)
        logs = logs.assign(seed=networks["seed"], steps=networks["max_steps"])
        found = [
            (seed, number(ordered, "pearson"), number(ordered, "spearman"))
            for seed, run in logs.groupby("seed")
            for ordered in [run.sort_values("steps")]
        ]
        return labelled(pd.DataFrame(found, columns=["seed", name, "of ranks"]), ["seed"], "run")

    return mean_of(runs, name, "of ranks")


def _more_indicative(run: pd.DataFrame, coefficient: CoefficientName) -> float:
    """Return Fisher's z of the changes of A and C between numbers of steps, less that of A and D.

    Of ranks the difference itself: r = 1 is common there, and its z infinite.
    """
    c, d = (correlated_changes(CHAIN["A"], CHAIN[other], coefficient)(run) for other in ("C", "D"))
    if coefficient != "pearson":
        return c - d
    return float(np.diff(np.arctanh(np.clip([d, c], -1 + 1e-9, 1 - 1e-9)))[0])


def _with_variation(run: pd.DataFrame, coefficient: CoefficientName) -> float:
    """Return the correlation over the numbers of steps of log C/B and of how much ||df/dW||_F / ||x|| varies."""
    loose, varies = run[CHAIN["C"]] - run[CHAIN["B"]], run[VARIATION_SIDES[0]] - run[VARIATION_SIDES[1]]
    return float(loose.corr(varies, method=coefficient)) if len(run) > 2 else float("nan")


def _x3_plots(results: Results) -> list[Plot]:
    networks = reached("tightness")(results).assign(panel="mean over the samples")
    long = networks.melt(["panel", "max_steps", "seed"], list(CHAIN.values()), "line", "y")
    long["line"] = long["line"].map({column: name for name, column in CHAIN.items()})
    factors = networks.assign(
        **{name: networks[large] / networks[small] for name, (large, small) in _FACTORS.items()}, panel="factor"
    ).melt(["panel", "max_steps", "seed"], list(_FACTORS), "line", "y")
    return [
        banded(
            long.rename(columns={"max_steps": "x"}), "tightness", "Fig. G.4: the steps of the bound",
            f"A <= B <= C <= D of Eq. 48 at the first layer. {BANDS}.", "step", log_x=True,
        ),
        banded(
            factors.rename(columns={"max_steps": "x"}), "factors", "Appendix G.1: which condition a step misses",
            f"D/A is the product of these factors. {BANDS}.", "step", log_x=True,
        ),
    ]  # fmt: skip


_GAP = "the gap between C and D is large compared to the gap between A and B or B and C"


_OWN_NETWORKS = "A network of its own for each number of steps, from the same start: the same training, and one unit."

EXPERIMENTS = (
    Experiment(
        "X3",
        "How tight each step is from the sensitivity of an MLP to its sharpness",
        "compression Fig. G.4",
        _x3,
        (
            Prediction(
                "inequalities_hold",
                "A <= B <= C <= D in every network.",
                "compression Fig. G.4",
                mean_of(_steps, "holds", shares=True),
                "above",
                1 - 1e-9,
                kind="theorem",
                quote="We empirically verify that the inequalities in Equation (48) hold and test their tightness",
            ),
            Prediction(
                "C_D_is_the_wide_step",
                "D - C is larger than B - A and C - B (how much larger 'large' is, is not asked).",
                "compression Fig. G.4",
                mean_of(_steps, "wide"),
                kind="claim",
                quote=_GAP,
            ),
            Prediction(
                "C_D_is_the_loose_step",
                "D/C is larger than B/A and C/B.",
                "compression Fig. G.4",
                mean_of(_steps, "loose"),
                quote=_GAP,
                reason="A gap is a difference; how tight a bound is, is rather a matter of ratios, which the text does "
                "not compare.",
            ),
            Prediction(
                "C_is_more_indicative",
                "C tells the change of MLS better than D: the changes of its logarithm between lengths of training "
                "correlate better with those of A.",
                "compression Fig. G.4",
                _over_runs(_more_indicative, "Fisher's z of the changes of log A and log C, less that of A and D"),
                quote="is more indicative of the change in the maximum local sensitivity (A)",
                reason="The sentence is about the partial sharpness, a factor of C; how changes compare is not said.",
            ),
            Prediction(
                "B_C_by_variation",
                "C/B is the closer to 1, the less ||df/dW||_F / ||x|| varies over the samples: r of the two logarithms "
                "over the lengths of training.",
                "compression G.1 (2)",
                _over_runs(_with_variation, "Pearson r of log C/B and the variation of the ratio"),
                quote="does not vary too much from sample to sample",
                reason="The text names a condition for a tight bound (a wrong one: docs/slips_compression.md), and no "
                "statistic.",
            ),
        ),
        _x3_plots,
        {
            "smoke": (SMOKE_ONLY, DIGITS),
            "laptop": (DIGITS, _OWN_NETWORKS),
            "desk": (
                "30,000 steps at most; the figure does not say how many.",
                _OWN_NETWORKS,
                "Widths are not given: 784 in every layer.",
            ),
            "paper": (
                "100,000 steps at most, and 8 seeds; the figure says neither.",
                _OWN_NETWORKS,
                "Widths are not given: 784 in every layer.",
            ),
        },
    ),
)
