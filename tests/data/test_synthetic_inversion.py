"""Inputs from features: found exactly, and the error told as it is."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from flatlens.data import DataSettings, Split, clusters, inverted, inverted_clusters
from flatlens.data.synthetic import CLUSTER_SCALE
from flatlens.errors import BadInput, BadModel
from flatlens.models import MLP


def network(widths, seed=0, dtype=torch.float64, last=True):
    """Glorot weights, small biases, tanh after each layer."""
    g = torch.Generator().manual_seed(seed)
    modules = []
    for inputs, outputs in pairwise(widths):
        linear = nn.utils.skip_init(nn.Linear, inputs, outputs, dtype=torch.float64)
        nn.init.xavier_uniform_(linear.weight, generator=g)
        nn.init.uniform_(linear.bias, -0.05, 0.05, generator=g)
        modules += [linear, nn.Tanh()]
    return nn.Sequential(*(modules if last else modules[:-1])).to(dtype)


PAPER = (784, 512, 128, 16, 8)


def made_of(x, test_x=None):
    y = torch.zeros(len(x), dtype=torch.int64)
    test_x = x[:1] if test_x is None else test_x
    return Split("made", x, y, test_x, y[: len(test_x)], classes=2)


@pytest.mark.parametrize("separation", [0.5, 4.0, 20.0])
def test_the_papers_network_and_size(separation):
    features = clusters(separation, n=500, test=4500)
    net = network(PAPER)
    found = inverted(features, net)
    assert found.split.x.shape == (500, 784)
    assert found.split.test_x.shape == (4500, 784)
    assert found.clipped == 0
    assert found.max_error < 1e-14
    assert found.rms_error <= found.max_error
    assert torch.equal(found.split.y, features.y)
    # the features are the clusters times one number, in and out of the training data
    assert torch.allclose(found.features.x, features.x.double() * found.scale, rtol=1e-12)
    assert torch.allclose(found.features.test_x, features.test_x.double() * found.scale, rtol=1e-12)
    assert float(torch.cat([found.features.x, found.features.test_x]).abs().max()) <= 0.9 + 1e-12
    assert f"multiplied by {found.scale:.3g}" in found.split.description


def test_the_errors_are_those_of_the_network_on_what_is_handed_over():
    net = network((40, 20, 8), dtype=torch.float32)
    found = inverted(clusters(2.0, n=50, test=20), net)
    assert found.split.x.dtype == torch.float32
    with torch.no_grad():
        out = net(torch.cat([found.split.x, found.split.test_x])).double()
    error = out - torch.cat([found.features.x, found.features.test_x]).double()
    assert found.max_error == float(error.abs().max())
    assert found.rms_error == float(error.square().mean().sqrt())
    assert 1e-9 < found.max_error < 1e-5


def test_what_a_network_gave_is_left_at_its_scale():
    net = network((30, 20, 4))
    x = torch.randn(50, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.3
    with torch.no_grad():
        features = net(x)
    found = inverted(made_of(features), net)
    assert found.scale == 1.0
    assert found.max_error < 1e-14
    assert torch.equal(found.features.x, features)


def test_the_shortest_solution_where_it_is_within_the_box():
    net = network((30, 4))
    z = torch.full((1, 4), 0.3, dtype=torch.float64)
    x = inverted(made_of(z), net).split.x
    linear = net[0]
    shortest = torch.linalg.lstsq(linear.weight.detach(), (z.atanh() - linear.bias).detach().T).solution.T
    assert torch.allclose(x, shortest, atol=1e-12)


def test_a_solution_in_the_box_is_found_where_the_shortest_is_outside():
    # the shortest h of h1 + 0.1 h2 = 1 is (0.99, 0.099), outside the box; (0.92, 0.8) is inside it
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    with torch.no_grad():
        net[2].weight.copy_(torch.tensor([[1.0, 0.1]]))
        net[2].bias.zero_()
    found = inverted(made_of(torch.tensor([[0.98]], dtype=torch.float64)), net)
    assert found.scale == 1.0
    assert found.clipped == 0
    assert found.max_error < 1e-14
    hidden = torch.tanh(found.split.x @ net[0].weight.T + net[0].bias)
    assert hidden.abs().max() <= 0.95 + 1e-12


def test_features_are_scaled_down_until_there_is_a_solution():
    net = nn.Sequential(nn.Linear(2, 1), nn.Tanh(), nn.Linear(1, 1), nn.Tanh()).double()
    with torch.no_grad():
        net[2].weight.fill_(0.5)
        net[2].bias.zero_()
    # |h| <= 0.95 reaches atanh(f) <= 0.475, so f <= 0.442: 0.9 * 0.8^4 = 0.369 is the first
    features = made_of(torch.tensor([[5.0], [-1.0]], dtype=torch.float64))
    found = inverted(features, net)
    assert found.scale == pytest.approx(0.9 / 5 * 0.8**4)
    assert found.max_error < 1e-14
    assert found.clipped == 0
    assert inverted(features, net, scale=0.08).scale == 0.08  # 5 * 0.08 = 0.4
    for scale, why in ((0.1, "2 samples have no such inputs"), (0.2, "a tanh stays below 1")):
        with pytest.raises(BadInput, match=why):
            inverted(features, net, scale=scale)


def test_what_cannot_be_reached_is_clipped_and_told():
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1), nn.Tanh()).double()
    with torch.no_grad():
        net[2].weight.fill_(0.1)
        net[2].bias.fill_(1.0)  # |W h| <= 0.2: the output is at least tanh(0.8)
    found = inverted(made_of(torch.tensor([[0.0], [0.6], [-0.3]], dtype=torch.float64)), net)
    assert found.clipped == 3 + 1  # the test sample is the first one again
    assert found.scale == 1.0
    with torch.no_grad():
        assert found.max_error == float((net(found.split.x) - found.features.x).abs().max())
    assert found.max_error > 0.5


def test_a_narrow_layer_is_solved_by_least_squares():
    net = nn.Sequential(nn.Linear(1, 2, bias=False)).double()
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[1.0], [1.0]]))
    found = inverted(made_of(torch.tensor([[1.0, 3.0]], dtype=torch.float64)), net)
    assert found.split.x.tolist() == [[pytest.approx(2.0)]]
    assert found.max_error == pytest.approx(1.0)


def test_the_network_is_left_as_it_was():
    net = network((20, 8))
    before = {k: v.clone() for k, v in net.state_dict().items()}
    inverted(clusters(2.0, 20, 10), net)
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in net.parameters())


@pytest.mark.parametrize(
    "net", [nn.Sequential(nn.Linear(3, 8), nn.ReLU()), nn.Linear(3, 8), nn.Sequential(nn.Tanh()), nn.Sequential()]
)
def test_other_networks_are_refused(net):
    with pytest.raises(BadModel, match=r"inverted\(network=\.\.\.\)"):
        inverted(clusters(2.0, 20, 10), net)


def test_two_tanh_in_a_row_are_refused():
    with pytest.raises(BadModel, match="two Tanh"):
        inverted(clusters(2.0, 20, 10), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Tanh()))


def test_features_that_do_not_fit_are_refused():
    features = clusters(2.0, 20, 10)
    with pytest.raises(BadInput, match=r"\(n, 4\)"):
        inverted(features, network((20, 4)))
    with pytest.raises(BadInput, match="NaN or inf"):
        inverted(replace(features, x=features.x * float("nan")), network((20, 8)))
    with pytest.raises(BadInput, match="reach=1"):
        inverted(features, network((20, 8)), reach=1.0)


def features_of(inputs, seed):
    """What the last layer reads in the network of five layers with that seed."""
    below = MLP(784, (512, 128, 16, 8), 2, "tanh", seed, "xavier_uniform").build()[:-1]
    with torch.no_grad():
        return below(inputs)


def test_the_networks_features_are_the_clusters():
    found, drawn = inverted_clusters(3.0, n=40, test=60, seed=5), clusters(3.0, n=40, test=60, seed=5)
    for inputs, x in ((found.x, drawn.x), (found.test_x, drawn.test_x)):
        phi = features_of(inputs, 5)
        assert torch.allclose(phi, CLUSTER_SCALE * x, rtol=1e-5, atol=1e-7)
    assert torch.equal(found.y, drawn.y)
    assert not torch.allclose(features_of(found.x, 6), features_of(found.x, 5), atol=0.1 * CLUSTER_SCALE)


def test_each_sample_is_held_out_in_one_fold():
    folds = [DataSettings("inverted_clusters", train=40, test=20, separation=3.0, fold=k).load() for k in range(3)]
    whole = torch.cat([folds[0].test_x, folds[0].x])
    assert torch.allclose(torch.cat([fold.test_x for fold in folds]), whole, atol=1e-5)
    for fold in folds:
        assert (len(fold.x), len(fold.test_x), len(fold.y)) == (40, 20, 40)
        assert torch.cdist(fold.x, fold.test_x).min() > 1e-3
    for wrong in ({"fold": 3}, {"fold": -1}, {"test": 25, "fold": 0}):
        with pytest.raises(BadInput, match="give the folds 0 to "):
            inverted_clusters(**{"n": 40, "test": 20} | wrong)
