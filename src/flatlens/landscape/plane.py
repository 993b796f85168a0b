"""fl.plane: the loss around a network, on a plane and along its two directions, and how far its quadratic holds.

    q(x) = L + x g^T d + x^2 d^T H d / 2,
    holds at x where |L(theta + x d) - q(x)| <= rtol max(|d^T H d| x^2 / 2, L / 100)

The right side is a share of the quadratic's own rise, that of its second order, or of a hundredth of the loss: nearer
to the network, the kinks of a ReLU would decide what nobody sees. Towards each side, looks at distances that grow by
`FACTOR` go on until the first failure; the last distance that held and the first that failed bracket the end, and are
brought together by bisection. A failure between two looks that held would be missed.

Directions are random by filters, leading eigenvectors, or principal components of a trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeAlias

import pandas as pd
import torch
from torch import Tensor, nn

from flatlens.curvature import Hessian, eigenspace
from flatlens.curvature.space import dot
from flatlens.errors import BadInput, UnknownName
from flatlens.estimate import Progress
from flatlens.landscape.ends import lens_of, network_of
from flatlens.measures import Lens, about
from flatlens.measures.definition import drawing, require_count, require_positive
from flatlens.perturbation import Elsewhere
from flatlens.problem import Problem
from flatlens.problem.ranks import ALONE
from flatlens.progress import Shown, progress_shown
from flatlens.result import Result, of_report

NOT_SEEN = (
    "A plane shows two directions of all: a network that is flat here can be sharp elsewhere, and a valley that turns "
    "looks closed."
)
FACTOR = math.sqrt(2)  #: factor between distances
SEEN = 0.01  #: a rise below this share of the loss counts as one of this size
_HALVINGS = 6  #: bisections of the bracket, in the logarithm: its ends then differ by half a percent
_NEAREST = 100.0  #: the first look is where the allowed difference is this many roundings
_LONGEST = 64.0  #: looks end at this many times the norm of the weights

WhichDirections: TypeAlias = Literal["random", "eigenvectors"] | Sequence[nn.Module | Mapping[str, Tensor]]


@dataclass(frozen=True, eq=False)
class Slice:
    """The loss along one direction through the network, with its quadratic."""

    name: str
    length: float  #: ||d||: the distance of the weights for x = 1
    first: float  #: g^T d
    second: float  #: d^T H d
    holds: tuple[tuple[float, float], tuple[float, float]]
    """Towards -d and towards d, in x: the farthest look to which the quadratic holds, and the first at which not.

    The first is 0 where rounding hides the nearest looks or they fail, the second inf where no look fails.
    """
    x: Tensor = field(repr=False)  #: (k,) float64
    loss: Tensor = field(repr=False)  #: (k,) float64, the risk at theta + x d

    @property
    def quadratic(self) -> Tensor:
        """The Hessian's quadratic at x, (k,)."""
        at = self.loss[len(self.loss) // 2]  # x = 0
        return at + self.x * self.first + self.x.square() * self.second / 2

    @property
    def nearest(self) -> tuple[float, float]:
        """The bracket of the side where the quadratic ends first, in x."""
        return min(self.holds, key=lambda side: side[1])


class LossPlane(Result):
    """The loss on a plane through a network, and slices along its two directions.

    `found.loss[i, j]` is the loss at x[i], y[j] steps of the directions from the network, whose own is in the middle.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> data = (torch.eye(2, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64))
    >>> found = fl.plane(fl.Problem(net, "half_squared_error", data), points=3, progress=False)
    >>> tuple(found.loss.shape), found.slices[0].nearest[1]  # the loss is a quadratic: no look fails
    ((3, 3), inf)
    """

    _KIND = "plane"

    def __init__(
        self, x: Tensor, y: Tensor, loss: Tensor, slices: tuple[Slice, Slice], about: Mapping[str, Any],
        trajectory: Tensor | None,
    ) -> None:  # fmt: skip
        self.x, self.y, self.loss = x, y, loss
        self.slices = slices
        self.about = dict(about)
        self.trajectory = trajectory  #: of checkpoints: x, y and distance from the plane, (k, 3)

    @property
    def answer(self) -> list[str]:
        """The answer in three sentences: how far the quadratic holds, how certain, what lies beyond."""
        told = []
        for one in self.slices:
            good, bad = (end * one.length for end in one.nearest)
            rise = abs(one.second) * one.nearest[0] ** 2 / 2
            if one.second == 0:
                told.append(f"along the {one.name} there is no curvature")
            elif math.isinf(bad):
                told.append(f"along the {one.name} to a distance of at least {good:.3g}, the farthest look")
            elif not good:
                told.append(f"along the {one.name} to no distance that rounding shows: it fails at {bad:.2g}")
            else:
                told.append(f"along the {one.name} to a distance of {good:.3g}, where it has changed by {rise:.2g}")
        first = f"The quadratic holds {told[0]}; {told[1]}."
        ends = [[end * one.length for end in one.nearest] for one in self.slices]
        facts, brackets = self.about, ", ".join(f"[{good:.4g}, {bad:.4g}]" for good, bad in ends)
        certain = (
            f"Within {facts['rtol']:.0%} of its second order, or of a hundredth of the loss, towards the nearer side, "
            f"on these {facts['n']:,} samples; the looks give the brackets {brackets}, and a failure between two looks "
            "that held would be missed."
        )
        norm = f"The weights have the norm {facts['norm']:.3g}, and the loss here is {facts['loss here']:.3g}."
        return [first, certain, norm]

    def frame(self) -> pd.DataFrame:
        """Return a tidy table: one row for each point of the plane."""
        x, y = torch.meshgrid(self.x, self.y, indexing="ij")
        return pd.DataFrame({"x": x.flatten(), "y": y.flatten(), "loss": self.loss.flatten()})

    def table(self) -> pd.DataFrame:
        """Return one row for each side of each direction: the bracket of the distance to which the quadratic holds."""
        rows = []
        for one in self.slices:
            for side, (good, bad) in zip(("-", "+"), one.holds, strict=True):
                rows.append({
                    "direction": one.name, "side": side, "holds to": good * one.length, "fails at": bad * one.length,
                    "rise there": abs(one.second) * good**2 / 2, "g^T d": one.first, "d^T H d": one.second,
                    "length of d": one.length,
                })  # fmt: skip
        return pd.DataFrame(rows)

    def slice_frame(self) -> pd.DataFrame:
        """Return a tidy table of the slices: direction, x, distance, loss, quadratic."""
        parts = [
            pd.DataFrame({
                "direction": one.name, "x": one.x, "distance": one.x * one.length, "loss": one.loss,
                "quadratic": one.quadratic,
            })
            for one in self.slices
        ]  # fmt: skip
        return pd.concat(parts, ignore_index=True)

    _displayed = table

    def plot(self) -> Any:
        """Return an Altair chart of the plane and the slices; a notebook shows it by itself."""
        return of_report("figures.picture")(self)

    def _content(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        tensors = {"x": self.x, "y": self.y, "loss": self.loss}
        tensors |= {} if self.trajectory is None else {"trajectory": self.trajectory}
        rows = []
        for number, one in enumerate(self.slices):
            tensors |= {f"{number}/x": one.x, f"{number}/loss": one.loss}
            holds = [[good, None if math.isinf(bad) else bad] for good, bad in one.holds]
            rows.append({"name": one.name, "length": one.length, "first": one.first, "second": one.second,
                         "holds": holds})  # fmt: skip
        return {"slices": rows}, {name: tensor.contiguous().clone() for name, tensor in tensors.items()}

    @classmethod
    def _restored(cls, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        slices = []
        for number, row in enumerate(content["slices"]):
            sides = [(good, math.inf if bad is None else bad) for good, bad in row.pop("holds")]
            slices.append(Slice(**row, holds=(sides[0], sides[1]), x=tensors[f"{number}/x"],
                                loss=tensors[f"{number}/loss"]))  # fmt: skip
        x, y, loss = (tensors[name] for name in ("x", "y", "loss"))
        return cls(x, y, loss, (slices[0], slices[1]), content["about"], tensors.get("trajectory"))


def plane(
    lens: Lens | Problem,
    directions: WhichDirections = "eigenvectors",
    *,
    points: int = 21,
    extent: float | None = None,
    rtol: float = 0.1,
    generator: torch.Generator | None = None,
    progress: Shown = None,
) -> LossPlane:
    """Measure the loss on a plane through a network, and along its two directions: how far does its quadratic hold?

    Every value is the loss of the network at those weights, on the problem's data. Along each direction d the Hessian's
    quadratic, L + x g^T d + x^2 d^T H d / 2, holds as far as it differs from the loss by at most `rtol` of its second
    order, or of a hundredth of the loss here if that is more; the distance has a bracket towards either side. BatchNorm
    keeps its running statistics, unless the problem has batchnorm="train". The network is not changed.

    Args:
        lens: The network with its data and loss; a `Lens` or a `Problem`.
        directions: "eigenvectors": the two leading ones of the Hessian. "random": normal, each filter or row with the
            norm of the network's own, biases and norms at 0 (Li et al. 2018). Or checkpoints of one training (networks
            or state dicts): the two principal components of their differences from the network.
        points: Number of points along each direction; made odd, so that the network is in the middle.
        extent: The largest number of steps of either direction; None: 1 along random directions, 1.2 times the farthest
            checkpoint, or as far as the quadratic reaches the loss of the best constant outputs.
        rtol: The difference up to which the quadratic holds, as a share of its second order.
        generator: Draws random directions, and starts the search for eigenvectors; seeded with 0 if None.
        progress: Called with (what, done, total); None shows a bar after two seconds, False shows none.

    Raises:
        BadInput: an argument is out of range, or the checkpoints are of another architecture.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    >>> problem = fl.Problem(net, "cross_entropy", (torch.eye(3, dtype=torch.float64), torch.tensor([0, 1, 0])))
    >>> found = fl.plane(problem, points=3, progress=False)
    >>> abs(float(found.loss[1, 1]) - fl.measure(fl.Lens(problem), "loss")["loss"].value) < 1e-12
    True
    """
    # the network, and its risk and derivatives at other weights
    of = lens_of(lens, "lens", "plane")
    require_count(3, "plane", points=points)
    require_positive("plane", rtol=rtol, **({} if extent is None else {"extent": extent}))
    draws = drawing(generator, progress, "plane")
    problem = of.problem.changed(ranks=ALONE, facts={})
    elsewhere = Elsewhere(problem, model=of.model)
    hessian = Hessian(problem, model=of.model)
    with progress_shown(progress) as line:
        here = elsewhere.outcomes(elsewhere.here).risk
        scale = abs(problem.constant.loss) if problem.constant is not None else max(abs(here), 1.0)
        found = axes_of(elsewhere, hessian, directions, scale, draws, line)
        # the slices, and then the plane
        half = points // 2
        steps = torch.linspace(-1, 1, 2 * half + 1, dtype=torch.float64)
        reach = found.extents if extent is None else (extent, extent)
        slices = []
        for vector, name, far in zip(found.vectors, found.names, reach, strict=True):
            shown = lambda done, total, name=name: line(f"slice along {name}", done, total)  # noqa: E731
            slices.append(sliced(elsewhere, hessian, vector, name, far * steps, rtol=rtol, progress=shown))
        x, y = reach[0] * steps, reach[1] * steps
        loss = torch.empty(len(x), len(y), dtype=torch.float64)
        for i, along in enumerate(x.tolist()):
            for j, across in enumerate(y.tolist()):
                theta = elsewhere.here + along * found.vectors[0] + across * found.vectors[1]
                loss[i, j] = elsewhere.outcomes(theta).risk
            line("rows of the plane", i + 1, len(x))
    norm = float(elsewhere.here.norm(dtype=torch.float64))
    told = {"loss here": here, "rtol": rtol, "notes": [found.note], "norm": norm}
    return LossPlane(x, y, loss, (slices[0], slices[1]), {**about(of), **told}, found.trajectory)


@dataclass(frozen=True, eq=False)
class Axes:
    """Two directions, their names, and how far a plane goes along each."""

    vectors: tuple[Tensor, Tensor]  #: (P,) each
    names: tuple[str, str]
    extents: tuple[float, float]  #: the largest |x| and |y| by default, in steps of a direction
    note: str
    trajectory: Tensor | None = None  #: of checkpoints: x, y and the distance from the plane, (k, 3) float64


def axes_of(
    elsewhere: Elsewhere,
    hessian: Hessian,
    kind: WhichDirections,
    scale: float,
    generator: torch.Generator,
    progress: Progress,
) -> Axes:
    """Return two directions of a kind; `scale` is a loss that a plane along eigenvectors should reach."""
    if isinstance(kind, str) and kind not in (offered := ("random", "eigenvectors")):
        raise UnknownName.among("kind of directions", kind, offered, argument="directions", call="plane")
    # with the norm of the weights, filter by filter (Li et al. 2018, section 4)
    if kind == "random":
        vectors = by_filter(elsewhere, generator), by_filter(elsewhere, generator)
        note = "directions: random, each row or filter with the norm of the network's; biases and norms do not move"
        return Axes(vectors, ("random direction 1", "random direction 2"), (1.0, 1.0), note)
    # the two leading eigenvectors of the Hessian, by value
    if kind == "eigenvectors":
        found = eigenspace(hessian, 2, rtol=1e-3, generator=generator, progress=progress)
        if len(found.values) < 2:
            raise BadInput("the Hessian has fewer than two eigenvalues that are not 0", argument="directions",
                           value="eigenvectors", call="plane", remedy='"random" needs none')  # fmt: skip
        values = [float(value) for value in found.values[:2]]
        reach = [(2 * scale / abs(value)) ** 0.5 for value in values]
        names = (f"eigenvector of {values[0]:.4g}", f"eigenvector of {values[1]:.4g}")
        if names[0] == names[1]:
            names = (f"first {names[0]}", f"second {names[1]}")
        space = "" if found.converged else "; the search for them has not converged"
        space += "; a multiplet: they are two directions of several" if found.extended else ""
        note = f"directions: the two leading eigenvectors of the Hessian, of length 1{space}"
        return Axes((found.vectors[0], found.vectors[1]), names, (reach[0], reach[1]), note)
    # the two leading principal components of checkpoints less the network (Li et al. 2018, section 7)
    if not isinstance(kind, Sequence) or len(kind) < 2:
        raise BadInput('expected "random", "eigenvectors" or at least two checkpoints', argument="directions",
                       call="plane")  # fmt: skip
    differences = []
    for number, given in enumerate(kind):
        net = network_of(given)
        weights = dict(net.named_parameters()) if net is not None else given
        parts = []
        for name, p in elsewhere.space.parameters.items():
            value = weights.get(name) if isinstance(weights, Mapping) else None
            if not isinstance(value, Tensor) or value.shape != p.shape or not bool(torch.isfinite(value).all()):
                what = f"checkpoint {number} has no finite {name!r} of shape {tuple(p.shape)}"
                raise BadInput(what, argument="directions", call="plane")
            parts.append((value.detach().to("cpu", torch.float64) - p.detach().to("cpu", torch.float64)).flatten())
        differences.append(torch.cat(parts))
    rows = torch.stack(differences)
    _, lengths, components = torch.linalg.svd(rows, full_matrices=False)
    if not float(lengths[1]) > 1e-12 * float(lengths[0]):
        what = "the checkpoints and the network lie on one line"
        raise BadInput(what, argument="directions", call="plane", remedy="give more checkpoints")
    at = rows @ components[:2].T
    off = (rows - at @ components[:2]).norm(dim=1)
    shares = (lengths.square() / lengths.square().sum())[:2].tolist()
    x, y = (1.2 * float(column.abs().max()) for column in at.T)
    note = (f"directions: principal components of {len(rows)} checkpoints, with {shares[0]:.0%} and {shares[1]:.0%} of "
            f"their squared distances; checkpoints lie up to {float(off.max()):.3g} off the plane")  # fmt: skip
    first, second = (vector.to(elsewhere.here) for vector in components[:2])
    names = ("principal component 1", "principal component 2")
    return Axes((first, second), names, (x, y), note, torch.cat([at, off[:, None]], 1))


def by_filter(elsewhere: Elsewhere, generator: torch.Generator) -> Tensor:
    """Return a normal d, (P,), with ||d_j|| = ||theta_j|| for each row or filter j of each weight; biases are 0."""
    parts = {}
    for name, p in elsewhere.space.parameters.items():
        if p.ndim < 2:
            continue
        theta = p.detach().to("cpu", torch.float64).flatten(1)
        d = torch.randn(theta.shape, generator=generator, dtype=torch.float64)
        d *= theta.norm(dim=1, keepdim=True) / d.norm(dim=1, keepdim=True).clamp(min=1e-300)
        parts[name] = d.reshape(p.shape)
    return elsewhere.space.flat(parts)


def sliced(
    elsewhere: Elsewhere,
    hessian: Hessian,
    direction: Tensor,
    name: str,
    x: Tensor,
    *,
    rtol: float,
    progress: Callable[[int, int], object],
) -> Slice:
    """Return the slice along a direction (P,) at distances x, odd in number with 0 in the middle."""
    here, named = elsewhere.here, elsewhere.space.named(direction)
    _, gradient = hessian.risk_and_gradient()
    first = dot(gradient.values(), [named[one] for one in gradient])
    second = hessian.quadratic(named)

    def loss(at: float) -> float:
        return elsewhere.outcomes(here + at * direction).risk

    values = []
    for done, at in enumerate(x.tolist()):
        values.append(loss(at))
        progress(done + 1, len(x))
    centre, rounding = values[len(values) // 2], elsewhere.rounding()
    length = float(direction.norm(dtype=torch.float64))
    farthest = _LONGEST * max(float(here.norm(dtype=torch.float64)), 1.0) / max(length, 1e-300)

    def fails(at: float) -> bool:
        rise = second * at**2 / 2
        return not abs(loss(at) - centre - at * first - rise) <= rtol * max(abs(rise), SEEN * abs(centre))

    # towards either side, the bracket of the distance to which the loss without its first order is second x^2 / 2
    holds = []
    for sign in (-1.0, 1.0):
        if second == 0 or not math.isfinite(second):
            holds.append((0.0, 0.0))
            continue
        good, bad = 0.0, math.sqrt(2 * _NEAREST * max(rounding, 1e-300) / (rtol * abs(second)))
        while bad <= farthest and not fails(sign * bad):
            good, bad = bad, FACTOR * bad
        for _ in range(_HALVINGS if good and bad <= farthest else 0):
            middle = math.sqrt(good * bad)
            good, bad = (good, middle) if fails(sign * middle) else (middle, bad)
        holds.append((good, bad if bad <= farthest else math.inf))
    of_losses = torch.tensor(values, dtype=torch.float64)
    return Slice(name, length, first, second, (holds[0], holds[1]), x.to(torch.float64), of_losses)
