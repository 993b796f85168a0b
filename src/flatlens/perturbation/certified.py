"""Certified upper bounds of the variation of the input-output Jacobian in a ball around every sample.

The Jacobian of a chain f = W_L a(... a(W_1 x + b_1)) + b_L is W_L D_{L-1} ... D_1 W_1, D_l = diag(a'(z_l)). Intervals
over a ball are carried through the chain: first of z_l, then of the activations' slopes, then of each entry of dz_l/dx
and df/dh_l. They are in float64, and each is widened by `MARGIN` times the absolute sum of the terms added: enough for
the rounding of sums of about 10^5 terms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatlens.estimate import Progress
from flatlens.perturbation.chain import Chain, read_chain
from flatlens.problem import Problem

MARGIN = 1e-11  #: relative to the sum of the absolute values of a sum's terms


@dataclass(frozen=True, eq=False)
class Box:
    """Matrices (n, r, c) with entries within `radius` of `centre`, and with spectral norms up to `cap`, (n,)."""

    centre: Tensor
    radius: Tensor
    cap: Tensor

    @classmethod
    def of(cls, W: Tensor, n: int) -> Box:
        """Return one matrix, repeated for each of n samples."""
        return cls(W.expand(n, *W.shape), torch.zeros_like(W).expand(n, *W.shape), norms(W[None]).expand(n))

    @property
    def largest(self) -> Tensor:
        """Return an upper bound of each entry's absolute value."""
        return self.centre.abs() + self.radius

    def rows_times(self, low: Tensor, high: Tensor) -> Box:
        """Return the box with row k times a number in [low_k, high_k], (n, r) each."""
        return self._times(low.unsqueeze(2), high.unsqueeze(2))

    def columns_times(self, low: Tensor, high: Tensor) -> Box:
        """Return the box with column k times a number in [low_k, high_k], (n, c) each."""
        return self._times(low.unsqueeze(1), high.unsqueeze(1))

    def _times(self, low: Tensor, high: Tensor) -> Box:
        middle, spread = (high + low) / 2, (high - low) / 2
        most = torch.maximum(low.abs(), high.abs()).flatten(1).max(1).values
        return Box(self.centre * middle, self.radius * middle.abs() + self.largest * spread, self.cap * most)

    def before(self, W: Tensor) -> Box:
        """Return W times the box."""
        return Box(W @ self.centre, W.abs() @ self._blurred, (1 + MARGIN) * norms(W[None]) * self.norm())

    def after(self, W: Tensor) -> Box:
        """Return the box times W."""
        return Box(self.centre @ W, self._blurred @ W.abs(), (1 + MARGIN) * norms(W[None]) * self.norm())

    @property
    def _blurred(self) -> Tensor:
        """Return the radius, widened by the rounding of a product."""
        return self.radius + MARGIN * self.centre.abs()

    def norm(self) -> Tensor:
        """Return an upper bound of the spectral norms in the box, (n,)."""
        entrywise = torch.minimum(norms(self.centre) + norms(self.radius), norms(self.largest))
        return torch.minimum(entrywise, self.cap)


