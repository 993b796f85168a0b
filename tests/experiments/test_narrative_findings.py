"""The words must follow the numbers: the same study with its relations turned round says the opposite."""

import numpy as np
import pandas as pd
import pytest

from flatlens.experiments import Study
from flatlens.experiments.narrative import findings, interval_of
from flatlens.experiments.quantities import BATCH_SIZE, GAP, LEARNING_RATE, SHARPNESS
from flatlens.experiments.tables import COLUMNS, gap_correlations, groupings, values_table
from flatlens.statistics import relate_all, relate_within

STUDY = (
    Study.digits("laptop").over("lr", 0.02, 0.05, 0.1, 0.2).over("seed", 0, 1, 2, 3)
)  # 48 networks: sentences say when seeds are few
NO_KINDS = pd.DataFrame(columns=list(COLUMNS))


def told(gap_with_sharpness, sharpness_with_lr, noise=0.05):
    """The findings on made-up networks: relations of the given sign, the other measures pure noise."""
    rng = np.random.default_rng(0)
    networks = pd.DataFrame(
        [(n.key, n.training.optimiser.lr, n.training.batch_size, n.training.seed) for n in STUDY.networks()],
        columns=["key", "lr", "batch_size", "seed"],
    ).assign(outcome="converged", steps=range(1000, 1048))
    root = 5 + sharpness_with_lr * np.log(networks["lr"]) + noise * rng.normal(size=48)
    networks["interpolation_sharpness"] = root**2
    networks["generalisation_gap"] = 9 + gap_with_sharpness * root + noise * rng.normal(size=48)
    networks["ggn_trace"] = networks["interpolation_sharpness"] * (1 + 1e-13)
    networks["mls"] = rng.normal(size=48)
    networks["test_accuracy"] = 0.975
    values = values_table(networks, STUDY.quantities)
    quantities = values[[q.name for q in STUDY.quantities]]
    groups = groupings(networks, ["lr", "batch_size", "seed"])
    relations, within = relate_all(quantities), relate_within(quantities, GAP.name, groups)
    return findings(STUDY, networks, relations, within, NO_KINDS, unfinished=0, failed=0), relations


@pytest.mark.parametrize("sign", [1, -1])
def test_the_gaps_correlation_is_told_with_its_numbers(sign):
    sentences, relations = told(gap_with_sharpness=sign, sharpness_with_lr=-1)
    row = relations[(relations["x"] == GAP.name) & (relations["y"] == SHARPNESS.name)].iloc[0]
    told_gap = next(s for s in sentences if s.startswith("Across 48 networks"))
    assert f"networks {SHARPNESS.name} correlates most strongly with the generalisation gap" in told_gap
    assert row["pearson"] * sign > 0
    assert f"r = {row['pearson']:.2f} [{row['pearson_low']:.2f}, {row['pearson_high']:.2f}]" in told_gap
    assert f"tau = {row['kendall']:.2f} [" in told_gap
    assert any(s.startswith("No clear correlation with the gap") and "MLS, r =" in s for s in sentences)


@pytest.mark.parametrize(("sign", "word"), [(-1, "flatter"), (1, "sharper")])
def test_the_learning_rates_effect_is_told_in_its_direction(sign, word):
    sentences, _ = told(gap_with_sharpness=1, sharpness_with_lr=sign)
    assert any(s.startswith(f"A larger learning rate correlates with {word} minima") for s in sentences)
    assert any(s.startswith("No clear effect of the batch size") for s in sentences)
    assert {LEARNING_RATE.role, BATCH_SIZE.role} == {"setting"}


def test_what_is_left_at_fixed_settings_is_told():
    sentences, _ = told(gap_with_sharpness=1, sharpness_with_lr=-1)
    inside = next(s for s in sentences if s.startswith("Within a fixed learning rate (4 groups"))
    assert "2 of 3 measures correlate positively with the gap: " in inside


def test_measures_that_coincide_are_told_once():
    sentences, _ = told(gap_with_sharpness=1, sharpness_with_lr=-1)
    twins = [s for s in sentences if " equals " in s]
    assert len(twins) == 1
    assert "ggn_trace equals interpolation_sharpness" in twins[0]


