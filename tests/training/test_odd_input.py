"""What users get wrong, or have a right to: said in one line, or done right."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens.errors import BadData, BadFolder, BadInput, BadModel
from flatlens.models import MLP
from flatlens.training import (
    SAM,
    SGD,
    InputJacobian,
    Mixup,
    ParameterJacobian,
    RelativeFlatness,
    Steps,
    Training,
    Until,
    train,
)

X = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(1))


def net():
    return MLP(8, (16,), 3).build()


def settings(**how):
    return Training(**({"optimiser": SGD(0.1), "max_steps": 20, "batch_size": 16} | how))


def test_a_checkpoint_of_another_network_test_set_or_frozen_part_is_refused(tmp_path):
    save = tmp_path / "run.pt"
    train(net(), (X, Y), settings(), save=save)
    other = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    other.load_state_dict(dict(zip(other.state_dict(), net().state_dict().values(), strict=True)))
    frozen = net()
    frozen.fc1.requires_grad_(False)
    moved = net()
    train(moved, (X, Y), settings())
    for model, test in [(other, None), (frozen, None), (moved, None), (net(), (X[:30], Y[:30]))]:
        with pytest.raises(BadFolder, match=r"belongs to another run.*build the network again"):
            train(model, (X, Y), settings(), test=test, save=save)


def test_a_flipped_byte_in_a_checkpoint_is_seen(tmp_path):
    save = tmp_path / "run.pt"
    model = net()
    train(model, (X, Y), settings(), save=save)
    content = bytearray(save.read_bytes())
    content[content.find(model.fc1.weight.detach().numpy().tobytes()[:16]) + 3] ^= 0x7F
    save.write_bytes(content)
    with pytest.raises(BadFolder, match="cannot be read"):
        train(net(), (X, Y), settings(), save=save)


def tracker(model):
    return fl.Tracker(fl.Problem(model, "cross_entropy", (X, Y)), "loss", every=5, live=False)


def test_a_tracker_follows_one_run_of_the_network_that_is_trained(tmp_path):
    model, save = net(), tmp_path / "run.pt"
    with pytest.raises(BadInput, match="the tracker measures another network"):
        train(net(), (X, Y), settings(), watch=tracker(model))
    follower = tracker(model)
    train(model, (X, Y), settings(), watch=follower, save=save)
    with pytest.raises(BadInput, match="was saved with a tracker: pass it again"):
        train(net(), (X, Y), settings(), save=save)
    with pytest.raises(BadInput, match="steps must increase"):
        train(model, (X, Y), settings(), watch=follower)
    train(net(), (X, Y), settings(), save=tmp_path / "alone.pt")
    again = net()
    with pytest.raises(BadInput, match="was saved without a tracker"):
        train(again, (X, Y), settings(), watch=tracker(again), save=tmp_path / "alone.pt")


def test_the_history_has_the_learning_rate_of_the_step_to_come_and_sam_s_edge():
    model = net()
    follower = fl.Tracker(fl.Problem(model, "cross_entropy", (X, Y)), "loss", every=1, live=False)
    train(model, (X, Y), settings(warmup=10, max_steps=4), watch=follower)
    assert follower.history["lr"].tolist()[:4] == pytest.approx([0.01, 0.02, 0.03, 0.04])
    model = net()
    follower = fl.Tracker(fl.Problem(model, "cross_entropy", (X, Y)), "loss", every=1, live=False)
    train(model, (X, Y), settings(schedule=Steps(at=(1,)), max_steps=5), watch=follower)
    assert follower.history["lr"].tolist()[:5] == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.01])  # 4 batches an epoch
    model = net()
    follower = tracker(model)
    train(model, (X, Y), settings(ascent=SAM(0.1)), watch=follower)
    assert (follower.history["edge"] < 2 / follower.history["lr"]).all()  # SAM's lies below that of its base


def test_the_users_data_is_left_alone_by_layers_that_work_in_place():
    x = X.clone()
    for how in ({"batch_size": 16}, {"batch_size": None}, {"until": Until(gradient_norm=0.0)}):
        train(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 3)), (x, Y), settings(**how))
        assert torch.equal(x, X)


def test_a_norm_that_was_put_in_eval_mode_stays_frozen_and_a_network_in_eval_mode_is_trained():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model[1].eval()
    before = model[1].running_mean.clone()
    train(model, (X, Y), settings())
    assert torch.equal(model[1].running_mean, before)
    train(model.eval(), (X, Y), settings())
    assert not torch.equal(model[1].running_mean, before)
    assert not model.training


def test_running_statistics_of_every_norm_see_a_sam_step_once():
    image = X.reshape(60, 2, 2, 2)
    twins = [nn.Sequential(nn.InstanceNorm2d(2, track_running_stats=True), nn.Flatten(), nn.Linear(8, 3))]
    twins.append(copy.deepcopy(twins[0]))
    for model, ascent in zip(twins, (None, SAM(1e-12)), strict=True):
        train(model, (image, Y), settings(ascent=ascent, max_steps=1))
    assert torch.equal(twins[0][0].running_mean, twins[1][0].running_mean)


def test_a_place_that_cannot_be_written_is_refused_before_the_first_step(tmp_path):
    model = net()
    before = copy.deepcopy(model.state_dict())
    for save, said in [
        (tmp_path / "nowhere" / "run.pt", "there is no folder"),
        (tmp_path, "this is a folder: name a file in it"),
    ]:
        with pytest.raises(BadFolder, match=said):
            train(model, (X, Y), settings(), save=save)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_a_run_that_is_over_at_once_is_kept_like_any_other(tmp_path):
    save = tmp_path / "run.pt"
    how = settings(until=Until(loss_below=10.0))
    assert train(net(), (X, Y), how, save=save).steps == 0
    assert save.exists()
    assert train(net(), (X, Y), how, save=save).outcome == "converged"


@pytest.mark.parametrize("sizes", [(65, 32), (61, 60), (60, 30), (16, None)])
def test_no_batch_of_one_is_seen_where_there_is_none(sizes):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    batch, ghost = sizes
    train(model, (X, Y), settings(batch_size=batch, ghost_batch=ghost, max_steps=2))


def test_labels_of_any_integer_type_and_arrays_are_read():
    for y in (Y.int(), Y.to(torch.uint8), Y.numpy()):
        a, b = net(), net()
        train(a, (X, Y), settings(max_steps=3))
        train(b, (X.numpy() if isinstance(y, np.ndarray) else X, y), settings(max_steps=3))
        assert torch.equal(a.fc1.weight, b.fc1.weight)


def test_a_run_on_arrays_is_saved_and_taken_up_like_one_on_tensors(tmp_path):
    save, arrays = tmp_path / "run.pt", (X.numpy(), Y.numpy())
    first = train(net(), arrays, settings(), test=arrays, save=save)
    second = train(net(), (X, Y), settings(), test=(X, Y), save=save)
    assert (second.outcome, second.steps, second.loss) == (first.outcome, first.steps, first.loss)


def test_embedded_inputs_can_be_regularised_but_for_their_derivative():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 3))
    tokens = torch.randint(0, 10, (60, 2), generator=torch.Generator().manual_seed(0))
    train(model, (tokens, Y), settings(penalties=(RelativeFlatness(0.1), ParameterJacobian(0.1)), max_steps=2))
    with pytest.raises(BadInput, match="InputJacobian"):
        train(model, (tokens, Y), settings(penalties=InputJacobian(0.1)))
    with pytest.raises(BadInput, match="Mixup"):
        train(model, (tokens, Y), settings(mixup=Mixup(1.0)))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"optimiser": "sgd"}, "expected one of SGD, Adam, RMSProp, Ridge"),
        ({"schedule": None}, "one of Constant, Steps, Cosine"),
        ({"until": 0.01}, "Until"),
        ({"ascent": 0.05}, "one of SAM, ASAM, None"),
        ({"penalties": (0.1,)}, "InputJacobian"),
        ({"batch_size": "32"}, "a whole number"),
        ({"max_steps": 10.5}, "a whole number"),
        ({"max_steps": True}, "a whole number"),
        ({"warmup": -1}, "at least 0"),
        ({"seed": 1.5}, "a whole number"),
    ],
)
def test_settings_of_another_kind_are_refused_at_once(wrong, said):
    with pytest.raises(BadInput, match=said):
        settings(**wrong)


def test_what_is_no_pair_or_no_network_is_said():
    for data in (X, (X, Y, Y), torch.utils.data.TensorDataset(X, Y)):
        with pytest.raises(BadData, match="a pair"):
            train(net(), data, settings())
    with pytest.raises(BadModel, match=r"call .build\(\) first"):
        train(MLP(8, (16,), 3), (X, Y), settings())
    with pytest.raises(BadModel, match=r"first sample of test=\.\.\."):
        train(net(), (X, Y), settings(), test=(X[:, :5], Y))
    with pytest.raises(BadData, match=r"train\(test=\.\.\.\): expected labels from 0 to 2"):
        train(net(), (X, Y), settings(), test=(X, Y + 1))


def test_conditions_that_cannot_hold_are_refused():
    with pytest.raises(BadInput, match="accuracy needs integer class labels"):
        train(net(), (X, torch.eye(3)[Y]), settings(until=Until(accuracy=0.5)))
    for wrong in ({"loss_below": float("nan")}, {"loss_below": float("inf")}, {"gradient_norm": float("nan")}):
        with pytest.raises(BadInput, match="a finite number"):
            Until(**wrong)
    with pytest.raises(BadInput, match="name at least one layer"):
        RelativeFlatness(0.1, ())
