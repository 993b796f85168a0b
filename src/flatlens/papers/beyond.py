"""X19, which goes beyond the papers: the bound of sharpening's Theorem 6.1, evaluated, beside the true error.

The bound needs the law of the inputs, the target's Lipschitz constant and how much the Jacobian can vary in a ball. All
three are known here. Its `.corrected` form adds the network's largest distance to a training target, so it is also a
bound for networks that interpolate only nearly. The covering radius delta(N, 0.05) is taken by three rules: Eq. 19 with
the exact measure of the smallest ball; the printed formulas, Eq. 6 or 7; and the smallest radius that is proved.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from itertools import count

import numpy as np
import pandas as pd

from flatlens.bounds.sharpening import FAILURE
from flatlens.column import Column
from flatlens.data.sources import DataSettings
from flatlens.data.synthetic import RECIPES, law_of, widest
from flatlens.distributions import RULES, Rule
from flatlens.experiments.quantities import GAP, Quantity
from flatlens.experiments.settings import Axis, NetworkSettings, Study
from flatlens.models import MLP
from flatlens.papers.evidence import UNIT, reached
from flatlens.papers.experiment import Plot, Results, Scale, deferred, seed_axis
from flatlens.papers.figures import BANDS, banded
from flatlens.training import Adam, Cosine, Training

THEOREM_BOUND = "jacobian_generalisation.corrected"
_SIDES = {
    "true error": str(Column.parse(THEOREM_BOUND).of_side("lhs")),
    "exact": str(Column.parse(THEOREM_BOUND).of_side("rhs")),
    "published": str(Column.parse(THEOREM_BOUND).of_side("rhs", "published")),
    "tight": str(Column.parse(THEOREM_BOUND).of_side("rhs", "tight")),
}
"""Columns of the tables of networks: the true error, and the bound by each rule for the radius."""
VACUOUS = "vacuous from here up"


def _x19(scale: Scale) -> Mapping[str, Study]:
    sizes, seeds, steps = {
        "smoke": ((10, 40), 4, 100),
        "laptop": ((10, 30, 100, 300, 1000, 3000, 10_000), 8, 3000),
        "desk": ((10, 30, 100, 300, 1000, 3000, 10_000, 30_000), 12, 5000),
        "paper": ((10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000), 10, 10_000),
    }[scale]
    shown = (
        GAP,
        *(Quantity(name if name == "true error" else f"bound, {name} radius", at) for name, at in _SIDES.items()),
        Quantity("Jacobian norm", "jacobian_norm"),
        Quantity("samples (log)", "train", "log", role="setting"),
    )
    training = Training(
        Adam(0.01), batch_size=64, loss="mse", schedule=Cosine(steps, "steps"), max_steps=steps, check_every=1000
    )
    axes = (Axis("train", sizes), seed_axis(seeds))
    measures = ("jacobian_norm", "loss", "test_loss", "generalisation_gap")
    studies = {}
    for law in RECIPES:
        data = DataSettings(f"waves_{law}", train=sizes[0], test=1000)
        model = MLP(law_of(law)[0].dimension, (32,), 1, "tanh")
        base = NetworkSettings(data, model, training, measures, bounds=("jacobian_generalisation",))
        studies[law] = Study(law, base, axes, shown, scale=scale)
    return studies


@deferred
def sides(results: Results, *laws: str) -> pd.DataFrame:
    """Return the table of these laws' networks.

    Columns: law, train (samples), the true error, the bound by each rule, and `holds`, 1 or 0; `holds, printed
    radius`, too, where that radius is defined.
    """
    parts = []
    for law in laws or RECIPES:
        networks = reached(law)(results)
        columns = {name: networks[column] for name, column in _SIDES.items()}
        parts.append(pd.DataFrame({"law": law, "train": networks["train"], UNIT: networks[UNIT], **columns}))
    table = pd.concat(parts, ignore_index=True)
    held = {
        name: (table["true error"] <= table[rule]).astype(float).where(table[rule].notna())
        for name, rule in (("holds", "exact"), ("holds, printed radius", "published"))
    }
    return table.assign(**held)


@deferred
def most_samples(results: Results, law: str) -> pd.DataFrame:
    """Return the networks of the largest sample, with `wide`: the distance of the target's values."""
    table = sides(law)(results)
    largest: pd.DataFrame = table[table["train"] == table["train"].max()].assign(wide=widest(law))
    return largest


