import copy

import pytest
import torch
from torch import nn

from flatlens.data import digits
from flatlens.errors import BadData, BadInput, BadModel, UnknownName
from flatlens.models import MLP
from flatlens.training import SGD, Adam, RMSProp, Steps, Training, Until, train
from flatlens.training.evaluation import TrainingData

ONE_HOT = torch.eye(10)


@pytest.fixture(scope="module")
def split():
    return digits(train=50)


def settings(lr=0.05, batch_size=8, until=None, max_steps=2000, loss="half_squared_error", **others):
    until = Until(loss_below=2e-3, accuracy=1.0) if until is None else until
    return Training(SGD(lr), batch_size=batch_size, until=until, max_steps=max_steps, loss=loss, **others)


def trained(split, **options):
    model = MLP(64, (32,), 10).build()
    return model, train(model, split.train, settings(**options), test=split.test)


def test_it_stops_at_the_first_check_point_that_meets_every_condition(split):
    model, result = trained(split, until=Until(loss_below=0.05, accuracy=1.0), check_every=7)
    risk = 0.5 * (model(split.x) - ONE_HOT[split.y]).square().sum(1).mean()
    assert result.outcome == "converged"
    assert result.reached
    assert result.steps % 7 == 0
    assert result.epochs == result.steps / 7  # 50 samples in batches of 8
    assert result.loss == pytest.approx(risk.item(), rel=1e-5)
    assert result.loss < 0.05
    assert result.accuracy == 1.0
    before = result.curves["loss"][:-1]
    assert (before[-1] >= 0.05) or (result.curves["accuracy"][-2] < 1)
    assert all(p.grad is None for p in model.parameters())


