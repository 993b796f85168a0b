import copy

import pytest
import torch
from torch import nn

from flatlens.data import digits
from flatlens.errors import BadInput, UnknownName
from flatlens.models import MLP
from flatlens.training import SGD, train

ONE_HOT = torch.eye(10)


@pytest.fixture(scope="module")
def split():
    return digits(train=50)


def trained(split, loss="half_squared_error", **settings):
    model = MLP(64, (32,), 10).build()
    result = train(model, split.train, loss, SGD(**({"lr": 0.05, "batch_size": 8} | settings)), test=split.test)
    return model, result


def test_it_stops_at_the_first_check_point_that_interpolates(split):
    model, result = trained(split, loss_below=0.05, check_every=7)
    risk = 0.5 * (model(split.x) - ONE_HOT[split.y]).square().sum(1).mean()
    assert result.outcome == "interpolated"
    assert result.reached
    assert result.steps % 7 == 0
    assert result.loss == pytest.approx(risk.item(), rel=1e-5)
    assert result.loss < 0.05
    assert result.accuracy == 1.0
    before = result.curves["loss"][:-1]
    assert (before[-1] >= 0.05) or (result.curves["accuracy"][-2] < 1)
    assert all(p.grad is None for p in model.parameters())


def test_it_agrees_with_a_loop_written_out(split):
    settings = SGD(lr=0.03, batch_size=16, momentum=0.9, weight_decay=1e-3, seed=5, max_steps=9)
    model = MLP(64, (32,), 10).build()
    twin = copy.deepcopy(model)
    train(model, split.train, "half_squared_error", settings, test=split.test)
    generator = torch.Generator().manual_seed(5)
    velocity = [torch.zeros_like(p) for p in twin.parameters()]
    steps = 0
    while steps < 9:
        for batch in torch.randperm(50, generator=generator).split(16):  # 16, 16, 16, 2
            risk = 0.5 * (twin(split.x[batch]) - ONE_HOT[split.y[batch]]).square().sum() / len(batch)
            for p, v, g in zip(
                twin.parameters(), velocity, torch.autograd.grad(risk, list(twin.parameters())), strict=True
            ):
                v.mul_(0.9).add_(g + 1e-3 * p.detach())
                p.data.sub_(0.03 * v)
            steps += 1
            if steps == 9:
                break
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_it_says_when_it_ran_out_of_steps(split):
    _, result = trained(split, max_steps=25, loss_below=1e-9)
    assert (result.outcome, result.steps, result.reached) == ("out of steps", 25, False)
    assert result.curves["step"][-1] == 25


def test_it_stops_at_once_when_it_diverges(split):
    _, result = trained(split, lr=1e3)
    assert result.outcome == "diverged"
    assert result.steps <= 50


def test_curves_are_sparse_and_complete(split):
    _, result = trained(split, max_steps=2000, loss_below=1e-12)
    steps = result.curves["step"].tolist()
    assert steps[0] == 0
    assert steps[-1] == 2000
    assert steps == sorted(set(steps))
    assert 40 < len(steps) < 120
    assert {name: (c.dtype, len(c)) for name, c in result.curves.items()} == {
        "step": (torch.int64, len(steps)),
        **{name: (torch.float64, len(steps)) for name in ("loss", "accuracy", "test_loss")},
    }


def test_same_seed_same_digits_other_seed_other_digits(split):
    (a, _), (b, _), (c, _) = (trained(split, seed=seed, max_steps=40) for seed in (1, 1, 2))
    assert torch.equal(a.fc1.weight, b.fc1.weight)
    assert not torch.equal(a.fc1.weight, c.fc1.weight)


def test_cross_entropy_is_the_other_loss(split):
    model, result = trained(split, loss="cross_entropy", loss_below=0.05)
    assert result.loss == pytest.approx(nn.functional.cross_entropy(model(split.x), split.y).item(), rel=1e-5)
    assert result.reached


def test_progress_counts_steps(split):
    seen = []
    model = MLP(64, (8,), 10).build()
    settings = SGD(lr=0.01, batch_size=10, max_steps=30)
    train(model, split.train, "half_squared_error", settings, test=split.test, progress=lambda *what: seen.append(what))
    assert seen == [("training steps", done, 30) for done in (10, 20, 30)]


def test_unknown_loss_and_impossible_settings_are_refused(split):
    with pytest.raises(UnknownName, match="did you mean half_squared_error"):
        trained(split, loss="half_squared_eror")
    for wrong in ({"lr": 0.0}, {"lr": float("nan")}, {"batch_size": 0}, {"momentum": 1.0}, {"weight_decay": -1.0}):
        with pytest.raises(BadInput, match="SGD"):
            trained(split, **wrong)
