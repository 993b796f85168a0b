"""The regression of eight points on a line, of "On Progressive Sharpening", appendix C.3."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.interpolate import CubicSpline
from torch import Tensor

from flatlens.data.split import Split
from flatlens.errors import BadInput

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
            raise BadInput(f"eight_points(targets={targets}): {POINTS} finite numbers are needed")
    if grid < FEWEST_GRID:
        raise BadInput(f"eight_points(grid={grid}): at least {FEWEST_GRID} test inputs are needed")
    x, dense = np.linspace(0, 1, POINTS), np.linspace(0, 1, grid)
    given = f"drawn with seed {seed}" if targets is None else "given"
    return Split(
        name="eight_points",
        x=_column(x),
        y=_column(y),
        test_x=_column(dense),
        test_y=_column(CubicSpline(x, y, bc_type="natural")(dense)),
        classes=0,
        description=(
            f"8 inputs evenly spaced on [0, 1], targets {given} (the paper, sharpening C.3, prints none); tested on "
            f"{grid} points of the natural cubic spline through them"
        ),
    )


def _column(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> Tensor:
    return torch.from_numpy(values).to(torch.float32).unsqueeze(1)
