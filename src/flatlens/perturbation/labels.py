"""Labels near the samples: whether they are locally constant, as the theory of feature robustness assumes.

The label y[phi] of a point in feature space is given by a function of the features, or guessed from the nearest
sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatlens.errors import BadInput
from flatlens.grams import Plan, Weight
from flatlens.grams.record import record
from flatlens.perturbation.features import Move, RotatedFeatures, moved, placed, with_moved_features
from flatlens.problem import Batch, Problem
from flatlens.problem.batches import size
from flatlens.problem.eval_context import device_of

Labels = Callable[[Tensor], Tensor]
"""Maps features (k, m) to targets (k, ...): y[phi]."""


@dataclass(frozen=True, eq=False)
class SeenFeatures:
    """The features that a layer reads on the data, with their targets; ignored samples are left out."""

    phi: Tensor  #: (n, m) float64
    y: Tensor  #: (n, ...)
    counted: Tensor  #: true for each sample of the data that is kept, (all samples,) bool

    def nearest(self, at: Tensor) -> Tensor:
        """Return the target of the nearest sample to each point, (k, m) -> (k, ...)."""
        return self.y[torch.cdist(at.to(self.phi), self.phi).argmin(1)]


def seen(problem: Problem, model: nn.Module, plan: Plan, weight: Weight, *, held_out: bool = False) -> SeenFeatures:
    """Return the features and targets from one forward over the data, or over the held-out data, too."""
    axis = plan.batch_axis[weight.layer]
    features, targets, counted = [], [], []
    with problem.measuring(model):
        for data in (problem.data, *([problem.test] if held_out and problem.test is not None else [])):
            for raw in data.chunks(256):
                with record(model) as tape:
                    f, y = problem.run(model, problem.place(raw))
                _require_labels(f, y)
                x = tape.linear[weight.layer].x.detach().movedim(axis, 0)
                features.append(x.reshape(len(f), -1).to(torch.float64))
                targets.append(y)
                counted.append(problem.loss.mass(f, y) > 0)
    counts = torch.cat(counted)
    return SeenFeatures(torch.cat(features)[counts], torch.cat(targets)[counts], counts)


def _require_labels(f: Tensor, y: object) -> None:
    if not isinstance(y, Tensor) or len(y) != len(f):
        raise BadInput("the targets must be a tensor with one label per sample", argument="data")


@dataclass(frozen=True, eq=False)
class Relabelled:
    """The losses at moved features phi', f' the outputs there; scaled so that their means are risks, (n,) float64 each.

    Ignored samples have losses of 0, and NaN in `changed`.
    """

    kept: Tensor  #: l(f', y_i), with each sample's own label
    told: Tensor  #: l(f', y[phi']), with the label at the moved features
    changed: Tensor  #: whether the two labels differ


def relabelled(
    problem: Problem, model: nn.Module, plan: Plan, weight: Weight, labels: Labels, move: Move
) -> Relabelled:
    """Return the losses at the features that `move` returns, with the samples' own labels and with those there."""
    kept: list[Tensor] = []
    other: list[Tensor] = []
    changed, mass = [], 0.0
    with problem.measuring(model), torch.no_grad():
        for raw in problem.batches(256):
            there: list[Tensor] = []

            def keep(phi: Tensor, there: list[Tensor] = there) -> Tensor:
                there.append(move(phi))
                return there[-1]

            with moved(weight, plan, keep):
                f, y = problem.run(model, problem.place(raw))
            _require_labels(f, y)
            f = f.to(torch.float64)
            told = labels(phi := there[0].reshape(len(f), -1).to(torch.float64))
            if not isinstance(told, Tensor) or told.shape != y.shape:
                got = f"{(*told.shape,)}" if isinstance(told, Tensor) else type(told).__name__
                raise BadInput(
                    f"labels(features of shape {(*phi.shape,)}): targets as the data has them, {(*y.shape,)}, are "
                    f"needed, got {got}"
                )
            told = told.to(y)
            each = problem.loss.mass(f, y)
            for losses, label in ((kept, y), (other, told)):
                losses.append(torch.where(each > 0, problem.loss.values(f, label), 0.0))
            differs = (told != y).reshape(len(f), -1).any(1).to(torch.float64)
            changed.append(torch.where(each > 0, differs, math.nan))
            mass += float(each.sum())
    scale = sum(len(part) for part in kept) / mass
    return Relabelled(torch.cat(kept).cpu() * scale, torch.cat(other).cpu() * scale, torch.cat(changed).cpu())


