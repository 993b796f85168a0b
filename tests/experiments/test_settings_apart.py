from flatlens.experiments import Study
from flatlens.experiments.settings import settings_apart

STUDY = Study.digits("smoke")
LONG = [{"lr": 0.1, "model": {"type": "MLP", "widths": [64, 64, 64]}, "seed": seed} for seed in (0, 1)]


def test_of_a_study_and_its_like_nothing_is_told():
    assert settings_apart(STUDY.as_json(), STUDY.as_json()) == ""


def test_axes_and_settings_are_told_by_name_the_first_two_of_them():
    other = STUDY.over("lr", 0.3).setting("momentum", 0.5).setting("max_steps", 7)
    assert settings_apart(STUDY.as_json(), other.as_json()) == (
        "base.training.optimiser.momentum: 0.0 there, 0.5 asked for; base.training.max_steps: 10000 there, 7 asked for"
    )
    axis = STUDY.over("lr", 0.3)
    assert settings_apart(STUDY.as_json(), axis.as_json()) == "lr: [0.05, 0.1] there, [0.3] asked for"


def test_of_long_settings_the_first_part_that_differs_is_told():
    assert settings_apart({"networks": LONG}, {"networks": LONG[:1]}) == "networks: 2 values there, 1 asked for"
    other = [LONG[0], {**LONG[1], "seed": 2}]
    assert settings_apart({"networks": LONG}, {"networks": other}) == "networks.1.seed: 1 there, 2 asked for"
