"""The risk at moved features of a layer, random rotations and kernel densities of features, and labels near samples.

Features move as phi -> (I + A) phi, or as phi -> phi + xi separately for each sample. A matrix acts through the
weights: W (phi + A phi) = (W + W A) phi (the papers' key equation); for a convolution on every patch that it reads,
for a grouped one on each group's channels. Noise is added to the layer's input.

The label y[phi] of a point in feature space is given by a function of the features, or guessed from the nearest
sample. The theory of feature robustness assumes that labels are locally constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from scipy import linalg, stats
from torch import Tensor, nn

from flatlens.errors import BadInput, UnknownName
from flatlens.grams import Plan, Weight, lay_out, row_factor
from flatlens.grams.record import record
from flatlens.perturbation.weights import Elsewhere
from flatlens.problem import Problem
from flatlens.problem.batches import FORWARD_CHUNK, size
from flatlens.problem.eval_context import device_of
from flatlens.problem.forward import Outcomes, outcomes
from flatlens.problem.ranks import ALONE

ROTATION_LAWS = ("rotations", "ball", "truncated_normal")
UNDERFLOW = 1e-250


def rotated(W: Tensor, generator: torch.Generator) -> Tensor:
    """Return W A, A a Haar-distributed orthogonal m x m matrix; W of shape (d, m), float64."""
    # A itself is never drawn: with W^T = Q R, W A = R^T (Q^T A), and Q^T A is r uniformly distributed orthonormal rows
    m = W.shape[1]
    R = row_factor(W)
    return R.mT @ orthonormal_rows(R.shape[0], m, generator).to(W)


def orthonormal_rows(r: int, m: int, generator: torch.Generator) -> Tensor:
    """Return r <= m uniformly distributed orthonormal rows, (r, m) float64; for r = m, a Haar-distributed rotation."""
    Q, R = torch.linalg.qr(torch.randn(m, r, dtype=torch.float64, generator=generator))
    rows: Tensor = (Q * R.diagonal().sign()).mT  # the factorisation is unique; other signs would not be uniform
    return rows


def balanced_rows(g: int, r: int, m: int, generator: torch.Generator) -> Tensor:
    """Return k sets of g times r <= m orthonormal rows with exactly Haar's second moments, (k, g, r, m) float64.

    Each set is uniformly distributed, and the mean over the k sets of every product of two entries is Haar's, with no
    error. The rows are those of one Haar rotation per block, shifted through all m places, with signs from a Hadamard
    matrix: k = m times the least power of 2 that is at least g r. No fewer than m g r sets can do it.
    """
    signs = torch.as_tensor(linalg.hadamard(balanced_count(g, r, 1)), dtype=torch.float64)[:, : g * r]
    Q = torch.stack([orthonormal_rows(m, m, generator) for _ in range(g)])
    places = (torch.arange(r) + torch.arange(m)[:, None]) % m  # (shifts, r)
    rows = Q[:, places].transpose(0, 1)  # (shifts, g, r, m)
    return (signs.reshape(-1, 1, g, r, 1) * rows).flatten(0, 1)


def balanced_count(g: int, r: int, m: int) -> int:
    """Return how many sets `balanced_rows` gives."""
    return m * (1 << (g * r - 1).bit_length())


def on_sphere(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Return uniformly distributed points on the unit sphere, one per row of shape (n, M), float64."""
    directions = torch.randn(shape, dtype=torch.float64, generator=generator)
    lengths: Tensor = directions.norm(dim=1, keepdim=True)
    return directions / lengths


def radii(n: int, law: str, m: int, sigma: float, generator: torch.Generator) -> Tensor:
    """Return n draws of the radius r in Proposition 2's A = r O, in units of delta.

    The density of r is k(r) r^(m-1) on (0, 1].

    `rotations`: always 1. `ball`: k constant, so that A phi is uniform in the ball of radius ||phi||.
    `truncated_normal`: k the normal density of standard deviation `sigma`, cut off at 1.
    """
    u = torch.rand(n, dtype=torch.float64, generator=generator)
    if law == "rotations":
        return torch.ones_like(u)
    if law == "ball":
        return u.pow(1 / m)
    inside = float(stats.chi2.cdf(1 / sigma**2, m))
    if inside > UNDERFLOW:
        return (sigma * torch.as_tensor(stats.chi2.ppf(u.numpy() * inside, m)).sqrt()).clamp(max=1)
    r, k = _rim(m, sigma)
    return r[torch.searchsorted(k.cumsum(0) / k.sum(), u).clamp(max=len(r) - 1)]


