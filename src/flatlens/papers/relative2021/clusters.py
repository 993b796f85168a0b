"""Shared by X16 and X17: clusters mapped back through a random tanh network, and a ridge head on its features.

The head is the last linear layer. There `relative_flatness_ggn` equals Definition 3 and needs no curvature products of
the layers below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pandas as pd

from flatlens.data.sources import DataSettings
from flatlens.data.synthetic import CLUSTER_SCALE
from flatlens.experiments.settings import NetworkSettings
from flatlens.models import MLP
from flatlens.statistics import Statistic
from flatlens.training import Ridge, Training

CLUSTER_FEATURES = 8
FLATNESS = "relative_flatness_ggn"
AS_CODED = "relative_flatness_ggn(normalized='variance')"


def of_clusters(data: DataSettings, measures: tuple[str, ...]) -> NetworkSettings:
    """Return the settings of the network of C.1 on such data."""
    model = MLP(784, (512, 128, 16, CLUSTER_FEATURES), 2, "tanh", init="xavier_uniform")
    training = Training(Ridge(CLUSTER_SCALE**2), loss="half_squared_error", max_steps=1)  # 1 on the clusters as drawn
    return NetworkSettings(data, model, training, (*measures, "loss", "test_accuracy", "generalisation_gap"))


def by_separation(
    table: pd.DataFrame, columns: Mapping[str, str], of: Callable[[pd.DataFrame, str], Statistic], panel: str
) -> pd.DataFrame:
    """Return curves over the class separation: one line per column, a statistic of each separation's rows."""
    rows = []
    for line, column in columns.items():
        for separation, among in table.groupby("separation"):
            found = of(among, column)
            rows.append((panel, separation, line, found.value, found.low, found.high))
    return pd.DataFrame(rows, columns=["panel", "x", "line", "y", "low", "high"])


SEPARATION = (
    "Class separation is the smallest distance between the centres of clusters, which are drawn in a cube as the paper "
    "says; it does not say which distance is meant, how covariances are drawn (here A A' / 6), nor which separations "
    "it takes. The authors' code puts the centres on corners of a cube."
)
HEAD = (
    "The paper does not name the loss of the ridge head. Here it is the half squared error on one-hot labels, in place "
    "of its classes 1 and -1, with scikit-learn's penalty of 1 on the features as drawn. One number, 1/256, scales all "
    "features, so that the tanh can be inverted; neither relative flatness nor the gap depends on it."
)
INVERSE = "Inputs are exact solutions, which the tanh can reach; those of the paper are least-squares solutions."
