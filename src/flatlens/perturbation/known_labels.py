"""The risk at moved features, with the labels kept or given by a known function of the features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatlens.errors import BadInput
from flatlens.perturbation.features import Move, RotatedFeatures, placed, with_moved_features
from flatlens.perturbation.labels import Labels, relabelled
from flatlens.problem import Problem


def feature_change(
    problem: Problem,
    A: Tensor,
    layer: str | None = None,
    *,
    labels: Labels | None = None,
    model: nn.Module | None = None,
) -> float:
    """Return E_F(f, S, A), the change of the risk under phi -> (I + A) phi at a layer, for a given A, (m, m).

    Source: relative2021 Eq. 4.

    Args:
        problem: the problem.
        A: m is the number of the layer's inputs; for a convolution, input channels / groups x kernel size.
        layer: the last linear layer if None.
        labels: the label function y[phi], from features (k, m) to targets in the data's form. The layer must be applied
            once per sample. None keeps each sample's label.
        model: the network; the problem's own if None.

    >>> net = nn.Linear(2, 1, bias=False)
    >>> with torch.no_grad():
    ...     _ = net.weight.fill_(1.0)
    >>> problem = Problem(net, "half_squared_error", (torch.ones(1, 2), torch.zeros(1, 1)))
    >>> feature_change(problem, torch.eye(2))  # f doubles: (4^2 - 2^2) / 2
    6.0
    >>> feature_change(problem, torch.eye(2), labels=lambda phi: phi[:, :1] - 1)  # y = 0 at (1, 1), 1 at (2, 2)
    2.5
    """
    model, _, weight = placed(problem, layer, model, "feature_change", by_noise=False)
    if labels is not None and not weight.dense:
        raise BadInput(f"feature_change(layer={weight.layer!r}): labels= needs one position a sample")
    features = RotatedFeatures(problem, model, weight)
    A = torch.as_tensor(A)
    if A.shape != (features.m, features.m):
        raise BadInput(f"feature_change(A=...): shape {(features.m, features.m)} is needed, got {tuple(A.shape)}")
    A = A.detach().to("cpu", torch.float64)
    if labels is None:
        return features.change(features.W @ A)
    return moved_risk(problem, lambda phi: phi + phi @ A.to(phi).mT, layer, labels=labels, model=model) - features.risk


def moved_risk(
    problem: Problem,
    move: Move,
    layer: str | None = None,
    *,
    labels: Labels | None = None,
    model: nn.Module | None = None,
) -> float:
    """Return the risk at moved features: mean_i l(psi(phi_i'), y[phi_i']), phi' = move(phi) at a layer.

    `move` maps features, samples first, to moved ones; `noise(delta, 1.0, generator, law)` draws those of Proposition
    2. `labels` and `layer` are as in `feature_change`. By relative2021 Eq. 3 and 5, E_Rep is the risk of the
    distribution minus this number, and E_F is this number minus the risk of the sample.
    """
    model, layout, weight = placed(problem, layer, model, "moved_risk", by_noise=True)
    if labels is None:
        return with_moved_features(problem, model, layout, weight, move).risk
    return float(relabelled(problem, model, layout, weight, labels, move).told.mean())


def label_change(
    problem: Problem, labels: Labels, move: Move, layer: str | None = None, *, model: nn.Module | None = None
) -> float:
    """Return Definition 9's left side for a known label function: mean_i |l(f_i', y[phi_i']) - l(f_i', y_i)|.

    f' are the outputs at phi' = move(phi). The arguments are those of `moved_risk`. Source: relative2021 Def. 9.
    """
    model, layout, weight = placed(problem, layer, model, "label_change", by_noise=True)
    found = relabelled(problem, model, layout, weight, labels, move)
    return float((found.told - found.kept).abs().mean())
