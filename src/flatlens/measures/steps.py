"""Curvature as an optimiser's own steps meet it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from flatlens.curvature import Hessian, eigenpairs
from flatlens.curvature.krylov import Remembered
from flatlens.curvature.muon import ball_of, climb_in_ball, dual_norm
from flatlens.curvature.preconditioned import PreconditionedHessian, leading_rate, preconditioner_of
from flatlens.curvature.probes import quantile, student
from flatlens.curvature.space import inner
from flatlens.errors import BadInput
from flatlens.estimate import Estimate, Kind, undefined
from flatlens.measures.card import PERMUTATION, Parts, Run, on_lens
from flatlens.measures.differenced import DIFFERENCED, differenced_top
from flatlens.measures.hessian import require_tolerance, top_of
from flatlens.measures.lens import Lens
from flatlens.measures.perturbation import require_count, require_flag
from flatlens.perturbation.critical import critical_step
from flatlens.perturbation.differences import DifferencedHessian
from flatlens.perturbation.spread import Spread, spread_of
from flatlens.perturbation.steps import Landscape, next_update

NO_OPTIMISER = (
    "it needs the optimiser that trains the network: Lens(problem, optimiser=...), Tracker.step(optimiser=...)"
)
CLIMBS = 4  #: starts of the search over Muon's ball; the first is the gradient


@on_lens(
    id="H8",
    family="hessian",
    symbol=r"\lambda_{max}(P^{-1/2} H P^{-1/2})",
    source="adaptive2022 section 3",
    unit="1 / learning rate",
    cost="Lanczos: about 10 Hessian products",
    invariant_under={PERMUTATION},
    works_coupled=True,
    works_sharded=True,
    on_request=True,
)
def preconditioned_sharpness(lens: Lens, run: Run, *, rtol: float = 1e-3) -> Estimate:
    """Sharpness in the optimiser's own geometry: lmax(P^-1/2 H P^-1/2), P the matrix by which it divides the gradient.

    P is read off the state of the lens's optimiser: SGD (P = 1, or learning rates of single groups), Adam, AdamW,
    RMSprop, Adagrad; weight decay counts (`flatlens.curvature.preconditioned`). `edge_of` gives the value above which
    its steps grow on a quadratic: 38 / lr for Adam with beta1 = 0.9. It is the largest eigenvalue that a search found,
    as with `sharpness`.

    Muon's geometry is no inner product. There the value is the largest <D, H D> over matrices D of spectral norm 1 (in
    Muon's own scaling), divided by the dual norm of the gradient, with the edge 2 / lr for steps without momentum
    (norms2026). It is the best of four climbs, and a lower bound. It rises wherever the gradient falls.
    """
    require_tolerance(rtol)
    if lens.optimiser is None:
        return undefined(NO_OPTIMISER)
    muon = type(lens.optimiser) is getattr(torch.optim, "Muon", None)
    if muon and lens.problem.sharded:
        return undefined("the geometry of Muon needs whole matrices: these are spread over processes")
    try:
        if muon:
            return _over_matrices(lens, run, lens.optimiser)
        P = preconditioner_of(lens.optimiser, lens.problem.model)
        if lens.problem.sharded:
            return differenced_top(lens, run, "preconditioned_sharpness", rtol, P=P)
        operator = PreconditionedHessian(lens.problem, P, model=lens.model)
    except BadInput as error:
        return undefined(str(error))
    return top_of(lens, run, "preconditioned_sharpness", operator, rtol)


def _over_matrices(lens: Lens, run: Run, optimiser: torch.optim.Optimizer) -> Estimate:
    radius = {name: s for name, s in ball_of(optimiser, lens.problem.model).items() if name in lens.problem.parameters}
    operator = Hessian(lens.problem, radius, model=lens.model)
    gradient = lens.gradient
    size = dual_norm(gradient, radius)
    if not size > 0:
        return undefined("the gradient is zero: Muon's step has no size to compare with")
    drawn = torch.randn(CLIMBS - 1, operator.size, generator=run.generator, dtype=torch.float64)
    starts = [operator.space.flat({name: gradient[name] for name in radius}), *drawn.to(operator.space.point())]
    peak = climb_in_ball(operator, radius, starts, progress=run.progress)
    lens.count(operator.products)
    note = f"the best of {CLIMBS} climbs; a larger curvature can be missed"
    arrays = {"climbs": peak.restarts / size}
    return Estimate(peak.value / size, kind="lower bound", note=note, products=operator.products, arrays=arrays)


def direction_of(lens: Lens, along: str) -> tuple[dict[str, Tensor], float | None]:
    """Return (a direction by parameter, the slope of the risk along minus it if it is known).

    "update": the lens's own direction, else its optimiser's next update, else the gradient. "gradient": the gradient.

    Raises:
        BadInput: the optimiser has no next update.
    """
    if along not in ("update", "gradient"):
        raise BadInput(f"option along={along!r}: 'update' or 'gradient' is needed")
    if along == "gradient" or (lens.along is None and lens.optimiser is None):
        return lens.gradient, -inner(lens.gradient, lens.gradient)
    if isinstance(lens.along, Mapping):
        return dict(lens.along), None
    if lens.along is not None:  # another loss, whose gradient the optimiser follows
        _, gradient = Landscape(lens.along).risk_and_gradient()
        update = gradient if lens.optimiser is None else next_update(lens.optimiser, lens.along.model, gradient)
        return update, None
    assert lens.optimiser is not None
    update = next_update(lens.optimiser, lens.problem.model, lens.gradient)
    return update, -inner(update, lens.gradient)


@on_lens(
    id="H9",
    family="hessian",
    symbol=r"2 / \eta_c",
    source="critical2026 section 3",
    unit="1 / learning rate",
    cost="one backward, 2 to 8 forwards",
    invariant_under={PERMUTATION},
    works_coupled=True,
    works_sharded=True,
    on_request=True,
)
def critical_sharpness(lens: Lens, run: Run, *, rtol: float = 0.02) -> Estimate:
    """Critical sharpness: 2 / eta_c, eta_c the largest step along the next update that does not raise the risk.

    The update is what the lens's optimiser would subtract next at learning rate 1, given the gradient on the measured
    data; without an optimiser the gradient. `Lens(along=...)` gives a direction of one's own, or another problem, whose
    gradient the optimiser follows: then it is the relative critical sharpness, of one loss while another is trained.

    Where the risk is quadratic along the update D, it is D^T H D / <D, gradient>: for gradient descent the curvature
    along the gradient. If it exceeds 2 / lr, the next step raises the risk. No second derivative is needed, so it works
    with any kernel of attention. `stderr` is a third of the tolerance: the search ends when the last forward moved
    eta_c by less than `rtol`. `arrays` has the steps tried and the changes of the risk. A rise between two of them that
    is followed by a fall goes unseen.
    """
    require_tolerance(rtol)
    try:
        direction, slope = direction_of(lens, "update")
    except BadInput as error:
        return undefined(str(error))
    if slope is not None and not slope < 0:
        return undefined("the next update does not go downhill on this data: every small step raises the risk")
    if slope is None and not inner(direction, direction) > 0:
        return undefined("the direction is zero")
    landscape, key = Landscape(lens.problem, model=lens.model), ("critical_sharpness", None)
    here = landscape.risk() if slope is None else lens.risk_and_gradient[0]
    earlier = lens.remembered.get(key)
    rate = 1.0 if lens.optimiser is None else leading_rate(lens.optimiser)
    first = rate if earlier is None else float(earlier.values[0])
    with landscape.walk(direction) as move:

        def change(step: float) -> float:
            move(step)
            return landscape.risk() - here

        found = critical_step(change, first, slope=slope, rtol=rtol)
    arrays = {"steps": found.steps, "changes": found.changes}
    tried = f"{landscape.forwards} forwards"
    if found.step == 0:
        least = float(found.steps[0])
        return Estimate(
            2 / least, kind="lower bound", note=f"the risk rose at the smallest step tried; {tried}", arrays=arrays
        )
    if found.step == math.inf:
        most = float(found.steps[-1])
        return Estimate(2 / most, kind="upper bound", note=f"the risk rose at no step tried; {tried}", arrays=arrays)
    lens.remember(key, Remembered(torch.tensor([found.step], dtype=torch.float64), torch.empty(1, 0)))
    share = max(found.error / found.step, rtol / 3)
    note = "" if found.error <= rtol * found.step else "; stopped before the tolerance was reached"
    value = 2 / found.step
    return Estimate(value, share * value / 1.96, "estimate", note=tried + note, arrays=arrays)


@on_lens(
    id="H10",
    family="hessian",
    symbol=r"u^T H u / \|u\|^2",
    source="critical2026 section 3",
    unit="loss / parameter^2",
    cost="one backward, one Hessian product",
    invariant_under={PERMUTATION},
    works_coupled=True,
    works_sharded=True,
    on_request=True,
)
def directional_sharpness(lens: Lens, run: Run, *, along: str = "update") -> Estimate:
    """Curvature of the risk along a direction u: u^T H u / ||u||^2.

    `along="update"` is the optimiser's next update, without an optimiser the gradient, or what `Lens(along=...)` gives:
    a vector by parameter, or another problem whose gradient is followed. `along="gradient"` is the gradient of this
    problem. Along the gradient, gradient descent raises a quadratic risk where it exceeds 2 / lr. Where parameters are
    spread over processes, it comes from central differences of gradients, with their error.
    """
    try:
        direction, _ = direction_of(lens, along)
    except BadInput as error:
        return undefined(str(error))
    if lens.problem.sharded:
        square = inner(direction, direction)
        if not square > 0:
            return undefined("the direction is zero")
        differenced = DifferencedHessian(Landscape(lens.problem, model=lens.model))
        u = differenced.flat(direction) / math.sqrt(square)
        product, off = differenced.with_error(u)
        return Estimate(float(u @ product), abs(float(u @ off)) / 1.96, "estimate", note=DIFFERENCED)
    operator = Hessian(lens.problem, model=lens.model)
    u = operator.space.flat({name: part for name, part in direction.items() if name in operator.space.parameters})
    square = float(u.to(torch.float64).square().sum())
    if not square > 0:
        return undefined("the direction is zero")
    u = u / math.sqrt(square)
    value = float(u.to(torch.float64) @ operator(u).to(torch.float64))
    lens.count(operator.products)
    return Estimate(value, products=operator.products)


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
    require_count(2, batches=batches)
    require_flag(sampled=sampled)
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

    def stderr(values: Tensor) -> float:
        return 0.0 if each else float(values.var(correction=0) * (m - 1)) ** 0.5 * quantile(m)

    kind: Kind = "exact" if each else "estimate"
    known: Kind = "estimate" if sampled else "exact"
    unit = "loss^2 / parameter^2"
    parts = {
        "covariance": Estimate(covariance, stderr(covariances), kind, unit=unit),
        "gradient": Estimate(square, stderr(squares), known, unit=unit),
    }
    largest = square + 1.96 * parts["gradient"].stderr
    if not largest > 0:
        return {"": undefined("the gradient is zero: its noise has no size to compare with"), **parts}
    if not square > 1.96 * parts["gradient"].stderr:
        least = max(covariance - 1.96 * parts["covariance"].stderr, 0.0) / largest
        note = f"the gradient of {n:.0f} samples cannot be told from 0: more samples are needed"
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

    Each batch is drawn without replacement. The error is Student's over the batches; `arrays` has each batch's value.
    The largest eigenvalue of a mean of matrices is at most the mean of theirs: on minibatches the sharpness is larger
    than on all the data, the more the smaller they are.
    """
    require_count(1, samples=samples)
    require_count(2, batches=batches)
    require_tolerance(rtol)
    if samples > lens.problem.n:
        return undefined(f"the data has {lens.problem.n} samples: samples={samples} cannot be drawn")
    values = []
    for number in range(batches):
        operator = Hessian(lens.problem.subset(samples, run.generator), model=None)
        values.append(eigenpairs(operator, rtol=rtol, generator=run.generator).largest)
        lens.count(operator.products)
        if run.progress is not None:
            run.progress("minibatches", number + 1, batches)
    found = torch.tensor(values, dtype=torch.float64)
    mean, stderr = student(found)
    note = f"over {batches} batches: {float(found.min()):.3g} to {float(found.max()):.3g}"
    return Estimate(float(mean), float(stderr), "estimate", note=note, arrays={"batches": found})
