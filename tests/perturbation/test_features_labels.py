"""Labels near the samples, and the terms of Appendix B against derivatives of gamma itself."""

from __future__ import annotations

import pytest
import torch
from networks import module_of, network
from torch import Tensor, nn

import flatlens as fl
from flatlens.errors import BadInput
from flatlens.perturbation import label_change_terms
from flatlens.perturbation.features import noise, relabelled, seen


def smooth(phi: Tensor) -> Tensor:
    """Class probabilities that change with the features."""
    return torch.softmax(torch.stack([phi.sum(1), phi[:, 0].sin(), phi[:, 1].square()], 1), 1)


@pytest.mark.parametrize("name", ["mlp-tanh", "mlp-gelu", "twice-tanh"])
def test_the_terms_are_the_derivatives_of_gamma(name: str) -> None:
    net, x, _ = network(name, n=6)
    layer = net.last if name.startswith("twice") else net[4]
    with torch.no_grad():
        read: list[Tensor] = []
        with torch.no_grad():
            handle = layer.register_forward_pre_hook(lambda m, args: read.append(args[0].detach()))
            net(x)
            handle.remove()
    phi = read[0]
    A = torch.randn(phi.shape[1], phi.shape[1], generator=torch.Generator().manual_seed(0)).double()
    y = smooth(phi)
    terms = label_change_terms(fl.Problem(net, "cross_entropy", (x, y)), smooth, A)

    def gamma(delta: Tensor) -> Tensor:
        there = phi + delta * (phi @ A.T)
        logs = torch.log_softmax(layer(there), 1)
        return -(smooth(there) * logs).sum(1)

    zero = torch.zeros((), dtype=torch.float64)
    first = torch.func.jacfwd(gamma)(zero)
    second = torch.func.jacfwd(torch.func.jacfwd(gamma))(zero)
    torch.testing.assert_close(terms.weights + terms.labels, first)
    torch.testing.assert_close(terms.flatness + terms.labels_squared + terms.labels_bending + 2 * terms.mixed, second)
    # cross-entropy is linear in the labels: no l_yy; the others are there
    torch.testing.assert_close(terms.labels_squared, torch.zeros(6, dtype=torch.float64))
    assert all(float(t.abs().max()) > 1e-4 for t in (terms.labels, terms.flatness, terms.labels_bending, terms.mixed))


def test_a_loss_that_curves_in_the_labels_has_their_square() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2)).double()
    x, A = torch.randn(5, 3).double(), torch.randn(3, 3).double()

    def labels(phi: Tensor) -> Tensor:
        return torch.stack([phi[:, 0] + phi[:, 2], 2 * phi[:, 1]], 1)

    terms = label_change_terms(fl.Problem(net, "half_squared_error", (x, labels(x))), labels, A)
    slope = labels(x @ A.T)
    torch.testing.assert_close(terms.labels_squared, slope.square().sum(1))
    torch.testing.assert_close(terms.labels_bending, torch.zeros(5, dtype=torch.float64))
    torch.testing.assert_close(terms.mixed, -(slope * (x @ A.T @ net[0].weight.T)).sum(1).detach())


def test_a_constant_label_function_changes_nothing() -> None:
    net, x, y = network("mlp-relu", n=8)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    lens = fl.Lens(problem)
    plan = lens.plan
    move = noise(0.5, 1.0, torch.Generator().manual_seed(0))
    found = relabelled(problem, lens.model, plan, plan.weights["4"], lambda phi: y, move)
    assert torch.equal(found.told, found.kept)
    assert not found.changed.any()


def test_definition_9_sample_by_sample() -> None:
    net, x, y = network("mlp-tanh", n=8)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    lens = fl.Lens(problem)
    plan = lens.plan
    weight = plan.weights["4"]
    points = seen(problem, lens.model, plan, weight)
    torch.testing.assert_close(points.phi, net[:4](x).detach())

    def labels(phi: Tensor) -> Tensor:
        return (phi[:, 0] > 0).long() + (phi[:, 1] > 0).long()

    found = relabelled(problem, lens.model, plan, weight, labels, lambda phi: -phi)
    there = -net[:4](x)
    f, told = net[4](there), labels(there)
    for losses, label in ((found.told, told), (found.kept, y)):
        torch.testing.assert_close(losses, nn.functional.cross_entropy(f, label, reduction="none").detach())
    torch.testing.assert_close(found.changed, (told != y).double())


def test_the_nearest_sample_tells_the_label() -> None:
    net, x, y = network("mlp-tanh", n=8)
    problem = fl.Problem(net, "cross_entropy", (x, y), test=(x + 0.5, y.flip(0)))
    lens = fl.Lens(problem)
    plan = lens.plan
    both = seen(problem, net, plan, plan.weights["4"], held_out=True)
    assert both.phi.shape == (16, 5)
    assert torch.equal(both.nearest(both.phi), torch.cat([y, y.flip(0)]))


def test_a_matrix_of_the_wrong_shape_is_refused() -> None:
    net, x, _ = network("mlp-tanh", n=4)
    with pytest.raises(BadInput, match=r"expected shape \(5, 5\), got \(2, 2\)"):
        label_change_terms(fl.Problem(net, "cross_entropy", (x, smooth(x))), smooth, torch.eye(2))
    with pytest.raises(BadInput, match=r"got \(5, 2\)"):
        label_change_terms(fl.Problem(net, "cross_entropy", (x, smooth(x))), smooth, torch.ones(5, 2))


def test_where_features_cannot_be_moved_there_are_no_terms() -> None:
    x = torch.randn(4, 5)
    with pytest.raises(BadInput, match=r"label_change_terms\(layer='w'\): the weight multiplies outside the calls"):
        label_change_terms(
            fl.Problem(
                module_of(lambda net, x: x @ net.w.T, w=nn.Parameter(torch.ones(3, 5))), "cross_entropy", (x, smooth(x))
            ),
            smooth,
            torch.eye(5),
        )


def test_labels_of_tokens_are_refused() -> None:
    net, tokens = nn.Sequential(nn.Embedding(5, 4), nn.Tanh(), nn.Linear(4, 5)), torch.arange(6).reshape(2, 3) % 5
    with pytest.raises(BadInput, match="the targets must be a tensor with one label per sample"):
        label_change_terms(fl.Problem(net, "cross_entropy", (tokens, tokens)), smooth, torch.eye(12))