OPTIMISERS = {
    "momentum": (SGD(0.03, momentum=0.9, weight_decay=1e-3), torch.optim.SGD, {"momentum": 0.9, "weight_decay": 1e-3}),
    "nesterov": (SGD(0.03, momentum=0.5, nesterov=True), torch.optim.SGD, {"momentum": 0.5, "nesterov": True}),
    "adam": (Adam(0.03, beta1=0.8, weight_decay=1e-3), torch.optim.Adam, {"betas": (0.8, 0.999), "weight_decay": 1e-3}),
    "adamw": (Adam(0.03, weight_decay=0.1, decoupled=True), torch.optim.AdamW, {"weight_decay": 0.1}),
    "rmsprop": (RMSProp(0.03, alpha=0.9, momentum=0.5), torch.optim.RMSprop, {"alpha": 0.9, "momentum": 0.5}),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_it_agrees_with_a_loop_written_out(split, name):
    """Order of batches, mean over a smaller last one, optimiser, schedule and warm-up."""
    optimiser, kind, options = OPTIMISERS[name]
    model = MLP(64, (32,), 10).build()
    twin = copy.deepcopy(model)
    schedule = Steps(at=(1,), factor_each=0.5)
    how = Training(
        optimiser, batch_size=16, loss="mse", schedule=schedule, warmup=2, max_steps=9, seed=5, check_every=4
    )
    train(model, split.train, how, test=split.test)
    generator = torch.Generator().manual_seed(5)
    by_hand = kind(twin.parameters(), lr=0.03, **options)
    steps = 0
    for epoch in range(3):
        for batch in torch.randperm(50, generator=generator).split(16):  # 16, 16, 16, 2
            by_hand.param_groups[0]["lr"] = 0.03 * (0.5 if steps == 0 else 1) * (0.5 if epoch >= 1 else 1)
            by_hand.zero_grad()
            nn.functional.mse_loss(twin(split.x[batch]), ONE_HOT[split.y[batch]]).backward()
            by_hand.step()
            steps += 1
            if steps == 9:
                break
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_it_says_how_it_ended(split):
    _, result = trained(split, max_steps=25, until=Until(loss_below=1e-9))
    assert (result.outcome, result.steps, result.reached) == ("out of steps", 25, False)
    assert result.curves["step"][-1] == 25
    _, result = trained(split, max_steps=25, until=Until())
    assert (result.outcome, result.reached) == ("finished", True)
    _, result = trained(split, max_epochs=2, max_steps=1000, until=Until())
    assert (result.steps, result.epochs) == (14, 2.0)


def test_it_stops_at_once_when_it_diverges(split):
    _, result = trained(split, lr=1e3)
    assert result.outcome == "diverged"
    assert not result.reached
    assert result.steps <= 50


class Standardised(nn.Sequential):
    """A network whose outputs depend on the batch in eval mode, too."""

    def __init__(self):
        norm = nn.BatchNorm1d(16, track_running_stats=False)
        super().__init__(nn.Unflatten(1, (16, 4)), norm, nn.Flatten(), nn.Linear(64, 10))


@pytest.mark.parametrize("until", [Until(), Until(loss_below=0.15), Until(loss_below=0.3), Until(loss_below=0.0)])
@pytest.mark.parametrize("build", [MLP(64, (32,), 10).build, Standardised])
def test_looks_that_could_not_end_it_are_left_out_and_nothing_changes(split, monkeypatch, until, build):
    looked, look = [], TrainingData.look
    monkeypatch.setattr(TrainingData, "look", lambda data: looked.append(data) or look(data))

    def run():
        looked.clear()
        torch.manual_seed(0)
        model = build()
        settings = Training(SGD(0.05), batch_size=8, until=until, max_steps=1500, check_every=1)
        return model, train(model, split.train, settings, test=split.test), len(looked)

    model, result, few = run()
    monkeypatch.setattr(TrainingData, "surely_above", lambda *_: False)
    twin, whole, many = run()
    assert (result.outcome, result.steps, result.loss) == (whole.outcome, whole.steps, whole.loss)
    assert all(torch.equal(a, b) for a, b in zip(result.curves.values(), whole.curves.values(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert few == many if build is Standardised else few < many


def test_it_stops_where_the_slope_is_small(split):
    model, result = trained(split, until=Until(gradient_norm=0.2), batch_size=None, lr=0.1)
    risk = 0.5 * (model(split.x) - ONE_HOT[split.y]).square().sum(1).mean()
    slopes = torch.autograd.grad(risk, list(model.parameters()))
    norm = float(torch.cat([g.flatten() for g in slopes]).norm())
    assert result.outcome == "converged"
    assert 0 < result.steps < 2000
    assert norm <= 0.2


def test_the_loss_of_an_epoch_is_the_mean_over_its_batches_as_they_were_trained_on(split):
    until = Until(loss_below=0.2, loss_over="epoch")
    _, result = trained(split, until=until, check_every=1000)
    assert result.outcome == "converged"
    assert result.epochs == int(result.epochs)
    twin = MLP(64, (32,), 10).build()
    optimiser = torch.optim.SGD(twin.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(0)
    means = []
    for _ in range(int(result.epochs)):
        total = 0.0
        for batch in torch.randperm(50, generator=generator).split(8):
            optimiser.zero_grad()
            losses = 0.5 * (twin(split.x[batch]) - ONE_HOT[split.y[batch]]).square().sum(1)
            losses.mean().backward()
            optimiser.step()
            total += float(losses.detach().sum())
        means.append(total / 50)
    assert means[-1] < 0.2 <= min(means[:-1])
    for share, epochs in ((1.001, 1), (0.999, 2)):
        _, result = trained(split, until=Until(loss_below=share * means[0], loss_over="epoch"), check_every=1000)
        assert result.epochs == epochs


def test_a_window_of_losses_is_averaged(split):
    _, whole = trained(split, until=Until(loss_below=0.0), max_steps=60, check_every=5, batch_size=None)
    losses = [float(x) for x in whole.curves["loss"]]  # a row at every check point so early
    assert whole.curves["step"].tolist() == list(range(0, 61, 5))
    bound = sum(losses[4:7]) / 3 + 1e-6
    _, result = trained(split, until=Until(loss_below=bound, loss_window=3), check_every=5, batch_size=None)
    assert (result.outcome, result.steps) == ("converged", 30)


def test_curves_are_sparse_and_complete(split):
    _, result = trained(split, until=Until(loss_below=1e-12))
    steps = result.curves["step"].tolist()
    assert steps[0] == 0
    assert steps[-1] == 2000
    assert steps == sorted(set(steps))
    assert 40 < len(steps) < 120
    names = ("loss", "accuracy", "test_loss", "test_accuracy")
    assert {name: (c.dtype, len(c)) for name, c in result.curves.items()} == {
        "step": (torch.int64, len(steps)),
        **{name: (torch.float64, len(steps)) for name in names},
    }


def test_same_seed_same_digits_other_seed_other_digits(split):
    (a, _), (b, _), (c, _) = (trained(split, seed=seed, max_steps=40) for seed in (1, 1, 2))
    assert torch.equal(a.fc1.weight, b.fc1.weight)
    assert not torch.equal(a.fc1.weight, c.fc1.weight)


def test_the_global_random_state_and_the_modes_are_left_alone(split):
    model = nn.Sequential(nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 10))
    model[1].eval()
    before = torch.get_rng_state()
    train(model, split.train, settings(max_steps=3))
    assert torch.equal(before, torch.get_rng_state())
    assert model.training
    assert not model[1].training


def test_it_trains_where_gradients_are_off(split):
    models = [MLP(64, (8,), 10).build() for _ in range(3)]
    train(models[0], split.train, settings(max_steps=3))
    with torch.no_grad():
        train(models[1], split.train, settings(max_steps=3))
    with torch.inference_mode():
        train(models[2], split.train, settings(max_steps=3))
    assert torch.equal(models[0].fc1.weight, models[1].fc1.weight)
    assert torch.equal(models[0].fc1.weight, models[2].fc1.weight)


def test_dropout_drops_while_training_and_not_in_a_look(split):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 10))
    twin = copy.deepcopy(model)
    result = train(model, split.train, settings(max_steps=1, batch_size=None))
    twin.eval()
    plain = 0.5 * (twin(split.x) - ONE_HOT[split.y]).square().sum(1).mean()
    assert result.curves["loss"][0].item() == pytest.approx(plain.item(), rel=1e-6)
    slopes = torch.autograd.grad(plain, twin[2].weight)[0]
    moved = (twin[2].weight - model[2].weight) / 0.05
    assert (moved - slopes).abs().max() > 1e-3  # the step was taken under another mask


def test_cross_entropy_and_smoothed_labels(split):
    model, result = trained(split, loss="cross_entropy", until=Until(loss_below=0.05))
    assert result.loss == pytest.approx(nn.functional.cross_entropy(model(split.x), split.y).item(), rel=1e-5)
    assert result.reached
    for loss in ("cross_entropy", "half_squared_error", "mse"):
        how = settings(loss=loss, label_smoothing=0.3, max_steps=30)
        model = MLP(64, (32,), 10).build()
        result = train(model, split.train, how)
        measured = how.objective.measured().values(model(split.x), split.y).mean()
        smooth = 0.7 * ONE_HOT[split.y] + 0.03
        f = model(split.x)
        by_hand = {
            "cross_entropy": -(smooth * f.log_softmax(1)).sum(1),
            "half_squared_error": 0.5 * (f - smooth).square().sum(1),
            "mse": (f - smooth).square().mean(1),
        }[loss].mean()
        assert result.loss == pytest.approx(by_hand.item(), rel=1e-5)
        assert measured.item() == pytest.approx(by_hand.item(), rel=1e-5)


def test_regression_has_no_accuracy():
    x = torch.linspace(-1, 1, 8)[:, None]
    model = MLP(1, (16,), 1, activation="tanh").build()
    result = train(model, (x, x.sin()), settings(batch_size=None, until=Until(loss_below=1e-3), lr=0.2, max_steps=5000))
    assert result.outcome == "converged"
    assert result.accuracy != result.accuracy
    assert result.curves["test_loss"].isnan().all()


def test_progress_counts_steps(split):
    seen = []
    model = MLP(64, (8,), 10).build()
    train(model, split.train, settings(max_steps=30), progress=lambda *what: seen.append(what))
    assert seen == [("training steps", done, 30) for done in (10, 20, 30)]


def test_a_watcher_sees_every_step_with_the_optimiser(split):
    class Watcher:
        def __init__(self):
            self.seen = []

        def step(self, step=None, *, optimiser=None):
            self.seen.append((step, optimiser.param_groups[0]["lr"]))

    watcher = Watcher()
    model = MLP(64, (8,), 10).build()
    train(model, split.train, settings(max_steps=4, schedule=Steps(at=(2,), unit="steps")), watch=watcher)
    assert [step for step, _ in watcher.seen] == [0, 1, 2, 3, 4]
    assert [lr for _, lr in watcher.seen] == pytest.approx([0.05, 0.05, 0.005, 0.005, 0.005])  # of the step to come


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"loss": "half_squared_eror"}, UnknownName, "did you mean half_squared_error"),
        ({"lr": 0.0}, BadInput, r"SGD\(lr=0.0\)"),
        ({"lr": float("nan")}, BadInput, "SGD"),
        ({"batch_size": 0}, BadInput, "batch_size=0"),
        ({"ghost_batch": 0}, BadInput, "ghost_batch=0"),
        ({"label_smoothing": 1.5}, BadInput, "label_smoothing=1.5"),
        ({"max_steps": None}, BadInput, "max_steps or max_epochs"),
    ],
)
def test_impossible_settings_are_refused(wrong, error, said):
    with pytest.raises(error, match=said):
        settings(**wrong)


