"""The leading eigenspace of the Hessian in training: what lies in it, and how far it has turned since the last look."""

from __future__ import annotations

import torch
from torch import Tensor

from flatlens.curvature import Eigenspace, Hessian
from flatlens.curvature.eigenspace import eigenspace as found_space
from flatlens.curvature.krylov import Remembered
from flatlens.estimate import Estimate, undefined, with_note
from flatlens.measures.definition import PERMUTATION, Parts, Run, on_lens, require_count, require_tolerance
from flatlens.measures.lens import Lens

_SPACE, _WEIGHTS = ("eigenspace", None), ("eigenspace.weights", None)
_FIRST = "there is no earlier look: Lens(after=...), or the next step of a tracker"


@on_lens(
    id="H15",
    family="hessian",
    symbol=r"\|P_k g\|^2 / \|g\|^2",
    source="flatlens",
    unit="share",
    cost="Lanczos with a proof: some 10 Hessian products for each search",
    invariant_under={PERMUTATION},
    works_coupled=True,
    on_request=True,
)
def eigenspace(lens: Lens, run: Run, *, top_k: int = 10, rtol: float = 1e-3) -> Parts:
    """Share of the gradient in the space of the Hessian's `top_k` leading eigenvectors: ||P g||^2 / ||g||^2.

    The eigenvalues are the largest, each as often as it occurs; where `top_k` cuts a multiplet, the space has all of
    it (`flatlens.curvature.eigenspace`). `.update` is the share of the last update: of the change of the weights since
    the look before, at a tracker's step before or of `Lens(after=...)`. `.overlap` is the mean squared cosine to the
    space of that look, ||V^T V'||_F^2 / k. The errors come from the residuals and from the gap that is proved, with
    probability 99.9%. `arrays` has the eigenvalues, their residuals and gaps.
    """
    require_count(1, top_k=top_k)
    require_tolerance(rtol)
    operator = Hessian(lens.problem, model=lens.model)
    space = found_space(operator, top_k, rtol=rtol, most=300, generator=run.generator, progress=run.progress)
    lens.count(space.products)
    why = "" if space.converged else "the search ended before no other eigenvalue was proved to be left"
    # what an earlier look left, if it measured the same parameters
    old, weights = lens.remembered.get(_SPACE), lens.remembered.get(_WEIGHTS)
    here = operator.space.point()
    parts: dict[tuple[str, str | None], Estimate] = {("", None): _with(space.share(lens.gradient), space, why)}
    if old is None or weights is None or weights.vectors.shape[1] != operator.size:
        parts |= {(part, None): undefined(_FIRST) for part in ("update", "overlap")}
    else:
        moved = here.to(torch.float64) - weights.vectors[0].to(here.device, torch.float64)
        overlap = space.overlap_with(old.vectors.to(here), float(weights.values[0]))
        parts |= {("update", None): with_note(space.share(moved), why), ("overlap", None): with_note(overlap, why)}
    lens.remember(_SPACE, Remembered(space.values, space.vectors))
    lens.remember(_WEIGHTS, Remembered(torch.tensor([space.sine], dtype=torch.float64), here[None].clone()))
    return parts


def _with(estimate: Estimate, space: Eigenspace, note: str) -> Estimate:
    gaps = space.gaps[space.gaps.isfinite()]  # none below the last of all eigenvalues
    arrays: dict[str, Tensor] = {"values": space.values, "residuals": space.residuals, "gaps": gaps}
    found = with_note(estimate, note)
    return Estimate(found.value, found.stderr, found.kind, note=found.note, products=space.products, arrays=arrays)
