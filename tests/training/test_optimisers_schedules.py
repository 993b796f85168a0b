import math

import pytest

from flatlens.errors import BadInput
from flatlens.training import SGD, Constant, Cosine, Steps, Training, Until


def test_steps_drop_where_they_say():
    drop = Steps(at=(50, 80), factor_each=0.1)
    assert [drop.factor(9, epoch) for epoch in (0, 49, 50, 79, 80, 200)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    by_step = Steps(at=(3,), unit="steps")
    assert [by_step.factor(step, 99) for step in (2, 3)] == pytest.approx([1, 0.1])


def test_cosine_falls_from_one_to_its_floor_and_stays():
    fall = Cosine(length=8, unit="steps", floor=0.2)
    values = [fall.factor(step, 0) for step in range(10)]
    assert values[0] == 1
    assert values[4] == pytest.approx(0.6)
    assert values[2] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert values[8:] == pytest.approx([0.2, 0.2])


def test_the_warm_up_multiplies_the_schedule():
    how = Training(SGD(1.0), warmup=4, schedule=Steps(at=(2,), unit="steps"), max_steps=9)
    assert [how.factor(step, 0) for step in range(6)] == pytest.approx([0.25, 0.5, 0.075, 0.1, 0.1, 0.1])
    assert Training(SGD(1.0), max_steps=9).factor(0, 0) == Constant().factor(5, 5) == 1


def test_the_budget_is_the_smaller_of_steps_and_epochs():
    assert Training(SGD(1.0), batch_size=8, max_epochs=3).steps(20) == 9
    assert Training(SGD(1.0), max_epochs=3).steps(20) == 3
    assert Training(SGD(1.0), batch_size=8, max_epochs=3, max_steps=5).steps(20) == 5


def test_conditions_hold_together_or_not_at_all():
    assert not Until().met([0.0], 1.0, 0.0)
    both = Until(loss_below=0.1, accuracy=0.9)
    assert both.met([0.05], 0.9, 1.0)
    assert not both.met([0.05], 0.89, 1.0)
    assert not both.met([0.1], 1.0, 1.0)
    window = Until(loss_below=0.1, loss_window=3)
    assert not window.met([0.0, 0.0], 1.0, 0.0)
    assert window.met([9.0, 0.2, 0.0, 0.0], 1.0, 0.0)
    assert not Until(gradient_norm=1e-3).met([0.0], 1.0, float("nan"))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Steps(at=(5, 3)),
        lambda: Steps(at=(0,)),
        lambda: Steps(at=(3,), unit="weeks"),
        lambda: Cosine(length=0),
        lambda: Until(loss_window=0),
        lambda: Until(accuracy=2.0),
        lambda: Until(loss_over="batch"),
    ],
)
def test_impossible_ones_are_refused(wrong):
    with pytest.raises(BadInput):
        wrong()
