"""X16's data sets in feature space: thousands for each class separation, each with a ridge head.

The head and its relative flatness depend on the features only, so nothing is trained or mapped back, and the risk is
computed exactly from the clusters' moments. The gap is that of the half squared error, and that of the 0-1 error.

The features are drawn as appendix C.1 says (`printed`), or as the generator does that the authors' code stores and
calls nowhere (`stored`): centres on corners of a cube, at +-c in each coordinate; factors and the mixing of redundant
features uniform in [-1, 0]; classes alternate; one label in a thousand is drawn anew. Beside it another one is stored
(`second`), which differs in that factors and mixing are uniform in [-1, 1]. With the same random numbers
features are linear in the separation, so that one draw serves all separations. `folds`: ten data sets in a row are of
one distribution, drawn as C.1 says, as if 5,000 samples were cut into ten folds of 500.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from flatlens.data.synthetic import CLUSTERS, INFORMATIVE, REDUNDANT, Mixture, mixture
from flatlens.training import Ridge

Generator: TypeAlias = Literal["printed", "stored", "second", "folds"]
FOLDS = 10
"""Data sets of one distribution, by the generator `folds`."""
FLIPPED = 0.001
"""Share of labels that the stored generator draws anew."""
SEEN_COLUMNS = (
    "relative_flatness_ggn",
    "relative_flatness_ggn(normalized='variance')",
    "generalisation_gap",
    "gap of the 0-1 error",
    "relative_flatness_ggn(normalized='std')",
    "gap of the squared error on labels 0 and 1",
)
"""Relative flatness, the same of features divided by their variance, the gaps of the half squared error and of the 0-1
error, relative flatness of features divided by their deviation, and the gap of the notebook of Fig. 4: of the squared
error on labels 0 and 1 of a head that was trained on -1 and 1."""


@dataclass(frozen=True, eq=False)  # eq would compare tensors
class Draw:
    """Random numbers of one data set, or of several stacked; features at separation c are `around + c apart`."""

    around: Tensor  #: (n, 8)
    apart: Tensor  #: (n, 8)
    labels: Tensor  #: (n,)
    means: Tensor  #: (4, 8) of the clusters at separation 1
    covariances: Tensor  #: (4, 8, 8)
    classes: Tensor  #: (4,)
    anew: Tensor  #: share of labels that are drawn anew


def printed(n: int, seed: int) -> Draw:
    """Draw as in `mixture`, the generator's numbers the same for every separation."""

    def at(separation: float) -> tuple[Mixture, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        drawn = mixture(separation, generator)
        return drawn, *drawn.sample(n, generator)

    (drawn, one, labels), (_, two, _) = at(1.0), at(2.0)
    return Draw(2 * one - two, two - one, labels, *drawn.moments(), torch.zeros(()))


def stored(n: int, seed: int, largest: float = 0.0) -> Draw:
    """Draw as the generator that the authors' code stores; a cluster for each sample is drawn, too.

    Factors and mixing are uniform in [-1, largest].
    """
    generator = torch.Generator().manual_seed(seed)

    def below(*shape: int) -> Tensor:
        return (1 + largest) * torch.rand(*shape, generator=generator, dtype=torch.float64) - 1

    corners = torch.randperm(2**INFORMATIVE, generator=generator)[:CLUSTERS]
    bits = (corners[:, None] >> torch.arange(INFORMATIVE)) & 1
    drawn = Mixture(
        2.0 * bits.double() - 1, below(CLUSTERS, INFORMATIVE, INFORMATIVE).mT, below(INFORMATIVE, REDUNDANT)
    )
    means, covariances, _ = drawn.moments()
    cluster = torch.randint(CLUSTERS, (n,), generator=generator)
    noise = torch.randn(n, INFORMATIVE, 1, generator=generator, dtype=torch.float64)
    spread = (drawn.factors[cluster] @ noise).squeeze(-1)
    anew = torch.rand(n, generator=generator) < FLIPPED
    labels = torch.where(anew, torch.randint(2, (n,), generator=generator), cluster % 2)
    around = torch.cat([spread, spread @ drawn.mixing], 1)
    return Draw(around, means[cluster], labels, means, covariances, torch.arange(CLUSTERS) % 2, torch.tensor(FLIPPED))


def in_folds(n: int, seed: int) -> list[Draw]:
    """Draw ten times n samples of one distribution, and cut them into ten data sets."""
    whole = printed(FOLDS * n, seed)
    parts = (values.chunk(FOLDS) for values in (whole.around, whole.apart, whole.labels))
    return [replace(whole, around=around, apart=apart, labels=y) for around, apart, y in zip(*parts, strict=True)]


def measured(separations: tuple[float, ...], n: int, seeds: range, generator: Generator = "printed") -> Tensor:
    """Return SEEN_COLUMNS of data sets with n training samples: (separations, seeds, 6)."""
    other = partial(stored, largest=float(generator == "second"))
    if generator == "folds":
        draws = [one for seed in seeds if seed % FOLDS == 0 for one in in_folds(n, seed)]
    else:
        draws = [printed(n, seed) if generator == "printed" else other(n, seed) for seed in seeds]
    stacked = Draw(*(torch.stack([getattr(one, field.name) for one in draws]) for field in fields(Draw)))
    return torch.stack([_at(stacked, separation) for separation in separations])


def _at(draw: Draw, separation: float) -> Tensor:
    phi, targets = draw.around + separation * draw.apart, torch.eye(2, dtype=torch.float64)[draw.labels]
    # The head: ridge regression on one-hot labels, without a penalty on the bias
    centre, level = phi.mean(1, keepdim=True), targets.mean(1, keepdim=True)
    apart = phi - centre
    gram = apart.mT @ apart + Ridge().penalty * torch.eye(phi.shape[2], dtype=torch.float64)
    W = torch.linalg.solve(gram, apart.mT @ (targets - level)).mT
    b = level.squeeze(1) - (W @ centre.mT).squeeze(2)
    # Definition 3, where the Hessian is the mean of phi phi' in each output: ||W||^2 mean ||phi||^2
    variance = phi.var(1, keepdim=True, correction=0)
    kappas = [
        w.square().sum((1, 2)) * features.square().sum(2).mean(1)
        for w, features in ((W, phi), (W * variance, phi / variance), (W * variance.sqrt(), phi / variance.sqrt()))
    ]
    # The risks of the training samples
    outputs = phi @ W.mT + b[:, None]
    loss = (outputs - targets).square().sum(2).mean(1) / 2
    mistaken = (outputs.argmax(2) != draw.labels).double().mean(1)
    coded = (2 * outputs[:, :, 1] - 1 - draw.labels).square().mean(1)  # one output, of a head trained on -1 and 1
    # The exact ones, E ||W phi + b - y||^2 / 2 and the probability of a wrong class; both gaps are their differences
    at = separation * draw.means @ W.mT + b[:, None]  # (B, 4, 2)
    spread = torch.einsum("bom,bkmj,boj->bk", W, draw.covariances, W)
    units = torch.eye(2, dtype=torch.float64)
    right, other = ((at - units[y]).square().sum(2) + spread for y in (draw.classes, 1 - draw.classes))
    d = W[:, 1] - W[:, 0]  # the class is 1 where d phi + b_1 > b_0
    deviation = torch.einsum("bm,bkmj,bj->bk", d, draw.covariances, d).sqrt()
    one = torch.special.ndtr((at[:, :, 1] - at[:, :, 0]) / deviation)
    wrong = torch.where(draw.classes == 1, 1 - one, one)
    changed = draw.anew[:, None] / 2  # half of the labels that are drawn anew are the other one
    squared = ((1 - changed) * right + changed * other).mean(1) / 2
    error = ((1 - changed) * wrong + changed * (1 - wrong)).mean(1)
    of_one = torch.einsum("bm,bkmj,bj->bk", W[:, 1], draw.covariances, W[:, 1])
    right, other = ((2 * at[:, :, 1] - 1 - y).square() + 4 * of_one for y in (draw.classes, 1 - draw.classes))
    risk = ((1 - changed) * right + changed * other).mean(1)
    return torch.stack([*kappas[:2], squared - loss, error - mistaken, kappas[2], risk - coded], 1)