@deferred
def decay(results: Results, law: str) -> pd.DataFrame:
    """Return one row per seed: the slope of log(bound) over log(log(N / 0.05) / N), by least squares, less 1/d.

    The bound is the theorem's own right side. That of `sides` adds the distance to a training target, which does not
    fall with N. log(N / 0.05) / N is the rate of the radius at a probability of 0.05; it is of the order of log(N) / N,
    over which all slopes would be larger.
    """
    table, bound = reached(law)(results), str(Column.parse("jacobian_generalisation").of_side("rhs"))
    rate = 1 / law_of(law)[0].intrinsic
    rows = []
    for unit, seed in table.groupby(UNIT):
        n = seed["train"].to_numpy(dtype=float)
        slope, _ = np.polyfit(np.log(np.log(n / FAILURE) / n), np.log(seed[bound].to_numpy(dtype=float)), 1)
        rows.append({UNIT: unit, "slope less 1/d": slope - rate})
    return pd.DataFrame(rows)


def _x19_plots(results: Results) -> list[Plot]:
    table = sides()(results)
    long = table.melt(["law", "train"], list(_SIDES), "line", "y").dropna(subset=["y"])
    long["line"] = long["line"].where(long["line"] == "true error", "bound, " + long["line"])
    wide = table[["law", "train"]].drop_duplicates().assign(line=VACUOUS)
    wide["y"] = wide["law"].map(widest)
    rows = pd.concat([long, wide], ignore_index=True).rename(columns={"law": "panel", "train": "x"})
    caption = (
        f"{BANDS}. The dashed line is the largest distance between values of the target: above it the bound is "
        "vacuous. The printed radius is omitted where it is not defined. Slope less 1/d, in the claims: the "
        "least-squares slope of log(bound) over log(log(N / 0.05) / N), less 1/d, where d is the dimension of the "
        "data; at 0 the bound falls as the paper says."
    )
    drawn = banded(rows, "bound_and_error", "The bound and the true error", caption, "samples N", "mean of")
    said = (
        "The smallest number of samples, of the numbers tried, at which the mean bound is below the largest distance "
        "between values of the target. At best: the smallest number for a network that equals its target and whose "
        "Jacobian is constant; a network that is as steep as its target at some sample cannot need fewer. In the "
        "claims, log(exact / wide) is the logarithm of the bound with the exact radius over that distance, with the "
        "most samples; below 0 the bound is not vacuous."
    )
    cells = []
    for law, networks in table.groupby("law", sort=False):
        means = networks.groupby("train")[list(RULES)].mean()
        for rule in RULES:
            low = means.index[means[rule] < widest(str(law))]
            n, least = float(low.min()) if len(low) else np.nan, enough(str(law), rule)
            text = f"{n:,.0f}" if len(low) else "none of these"
            where = {"panel": "samples: these networks (at best)", "row": law, "column": rule}
            cells.append({**where, "text": f"{text} ({least:,})", "samples": n, "at_best": least})
    return [
        replace(drawn, log_x=True, dashed=(VACUOUS,), y="distance from the target", group="mean of"),
        Plot("informative_from", "Where the bound stops being vacuous", said, "table", pd.DataFrame(cells)),
    ]


def enough(law: str, rule: Rule) -> int:
    """Return the least N with 2 ||f*||_Lip delta(N, 0.05) below the distance of the target's values.

    >>> enough("interval", "exact") > enough("interval", "tight")
    True
    """
    distribution, target = law_of(law)
    steep = 2 * target.steepness((distribution.dimension,))

    def informative(n: int) -> bool:
        delta = distribution.covering_radius(n, FAILURE, rule=rule)
        return delta.kind != "undefined" and steep * delta.value < widest(law)

    high = next(n for n in (2**power for power in count(1)) if informative(n))
    return bisect_left(range(high), True, lo=high // 2 + 1, key=informative)
