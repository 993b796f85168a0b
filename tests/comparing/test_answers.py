"""What a comparison says: each sentence where it is true, and not where it is not."""

import re
from pathlib import Path

import pandas as pd
import pytest
from made_up import CHANCE, compared, report

from flatlens.comparing.answers import EVIDENCE
from flatlens.estimate import Estimate

GAP_TABLE = Path(__file__).parents[2] / "docs" / "papers" / "gap.csv"
FLAT = {"neuron_flatness": 2.0, "adaptive_sharpness": 3.0, "mls": 5.0}
LESS = {"neuron_flatness": 1.0, "adaptive_sharpness": 2.0, "mls": 4.0}


def text(comparison):
    assert 1 <= len(comparison.answer) <= 3
    assert all(one[0].isupper() or one[0] in "abcdn" for one in comparison.answer)
    assert all(one.endswith(".") for one in comparison.answer)
    return " ".join(comparison.answer)


def test_which_of_four_checkpoints_to_ship_one_untrained_one_overfitted():
    found = compared(
        a=report(CHANCE + 0.02, CHANCE, accuracy=0.1, neuron_flatness=0.001),
        b=report(0.2, 0.30, neuron_flatness=2.0),
        c=report(0.19, 0.36, neuron_flatness=1.0),
        d=report(0.001, 0.9, neuron_flatness=4.0),
    )
    best, excluded, flatness = found.answer
    assert re.match(
        r"b has the lowest held-out loss: 0\.3 against 0\.36 for c, difference 0\.06 \[0\.0\d+, 0\.0\d+\]", best
    )
    assert best.endswith("; accuracy 87.0% against 86.4%.")
    assert "a (untrained or failed: training loss 2.32, 2.3 for the best constant prediction)" in excluded
    assert "d (overfitted: training loss 0.001 against 0.2 of b, held-out loss 0.9 against 0.3)" in excluded
    assert flatness == "Flatness does not agree: c is the flattest by the invariant measure neuron_flatness."
    assert found.ranks().loc["neuron_flatness"].isna().tolist() == [True, False, False, True]


def test_the_best_network_is_ranked_though_an_overfitted_one_has_the_lowest_training_loss():
    found = compared(good=report(0.2, 0.30, **FLAT), also=report(0.2, 0.32, **LESS), over=report(0.001, 0.9, **FLAT))
    assert list(found.not_ranked) == ["over"]
    assert found.ranked == ["good", "also"]


def test_a_low_training_loss_alone_is_not_overfitting():
    """The held-out losses do not differ: the network that fits the training data best is the reference."""
    found = compared(a=report(0.2, 0.3, **FLAT), b=report(0.001, 0.3, **FLAT))
    assert "overfitted" not in text(found)
    assert list(found.not_ranked) == ["a"]


def test_held_out_losses_that_do_not_differ_decide_nothing():
    found = compared(a=report(0.2, 0.3, **FLAT), b=report(0.2, 0.3 + 1e-4, **LESS))
    told = text(found)
    assert told.startswith(
        "The held-out loss does not decide between a and b: 0.3 for a, 0.3 for b, difference 0.0001 [-0.0"
    )
    assert EVIDENCE in told
    assert "has the lowest" not in told
    assert "Flatness agrees" not in told
    many = {f"n{i}": report(0.2, 0.3 + i * 1e-4) for i in range(8)}
    assert "does not decide between n0, n1, n2, n3 and 4 more: 0.3 for n0" in text(compared(**many))
    three = compared(a=report(0.2, 0.3), b=report(0.2, 0.3 + 1e-4), c=report(0.2, 0.3 + 2e-4))
    assert "does not decide between a, b and c:" in text(three)


@pytest.mark.parametrize(("one", "other", "verdict"), [
    (LESS, FLAT, "Flatness agrees: b is the flattest by both invariant measures."),
    (FLAT, LESS, "Flatness does not agree: c is the flattest by both invariant measures."),
    ({**LESS, "adaptive_sharpness": 9.0}, FLAT,
     "Flatness agrees in part: the 2 invariant measures of flatness disagree: the flattest is b by 1, c by 1."),
    ({"neuron_flatness": Estimate(2.0, 0.5, "estimate")}, {"neuron_flatness": Estimate(2.1, 0.5, "estimate")},
     "Flatness does not agree: 1 of 1 invariant measures of flatness do not decide."),
])  # fmt: skip
def test_flatness_agrees_with_the_held_out_loss_or_does_not(one, other, verdict):
    assert compared(b=report(0.2, 0.3, **one), c=report(0.2, 0.4, **other)).answer[-1] == verdict


def test_measures_that_a_rescaling_changes_say_nothing():
    found = compared(b=report(0.2, 0.3, ggn_trace=1.0), c=report(0.2, 0.4, ggn_trace=2.0))
    assert "latness" not in text(found)
    without = compared(b=report(0.2, ggn_trace=1.0), c=report(0.2, ggn_trace=2.0))
    assert without.answer[0].startswith("Which network is flatter is open: no measure that decides is invariant")


def test_between_architectures_only_properties_of_the_function_decide():
    found = compared(False, b=report(0.2, **FLAT), c=report(0.2, **LESS))
    assert found.answer[0] == "c is the most compressed by the invariant measure mls."
    assert "flattest" in compared(True, b=report(0.2, **FLAT), c=report(0.2, **LESS)).answer[0]