def _rim(m: int, sigma: float) -> tuple[Tensor, Tensor]:
    """Return (r, weights) at 4000 midpoints of u = r^m, which is uniform under the ball's law."""
    # sigma is far larger than the ball: nearly all mass is at the rim, where the density is almost constant
    r = ((torch.arange(4000, dtype=torch.float64) + 0.5) / 4000) ** (1 / m)
    return r, torch.exp(-0.5 * (r.square() - 1) / sigma**2)


def mean_square_radius(law: str, m: int, sigma: float) -> float:
    """Return E[r^2] of the law, which multiplies delta^2 kappa / (2 m)."""
    if law == "rotations":
        return 1.0
    if law == "ball":
        return m / (m + 2)
    inside = float(stats.chi2.cdf(1 / sigma**2, m))
    if inside > UNDERFLOW:
        return float(sigma**2 * m * stats.chi2.cdf(1 / sigma**2, m + 2) / inside)
    r, k = _rim(m, sigma)
    return float((k * r.square()).sum() / k.sum())


def polar(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return (U, V^T), U V^T the A of ||A|| <= 1 with the largest inner product with left @ right, (m, d) @ (d, m)."""
    Q1, R1 = torch.linalg.qr(left)
    Q2, R2 = torch.linalg.qr(right.mT)
    U, _, Vh = torch.linalg.svd(R1 @ R2.mT)
    return Q1 @ U, Vh @ Q2.mT


Move = Callable[[Tensor], Tensor]
"""Maps a chunk's features, samples first, to moved ones of the same shape."""

SEVERAL = "the layer is called more than once for a sample"
OUTSIDE = "the weight multiplies outside the calls of layers"
ELSEWHERE = "the weight also acts outside this layer's calls, or is made from other parameters"


def unmovable(weight: Weight, *, by_noise: bool = False) -> str:
    """Return why a layer's features cannot be moved; empty if they can."""
    if by_noise or weight.unplaced:
        return weight.unplaced or (SEVERAL if len(weight.calls) > 1 else "" if weight.calls else OUTSIDE)
    return "" if weight.explained and weight.parameter is not None else ELSEWHERE


def placed(
    problem: Problem, layer: str | None, model: nn.Module | None, where: str, *, by_noise: bool
) -> tuple[nn.Module, Plan, Weight]:
    """Return the network, its plan, and the layer (None: the last) whose features can be moved, or refuse."""
    model = problem.measured() if model is None else model
    plan = lay_out(problem, model)
    name = plan.last() if layer is None else layer
    if name is None:
        raise BadInput(f"{where}(...): the network has no linear layer whose features could move")
    if name not in plan.weights:
        raise UnknownName.among("linear layer", name, plan.weights)
    if why := unmovable(plan.weights[name], by_noise=by_noise):
        raise BadInput(f"{where}(layer={name!r}): {why}")
    return model, plan, plan.weights[name]


@contextmanager
def moved(weight: Weight, plan: Plan, move: Move) -> Iterator[None]:
    """Give the layer's call the features that `move` returns, inside this context."""
    axis = plan.batch_axis[weight.layer]

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        x: Tensor = kwargs["input"] if not args else args[0]
        x = move(x.movedim(axis, 0)).movedim(0, axis)
        return (args, {**kwargs, "input": x}) if not args else ((x, *args[1:]), kwargs)

    assert weight.module is not None
    with weight.module.register_forward_pre_hook(enter, with_kwargs=True):
        yield


def with_moved_features(problem: Problem, model: nn.Module, plan: Plan, weight: Weight, move: Move) -> Outcomes:
    """Return the outcomes over the data with moved features."""
    with problem.measuring(model), moved(weight, plan, move):
        whole = problem.shared(FORWARD_CHUNK, ALONE)  # a move may draw for one chunk after another
        return outcomes(problem, whole, lambda batch: problem.run(model, batch))


def noise(delta: float, sign: float, generator: torch.Generator, law: str = "rotations", sigma: float = 1.0) -> Move:
    """Return the move of every sample's features by delta ||phi_i|| r in its own random direction (reparam2019 D.1).

    r is 1, or drawn from another law of Proposition 2 (`radii`): the moved features then have its densities lambda_i.
    """

    def move(phi: Tensor) -> Tensor:
        flat = phi.flatten(1)
        xi = on_sphere(flat.shape, generator)
        if law != "rotations":
            xi = xi * radii(len(xi), law, xi.shape[1], sigma, generator)[:, None]
        xi = xi.to(flat)
        there: Tensor = flat + sign * delta * flat.norm(dim=1, keepdim=True) * xi
        return there.reshape(phi.shape)

    return move


@final
class RotatedFeatures:
    """The change of the risk E_F(f, S, A) under phi -> (I + A) phi at one layer, labels kept."""

    def __init__(self, problem: Problem, model: nn.Module, weight: Weight) -> None:
        assert weight.parameter is not None
        self.elsewhere = Elsewhere(problem, [weight.parameter], model=model)
        self.W = weight.matrix.W.to("cpu")  #: (g, d, m)
        self.risk = self.elsewhere.outcomes(self.elsewhere.here).risk

    @property
    def m(self) -> int:
        """Return the number of features that one group's A acts on."""
        return self.W.shape[2]

    def change(self, WA: Tensor) -> float:
        """Return the change of the risk when the weight moves by W A, (g, d, m)."""
        return self.elsewhere.outcomes(self._at(WA)).risk - self.risk

    def _at(self, WA: Tensor) -> Tensor:
        return (self.W + WA).flatten().to(self.elsewhere.here)

    def draw(self, delta: float, law: str, sigma: float, generator: torch.Generator) -> Tensor:
        """Return W A, A = delta r O with a Haar-distributed rotation O and r of `law`."""
        r = delta * float(radii(1, law, self.m, sigma, generator))
        return r * self._rotated(generator)

    def balanced(self, most: int, generator: torch.Generator) -> Tensor | None:
        """Return W A of rotations that have, with both signs, Haar's second moments; None for more than `most`."""
        g, d, m = self.W.shape
        enough = balanced_count(g, min(d, m), m) <= most
        return row_factor(self.W).mT @ balanced_rows(g, min(d, m), m, generator) if enough else None

    def _rotated(self, generator: torch.Generator) -> Tensor:
        return torch.stack([rotated(block, generator) for block in self.W])

    def worst(self, delta: float, restarts: int, steps: int, generator: torch.Generator) -> tuple[float, Tensor]:
        """Return (the largest change found over all ||A|| <= delta, the largest of each search).

        Each search starts from a random rotation. Each step sets A to the partial isometry that has the largest inner
        product with the gradient. Where the risk is convex along A, such a step never makes it smaller.
        """
        reached = []
        for _ in range(restarts):
            WA, highest, stalled = delta * self._rotated(generator), -math.inf, 0
            for _ in range(steps):
                change, G = self.slope(WA)
                if not (math.isfinite(change) and bool(torch.isfinite(G).all())):
                    break
                stalled = stalled + 1 if change <= highest * (1 + 1e-4) else 0
                highest = max(highest, change)
                if stalled == 3:
                    break
                WA = delta * self.steepest(G)
            reached.append(highest)
        found = torch.tensor(reached, dtype=torch.float64)
        return (max(0.0, float(found.max())) if max(reached) > -math.inf else math.nan), found

    def slope(self, WA: Tensor) -> tuple[float, Tensor]:
        """Return (the change, its gradient in the weight, (g, d, m)) at the weight moved by W A."""
        value, g = self.elsewhere.slope(self._at(WA), self.elsewhere.chunks(), self.elsewhere.problem.mass)
        return value - self.risk, g.to("cpu", torch.float64).reshape(self.W.shape)

    def steepest(self, G: Tensor) -> Tensor:
        """Return W A for the A, ||A|| <= 1, with the largest <W A, G>, G of the weight's shape."""
        factors = (polar(W.mT, slope) for W, slope in zip(self.W, G, strict=True))
        return torch.stack([(W @ U) @ Vh for W, (U, Vh) in zip(self.W, factors, strict=True)])


def smallest_feature_matrix(phi: Tensor, moves: Tensor) -> Tensor:
    """Return the A of smallest operator norm, (m, m), that moves features phi_i by A phi_i = z_i, for all i.

    phi, moves: (n, m). A maps vectors orthogonal to all features to 0, so that no other A has a smaller norm. The norm
    is large if two features near each other move in different ways: reparam2019 D.2.

    >>> near = torch.tensor([[1.0, 0.0], [1.0, 0.01]]).double()
    >>> round(float(torch.linalg.matrix_norm(smallest_feature_matrix(near, torch.eye(2)), 2)))
    141
    """
    phi, moves = torch.as_tensor(phi).to(torch.float64), torch.as_tensor(moves).to(torch.float64)
    if phi.ndim != 2 or phi.shape != moves.shape:
        got = f"{(*phi.shape,)} and {(*moves.shape,)}"
        raise BadInput(f"smallest_feature_matrix(...): expected two matrices of shape (n, m), got shapes {got}")
    A: Tensor = (torch.linalg.pinv(phi) @ moves).mT
    missed = float((phi @ A.mT - moves).abs().max())
    if not missed <= 1e-8 * float(moves.abs().max()):
        raise BadInput(
            f"smallest_feature_matrix(...): no matrix moves these features so (the nearest misses by {missed:.3g}): "
            f"they depend on each other linearly, and their moves do not in the same way"
        )
    return A


BANDWIDTHS = ("scott", "relative")
ROWS = 2**22  #: kernels evaluated together


@dataclass(frozen=True, eq=False)
class KernelDensity:
    """A kernel density p(z) = mean_i N(z; phi_i, (width_i scale)^2) of points phi (n, m) float64."""

    points: Tensor
    scale: Tensor  #: unit of each feature, (m,)
    width: Tensor  #: width of each point's kernel in these units, (n,)

    def log_density(self, z: Tensor) -> Tensor:
        """Return log p at z, (k,)."""
        n, m = self.points.shape
        known = self.points / self.scale
        logs = [
            (-0.5 * (torch.cdist(rows, known) / self.width).square() - m * self.width.log()).logsumexp(1)
            for rows in torch.split(z / self.scale, max(1, ROWS // n))
        ]
        return torch.cat(logs) - (math.log(n) + m / 2 * math.log(2 * math.pi) + float(self.scale.log().sum()))

    def around(self, count: int, generator: torch.Generator) -> Tensor:
        """Return points drawn from p, `count` of each point's kernel, (count n, m)."""
        points, width = self.points.repeat(count, 1), self.width.repeat(count)
        noise = torch.randn(points.shape, generator=generator, dtype=points.dtype)
        return points + self.scale * width[:, None] * noise


def units(phi: Tensor, bandwidth: str) -> Tensor:
    """Return the unit of each feature for the kernels, (m,): the standard deviation under "scott", else 1."""
    return phi.std(0) if bandwidth == "scott" else torch.ones_like(phi[0])


def kernel_density(phi: Tensor, bandwidth: str, scale: Tensor) -> KernelDensity:
    """Return the kernel density of some points, with widths n^(-1/(m+4)) or, if "relative", those of Proposition 12."""
    n, m = phi.shape
    delta = n ** (-1 / (m + 4))
    if bandwidth == "scott":
        return KernelDensity(phi, scale, torch.full((n,), delta, dtype=phi.dtype))
    lengths = phi.norm(dim=1)  # delta ||phi_i|| / sqrt(m)
    return KernelDensity(phi, scale, (delta / math.sqrt(m)) * lengths.clamp(min=1e-12 * float(lengths.max())))


def mismatch(a: Tensor, b: Tensor, values_a: Tensor, values_b: Tensor, bandwidth: str) -> tuple[float, float]:
    """Return (int |p - q|, int (p - q) l), p and q kernel densities of parts of a sample, a and b (n, m), l the values.

    The integral is a mean over the points of both, taken as drawn from (p + q) / 2, with weights p and q over p + q. As
    they are not quite drawn so, each density's weights are divided by their sum: int (p - q) is 0. A point has its own
    kernel, as it has in p and q: without it the error is larger, four times in 64 dimensions.
    """
    points = torch.cat([a, b])
    scale = units(points, bandwidth)  # from both: a feature may be constant in one part
    p, q = (kernel_density(part, bandwidth, scale).log_density(points) for part in (a, b))
    drawn = torch.cat([part.new_full((len(part),), 1 / len(part)) for part in (a, b)])
    of_p, of_q = drawn * torch.sigmoid(p - q), drawn * torch.sigmoid(q - p)
    difference = of_p / of_p.sum() - of_q / of_q.sum()
    return float(difference.abs().sum()), float((difference * torch.cat([values_a, values_b])).sum())


Labels = Callable[[Tensor], Tensor]
"""Maps features (k, m) to targets (k, ...): y[phi]."""


@dataclass(frozen=True, eq=False)
class SeenFeatures:
    """The features that a layer reads on the data, with their targets; ignored samples are left out."""

    phi: Tensor  #: (n, m) float64
    y: Tensor  #: (n, ...)
    counted: Tensor  #: true for each sample of the data that is kept, (all samples,) bool

    def nearest(self, at: Tensor) -> Tensor:
        """Return the target of the nearest sample to each point, (k, m) -> (k, ...)."""
        return self.y[torch.cdist(at.to(self.phi), self.phi).argmin(1)]


def seen(problem: Problem, model: nn.Module, plan: Plan, weight: Weight, *, held_out: bool = False) -> SeenFeatures:
    """Return the features and targets from one forward over the data, or over the held-out data, too."""
    axis = plan.batch_axis[weight.layer]
    features, targets, counted = [], [], []
    with problem.measuring(model):
        for data in (problem.data, *([problem.test] if held_out and problem.test is not None else [])):
            for raw in data.chunks(256):
                with record(model) as tape:
                    f, y = problem.run(model, problem.place(raw))
                _require_labels(f, y)
                x = tape.linear[weight.layer].x.detach().movedim(axis, 0)
                features.append(x.reshape(len(f), -1).to(torch.float64))
                targets.append(y)
                counted.append(problem.loss.mass(f, y) > 0)
    counts = torch.cat(counted)
    return SeenFeatures(torch.cat(features)[counts], torch.cat(targets)[counts], counts)


def _require_labels(f: Tensor, y: object) -> None:
    if not isinstance(y, Tensor) or len(y) != len(f):
        raise BadInput("the targets must be a tensor with one label per sample", argument="data")


@dataclass(frozen=True, eq=False)
class Relabelled:
    """The losses at moved features phi', f' the outputs there; scaled, so that means are risks, (n,) float64 each."""

    kept: Tensor  #: l(f', y_i), with each sample's own label; 0 for ignored samples
    told: Tensor  #: l(f', y[phi']), with the label at the moved features; 0 for ignored samples
    changed: Tensor  #: whether the two labels differ; NaN for ignored samples


def relabelled(
    problem: Problem, model: nn.Module, plan: Plan, weight: Weight, labels: Labels, move: Move
) -> Relabelled:
    """Return the losses at the features that `move` returns, with the samples' own labels and with those there."""
    kept: list[Tensor] = []
    other: list[Tensor] = []
    changed, mass = [], 0.0
    with problem.measuring(model), torch.no_grad():
        for raw in problem.batches(256):
            there: list[Tensor] = []

            def keep(phi: Tensor, there: list[Tensor] = there) -> Tensor:
                there.append(move(phi))
                return there[-1]

            with moved(weight, plan, keep):
                f, y = problem.run(model, problem.place(raw))
            _require_labels(f, y)
            f = f.to(torch.float64)
            told = labels(phi := there[0].reshape(len(f), -1).to(torch.float64))
            if not isinstance(told, Tensor) or told.shape != y.shape:
                got = f"{(*told.shape,)}" if isinstance(told, Tensor) else type(told).__name__
                raise BadInput(
                    f"labels(features of shape {(*phi.shape,)}): expected targets as in the data, {(*y.shape,)}, "
                    f"got {got}"
                )
            told = told.to(y)
            each = problem.loss.mass(f, y)
            for losses, label in ((kept, y), (other, told)):
                losses.append(torch.where(each > 0, problem.loss.values(f, label), 0.0))
            differs = (told != y).reshape(len(f), -1).any(1).to(torch.float64)
            changed.append(torch.where(each > 0, differs, math.nan))
            mass += float(each.sum())
    scale = sum(len(part) for part in kept) / mass
    return Relabelled(torch.cat(kept).cpu() * scale, torch.cat(other).cpu() * scale, torch.cat(changed).cpu())


@dataclass(frozen=True, eq=False)
class LabelTerms:
    """The terms of gamma_i = l(f(phi_i + delta A phi_i), y[phi_i + delta A phi_i]) in delta, each (n,) float64.

    First order: gamma' = weights + labels; no measure of flatness contains the term `labels`. Second order: gamma'' =
    flatness + labels_squared + labels_bending + 2 mixed.

    >>> import torch, flatlens as fl
    >>> from flatlens.perturbation import label_change_terms
    >>> net = torch.nn.Linear(3, 1, dtype=torch.float64)
    >>> problem = fl.Problem(net, "half_squared_error", (torch.ones(4, 3).double(), torch.zeros(4, 1).double()))
    >>> label_change_terms(problem, lambda x: x[:, :1], torch.eye(3).double()).labels.shape
    torch.Size([4])
    """

    weights: Tensor  #: l_w . (w A)
    labels: Tensor  #: l_y . (y_x A phi)
    flatness: Tensor  #: (w A)^T l_ww (w A)
    labels_squared: Tensor  #: (y_x A phi)^T l_yy (y_x A phi)
    labels_bending: Tensor  #: sum_c l_yc (A phi)^T (y_c)_xx (A phi)
    mixed: Tensor  #: (y_x A phi)^T l_yw (w A)


def label_change_terms(
    problem: Problem, labels: Labels, A: Tensor, layer: str | None = None, *, model: nn.Module | None = None
) -> LabelTerms:
    """Return Appendix B's terms for a label function that is smooth in the features.

    `labels`: features (n, m) -> targets, differentiable; the loss must be differentiable in them, too (class
    probabilities, regression targets). `A`: (m, m). `layer`: the last linear one if None; the paper has the first.
    Source: relative2021 Eq. 8-11.
    """
    model, plan, weight = placed(problem, layer, model, "label_change_terms", by_noise=True)
    parts, loss = list[list[Tensor]](), problem.loss.values
    with problem.measuring(model):
        for raw in problem.batches(256):
            # outputs at phi + a A phi, labels at phi + b A phi
            batch, read = problem.place(raw), list[Tensor]()
            a = torch.zeros(size(batch), dtype=torch.float64, device=device_of(model), requires_grad=True)
            b, c = (torch.zeros_like(a, requires_grad=True) for _ in range(2))

            def along(phi: Tensor, read: list[Tensor] = read, a: Tensor = a) -> Tensor:
                flat, square = phi.flatten(1), (phi[0].numel(),) * 2
                if A.shape != square:
                    raise BadInput(f"label_change_terms(A=...): expected shape {square}, got {tuple(A.shape)}")
                read.append(flat.detach().to(torch.float64))
                return (flat + a.to(flat)[:, None] * (flat @ A.to(flat).T)).reshape(phi.shape)

            with moved(weight, plan, along):
                f, y = problem.run(model, batch)
            _require_labels(f, y)
            step = read[0] @ A.to(read[0]).T
            told = labels(read[0] + b[:, None] * step)
            # y + c y_x step: the labels without their second derivative
            y_here, y_along = torch.func.jvp(labels, (read[0],), (step,))  # type: ignore[misc]
            straight = y_here.detach() + c.reshape(-1, *[1] * (y_here.ndim - 1)) * y_along.detach()
            # the terms are first and second derivatives of the losses in a, b and c
            f = f.to(torch.float64)
            by_labels, by_slope = loss(f, told), loss(f, straight)
            in_a, in_b = _slope(by_labels, a), _slope(by_labels, b)
            bent, squared = _slope(in_b, b), _slope(_slope(by_slope, c), c)
            terms = (in_a, in_b, _slope(in_a, a), squared, bent - squared, _slope(in_a, b))
            parts.append([term.detach().cpu() for term in terms])
    return LabelTerms(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _slope(values: Tensor, at: Tensor) -> Tensor:
    """Return d values_i / d at_i, (n,); zeros if nothing depends on it."""
    if not values.requires_grad:
        return torch.zeros_like(at)
    (g,) = torch.autograd.grad(values.sum(), at, create_graph=True, allow_unused=True)
    return torch.zeros_like(at) if g is None else g


def feature_change(
    problem: Problem,
    A: Tensor,
    layer: str | None = None,
    *,
    labels: Labels | None = None,
    model: nn.Module | None = None,
) -> float:
    """Return E_F(f, S, A), the change of the risk under phi -> (I + A) phi at a layer, for a given A, (m, m).

    Source: relative2021 Eq. 4.

    Args:
        problem: the problem.
        A: m is the number of the layer's inputs; for a convolution, input channels / groups x kernel size.
        layer: the last linear layer if None.
        labels: the label function y[phi], from features (k, m) to targets in the data's form. The layer must be applied
            once per sample. None keeps each sample's label.
        model: the network; the problem's own if None.

    >>> net = nn.Linear(2, 1, bias=False)
    >>> with torch.no_grad():
    ...     _ = net.weight.fill_(1.0)
    >>> problem = Problem(net, "half_squared_error", (torch.ones(1, 2), torch.zeros(1, 1)))
    >>> feature_change(problem, torch.eye(2))  # f doubles: (4^2 - 2^2) / 2
    6.0
    >>> feature_change(problem, torch.eye(2), labels=lambda phi: phi[:, :1] - 1)  # y = 0 at (1, 1), 1 at (2, 2)
    2.5
    """
    model, _, weight = placed(problem, layer, model, "feature_change", by_noise=False)
    if labels is not None and not weight.dense:
        raise BadInput(f"feature_change(layer={weight.layer!r}): labels= needs one position a sample")
    features = RotatedFeatures(problem, model, weight)
    A = torch.as_tensor(A)
    if A.shape != (features.m, features.m):
        raise BadInput(f"feature_change(A=...): expected shape {(features.m, features.m)}, got {tuple(A.shape)}")
    A = A.detach().to("cpu", torch.float64)
    if labels is None:
        return features.change(features.W @ A)
    return moved_risk(problem, lambda phi: phi + phi @ A.to(phi).mT, layer, labels=labels, model=model) - features.risk


def moved_risk(
    problem: Problem,
    move: Move,
    layer: str | None = None,
    *,
    labels: Labels | None = None,
    model: nn.Module | None = None,
) -> float:
    """Return the risk at moved features: mean_i l(psi(phi_i'), y[phi_i']), phi' = move(phi) at a layer.

    `move` maps features, samples first, to moved ones; `noise(delta, 1.0, generator, law)` draws the noise of
    Proposition 2. `labels` and `layer` are as in `feature_change`. By relative2021 Eq. 3 and 5, E_Rep is the risk of
    the distribution minus this number, and E_F is this number minus the risk of the sample.
    """
    model, plan, weight = placed(problem, layer, model, "moved_risk", by_noise=True)
    if labels is None:
        return with_moved_features(problem, model, plan, weight, move).risk
    return float(relabelled(problem, model, plan, weight, labels, move).told.mean())


def label_change(
    problem: Problem, labels: Labels, move: Move, layer: str | None = None, *, model: nn.Module | None = None
) -> float:
    """Return Definition 9's left side for a known label function: mean_i |l(f_i', y[phi_i']) - l(f_i', y_i)|.

    f' are the outputs at phi' = move(phi). The arguments are as in `moved_risk`. Source: relative2021 Def. 9.
    """
    model, plan, weight = placed(problem, layer, model, "label_change", by_noise=True)
    found = relabelled(problem, model, plan, weight, labels, move)
    return float((found.told - found.kept).abs().mean())