def test_impossible_optimisers_are_refused():
    for wrong in ({"momentum": 1.0}, {"weight_decay": -1.0}, {"nesterov": True}):
        with pytest.raises(BadInput, match="SGD"):
            SGD(0.1, **wrong)
    with pytest.raises(BadInput, match="beta2"):
        Adam(beta2=1.0)
    with pytest.raises(BadInput, match="alpha"):
        RMSProp(alpha=-0.1)


def test_data_that_does_not_fit_is_refused_in_a_line(split):
    model = MLP(64, (8,), 10).build()
    for data, error, said in [
        ((split.x, split.y[:-1]), BadData, "50 inputs and 49 targets"),
        ((split.x[:0], split.y[:0]), BadData, "0 inputs"),
        ((split.x, split.y + 1), BadData, "expected labels from 0 to 9.*got 1 to 10"),
        ((split.x, torch.zeros(50, 3)), BadData, "do not fit 10 outputs per sample"),
    ]:
        with pytest.raises(error, match=said) as caught:
            train(model, data, settings(until=Until()))
        assert "\n" not in str(caught.value)
    with pytest.raises(BadModel, match="nothing to train"):
        train(nn.Flatten(), split.train, settings())
    with pytest.raises(BadModel, match="outputs of shape"):
        train(nn.Sequential(nn.Linear(64, 10), nn.Flatten(0)), split.train, settings())
    with pytest.raises(BadModel, match="forward failed on the first sample"):
        train(nn.Linear(63, 10), split.train, settings())
    with pytest.raises(BadData, match="2 of 50 samples contain NaN or inf"):
        train(model, (torch.where(torch.arange(50)[:, None] < 2, torch.nan, split.x), split.y), settings())
    with pytest.raises(BadInput, match="which BatchNorm cannot normalise"):
        train(nn.Sequential(nn.Linear(64, 10), nn.BatchNorm1d(10)), split.train, settings(batch_size=7))
    with pytest.raises(BadData, match="needs integer class labels"):
        train(model, (split.x, ONE_HOT[split.y]), settings(label_smoothing=0.1, until=Until()))


def test_no_step_at_all_leaves_the_network_as_it_is(split):
    """For networks that are measured as they come."""
    model = MLP(64, (32,), 10).build()
    before = copy.deepcopy(model.state_dict())
    result = train(model, split.train, settings(until=Until(), max_steps=0), test=split.test)
    assert (result.outcome, result.steps, result.curves["step"].tolist()) == ("finished", 0, [0])
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
