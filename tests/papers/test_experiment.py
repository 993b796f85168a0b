"""Conclusions follow from intervals alone; evidence is the named statistic of the right networks."""

from dataclasses import fields, replace
from types import MappingProxyType

import numpy as np
import pandas as pd
import pytest
from fake_study import fake_result
from scipy.stats import norm

from flatlens.experiments.result import StudyResult
from flatlens.papers import EXPERIMENTS
from flatlens.papers.contrasts import mean_of
from flatlens.papers.evidence import UNIT, along, correlated, reached, studied
from flatlens.papers.experiment import WEAK, Plot, Prediction, conclusion_of, replicated
from flatlens.papers.figures import banded
from flatlens.statistics import Statistic, correlate, in_cases, in_readings
from flatlens.statistics.statistic import NAN

KEYS = ["a", "b", "c", "d", "e", "f"]


class Result:
    """The tables that evidence reads: six networks, the last of which is out of steps."""

    networks = pd.DataFrame(
        {
            "key": KEYS,
            "lr": [0.1, 0.1, 0.2, 0.2, 0.4, 0.4],
            "outcome": ["converged"] * 3 + ["finished"] * 2 + ["out of steps"],
            "mls": [5.0, 4.0, 4.0, 3.0, 1.0, 99.0],
        }
    )
    values = pd.DataFrame(
        {"key": KEYS, "included": [True] * 5 + [False], "gap": [5.0, 4.5, 3.0, 3.2, 1.0, -9.0], "MLS": networks["mls"]}
    )
    settings = MappingProxyType({"axes": [{"name": "lr", "values": [0.1, 0.2, 0.4]}]})
    histories = pd.DataFrame(
        [
            (key, step, measure, "", value)
            for key, power in zip(KEYS, (1, 1, 2, 2, -1, 9), strict=True)
            for step, loss in ((0, 1.0), (10, 0.5), (20, 0.1), (30, 0.2), (40, 0.05))
            for measure, value in (("loss", loss), ("s", 100.0 - step), ("v", (100.0 - step) ** power))
        ],
        columns=["key", "step", "measure", "layer", "value"],
    )


RESULTS = {"one": Result}


@pytest.mark.parametrize(
    ("low", "high", "above", "below"),
    [
        (0.1, 0.5, "reproduced", "not reproduced"),
        (-0.5, -0.1, "not reproduced", "reproduced"),
        (-0.1, 0.1, "open", "open"),
        (0.0, 0.1, "open", "open"),
        (NAN, NAN, "open", "open"),
    ],
)
def test_the_whole_interval_has_to_be_on_the_claimed_side(low, high, above, below):
    found = Statistic("r", (low + high) / 2, 10, low, high)
    assert conclusion_of(found, "above", 0.0) == above
    assert conclusion_of(found, "below", 0.0) == below


@pytest.mark.parametrize(
    ("value", "width", "above", "below"),
    [
        (0.0, 0.2, "at most weak", "at most weak"),
        (0.2, 0.15, "reproduced", "not reproduced"),
        (-0.1, 0.15, "at most weak", "at most weak"),
        (0.2, 0.25, "open", "open"),
        (-0.2, 0.25, "open", "open"),
    ],
)
def test_a_correlation_on_neither_side_may_be_at_most_weak(value, width, above, below):
    def tails(than):
        return tuple(norm.cdf(sign * (value - than) / width * norm.ppf(0.975)) for sign in (-1, 1))

    found = Statistic("r", value, 10, value - width, value + width, tails=tails, correlation=True)
    assert conclusion_of(found, "above", 0.0) == above
    assert conclusion_of(found, "below", 0.0) == below
    weak = {"at most weak": "open"}
    assert conclusion_of(replace(found, correlation=False), "above", 0.0) == weak.get(above, above)
    assert conclusion_of(found, "above", -0.001) != "at most weak"  # it is held against another number
    outcome, half = (Prediction("c", "", "", lambda _, r=r: r).weigh({}) for r in (found, Statistic("r", 0.29, 5)))
    if above == "at most weak":
        assert outcome.p == pytest.approx(2 * norm.cdf((abs(value) - WEAK) / width * norm.ppf(0.975)))
        assert replicated(outcome, None, (half, half)) == "at most weak"
        for strong in (0.31, -0.31):
            other = replace(half, statistic=Statistic("r", strong, 5))
            assert replicated(outcome, None, (half, other)) == "open"
        assert outcome.as_json()["p_against"] == WEAK
        assert outcome.marked == "≈ at most weak"
        cases = replace(outcome, statistic=replace(found, parts={"a": found, "b": found}))
        assert cases.marked == "≈ at most weak: in one of 2 cases"
        ranks = replace(outcome, statistic=replace(found, low=0.01, of_ranks=0.0))
        assert ranks.marked == "≈ at most weak: ranks do not agree"


@pytest.mark.parametrize(
    ("values", "conclusion"),
    [
        ((1.0, 2.0), "reproduced"),
        ((-1.0, -2.0), "not reproduced"),
        ((1.0, -1.0), "depends on the reading"),
        ((-1.0, 1.0, 0.0), "depends on the reading"),
        ((1.0, 0.0), "open"),
        ((-1.0, 0.0), "open"),
    ],
)
def test_a_claim_with_several_readings_has_one_outcome(values, conclusion):
    def of(scale):
        parts = {f"reading {n}": Statistic("r", v * scale, 9, v - 0.5, v + 0.5) for n, v in enumerate(values)}
        return Prediction("c", "", "", lambda _: in_readings(parts, "r")).weigh({})

    found = of(1.0)
    assert found.conclusion == conclusion
    decided = conclusion != "open"
    names = [f"reading {n}" for n, value in enumerate(values) if value == 0]
    assert found.open_because == ("" if decided else f"in {', '.join(names)}")
    assert replicated(found, None, (of(0.1), of(0.2))) == conclusion
    assert replicated(found, None, (of(0.1), of(-0.1))) == (conclusion if not decided else "open")


