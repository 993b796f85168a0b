"""Answers claim a difference rarely where there is none, and mostly where there is one."""

import pytest
from benchmarks.claims import LEVEL, POWER, QUESTIONS, claims, held_out, right, wrong
from scipy.stats import binomtest

SURE = 1e-3
"""The probability below which a count is not blamed on chance."""

COMPARISONS = [one for one in QUESTIONS if "correlation" not in one.question]
STUDIES = [one for one in QUESTIONS if one not in COMPARISONS]


def each(one):
    return f"{one.question}, {one.design}"


@pytest.mark.thorough
def test_of_a_thousand_comparisons_without_a_difference_at_most_65_claim_one():
    assert sum(wrong(one, 1000 // len(COMPARISONS)) for one in COMPARISONS) <= 1000 * LEVEL


@pytest.mark.thorough
@pytest.mark.parametrize(
    "one", [*COMPARISONS, *(pytest.param(one, marks=pytest.mark.slow) for one in STUDIES)], ids=each
)
def test_the_difference_that_there_is_is_named(one):
    assert right(one, 50) >= 50 * POWER


@pytest.mark.slow
@pytest.mark.parametrize("one", QUESTIONS, ids=each)
def test_each_question_has_its_rate(one):
    assert wrong(one, 1000, seed=2) <= 1000 * LEVEL


def test_a_rule_that_claims_too_much_is_caught(monkeypatch):
    """Without the correction, and with an interval of half the width."""
    monkeypatch.setattr("flatlens.comparing.fit._LEVEL", 0.3)
    found = wrong(next(one for one in QUESTIONS if "2 networks" in one.design), 100)
    assert binomtest(found, 100, LEVEL, alternative="greater").pvalue < SURE


@pytest.mark.parametrize(("answer", "claimed"), [
    ("SAM is flatter than SGD by 2 of 2 invariant measures: x.", True),
    ("SAM is less sensitive and more compressed than SGD: x.", True),
    ("Whether SAM is flatter than SGD depends on the measure: x.", True),
    ("SAM fits the training data worse than SGD (x), so.", True),
    ("The held-out loss of SAM is 0.9 [0.8, 0.95] times that of SGD (Holm-corrected p = 0.01).", True),
    ("n0 has the lowest held-out loss: 1.", True),
    ("Across 12 networks, MLS correlates most strongly with the generalisation gap: r.", True),
    ("Across 12 networks, no measure correlates significantly with the generalisation gap; the strongest: 1.", False),
    ("SAM and SGD do not differ significantly in flatness: x of SAM is 0.9 (Holm-corrected p = 1).", False),
    ("The held-out loss of SAM is 0.9 [0.8, 1.1] times that of SGD (not significant).", False),
    ("The held-out loss does not decide between a and b: 1.", False),
])  # fmt: skip
def test_what_counts_as_a_claim(answer, claimed):
    assert claims([answer]) == claimed


def test_the_simulated_answers_are_those_of_a_comparison():
    import numpy as np

    told = held_out(4, True, np.random.default_rng(0), 0.0)
    assert 1 < len(told) <= 3
    assert any("Not ranked: n0 (training loss" in one for one in told)
