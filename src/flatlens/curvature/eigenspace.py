"""The space of the leading eigenvectors, with multiplicities: what lies in it, and how far it is another one's.

For the projection P onto the space that was found, and P' onto the true one, Davis and Kahan's theorem gives
||sin Theta||_F <= ||A V^T - V^T diag(values)||_F / gap, the gap being that between the last value and the bound on all
others. A share of a vector changes by at most ||P - P'|| = ||sin Theta||, and tr(P Q), for a projection Q of rank r, by
at most the sum of the positive eigenvalues of P - P', which is at most sqrt(k) ||sin Theta||_F.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flatlens.curvature.krylov import Eigenpairs
from flatlens.curvature.leading import SLACK, Wanted, with_multiplicity
from flatlens.curvature.operators import Operator
from flatlens.curvature.space import Space, module_of
from flatlens.errors import BadInput
from flatlens.estimate import Estimate, Progress, undefined
from flatlens.memory import warn_of


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Eigenspace(Eigenpairs):
    """The k leading eigenvalues of an operator and their eigenvectors, each as often as it occurs.

    `converged` says that every residual met the tolerance and that, with probability 99.9%, no other eigenvalue exceeds
    `others`. Where `others` is below the last value, no further copy of it exists.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(3, 2, dtype=torch.float64)
    >>> data = (torch.eye(3, dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64))
    >>> H = fl.curvature.Hessian(fl.Problem(net, "half_squared_error", data))
    >>> space = eigenspace(H, 1)
    >>> space.extended, [round(float(value), 6) for value in space.values]  # one for each output
    (True, [1.333333, 1.333333])
    >>> round(space.share({"bias": torch.ones(2)}).value, 6)
    0.75
    """

    k: int  #: the number asked for; `values` may have more, or fewer where the others are 0
    by: str  #: "value" or "size"
    space: Space  #: the parameters

    @property
    def extended(self) -> bool:
        """Return whether k cut a multiplet (values nearer than the tolerance), which the space has as a whole."""
        return len(self.values) > self.k

    @property
    def gaps(self) -> Tensor:
        """The distance of each value to the next, (k,); of the last one, to the next Ritz value outside."""
        order = self.values.abs() if self.by == "size" else self.values
        return order - torch.cat([order[1:], order.new_tensor([self.next])])

    @property
    def sine(self) -> float:
        """A bound on ||sin Theta||_F to the true space, with the probability of `others`; inf without a gap."""
        if not len(self.values):
            return 0.0
        last = float(self.values[-1])
        gap = (abs(last) if self.by == "size" else last) - self.others
        rounding = 100 * torch.finfo(self.vectors.dtype).eps * float(self.values.abs().max())
        if math.isnan(gap):  # the space is the whole one
            return 0.0
        return max(float(self.residuals.norm()), rounding) / gap if gap > 0 else math.inf

    def share(self, vector: Tensor | Mapping[str, Tensor]) -> Estimate:
        """Return the share of a vector's squared length inside the space: of a gradient, or of an update.

        Args:
            vector: A vector (P,), or a dict by parameter; a part that is missing is zero.
        """
        v = self.space.flat(vector) if isinstance(vector, Mapping) else vector
        if not (isinstance(v, Tensor) and v.shape == (self.space.size,)):
            got = tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__
            raise BadInput(f"expected shape ({self.space.size},), got {got}", argument="vector", call="share")
        v = v.to(self.vectors)
        whole = float(v.norm(dtype=torch.float64))
        if whole == 0:
            return undefined("the vector is zero")
        inside = float((self.vectors @ (v / whole)).norm(dtype=torch.float64)) ** 2
        return self._estimate(inside, self.sine)

    def overlap(self, other: Eigenspace) -> Estimate:
        """Return the mean squared cosine of the angles to another space, ||V W^T||_F^2 / k, k the smaller dimension."""
        if not isinstance(other, Eigenspace) or other.space.size != self.space.size:
            raise BadInput(f"expected an eigenspace of {self.space.size} parameters", argument="other", call="overlap")
        return self.overlap_with(other.vectors, other.sine)

    def overlap_with(self, vectors: Tensor, sine: float) -> Estimate:
        """Return the overlap with the space of orthonormal vectors, (m, P), whose own error is a `sine`."""
        k = min(len(self.values), len(vectors))
        if k == 0:
            return undefined("a space is empty")
        shared = float((self.vectors @ vectors.to(self.vectors).T).norm(dtype=torch.float64)) ** 2 / k
        error = (math.sqrt(len(self.values)) * self.sine + math.sqrt(len(vectors)) * sine) / k
        return self._estimate(shared, error)

    def by_layer(self) -> dict[str, Tensor]:
        """Return the share of each eigenvector in each layer, (k,) float64, by module; they add up to 1.

        In a multiplet, only the mean over its vectors is determined.
        """
        shares: dict[str, Tensor] = {}
        for name, part in self.space.named(self.vectors).items():
            layer = module_of(name)
            square = part.flatten(1).norm(dim=1, dtype=torch.float64).square().cpu()
            shares[layer] = shares.get(layer, 0) + square
        return shares

    def _estimate(self, value: float, error: float) -> Estimate:
        note = "" if error < 1 else "the gap after the last eigenvalue is not proved"
        return Estimate(min(value, 1.0), min(error, 1.0) / 1.96, "estimate", note=note, unit="share")

    def __repr__(self) -> str:
        what = "largest in size" if self.by == "size" else "largest"
        lines = [f"Eigenspace: the {len(self.values)} {what} eigenvalues"]
        if len(self.values):
            lines[0] += f", {self.values[0]:.6g} to {self.values[-1]:.6g}, residuals up to {self.residuals.max():.1g}"
        if self.extended:
            lines.append(f"k extended from {self.k}: it cut a multiplet")
        if len(self.values) < self.k:
            lines.append(f"of the {self.k} asked for, the others are 0")
        lines.append(f"no other one exceeds {self.others:.6g} (probability 99.9%)")
        lines.append("converged" if self.converged else "not converged")
        return "; ".join(lines) + f"; {self.products} products"


def eigenspace_memory(operator: Operator, k: int, *, most: int = 1000) -> int:
    """Return the bytes that `eigenspace` may take beside the network: an upper bound, known before it runs.

    A basis of up to a quarter of the problem's memory, at least 2 k + 8 vectors; half as many while it is reduced, or
    for residuals; some sixteen vectors of a product and its graph, whose samples take up to half of the problem's
    memory.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(3, 2, dtype=torch.float64)
    >>> data = (torch.ones(4, 3, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64))
    >>> H = fl.curvature.Hessian(fl.Problem(net, "half_squared_error", data, memory="1MB"))
    >>> eigenspace_memory(H, 2)  # 8 + 4 + 16 vectors of 64 bytes, and 500 kB of graphs
    501792
    """
    room = _room(operator, min(k, operator.size), most)
    vectors = min(room, operator.size) + min(room, operator.size) // 2 + 16
    return vectors * operator.size * operator.dtype.itemsize + operator.problem.memory // 2


def _room(operator: Operator, k: int, most: int) -> int:
    """Return the largest number of basis vectors: a quarter of the problem's memory, if that holds enough."""
    fit = operator.problem.memory // (4 * operator.size * operator.dtype.itemsize)
    return max(min(most, fit), 2 * k + 8)


