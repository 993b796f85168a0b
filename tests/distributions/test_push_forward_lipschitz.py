"""The product of the layers' norms: never below a slope that is met, and reached where it can be."""

import math

import of_the_table
import pytest
import torch
from builders import redrawn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flatlens.distributions import lipschitz_product
from flatlens.errors import BadInput

ACTIVATIONS = [
    *of_the_table.ACTIVATIONS,
    nn.Identity(), nn.LeakyReLU(0.1), nn.LeakyReLU(3.0), nn.ELU(2.0), nn.Softplus(beta=5),
]  # fmt: skip


def steepest(network, size, n=2000, span=1.0):
    """The largest slope between pairs of random points, far and near."""
    g = torch.Generator().manual_seed(0)
    a = span * torch.randn(n, *size, generator=g, dtype=torch.float64)
    b = torch.where(torch.arange(n).reshape(-1, *[1] * len(size)) % 2 == 0, span * a.flip(0), a + 1e-3 * a.roll(1, 0))
    with torch.no_grad():
        rise = (network(a) - network(b)).flatten(1).norm(dim=1)
    return float((rise / (a - b).flatten(1).norm(dim=1)).max())


@settings(max_examples=40, deadline=None)
@given(
    width=st.integers(1, 6),
    activations=st.lists(st.sampled_from(ACTIVATIONS), min_size=1, max_size=3),
    seed=st.integers(0, 10**6),
)
def test_no_slope_is_above_it(width, activations, seed):
    layers = [part for act in activations for part in (nn.Linear(width, width), act)]
    network = redrawn(nn.Sequential(*layers).double(), seed)
    assert steepest(network, (width,), n=200) <= lipschitz_product(network, (width,)) * (1 + 1e-9)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_the_slope_of_an_activation_is_the_least_that_holds(activation):
    met = max(steepest(activation, (1,), n=5000, span=span) for span in (0.1, 1.0, 10.0))
    known = lipschitz_product(activation, (1,))
    assert 0.95 * known < met <= known * (1 + 1e-7)


def test_a_linear_network_reaches_it():
    network = redrawn(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Identity()).double())
    norm = float(torch.linalg.matrix_norm(network[0].weight.detach(), 2))
    assert lipschitz_product(network, (4,)) == pytest.approx(norm, rel=1e-8)
    assert lipschitz_product(network, (4,)) >= norm
    assert network.training


def test_a_layer_used_twice_counts_twice():
    layer = nn.Linear(3, 3)
    once = lipschitz_product(layer, (3,))
    assert lipschitz_product(nn.Sequential(layer, nn.Tanh(), nn.Sequential(layer, layer)), (3,)) == pytest.approx(
        once**3
    )


def test_convolutions_stretch_by_their_operator_norm():
    network = redrawn(
        nn.Sequential(
            nn.Unflatten(1, (1, 6, 6)),
            nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU()),
            nn.Conv2d(3, 2, 3, stride=2, padding_mode="circular", padding=1),
            nn.Flatten(),
            nn.Linear(18, 2),
        ).double(),
        1,
    )
    norms = []
    for layer, size in ((network[1][0], (1, 6, 6)), (network[2], (3, 6, 6)), (network[4], (18,))):
        units = torch.eye(math.prod(size), dtype=torch.float64).reshape(-1, *size)
        matrix = (layer(units) - layer(0 * units[:1])).flatten(1).detach()
        norms.append(float(torch.linalg.matrix_norm(matrix, 2)))
    bound = lipschitz_product(network, (36,))
    assert bound == pytest.approx(math.prod(norms), rel=1e-7)
    assert math.prod(norms) <= bound
    assert steepest(network, (36,)) <= bound


def test_a_norm_from_below_is_no_bound(monkeypatch):
    network = nn.Sequential(nn.Unflatten(1, (1, 500)), nn.Conv1d(1, 1, 3, padding=1))
    assert lipschitz_product(network, (500,)) > 0
    monkeypatch.setattr("flatlens.operations.operator_norm._MOST", 15)
    with pytest.raises(BadInput, match=r"1 \(Conv1d\) did not converge.*lipschitz="):
        lipschitz_product(network, (500,))


def test_a_parametrised_layer_counts_as_it_is_run():
    layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    with torch.no_grad():
        norm = float(torch.linalg.matrix_norm(layer.weight.double(), 2))
    assert lipschitz_product(nn.Sequential(layer), (3,)) == pytest.approx(norm, rel=1e-6)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Twice(nn.Sequential):
    def forward(self, x):
        return super().forward(super().forward(x))


def hooked():
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda module, inputs, output: 2 * output)
    return layer


@pytest.mark.parametrize(
    ("network", "told"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), r"1 \(BatchNorm1d\) is not known here: .*lipschitz="),
        (nn.Sequential(nn.Sequential(nn.GELU("tanh"))), r"0\.0 \(GELU\)"),
        (Doubled(2, 2), r"the network \(Doubled\)"),
        (Twice(nn.Linear(2, 2)), r"the network \(Twice\)"),
        (nn.Sequential(hooked()), "hooks"),
        (nn.Softplus(beta=1, threshold=1), "jumps"),
        (nn.Linear(3, 2), "fails on inputs of shape"),
    ],
)
def test_what_is_not_known_is_refused(network, told):
    with pytest.raises(BadInput, match=told) as error:
        lipschitz_product(network, (2,))
    assert "\n" not in str(error.value)


def test_weights_that_are_not_finite_are_refused():
    layer = nn.Linear(2, 2)
    nn.init.constant_(layer.weight, math.nan)
    with pytest.raises(BadInput, match="not finite"):
        lipschitz_product(layer, (2,))
