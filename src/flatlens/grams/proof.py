"""The proof of a plan on its trials: gradients of parameters, computed as the pass does it, equal autograd's own.

If a weight's arithmetic is right on some samples, it is right on all batches with the same structure, and the pass
compares every chunk's structure with the plan's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatlens.grams.certificate import Checker
from flatlens.grams.jacobians import ChunkJacobians, saved_of
from flatlens.grams.layout import Layout
from flatlens.grams.output_jacobians import certificate_of
from flatlens.grams.places import watched_places
from flatlens.grams.trial import Trial
from flatlens.problem import Problem


def unproved(problem: Problem, model: nn.Module, layout: Layout, trial: Trial, generator: torch.Generator) -> list[str]:
    """Return the places at which parameters act whose computed gradient is not autograd's on a trial."""
    f, tape, n = trial.f, trial.tape, trial.n
    named: dict[str, Tensor] = dict(model.named_parameters())
    weights = [w for w in layout.weights.values() if w.products]
    names = dict.fromkeys(
        (*layout.small_parameters, *layout.made, *(name for w in weights for name in (w.parameter, w.bias) if name))
    )
    watched = watched_places(tape, layout, [], n, ())
    certificate = certificate_of(f, watched, {name: named[name] for name in names}, generator)
    like = f.new_zeros(n, 1, 1, dtype=torch.float64)
    jacobians = ChunkJacobians(problem, tape, layout, named, {}, saved_of(layout, tape, n), {}, like, frozenset())
    rebuilt = jacobians.rebuilt(certificate.totals, weights=True)
    checker = Checker(problem, model, layout)
    same = checker.same_gradients(certificate, rebuilt)
    return [checker.place_of(tape, name) for name, right in zip(rebuilt, same, strict=True) if not bool(right)]
