"""A made-up study: numbers with known relations, drawn without any network."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pandas as pd
import pytest

from flatlens.experiments import Quantity, Study, StudyResult
from flatlens.experiments.tables import COLUMNS, gap_correlations
from flatlens.report.figures import Figure, study_figures

WHO = ["key", "lr", "batch_size", "seed"]
COEFFICIENTS = ["pearson", "pearson_low", "pearson_high", "kendall", "kendall_low", "kendall_high"]
QUANTITIES = (
    Quantity("generalisation gap", "generalisation_gap", role="result"),
    Quantity("test loss", "test_loss", role="result"),
    Quantity("sqrt sharpness", "interpolation_sharpness", "sqrt"),
    Quantity("MLS", "mls"),
    Quantity("NMLS", "nmls"),
    Quantity("log volume", "log_volume"),
    Quantity("network volume", "network_volume", "log"),
    Quantity("local dimension", "local_dimension"),
    Quantity("relative flatness, first layer", "relative_flatness[fc1]"),
    Quantity("relative flatness, all layers", "relative_flatness.sum"),
    Quantity("learning rate", "lr", "log", role="setting"),
    Quantity("batch size", "batch_size", "log", role="setting"),
)
FEW = tuple(q for q in QUANTITIES if "fc1" not in q.column and q.column not in ("nmls", "log_volume", "batch_size"))
LAYERS = ("fc1", "fc2", "fc3", "fc4")
TRANSFORMS = {"identity": lambda v: v, "sqrt": np.sqrt, "log": np.log}


def made_up_result(
    lrs=(0.02, 0.05, 0.1, 0.2), batch_sizes=(4, 16, 64), seeds=4, excluded=1, steps=80, quantities=QUANTITIES
) -> StudyResult:
    """`excluded` networks, the last ones, are out of steps. The first layer's flatness equals the gap exactly."""
    rng = np.random.default_rng(0)
    grid = list(product(lrs, batch_sizes, range(seeds)))
    networks = pd.DataFrame(grid, columns=["lr", "batch_size", "seed"])
    networks.insert(0, "key", [f"{i:012x}" for i in range(len(grid))])
    flat = -np.log(networks["lr"] / networks["batch_size"]) + rng.normal(0, 0.4, len(grid))
    networks["outcome"] = "converged"
    networks["steps"] = 1000
    networks.loc[len(grid) - excluded :, "outcome"] = "out of steps"
    networks["generalisation_gap"] = 0.02 * flat + 0.1
    networks["test_loss"] = networks["generalisation_gap"] + 0.002
    networks["interpolation_sharpness"] = (flat + 4 + rng.normal(0, 0.5, len(grid))) ** 2
    networks["mls"] = flat + 6 + rng.normal(0, 0.5, len(grid))
    networks["nmls"] = 3 * networks["mls"] + rng.normal(0, 1, len(grid))
    networks["log_volume"] = -flat + rng.normal(0, 1, len(grid))
    networks["network_volume"] = np.exp(networks["log_volume"])
    networks["local_dimension"] = rng.normal(3, 0.3, len(grid))
    networks["relative_flatness"] = flat + 5
    networks["relative_flatness.sum"] = 4 * flat + 20 + rng.normal(0, 2, len(grid))
    layers = []
    for measure, (position, layer) in product(("mls", "relative_flatness", "log_volume"), enumerate(LAYERS)):
        sign = rng.normal(0, 1, len(grid)) if measure == "log_volume" else networks["generalisation_gap"] * 10**position
        layers.append(networks[WHO].assign(measure=measure, layer=layer, position=position, value=sign, kind="exact"))
    tidy = pd.concat(layers, ignore_index=True)
    for (measure, layer), part in tidy.groupby(["measure", "layer"], sort=False):
        networks[f"{measure}[{layer}]"] = part["value"].to_numpy()
    at = np.arange(0, steps * 50, 50)
    curves = [
        pd.DataFrame({"key": n.key, "lr": n.lr, "batch_size": n.batch_size, "seed": n.seed, "step": at,
                      "loss": 0.5 * np.exp(-at / (80 / n.lr)) + 1e-3, "accuracy": 1.0, "test_loss": 0.05})
        for n in networks.itertuples()
    ]  # fmt: skip
    return assemble(networks, tidy, pd.concat(curves, ignore_index=True), quantities)


