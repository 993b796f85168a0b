"""X11 and X12 of the sharpening paper: that they run and say what their claims need, not what comes of them."""

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch

from flatlens.data import eight_points
from flatlens.papers import EXPERIMENTS
from flatlens.papers.evidence import in_trajectory
from flatlens.papers.sharpening.coordinates import (
    COMPARED,
    PUBLISHED,
    SPLINE,
    SQUARED,
    SUMMED_SHARPNESS,
    TOTAL_VARIATION,
    measured,
    of_seeds,
)
from flatlens.papers.sharpening.descent import NUMBERS


def test_the_published_settings_of_the_scaled_inputs():
    for name, study in EXPERIMENTS["X11"].studies("paper").items():
        for network in study.networks():
            model, data, how = network.model, network.data, network.training
            assert (model.inputs, model.widths, model.outputs, model.activation) == (3072, (200, 200), 10, name)
            assert (data.name, data.train, data.order, data.standardise) == ("cifar10", 5000, "first", "component")
            assert data.statistics == "all"
            assert not how.until.anything
            # 1e-4 on the sum over the eight points is 8e-4 on their mean
            assert (how.max_steps, how.batch_size, how.optimiser.lr, how.loss) == (300, None, 0.2, "cross_entropy")
        assert {n.data.scale for n in study.networks()} == {0.5, 1.0, 1.5}


@pytest.mark.xdist_group("X11")
def test_an_increase_is_from_the_first_value_to_the_later_half(smoke_of):
    results = smoke_of("X11")[1].results
    table = in_trajectory("tanh", NUMBERS)(results)
    for _, row in table.iterrows():
        history = results["tanh"].histories.query("key == @row.key and measure == 'sharpness'")
        values = history.sort_values("step")["value"].to_numpy()
        assert row["largest sharpness"] == values.max()
        assert row["rise of sharpness"] == pytest.approx(values[len(values) // 2 :].mean() - values[0])
    features = results["tanh"].histories.query("measure == 'feature_norm' and layer == 'fc2' and step == 40")
    assert table.set_index("key")["last feature_norm[fc2]"].to_dict() == features.set_index("key")["value"].to_dict()


@pytest.mark.xdist_group("X11")
def test_curves_have_a_line_a_scaling_and_panels_by_layer(smoke_of):
    relu, tanh = smoke_of("X11")[1].plots
    assert (relu.name, tanh.name) == ("fig30", "fig31")
    assert set(relu.data["line"]) == {0.5, 1.0, 1.5}
    assert relu.data["panel"].nunique() == 6
    assert set(relu.data["x"]) == {0, 20, 40}
    assert np.isfinite(pd.concat([relu.data, tanh.data])[["y", "low", "high"]].to_numpy()).all()


def test_the_published_protocol_of_the_coordinate_networks():
    studies = EXPERIMENTS["X12"].studies("paper")
    for name, steps in (("gaussian", 10_000), ("relu", 100_000)):
        for network in studies[name].networks():
            assert network.model.activation == name
            assert network.model.width == 256
            how = network.training
            assert (how.max_steps, how.batch_size, how.optimiser.lr, how.optimiser.momentum) == (steps, None, 8e-4, 0.9)
        assert {(n.model.start, n.model.seed) for n in studies[name].networks()} == {
            (start, seed) for start in ("high", "low") for seed in range(10)
        }


@pytest.mark.xdist_group("X12")
def test_the_tables_hold_ours_beside_the_printed(smoke_of):
    one = smoke_of("X12")[1]
    graph, table = (plot.data for plot in one.plots)
    networks = one.results["relu"].networks
    squares = {SUMMED_SHARPNESS: 8 * networks["sharpness"], SQUARED: networks["jacobian_norm"].pow(2)}
    networks = networks.assign(**squares)
    low = networks[networks["start"] == "low"]
    cells = table[table["panel"].str.startswith("Table 2")].set_index(["row", "column"])
    for row, columns in COMPARED.items():
        for said, column in columns.items():
            cell = cells.loc[f"{row}{said}, low", "here"]
            assert cell["mean"] == pytest.approx(low[column].mean())
            assert cell["deviation"] == pytest.approx(low[column].std())
            printed = cells.loc[f"{row}{said}, low", "paper"]
            assert printed[["mean", "deviation"]].tolist() == list(PUBLISHED["relu"][row][1])
            ratio = low[column].mean() / networks.loc[networks["start"] == "high", column].mean()
            cell = cells.loc[f"{row}{said}, low / high", "here"]
            assert cell["mean"] == pytest.approx(ratio)
            rest = networks.loc[networks["start"] == "high", column]
            parts = (low[column].std() / low[column].mean(), rest.std() / rest.mean())
            assert cell["deviation"] == pytest.approx(ratio * np.sqrt(np.square(parts).sum()))
    assert cells.loc["sharpness, low", "paper"]["text"] == "9,922.45 ± 3,330.37"
    by_name = {v.prediction.name: v.statistic.value for v in one.outcomes}
    high = networks[networks["start"] == "high"].reset_index(drop=True)
    logs = np.log(low["jacobian_norm"].to_numpy() / high["jacobian_norm"])
    assert by_name["relu.jacobian"] == pytest.approx(logs.mean())
    difference = low["jacobian_norm"].to_numpy() - high["jacobian_norm"]
    assert by_name["relu.jacobian.difference"] == pytest.approx(difference.mean())
    assert set(graph["line"]) == {"high", "low", SPLINE}


@pytest.mark.xdist_group("X12")
def test_a_norm_without_its_root_is_compared_with_the_printed_ones(smoke_of):
    results = smoke_of("X12")[1].results
    row = of_seeds(results).set_index("seed").loc[2]
    found = {"root": [], "square": []}
    for study, table in PUBLISHED.items():
        networks = results[study].networks.query("seed == 2").set_index("start")
        for start, (mean, _) in zip(("high", "low"), table["Jacobian norm"], strict=True):
            norm = networks.loc[start, "jacobian_norm"]
            found["root"].append(abs(np.log(norm / mean)))
            found["square"].append(abs(np.log(norm**2 / mean)))
        first = networks["weight_norm[fc1]"]
        assert row[f"first_layer.{study}"] == pytest.approx(abs(np.log(first["low"] / first["high"])))
    assert row["root less square"] == pytest.approx(np.mean(found["root"]) - np.mean(found["square"]))


@pytest.mark.xdist_group("X12")
def test_the_graphs_are_the_networks_own(smoke_of):
    results = smoke_of("X12")[1].results
    result, variations = results["gaussian"], measured("gaussian")(results).set_index("key")[TOTAL_VARIATION]
    errors = {}
    for key, graph in result.functions.groupby("key"):
        split = eight_points(seed=int(graph["seed"].iloc[0]))
        assert graph["x"].to_numpy() == pytest.approx(split.test_x.flatten().numpy())
        y = graph["y"].to_numpy()
        assert variations[key] == pytest.approx(sum(abs(after - before) for before, after in pairwise(y)))
        errors[key] = float((torch.tensor(graph["y"].to_numpy()) - split.test_y.flatten()).square().mean())
    expected = result.networks.set_index("key")["test_loss"]
    assert errors == pytest.approx(expected.to_dict(), rel=1e-4)
