"""Kernel density estimates in feature space, and the mismatch of two parts of a sample."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BANDWIDTHS = ("scott", "relative")
ROWS = 2**22  #: kernels evaluated together


@dataclass(frozen=True, eq=False)
class KernelDensity:
    """A kernel density p(z) = mean_i N(z; phi_i, (width_i scale)^2) of points phi (n, m) float64."""

    points: Tensor
    scale: Tensor  #: unit of each feature, (m,)
    width: Tensor  #: width of each point's kernel in these units, (n,)

    def log_density(self, z: Tensor, *, leave_out: bool = False) -> Tensor:
        """Return log p at z, (k,); with `leave_out`, z are the points themselves, each left out of its own estimate."""
        n, m = self.points.shape
        known, logs, done = self.points / self.scale, [], 0
        for rows in torch.split(z / self.scale, max(1, ROWS // n)):
            kernels = -0.5 * (torch.cdist(rows, known) / self.width).square() - m * self.width.log()
            if leave_out:
                kernels[range(len(rows)), range(done, done + len(rows))] = -math.inf
            logs.append(kernels.logsumexp(1))
            done += len(rows)
        constant = math.log(n - leave_out) + m / 2 * math.log(2 * math.pi) + float(self.scale.log().sum())
        return torch.cat(logs) - constant


def units(phi: Tensor, bandwidth: str) -> Tensor:
    """Return the unit of each feature for the kernels, (m,): the standard deviation under "scott", else 1."""
    return phi.std(0) if bandwidth == "scott" else torch.ones_like(phi[0])


def kernel_density(phi: Tensor, bandwidth: str, scale: Tensor) -> KernelDensity:
    """Return the kernel density of some points.

    Widths are delta = n^(-1/(m+4)) under "scott"; under "relative" those of Proposition 12, delta ||phi_i|| / sqrt(m).
    """
    n, m = phi.shape
    delta = n ** (-1 / (m + 4))
    if bandwidth == "scott":
        return KernelDensity(phi, scale, torch.full((n,), delta, dtype=phi.dtype))
    lengths = phi.norm(dim=1)
    return KernelDensity(phi, scale, (delta / math.sqrt(m)) * lengths.clamp(min=1e-12 * float(lengths.max())))


@dataclass(frozen=True, eq=False)
class Mismatch:
    """The difference of two densities, estimated at the points of both."""

    shift: float  #: int |p - q|, between 0 and 2
    weighted: float  #: int (p - q) l, l the weight of each point


def mismatch(a: Tensor, b: Tensor, values_a: Tensor, values_b: Tensor, bandwidth: str) -> Mismatch:
    """Return the mismatch of the kernel densities of two parts of a sample, a and b (n, m), in units of both together.

    The integral is a mean over the points of both under (p + q) / 2, whose weights 2 (p - q) / (p + q) are bounded by 2
    whatever the dimension; a point is left out of its own estimate.
    """
    scale = units(torch.cat([a, b]), bandwidth)  # from both: a feature may be constant in one part
    p, q = (kernel_density(part, bandwidth, scale) for part in (a, b))
    at_a = p.log_density(a, leave_out=True), q.log_density(a)
    at_b = p.log_density(b), q.log_density(b, leave_out=True)
    log_p, log_q = (torch.cat(pair) for pair in zip(at_a, at_b, strict=True))
    share = torch.tanh((log_p - log_q) / 2)  # (p - q) / (p + q)
    weight = torch.cat([torch.full((len(a),), 1 / len(a)), torch.full((len(b),), 1 / len(b))]).to(share)
    values = torch.cat([values_a, values_b])
    return Mismatch(float((weight * share.abs()).sum()), float((weight * share * values).sum()))
