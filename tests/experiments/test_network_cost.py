import itertools
from dataclasses import replace

import pytest

from flatlens.experiments import Study
from flatlens.experiments import network as module
from flatlens.experiments.network import Cost, cost_of
from flatlens.experiments.settings import Axis, Followed
from flatlens.training import Ridge, Training, Until

STUDY = Study.digits("smoke").setting("data.train", 40).setting("widths", (8,)).over("lr", 0.1).over("batch_size", 8)


def test_it_grows_with_networks_steps_and_moments(monkeypatch):
    """A machine whose every step takes 0.5 s after 2 s at the start, every measurement 3 s, every moment 1 s."""
    monkeypatch.setattr(module, "_trial", lambda settings, steps: (2.0 + 0.5 * steps, 3.0, 40))
    monkeypatch.setattr(module, "_moment", lambda settings: 1.0)
    study = STUDY.setting("max_steps", 100).over("seed", 0, 1, 2)
    assert cost_of([study]) == Cost(3, 3 * 100 * 0.5, 3 * 3.0)
    keys = [one.key for one in study.networks()]
    assert cost_of([study], done=keys[:1]) == Cost(2, 2 * 100 * 0.5, 2 * 3.0)
    assert cost_of([study], done=keys) == Cost(0, 0.0, 0.0)
    followed = replace(study, base=replace(study.base, followed=Followed(("loss",), every=10)))
    assert cost_of([followed]).measuring == 3 * (3.0 + 11)
    listed = replace(study, base=replace(study.base, followed=Followed(("loss",), every=(0, 5))))
    assert cost_of([study, listed]) == Cost(6, 300.0, 18.0 + 3 * 2)


def test_a_look_at_all_data_that_takes_seconds_does_not_hide_what_a_step_takes(monkeypatch):
    """Looks take 3 s, more or less, a step 5 ms: of ten steps only the looks would be seen."""
    late = itertools.cycle((0.0, 0.0, 0.4, -0.3))
    monkeypatch.setattr(module, "_trial", lambda settings, steps: (3.0 + next(late) + 0.005 * steps, 0.0, 40))
    found = cost_of([STUDY.setting("max_steps", 16_000).over("seed", 0)])
    assert 40 < found.training < 160


def test_epochs_are_counted_in_steps(monkeypatch):
    monkeypatch.setattr(module, "_trial", lambda settings, steps: (1.0 * steps, 0.0, 40))
    training = replace(STUDY.base.training, max_steps=None, max_epochs=7, until=Until())
    study = Study("epochs", replace(STUDY.base, training=training), (Axis("batch_size", (8, 20)),))
    assert cost_of([study]).training == pytest.approx(7 * 5 + 7 * 2)


def test_ridge_regression_costs_one_solution_whatever_number_of_steps_the_settings_give(monkeypatch):
    """Each trial takes 2 s, whether of 3 or of 13 steps; a little less as it comes, as on a busy machine."""
    late = itertools.count()
    monkeypatch.setattr(module, "_trial", lambda settings, steps: (2.0 - 1e-6 * next(late), 3.0, 40))
    monkeypatch.setattr(module, "_moment", lambda settings: 1.0)
    for most in (1, 50):
        training = Training(Ridge(), loss="half_squared_error", max_steps=most)
        base = replace(STUDY.base, training=training, followed=Followed(("loss",), every=1))
        found = cost_of([Study("solved", base, (Axis("seed", (0, 1, 2)),))])
        assert found.training == pytest.approx(3 * 2.0, rel=1e-4)
        assert found.measuring == pytest.approx(3 * 3.0 + 3 * 2 * 1.0)


def test_a_real_trial_tells_the_order_of_magnitude():
    followed = Followed(("loss", "mls"), every=50, samples=20)
    study = replace(STUDY.setting("max_steps", 400).over("seed", 0), base=replace(STUDY.base, followed=followed))
    found = cost_of([study.setting("until", Until()).setting("max_steps", 400)])
    assert found.networks == 1
    assert 0.001 < found.training < 60
    assert 0.001 < found.measuring < 60
