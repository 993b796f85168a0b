"""Data drawn from a known law.

`clusters`: the Gaussian features of "Relative Flatness and Generalization", appendix C.1; `inverted`: inputs that a
tanh network maps to given features (its step 3). `eight_points`: the regression on a line of "On Progressive
Sharpening", appendix C.3. `waves`: inputs of a known distribution and a known target function, for bounds that need
both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from scipy.interpolate import CubicSpline
from torch import Tensor, nn

from flatlens.bounds import Target
from flatlens.data.split import Split
from flatlens.distributions import Cube, Distribution, PushForward, Sphere
from flatlens.errors import BadInput, BadModel, UnknownName
from flatlens.models import MLP

CLUSTERS = 4
INFORMATIVE = 6
REDUNDANT = 2


@dataclass(frozen=True, eq=False)  # eq would compare tensors
class Mixture:
    """Four equally likely Gaussians, float64: two of each class, in the clusters' order 0, 0, 1, 1."""

    centroids: Tensor  #: (4, 6)
    factors: Tensor  #: (4, 6, 6); the covariance of a cluster is factor @ factor.T
    mixing: Tensor  #: (6, 2); maps the informative features to the redundant ones

    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return features (count, 8) and labels (count,)."""
        cluster = torch.randint(CLUSTERS, (count,), generator=generator)
        noise = torch.randn(count, INFORMATIVE, 1, generator=generator, dtype=torch.float64)
        informative = self.centroids[cluster] + (self.factors[cluster] @ noise).squeeze(-1)
        return torch.cat([informative, informative @ self.mixing], 1), cluster * 2 // CLUSTERS

    def moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the clusters' means (4, 8) and covariances (4, 8, 8) of all features, and their labels (4,)."""
        features = torch.cat([torch.eye(INFORMATIVE, dtype=torch.float64), self.mixing], 1)
        factors = features.T @ self.factors
        return self.centroids @ features, factors @ factors.mT, torch.arange(CLUSTERS) * 2 // CLUSTERS


def mixture(separation: float, generator: torch.Generator) -> Mixture:
    """Draw the four Gaussians.

    The paper says: "we randomly sample 4 cluster centroids from a hypercube and scale them so that their distance
    is c", with "a random covariance matrix for each cluster". Read here as: centroids uniform in [-1, 1]^6, times the
    one number that makes the smallest distance between two of them `separation`; covariances A A' / 6 with A standard
    normal, the identity on average, so that `separation` counts standard deviations; mixing uniform in [-1, 1].
    """
    centroids = _uniform(CLUSTERS, INFORMATIVE, generator)
    factors = torch.randn(CLUSTERS, INFORMATIVE, INFORMATIVE, generator=generator, dtype=torch.float64)
    return Mixture(
        centroids=centroids * (separation / torch.pdist(centroids).min()),
        factors=factors / math.sqrt(INFORMATIVE),
        mixing=_uniform(INFORMATIVE, REDUNDANT, generator),
    )


def clusters(separation: float = 4.0, n: int = 500, test: int = 4500, seed: int = 0) -> Split:
    """Return two classes of two Gaussian clusters each, in 8 features; the last 2 are combinations of the first 6.

    The smallest distance between two clusters' centres is `separation` (see `mixture` for how the paper is read).
    Training and test samples are drawn independently from one mixture. The sizes are the paper's.

    >>> split = clusters(separation=3, n=100, test=50)
    >>> tuple(split.x.shape), tuple(split.test_x.shape), int(torch.linalg.matrix_rank(split.x, rtol=1e-5))
    ((100, 8), (50, 8), 6)

    Raises:
        BadInput: a negative separation, or no samples.
    """
    if not (math.isfinite(separation) and separation >= 0):
        raise BadInput(f"clusters(separation={separation}): expected a number that is 0 or more")
    if n < 1 or test < 1:
        raise BadInput(f"clusters(n={n}, test={test}): expected at least 1 sample of each")
    generator = torch.Generator().manual_seed(seed)
    drawn = mixture(separation, generator)
    x, y = drawn.sample(n, generator)
    test_x, test_y = drawn.sample(test, generator)
    described = (
        f"4 Gaussian clusters, two a class, in 6 dimensions, their nearest centres {separation:g} apart, and 2 "
        f"features that are combinations of the 6 (relative2021 C.1); seed {seed}, {n} samples to train on and "
        f"{test} to test"
    )
    return Split("clusters", x.to(torch.float32), y, test_x.to(torch.float32), test_y, 2, described)


