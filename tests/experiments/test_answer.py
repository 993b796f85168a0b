"""The sentences at the top of a study, from tables whose relations are known."""

import numpy as np
import pandas as pd
import pytest

from flatlens.experiments import Study
from flatlens.experiments.narrative import answer_of_study, closest
from flatlens.experiments.tables import COLUMNS, GIVEN_LOSS, Levels, gap_correlations, training_losses
from flatlens.statistics import GroupDifference
from flatlens.statistics.correlations import TITLES

STUDY = Study.digits("smoke").over("seed", *range(8))
GAP = "generalisation gap"


def rows(coefficient=TITLES["pearson"], kind="", units=8, **found):
    """Rows of `gap_correlations`: r, the ends of its interval, and p."""
    rows = [
        {"kind": kind, "quantity": name, "coefficient": coefficient, "value": r, "low": low, "high": high, "p": p}
        | {"n": 32, "units": units}
        for name, (r, low, high, p) in found.items()
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def within(**found):
    rows = [
        {"x": name, "y": GAP, "group": "lr, batch_size", "groups": 4}
        | {"pearson": r, "pearson_low": low, "pearson_high": high}
        for name, (r, low, high) in found.items()
    ]
    return pd.DataFrame(rows, columns=["x", "y", "group", "groups", "pearson", "pearson_low", "pearson_high"])


NAN = float("nan")
MLS, NMLS = (0.9, -0.2, 1.0, 0.1), (0.7, 0.3, 0.9, 0.004)


def told(*tables, inside=None, left_out=0, unfinished=0, levels=()):
    coefficients = pd.concat(tables, ignore_index=True)
    inside = within() if inside is None else inside
    found = answer_of_study(STUDY, inside, coefficients, levels, left_out, unfinished)
    assert len(found) <= 3
    assert all(sentence.endswith(".") for sentence in found)
    return found


def test_the_strongest_of_the_significant_correlations_is_named():
    overall = rows(MLS=MLS, NMLS=NMLS, **{"GGN trace": (-0.8, -0.9, -0.5, 0.001)})
    what, certain, caveat = told(overall)
    strongest = "GGN trace correlates most strongly with the generalisation gap: r = -0.80 [-0.90, -0.50]"
    counts = "1 of 3 measures correlates positively and 1 negatively"
    assert what == f"Across 32 networks, {strongest}; {counts}."
    assert closest(["MLS", "NMLS", "GGN trace"], overall) == "GGN trace"
    over = "95% intervals over 8 independent seeds, rough below 20, Holm-corrected over 3 measures"
    assert certain == f"How certain: {over}."
    assert caveat == "Caveat: correlation is not causation."


def test_what_is_not_significant_after_holms_correction_is_not_claimed():
    """One of three p below 5%, but not below a third of that."""
    what, *_ = told(rows(MLS=MLS, NMLS=(0.7, 0.1, 0.9, 0.02), **{"GGN trace": (0.1, -0.5, 0.6, 0.8)}))
    none = (
        "no measure correlates significantly with the generalisation gap; the strongest is MLS: r = 0.90 [-0.20, 1.00]"
    )
    assert what == f"Across 32 networks, {none}."


def test_where_training_losses_differ_the_measure_of_which_most_is_left_is_named():
    overall = rows(MLS=(0.92, 0.8, 1.0, 0.001), NMLS=(0.7, 0.3, 0.9, 0.004))
    given = rows(GIVEN_LOSS["pearson"], MLS=(0.45, 0.1, 0.7, 0.02), NMLS=(-0.65, -0.8, -0.3, 0.01))
    what, *_ = told(overall, given)
    numbers = "r = -0.65 [-0.80, -0.30] given the training loss, r = 0.70 [0.30, 0.90] without it"
    strongest = f"NMLS correlates most strongly with the generalisation gap: {numbers}"
    counts = "given the loss, 1 of 2 measures correlates positively and 1 negatively"
    assert what == f"Across 32 networks, {strongest}; {counts}."
    assert closest(["MLS", "NMLS"], pd.concat([overall, given])) == "NMLS"
    assert closest(["MLS", "NMLS"], overall) == "MLS"


def test_what_the_training_loss_explains_is_not_headlined():
    what, *_ = told(rows(MLS=(0.92, 0.8, 1.0, 0.001)), rows(GIVEN_LOSS["pearson"], MLS=(0.45, -0.1, 0.7, 0.1)))
    none = "no measure correlates significantly with the generalisation gap given the training loss"
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
    assert (GIVEN_LOSS["pearson"] in rows) == (GIVEN_LOSS["spearman"] in rows) == differ
    assert not differ or abs(rows[GIVEN_LOSS["pearson"]]) < 0.4


def test_the_training_loss_is_the_measured_one_or_the_last_of_the_training():
    curves = pd.DataFrame({"key": list("abab"), "step": [9, 9, 0, 0], "loss": [0.5, 0.25, 2.0, 2.0]})
    assert training_losses(pd.DataFrame({"key": ["b", "a"]}), curves).tolist() == [0.25, 0.5]
    assert training_losses(pd.DataFrame({"key": ["b", "a"], "loss": [1, 2]}), curves).tolist() == [1, 2]


def test_what_is_left_among_networks_trained_alike_is_told():
    overall = rows(MLS=MLS, NMLS=NMLS)
    _, certain, caveat = told(overall, inside=within(MLS=(0.6, 0.1, 0.9), NMLS=(0.1, -0.5, 0.6)))
    assert certain.endswith("; among networks that differ in the seed alone, r = 0.10 [-0.50, 0.60].")
    assert caveat == "Caveat: the settings may move both sides; correlation is not causation."
    clear = told(overall, inside=within(MLS=(0.1, -0.5, 0.6), NMLS=(0.6, 0.1, 0.9)))
    assert clear[1].endswith("; among networks that differ in the seed alone, r = 0.60 [0.10, 0.90].")
    assert clear[2] == "Caveat: correlation is not causation."
    caveat = told(overall, inside=within(NMLS=(0.1, -0.5, 0.6)), left_out=2, unfinished=1)[2]
    missing = "1 network of the study not finished; 2 networks left out of every correlation"
    assert caveat == f"Caveat: {missing}; correlation is not causation."


@pytest.mark.parametrize("units", [1, 5])
def test_with_few_seeds_nothing_is_decided_and_the_next_step_is_told(units):
    what, certain, _ = told(rows(units=units, MLS=(0.9, NAN, NAN, NAN)))
    assert what.endswith(
        "no measure correlates significantly with the generalisation gap; the strongest is MLS: r = 0.90."
    )
    seeds = "1 independent seed is" if units == 1 else "5 independent seeds are"
    assert certain == f"How certain: {seeds} too few to decide; take 6 or more, as in --set seed=0:6."


def test_without_a_gap_nothing_is_claimed():
    undefined = rows(MLS=(NAN, NAN, NAN, NAN))
    none = "No measure can be correlated with the generalisation gap: too few networks are left, or there is no gap."
    assert told(undefined) == [none]
    assert told(undefined, unfinished=3) == [none, "Caveat: 3 networks of the study not finished."]
    assert closest(["MLS"], undefined) is None


def test_a_sign_that_is_another_in_another_kind_of_networks_is_told():
    def by_kind(**found):
        ends = [(kind, {name: ((low + high) / 2, low, high, 0.1)}) for name, of in found.items()
                for kind, (low, high) in of.items()]  # fmt: skip
        return pd.concat([rows(kind=kind, **row) for kind, row in ends])

    turned = {"VGG11": (-0.6, -0.2), "ResNet18": (0.1, 0.5), "LeNet": (-0.3, 0.4)}
    overall, same = rows(MLS=MLS), {"VGG11": (0.1, 0.5), "ResNet18": (-0.4, 0.2)}
    one = told(overall, by_kind(MLS=turned, NMLS=same))[-1]
    assert "MLS correlates positively in one kind of networks and negatively in another: ResNet18, VGG11;" in one
    two = told(overall, by_kind(MLS=turned, NMLS=turned))[-1]
    assert "2 measures correlate positively in one kind of networks" in two
    assert "kind" not in told(overall, by_kind(MLS={"VGG11": (NAN, NAN), "LeNet": (0.1, 0.2)}))[-1]


def test_levels_come_first_and_the_rest_fits_in_two_sentences():
    flatter = GroupDifference("neuron_flatness", "SAM(rho=0.1)", "none", 0.6, 0.5, 0.7, "ratio", 0.01, 0.02, 6, 6)
    levels = [Levels("ascent", [flatter], {"neuron_flatness": ("flat", "flatness")}, paired=True)]
    first, what, last = told(rows(MLS=(0.9, 0.2, 1.0, 0.001)), levels=levels, unfinished=1)
    numbers = "neuron_flatness of SAM(rho=0.1) is 0.6 [0.5, 0.7] times that of none (smaller in 6 of 6 pairs"
    assert first.startswith(f"SAM(rho=0.1) is flatter than none: {numbers}")
    assert what.startswith("Across 32 networks, MLS correlates most strongly")
    assert last.startswith("How certain: 95% intervals over 8 independent seeds, rough below 20, Holm-corrected over")
    assert last.endswith("; caveat: 1 network of the study not finished; correlation is not causation.")
    open_ = GroupDifference("neuron_flatness", "SAM(rho=0.1)", "none", 0.6, 0.3, 1.2, "ratio", 0.1, 0.1, 6, 5)
    levels = [Levels("ascent", [open_], {"neuron_flatness": ("flat", "flatness")}, paired=True)]
    assert told(rows(MLS=(0.9, 0.2, 1.0, 0.001)), levels=levels)[0].startswith(
        "SAM(rho=0.1) and none do not differ significantly in flatness"
    )