def test_a_sign_that_turns_round_inside_the_groups_is_told():
    rng = np.random.default_rng(1)
    seed = np.tile(np.arange(4.0), 12)
    inside = rng.normal(size=48)
    columns = {GAP.name: 10 * seed + inside, "MLS": 10 * seed - inside, "NMLS": 10 * seed + inside}
    table = pd.DataFrame(columns)
    relations, within = relate_all(table), relate_within(table, GAP.name, {"seed": pd.Series(seed)})
    networks = pd.DataFrame({"outcome": ["converged"] * 48, "steps": 5, "seed": seed})
    sentences = findings(STUDY, networks, relations, within, NO_KINDS, unfinished=0, failed=0)
    turned = [s for s in sentences if "changes" in s]
    assert len(turned) == 1
    assert turned[0].startswith("Within a fixed seed")
    assert "changes for MLS, 0.9" in turned[0]
    assert "NMLS" not in turned[0]


def test_a_sign_that_turns_round_between_kinds_of_networks_is_told():
    """Two kinds with opposite relations: pooled there is none."""
    rng = np.random.default_rng(2)
    gap, kind = rng.normal(size=48), pd.Series(np.repeat(["VGG11", "LeNet"], 24))
    mls = np.where(kind == "VGG11", gap, -gap) + 0.3 * rng.normal(size=48)
    values, units = pd.DataFrame({GAP.name: gap, SHARPNESS.name: mls}), pd.Series(np.tile(np.arange(8), 6))
    table = gap_correlations(values, pd.DataFrame({"model": kind}), (GAP, SHARPNESS), units, kind)
    networks = pd.DataFrame({"outcome": ["converged"] * 48, "steps": 5, "seed": units})
    relations, within = relate_all(values), relate_within(values, GAP.name, {})
    sentences = findings(STUDY, networks, relations, within, table, unfinished=0, failed=0)
    turned = next(s for s in sentences if s.startswith("Between kinds"))
    assert turned.startswith(f"Between kinds of networks the sign of r changes for {SHARPNESS.name}, 0.9")
    assert "] in VGG11 but -0.9" in turned
    assert turned.endswith("] in LeNet.")
    assert any(s.startswith("No clear correlation") for s in sentences)


def test_no_interval_is_spoken_of_where_no_network_is_left():
    table = pd.DataFrame({GAP.name: [], "MLS": []})
    networks = pd.DataFrame({"outcome": ["out of steps"] * 48, "steps": 5, "seed": 0})
    relations = relate_all(table)
    sentences = findings(STUDY, networks, relations, relate_within(table, GAP.name, {}), NO_KINDS, 0, 0)
    assert sentences[-1] == "There are no intervals: no network reached the end of its training."


def test_nothing_is_claimed_of_pure_noise():
    sentences, _ = told(gap_with_sharpness=0, sharpness_with_lr=0)
    assert not any("most strongly" in s or "correlates with" in s for s in sentences)
    assert sum(s.startswith("No clear") for s in sentences) == 5  # with the gap, and each setting with two others


def test_the_population_is_told_first():
    sentences, _ = told(gap_with_sharpness=1, sharpness_with_lr=-1)
    assert sentences[0].startswith(
        "48 of 48 networks interpolate their 600 training samples (accuracy 1, loss below 0.002), after 1,000 to 1,047"
    )
    assert "test accuracy is 0.975," in sentences[0]


def test_the_intervals_are_over_seeds():
    sentences, _ = told(gap_with_sharpness=1, sharpness_with_lr=-1)
    assert "over 4 independent seeds: networks of one seed share" in sentences[-1]
    assert "With 4 seeds they are rough." in sentences[-1]


def test_too_few_seeds_have_no_intervals():
    table = pd.DataFrame({GAP.name: [1.0, 2.0, 4.0, 3.0], "MLS": [1.0, 3.0, 2.0, 4.0]})
    networks = pd.DataFrame({"outcome": ["converged"] * 4, "steps": 5, "seed": [0, 0, 1, 1]})
    sentences = findings(STUDY, networks, relate_all(table), relate_within(table, GAP.name, {}), NO_KINDS, 0, 0)
    said = "There are no intervals: 2 independent seeds are too few. No finding is certain."
    assert sentences[-1] == said


def test_a_coefficient_without_an_interval_is_told_alone():
    row = pd.Series({"pearson": 0.5, "pearson_low": float("nan"), "pearson_high": float("nan")})
    assert interval_of(row, "pearson") == "0.50"
    assert interval_of(row.fillna(0.25), "pearson") == "0.50 [0.25, 0.25]"
