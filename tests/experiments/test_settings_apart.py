from flatlens.experiments import Study
from flatlens.experiments.settings import settings_apart
from flatlens.training.optimisers import SAM

STUDY = Study.digits("smoke")


def test_of_a_study_and_its_like_nothing_is_told():
    assert settings_apart(STUDY, STUDY) == ""


def test_axes_and_settings_are_told_by_name_the_first_two_of_them():
    other = STUDY.over("lr", 0.3).setting("momentum", 0.5).setting("max_steps", 7)
    assert settings_apart(STUDY, other) == (
        "base.training.optimiser.momentum: 0.0 there, 0.5 requested; base.training.max_steps: 10000 there, 7 requested"
    )
    assert settings_apart(STUDY, STUDY.over("lr", 0.3)) == "lr: [0.05, 0.1] there, [0.3] requested"


def test_more_values_and_axes_are_no_difference_and_fewer_are():
    more = STUDY.over("seed", 0, 1, 2).over("momentum", 0.0, 0.9)
    assert settings_apart(STUDY, more) == ""
    assert settings_apart(more, STUDY) == (
        "seed: [0, 1, 2] there, [0, 1] requested; momentum: [0.0, 0.9] there, [0.0] requested"
    )
    without = STUDY.over("momentum", 0.5, 0.9)
    ascents = STUDY.over("ascent", None, SAM(0.1))
    assert settings_apart(ascents, STUDY) == "ascent: [none, SAM(rho=0.1)] there, [none] requested"
    assert settings_apart(STUDY, without) == "momentum: [0.0] there, [0.5, 0.9] requested"


def test_of_long_settings_the_first_part_that_differs_is_told():
    long = [("a" * 50, seed) for seed in (0, 1)]
    study = STUDY.over("init+data.seed", *long)
    fewer, other = STUDY.over("init+data.seed", long[0]), STUDY.over("init+data.seed", long[0], ("a" * 50, 2))
    assert settings_apart(study, fewer) == "init+data.seed: 2 values there, 1 requested"
    assert settings_apart(study, other) == "init+data.seed.1.1: 1 there, 2 requested"


def test_equal_numbers_are_spelled_alike():
    asked = STUDY.over("momentum", 0, 0.9).setting("max_steps", 10_000).over("lr", 0.05, 0.1, 1)
    assert {one.key for one in STUDY.networks()} - {one.key for one in asked.networks()}
    assert asked.spelled_as(STUDY).lost(STUDY) == []
    assert [axis.values for axis in asked.spelled_as(STUDY).axes] == [(0.05, 0.1, 1), (4, 16), (0, 1), (0.0, 0.9)]
    assert STUDY.setting("momentum", 0).spelled_as(STUDY) == STUDY
    assert len(STUDY.setting("momentum", 0.5).spelled_as(STUDY).lost(STUDY)) == 8
    assert len(STUDY.over("seed", 0).lost(STUDY)) == 4
