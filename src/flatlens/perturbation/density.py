"""How well one part of a sample tells the density of another: kernel density estimates in feature space."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flatlens.errors import BadInput

BANDWIDTHS = ("scott", "relative")


@dataclass(frozen=True, eq=False)
class KernelDensity:
    """p(z) = mean_i N(z; phi_i, diag(h_i^2)), of points phi (n, m) float64.

    `bandwidth`: "scott", h = n^(-1/(m+4)) times each feature's standard deviation; "relative", that of Proposition 12,
    delta ||phi_i|| / sqrt(m) with delta = n^(-1/(m+4)), the same in all directions. Constant features are left out.
    """

    points: Tensor
    widths: Tensor  #: (n, m) or (1, m)

    @classmethod
    def of(cls, phi: Tensor, bandwidth: str) -> KernelDensity:
        """The estimate from these points."""
        if bandwidth not in BANDWIDTHS:
            raise BadInput(f"bandwidth {bandwidth!r}: one of {', '.join(map(repr, BANDWIDTHS))} is needed")
        n, m = phi.shape
        delta = n ** (-1 / (m + 4))
        if bandwidth == "scott":
            widths = delta * phi.std(0, keepdim=True)
        else:
            widths = (delta / math.sqrt(m)) * phi.norm(dim=1, keepdim=True).expand(n, m)
        return cls(phi, widths.clamp(min=1e-12 * float(phi.abs().max().clamp(min=1e-300))))

    def log_density(self, z: Tensor, *, leave_out: bool = False) -> Tensor:
        """log p at z, (k,); with `leave_out` z are the points themselves, and each is left out of its own estimate."""
        n, m = self.points.shape
        logs = []
        for rows in torch.split(z, 256):
            distance = ((rows[:, None] - self.points) / self.widths).square().sum(2)
            logs.append(-0.5 * distance - self.widths.log().sum(1))
        kernels = torch.cat(logs)
        if leave_out:
            kernels = kernels.masked_fill(torch.eye(n, dtype=torch.bool), -math.inf)
        return kernels.logsumexp(1) - math.log(n - leave_out) - m / 2 * math.log(2 * math.pi)


@dataclass(frozen=True, eq=False)
class Mismatch:
    """How two densities differ, seen from the points of both."""

    shift: float  #: int |p - q|, between 0 and 2
    weighted: float  #: int (p - q) l, l what each point is weighed with


def mismatch(a: Tensor, b: Tensor, values_a: Tensor, values_b: Tensor, bandwidth: str) -> Mismatch:
    """Of the kernel densities of two halves of a sample, a and b (n, m).

    The integral is a mean over the points of both under (p + q) / 2, whose weights 2 (p - q) / (p + q) are bounded by 2
    whatever the dimension; a point is left out of its own estimate.
    """
    p, q = KernelDensity.of(a, bandwidth), KernelDensity.of(b, bandwidth)
    at_a = p.log_density(a, leave_out=True), q.log_density(a)
    at_b = p.log_density(b), q.log_density(b, leave_out=True)
    log_p, log_q = (torch.cat(pair) for pair in zip(at_a, at_b, strict=True))
    share = torch.tanh((log_p - log_q) / 2)  # (p - q) / (p + q)
    weight = torch.cat([torch.full((len(a),), 1 / len(a)), torch.full((len(b),), 1 / len(b))]).to(share)
    values = torch.cat([values_a, values_b])
    return Mismatch(float((weight * share.abs()).sum()), float((weight * share * values).sum()))
