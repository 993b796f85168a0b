"""The sentences at the top of a study, from tables whose relations are known."""

import numpy as np
import pandas as pd
import pytest

from flatlens.experiments import Study
from flatlens.experiments.answer import answer_of_study, closest
from flatlens.experiments.levels import Levels
from flatlens.experiments.tables import COLUMNS, GIVEN_LOSS, gap_correlations, training_losses
from flatlens.statistics import GroupDifference

STUDY = Study.digits("smoke").over("seed", *range(8))
GAP = "generalisation gap"


def relations(**found):
    rows = [
        {"x": GAP, "y": name, "n": 32, "units": units, "pearson": r, "pearson_low": low, "pearson_high": high}
        for name, (r, low, high, units) in found.items()
    ]
    return pd.DataFrame(rows)


def within(**found):
    rows = [
        {"x": name, "y": GAP, "group": "lr, batch_size", "groups": 4}
        | {"pearson": r, "pearson_low": low, "pearson_high": high}
        for name, (r, low, high) in found.items()
    ]
    return pd.DataFrame(rows, columns=["x", "y", "group", "groups", "pearson", "pearson_low", "pearson_high"])


def by_kind(**found):
    rows = [
        {
            "kind": kind,
            "quantity": name,
            "coefficient": "Pearson r",
            "value": (low + high) / 2,
            "low": low,
            "high": high,
        }
        for name, kinds in found.items()
        for kind, (low, high) in kinds.items()
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def left(**found):
    """Rows of `gap_correlations`: Pearson's r given the training loss."""
    rows = [
        {"kind": "", "quantity": name, "coefficient": GIVEN_LOSS, "value": r, "low": low, "high": high}
        for name, (r, low, high) in found.items()
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def told(overall, inside=None, left_out=0, unfinished=0, coefficients=None, levels=()):
    inside, coefficients = within() if inside is None else inside, by_kind() if coefficients is None else coefficients
    found = answer_of_study(STUDY, overall, inside, coefficients, levels, left_out, unfinished)
    assert len(found) <= 3
    assert all(sentence.endswith(".") for sentence in found)
    return found


def test_the_strongest_correlation_whose_interval_leaves_out_zero_is_named():
    overall = relations(MLS=(0.9, -0.2, 1.0, 8), NMLS=(0.7, 0.3, 0.9, 8), **{"GGN trace": (-0.8, -0.9, -0.5, 8)})
    what, certain, caveat = told(overall)
    strongest = "GGN trace correlates most strongly with the generalisation gap: r = -0.80 [-0.90, -0.50]"
    counts = "1 of 3 measures correlates positively and 1 negatively"
    assert what == f"Across 32 networks, {strongest}; {counts}."
    assert closest(["MLS", "NMLS", "GGN trace"], overall, by_kind()) == "GGN trace"
    assert certain == "How certain: 95% intervals over 8 independent seeds, rough below 20."
    assert caveat == "Caveat: correlation is not causation."


def test_where_no_interval_leaves_out_zero_no_measure_correlates_clearly():
    what, *_ = told(relations(MLS=(0.9, -0.2, 1.0, 8), NMLS=(0.7, -0.3, 0.9, 8)))
    none = "no measure correlates clearly with the generalisation gap; the strongest is MLS: r = 0.90 [-0.20, 1.00]"
    assert what == f"Across 32 networks, {none}."


def test_where_training_losses_differ_the_measure_of_which_most_is_left_is_named():
    overall = relations(MLS=(0.92, 0.8, 1.0, 8), NMLS=(0.7, 0.3, 0.9, 8))
    given = left(MLS=(0.45, 0.1, 0.7), NMLS=(-0.65, -0.8, -0.3))
    what, *_ = told(overall, coefficients=given)
    numbers = "r = -0.65 [-0.80, -0.30] given the training loss, r = 0.70 [0.30, 0.90] without it"
    strongest = f"NMLS correlates most strongly with the generalisation gap: {numbers}"
    counts = "given the loss, 1 of 2 measures correlates positively and 1 negatively"
    assert what == f"Across 32 networks, {strongest}; {counts}."
    assert closest(["MLS", "NMLS"], overall, given) == "NMLS"
    assert closest(["MLS", "NMLS"], overall, by_kind()) == "MLS"


def test_what_the_training_loss_explains_is_not_headlined():
    what, *_ = told(relations(MLS=(0.92, 0.8, 1.0, 8)), coefficients=left(MLS=(0.45, -0.1, 0.7)))
    none = "no measure correlates clearly with the generalisation gap given the training loss"
    numbers = "r = 0.45 [-0.10, 0.70] given the training loss, r = 0.92 [0.80, 1.00] without it"
    assert what == f"Across 32 networks, {none}; most is left of MLS: {numbers}."


@pytest.mark.parametrize(("spread", "differ"), [(3.0, True), (1.05, False)])
def test_losses_that_differ_are_held_fixed(spread, differ):
    """The gap follows the loss, and the measure follows both: nothing is left of a large r given the loss."""
    rng = np.random.default_rng(0)
    losses = pd.Series(np.geomspace(1.0, spread, 40))
    share = (np.log(losses) / np.log(spread) - 0.5).to_numpy()
    gap, mls = (share + 0.1 * rng.normal(size=40) for _ in range(2))
    values = pd.DataFrame({GAP: gap, "MLS": mls})
    quantities = tuple(q for q in STUDY.quantities if q.name in values)
    found = gap_correlations(values, pd.DataFrame(index=values.index), quantities, pd.Series(range(40)), None, losses)
    rows = found.set_index("coefficient")["value"]
    assert rows["Pearson r"] > 0.8
    assert (GIVEN_LOSS in rows) == differ
    assert not differ or abs(rows[GIVEN_LOSS]) < 0.4


def test_the_training_loss_is_the_measured_one_or_the_last_of_the_training():
    curves = pd.DataFrame({"key": list("abab"), "step": [9, 9, 0, 0], "loss": [0.5, 0.25, 2.0, 2.0]})
    assert training_losses(pd.DataFrame({"key": ["b", "a"]}), curves).tolist() == [0.25, 0.5]
    assert training_losses(pd.DataFrame({"key": ["b", "a"], "loss": [1, 2]}), curves).tolist() == [1, 2]


def test_what_is_lost_among_networks_trained_alike_is_told():
    overall = relations(MLS=(0.9, 0.2, 1.0, 8), NMLS=(0.7, 0.3, 0.9, 8))
    inside = within(MLS=(0.1, -0.5, 0.6), NMLS=(0.6, 0.1, 0.9))
    _, certain, caveat = told(overall, inside)
    among = "among networks that differ in the seed alone"
    assert certain.endswith(f"; {among}, 1 of 2 measures correlates positively.")
    lost = f"the correlation of MLS is not clear {among}: the settings may move both sides"
    assert caveat == f"Caveat: {lost}; correlation is not causation."
    _, _, caveat = told(overall, inside, left_out=2, unfinished=1)
    assert caveat.startswith("Caveat: 1 network of the study not finished; 2 networks left out of every correlation; c")


@pytest.mark.parametrize("units", [1, 2])
def test_without_intervals_nothing_is_certain_and_the_next_step_is_told(units):
    what, certain, _ = told(relations(MLS=(0.9, float("nan"), float("nan"), units)))
    assert what.endswith("no measure correlates clearly with the generalisation gap; the strongest is MLS: r = 0.90.")
    seeds = "1 independent seed gives" if units == 1 else "2 independent seeds give"
    assert certain == f"How certain: {seeds} no interval; take 6 or more, as in --set seed=0:6."


def test_without_a_gap_nothing_is_claimed():
    undefined = relations(MLS=(float("nan"),) * 3 + (8,))
    assert [sentence[:40] for sentence in told(undefined)] == ["No measure can be correlated with the ge"]
    assert told(undefined, unfinished=3)[1:] == ["Caveat: 3 networks of the study not finished."]
    assert closest(["MLS"], undefined, by_kind()) is None


def test_a_sign_that_is_another_in_another_kind_of_networks_is_told():
    turned = {"VGG11": (-0.6, -0.2), "ResNet18": (0.1, 0.5), "LeNet": (-0.3, 0.4)}
    overall = relations(MLS=(0.3, 0.1, 0.5, 8))
    other = {"": (-0.9, -0.8), "VGG11": (0.1, 0.5), "ResNet18": (-0.4, 0.2)}
    one = told(overall, coefficients=by_kind(MLS=turned, NMLS=other))[-1]
    assert "MLS correlates positively in one kind of networks and negatively in another: ResNet18, VGG11;" in one
    two = told(overall, coefficients=by_kind(MLS=turned, NMLS=turned))[-1]
    assert "2 measures correlate positively in one kind of networks" in two
    none = told(overall, coefficients=by_kind(MLS={"VGG11": (float("nan"),) * 2, "LeNet": (0.1, 0.2)}))
    assert "kind" not in none[-1]


def test_levels_come_first_and_the_rest_fits_in_two_sentences():
    flatter = GroupDifference("neuron_flatness", "SAM(rho=0.1)", "none", 0.6, 0.5, 0.7, "ratio", 0.01, 0.02, 6, 6)
    levels = [Levels("ascent", [flatter], {"neuron_flatness": ("flat", "flatness")}, paired=True)]
    first, what, last = told(relations(MLS=(0.9, 0.2, 1.0, 8)), levels=levels, unfinished=1)
    numbers = "neuron_flatness of SAM(rho=0.1) is 0.6 [0.5, 0.7] times that of none (smaller in 6 of 6 pairs"
    assert first.startswith(f"SAM(rho=0.1) is flatter than none: {numbers}")
    assert what.startswith("Across 32 networks, MLS correlates most strongly")
    assert last.startswith("How certain: 95% intervals over 8 independent seeds, rough below 20; caveat: 1 network of")
    open_ = GroupDifference("neuron_flatness", "SAM(rho=0.1)", "none", 0.6, 0.3, 1.2, "ratio", 0.1, 0.1, 6, 5)
    levels = [Levels("ascent", [open_], {"neuron_flatness": ("flat", "flatness")}, paired=True)]
    assert told(relations(MLS=(0.9, 0.2, 1.0, 8)), levels=levels)[0].startswith(
        "SAM(rho=0.1) and none do not differ significantly in flatness"
    )
