"""The table of coefficients against the gap: each row is the named statistic of the named networks."""

import numpy as np
import pandas as pd
import pytest

from flatlens.experiments import Quantity
from flatlens.experiments.gap_correlations import COLUMNS, gap_correlations
from flatlens.statistics import correlate, granulated_kendall, partial_correlation

QUANTITIES = (
    Quantity("generalisation gap", "generalisation_gap", role="result"),
    Quantity("sharpness", "sharpness"),
    Quantity("constant", "constant"),
    Quantity("learning rate (log)", "lr", "log", role="setting"),
)


@pytest.fixture
def population():
    rng = np.random.default_rng(0)
    grid = [(lr, ascent, seed) for lr in (0.1, 0.2, 0.4) for ascent in (None, "SAM(0.1)") for seed in range(3)]
    settings = pd.DataFrame(grid, columns=["lr", "ascent", "seed"])
    gap = np.log(settings["lr"]) + rng.normal(size=len(grid))
    values = {"generalisation gap": gap, "sharpness": gap + rng.normal(size=len(grid)), "constant": 1.0}
    return pd.DataFrame({**values, "learning rate (log)": np.log(settings["lr"])}), settings


def rows(table, quantity):
    return table[table["quantity"] == quantity].set_index("coefficient")


def test_each_row_is_the_named_statistic(population):
    values, settings = population
    table = gap_correlations(values, settings, QUANTITIES)
    x, y = values["sharpness"], values["generalisation gap"]
    grid = settings[["lr", "ascent"]].fillna("None")
    psi = granulated_kendall(x, y, grid)
    expected = {
        "Pearson r": correlate(x, y, "pearson"),
        "Spearman rho": correlate(x, y, "spearman"),
        "Kendall tau-b": correlate(x, y, "kendall"),
        "granulated Kendall": psi,
        "granulated Kendall along lr": psi.parts["lr"],
        "granulated Kendall along ascent": psi.parts["ascent"],
        "partial Pearson": partial_correlation(x, y, values[["learning rate (log)"]]),
        "partial Spearman": partial_correlation(x, y, values[["learning rate (log)"]], "spearman"),
    }
    found = rows(table, "sharpness")
    assert psi.n == 18  # a setting that is None is one, too
    assert list(found.index) == list(expected)
    for name, one in expected.items():
        assert tuple(found.loc[name, ["value", "low", "high", "p", "n"]]) == (one.value, one.low, one.high, one.p, 18)
    assert found.loc["granulated Kendall along lr", "note"] == "2 of 2 groups have networks to compare"
    assert found.loc["partial Pearson", "given"] == "learning rate (log)"


def test_what_is_undefined_says_why(population):
    found = rows(gap_correlations(*population, QUANTITIES), "constant")
    assert found.loc["Pearson r", "note"] == "constant is constant"
    assert found["value"][["Pearson r", "partial Pearson"]].isna().all()


def test_missing_values_are_left_out_and_said(population):
    values, settings = population
    values.loc[[0, 5], "sharpness"] = np.nan
    found = rows(gap_correlations(values, settings, QUANTITIES), "sharpness")
    assert (found.loc[["Pearson r", "granulated Kendall", "partial Pearson"], "n"] == 16).all()
    assert found.loc["Pearson r", "why"].startswith("2 left out: sharpness")


@pytest.mark.parametrize("varied", [[], ["seed"]])
def test_seeds_alone_are_no_settings(population, varied):
    values, settings = population
    held = values.assign(**{"learning rate (log)": 0.0})
    table = gap_correlations(held, settings[varied], QUANTITIES)
    assert list(rows(table, "sharpness").index) == ["Pearson r", "Spearman rho", "Kendall tau-b"]
    assert tuple(table.columns) == COLUMNS
