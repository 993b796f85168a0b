"""A row is decided where two runs agree; rows decided by chance are counted, and p-values corrected over all rows."""

from functools import partial
from types import SimpleNamespace

import pytest
from scipy.stats import false_discovery_control
from scipy.stats import t as student

from flatlens.papers.experiment import Prediction
from flatlens.papers.summary import Row, by_chance, counted_by_kind, rows_of
from flatlens.statistics import Statistic, in_cases


def outcome(p, kind="claim", value=1.0, quote=""):
    """The outcome of a statistic whose one-sided p of being above 0 is `p`; None: it has no interval."""
    tails = None if p is None else lambda _: (p, 1 - p)
    return Prediction("c", "", "", lambda _: Statistic("s", value, 20, tails=tails), kind=kind, quote=quote).weigh({})


def test_a_row_is_decided_where_two_runs_agree():
    yes, no, undecided = outcome(0.001), outcome(0.999), outcome(0.2)
    decided = [Row(*pair).decided for pair in ((yes, yes), (no, no), (yes, no), (yes, undecided), (yes, None))]
    assert decided == ["reproduced", "not reproduced", "open", "open", "open"]
    assert Row(outcome(None, "theorem"), None).decided == "reproduced"
    assert Row(outcome(None, "theorem"), outcome(None, "theorem", -1.0)).decided == "open"
    assert Row(yes, None, (undecided, undecided)).decided == "reproduced"  # halves: the side of the value alone
    assert Row(yes, None, (undecided, outcome(0.2, value=-1.0))).decided == "open"
    assert Row(no, None, (no, no)).decided == "open"  # `no` has its value above 0
    assert Row(yes, undecided).p == pytest.approx(0.4)  # two-sided, of the weaker run
    assert Row(outcome(None), yes).p != Row(outcome(None), yes).p


def test_what_survives_is_decided_and_corrected_over_all_rows():
    p = [0.0001, 0.012, 0.024, 0.4]
    outcomes = tuple(outcome(each) for each in p)
    one = SimpleNamespace(outcomes=outcomes[:2], again=outcomes[:2], halves=())
    other = SimpleNamespace(outcomes=outcomes[2:], again=outcomes[2:], halves=())
    rows = [row for each in rows_of([one, other]) for row in each]
    corrected = false_discovery_control([2 * each for each in p])
    assert [row.significant for row in rows] == (corrected <= 0.05).tolist() == [True, True, False, False]
    assert [row.marked for row in rows[1:3]] == ["✓ reproduced *", "✓ reproduced"]
    alone = rows_of([SimpleNamespace(outcomes=outcomes[:1], again=(), halves=())])
    assert not alone[0][0].significant  # strong, but in one run


def test_a_row_says_why_it_is_open():
    def open_one(**fields):
        found = Statistic("r", 0.5, 20, 0.2, 0.7, tails=lambda _: (0.2, 0.8), **fields)
        return Prediction("c", "", "", lambda _: found, kind="claim").weigh({})

    ranks = open_one(of_ranks=0.1)
    cases, weakest = (open_one(parts={"a": Statistic("r", 0.5, 20), "b": Statistic("r", b, 20)}) for b in (0.1, 0.7))
    assert ranks.marked == Row(ranks, ranks).marked == "? open: ranks do not agree"
    assert cases.marked == "? open: not after Holm's correction"  # one of two cases is above 0
    assert weakest.marked == "? open: another case is open"  # the least of both is above 0
    assert Row(outcome(0.001), outcome(0.999)).marked == "? open: the runs differ"
    assert Row(outcome(0.001), None, (outcome(0.2), outcome(0.2, value=-1.0))).marked == "? open: the halves differ"
    assert outcome(0.2).marked == Row(outcome(0.2), None).marked == "? open"  # the interval says so
    assert ranks.tested_as == "r, above 0"


