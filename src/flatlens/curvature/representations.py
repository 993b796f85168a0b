"""Singular values of dx^l/dx: how each layer's input, a hidden representation, follows the network's input.

The Gram matrices of the pass have the derivatives from a layer to the output. These are the ones below the layer, by a
backward pass for each feature of the layer's input; of many features by Lanczos, for the largest singular value alone.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatlens.curvature.operators import bytes_saved
from flatlens.curvature.spectral_norms import squared_jacobian, top_of_each
from flatlens.estimate import Progress
from flatlens.grams import Plan
from flatlens.grams.plan import FRONT, coupled_places
from flatlens.grams.record import run_recorded
from flatlens.problem import Problem
from flatlens.problem.batches import size
from flatlens.problem.eval_context import differentiable

FEATURES = 1024  #: features of a layer's input up to which each takes a backward pass
_CHUNK = 256  #: largest number of samples in a chunk


@dataclass(frozen=True, eq=False)
class Representation:
    """dx^l/dx of the samples of a chunk, by its singular values."""

    singular: Tensor  #: (n, min(m, M)) float64, descending; (n, 1) where only the largest was searched
    residual: float | None = None  #: of the largest, relative to it, where it was searched


def representations(
    problem: Problem,
    model: nn.Module,
    plan: Plan,
    calls: Collection[str],
    rtol: float,
    generator: torch.Generator,
    progress: Progress | None = None,
) -> Generator[tuple[int, dict[str, Representation]], None, None]:
    """Yield (number of the chunk, representations by call); a call whose samples depend on each other is left out."""
    problem = problem.as_asked()
    probe = problem.place(problem.probes[0])
    with problem.measuring(model), differentiable(model.parameters()):
        # a chunk whose graph and Jacobians fit in the memory
        tape, inputs, f, _ = run_recorded(problem, model, probe)
        rows = max((tape.linear[key].x.numel() // len(f) for key in calls), default=1)
        entries = sum(x.numel() for x in inputs) // len(f) * min(rows, FEATURES)
        each = bytes_saved(model, size(probe), lambda: run_recorded(problem, model, probe))
        most = max(1, min(_CHUNK, problem.memory // (3 * each + 24 * entries)))
        for number, raw in problem.shared(most, what="hidden representations", progress=progress):
            batch = problem.place(raw)
            tape, inputs, f, _ = run_recorded(problem, model, batch)
            problem.require_as_seen(model, batch, number, f)
            plan.require_same(tape, inputs, batch)
            at = [inputs[k] for k in plan.inputs]
            found: dict[str, Representation] = {}
            for key in calls:
                h = plan.unpadded(tape.linear[key].x.movedim(plan.batch_axis[key], 0), tape).flatten(1)
                named = {str(k): x for k, x in enumerate(at)}
                if coupled_places(h, named, dict.fromkeys(named, FRONT), torch.Generator().manual_seed(0)):
                    continue
                found[key] = _below(h, at, rtol, generator)
            yield number, found


def _below(h: Tensor, at: list[Tensor], rtol: float, generator: torch.Generator) -> Representation:
    if h.shape[1] > FEATURES:
        apply, shape = squared_jacobian(h, at, softmax=False, counted=None, in_front=True)
        values, residuals, _ = top_of_each(apply, shape, rtol, generator)
        largest = values.clamp(min=1e-300)
        return Representation(values.clamp(min=0).sqrt()[:, None], float((residuals / largest).max()) / 2)
    J = []
    for feature in range(h.shape[1]):
        slopes = torch.autograd.grad(h[:, feature].sum(), at, retain_graph=True, allow_unused=True)
        J.append(torch.cat([(torch.zeros_like(x) if s is None else s).flatten(1).double()
                            for s, x in zip(slopes, at, strict=True)], 1))  # fmt: skip
    return Representation(torch.linalg.svdvals(torch.stack(J, 1)))
