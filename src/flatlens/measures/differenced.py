"""Largest eigenvalues where parameters are spread over processes."""

from __future__ import annotations

import torch

from flatlens.curvature import lanczos
from flatlens.curvature.krylov import Remembered
from flatlens.curvature.preconditioned import Preconditioner
from flatlens.errors import BadInput
from flatlens.estimate import Estimate
from flatlens.measures.card import Run
from flatlens.measures.lens import Lens
from flatlens.measures.tops import rounded_up
from flatlens.perturbation.differences import ShardedHessian
from flatlens.perturbation.steps import Landscape
from flatlens.problem.shards import in_one_piece

_OLD = 10.0  #: weight of the last eigenvector in the start; a random vector has 1


def sharded_top(
    lens: Lens,
    run: Run,
    key: str,
    rtol: float,
    *,
    top_k: int = 1,
    bottom_k: int = 0,
    P: Preconditioner | None = None,
) -> Estimate:
    """Return the ends of the spectrum of H, or of P^-1/2 (H + D) P^-1/2, as every process finds them.

    Where products are taken by differences, the error is theirs along the first eigenvector; the note has the residual,
    which counts it, too.
    """
    H = _operator(lens, P)
    fresh = torch.randn(H.size, generator=run.generator, dtype=torch.float64).to(H.landscape.space.device)
    earlier = lens.remembered.get((key, None))
    start = fresh
    if earlier is not None and earlier.vectors.shape[1] == H.size:
        start = earlier.vectors[0] * _OLD + fresh / fresh.norm()
    room = max(2 * (top_k + bottom_k) + 8, lens.problem.memory // (32 * H.size))
    pairs = lanczos(H, start, top_k=top_k, bottom_k=bottom_k, rtol=rtol, room=min(room, 300), keep=1,
                    random=1.0 if start is fresh else 0.0, generator=run.generator, progress=run.progress)  # fmt: skip
    vector = pairs.vectors[0]
    product, error = H.with_error(vector)
    value = float(vector @ product)
    residual = float((product - value * vector).norm() + error.norm())
    lens.remember((key, None), Remembered(pairs.values[:1], pairs.vectors[:1]))
    stopped = "" if pairs.converged or pairs.exact else "; stopped before the tolerance was reached"
    note = f"by {H.by}; an eigenvalue lies within {rounded_up(residual)}; a larger one can be missed{stopped}"
    arrays = {"eigenvalues": pairs.values, "residuals": pairs.residuals}
    stderr = abs(float(vector @ error)) / 1.96
    return Estimate(value, stderr, "lower bound" if H.exact else "estimate", note=note, arrays=arrays)


def _operator(lens: Lens, P: Preconditioner | None) -> ShardedHessian:
    """Return H, or P^-1/2 (H + D) P^-1/2 over the measured parameters that the optimiser moves.

    Raises:
        BadInput: it moves none of them.
        NotDifferentiable: H has no products.
    """
    H = ShardedHessian(Landscape(lens.problem, model=lens.model))
    if P is None:
        return H
    divisor = {name: in_one_piece(part) for name, part in P.divisor.items()}
    root = H.flat({name: part.rsqrt() for name, part in divisor.items()})
    if not root.any():
        raise BadInput("the optimiser moves none of the measured parameters")
    shift = H.flat({name: P.decay[name] / part for name, part in divisor.items()})
    return ShardedHessian(H.landscape, root, shift, by=H.by)
