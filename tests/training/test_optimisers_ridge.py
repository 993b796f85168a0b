"""The last layer solved for: scikit-learn's solution on the features below."""

import copy

import numpy as np
import pytest
import torch
from sklearn import linear_model
from torch import nn

from flatlens.data import digits
from flatlens.errors import BadFolder, BadInput, BadModel
from flatlens.models import MLP
from flatlens.settings_json import as_plain, from_plain
from flatlens.training import SETTINGS, InputJacobian, Ridge, Training, train


def how(penalty=1.0, **others):
    return Training(Ridge(penalty), loss="half_squared_error", max_steps=1, **others)


@pytest.fixture(scope="module")
def split():
    return digits(train=120)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("penalty", [1.0, 30.0])
def test_it_is_scikit_learns_solution(split, bias, penalty):
    net = MLP(64, (32,), 10).build()
    if not bias:
        net.fc2 = nn.Linear(32, 10, bias=False)
    before = copy.deepcopy(net.state_dict())
    result = train(net, split.train, how(penalty), test=split.test)
    with torch.no_grad():
        phi = net[:-1](split.x).double().numpy()
    theirs = linear_model.Ridge(alpha=penalty, fit_intercept=bias).fit(phi, np.eye(10)[split.y])
    assert np.allclose(net.fc2.weight.detach().numpy(), theirs.coef_, atol=1e-5)
    if bias:
        assert np.allclose(net.fc2.bias.detach().numpy(), theirs.intercept_, atol=1e-5)
    assert torch.equal(net.fc1.weight, before["fc1.weight"])
    risk = 0.5 * (net(split.x) - torch.eye(10)[split.y]).square().sum(1).mean()
    assert result.loss == pytest.approx(risk.item(), rel=1e-5)
    assert (result.outcome, result.steps) == ("finished", 1)
    assert result.curves["step"].tolist() == [0, 1]
    assert result.curves["loss"][1] < result.curves["loss"][0]
    assert result.curves["test_accuracy"][1] > result.curves["test_accuracy"][0]


def test_a_watcher_sees_the_network_before_and_after(split):
    class Norms:
        def __init__(self, net):
            self.net, self.seen = net, []

        def step(self, step, *, optimiser=None):
            self.seen.append((step, self.net.fc2.weight.norm().item(), optimiser))

    net = MLP(64, (32,), 10).build()
    watch = Norms(net)
    first = net.fc2.weight.norm().item()
    train(net, split.train, how(), watch=watch)
    assert watch.seen == [(0, first, None), (1, net.fc2.weight.norm().item(), None)]
    assert watch.seen[1][1] != first


def test_networks_that_end_otherwise_are_refused(split):
    for net in (
        nn.Sequential(nn.Linear(64, 10), nn.Tanh()),
        nn.Sequential(nn.Unflatten(1, (1, 64)), nn.Conv1d(1, 10, 64), nn.Flatten()),
    ):
        with pytest.raises(BadModel, match="Ridge"):
            train(net, split.train, how())


def test_a_place_that_cannot_be_written_is_refused_though_a_solution_writes_nothing(split, tmp_path):
    for save in (tmp_path, tmp_path / "missing" / "state.pt"):
        with pytest.raises(BadFolder):
            train(MLP(64, (32,), 10).build(), split.train, how(), save=save)


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(BadInput, match="must be positive"):
        Ridge(0.0)
    with pytest.raises(BadInput, match="squared error only"):
        Training(Ridge(), max_steps=1)
    with pytest.raises(BadInput, match="no penalties"):
        how(penalties=(InputJacobian(0.1),))


def test_settings_come_back_from_their_text():
    assert from_plain(as_plain(how(2.5)), {kind.__name__: kind for kind in SETTINGS}) == how(2.5)
