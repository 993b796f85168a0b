"""What minibatches do: the spread of their gradients, and their sharpness."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flatlens.curvature import Hessian, eigenpairs
from flatlens.curvature.probes import mean_of_forms, student
from flatlens.estimate import Estimate, Kind, undefined
from flatlens.measures.card import PERMUTATION, Parts, Run, on_lens
from flatlens.measures.lens import Lens
from flatlens.measures.options import require_count, require_tolerance
from flatlens.perturbation.spread import Spread, spread_of
from flatlens.perturbation.steps import Landscape


@on_lens(
    id="H11",
    family="hessian",
    symbol=r"\mathrm{tr}\,\Sigma / \|g\|^2",
    source="noise2018 section 2.2",
    unit="samples",
    cost="two backwards over the data",
    invariant_under={PERMUTATION},
    works_sharded=True,
    on_request=True,
)
def gradient_noise_scale(lens: Lens, run: Run, *, batches: int = 64, sampled: bool = True) -> Parts:
    """Gradient noise scale: tr Sigma / ||g||^2, Sigma the covariance of the gradients of single samples, g their mean.

    It is the batch size at which the noise of the mean gradient is as large as the gradient itself (the simple noise
    scale). The samples are dealt at random into `batches` groups; the groups' gradients spread around their mean as
    tr Sigma / size. The error is a jackknife over the groups. With as many groups as samples every gradient is one
    sample's own.

    `sampled=True`: the samples stand for others like them, so ||g||^2 is freed of their own noise. Where it cannot be
    told from 0 on these samples, the value is a lower bound: more samples are needed. `sampled=False`: they are all the
    samples there are, as for a training set; `exact` with a group for each sample. `.covariance` is tr Sigma,
    `.gradient` is ||g||^2.
    """
    require_count(3, batches=batches)  # of two, what is left without one has no spread
    if lens.problem.n < 3:
        return {("", None): undefined("at least 3 samples are needed")}
    spread = spread_of(Landscape(lens.problem, model=lens.model), lens.gradient, batches, run.generator, run.progress)
    return {(part, None): estimate for part, estimate in noise_scale(spread, sampled).items()}


def noise_scale(spread: Spread, sampled: bool) -> dict[str, Estimate]:
    """Return the noise scale, tr Sigma and ||g||^2 from the spread of gradients, with their errors."""
    n, m = float(spread.sizes.sum()), len(spread.sizes)
    covariance, square = spread.covariance, spread.square
    covariances, squares, left = spread.without_each()
    if sampled:
        square, squares = square - covariance / n, squares - covariances / left
    else:  # ||g||^2 is known, and Sigma is a mean over n samples
        covariance, covariances, squares = covariance * (n - 1) / n, covariances * (n - 1) / n, squares * 0 + square
    each = not sampled and m == n

    def stderr(values: Tensor, error: Callable[[Tensor], tuple[Tensor, Tensor]] = mean_of_forms) -> float:
        return 0.0 if each else float(error((1 - m) * values)[1])  # of the jackknife's pseudo-values, up to a shift

    kind: Kind = "exact" if each else "estimate"
    known: Kind = "estimate" if sampled else "exact"
    unit = "loss^2 / parameter^2"
    parts = {
        "covariance": Estimate(covariance, stderr(covariances), kind, unit=unit),
        "gradient": Estimate(square, stderr(squares, student), known, unit=unit),
    }
    largest = square + 1.96 * parts["gradient"].stderr
    if spread.square == 0:
        return {"": undefined("the gradient is zero: its noise has no size to compare with"), **parts}
    note = f"the gradient of {n:.0f} samples cannot be told from 0: more samples are needed"
    if not largest > 0:  # smaller even than its noise makes it by chance
        return {"": undefined(note), **parts}
    if not square > 1.96 * parts["gradient"].stderr:
        least = max(covariance - 1.96 * parts["covariance"].stderr, 0.0) / largest
        return {"": Estimate(least, kind="lower bound", note=note), **parts}
    ratios = (covariances / squares.clamp(min=1e-300)).clamp(min=1e-300).log()
    return {"": Estimate(covariance / square, covariance / square * stderr(ratios), kind), **parts}


@on_lens(
    id="H12",
    family="hessian",
    symbol=r"E_B \lambda_{max}(H_B)",
    source="sharpening section 3",
    unit="loss / parameter^2",
    cost="batches x some 20 Hessian products on one batch",
    invariant_under={PERMUTATION},
    on_request=True,
)
def minibatch_sharpness(lens: Lens, run: Run, *, samples: int = 32, batches: int = 8, rtol: float = 1e-2) -> Estimate:
    """Sharpness on random minibatches: the mean of lmax(H_B) over batches of `samples` samples.

    Each batch is drawn without replacement. The error is that of a mean of few skewed numbers: near a minimum a few
    batches have most of the curvature. The mean residual of the searches is added to the half-width of its interval;
    `arrays` has each batch's value. The largest eigenvalue of a mean
    of matrices is at most the mean of theirs: on average over minibatches the sharpness is at least that on all the
    data, the more the smaller they are; one of them can have less.
    """
    require_count(1, samples=samples)
    require_count(2, batches=batches)
    require_tolerance(rtol)
    if samples > lens.problem.n:
        return undefined(f"the data has {lens.problem.n} samples: samples={samples} cannot be drawn")
    values, residuals, products = [], [], 0
    for number in range(batches):
        operator = Hessian(lens.problem.subset(samples, run.generator), model=None)
        pairs = eigenpairs(operator, rtol=rtol, generator=run.generator)
        values.append(pairs.largest)
        residuals.append(float(pairs.residuals[0]))
        products += operator.products
        lens.count(operator.products)
        if run.progress is not None:
            run.progress("minibatches", number + 1, batches)
    found = torch.tensor(values, dtype=torch.float64)
    mean, stderr = mean_of_forms(found)
    stderr += sum(residuals) / batches / 1.96
    note = f"over {batches} batches: {float(found.min()):.3g} to {float(found.max()):.3g}"
    return Estimate(float(mean), float(stderr), "estimate", note=note, arrays={"batches": found}, products=products)
