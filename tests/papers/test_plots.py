"""Data of figures: bands."""

import numpy as np
import pandas as pd
import pytest

from flatlens.papers.plots import banded


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
