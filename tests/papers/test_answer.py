"""The answer of a reproduction, from outcomes that are known."""

from types import SimpleNamespace

import pytest

from flatlens.papers.experiment import Experiment, Prediction
from flatlens.papers.reproduction import answer_of_claims
from flatlens.statistics import Statistic


def outcome(p, says="It holds.", units=10, unit="seed", **fields):
    """The outcome of a statistic whose one-sided p of being above 0 is `p`; None: it has no interval."""
    tails = None if p is None else lambda _: (p, 1 - p)
    found = Statistic("s", 1.0, 20, tails=tails, units=units, unit=unit)
    return Prediction("c", says, "", lambda _: found, **{"kind": "claim", **fields}).weigh({})


YES, NO, OPEN = (outcome(p, says) for p, says in ((0.001, "Yes."), (0.999, "No."), (0.3, "Open.")))


def reproduced(*outcomes, again=(), halves=(), differs=(), unfinished=0, scale="desk", name="X0"):
    made_up = Experiment(name, "Made up", "sharpening Fig. 1", dict, (), list, {scale: tuple(differs)})
    return SimpleNamespace(experiment=made_up, scale=scale, outcomes=outcomes, again=again, halves=halves,
                           unfinished=unfinished)  # fmt: skip


def told(*outcomes, **fields):
    found = answer_of_claims([reproduced(*outcomes, **fields)])
    assert len(found) <= 3
    return found


def test_claims_are_counted_by_outcome_and_those_not_reproduced_named():
    what = told(YES, YES, NO, OPEN)[0]
    assert what == "X0 at desk scale: 2 of 4 claims reproduced, 1 not reproduced, 1 open; not reproduced: No."
    assert told(YES)[0] == "X0 at desk scale: 1 of 1 claim reproduced, 0 not reproduced, 0 open."


def test_main_claims_alone_are_counted_where_there_are_some_and_theorems_are_not():
    main = outcome(0.001, headline=True)
    assert told(main, NO, OPEN)[0] == "X0 at desk scale: 1 of 1 main claim reproduced, 0 not reproduced, 0 open."
    theorem = outcome(0.001, kind="theorem")
    assert told(theorem, OPEN)[0] == "X0 at desk scale: 0 of 1 claim reproduced, 0 not reproduced, 1 open."
    assert told(theorem)[0].startswith("X0 at desk scale: 1 of 1 claim reproduced")


def test_units_and_the_replication_say_how_certain_it_is():
    assert told(YES, OPEN)[1] == (
        "How certain: 95% intervals over 10 independent seeds; no replication (--again runs one)."
    )
    fewer = told(YES, outcome(None, units=5))[1]
    assert fewer.startswith("How certain: 95% intervals over 5 to 10 independent seeds, and fewer than 6 give none;")
    what, certain, *_ = told(YES, NO, OPEN, again=(YES, OPEN, OPEN))
    assert what == "X0 at desk scale: 1 of 3 claims reproduced, 0 not reproduced, 2 open."
    assert certain.endswith("; a replication with other seeds agrees with 1 of 2 decided claims.")
    assert told(YES, halves=((YES, YES),))[1].endswith("; a split-half check agrees with 1 of 1 decided claim.")
    assert told(OPEN, again=(OPEN,))[1].endswith("; no claim is decided.")


@pytest.mark.parametrize(("scale", "following"), [("smoke", "laptop"), ("laptop", "desk"), ("desk", ""), ("paper", "")])
def test_the_last_sentence_is_what_differs_and_what_next(scale, following):
    sentences = told(YES, scale=scale, differs=["Fewer images.", "Fewer seeds."])
    next_step = f"; next: --scale {following}" if following else ""
    assert sentences[2] == f"Differs from the paper: Fewer images (1 more){next_step}."
    assert told(YES, scale=scale)[2:] == ([f"Next: --scale {following}."] if following else [])
    unfinished = told(YES, scale=scale, unfinished=3)[2]
    assert unfinished == "3 networks not finished: the same command continues."


def test_several_experiments_have_one_answer():
    found = [reproduced(YES, differs=["A."]), reproduced(NO, OPEN, differs=["B.", "C."], name="X1")]
    what, certain, last = answer_of_claims(found)
    assert (
        what == "2 experiments at desk scale: 1 of 3 claims reproduced, 1 not reproduced, 1 open; not reproduced: No."
    )
    assert certain.endswith("no replication (--again runs one).")
    assert last == "3 differences from the papers in all, listed with each experiment."