def _uniform(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return 2 * torch.rand(rows, columns, generator=generator, dtype=torch.float64) - 1


REACH = 0.9  #: the largest feature, in absolute value, once they are scaled: atanh(0.9) is 1.5
BOX = 0.95  #: hidden values are sought within this; at 1 atanh is infinite
AIM = 0.9  #: the sweeps project onto [-AIM, AIM], a little inside the box: they then end within it, on a solution
SWEEPS = 300  #: projections onto the box and back; those that have an inner point in common meet long before
SHRINK = 0.8  #: the factor of the features where some sample has no hidden values in the box
SHRINKS = 20  #: 0.8^20 is 0.01: beyond, it is the biases that leave no room
CLUSTER_SCALE = 1 / 256
"""The scale of the clusters' features in `inverted_clusters`: the same for every seed, and far within reach of tanh."""


@dataclass(frozen=True, eq=False)  # eq would compare tensors
class Inversion:
    """Inputs, the features they were made for, and how far the network's features are from these.

    The errors are those of the network as it is, in its own precision, on the inputs as they are handed over.
    """

    split: Split  #: inputs in place of features, in the network's precision; the same labels
    features: Split  #: the features times `scale`, in the network's precision: what it maps the inputs to
    scale: float  #: one number for all features of all samples; 1 where they were within reach
    max_error: float  #: the largest |network(x) - feature|
    rms_error: float  #: the root of their mean square
    clipped: int  #: samples of which a hidden value had to be cut off; 0 but for biases that leave no room


def inverted(features: Split, network: nn.Sequential, reach: float = REACH, scale: float | None = None) -> Inversion:
    """Return the data set whose features in `network` are `features`.

    `network` is an `nn.Sequential` of Linear and Tanh. From its output backwards, tanh is undone by atanh, and
    W x + b = z solved for x. A layer with fewer outputs than inputs has many solutions; taken is the shortest, and
    where that leaves [-0.95, 0.95] (its own atanh must exist), the solution in there which projections in turn onto
    the box and the solutions lead to. All in float64.

    Features beyond (-1, 1) are not outputs of a tanh: all are multiplied by one `scale`, the same in the training and
    the test data, so that the largest is `reach`. Where some sample then still has no solution in the box, the scale
    is lowered by steps of 0.8 until all have. A given `scale` is used as it is, or refused. What sees the features next
    (a linear head) is to be trained on the scaled ones, `Inversion.features`.

    >>> net = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Tanh()).double()
    >>> _ = nn.init.constant_(net[0].weight, 1.0)
    >>> x = torch.tensor([[0.5], [-0.5]], dtype=torch.float64)
    >>> found = inverted(Split("two", x, torch.tensor([0, 1]), x, torch.tensor([0, 1]), classes=2), net)
    >>> [round(v, 9) for v in found.split.x[0].tolist()], found.max_error < 1e-15  # half of atanh(0.5) each
    ([0.274653072, 0.274653072], True)

    Raises:
        BadModel: other layers than Linear and Tanh.
        BadInput: features of another number than the network's outputs, not finite, or out of reach at that scale.
    """
    if not 0 < reach < 1:
        raise BadInput(f"inverted(reach={reach}): expected a number between 0 and 1")
    layers = list(network) if isinstance(network, nn.Sequential) else []
    others = [type(m).__name__ for m in layers if not isinstance(m, nn.Linear | nn.Tanh)]
    if others or not any(isinstance(m, nn.Linear) for m in layers):
        found = f"has {', '.join(sorted(set(others)))}" if others else f"is a {type(network).__name__}"
        expected = f"expected an nn.Sequential of Linear and Tanh; this one {found}"
        raise BadModel(expected, argument="network", call="inverted")
    if any(isinstance(below, nn.Tanh) and isinstance(above, nn.Tanh) for below, above in pairwise(layers)):
        raise BadModel("two Tanh in a row; put a Linear between them", argument="network", call="inverted")
    # Features that the network can give
    wanted = torch.cat([features.x, features.test_x]).double()
    last = next(m for m in reversed(layers) if isinstance(m, nn.Linear))
    if wanted.ndim != 2 or wanted.shape[1] != last.out_features:
        expected = f"expected features of shape (n, {last.out_features}), the network's outputs"
        raise BadInput(f"inverted(features=...): {expected}; these are {tuple(wanted.shape)}")
    if not wanted.isfinite().all():
        raise BadInput("some features are NaN or inf", argument="features", call="inverted")
    largest, ends = float(wanted.abs().max()), isinstance(layers[-1], nn.Tanh)
    # the network from its outputs to its inputs; each layer is factorised once
    solvers = [
        _Solver(layer, boxed=isinstance(below, nn.Tanh)) if isinstance(layer, nn.Linear) else None
        for below, layer in pairwise([None, *layers])
    ]

    def back(values: Tensor) -> tuple[Tensor, Tensor]:
        clipped = torch.zeros(len(values), dtype=torch.bool)
        for solver in reversed(solvers):
            values, outside = (values.atanh(), clipped) if solver is None else solver(values)
            clipped = clipped | outside
        return values, clipped

    if scale is not None:  # as it is, or refused
        if ends and largest * scale >= 1:
            reached = f"scaled features reach {largest * scale:.3g}, and a tanh stays below 1"
            raise BadInput(f"inverted(scale={scale:g}): {reached}: lower the scale")
        used, scaled = scale, wanted * scale
        inputs, clipped = back(scaled)
        if clipped.any():
            lost = int(clipped.sum())
            raise BadInput(f"inverted(scale={scale:g}): {lost} samples have no such inputs: lower the scale")
    else:  # lowered until no sample is clipped; if none does, the first one
        first = min(1.0, reach / largest) if ends else 1.0
        for factor in (*(SHRINK**shrunk for shrunk in range(SHRINKS + 1)), 1.0):
            used, scaled = first * factor, wanted * first * factor
            inputs, clipped = back(scaled)
            if not clipped.any():
                break
    # the errors are those of the network in its own precision
    like, n = next(network.parameters()), len(features.x)
    x, scaled = inputs.to(like.dtype), scaled.to(like.dtype)
    with torch.no_grad():
        error = network(x.to(like.device)).cpu().double() - scaled.double()
    made = f"{features.description}{'' if used == 1 else f'; multiplied by {used:.3g}'}"
    inputs_of = f"inputs that a network of {len(network)} layers maps to these features: {made}"
    return Inversion(
        split=replace(features, name=f"inverted {features.name}", x=x[:n], test_x=x[n:], description=inputs_of),
        features=replace(features, x=scaled[:n], test_x=scaled[n:], description=made),
        scale=used,
        max_error=float(error.abs().max()),
        rms_error=float(error.square().mean().sqrt()),
        clipped=int(clipped.sum()),
    )


def inverted_clusters(
    separation: float = 4.0, n: int = 500, test: int = 4500, seed: int = 0, fold: int | None = None
) -> Split:
    """Return `clusters` as inputs (., 784) of relative2021's random network, `MLP.feature_extractor(seed)`, uniform.

    A network whose first four layers are those, `MLP(784, (512, 128, 16, 8), 2, "tanh", seed, "xavier_uniform")`, has
    the clusters' features times `CLUSTER_SCALE` before its last layer. Ridge regression with the penalty p on the
    clusters themselves is that with the penalty p * CLUSTER_SCALE^2 on these. The law is that of the authors' code,
    where the paper says Glorot and no more. With `fold` the samples are cut into equal parts of `test`, of which that
    one is held out, for cross-validation.

    Raises:
        BadInput: as `clusters`, or there is no such fold.
    """
    features = clusters(separation, n, test, seed)
    if fold is not None:
        total = n + test
        if total % test or not 0 <= fold < total // test:
            folds = f"{total} samples in parts of {test} give the folds 0 to {total // test - 1}"
            raise BadInput(f"inverted_clusters(fold={fold}): {folds}")
        x, y = torch.cat([features.test_x, features.x]), torch.cat([features.test_y, features.y])
        held = torch.zeros(total, dtype=torch.bool)
        held[fold * test : (fold + 1) * test] = True
        said = f"{features.description}; fold {fold} held out"
        features = replace(features, x=x[~held], y=y[~held], test_x=x[held], test_y=y[held], description=said)
    network = MLP.feature_extractor(seed, init="xavier_uniform").build()
    return inverted(features, network, scale=CLUSTER_SCALE).split


class _Solver:
    """The solutions x of W x + b = z, all (n, ...) by rows."""

    def __init__(self, layer: nn.Linear, boxed: bool) -> None:
        self._W = layer.weight.detach().double().cpu()
        self._b = torch.zeros(len(self._W)).double() if layer.bias is None else layer.bias.detach().double().cpu()
        self._inverse = torch.linalg.pinv(self._W)
        self._boxed = boxed

    def __call__(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return a solution for each row, and which of them had to be clipped into the box."""
        x = self._nearest(torch.zeros(len(z), self._W.shape[1], dtype=torch.float64), z)
        outside = torch.zeros(len(z), dtype=torch.bool)
        if not self._boxed:
            return x, outside
        for _ in range(SWEEPS):
            outside = (x.abs() > BOX).any(1)
            if not outside.any():
                return x, outside
            x[outside] = self._nearest(x[outside].clamp(-AIM, AIM), z[outside])
        outside = (x.abs() > BOX).any(1)
        return x.clamp(-BOX, BOX), outside

    def _nearest(self, x: Tensor, z: Tensor) -> Tensor:
        """Return the solution nearest to x, computed twice: the second time removes the rounding error of the first."""
        for _ in range(2):
            x = x + (z - self._b - x @ self._W.T) @ self._inverse.T
        return x


POINTS = 8
FEWEST_GRID = 2


def eight_points(targets: Sequence[float] | None = None, seed: int = 0, grid: int = 201) -> Split:
    """Return eight inputs evenly spaced on [0, 1] with one target each; x and y are (8, 1).

    The paper does not print its points. The interval is that of its sine, sin(6 pi x), to which a ReLU network is
    fitted beforehand (see `CoordinateNet`). Without `targets`, they are drawn evenly from [-1, 1] by `seed`. There is
    no truth between the points: the test data are `grid` evenly spaced inputs on the natural cubic spline through
    them, the smoothest interpolation (of least integral of the squared second derivative), so that the test error says
    how far from it a network's is.

    >>> split = eight_points([0, 1, 0, -1, 0, 1, 0, -1], grid=8)
    >>> split.y.flatten().tolist() == split.test_y.flatten().tolist(), split.classes
    (True, 0)

    Raises:
        BadInput: not eight finite targets, or no grid.
    """
    if targets is None:
        drawn = torch.rand(POINTS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        y = (2 * drawn - 1).numpy()
    else:
        y = np.asarray(targets, dtype=np.float64)
        if y.shape != (POINTS,) or not np.isfinite(y).all():
            raise BadInput(f"eight_points(targets={targets}): expected {POINTS} finite numbers")
    if grid < FEWEST_GRID:
        raise BadInput(f"eight_points(grid={grid}): expected at least {FEWEST_GRID} test inputs")
    x, dense = np.linspace(0, 1, POINTS), np.linspace(0, 1, grid)
    given = f"drawn with seed {seed}" if targets is None else "given"
    described = (
        f"8 inputs evenly spaced on [0, 1], targets {given} (the paper, sharpening C.3, prints none); tested on "
        f"{grid} points of the natural cubic spline through them"
    )
    columns = (x, y, dense, CubicSpline(x, y, bc_type="natural")(dense))
    inputs, targets_of, test_x, test_y = (torch.from_numpy(c).to(torch.float32).unsqueeze(1) for c in columns)
    return Split("eight_points", inputs, targets_of, test_x, test_y, 0, described)


SHEET = 5  #: entries of a point of the curved sheet
RECIPES = {
    "interval": "[0, 1]",
    "square": "[0, 1]^2",
    "cube": "[0, 1]^3",
    "circle": "the unit circle",
    "sphere": "the unit sphere in R^3",
    "sheet": "a curved square in R^5, the image of [0, 1]^2 by tanh(A z) with orthonormal columns in A",
}
"""The set on which the inputs are uniform, or whose image they are; by name."""


@dataclass(frozen=True, eq=False)  # eq would compare tensors
class Wave:
    """The function cos(<w, x> + b), whose Lipschitz constant is at most ||w||."""

    w: Tensor  #: (M,) float64
    b: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        """Return the wave at inputs (n, M), shape (n, 1), float64."""
        return torch.cos(x.to(torch.float64) @ self.w + self.b)[:, None]


@lru_cache(maxsize=len(RECIPES))
def law_of(name: str) -> tuple[Distribution, Target]:
    """Return a law of inputs by its name in `RECIPES`, and the wave on it, half a period long, with values in [-1, 1].

    On a cube it is cos(pi t), t the mean of the entries: ||w|| = pi / sqrt(d). On a sphere it is -sin(pi x_1 / 2). On
    the sheet w is 2.5 times the unit vector along the image of the square's diagonal: the values are less than 2 apart.
    """
    if name in ("interval", "square", "cube"):
        d = 1 + ("interval", "square", "cube").index(name)
        return Cube(d), _wave(torch.full((d,), math.pi / d, dtype=torch.float64))
    if name in ("circle", "sphere"):
        d = 1 + ("circle", "sphere").index(name)
        along = torch.zeros(d + 1, dtype=torch.float64)
        along[0] = math.pi / 2
        return Sphere(d), _wave(along, math.pi / 2)
    if name == "sheet":
        drawn = torch.randn(SHEET, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        A: Tensor = torch.linalg.qr(drawn)[0]
        linear = nn.Linear(2, SHEET, bias=False, dtype=torch.float64)
        linear.weight.data.copy_(A)
        return PushForward(Cube(2), nn.Sequential(linear, nn.Tanh())), _wave(2.5 / math.sqrt(2) * A.sum(1))
    raise UnknownName.among("law", name, RECIPES, where="of inputs")


def waves(law: str, n: int = 300, test: int = 1000, seed: int = 0) -> Split:
    """Return independent samples of a known law, and a wave on them to learn; both are kept, for `check_bounds`.

    Theorem 6.1 of sharpening bounds the test error where the law of the inputs and the target's Lipschitz constant are
    known: `check_bounds(lens, "jacobian_generalisation", distribution=split.distribution, target=split.target)`.

    >>> split = waves("sphere", n=20)
    >>> tuple(split.x.shape), tuple(split.y.shape), split.distribution
    ((20, 3), (20, 1), Sphere(d=2))

    Raises:
        UnknownName: there is no such law.
        BadInput: no samples.
    """
    distribution, target = law_of(law)
    if n < 1 or test < 1:
        raise BadInput(f"waves(n={n}, test={test}): expected at least 1 sample of each")
    generator = torch.Generator().manual_seed(seed)
    x, test_x = (distribution.sample(count, generator).to(torch.float32) for count in (n, test))
    y, test_y = (target(inputs).to(torch.float32) for inputs in (x, test_x))
    described = f"a wave on {RECIPES[law]}; seed {seed}, {n} samples to train on and {test} to test"
    return Split(f"waves_{law}", x, y, test_x, test_y, 0, described, distribution, target)


def widest(law: str, probes: int = 4096) -> float:
    """Return the largest difference met between values of the wave, on extreme points and samples: a lower bound."""
    distribution, target = law_of(law)
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([distribution.extreme_points(probes, generator), distribution.sample(probes, generator)])
    y = target(x)
    return float(y.max() - y.min())


def _wave(w: Tensor, b: float = 0.0) -> Target:
    return Target(Wave(w, b), float(torch.linalg.vector_norm(w)))
