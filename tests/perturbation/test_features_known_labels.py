"""Eq. 3, 4 and 5 with a known label function, against the formulas written out."""

from __future__ import annotations

import pytest
import torch
from networks import network
from torch import Tensor, nn

import flatlens as fl
from flatlens.errors import BadInput
from flatlens.perturbation import feature_change, label_change, moved_risk, noise


def labels(phi: Tensor) -> Tensor:
    return (phi[:, 0] > 0).long() + (phi[:, 1] > 0).long()


def losses(f: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(f, y, reduction="none").detach()


def labelled(n: int = 40) -> tuple[nn.Module, Tensor, fl.Problem]:
    """A network whose samples have the labels of their features at its last layer."""
    net, x, _ = network("mlp-tanh", n=n)
    phi = net[:4](x).detach()
    return net, phi, fl.Problem(net, "cross_entropy", (x, labels(phi)))


def test_eq_4_and_definition_9_with_a_label_function_are_the_printed_means() -> None:
    net, phi, problem = labelled()
    A = 0.8 * torch.randn(5, 5, generator=torch.Generator().manual_seed(1)).double()
    there = phi + phi @ A.T
    truth = losses(net[4](there), labels(there)) - losses(net[4](phi), labels(phi))
    assert (labels(there) != labels(phi)).any()
    found = feature_change(problem, A, labels=labels)
    assert found == pytest.approx(float(truth.mean()), rel=1e-10)
    assert found != pytest.approx(feature_change(problem, A), rel=1e-3)
    far = losses(net[4](there), labels(there)) - losses(net[4](there), labels(phi))
    found = label_change(problem, labels, lambda features: features + features @ A.T)
    assert found == pytest.approx(float(far.abs().mean()), rel=1e-10)


def test_eq_4_keeps_labels_that_are_constant() -> None:
    _, phi, problem = labelled()
    A, own = 0.1 * torch.eye(5).double(), labels(phi)
    kept = feature_change(problem, A)
    assert feature_change(problem, A, labels=lambda features: own) == pytest.approx(kept, rel=1e-10)
    assert moved_risk(problem, lambda features: 1.1 * features) - moved_risk(problem, lambda features: features) == (
        pytest.approx(kept, rel=1e-9)
    )


@pytest.mark.parametrize("law", ["rotations", "ball", "truncated_normal"])
def test_proposition_2s_vectors_and_its_matrices_have_one_mean(law: str) -> None:
    """The middle term of Eq. 5, by the densities lambda_i and by the law of A = r O that induces them."""
    net, phi, problem = labelled(12)
    delta, draws = 0.9, 300
    generator = torch.Generator().manual_seed(0)
    by_vectors = [moved_risk(problem, noise(delta, 1.0, generator, law, 0.5), labels=labels) for _ in range(draws)]
    Q, R = torch.linalg.qr(torch.randn(draws, 5, 5, dtype=torch.float64, generator=generator))
    drawn = 0.5 * torch.randn(20_000, 5, generator=generator).norm(dim=1)
    r = {
        "rotations": torch.ones(draws),
        "ball": torch.rand(draws, generator=generator) ** (1 / 5),
        "truncated_normal": drawn[drawn < 1][:draws],  # the normal of deviation 1/2 cut off at 1, by rejection
    }[law]
    matrices = delta * r.double()[:, None, None] * (Q * R.diagonal(dim1=1, dim2=2).sign()[:, None])
    by_matrices = [float(losses(net[4](there), labels(there)).mean()) for there in (phi + phi @ A.T for A in matrices)]
    one, other = (torch.tensor(values).double() for values in (by_vectors, by_matrices))
    error = (one.var() / draws + other.var() / draws).sqrt()
    assert float((one.mean() - other.mean()).abs()) < 4 * float(error)


def test_the_laws_have_their_radii() -> None:
    phi = torch.randn(4000, 3, generator=torch.Generator().manual_seed(2)).double()
    for law, mean_square in (("rotations", 1.0), ("ball", 3 / 5)):
        moved = noise(0.5, 1.0, torch.Generator().manual_seed(3), law)(phi) - phi
        share = (moved.norm(dim=1) / phi.norm(dim=1) / 0.5).square()
        assert float(share.mean()) == pytest.approx(mean_square, abs=4 * float(share.std()) / 4000**0.5 + 1e-9)
        assert float(share.max()) <= 1 + 1e-9


def test_what_a_label_function_must_give() -> None:
    _, _, problem = labelled()
    with pytest.raises(BadInput, match=r"expected targets as in the data, \(40,\), got \(40, 5\)"):
        feature_change(problem, torch.eye(5), labels=lambda phi: phi)
    net, x, y = network("attention", n=4)
    image = fl.Problem(net, "cross_entropy", (x, y))
    layer = next(name for name, weight in fl.Lens(image).plan.weights.items() if not weight.dense)
    with pytest.raises(BadInput, match="one position a sample"):
        feature_change(image, torch.eye(2), layer, labels=labels)


def test_labels_of_tokens_are_refused() -> None:
    net, tokens = nn.Sequential(nn.Embedding(5, 4), nn.Tanh(), nn.Linear(4, 5)), torch.arange(6).reshape(2, 3) % 5
    problem = fl.Problem(net, "cross_entropy", (tokens, tokens))
    kept = fl.measure(fl.Lens(problem), "loss")["loss"].value
    assert moved_risk(problem, lambda phi: phi) == pytest.approx(kept)  # each token keeps its own
    with pytest.raises(BadInput, match="the targets must be a tensor with one label per sample"):
        moved_risk(problem, lambda phi: phi, labels=lambda phi: tokens)
    with pytest.raises(BadInput, match="the targets must be a tensor with one label per sample"):
        label_change(problem, lambda phi: tokens, lambda phi: phi)
