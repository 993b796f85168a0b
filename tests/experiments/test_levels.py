"""Differences between the levels of axes of words, on made-up networks whose differences are known."""

from itertools import product

import numpy as np
import pandas as pd
import pytest

from flatlens.experiments.narrative import level_sentences
from flatlens.experiments.quantities import STUDIED, quantities
from flatlens.experiments.result import TABLE_COLUMNS
from flatlens.experiments.tables import level_differences, table_of

VARIED = ["lr", "ascent", "seed"]


def networks(factor=0.5, seeds=6, levels=("none", "SAM(rho=0.1)"), own_seeds=False):
    """The neuron flatness of each level is `factor` times that of the one before; other measures are noise."""
    rng = np.random.default_rng(0)
    rows = list(product((0.05, 0.1), range(len(levels)), range(seeds)))
    table = pd.DataFrame(rows, columns=["lr", "level", "seed"])
    start = dict(enumerate(rng.normal(0, 1, seeds)))
    noise = [rng.normal(0, 0.05, len(table)) for _ in range(4)]
    table["neuron_flatness"] = np.exp(table["seed"].map(start) + noise[0]) * factor ** table["level"]
    table["interpolation_sharpness"] = 3 * np.exp(noise[1])
    table["mls"], table["loss"] = np.exp(noise[2]), 0.01 * np.exp(noise[3])
    table["ascent"] = table["level"].map(dict(enumerate(levels)))
    if own_seeds:
        table["seed"] += 100 * table["level"]
    return table.assign(key=range(len(table)), batch_size=16)


def found(table, varied=VARIED):
    return level_differences(table, quantities(STUDIED), varied)


def test_levels_are_compared_over_pairs_of_one_seed_and_the_other_settings():
    (one,) = found(networks())
    first = one.differences[0]
    assert one.setting == "ascent"
    assert one.paired
    by = {difference.name: difference for difference in one.differences}
    flat = by["neuron_flatness"]
    assert (flat.group, flat.reference, flat.n, flat.smaller) == ("SAM(rho=0.1)", "none", 6, 6)  # seeds, not networks
    assert flat.value == pytest.approx(0.5, rel=0.1)
    assert flat.high - flat.low < 0.1  # the spread of the starts is taken out
    assert flat.significant
    assert set(one.meanings) == {"mls", "neuron_flatness"}
    assert first.name == "mls"  # invariant measures first
    assert not by["interpolation_sharpness"].significant
    assert np.isnan(by["loss"].p_holm)


def test_the_answer_says_which_level_is_flatter_and_not_where_none_is():
    (one,) = found(networks())
    sentence = level_sentences(one)[0]
    assert sentence.startswith("SAM(rho=0.1) is flatter than none: neuron_flatness of SAM(")
    (one,) = found(networks(factor=2.0))
    assert level_sentences(one)[0].startswith("SAM(rho=0.1) is sharper than none")
    (one,) = found(networks(factor=1.0))
    assert level_sentences(one)[0].startswith("SAM(rho=0.1) and none do not differ significantly in flatness")
    (one,) = found(networks(seeds=2))
    assert level_sentences(one)[0].startswith("Whether SAM(rho=0.1) is flatter than none is open")


def test_a_level_that_does_not_fit_the_data_is_not_called_flatter():
    table = networks()
    table.loc[table["level"] == 1, "loss"] *= 5
    (one,) = found(table)
    sentence = level_sentences(one)[0]
    assert sentence.startswith("SAM(rho=0.1) fits the training data worse than none (its training loss is ")
    assert "need not mean a flatter minimum" in sentence


def test_each_level_is_compared_with_the_first_and_more_axes_are_apart():
    table = networks(levels=("none", "SAM(rho=0.05)", "SAM(rho=0.1)"))
    table["model.activation"] = "relu"
    assert [one.setting for one in found(table, [*VARIED, "model.activation"])] == ["ascent"]
    other = pd.concat([table, table.assign(**{"model.activation": "tanh"})], ignore_index=True)
    both = found(other, [*VARIED, "model.activation"])
    assert [(one.setting, len({d.group for d in one.differences})) for one in both] == [
        ("ascent", 2), ("model.activation", 1),
    ]  # fmt: skip
    columns = table_of(both)
    assert list(columns) == TABLE_COLUMNS["differences"]
    assert set(columns["reference"]) == {"none", "relu"}


def test_networks_with_seeds_of_their_own_are_independent_groups():
    (one,) = found(networks(own_seeds=True))
    assert not one.paired
    by = {difference.name: difference for difference in one.differences}
    assert by["neuron_flatness"].n == 12
    assert by["neuron_flatness"].high - by["neuron_flatness"].low > 0.5


@pytest.mark.parametrize("values", [(0.1, 0.2), ("0.1, 4", "0.2, 8")])
def test_numbers_are_no_words(values):
    table = networks()
    table["momentum"] = np.where(table["level"] == 0, *values)
    assert found(table, ["lr", "momentum", "seed"]) == []
    assert list(table_of([])) == TABLE_COLUMNS["differences"]


def test_true_and_false_are_words_and_what_is_not_known_is_left_out():
    table = networks().rename(columns={"ascent": "batchnorm"})
    table["batchnorm"] = table["level"] == 1
    (one,) = found(table, ["lr", "batchnorm", "seed"])
    assert {difference.reference for difference in one.differences} == {"False"}
    table = networks()
    table.loc[table["level"] == 1, "ascent"] = None
    table["ascent"] = table["ascent"].map(lambda level: np.nan if level is None else level)
    assert found(table) == []
