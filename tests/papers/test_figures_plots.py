"""Data of figures: bands, and what was followed in training."""

import numpy as np
import pandas as pd
import pytest
from fake_study import fake_result

from flatlens.experiments.quantities import Quantity
from flatlens.papers.figures import banded, followed_curves


def test_a_band_is_one_standard_deviation_and_stays_positive_where_the_values_are():
    values = {"even": [1.0, 2.0, 3.0], "skewed": [1.0, 1.0, 100.0], "signed": [-1.0, 0.0, 7.0], "alone": [5.0]}
    rows = pd.DataFrame(
        [("p", 0, line, y) for line, ys in values.items() for y in ys], columns=["panel", "x", "line", "y"]
    )
    drawn = banded(rows, "name", "title", "caption", "x").data.set_index("line")
    for line, ys in values.items():
        spread = float(np.std(ys, ddof=1)) if len(ys) > 1 else 0.0
        mean = float(np.mean(ys))
        low = 1.0 if line == "skewed" else mean - spread
        assert drawn.loc[line, ["y", "low", "high"]].tolist() == pytest.approx([mean, low, mean + spread])


def test_curves_are_of_the_networks_given_and_say_how_many_seeds():
    columns = {"key": ["a", "b", "c", "d"], "seed": [0, 1, 2, 0], "lr": [0.1, 0.1, 0.1, 0.2]}
    rows = [(key, step, "loss", "", step + value) for value, key in enumerate("abcd") for step in (0, 10)]
    histories = pd.DataFrame(rows, columns=["key", "step", "measure", "layer", "value"])
    result = fake_result(columns, histories=histories)
    some = result.networks[result.networks["key"] != "c"]
    plot = followed_curves(result, some, "lr", [Quantity("loss", "loss")], "name", "title", "batch size 20")
    means = plot.data.pivot(index="x", columns="line", values="y")
    assert means.to_dict() == {0.1: {0: 0.5, 10: 10.5}, 0.2: {0: 3.0, 10: 13.0}}
    assert "; 2 seeds, batch size 20." in plot.caption
