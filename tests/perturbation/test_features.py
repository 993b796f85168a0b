"""Moved features: through the weights and at the layer's input, the same risk (the papers' key equation)."""

from __future__ import annotations

import pytest
import torch
from literal_perturbation import on_the_ball
from networks import network
from torch import nn

import flatlens as fl
from flatlens.errors import BadInput, UnknownName
from flatlens.perturbation.features import (
    RotatedFeatures,
    feature_change,
    noise,
    smallest_feature_matrix,
    with_moved_features,
)


@pytest.mark.parametrize(("name", "layer"), [("mlp-tanh", "2"), ("mlp-relu", "4"), ("residual", "head")])
def test_a_matrix_moves_features_and_weights_alike(name: str, layer: str) -> None:
    net, x, y = network(name, n=7)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    lens = fl.Lens(problem)
    plan = lens.plan
    weight = plan.weights[layer]
    m = weight.matrix.W.shape[2]
    A = 0.3 * torch.randn(m, m, generator=torch.Generator().manual_seed(0)).double()
    moved = with_moved_features(problem, lens.model, plan, weight, lambda phi: phi + phi @ A.T)
    here = problem.loss.values(net(x), y).mean()
    assert feature_change(problem, A, layer) == pytest.approx(moved.risk - float(here.detach()), rel=1e-10)


def test_a_token_wise_layer_moves_every_token() -> None:
    net, x, y = network("attention", n=5)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    lens = fl.Lens(problem)
    plan = lens.plan
    weight = plan.weights["encoder.linear1"]
    A = 0.3 * torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).double()
    moved = with_moved_features(problem, lens.model, plan, weight, lambda phi: phi + phi @ A.T)
    through_weights = feature_change(problem, A, "encoder.linear1")
    assert through_weights == pytest.approx(moved.risk - fl.measure(fl.Lens(problem), "loss")["loss"].value, rel=1e-9)


def test_a_convolution_moves_its_patches() -> None:
    """On 1 x 1 kernels a patch is a pixel."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 6, 1, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3)).double()
    x, y = torch.randn(5, 4, 2, 2).double(), torch.randint(3, (5,))
    problem = fl.Problem(net, "cross_entropy", (x, y))
    A = 0.3 * torch.randn(2, 2).double()
    both = torch.block_diag(A, A)
    there = net(torch.einsum("cd,ndhw->nchw", torch.eye(4).double() + both, x))
    truth = float((problem.loss.values(there, y) - problem.loss.values(net(x), y)).mean().detach())
    assert feature_change(problem, A, "0") == pytest.approx(truth, rel=1e-10)


def test_noise_keeps_its_length_and_its_digits() -> None:
    phi = torch.randn(6, 2, 5).double()
    one, again, back = (noise(0.3, s, torch.Generator().manual_seed(1))(phi) - phi for s in (1.0, 1.0, -1.0))
    torch.testing.assert_close(one.flatten(1).norm(dim=1), 0.3 * phi.flatten(1).norm(dim=1))
    assert torch.equal(one, again)
    torch.testing.assert_close(one, -back)


def test_the_worst_matrix_of_one_output_is_the_worst_vector() -> None:
    """w A is any vector no longer than w: the largest rise of a quadratic on a ball."""
    torch.manual_seed(0)
    net = nn.Linear(4, 1, bias=False).double()
    x, y = torch.randn(20, 4).double(), torch.randn(20, 1).double()
    problem = fl.Problem(net, "half_squared_error", (x, y))
    w, delta = net.weight.detach()[0], 0.2
    H, g = x.T @ x / 20, ((x @ w - y[:, 0])[:, None] * x).mean(0)
    truth = on_the_ball(H, g, delta * float(w.norm()))
    features = RotatedFeatures(problem, net, fl.Lens(problem).plan.weights[""])
    value, reached = features.worst(delta, 3, 60, torch.Generator().manual_seed(0))
    assert truth * (1 - 1e-3) <= value <= truth * (1 + 1e-9)
    assert len(reached) == 3


def test_bad_input_is_told_in_one_line() -> None:
    net, x, y = network("twice-relu")
    problem = fl.Problem(net, "cross_entropy", (x, y))
    with pytest.raises(BadInput, match=r"expected shape \(4, 4\), got \(2, 2\)"):
        feature_change(problem, torch.eye(2), "last")
    with pytest.raises(UnknownName, match="linear layer"):
        feature_change(problem, torch.eye(4), "fisrt")
    net, x, y = network("bare")
    with pytest.raises(BadInput, match="acts outside"):
        feature_change(fl.Problem(net, "cross_entropy", (x, y)), torch.eye(5), "tied")
    with pytest.raises(BadInput, match=r"feature_change\(\.\.\.\): the network has no linear layer whose features"):
        feature_change(fl.Problem(nn.Flatten(), "mse", (torch.ones(3, 1), torch.ones(3, 1))), torch.eye(1))


def test_the_smallest_matrix_for_given_moves_is_that_of_d2() -> None:
    """reparam2019 D.2: the columns e_1 and (e_2 - e_1) / eps, of norm at least sqrt 2 / eps; no other A is smaller."""
    for eps in (0.5, 0.1, 1e-3):
        phi = torch.tensor([[1.0, 0.0, 0.0], [1.0, eps, 0.0]]).double()
        moves = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]).double()
        A = smallest_feature_matrix(phi, moves)
        printed = torch.tensor([[1.0, -1 / eps, 0.0], [0.0, 1 / eps, 0.0], [0.0, 0.0, 0.0]]).double()
        torch.testing.assert_close(A, printed)
        assert float(torch.linalg.matrix_norm(A, 2)) >= 2**0.5 / eps


def test_no_matrix_with_the_same_moves_has_a_smaller_norm() -> None:
    generator = torch.Generator().manual_seed(0)
    phi, moves = (torch.randn(3, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    A = smallest_feature_matrix(phi, moves)
    torch.testing.assert_close(phi @ A.T, moves)
    across = torch.eye(6).double() - torch.linalg.pinv(phi) @ phi
    for _ in range(50):
        other = A + torch.randn(6, 6, dtype=torch.float64, generator=generator) @ across
        torch.testing.assert_close(phi @ other.T, moves)
        assert torch.linalg.matrix_norm(other, 2) >= torch.linalg.matrix_norm(A, 2) - 1e-12
    with pytest.raises(BadInput, match="no matrix moves these features so"):
        smallest_feature_matrix(torch.ones(2, 3), torch.eye(3)[:2])
    with pytest.raises(BadInput, match=r"two matrices of shape \(n, m\)"):
        smallest_feature_matrix(torch.ones(2, 3), torch.ones(2, 2))