def test_the_summary_counts_kinds_apart_and_what_chance_does():
    yes, theorem = outcome(0.001), outcome(None, "theorem")
    claims = [Row(outcome(0.001, quote=quote), yes, significant=True) for quote in "abc"]
    rows = [*claims, Row(theorem, None), Row(outcome(0.3, "reading"), None)]
    counts = counted_by_kind(rows)
    assert list(counts) == ["claim", "reading"]
    assert counts["claim"]["reproduced"] == 3
    assert counts["reading"]["open"] == 1
    said = by_chance(rows)
    assert said.startswith("4 rows have a p-value")  # the theorem has none
    assert "at most 0.2 of them in one run, and 0.1 together with a replication" in said
    assert "3 are decided, and their replication agrees. 0 more are at most weak" in said
    assert "3 of all these are significant" in said


def test_a_sentence_counts_once_as_its_worst_row_or_as_one_that_depends_on_the_reading():
    def row(p, quote):
        return Row(outcome(p, quote=quote), outcome(p, quote=quote))

    rows = [row(0.001, "a"), row(0.999, "a"), row(0.001, "a"), row(0.001, "b"), row(0.2, "c"), row(0.001, "c")]
    counts = counted_by_kind([*rows, row(0.2, "d"), row(0.999, "d")])["claim"]
    assert {conclusion: count for conclusion, count in counts.items() if count} == {
        "depends on the reading": 1, "reproduced": 1, "open": 1, "not reproduced": 1,
    }  # fmt: skip


def test_without_a_p_value_nothing_is_said_of_chance():
    assert by_chance([Row(outcome(None), None)]) == by_chance([]) == "No row has a p-value: too few units."


def test_an_open_row_says_what_would_decide_it():
    def statistic(value, error, **fields):
        def grown(times, than):
            above = student.sf((value - than) / error * times**0.5, 19)
            return above, 1 - above

        reach = student.isf(0.025, 19) * error
        return Statistic("mean", value, 20, value - reach, value + reach, tails=partial(grown, 1.0), units=20,
                         grown=lambda times: partial(grown, times), **fields)  # fmt: skip

    def row(value, error, again=None, **fields):
        return of(statistic(value, error, **fields), again)

    def of(found, again=None):
        return Row(Prediction("c", "", "", lambda _: found, kind="claim").weigh({}), again)

    t = student.isf(0.025, 19)
    assert [row(0.1, 0.1).times, row(-0.1, 0.1).times] == pytest.approx([t**2, t**2], rel=1e-3)
    said = "some 4.4 times the units would decide it if all values stay"
    assert row(0.1, 0.1).would_decide(2.0) == f"{said}, 8.8 h on two cores"
    assert row(0.1, 0.1).would_decide(0.0) == said
    assert row(0.1, 0.1, correlation=True).times == pytest.approx((t / 2) ** 2, rel=1e-3)  # sooner at most weak
    assert row(0.29, 0.2, correlation=True).times == pytest.approx((t * 0.2 / 0.29) ** 2, rel=1e-3)  # sooner above 0
    cases = in_cases({"a": statistic(0.1, 0.1), "b": statistic(0.3, 0.6)}, "all", "mean")
    assert of(cases).times == pytest.approx((2 * t) ** 2, rel=1e-3)  # the shown case is not the one that needs most
    opposite = in_cases({"a": statistic(0.1, 0.1), "ranks": statistic(0.2, 0.1), "b": statistic(-0.1, 9.0)}, "all", "m")
    assert of(opposite).would_decide(2.0) == "1000 times the units would not decide it if all values stay"
    weak = Statistic("r", 0.05, 20, -0.1, 0.2, tails=lambda than: (0.2, 0.8) if than == 0 else (0.01, 0.01),
                     correlation=True)  # fmt: skip
    found, half = (Prediction("c", "", "", lambda _, r=r: r).weigh({}) for r in (weak, Statistic("r", 0.4, 9)))
    assert found.conclusion == "at most weak"
    assert Row(found, None, (half, half)).times != Row(found, None, (half, half)).times  # the halves differ
    assert "1 more are at most weak" in by_chance([Row(found, found)])
    for known in (Row(outcome(0.001), outcome(0.001)), row(0.1, 0.1, outcome(0.2)), Row(outcome(None), None)):
        assert known.would_decide(2.0) == ""
