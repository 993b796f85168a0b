"""The synthetic features of "Relative Flatness and Generalization", appendix C.1."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flatlens.data.split import Split
from flatlens.errors import BadInput

CLUSTERS = 4
INFORMATIVE = 6
REDUNDANT = 2


@dataclass(frozen=True, eq=False)  # eq would compare tensors
class Mixture:
    """Four equally likely Gaussians, float64: two of each class, in the clusters' order 0, 0, 1, 1."""

    centroids: Tensor  #: (4, 6)
    factors: Tensor  #: (4, 6, 6); the covariance of a cluster is factor @ factor.T
    mixing: Tensor  #: (6, 2); maps the informative features to the redundant ones

    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return features (count, 8) and labels (count,)."""
        cluster = torch.randint(CLUSTERS, (count,), generator=generator)
        noise = torch.randn(count, INFORMATIVE, 1, generator=generator, dtype=torch.float64)
        informative = self.centroids[cluster] + (self.factors[cluster] @ noise).squeeze(-1)
        return torch.cat([informative, informative @ self.mixing], 1), cluster * 2 // CLUSTERS

    def moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the clusters' means (4, 8) and covariances (4, 8, 8) of all features, and their labels (4,)."""
        features = torch.cat([torch.eye(INFORMATIVE, dtype=torch.float64), self.mixing], 1)
        factors = features.T @ self.factors
        return self.centroids @ features, factors @ factors.mT, torch.arange(CLUSTERS) * 2 // CLUSTERS


def mixture(separation: float, generator: torch.Generator) -> Mixture:
    """Draw the four Gaussians.

    The paper says: "we randomly sample 4 cluster centroids from a hypercube and scale them so that their distance
    is c", with "a random covariance matrix for each cluster". Read here as: centroids uniform in [-1, 1]^6, times the
    one number that makes the smallest distance between two of them `separation`; covariances A A' / 6 with A standard
    normal, the identity on average, so that `separation` counts standard deviations; mixing uniform in [-1, 1].
    """
    centroids = _uniform(CLUSTERS, INFORMATIVE, generator)
    factors = torch.randn(CLUSTERS, INFORMATIVE, INFORMATIVE, generator=generator, dtype=torch.float64)
    return Mixture(
        centroids=centroids * (separation / torch.pdist(centroids).min()),
        factors=factors / math.sqrt(INFORMATIVE),
        mixing=_uniform(INFORMATIVE, REDUNDANT, generator),
    )


def clusters(separation: float = 4.0, n: int = 500, test: int = 4500, seed: int = 0) -> Split:
    """Return two classes of two Gaussian clusters each, in 8 features; the last 2 are combinations of the first 6.

    The smallest distance between two clusters' centres is `separation` (see `mixture` for how the paper is read).
    Training and test samples are drawn independently from one mixture. The sizes are the paper's.

    >>> split = clusters(separation=3, n=100, test=50)
    >>> tuple(split.x.shape), tuple(split.test_x.shape), int(torch.linalg.matrix_rank(split.x, rtol=1e-5))
    ((100, 8), (50, 8), 6)

    Raises:
        BadInput: a negative separation, or no samples.
    """
    if not (math.isfinite(separation) and separation >= 0):
        raise BadInput(f"clusters(separation={separation}): a number that is 0 or more is needed")
    if n < 1 or test < 1:
        raise BadInput(f"clusters(n={n}, test={test}): at least 1 sample of each is needed")
    generator = torch.Generator().manual_seed(seed)
    drawn = mixture(separation, generator)
    x, y = drawn.sample(n, generator)
    test_x, test_y = drawn.sample(test, generator)
    return Split(
        name="clusters",
        x=x.to(torch.float32),
        y=y,
        test_x=test_x.to(torch.float32),
        test_y=test_y,
        classes=2,
        description=(
            f"4 Gaussian clusters, two a class, in 6 dimensions, their nearest centres {separation:g} apart, and 2 "
            f"features that are combinations of the 6 (relative2021 C.1); seed {seed}, {n} samples to train on and "
            f"{test} to test"
        ),
    )


def _uniform(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return 2 * torch.rand(rows, columns, generator=generator, dtype=torch.float64) - 1
