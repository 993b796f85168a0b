"""Factors of the Gauss-Newton matrix, layer by layer."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from flatlens.curvature import GaussNewton
from flatlens.curvature.batch_jacobians import JacobianNorm, batch_jacobians
from flatlens.curvature.blocks import dense_blocks
from flatlens.curvature.features import feature_norms
from flatlens.estimate import Estimate, undefined
from flatlens.grams import Weight, one_pass, outside_keys
from flatlens.grams.contractions import gram
from flatlens.measures.card import FUNCTION, PERMUTATION, Parts, Run, on_lens
from flatlens.measures.left_out import NO_MEASURED_LAYER, left_out, needs_every_output
from flatlens.measures.lens import Lens
from flatlens.measures.options import require_tolerance
from flatlens.measures.rows import with_note
from flatlens.measures.tops import (
    as_estimate,
    closed_form,
    in_batches,
    largest_residual,
    of_norm,
    rounded_up,
    top_of,
    whole_weights,
    within_share,
)
from flatlens.perturbation.features import SEVERAL
from flatlens.problem import Problem
from flatlens.problem.outcomes import forwards

_NEGATIVE = 1e-9
"""Largest negative eigenvalue of C, over the largest one, that is taken for rounding."""


@on_lens(
    id="M4",
    family="sensitivity",
    symbol=r"\|Jf(X)\|_2",
    source="sharpening A.1, B.3",
    unit="output / input",
    cost="Lanczos: about 10 products with each batch's Jacobian",
    invariant_under=FUNCTION,
    works_coupled=True,
    of_parameters=False,
    on_request=True,
)
def batch_jacobian_norm(
    lens: Lens, run: Run, *, softmax: bool = False, rtol: float = 1e-3, batch_statistics: int | None = None
) -> Estimate:
    """Norm of the Jacobian of whole batches, ||df(X)/dX||_2, BatchNorm as in training; the largest over ghost batches.

    Where BatchNorm couples the samples of a batch its Jacobian is one matrix; in eval mode it has a block for each
    sample, and the norm is `jacobian_norm`. `batch_statistics` and `rtol` are those of `sharpness`, `softmax` that of
    `jacobian_norm`.
    """
    require_tolerance(rtol)
    problem = in_batches(lens, batch_statistics)
    found = batch_jacobians(
        problem, lens.model, [None], softmax=softmax, rtol=rtol, generator=run.generator, progress=run.progress
    )
    return _found(found[None])


def _found(norm: JacobianNorm) -> Estimate:
    note = "" if norm.exact else f"a singular value lies within {rounded_up(norm.residual)}; a larger one can be missed"
    return Estimate(norm.value, kind="exact" if norm.exact else "lower bound", note=note, products=norm.products)


@on_lens(
    id="M17",
    family="hessian",
    symbol=r"\lambda_{max}(C\,Jf\,Df_l\,Df_l^T Jf^T C^T)",
    source="sharpening Eq. 4, App. C",
    unit="loss / parameter^2",
    cost="one pass; Lanczos: about 10 Gauss-Newton products per layer that is not dense",
    invariant_under={PERMUTATION},
    works_coupled=True,
    on_request=True,
)
def layer_factors(
    lens: Lens, run: Run, *, blocks: bool = True, rtol: float = 1e-3, batch_statistics: int | None = None
) -> Parts:
    """Largest eigenvalue of each layer's Gauss-Newton block, summed over layers, and of the factors of the block.

    The value of a layer is the largest eigenvalue of its Gauss-Newton block, in the layer's weight alone. The block
    couples all samples, so it is used by products only. The sum over layers is an upper bound of the largest eigenvalue
    for all these weights together, without biases, norms and weights outside layers. The factors are `.loss_curvature`,
    ||C^(1/2)|| with C divided by the number of samples, undefined where the loss is not convex in the outputs;
    `.features`, the spectral norm of the layer's features f_{l-1}(X), those of all its calls side by side; and
    `.jacobian`, the largest norm over samples of the derivative of the outputs with respect to the layer's output. If
    the layer's weight is used once per sample, the block is at most the product of the squares of the three. For shared
    weights there is no such bound. `blocks=False` leaves the eigenvalues out, and with them most of the cost.

    With BatchNorm in train mode (`batch_statistics`, as in `sharpness`), all numbers are those of the network in that
    mode, and `.jacobian` is the norm of the Jacobian of a whole ghost batch.
    """
    require_tolerance(rtol)
    weights = whole_weights(lens, run)
    if not weights:
        return {("", None): undefined(NO_MEASURED_LAYER)}
    problem = in_batches(lens, batch_statistics)
    if lens.probes is not None and not problem.coupled:
        return {("", None): undefined(needs_every_output(lens))}
    if problem.coupled:
        curvature, jacobians = _of_batches(lens, problem, run, weights, rtol)
    else:
        curvature, jacobians = _of_samples(lens, problem, run, weights)
    calls = {name: weight.calls or outside_keys(weight) for name, weight in weights.items()}
    features = feature_norms(problem, lens.model, lens.layout, calls)
    elsewhere = "the weight also acts in other ways than by products in the layer's calls"
    parts: dict[tuple[str, str | None], Estimate] = {}
    for name, weight in weights.items():
        unread = undefined(lens.layout.unread(weight) or elsewhere)
        parts["features", name] = of_norm(features[name], unit="feature") if name in features else unread
        unmoved = undefined(SEVERAL if weight.explained and problem.coupled else elsewhere)
        parts["jacobian", name] = replace(jacobians.get(name, unmoved), unit="output / feature")
    parts["loss_curvature", None] = curvature.root(lens.problem.n)
    if not blocks:
        return parts | {("", None): undefined("blocks=False leaves the blocks out")}
    rows = _blocks(lens, problem, run, weights, rtol)
    if not any(row.value for row in rows.values()) and lens.underflow:
        return parts | {("", at): undefined(lens.underflow) for at in (None, *rows)}
    kinds = {row.kind for row in rows.values()}
    whole = Estimate(
        sum(row.value for row in rows.values()),
        kind="exact" if kinds == {"exact"} else "lower bound",
        note="" if kinds == {"exact"} else within_share(largest_residual(rows.values())),
        products=sum(row.products for row in rows.values()),
    )
    parts["", None] = with_note(whole, left_out(lens, weights))
    return parts | {("", name): row for name, row in rows.items()}


@dataclass
class _Curvature:
    """The smallest and the largest eigenvalue of C over the samples seen."""

    least: float = 0.0
    largest: float = 0.0

    def see(self, C: Tensor) -> None:
        """Take more samples' C into account, (n, N, N), scaled so that the risk is the mean of the losses."""
        values = torch.linalg.eigvalsh(C)
        self.least, self.largest = min(self.least, float(values.min())), max(self.largest, float(values.max()))

    def root(self, n: int) -> Estimate:
        """Return ||C^(1/2)||, C divided by n."""
        if self.least < -_NEGATIVE * max(self.largest, -self.least):
            return undefined("the loss is not convex in the outputs: C has no root")
        return Estimate((self.largest / n) ** 0.5, unit="sqrt loss / output")


