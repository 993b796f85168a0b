"""fl.plane: the loss around a network, on a plane and along its two directions, and how far its quadratic holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

import pandas as pd
import torch
from torch import Tensor

from flatlens.curvature import Hessian
from flatlens.landscape.directions import WhichDirections, axes_of
from flatlens.landscape.ends import lens_of
from flatlens.landscape.slices import Slice, sliced
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
        return _answer(self.slices, self.about)

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

    def _displayed(self) -> pd.DataFrame:
        return self.table()

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
    told = {
        "loss here": here,
        "rtol": rtol,
        "notes": [found.note],
        "norm": float(elsewhere.here.norm(dtype=torch.float64)),
    }
    return LossPlane(x, y, loss, (slices[0], slices[1]), {**about(of), **told}, found.trajectory)


def _answer(slices: tuple[Slice, Slice], facts: Mapping[str, Any]) -> list[str]:
    """Return three sentences: the distance along the first direction, how certain it is, what lies beyond."""
    told = []
    for one in slices:
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
    brackets = ", ".join(f"[{a * one.length:.4g}, {b * one.length:.4g}]" for one in slices for a, b in [one.nearest])
    certain = (
        f"Within {facts['rtol']:.0%} of its second order, or of a hundredth of the loss, towards the nearer side, on "
        f"these {facts['n']:,} samples; the looks give the brackets {brackets}, and a failure between two looks that "
        "held would be missed."
    )
    norm = f"The weights have the norm {facts['norm']:.3g}, and the loss here is {facts['loss here']:.3g}."
    return [first, certain, norm]
