"""Mixtures of Gaussians: smooth densities that are fully known."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from flatlens.distributions.distribution import Distribution, Rule, checked, drawable, points
from flatlens.errors import BadInput
from flatlens.estimate import Estimate, undefined


@final
@dataclass(frozen=True, eq=False)
class GaussianMixture(Distribution):
    """p(x) = sum_k w_k N(x; mu_k, Sigma_k): each sample comes from one of k normal distributions.

    >>> normal = GaussianMixture(torch.zeros(1, 2), torch.eye(2)[None], torch.ones(1))
    >>> (normal.log_density(torch.zeros(1, 2)) + math.log(2 * math.pi)).abs().item() < 1e-15
    True
    """

    support_is_convex = True
    means: Tensor  #: (k, m)
    covariances: Tensor  #: (k, m, m), symmetric and positive definite
    weights: Tensor  #: (k,), not negative, with sum 1
    _factors: Tensor = field(init=False, repr=False)  #: Cholesky factors, (k, m, m): Sigma = L L^T

    def __post_init__(self) -> None:
        for name in ("means", "covariances", "weights"):
            x = getattr(self, name)
            if not isinstance(x, Tensor) or x.is_complex() or not bool(torch.isfinite(x).all()):
                raise BadInput(f"GaussianMixture({name}=...): expected a real tensor with finite entries")
            object.__setattr__(self, name, x.detach().to(torch.float64, copy=True))
        if self.means.ndim != 2 or 0 in self.means.shape:
            got = (*self.means.shape,)
            raise BadInput(f"expected a tensor of shape (k, m), got {got}", argument="means", call="GaussianMixture")
        k, m = self.means.shape
        for name, shape in (("covariances", (k, m, m)), ("weights", (k,))):
            if (got := (*getattr(self, name).shape,)) != shape:
                raise BadInput(f"GaussianMixture({name}=...): expected a tensor of shape {shape}, got {got}")
        total = float(self.weights.sum())
        if float(self.weights.min()) < 0 or abs(total - 1) > 1e-6:  # rounding of float32
            needed = f"weights must not be negative, and must sum to 1, not {total:.9g}"
            raise BadInput(needed, argument="weights", call="GaussianMixture")
        object.__setattr__(self, "weights", self.weights / total)
        # L with Sigma = L L^T, of symmetric and positive definite matrices
        covariances = self.covariances
        uneven = (covariances - covariances.mT).abs() > 1e-6 * covariances.abs().amax((1, 2), keepdim=True)  # float32's
        for number in uneven.any(2).any(1).nonzero().flatten().tolist():
            raise BadInput(f"matrix {number} is not symmetric", argument="covariances", call="GaussianMixture")
        L, failed = torch.linalg.cholesky_ex((covariances + covariances.mT) / 2)
        for number in failed.nonzero().flatten().tolist():
            least = f"matrix {number} has the eigenvalue {float(torch.linalg.eigvalsh(covariances[number])[0]):.3g}"
            needed = "it must be positive definite: add a small multiple of the identity"
            raise BadInput(f"GaussianMixture(covariances=...): {least}, {needed}")
        object.__setattr__(self, "_factors", L)

    @property
    def dimension(self) -> int:
        """Return the m of R^m."""
        return self.means.shape[1]

    @property
    def diameter(self) -> float:
        """Return infinity: the support is all of R^m."""
        return math.inf

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Return independent samples, (n, m) float64."""
        return self.sample_labelled(n, generator)[0]

    def sample_labelled(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return independent samples, (n, m) float64, and the component that each came from, (n,) int64."""
        drawable(n, generator, "GaussianMixture.sample")
        at = generator.device
        labels = torch.multinomial(self.weights.to(at), n, replacement=True, generator=generator)
        noise = torch.randn(n, self.dimension, generator=generator, dtype=torch.float64, device=at)
        x = self.means.to(at)[labels] + (self._factors.to(at)[labels] @ noise[:, :, None])[:, :, 0]
        return x, labels

    def log_density(self, x: Tensor) -> Tensor:
        """Return log p(x), (n,), with respect to Lebesgue's measure on R^m; differentiable in x any number of times."""
        x = points(x, self.dimension, "GaussianMixture.log_density(x)")
        means, L, weights = (t.to(x.device) for t in (self.means, self._factors, self.weights))
        off = (x - means[:, None]).transpose(1, 2)  # (k, m, n)
        z = torch.linalg.solve_triangular(L, off, upper=False)
        log_volume = L.diagonal(dim1=1, dim2=2).log().sum(1) + self.dimension / 2 * math.log(2 * math.pi)
        log_p: Tensor = torch.logsumexp((weights.log() - log_volume)[:, None] - z.square().sum(1) / 2, 0)
        return log_p

    def covering_radius(self, samples: int, failure: float, *, rule: Rule = "exact") -> Estimate:
        """Return an undefined estimate: no number of samples covers R^m within any distance."""
        checked(samples, failure, rule)
        unbounded = "the support of a Gaussian mixture is unbounded"
        return undefined(f"{unbounded}: no finite sample covers it within any distance")