def test_where_no_other_network_fits_as_well_flatness_is_not_compared():
    found = compared(b=report(0.2, 0.3, **FLAT), c=report(1.5, 1.8, **LESS))
    assert found.answer[-1] == "Flatness is not compared: no other network fits the training data as well as b."


def test_without_held_out_data_flatness_does_not_say_which_generalises():
    found = compared(b=report(0.2, **FLAT), c=report(0.2, **LESS))
    assert found.answer == [
        "c is the flattest by both invariant measures; c is the most compressed by the invariant measure mls.",
        "Flatness alone does not show which network generalises best: give held-out data (test=..., --test).",
    ]
    mixed = compared(b=report(0.2, **FLAT), c=report(0.2, **{**LESS, "adaptive_sharpness": 9.0}))
    assert mixed.answer[0].startswith("The 2 invariant measures of flatness disagree: the flattest is ")


def test_networks_that_are_all_untrained_are_told():
    found = compared(a=report(CHANCE, 2.2, **FLAT), b=report(CHANCE + 0.1, 2.5, **LESS))
    assert "No network is trained: training losses 2.3 to 2.4, no better than chance." in found.answer
    assert not found.not_ranked
    assert "No network is trained" not in text(compared(a=report(0.1, **FLAT), b=report(CHANCE, **LESS)))


def test_random_weights_are_named():
    one = report(0.9, **FLAT)
    one.about["origin"] = {"weights": "random, of timm:resnet18"}
    found = compared(a=one, b=report(0.2, **FLAT), c=report(0.2, **LESS))
    assert "a (untrained: random weights, training loss 0.9)" in text(found)


def test_a_network_with_a_large_loss_that_is_often_right_is_trained():
    assert "untrained" not in text(compared(a=report(CHANCE, accuracy=0.6, **FLAT), b=report(0.2, **LESS)))


def test_a_loss_without_a_known_level_of_constant_outputs_is_just_larger():
    one = report(CHANCE, **FLAT)
    one.about["constant"] = None
    assert "untrained" not in text(compared(a=one, b=report(0.2, **LESS)))


def test_a_loss_that_is_not_finite_is_not_ranked():
    found = compared(a=report(float("nan"), 0.1, **FLAT), b=report(0.2, 0.3, **FLAT), c=report(0.2, 0.4, **LESS))
    assert found.not_ranked["a"].reason == "training loss nan"
    assert found.answer[0].startswith("b has the lowest held-out loss")


def test_many_networks_that_are_not_ranked_are_counted():
    bad = {f"bad{i}": report(CHANCE + i / 100) for i in range(6)}
    told = text(compared(a=report(0.2, **FLAT), b=report(0.2, **LESS), **bad))
    assert told.count("untrained or failed") == 3
    assert "; and 3 other networks." in told


def test_equal_networks_are_asked_about():
    found = compared(a=report(0.2, 0.3, **FLAT), b=report(0.2, 0.3, **FLAT))
    assert found.answer == ["All networks have equal values: are these the same weights?"]


def test_the_evidence_is_that_of_the_papers():
    """The sentence holds in the table of its page: measures with ten populations or more, by their signs."""
    table = pd.read_csv(GAP_TABLE)
    known = table.dropna(subset=["gap"]).groupby("measure").filter(lambda mine: len(mine) >= 10)
    shares = {}
    for column in ("gap", "equal settings"):
        of = known.dropna(subset=[column])
        signs = pd.DataFrame({"plus": of[f"{column} low"] > 0, "minus": of[f"{column} high"] < 0})
        shares[column] = signs.groupby(of["measure"]).mean()
        assert (shares[column] < 1).all(axis=None)
    assert len(shares["gap"]) >= 4
    assert shares["equal settings"].sum().sum() < shares["gap"].sum().sum()  # least of all among equal settings


def test_which_of_two_networks_is_simpler_is_the_first_sentence():
    """Half-widths 0.6 and 0.8: the difference of 3 has one of 1."""

    def with_coefficient(value, margin, loss=0.2, fall=0.0):
        one = Estimate(value, margin / 1.96, "estimate")
        found = report(loss, local_learning_coefficient=one)
        rows = dict(found) | {("local_learning_coefficient.fall", None): Estimate(fall, kind="lower bound")}
        return type(found)(rows, found.about)

    def first(**reports):
        found = compared(**{name: with_coefficient(*given) for name, given in reports.items()})
        found.measures.pop("local_learning_coefficient.fall", None)
        return found.answer[0]

    assert first(a=(15.0, 0.6), b=(12.0, 0.8)) == (
        "b is simpler than a: local learning coefficient 12 ± 0.8 against 15 ± 0.6 of a, difference 3 [2, 4] (95%); "
        "training losses 0.2 and 0.2."
    )
    assert first(a=(12.5, 0.6), b=(12.0, 0.8)).startswith("Which of b and a is simpler is open: local learning coeff")
    assert first(a=(15.0, 0.6, 0.2, 2.0), b=(12.0, 0.8)).endswith("0.2 and 0.2; not at a minimum (`.fall`): a.")
    assert first(a=(15.0, 0.6, 1.0), b=(12.0, 0.8)) == (
        "Which network is simpler is open: fewer than two fit the training data equally well."
    )
    undefined = report(0.2, local_learning_coefficient=Estimate(float("nan"), kind="undefined", note="chains disagree"))
    assert compared(a=undefined, b=with_coefficient(12.0, 0.8)).answer[0] == (
        "Which network is simpler by the local learning coefficient is open: "
        "that of a is undefined, as chains disagree."
    )