def eigenspace(
    operator: Operator,
    k: int,
    *,
    by: Literal["value", "size"] = "value",
    rtol: float = 1e-4,
    slack: float = SLACK,
    most: int = 1000,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> Eigenspace:
    """Return the `k` leading eigenvalues of an operator and their eigenvectors, each as often as it occurs.

    Searches by Lanczos from random vectors orthogonal to the pairs found go on until one proves, with probability
    99.9%, that no eigenvalue is left (`flatlens.curvature.krylov.unseen`); all its products are counted. If k cuts a
    multiplet, values within `rtol` of each other, the space has the whole multiplet. Eigenvalues that are 0 up to
    rounding are left out.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(3, 2, dtype=torch.float64)
    >>> data = (torch.ones(4, 3, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64))
    >>> problem = fl.Problem(net, "half_squared_error", data)
    >>> eigenspace(fl.curvature.Hessian(problem), 5).values.round(decimals=6).tolist()  # the others are 0
    [4.0, 4.0]

    Args:
        operator: The symmetric matrix, by its products.
        k: The number of eigenvalues.
        by: "value": the largest; "size": the largest in absolute value.
        rtol: The largest residual over the eigenvalue.
        slack: The share of the spectrum's range by which an eigenvalue that is left may exceed the last one, where the
            next one is too near to prove a gap. A hundredth takes up to some 70 products.
        most: The largest number of products.
        generator: Draws the random numbers; seeded with 0 if None.
        progress: Called with (what, done, total).
    """
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    for what, value in (("k", k), ("most", most)):
        if not (isinstance(value, int) and value >= 1):
            raise BadInput("expected a whole number of at least 1", argument=what, value=value, call="eigenspace")
    for what, share in (("rtol", rtol), ("slack", slack)):
        if not (isinstance(share, int | float) and 0 < share < 1):
            raise BadInput("expected a number between 0 and 1", argument=what, value=share, call="eigenspace")
    if by not in ("value", "size"):
        raise BadInput("expected 'value' or 'size'", argument="by", value=by, call="eigenspace")
    k = min(k, operator.size)
    warn_of(eigenspace_memory(operator, k, most=most), operator.space.device, "eigenspace(...)")
    start = torch.randn(operator.size, generator=generator, dtype=torch.float64)
    pairs = with_multiplicity(
        operator,
        start.to(operator.space.device, operator.dtype),
        Wanted(k, 0, rtol, slack, by_size=by == "size", whole=True),
        most=most,
        room=_room(operator, k, most),
        random=1.0,
        generator=generator,
        progress=progress,
    )
    return Eigenspace(**vars(pairs), k=k, by=by, space=operator.space)
