"""Data with a known distribution of inputs and a known target function, for bounds that need both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from flatlens.bounds import Target
from flatlens.data.split import Split
from flatlens.distributions import Cube, Distribution, PushForward, Sphere
from flatlens.errors import BadInput, UnknownName

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

    >>> law, wave = law_of("square")
    >>> wave(torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]])).flatten().round(decimals=12).abs().tolist()
    [1.0, 0.0, 1.0]
    >>> round(wave.lipschitz / math.pi * 2**0.5, 12)
    1.0
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
        A = _orthonormal(SHEET, 2)
        linear = nn.Linear(2, SHEET, bias=False, dtype=torch.float64)
        linear.weight.data.copy_(A)
        return PushForward(Cube(2), nn.Sequential(linear, nn.Tanh())), _wave(2.5 / math.sqrt(2) * A.sum(1))
    raise UnknownName.among("law of inputs", name, RECIPES)


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
        raise BadInput(f"waves(n={n}, test={test}): at least 1 sample of each is needed")
    generator = torch.Generator().manual_seed(seed)
    x, test_x = (distribution.sample(count, generator).to(torch.float32) for count in (n, test))
    return Split(
        name=f"waves_{law}",
        x=x,
        y=target(x).to(torch.float32),
        test_x=test_x,
        test_y=target(test_x).to(torch.float32),
        classes=0,
        description=f"a wave on {RECIPES[law]}; seed {seed}, {n} samples to train on and {test} to test",
        distribution=distribution,
        target=target,
    )


def widest(law: str, probes: int = 4096) -> float:
    """Return the largest difference met between values of the wave, on extreme points and samples: a lower bound.

    >>> widest("cube"), 1.99 < widest("sphere") <= 2
    (2.0, True)
    """
    distribution, target = law_of(law)
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([distribution.extreme_points(probes, generator), distribution.sample(probes, generator)])
    y = target(x)
    return float(y.max() - y.min())


def _wave(w: Tensor, b: float = 0.0) -> Target:
    return Target(Wave(w, b), float(torch.linalg.vector_norm(w)))


def _orthonormal(rows: int, columns: int) -> Tensor:
    drawn = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    Q: Tensor = torch.linalg.qr(drawn)[0]
    return Q
