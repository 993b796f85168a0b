"""Kinds of networks: what differs of architecture and BatchNorm is named, nothing else."""

import pandas as pd
import pytest

from flatlens.experiments.tables import kinds_of


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"lr": [0.1, 0.2]}, ["", ""]),
        ({"model": ["MLP(widths=(8,))", "MLP(widths=(16,))"]}, ["", ""]),
        ({"model": ["VGG11()", "LeNet()"]}, ["VGG11", "LeNet"]),
        ({"model": ["VGG11(batchnorm=False)", "VGG11(batchnorm=True)"]}, ["without BatchNorm", "with BatchNorm"]),
        ({"model": ["VGG11(batchnorm=False)", "LeNet5()"]}, ["VGG11", "LeNet5"]),
        ({"model": ["a(ghost_batchnorm=False)", "a(batchnorm=True)"]}, ["", ""]),
        ({"model.batchnorm": [True, False]}, ["with BatchNorm", "without BatchNorm"]),
        ({"batchnorm": ["yes", None]}, ["", ""]),
        ({"batchnorm": [True, False]}, ["with BatchNorm", "without BatchNorm"]),
        ({"batchnorm": [True, True]}, ["", ""]),
        (
            {"model": ["VGG11()", "LeNet()"], "batchnorm": [True, False]},
            ["VGG11 with BatchNorm", "LeNet without BatchNorm"],
        ),
        ({"model": ["resnet18", None]}, ["resnet18", "nan"]),
        ({"model": []}, []),
    ],
)
def test_the_words_that_differ(columns, expected):
    found = kinds_of(pd.DataFrame(columns))
    assert found.tolist() == expected
    assert found.name == "kind"


def test_rows_keep_their_labels():
    networks = pd.DataFrame({"model": ["VGG11()", "LeNet()"]}, index=[7, 3])
    assert kinds_of(networks)[7] == "VGG11"
