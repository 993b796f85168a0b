"""The table of coefficients against the gap: each row is the named statistic of the named networks."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from flatlens.experiments import Quantity
from flatlens.experiments.tables import COLUMNS, gap_correlations, without_seeds
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
    grid = [(lr, ascent, seed) for lr in (0.1, 0.2, 0.4) for ascent in (None, "SAM(0.1)") for seed in range(7)]
    settings = pd.DataFrame(grid, columns=["lr", "ascent", "seed"])
    gap = np.log(settings["lr"]) + rng.normal(size=len(grid))
    values = {"generalisation gap": gap, "sharpness": gap + rng.normal(size=len(grid)), "constant": 1.0}
    return pd.DataFrame({**values, "learning rate (log)": np.log(settings["lr"])}), settings


def of_networks(values, settings, kinds=None):
    return gap_correlations(values, without_seeds(settings, list(settings)), QUANTITIES, settings["seed"], kinds)


def rows(table, quantity):
    return table[table["quantity"] == quantity].set_index("coefficient")


def test_each_row_is_the_named_statistic(population):
    values, settings = population
    table = of_networks(values, settings)
    x, y = values["sharpness"], values["generalisation gap"]
    over_seeds = partial(correlate, x, y, units=settings["seed"])
    grid, controls = settings[["lr", "ascent"]].fillna("None"), values[["learning rate (log)"]]
    psi = granulated_kendall(x, y, grid, units=settings["seed"])
    expected = {
        "Pearson r": over_seeds("pearson"),
        "Spearman rho": over_seeds("spearman"),
        "Kendall tau-b": over_seeds("kendall"),
        "granulated Kendall": psi,
        "granulated Kendall along lr": psi.parts["lr"],
        "granulated Kendall along ascent": psi.parts["ascent"],
        "partial Pearson": partial_correlation(x, y, controls, units=settings["seed"]),
        "partial Spearman": partial_correlation(x, y, controls, "spearman", units=settings["seed"]),
    }
    found = rows(table, "sharpness")
    assert psi.n == 42  # a setting that is None is one, too
    assert list(found.index) == list(expected)
    shown = ["value", "low", "high", "p", "n", "units"]
    for name, one in expected.items():
        assert one.low < one.value < one.high
        assert tuple(found.loc[name, shown]) == (one.value, one.low, one.high, one.p, 42, 7)
    assert found.loc["granulated Kendall along lr", "note"] == "2 of 2 groups have networks to compare"
    assert found.loc["partial Pearson", "given"] == "learning rate (log)"


def test_what_is_undefined_says_why(population):
    found = rows(of_networks(*population), "constant")
    assert found.loc["Pearson r", "note"] == "constant is constant"
    assert found["value"][["Pearson r", "partial Pearson"]].isna().all()
    assert (found["units"] == 7).all()


def test_intervals_are_students_over_seeds(population):
    """The delete-one-seed jackknife of Fisher's z, from its definition."""
    values, settings = population
    found = rows(of_networks(values, settings), "sharpness").loc["Pearson r"]
    z = [
        np.arctanh(stats.pearsonr(*values.loc[chosen, ["sharpness", "generalisation gap"]].to_numpy().T).statistic)
        for chosen in [settings["seed"] > -1, *(settings["seed"] != seed for seed in range(7))]
    ]
    error = np.sqrt(6 / 7 * np.square(np.subtract(z[1:], z[0])).sum())
    ends = np.tanh(z[0] + np.array([-1, 1]) * stats.t.ppf(0.975, 6) * error)
    assert found[["low", "high"]].tolist() == pytest.approx(ends.tolist(), rel=1e-9)
    assert found["p"] == pytest.approx(2 * stats.t.sf(abs(z[0]) / error, 6), rel=1e-9)


def test_five_seeds_give_a_value_alone(population):
    values, settings = (table[population[1]["seed"] < 5] for table in population)
    found = rows(of_networks(values, settings), "sharpness")
    assert found["value"].notna().all()
    assert found[["low", "high", "p"]].isna().all(axis=None)
    assert (found["units"] == 5).all()
    assert found["note"].str.contains("fewer than 6 independent units").all()


def test_missing_values_are_left_out_and_said(population):
    values, settings = population
    values.loc[[0, 5], "sharpness"] = np.nan
    found = rows(of_networks(values, settings), "sharpness")
    assert (found.loc[["Pearson r", "granulated Kendall", "partial Pearson"], "n"] == 40).all()
    assert found.loc["Pearson r", "why"].startswith("2 left out: sharpness")


@pytest.mark.parametrize("varied", [[], ["seed"]])
def test_seeds_alone_are_no_settings(population, varied):
    values, settings = population
    held = values.assign(**{"learning rate (log)": 0.0})
    table = gap_correlations(held, without_seeds(settings, varied), QUANTITIES, settings["seed"])
    assert list(rows(table, "sharpness").index) == ["Pearson r", "Spearman rho", "Kendall tau-b"]
    assert tuple(table.columns) == COLUMNS


def test_each_kind_of_networks_has_the_rows_of_its_own(population):
    values, settings = population
    kinds = pd.Series(np.where(settings["lr"] < 0.3, "VGG11", "LeNet"))
    kinds.iloc[:3] = "MLP"  # too few to say anything of
    table = of_networks(values, settings, kinds)
    assert table["kind"].unique().tolist() == ["", "VGG11", "LeNet"]
    pd.testing.assert_frame_equal(table[table["kind"] == ""], of_networks(values, settings))
    for kind in ("VGG11", "LeNet"):
        alone = of_networks(values[kinds == kind], settings[kinds == kind])
        mine = table[table["kind"] == kind].drop(columns="kind").reset_index(drop=True)
        pd.testing.assert_frame_equal(mine, alone.drop(columns="kind"))
    assert "granulated Kendall along lr" not in rows(table[table["kind"] == "LeNet"], "sharpness").index


def test_one_kind_is_all_networks(population):
    table = of_networks(*population, pd.Series("", index=population[0].index))
    pd.testing.assert_frame_equal(table, of_networks(*population))