_Factors: TypeAlias = tuple[_Curvature, dict[str, Estimate]]
"""Curvature of the loss, and by layer the Jacobian from its output up."""


def _of_samples(lens: Lens, problem: Problem, run: Run, weights: dict[str, Weight]) -> _Factors:
    """Return the factors where samples are apart, from one pass."""
    curvature = _Curvature()
    above = dict.fromkeys((name for name, weight in weights.items() if weight.explained), 0.0)
    with closing(one_pass(problem, lens.model, lens.layout, None, run.progress, {"C", "K"})) as chunks:
        for chunk in chunks:
            curvature.see(chunk.outputs.C)
            for name in above:
                JJ = gram(chunk.layers[name].linear.J)
                above[name] = max(above[name], float(torch.linalg.eigvalsh(JJ)[:, -1].max()))
    return curvature, {name: Estimate(max(0.0, value) ** 0.5) for name, value in above.items()}


def _of_batches(lens: Lens, problem: Problem, run: Run, weights: dict[str, Weight], rtol: float) -> _Factors:
    """Return the factors where BatchNorm couples the samples of a batch: by Lanczos alone."""
    curvature = _Curvature()
    for f, y in forwards(problem, lens.model):
        curvature.see(problem.loss.output_hessian(f.to(torch.float64), y) * (problem.n / problem.mass))
    calls = {name: weight.calls[0] for name, weight in weights.items() if weight.explained and len(weight.calls) == 1}
    norms = batch_jacobians(
        problem, lens.model, list(calls.values()), softmax=False, rtol=rtol, generator=run.generator,
        progress=run.progress,
    )  # fmt: skip
    return curvature, {name: _found(norms[call]) for name, call in calls.items()}


def _blocks(lens: Lens, problem: Problem, run: Run, weights: dict[str, Weight], rtol: float) -> dict[str, Estimate]:
    """Return lmax of the Gauss-Newton block of each layer's weight: in closed form of dense layers, else by Lanczos."""
    closed = [] if problem.coupled else closed_form(lens, weights)
    dense = dense_blocks(problem, lens.model, lens.layout, closed, run.progress) if closed else {}
    rows = {name: as_estimate(block.largest(rtol, run.progress), 0) for name, block in dense.items()}
    for name, weight in weights.items():
        if name not in dense:
            assert weight.parameter is not None
            key = f"layer_factors {name}" + (" in ghost batches" if problem.coupled else "")
            operator = GaussNewton(problem, [weight.parameter], model=lens.model)
            rows[name] = top_of(lens, run, key, operator, rtol)
    return rows