def test_correlations_are_known_as_such():
    assert correlated(studied("one"), "MLS", "gap")(RESULTS).correlation
    assert not correlated(studied("one"), "MLS", "gap", "kendall")(RESULTS).correlation  # a tau of 0.3 is an r of 0.45
    assert mean_of(reached("one"), "mls", "lr")(RESULTS).correlation  # with ranks beside them they are correlations
    assert not mean_of(reached("one"), "mls")(RESULTS).correlation
    parts = {"a": Statistic("r", 0.5, 9, correlation=True), "b": Statistic("z", 0.5, 9)}
    assert not in_cases(parts, "all", "").correlation
    assert in_cases({**parts, "b": parts["a"]}, "all", "").correlation
    assert not in_cases({**parts, "b": parts["a"]}, "some", "").correlation


def test_an_outcome_states_everything():
    parts = {"a": Statistic("r", 0.6, 9, 0.55, 0.7)}
    found = Statistic("r", 0.6, 9, 0.55, 0.7, note="n", units=3, unit="seed", parts=parts)
    prediction = Prediction(
        "c", "It rises.", "paper Fig. 1", lambda _: found, than=0.5, kind="claim", quote="rises", headline=True
    )
    outcome = prediction.weigh({})
    assert outcome.conclusion == "reproduced"
    assert outcome.as_json() == {
        "claim": "c", "says": "It rises.", "kind": "claim", "quote": "rises", "reason": "", "headline": True,
        "units": 3, "unit": "seed", "source": "paper Fig. 1", "outcome": "reproduced", "statistic": "r",
        "value": 0.6, "low": 0.55, "high": 0.7, "n": 9, "predicted": "above 0.5",
        "p": None, "p_against": 0.5, "of_ranks": None, "leave_one_out": [None, None], "why": "", "method": "",
        "note": "n",
        "cases": {"a": "0.60 [0.55, 0.70]"},
    }  # fmt: skip


def test_relations_are_over_the_networks_that_reached_the_end():
    found = correlated(studied("one"), "MLS", "gap", "kendall")(RESULTS)
    assert found.n == 5
    assert found.value == correlate([5, 4, 4, 3, 1], [5, 4.5, 3, 3.2, 1], "kendall", resampled=0, permuted=0).value


def test_a_theorem_is_decided_by_its_value_alone():
    def outcome(value):
        found = Statistic("largest change", value, 2, tails=lambda _: (0.9, 0.1))
        return Prediction("c", "", "", lambda _: found, "below", 1e-6, kind="theorem").weigh({}).conclusion

    assert [outcome(value) for value in (1e-9, 1e-3, NAN)] == ["reproduced", "not reproduced", "open"]


def test_a_trend_is_along_the_setting():
    trend = along(reached("s"), "lr", "mls", [UNIT])
    networks = pd.DataFrame(
        {"seed": np.repeat(range(6), 3), "lr": [1, 2, 3] * 6, "mls": np.repeat(np.arange(6) * 10, 3) + [2.0, 1, 0] * 6}
    )
    of_seeds = trend({"s": fake_result(networks)})
    assert (of_seeds.value, of_seeds.n, of_seeds.units, of_seeds.unit) == (-1.0, 18, 6, "seed")
    assert of_seeds.tails(0.0)[1] == 0.5**6  # every seed falls
    assert not of_seeds.correlation
    mixed = networks.assign(mls=[0.0, 2.0, 1.0, 1.0, 2.0, 0.0, *networks["mls"][6:]])  # tau 1/3, -1/3, -1, ...
    wide = trend({"s": fake_result(mixed)})
    assert wide.low == -1  # Student's interval would reach beyond what a tau can be
    assert wide.high < 1


def test_curves_have_their_means_and_deviations():
    rows = pd.DataFrame({"panel": "p", "x": [1, 1, 2, 2], "line": "l", "y": [1.0, 3.0, 2.0, 2.0]})
    plot = banded(rows, "name", "title", "caption", "step")
    assert isinstance(plot, Plot)
    assert plot.data[["panel", "x", "line"]].to_dict("list") == {"panel": ["p", "p"], "x": [1, 2], "line": ["l", "l"]}
    assert plot.data["y"].tolist() == [2.0, 2.0]
    assert plot.data["low"].tolist() == pytest.approx([2 - 2**0.5, 2.0])
    assert plot.data["high"].tolist() == pytest.approx([2 + 2**0.5, 2.0])


def test_the_old_names_of_fields_still_work_with_a_warning():
    x3 = EXPERIMENTS["X3"]
    with pytest.warns(DeprecationWarning, match="predictions"):
        assert x3.claims is x3.predictions
    table = pd.DataFrame({"p": [1.0]})
    names = {field.name: None for field in fields(StudyResult)} | {"gap_correlations": table}
    with pytest.warns(DeprecationWarning, match="gap_correlations"):
        assert StudyResult(**names).against is table


def test_an_outcome_says_which_studies_it_reads():
    other = Prediction("c", "", "", lambda results: Statistic("m", 1.0, len(results["two"].networks)))
    assert other.weigh({"one": Result, "two": Result}).studies == {"two"}
    assert other.weigh({"one": Result}).conclusion == "open"
