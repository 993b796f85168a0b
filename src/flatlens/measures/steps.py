"""Curvature as an optimiser's own steps meet it; minibatches: the spread of their gradients, their sharpness."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flatlens.curvature import Hessian, eigenpairs
from flatlens.curvature.krylov import Remembered
from flatlens.curvature.optimiser_geometry import (
    PreconditionedHessian,
    ball_of,
    climb_in_ball,
    dual_norm,
    edge_of_batches,
    leading_rate,
    preconditioner_of,
)
from flatlens.curvature.probes import mean_of_forms, student
from flatlens.curvature.space import inner
from flatlens.errors import BadInput, Overflows
from flatlens.estimate import Estimate, Kind, joined_notes, undefined, with_note
from flatlens.measures.definition import Parts, Run, require_count, require_one_of, require_tolerance
from flatlens.measures.leading_eigenvalues import of_hessian, sharded_top, top_of
from flatlens.measures.lens import Lens
from flatlens.operations.graph import LEAF
from flatlens.operations.table import operation_of
from flatlens.perturbation.autograd_check import coarsest_inside
from flatlens.perturbation.nudges import NUDGES, Nudged, nudges, product_at, product_with, rounds
from flatlens.perturbation.searches import critical_step
from flatlens.perturbation.weights import Landscape, ShardedHessian, Spread, spread_of, update_after_ascent
from flatlens.problem import Problem
from flatlens.problem.batches import FORWARD_CHUNK
from flatlens.progress import count_of

NO_OPTIMISER = (
    "it needs the optimiser that trains the network: Lens(problem, optimiser=...), Tracker.step(optimiser=...)"
)
OF_EVAL = (
    "the preconditioner is from training, with batch statistics in BatchNorm, and the Hessian from evaluation: "
    "Problem(batchnorm='train') measures the training loss"
)
SAFE_SQUARE = 1e20  #: a product with a vector whose squared length is between this and its inverse is safe
RISK_ROUNDING = 4.0  #: rounding error of a risk, in units of the dtype's eps and of the risk
SEARCHES = 5  #: times that weights and inputs are nudged for a search
CLIMBS = 4  #: starts of the search over Muon's ball; the first is the gradient


of_steps = partial(of_hessian, unit="1 / learning rate", works_coupled=True, works_sharded=True)


@of_steps(
    id="H8",
    symbol=r"\lambda_{max}(P^{-1/2} H P^{-1/2})",
    source="adaptive2022 section 3",
    cost="Lanczos: about 10 Hessian products",
    networks=30,
)
def preconditioned_sharpness(lens: Lens, run: Run, *, rtol: float = 1e-3) -> Estimate:
    """Sharpness in the optimiser's own geometry: lmax(P^-1/2 H P^-1/2), P the matrix by which it divides the gradient.

    P is read off the state of the lens's optimiser (torch's and others, `flatlens.curvature.frozen_steps`); it is 1
    for SGD, diagonal for Adam, along axes of their own for SOAP and Shampoo; weight decay counts. `edge_of` gives the
    value above which its steps grow on a quadratic while P is frozen: 38 / lr for Adam with beta1 = 0.9. It is the
    largest eigenvalue that a search found, as with `sharpness`.

    Muon's geometry is not an inner product. There the value is the largest <D, H D> over matrices D of spectral norm 1
    (in Muon's own scaling), divided by the dual norm of the gradient, with the edge 2 / lr for steps without momentum
    (norms2026). It is the best of four climbs, and a lower bound. It rises wherever the gradient falls.
    """
    require_tolerance(rtol)
    if lens.optimiser is None:
        return undefined(NO_OPTIMISER)
    muon = type(lens.optimiser) is getattr(torch.optim, "Muon", None)
    if muon and lens.problem.sharded:
        return undefined("the geometry of Muon needs whole matrices: these are spread over processes")
    try:
        if muon:  # the best of several climbs over its ball
            every = ball_of(lens.optimiser, lens.problem.model).items()
            radius, gradient = {name: s for name, s in every if name in lens.problem.parameters}, lens.gradient
            operator = Hessian(lens.problem, radius, model=lens.model)
            size = dual_norm(gradient, radius)
            if not size > 0:
                return undefined("the gradient is zero: Muon's step has no size to compare with")
            drawn = torch.randn(CLIMBS - 1, operator.size, generator=run.generator, dtype=torch.float64)
            first = operator.space.flat({name: gradient[name] for name in radius})
            starts = [first, *drawn.to(operator.space.point())]
            climbs = climb_in_ball(operator, radius, starts, progress=run.progress) / size
            lens.count(operator.products)
            note = f"the best of {CLIMBS} climbs; a larger curvature may exist"
            best, arrays = float(climbs.max()), {"climbs": climbs}
            return Estimate(best, kind="lower bound", note=note, products=operator.products, arrays=arrays)
        P = preconditioner_of(lens.optimiser, lens.problem.model)
        if lens.problem.sharded and P.axes:
            return undefined("the preconditioner needs whole matrices: these are spread over processes")
        if lens.problem.sharded:
            return sharded_top(lens, run, "preconditioned_sharpness", rtol, P=P)
        divided = PreconditionedHessian(lens.problem, P, model=lens.model)
    except Overflows:
        raise
    except BadInput as error:
        return undefined(str(error))
    found = top_of(lens, run, "preconditioned_sharpness", divided, rtol)
    eval_mode = not lens.problem.coupled and any(isinstance(m, _BatchNorm) for m in lens.model.modules())
    return with_note(found, OF_EVAL if eval_mode else "")


def direction_of(lens: Lens, along: str) -> tuple[dict[str, Tensor], bool] | str:
    """Return (a direction, whether it is from the lens's own gradient), or why there is none."""
    # the lens's own direction, else its optimiser's next update, else the gradient; or the gradient, if asked for
    if along == "gradient" or (lens.along is None and lens.optimiser is None):
        return lens.gradient, True
    if isinstance(lens.along, Mapping):
        return dict(lens.along), False
    try:
        if lens.along is None:
            assert lens.optimiser is not None
            landscape = Landscape(lens.problem, model=lens.model)
            return update_after_ascent(lens.optimiser, landscape, lens.gradient), True
        landscape = Landscape(lens.along)  # of another loss, which the optimiser follows
        _, gradient = landscape.risk_and_gradient()
        return gradient if lens.optimiser is None else update_after_ascent(lens.optimiser, landscape, gradient), False
    except Overflows:
        raise
    except BadInput as error:
        return str(error)


def nudged_forms(lens: Lens, seeds: Iterable[int], along: str) -> Nudged | str:
    """Return the direction and the Hessian's product with it at each nudge, or why there is no direction."""
    directions, products, factor = list[Tensor](), list[Tensor](), 0.0
    if isinstance(lens.enlarged, str):
        return lens.enlarged
    for seed in seeds:
        with nudges(lens.enlarged, lens.model, seed) as problem:
            operator, there = Hessian(problem, model=lens.model), lens.at(problem)
            there.risk_and_gradient = operator.risk_and_gradient()
            chosen = direction_of(there, along)
            if isinstance(chosen, str):
                return chosen
            own = {name: part for name, part in chosen[0].items() if name in problem.parameters}
            u = operator.space.flat(own).to(torch.float64)
            if not float(u.norm()) > 0:
                return "the direction is zero"
            u = u / u.norm()
            product = product_at(operator, u.to(operator.dtype), factor) if factor else None
            if product is None:
                found = product_with(operator, u.to(operator.dtype), factor or problem.scale)
                if isinstance(found, str):
                    return found
                product, factor = found
            directions.append(u.cpu())
            products.append(product)
            lens.count(operator.products)
    return Nudged(torch.stack(directions), torch.stack(products))


@of_steps(
    id="H9",
    symbol=r"2 / \eta_c",
    source="critical2026 section 3",
    cost="one backward pass, 2 to 8 forward passes",
    differentiates=False,
    networks=16,
)
def critical_sharpness(lens: Lens, run: Run, *, rtol: float = 0.05) -> Estimate:
    """Critical sharpness: 2 / eta_c, eta_c the step along the next update at which the risk rises above its value.

    The update is what the lens's optimiser would subtract next at learning rate 1, given the gradient on the measured
    data (SAM's: the gradient after its ascent); without an optimiser the gradient. `Lens(along=...)` gives a direction
    of one's own, or another problem, whose gradient the optimiser follows: then it is the relative critical sharpness,
    of one loss while another is trained.

    Where the risk is quadratic along the update D, it is D^T H D / <D, gradient>: for gradient descent the curvature
    along the gradient. If it exceeds 2 / lr, the next step raises the risk. No second derivative is needed, so it works
    with any kernel of attention. The half-width of the interval is the largest of three shares of the value: how far
    the last forward moved eta_c (or was from it, or shows it elsewhere on a line from its own side, if that is more), a
    third of `rtol`, and rounding, of the risk, the outputs and the weights, over the change of the risk. The search
    ends when the first is at most `rtol`. If it ends before, the interval is that of the last steps with changes of
    either sign. `arrays` has the steps tried and the changes of the risk. A rise between two of them that is followed
    by a fall goes unseen. Where operations inside compute in a half type, it is the mean of five searches, with weights
    and inputs moved by less than one rounding; `arrays["searches"]` has their values.
    """
    require_tolerance(rtol)
    if not rounds(lens.problem, lens.model):
        return _critical(lens, rtol)
    # where operations inside round, each search meets another rounding
    if isinstance(lens.enlarged, str):
        return undefined(lens.enlarged)
    found = []
    for seed in range(SEARCHES):
        with nudges(lens.enlarged, lens.model, seed) as problem:
            found.append(_critical(lens.at(problem), rtol))
    unlike = [one for one in found if one.kind != "estimate"]
    if unlike:
        return next((one for one in unlike if one.kind == "undefined"), unlike[0])
    values = torch.tensor([one.value for one in found], dtype=torch.float64)
    own = sum(one.stderr for one in found) / SEARCHES
    note = f"{SEARCHES} searches at weights and inputs moved by less than one rounding inside; {found[0].note} each"
    stderr = max(float(values.std()), own)
    return replace(found[0], value=float(values.mean()), stderr=stderr, note=note, arrays={"searches": values})


def _critical(lens: Lens, rtol: float) -> Estimate:
    """Return the critical sharpness by one search."""
    # the direction, and the slope of the risk along it where that is known
    chosen = direction_of(lens, "update")
    if isinstance(chosen, str):
        return undefined(chosen)
    direction, own = chosen
    if not inner(direction, direction) > 0:
        return undefined(lens.underflow or "the direction is zero")
    slope = -inner(direction, lens.gradient) if own else None
    if slope == 0:
        return undefined("the risk has no slope along the next update")
    if slope is not None and not slope < 0:
        return undefined("the next update does not go downhill on this data: every small step raises the risk")
    # the first step tried: the last one of an earlier lens, else a learning rate, but none that is lost in rounding
    landscape, key = Landscape(lens.problem, model=lens.model), ("critical_sharpness", None)
    here = landscape.risk() if slope is None else lens.risk_and_gradient[0]
    earlier = lens.remembered.get(key)
    rate = 1.0 if lens.optimiser is None else leading_rate(lens.optimiser)
    first = rate if earlier is None else float(earlier.values[0])
    rounding = RISK_ROUNDING * torch.finfo(lens.problem.dtype).eps * abs(here)
    if slope is not None:
        inside = landscape.rounding(lens.gradient)
        coarse = coarsest_inside(lens.problem, lens.model) != lens.problem.dtype
        first = max(first, 100 * rounding / -slope, 10 * inside / -slope if coarse else 0.0)
        rounding += 2 * inside  # of both ends of a difference
    with landscape.walk(direction) as move:

        def change(step: float) -> float:
            move(step)
            return landscape.risk() - here

        found = critical_step(change, first, slope=slope, rtol=rtol)
    arrays = {"steps": found.steps, "changes": found.changes}
    tried = f"{landscape.forwards} forward passes"
    if found.step == 0:
        note = f"the risk rose at the smallest step tried; {tried}"
        return Estimate(2 / float(found.steps[0]), kind="lower bound", note=note, arrays=arrays)
    if found.step == math.inf:
        note = f"the risk rose at no step tried; {tried}"
        return Estimate(2 / float(found.steps[-1]), kind="upper bound", note=note, arrays=arrays)
    # the value, and its error: of the search, of the tolerance, or of rounding
    lens.remember(key, Remembered(torch.tensor([found.step], dtype=torch.float64), torch.empty(1, 0)))
    lost = 0.0 if slope is None else rounding / (-slope * found.step)
    if slope is not None and lost > 0.5:
        return undefined(
            f"the risk changes by rounding alone along the update: by {rounding:.1g} at its critical step of about "
            f"{found.step:.1g}; only one above {2 * rounding / -slope:.1g} can be measured; {tried}"
        )
    share = max(found.error / found.step, rtol / 3, lost)
    note = "" if found.error <= rtol * found.step else "; stopped before the tolerance was reached"
    value = 2 / found.step
    return Estimate(value, share * value / 1.96, "estimate", note=tried + note, arrays=arrays)


@of_steps(
    id="H10",
    symbol=r"u^T H u / \|u\|^2",
    source="critical2026 section 3",
    unit="loss / parameter^2",
    cost="one backward, one Hessian product",
    networks=16,
)
def directional_sharpness(lens: Lens, run: Run, *, along: str = "update") -> Estimate:
    """Curvature of the risk along a direction u: u^T H u / ||u||^2.

    `along="update"` is the optimiser's next update, without an optimiser the gradient, or what `Lens(along=...)` gives:
    a vector by parameter, or another problem whose gradient is followed. `along="gradient"` is the gradient of this
    problem. Along the gradient, gradient descent raises a quadratic risk where it exceeds 2 / lr. Where parameters are
    spread over processes and have no second derivative, it comes from central differences of gradients, with their
    error; it is undefined where gradients jump. Where operations inside compute in a half type, it is an estimate from
    eight times its cost: weights and inputs move by less than one rounding, and each product has factors of two moves.
    """
    require_one_of(("update", "gradient"), along=along)
    if rounds(lens.problem, lens.model):
        return _despite_rounding(lens, along)
    operator = None if lens.problem.sharded else Hessian(lens.problem, model=lens.model)
    if operator and not lens.has_gradient and (along == "gradient" or lens.along is None):
        lens.risk_and_gradient = operator.risk_and_gradient()  # of the graphs that the product needs, too
    chosen = direction_of(lens, along)
    if isinstance(chosen, str):
        return undefined(chosen)
    direction = {name: part for name, part in chosen[0].items() if name in lens.problem.parameters}
    square = inner(direction, direction)
    if not square > 0:
        return undefined(lens.underflow or "the direction is zero")
    if operator is None:
        H = ShardedHessian(Landscape(lens.problem, model=lens.model))
        u = H.flat(direction) / math.sqrt(square)
        product, off = H.with_error(u)
        stderr = abs(float(u @ off)) / 1.96
        return Estimate(float(u @ product), stderr, "exact" if H.exact else "estimate", note=f"by {H.by}")
    if not 1 / SAFE_SQUARE < square < SAFE_SQUARE:  # a copy of the direction costs as much as a forward
        direction = {name: part / math.sqrt(square) for name, part in direction.items()}
        square = 1.0
    value = operator.quadratic(direction) / square
    lens.count(operator.products)
    return Estimate(value, products=operator.products)


def _despite_rounding(lens: Lens, along: str) -> Estimate:
    """Return the form along a direction where operations inside the network compute in a half type."""
    found, eps = nudged_forms(lens, range(NUDGES), along), torch.finfo(coarsest_inside(lens.problem, lens.model)).eps
    why = found if isinstance(found, str) else found.lost(eps)
    if isinstance(found, str) or why:
        return undefined(why)
    note = f"mean over {NUDGES} nudges of weights and inputs by less than one rounding inside"
    return Estimate(*found.with_error(eps), "estimate", note=note, products=NUDGES)


@of_hessian(
    id="H11",
    symbol=r"\mathrm{tr}\,\Sigma / \|g\|^2",
    source="noise2018 section 2.2",
    unit="samples",
    cost="two backward passes over the data",
    works_sharded=True,
    networks=20,
)
def gradient_noise_scale(lens: Lens, run: Run, *, batches: int = 64, sampled: bool = True) -> Estimate | Parts:
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
        return undefined("at least 3 samples are needed")
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
    note = f"the gradient of {n:.0f} samples cannot be distinguished from 0: use more samples"
    if not largest > 0:  # smaller even than its noise makes it by chance
        return {"": undefined(note), **parts}
    if not square > 1.96 * parts["gradient"].stderr:
        least = max(covariance - 1.96 * parts["covariance"].stderr, 0.0) / largest
        return {"": Estimate(least, kind="lower bound", note=note), **parts}
    ratios = (covariances / squares.clamp(min=1e-300)).clamp(min=1e-300).log()
    return {"": Estimate(covariance / square, covariance / square * stderr(ratios), kind), **parts}


@of_hessian(
    id="H12",
    symbol=r"E_B \lambda_{max}(H_B)",
    source="sharpening section 3",
    cost="batches x some 20 Hessian products on one batch",
    networks=30,
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
        return undefined(f"the data has {count_of(lens.problem.n, 'sample')}: samples={samples} cannot be drawn")
    values, residuals, products = [], [], 0
    for _ in run.counted("minibatches", batches):
        operator = Hessian(lens.problem.subset(samples, run.generator), model=None)
        pairs = eigenpairs(operator, rtol=rtol, generator=run.generator)
        values.append(pairs.largest)
        residuals.append(float(pairs.residuals[0]))
        products += operator.products
        lens.count(operator.products)
    found = torch.tensor(values, dtype=torch.float64)
    mean, stderr = mean_of_forms(found)
    stderr += sum(residuals) / batches / 1.96
    note = f"over {batches} batch{'es' * (batches != 1)}: {float(found.min()):.3g} to {float(found.max()):.3g}"
    return Estimate(float(mean), float(stderr), "estimate", note=note, arrays={"batches": found}, products=products)


_KINKS = "whether an operation has kinks"


@dataclass(frozen=True)
class AlongGradient:
    """A curvature along the gradient: the cubic's, and its distance from the difference of the two slopes."""

    value: float
    error: float


def has_kinks(problem: Problem, model: nn.Module) -> bool | None:
    """Return whether the gradient of the risk jumps somewhere, by its operations; None if one of them is unknown."""
    facts = problem.facts
    if _KINKS not in facts:
        kinds, foreign = Landscape(problem, model=model, few=problem.probes[:1]).operations()
        known = [operation_of(kind) for kind in kinds if kind != LEAF]
        certain = not foreign and all(op is not None for op in known)
        facts[_KINKS] = any(op is not None and op.kinks for op in known) or (False if certain else None)
    found: bool | None = facts[_KINKS]
    return found


def along_own_gradient(lens: Lens, samples: Tensor, longest: float, typical: float) -> AlongGradient | None:
    """Return the curvature of a batch's mean loss along its own gradient; None where that is zero, or the loss is.

    It comes from values and gradients at two points. `longest`: the weights' length; `typical`: the curvature of
    earlier batches, or 0.

    With phi(t) the loss at a distance t down the gradient, its values and slopes at 0 and h determine a cubic:

        phi''(0) = 6 (phi(h) - phi(0)) / h^2 - (4 phi'(0) + 2 phi'(h)) / h + O(h^2)
        phi''(0) = (phi'(h) - phi'(0)) / h                                 + O(h)

    The cubic has the smaller truncation error. Both hold the rounding of the slopes, so that their distance exceeds the
    cubic's error from both causes.
    """
    landscape = Landscape(lens.problem.part(samples), model=lens.model)
    here, gradient = landscape.risk_and_gradient()
    size, mass = math.sqrt(inner(gradient, gradient)), landscape.mass
    if not (size > 0 and mass > 0 and here):
        return None
    # a share of the distance to the minimum of a parabola that reaches 0: of one with this slope, or with the curvature
    # of earlier batches; at most that share of the weights' length. The truncation error is its first power, the error
    # of rounding its power -2
    lengths = [2 * abs(here) / size, longest or math.inf]
    lengths += [math.sqrt(2 * abs(here) / (typical * mass))] if typical else []
    h = 2 * torch.finfo(lens.problem.dtype).eps ** (1 / 3) * min(lengths)
    # the loss and its slope there
    with landscape.walk(gradient) as move:
        move(h / size)
        there, ahead = landscape.risk_and_gradient()
    slope, slope_there = -size, -inner(ahead, gradient) / size
    cubic = 6 * (there - here) / h**2 - (4 * slope + 2 * slope_there) / h
    return AlongGradient(cubic / mass, abs(cubic - (slope_there - slope) / h) / mass)


MOST_OFF = 0.1  #: error of a difference, relative to the value, above which by="auto" takes a product
NO_GRADIENT = "the gradient of a batch is zero: it has no direction"


@of_hessian(
    id="H13",
    symbol=r"E_B \, g_B^T H_B g_B / \|g_B\|^2",
    source="batches2024",
    cost="batches x some five training steps; three in networks without kinks",
    networks=16,
)
def batch_sharpness(lens: Lens, run: Run, *, samples: int = 32, batches: int = 32, by: str = "auto") -> Estimate:
    """Curvature of a minibatch's loss along its own gradient, on average over batches of `samples` samples.

    g_B and H_B are the gradient and the Hessian of the loss of one batch. Give the batch size of training: plain SGD
    raises this number until it hovers at 2 / lr, while the sharpness of all the data stays below (Andreyev and
    Beneventano 2024). With momentum b it hovers between 2(1-b) / lr, for small batches, and 2(1+b) / lr, for large
    ones; for other optimisers no edge is known. The note says the edge of the lens's optimiser.

    Each batch is drawn without replacement, independently of the others. The error is that of a mean of few skewed
    numbers; `arrays` has each batch's value. With all samples it is `directional_sharpness(along='gradient')`, exact.
    Where the gradient of a batch is zero, it is undefined. Where operations inside compute in a half type, each batch
    takes two moves by less than one rounding, and the interval has what rounds alike at both.

    `by="product"` takes a Hessian product on each batch: some five training steps. `by="differences"` takes the loss
    and the gradient at two points: some three steps, and no second derivative. Truncation and rounding of the
    differences are in the interval; `arrays["errors"]` has them. Where the gradient jumps, as with ReLU, differences
    are undefined.
    `by="auto"` takes differences where all operations are known to have no kinks, and the product for batches whose
    difference may be off by more than a tenth.
    """
    require_count(1, samples=samples)
    require_count(2, batches=batches)
    require_one_of(("auto", "product", "differences"), by=by)
    if samples > lens.problem.n:
        return undefined(f"the data has {count_of(lens.problem.n, 'sample')}: samples={samples} cannot be drawn")
    whole, coarse = samples == lens.problem.n, rounds(lens.problem, lens.model)
    edge = "" if lens.optimiser is None else edge_in_words(lens.optimiser)
    # differences need a gradient that does not jump, and more digits than a half type has
    kinks = None if coarse or by == "product" else has_kinks(lens.problem, lens.model)
    if by == "differences" and (coarse or kinks):
        why = "operations inside compute in a half type" if coarse else "its gradient jumps, as that of a ReLU does"
        return undefined(f"differences of gradients are wrong in this network: {why}; use by='product'")
    if whole and coarse:
        return with_note(_despite_rounding(lens, "gradient"), edge)
    use = by == "differences" or (by == "auto" and kinks is False and not whole)
    # the curvature of each batch, with its error
    found, products, typical = list[AlongGradient](), 0, 0.0
    longest = float(Landscape(lens.problem, model=lens.model).space.point().norm(dtype=torch.float64))
    for number in run.counted("minibatches", 1 if whole else batches):
        chosen = torch.randperm(lens.problem.n, generator=run.generator)[:samples]
        one = along_own_gradient(lens, chosen, longest, typical) if use else None
        if by != "differences" and not (one and one.error <= MOST_OFF * max(abs(one.value), typical)):
            exact = _of_product(lens, chosen, number if coarse else None)
            if isinstance(exact, str):
                return undefined(exact)
            one, products = exact, products + 1 + coarse
        if one is None:
            return undefined(NO_GRADIENT)
        found.append(one)
        typical = sum(abs(each.value) for each in found) / len(found)
    lens.count(products)
    if whole and not use:
        return Estimate(found[0].value, note=edge, products=1)
    # their mean: batches vary, and their errors may have one sign
    values, errors = torch.tensor([(one.value, one.error) for one in found], dtype=torch.float64).mT
    mean, stderr = (values.mean(), values.new_zeros(())) if whole else mean_of_forms(values)
    how = "two moves of each by less than one rounding inside" if coarse else ""
    if use:
        how = f"by differences of gradients{f', {products} by a product' if products else ''}"
    over = f"over {len(found)} batch{'es' * (len(found) != 1)} of {count_of(samples, 'sample')}"
    error = math.hypot(float(stderr), float(errors.mean()) / (1.0 if coarse else 1.96))
    note, arrays = joined_notes(over, how, edge), {"batches": values, **({"errors": errors} if use else {})}
    return Estimate(float(mean), error, "estimate", note=note, arrays=arrays, products=products)


def _of_product(lens: Lens, samples: Tensor, number: int | None) -> AlongGradient | str:
    """Return a batch's curvature along its gradient, by a product, or (numbered) two nudges; or why there is none."""
    problem = lens.problem.part(samples)
    with problem.measuring(lens.model), torch.no_grad():
        ran = (problem.run(lens.model, problem.place(raw)) for raw in problem.batches(FORWARD_CHUNK))
        problem.mass = sum(float(problem.loss.mass(f, y).sum()) for f, y in ran)
    if not problem.mass > 0:
        return "no target of a batch counts"
    if number is not None:
        eps = torch.finfo(coarsest_inside(problem, lens.model)).eps
        pair = nudged_forms(lens.at(problem), (2 * number, 2 * number + 1), "gradient")
        if why := pair if isinstance(pair, str) else pair.lost(eps):
            return f"on a batch {why}"
        assert isinstance(pair, Nudged)
        return AlongGradient(pair.form(), pair.bias(eps))
    operator = Hessian(problem, model=lens.model)
    _, gradient = operator.risk_and_gradient()
    square = inner(gradient, gradient)
    if not square > 0:
        return NO_GRADIENT
    size = math.sqrt(square)
    return AlongGradient(operator.quadratic({name: part / size for name, part in gradient.items()}), 0.0)


def edge_in_words(optimiser: torch.optim.Optimizer) -> str:
    """Return the edge of `batch_sharpness` in words, with why there is none."""
    low, high = edge_of_batches(optimiser)
    if math.isnan(high):
        return f"no edge is known for {type(optimiser).__name__} with these settings"
    if low == high:
        return f"its edge is 2 / lr = {high:.4g}"
    b = float(optimiser.param_groups[0]["momentum"])
    return f"its edge is between 2(1-b) / lr = {low:.4g}, for small batches, and 2(1+b) / lr = {high:.4g}, b = {b:g}"