def assemble(networks, layers, curves, quantities=FEW) -> StudyResult:
    """The rest of a result from its networks; intervals are made up round the true coefficients."""
    included = networks["outcome"] == "converged"
    values = networks[WHO].assign(included=included)
    for q in quantities:
        values[q.name] = TRANSFORMS[q.transform](networks[q.column].astype(float))
    rows = []
    for a, b in combinations([q.name for q in quantities], 2):
        x, y = values.loc[included, a], values.loc[included, b]
        defined = included.sum() >= 4 and np.isfinite([*x, *y]).all() and np.ptp(x) > 0 and np.ptp(y) > 0
        r, t = (x.corr(y), x.corr(y, "kendall")) if defined else (np.nan, np.nan)
        rows.append(
            [a, b, int(included.sum()), r, max(r - 0.1, -1), min(r + 0.1, 1), t, max(t - 0.1, -1), min(t + 0.1, 1)]
        )
    relations = pd.DataFrame(rows, columns=["x", "y", "n", *COEFFICIENTS])
    gap = relations[relations["x"] == "generalisation gap"]
    within = gap[["x", "y", "n", *COEFFICIENTS[:3]]].assign(group="lr", groups=networks["lr"].nunique())
    against = pd.DataFrame(columns=COLUMNS)
    if included.any():
        settings = networks.loc[included, ["lr", "batch_size"]].astype(str)
        against = gap_correlations(values[included], settings, quantities, networks.loc[included, "key"])
    facts = {
        "findings": ["Across 47 networks the gap rises with sqrt sharpness: Pearson r = 0.86 [0.78, 0.92]."],
        "settings": Study.digits("laptop").over("lr", *(sorted(set(networks["lr"])) or [0.1])).as_json(),
        "versions": {"flatlens": "0.1.0", "torch": "2.13.0", "device": "cpu"},
        "excluded": [(k, "out of steps") for k in networks.loc[~included, "key"]],
        "failed": [],
        "unfinished": 0,
    }  # fmt: skip
    return StudyResult(networks=networks, layers=layers, curves=curves, histories=pd.DataFrame(),
                       functions=pd.DataFrame(), values=values,
                       relations=relations, within=within, gap_correlations=against, quantities=quantities,
                       **facts)  # fmt: skip


@pytest.fixture(scope="session")
def make_result() -> Callable[..., StudyResult]:
    return made_up_result


@pytest.fixture(scope="session")
def strange_results() -> dict[str, StudyResult]:
    """Tables that a study can end in, each with something undefined."""
    base = made_up_result(lrs=(0.1, 0.2), batch_sizes=(4,), seeds=3, excluded=0, steps=3, quantities=FEW)
    constant, missing = base.networks.copy(), base.networks.copy()
    constant["mls"] = 2.0
    constant["generalisation_gap"] = 0.0
    missing["mls"] = np.nan
    missing["local_dimension"] = np.inf
    return {
        "constant columns": assemble(constant, base.layers, base.curves),
        "missing columns": assemble(missing, base.layers, base.curves),
        "one network": made_up_result(lrs=(0.1,), batch_sizes=(4,), seeds=1, excluded=0, steps=1, quantities=FEW),
        "all excluded": made_up_result(lrs=(0.1,), batch_sizes=(4,), seeds=3, excluded=3, steps=2, quantities=FEW),
        "no layers or curves": assemble(base.networks, base.layers[:0], base.curves[:0]),
        "no network": assemble(base.networks[:0], base.layers[:0], base.curves[:0]),
        "no quantities": replace(
            base,
            networks=base.networks[[*WHO, "outcome", "steps"]],
            values=base.values[[*WHO, "included"]],
            quantities=(),
            relations=base.relations[:0],
            within=base.within[:0],
            gap_correlations=base.gap_correlations[:0],
        ),
    }


@pytest.fixture(scope="session")
def strange_figures(strange_results: dict[str, StudyResult]) -> dict[str, list[Figure]]:
    return {name: study_figures(result) for name, result in strange_results.items()}


@pytest.fixture(scope="session")
def laptop() -> StudyResult:
    return made_up_result()


@pytest.fixture(scope="session")
def smoke() -> StudyResult:
    return made_up_result(lrs=(0.05, 0.1), batch_sizes=(4, 16), seeds=2, excluded=0, steps=20, quantities=FEW)


@pytest.fixture(scope="session")
def laptop_figures(laptop: StudyResult) -> list[Figure]:
    return study_figures(laptop)