@dataclass(frozen=True, eq=False)
class LabelTerms:
    """The terms of gamma_i = l(f(phi_i + delta A phi_i), y[phi_i + delta A phi_i]) in delta, each (n,) float64.

    First order: gamma' = weights + labels; no measure of flatness contains the term `labels`. Second order: gamma'' =
    flatness + labels_squared + labels_bending + 2 mixed.

    >>> import torch, flatlens as fl
    >>> from flatlens.perturbation import label_change_terms
    >>> net = torch.nn.Linear(3, 1, dtype=torch.float64)
    >>> problem = fl.Problem(net, "half_squared_error", (torch.ones(4, 3).double(), torch.zeros(4, 1).double()))
    >>> label_change_terms(problem, lambda x: x[:, :1], torch.eye(3).double()).labels.shape
    torch.Size([4])
    """

    weights: Tensor  #: l_w . (w A)
    labels: Tensor  #: l_y . (y_x A phi)
    flatness: Tensor  #: (w A)^T l_ww (w A)
    labels_squared: Tensor  #: (y_x A phi)^T l_yy (y_x A phi)
    labels_bending: Tensor  #: sum_c l_yc (A phi)^T (y_c)_xx (A phi)
    mixed: Tensor  #: (y_x A phi)^T l_yw (w A)


def label_change_terms(
    problem: Problem, labels: Labels, A: Tensor, layer: str | None = None, *, model: nn.Module | None = None
) -> LabelTerms:
    """Return Appendix B's terms for a label function that is smooth in the features.

    `labels`: features (n, m) -> targets, differentiable; the loss must be differentiable in them, too (class
    probabilities, regression targets). `A`: (m, m). `layer`: the last linear one if None; the paper has the first.
    Source: relative2021 Eq. 8-11.
    """
    model, plan, weight = placed(problem, layer, model, "label_change_terms", by_noise=True)
    with problem.measuring(model):
        parts = [_terms(problem, model, plan, weight, labels, A, raw) for raw in problem.batches(256)]
    return LabelTerms(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _terms(
    problem: Problem, model: nn.Module, plan: Plan, weight: Weight, labels: Labels, A: Tensor, raw: Batch
) -> tuple[Tensor, ...]:
    """Return the terms of one chunk: outputs at phi + a A phi, labels at phi + b A phi, c along their derivative."""
    batch = problem.place(raw)
    read: list[Tensor] = []
    a = torch.zeros(size(batch), dtype=torch.float64, device=device_of(model), requires_grad=True)
    b, c = (torch.zeros_like(a, requires_grad=True) for _ in range(2))

    def along(phi: Tensor) -> Tensor:
        if A.shape != (phi[0].numel(),) * 2:
            raise BadInput(f"label_change_terms(A=...): shape {(phi[0].numel(),) * 2} is needed, got {tuple(A.shape)}")
        flat = phi.flatten(1)
        read.append(flat.detach().to(torch.float64))
        return (flat + a.to(flat)[:, None] * (flat @ A.to(flat).T)).reshape(phi.shape)

    with moved(weight, plan, along):
        f, y = problem.run(model, batch)
    _require_labels(f, y)
    step = read[0] @ A.to(read[0]).T
    told = labels(read[0] + b[:, None] * step)
    # y + c y_x step: the labels without their second derivative
    y_here, y_along = torch.func.jvp(labels, (read[0],), (step,))  # type: ignore[misc]
    straight = y_here.detach() + c.reshape(-1, *[1] * (y_here.ndim - 1)) * y_along.detach()
    loss = problem.loss.values
    f = f.to(torch.float64)
    by_labels, by_slope = loss(f, told), loss(f, straight)
    first = _slope(by_labels, a), _slope(by_labels, b)
    bent = _slope(first[1], b), _slope(_slope(by_slope, c), c)
    flat = _slope(first[0], a), _slope(first[0], b)
    found = (first[0], first[1], flat[0], bent[1], bent[0] - bent[1], flat[1])
    return tuple(term.detach().cpu() for term in found)


def _slope(values: Tensor, at: Tensor) -> Tensor:
    """Return d values_i / d at_i, (n,); zeros if nothing depends on it."""
    if not values.requires_grad:
        return torch.zeros_like(at)
    (g,) = torch.autograd.grad(values.sum(), at, create_graph=True, allow_unused=True)
    return torch.zeros_like(at) if g is None else g


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
    model, plan, weight = placed(problem, layer, model, "moved_risk", by_noise=True)
    if labels is None:
        return with_moved_features(problem, model, plan, weight, move).risk
    return float(relabelled(problem, model, plan, weight, labels, move).told.mean())


def label_change(
    problem: Problem, labels: Labels, move: Move, layer: str | None = None, *, model: nn.Module | None = None
) -> float:
    """Return Definition 9's left side for a known label function: mean_i |l(f_i', y[phi_i']) - l(f_i', y_i)|.

    f' are the outputs at phi' = move(phi). The arguments are those of `moved_risk`. Source: relative2021 Def. 9.
    """
    model, plan, weight = placed(problem, layer, model, "label_change", by_noise=True)
    found = relabelled(problem, model, plan, weight, labels, move)
    return float((found.told - found.kept).abs().mean())
