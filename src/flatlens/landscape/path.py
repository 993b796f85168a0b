"""fl.path: what lies between two checkpoints: the loss along the line and a curve between them, and its barrier."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import pandas as pd
import torch
from torch import Tensor, nn

from flatlens.errors import UnknownName
from flatlens.estimate import Estimate
from flatlens.landscape.barrier import Barrier, bracketed, look_at
from flatlens.landscape.certificate import with_proof
from flatlens.landscape.curve import Curve, trained
from flatlens.landscape.ends import Ends, lens_of
from flatlens.landscape.matching import match
from flatlens.measures import Lens, about
from flatlens.measures.definition import drawing, require_count, require_positive
from flatlens.problem import Problem
from flatlens.progress import Shown, progress_shown
from flatlens.result import Result, of_report

LINE, MATCHED, CURVE = "line", "matched line", "curve"
NOT_SHOWN = (
    "A path shows the loss along one curve of weights: it says nothing about other directions, and a lower path may "
    "exist."
)
PROVED = "its upper end is proved"
UNPROVED = "its upper end is not proved: it assumes at most twice the curvature seen between looks"
_CHANCE = 0.9  #: a loss above this share of that of the best constant outputs is one of an untrained network
_WHERE = {LINE: "the line", MATCHED: "the line after matching neurons", CURVE: "the trained curve"}


def _estimate(value: float, stderr: float) -> Estimate:
    return Estimate(value, stderr, "estimate", source="Frankle et al. 2020", unit="loss")


@dataclass(frozen=True, eq=False)
class Way:
    """The loss along one path between two networks."""

    name: str  #: "line", "matched line" (after the neurons are matched) or "curve"
    barrier: Estimate  #: largest loss less the chord; its error is over samples, for other such samples
    low: float  #: lower end of the interval of the barrier on these samples
    high: float  #: upper end
    at: float  #: t where the barrier was seen
    largest: float  #: largest loss that was seen
    t: Tensor  #: where the loss was computed, (k,) float64, from 0 to 1
    loss: Tensor  #: the loss there, (k,) float64
    slope: Tensor  #: its derivative in t, (k,) float64
    threshold: float  #: the barrier up to which the path counts as joining its ends
    unproved: str  #: why the upper end is not proved; empty where it is

    @property
    def joins(self) -> bool | None:
        """Return True if the barrier is certainly below the threshold, False if above it, None if that is undecided.

        Certainly: with the interval on these samples and the 95% interval over samples.
        """
        margin = self.barrier.margin if math.isfinite(self.barrier.margin) else 0.0
        if self.high + margin <= self.threshold:
            return True
        return False if self.low - margin > self.threshold else None

    @property
    def chord(self) -> Tensor:
        """The straight line between the losses of the ends, (k,)."""
        return self.loss[0] + self.t * (self.loss[-1] - self.loss[0])

    @classmethod
    def of(cls, name: str, found: Barrier, threshold: float) -> Way:
        """Return the way of a barrier that was looked for."""
        t, loss, slope = torch.tensor([[one.t, one.loss, one.slope] for one in found.looks], dtype=torch.float64).T
        barrier = _estimate(found.value, found.stderr)
        most, why = float(loss.max()), found.unproved
        return cls(name, barrier, found.low, found.high, found.top.t, most, t, loss, slope, threshold, why)


class LossPath(Result):
    """The loss between two networks: `found["line"]`, `found["curve"]` are ways, `found.joined` is the verdict.

    >>> import torch, flatlens as fl
    >>> net, other = (torch.nn.Linear(2, 1, dtype=torch.float64) for _ in range(2))
    >>> data = (torch.eye(2, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64))
    >>> found = fl.path(fl.Problem(net, "mse", data), other, progress=False)  # a convex loss lies below its chord
    >>> found["line"].barrier.value, found.joined
    (0.0, True)
    """

    _KIND = "path"

    def __init__(self, ways: Mapping[str, Way], about: Mapping[str, Any]) -> None:
        self.ways = dict(ways)
        self.about = dict(about)

    def __getitem__(self, name: str) -> Way:
        if name not in self.ways:
            raise UnknownName.among("path", name, self.ways, where="of these")
        return self.ways[name]

    @property
    def joined(self) -> bool | None:
        """Return True if a path that was tried joins the networks, False if none does, None if that is undecided."""
        verdicts = [way.joins for way in self.ways.values()]
        return True if True in verdicts else None if None in verdicts else False

    @property
    def answer(self) -> list[str]:
        """The answer in three sentences: one basin or not, how certain, what to do next."""
        # the verdict with the barrier
        facts, ways = self.about, self.ways
        best = min((way for way in ways.values() if way.name != CURVE), key=lambda way: way.high)
        share, where = f"{facts['rtol']:.3g} of the loss of constant outputs", f"along {_WHERE[best.name]}"
        if facts["distance"] == 0.0 and best.high == 0.0:
            first = f"One basin: the weights are the same {where}."
        elif best.high == 0.0:
            first = f"One basin: {where} the loss never rises above the chord."
        elif best.joins:
            first = (f"One basin: {where} the loss rises at most {best.high:.3g} above the chord "
                     f"(threshold {best.threshold:.3g}, {share}).")  # fmt: skip
        else:
            rises = f"{where} the loss rises {best.barrier.value:.3g} above the chord"
            within = f"the threshold, {best.threshold:.3g} ({share}), is within its error over samples"
            first = f"Not one basin: {rises}, at t = {best.at:.2g} (threshold {best.threshold:.3g}, {share})"
            first = f"Open: {rises}, and {within}" if best.joins is None else first
            curve = ways.get(CURVE)
            if curve is None:
                first += "."
            elif curve.joins:
                first += f"; the trained curve joins them, with a rise of at most {curve.high:.3g}."
            else:
                first += f"; along the trained curve it rises {curve.barrier.value:.3g}."

        # how certain it is
        margin = best.barrier.margin
        varies = f"; over samples like these it varies by ±{margin:.2g} (95%)" if margin > 0 else ""
        of = (f"On these {facts['n']:,} samples the largest rise is within [{best.low:.3g}, {best.high:.3g}] "
              f"({UNPROVED if best.unproved else PROVED}){varies}.")  # fmt: skip

        # what to do next
        constant, then = facts.get("constant"), ""
        if constant and max(facts["ends"]) > _CHANCE * constant["loss"]:
            then = "A network is hardly better than constant outputs: the verdict says nothing about trained networks."
        elif best.joins is None:
            then = "More samples decide."
        elif not best.joins and MATCHED not in ways and CURVE not in ways:
            then = "Match the neurons first (match_neurons, --match-neurons), or train a curve (bends=1, --bends 1)."
        elif not best.joins and CURVE not in ways:
            then = "A trained curve (bends=1, --bends 1) shows whether another path joins them."
        elif not best.joins and not ways[CURVE].joins:
            then = "More steps or bends may lower the curve: its loss is what this training found."
        return [first, of, *([then] if then else [])]

    def frame(self) -> pd.DataFrame:
        """Return a tidy table: one row for each look at each path."""
        parts = [
            pd.DataFrame({"path": way.name, "t": way.t, "loss": way.loss, "chord": way.chord, "slope": way.slope})
            for way in self.ways.values()
        ]
        return pd.concat(parts, ignore_index=True)

    def table(self) -> pd.DataFrame:
        """Return one row for each path: its barrier with the interval, the error over samples, and the verdict."""
        return pd.DataFrame([
            {
                "path": way.name, "barrier": way.barrier.value, "low": way.low, "high": way.high,
                "95% ± over samples": way.barrier.margin, "at": way.at, "largest loss": way.largest,
                "joins": {True: "yes", False: "no", None: "open"}[way.joins],
                "upper end": "assumed" if way.unproved else "proved", "looks": len(way.t),
            }
            for way in self.ways.values()
        ])  # fmt: skip

    _displayed = table

    def plot(self) -> Any:
        """Return an Altair chart of the loss along each path; a notebook shows it by itself."""
        return of_report("figures.picture")(self)

    def _content(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        tensors = {
            f"{name}/{kind}": getattr(way, kind).contiguous().clone()
            for name, way in self.ways.items()
            for kind in ("t", "loss", "slope")
        }
        scalars = ("low", "high", "at", "largest", "threshold", "unproved")
        rows = [
            {"name": name, "value": way.barrier.value, "stderr": way.barrier.stderr,
             **{kind: getattr(way, kind) for kind in scalars}}
            for name, way in self.ways.items()
        ]  # fmt: skip
        return {"rows": rows}, tensors

    @classmethod
    def _restored(cls, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        ways = {}
        for row in content["rows"]:
            barrier = _estimate(row.pop("value"), row.pop("stderr"))
            t, loss, slope = (tensors[f"{row['name']}/{kind}"] for kind in ("t", "loss", "slope"))
            ways[row["name"]] = Way(**row, barrier=barrier, t=t, loss=loss, slope=slope)
        return cls(ways, content["about"])


def path(
    a: Lens | Problem,
    b: nn.Module | Mapping[str, Tensor] | Lens | Problem,
    *,
    match_neurons: bool = False,
    bends: int = 0,
    points: int = 17,
    steps: int = 500,
    lr: float = 0.01,
    batch_size: int = 128,
    rtol: float = 0.02,
    generator: torch.Generator | None = None,
    progress: Shown = None,
) -> LossPath:
    """Measure the loss between two checkpoints of one architecture: are they in one basin?

    The barrier of a path theta(t) is the largest of L(theta(t)) - (1 - t) L(a) - t L(b), t in [0, 1] (Frankle et al.
    2020; Entezari et al. 2022). On the samples of the problem it has an interval. Its lower end was seen. Its upper end
    is proved on the line between chains of layers under cross-entropy of labels, by interval arithmetic; elsewhere it
    bounds the loss between looks by the slopes and the curvature seen, which is no proof. The error over samples is
    stated beside it. A path joins its ends if both stay below `rtol` times the loss of the best constant outputs.

    BatchNorms with running statistics get those of the data anew at every point, the ends included: parts of up to 512
    samples are normalised together. No network is changed.

    Args:
        a: The data and the loss, with the network at one end; a `Problem` or a `Lens`.
        b: The network at the other end, a lens or a problem on it, or its state dict. Its data and loss are not used.
        match_neurons: Whether to put the neurons of b in the order nearest to those of a first, by coordinate descent
            over linear assignments; b keeps its function. Residual streams and attention keep their order.
        bends: Number of bends of a Bezier curve that is trained between the networks; 1 is the quadratic curve of
            Garipov et al. 2018. 0: the line alone.
        points: Number of even looks at each path; up to eight times as many are added where the maximum may lie.
        steps: Steps that train the curve.
        lr: Learning rate of Adam for the bends.
        batch_size: Number of samples of each step.
        rtol: The barrier up to which a path joins its ends, as a share of the loss of the best constant outputs; where
            that has no formula, of the larger loss of the two ends.
        generator: Draws the samples of the training; seeded with 0 if None.
        progress: Called with (what, done, total); None shows a bar after two seconds, False shows none.

    Raises:
        BadInput: the networks differ in more than values, a value is not finite, or an argument is out of range.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    >>> data = (torch.eye(3, dtype=torch.float64), torch.tensor([0, 1, 0]))
    >>> problem = fl.Problem(net, "cross_entropy", data)
    >>> twin = fl.transforms.permutation.apply(problem).model  # the same function, its neurons in another order
    >>> fl.path(problem, twin, match_neurons=True, progress=False)["matched line"].high
    0.0
    """
    # the two networks, with one architecture, and the threshold
    lens = lens_of(a, "a", "path")
    require_count(0, "path", bends=bends)
    require_count(3, "path", points=points)
    require_count(1, "path", steps=steps, batch_size=batch_size)
    require_positive("path", lr=lr, rtol=rtol)
    draws = drawing(generator, progress, "path")
    ends = Ends.of(lens, b)
    elsewhere = ends.elsewhere
    origin = of.origin if isinstance(of := b.problem if isinstance(b, Lens) else b, Problem) else {}
    second = [f"second network: {origin['weights']}"] if "weights" in origin else []
    notes = [*second, *([ends.note] if ends.note else [])]
    with progress_shown(progress) as line:

        def scan(ends: Ends, curve: Curve, name: str) -> Way:
            """Return the way along a curve: looks, the bracket of its barrier, and the threshold."""
            look, constant = partial(look_at, elsewhere, curve), ends.problem.constant
            scale = abs(constant.loss) if constant is not None else max(abs(look(t).loss) for t in (0.0, 1.0))
            enough, most = rtol * scale / 10, 8 * points
            found = bracketed(
                look,
                lambda t: elsewhere.rounding(curve.at(t)),
                points=points,
                most=most,
                enough=enough,
                progress=lambda done, total: line(f"looks at the {name}", done, total),
            )
            if curve.bends:
                found = replace(found, unproved="the path is no line")
            elif torch.equal(curve.points[0], curve.points[1]):
                found = replace(found, unproved="")  # nothing moves
            else:
                model = elsewhere.model
                found = with_proof(ends.problem, model, ends.second, found, look, enough=enough, most=most)
            return Way.of(name, found, rtol * scale)

        found = {LINE: scan(ends, Curve((ends.a, ends.b)), LINE)}
        # the same after the neurons of b are matched, from where everything else starts
        if match_neurons:
            matching = match(lens.problem, elsewhere.model, ends.second)
            notes.append(matching.told)
            ends = replace(ends, second=matching.model)
            if matching.layers:
                found[MATCHED] = scan(ends, Curve((ends.a, ends.b)), MATCHED)
        # the curve is trained between the ends as they are now, b in its new order
        if bends:
            options = {"bends": bends, "steps": steps, "lr": lr, "batch_size": batch_size}
            curve = trained(elsewhere, ends.a, ends.b, **options, generator=draws, progress=line)  # type: ignore[arg-type]
            found[CURVE] = scan(ends, curve, CURVE)
            notes.append(f"the curve has {bends} bend{'s' * (bends > 1)}, trained for {steps:,} steps")
    # what the reader has to know of the ends and of upper ends that are not proved
    why = dict.fromkeys(way.unproved for way in found.values() if way.unproved and way.name != CURVE)
    notes += [f"the upper end along the line is not proved: {reason}" for reason in why]
    losses = float(found[LINE].loss[0]), float(found[LINE].loss[-1])
    distance = float((ends.b - ends.a).norm(dtype=torch.float64))
    here = {"ends": losses, "distance": distance, "rtol": rtol, "notes": notes}
    return LossPath(found, {**about(lens), **here})