def certified_variation(
    problem: Problem, model: nn.Module, delta: float, *, progress: Progress | None = None
) -> Tensor:
    """Return upper bounds of sup ||Jf(u) - Jf(v)||_2 over the balls of radius `delta` around the samples, (n,) float64.

    sharpening Eq. (5), for the Jacobian. It is 0 if no activation's slope varies in the ball. Raises `Refused` if the
    network is not a chain of affine maps and activations with known slopes, or if its matrices exceed the memory.

    >>> net = nn.Linear(2, 1)
    >>> problem = Problem(net, "mse", (torch.ones(3, 2), torch.zeros(3, 1)))
    >>> certified_variation(problem, net, 0.5).tolist()
    [0.0, 0.0, 0.0]
    """
    parts: list[Tensor] = []
    with problem.measuring(model):
        chain = read_chain(problem, model)
        sizes = [len(chain.maps[0][0].mT), *(len(b) for _, b in chain.maps)]
        held = 8 * 8 * sum(a * (sizes[0] + sizes[-1]) for a in sizes)
        for raw in problem.data.chunks(max(1, min(1024, problem.memory // 2 // held))):
            x = problem.place(raw)[0].to(torch.float64).flatten(1)
            with torch.no_grad():
                parts.append(variation_bound(chain, x, delta).cpu())
            if progress is not None:
                progress("certified variation", sum(map(len, parts)), problem.n)
    return torch.cat(parts)


def variation_bound(chain: Chain, x: Tensor, delta: float) -> Tensor:
    """Return the smallest of three bounds, (n,).

    With s_l the spread of layer l's slopes, B_l = dz_l/dx, A_l = df/dh_l:

        (a)  || high - low ||_2 of the entries of Jf
        (b)  sum_l || A_l s_l^1/2 ||_2 || s_l^1/2 B_l ||_2
        (c)  2 sup || Jf ||_2

    (b) holds because Jf(u) - Jf(v) telescopes into the sum over l of A_l(u) (D_l(u) - D_l(v)) B_l(v).
    """
    slopes, below = _from_below(chain, x, delta)
    above = _from_above(chain, slopes)
    J = below[-1]
    entrywise, twice = 2 * norms(J.radius), 2 * J.norm()
    telescoped = torch.zeros_like(twice)
    for (low, high), A, B in zip(slopes, above, below, strict=False):
        root = (high - low).sqrt()
        telescoped = telescoped + A.columns_times(root, root).norm() * B.rows_times(root, root).norm()
    return (1 + MARGIN) * torch.stack([entrywise, telescoped, twice]).min(0).values


def _from_below(chain: Chain, x: Tensor, delta: float) -> tuple[list[tuple[Tensor, Tensor]], list[Box]]:
    """Return the activations' least and largest slopes, (n, m_l) each, and boxes of dz_l/dx, (n, m_l, M).

    The last box is that of Jf. Each z_l is bounded twice: by the values of the layer before, and by delta times the
    norm of each row of dz_l/dx, which is exact for z_1.
    """
    slopes: list[tuple[Tensor, Tensor]] = []
    below = [Box.of(chain.maps[0][0], len(x))]
    at, least, most = x, x - delta, x + delta
    for (W, b), (ahead, _), known in zip(chain.maps, chain.maps[1:], chain.activations, strict=False):
        middle, reach = (most + least) / 2, delta * torch.minimum(below[-1].largest.norm(dim=2), below[-1].cap[:, None])
        rounding = MARGIN * (b.abs() + torch.maximum(least.abs(), most.abs()) @ W.abs().mT)
        at, around = at @ W.mT + b, middle @ W.mT + b
        spread = (most - least) / 2 @ W.abs().mT
        low = torch.maximum(at - reach, around - spread) - rounding
        high = torch.minimum(at + reach, around + spread) + rounding
        slopes.append(known.slopes(low, high))
        at, (least, most) = known.value(at), known.values(low, high)
        below.append(below[-1].rows_times(*slopes[-1]).before(ahead))
    return slopes, below


def _from_above(chain: Chain, slopes: list[tuple[Tensor, Tensor]]) -> list[Box]:
    """Return boxes of df/dh_l, (n, N, m_l), for the output h_l of each activation."""
    boxes = [Box.of(chain.maps[-1][0], len(slopes[0][0]))] if slopes else []
    for (low, high), (W, _) in zip(slopes[:0:-1], chain.maps[-2:0:-1], strict=True):
        boxes.append(boxes[-1].columns_times(low, high).after(W))
    return boxes[::-1]


def norms(A: Tensor) -> Tensor:
    """Return ||A||_2 of matrices (n, r, c), an upper bound except for rounding."""
    G = A @ A.mT if A.shape[1] <= A.shape[2] else A.mT @ A
    largest: Tensor = torch.linalg.eigvalsh(G)[:, -1]
    return largest.clamp(min=0).sqrt()
