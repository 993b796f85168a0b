"""Curvature as an optimiser's own steps meet it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from flatlens.curvature import Hessian
from flatlens.curvature.krylov import Remembered
from flatlens.curvature.muon import ball_of, climb_in_ball, dual_norm
from flatlens.curvature.preconditioned import PreconditionedHessian, leading_rate, preconditioner_of
from flatlens.curvature.space import inner
from flatlens.errors import BadInput, Overflows
from flatlens.estimate import Estimate, undefined
from flatlens.measures.card import PERMUTATION, Run, on_lens
from flatlens.measures.differenced import sharded_top
from flatlens.measures.lens import Lens
from flatlens.measures.options import require_one_of, require_tolerance
from flatlens.measures.rows import with_note
from flatlens.measures.tops import top_of
from flatlens.perturbation.critical import critical_step
from flatlens.perturbation.differences import ShardedHessian
from flatlens.perturbation.steps import Landscape, next_update
from flatlens.perturbation.weights import coarsest_inside

NO_OPTIMISER = (
    "it needs the optimiser that trains the network: Lens(problem, optimiser=...), Tracker.step(optimiser=...)"
)
OF_EVAL = (
    "P is of training, where BatchNorm takes the batch's statistics, and H of evaluation: Problem(batchnorm='train') "
    "measures the loss that is trained"
)
SAFE_SQUARE = 1e20  #: a product with a vector whose squared length is between this and its inverse is safe
RISK_ROUNDING = 4.0  #: rounding error of a risk, in units of the dtype's eps and of the risk
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
            return sharded_top(lens, run, "preconditioned_sharpness", rtol, P=P)
        operator = PreconditionedHessian(lens.problem, P, model=lens.model)
    except Overflows:
        raise
    except BadInput as error:
        return undefined(str(error))
    found = top_of(lens, run, "preconditioned_sharpness", operator, rtol)
    eval_mode = not lens.problem.coupled and any(isinstance(m, _BatchNorm) for m in lens.model.modules())
    return with_note(found, OF_EVAL if eval_mode else "")


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


def direction_of(lens: Lens, along: str) -> tuple[dict[str, Tensor], bool]:
    """Return (a direction by parameter, whether it comes from the lens's own gradient).

    "update": the lens's own direction, else its optimiser's next update, else the gradient. "gradient": the gradient.

    Raises:
        BadInput: the optimiser has no next update.
    """
    if along == "gradient" or (lens.along is None and lens.optimiser is None):
        return lens.gradient, True
    if isinstance(lens.along, Mapping):
        return dict(lens.along), False
    if lens.along is not None:  # another loss, whose gradient the optimiser follows
        _, gradient = Landscape(lens.along).risk_and_gradient()
        update = gradient if lens.optimiser is None else next_update(lens.optimiser, lens.along.model, gradient)
        return update, False
    assert lens.optimiser is not None
    return next_update(lens.optimiser, lens.problem.model, lens.gradient), True


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
    differentiates=False,
)
def critical_sharpness(lens: Lens, run: Run, *, rtol: float = 0.05) -> Estimate:
    """Critical sharpness: 2 / eta_c, eta_c the step along the next update at which the risk rises above its value.

    The update is what the lens's optimiser would subtract next at learning rate 1, given the gradient on the measured
    data; without an optimiser the gradient. `Lens(along=...)` gives a direction of one's own, or another problem, whose
    gradient the optimiser follows: then it is the relative critical sharpness, of one loss while another is trained.

    Where the risk is quadratic along the update D, it is D^T H D / <D, gradient>: for gradient descent the curvature
    along the gradient. If it exceeds 2 / lr, the next step raises the risk. No second derivative is needed, so it works
    with any kernel of attention. The half-width of the interval is the largest of three shares of the value: how far
    the last forward moved eta_c (or was from it, or shows it elsewhere on a line from its own side, if that is more), a
    third of `rtol`, and rounding, of the risk, the outputs and the weights, over the change of the risk. The search
    ends when the first is at most `rtol`. If it ends before, the interval is that of the last steps with changes of
    either sign. `arrays` has the steps tried and the changes of the risk. A rise between two of them that is followed
    by a fall goes unseen.
    """
    require_tolerance(rtol)
    try:
        direction, own = direction_of(lens, "update")
    except Overflows:
        raise
    except BadInput as error:
        return undefined(str(error))
    if not inner(direction, direction) > 0:
        return undefined(lens.underflow or "the direction is zero")
    slope = -inner(direction, lens.gradient) if own else None
    if slope == 0:
        return undefined("the risk has no slope along the next update")
    if slope is not None and not slope < 0:
        return undefined("the next update does not go downhill on this data: every small step raises the risk")
    landscape, key = Landscape(lens.problem, model=lens.model), ("critical_sharpness", None)
    here = landscape.risk() if slope is None else lens.risk_and_gradient[0]
    earlier = lens.remembered.get(key)
    rate = 1.0 if lens.optimiser is None else leading_rate(lens.optimiser)
    first = rate if earlier is None else float(earlier.values[0])
    rounding = RISK_ROUNDING * torch.finfo(lens.problem.dtype).eps * abs(here)
    if slope is not None:
        inside = landscape.rounding(lens.gradient)
        coarse = coarsest_inside(lens.problem, lens.model) != lens.problem.dtype
        # a shorter step changes the risk by rounding alone
        first = max(first, 100 * rounding / -slope, 10 * inside / -slope if coarse else 0.0)
        rounding += 2 * inside  # of both ends of a difference
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
    lost = 0.0 if slope is None else rounding / (-slope * found.step)
    if lost > 0.5:
        return undefined(f"the risk changes by rounding alone along the update; {tried}")
    share = max(found.error / found.step, rtol / 3, lost)
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
    spread over processes and have no second derivative, it comes from central differences of gradients, with their
    error; it is undefined where gradients jump.
    """
    require_one_of(("update", "gradient"), along=along)
    operator = None if lens.problem.sharded else Hessian(lens.problem, model=lens.model)
    if operator and not lens.has_gradient and (along == "gradient" or lens.along is None):
        lens.risk_and_gradient = operator.risk_and_gradient()  # of the graphs that the product needs, too
    try:
        direction, _ = direction_of(lens, along)
    except Overflows:
        raise
    except BadInput as error:
        return undefined(str(error))
    direction = {name: part for name, part in direction.items() if name in lens.problem.parameters}
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
