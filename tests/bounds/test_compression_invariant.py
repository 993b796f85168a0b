"""Equation 37: normalised sharpness bounds a sensitivity in the same scales."""

import pytest
import torch
from builders import lens_on, mlp, normal
from literal_bounds import layers
from networks import module_of
from torch import Tensor, nn

from flatlens import Lens, Problem, measure
from flatlens.bounds import check_bounds

NET = mlp((4, 5, 3), nn.Tanh)
X = normal(6, 4, seed=1)
SEEN = layers(NET, X)


def roots(loss: str, x: Tensor = X, net: nn.Module = NET) -> Tensor:
    """C^(1/2) per sample."""
    if loss == "half_squared_error":
        return torch.eye(3).double().expand(len(x), 3, 3)
    p = net(x).detach().softmax(1)
    values, vectors = torch.linalg.eigh(torch.diag_embed(p) - p[:, :, None] * p[:, None])
    return vectors * values.clamp(min=0).sqrt()[:, None] @ vectors.mT


def objective(H: Tensor, W: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """Equation 36 with lambda = 1, as printed."""
    return sum(
        H[i, j] * (s[i] * t[j]) ** 2 + W[i, j] ** 2 / (4 * (s[i] * t[j]) ** 2)
        for i in range(len(H))
        for j in range(H.shape[1])
    )


def sensitivity(C: Tensor, seen, t: Tensor) -> Tensor:
    """||C^(1/2) df/dx diag(1/s')||_F ||diag(s') x|| per sample."""
    return (C @ seen.dx / t).flatten(1).norm(dim=1) * (t * seen.x).norm(dim=1)


def diagonal(C: Tensor, seen) -> Tensor:
    """mean_i ||C^(1/2) df/dW_st||^2."""
    return torch.einsum("nab,nbst->nast", C, seen.dw).square().sum(1).mean(0)


@pytest.mark.parametrize("loss", ["half_squared_error", "cross_entropy"])
@pytest.mark.parametrize("layer", ["0", "2"])
def test_both_sides_are_the_literal_definitions(loss, layer):
    lens, C, seen = lens_on(NET, X, loss), roots(loss), SEEN[layer]
    found = check_bounds(lens, "matrix_normalized_bound").of("matrix_normalized_bound.inner", layer)
    arrays = measure(lens, "normalized_sharpness")["normalized_sharpness", layer].arrays
    s, t = arrays["sigma"], arrays["sigma_prime"]
    right, each = objective(diagonal(C, seen), seen.W, s, t), sensitivity(C, seen, t)
    left = each.square().mean().sqrt()
    assert found.lhs == pytest.approx(float(left), rel=1e-9)
    assert found.rhs == pytest.approx(float(right), rel=1e-9)
    assert found.status == "holds"
    assert 0.1 < found.tightness < 1
    wrong = [each.mean(), each.square().mean(), sensitivity(C, seen, 1 / t).square().mean().sqrt(), left / 2]
    wrong.append((torch.linalg.matrix_norm(C @ seen.dx / t, 2) * (t * seen.x).norm(dim=1)).square().mean().sqrt())
    for slip in wrong:
        assert found.lhs != pytest.approx(float(slip), rel=1e-6)
    for slip in (objective(diagonal(C, seen), seen.W, s, t.square()), objective(diagonal(C, seen), 2 * seen.W, s, t)):
        assert found.rhs != pytest.approx(float(slip), rel=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_equation_37_holds_at_any_scales(seed):
    generator = torch.Generator().manual_seed(seed)
    s, t = (torch.randn(k, generator=generator, dtype=torch.float64).exp() for k in SEEN["0"].W.shape)
    C = roots("half_squared_error")
    left = sensitivity(C, SEEN["0"], t).square().mean().sqrt()
    assert left <= objective(diagonal(C, SEEN["0"]), SEEN["0"].W, s, t)


def inner(net: nn.Module, x: Tensor, layer: str = "0"):
    report = check_bounds(lens_on(net, x), "matrix_normalized_bound")
    return report.of("matrix_normalized_bound.inner", layer)


def test_a_feature_that_is_always_zero_counts_on_neither_side():
    x = X.clone()
    x[:, 1] = 0
    less = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for to, of in zip(less.parameters(), NET.parameters(), strict=True):
            to.copy_(of if to.shape == of.shape else of[:, [0, 2, 3]])
    rows = [inner(net, x) for net, x in ((NET, x), (less, x[:, [0, 2, 3]]))]
    assert rows[0].lhs == pytest.approx(rows[1].lhs, rel=1e-6)
    assert rows[0].rhs == pytest.approx(rows[1].rhs, rel=1e-6)
    assert rows[0].status == "holds"


def test_both_sides_survive_a_rescaling_of_neurons():
    """What the paper says of the quantity: hidden neurons scaled up, and their outgoing weights down."""
    relu = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    scaled = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    a = torch.tensor([0.1, 1.0, 3.0, 20.0, 0.5]).double()
    with torch.no_grad():
        scaled[0].weight.copy_(a[:, None] * relu[0].weight)
        scaled[0].bias.copy_(a * relu[0].bias)
        scaled[2].weight.copy_(relu[2].weight / a)
        scaled[2].bias.copy_(relu[2].bias)
    for layer in ("0", "2"):
        one, other = inner(relu, X, layer), inner(scaled, X, layer)
        assert one.lhs == pytest.approx(other.lhs, rel=1e-5)
        assert one.rhs == pytest.approx(other.rhs, rel=1e-9)


def test_a_loss_that_curves_downwards_at_one_sample_is_not_convex():
    """Its average curves upwards, so that no entry of H is negative; sqrt(8) on the left was above 0.28."""

    net = module_of(
        lambda net, x: (net.fc(x[:, :2]) * x[:, 2:]).sum(1, keepdim=True), fc=nn.Linear(2, 2, bias=False)
    ).double()
    nn.init.ones_(net.fc.weight)
    x = torch.tensor([[1.0, 1, 1, 1], [1, 1, 1, -1]]).double()
    problem = Problem(net, lambda f, y: y[:, 0] * f[:, 0] ** 2 / 2, (x, torch.tensor([[1.0], [-0.99]]).double()))
    row = check_bounds(Lens(problem), "matrix_normalized_bound").of("matrix_normalized_bound.inner", "fc")
    assert (row.status, row.assumption) == ("not applicable", "convex_loss: the loss curves downwards at an output")
