"""The risk at moved features of a layer: phi -> (I + A) phi, or phi -> phi + xi separately for each sample.

A matrix acts through the weights: W (phi + A phi) = (W + W A) phi (the papers' key equation); for a convolution on
every patch that it reads, for a grouped one on each group's channels. Noise is added to the layer's input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flatlens.errors import BadInput, UnknownName
from flatlens.grams import Layout, Weight, lay_out, row_factor
from flatlens.operations.layers import by_sample
from flatlens.perturbation.rotations import (
    balanced_count,
    balanced_rows,
    on_sphere,
    polar,
    radii,
    rotated,
)
from flatlens.perturbation.weights import Elsewhere
from flatlens.problem import Problem
from flatlens.problem.outcomes import Outcomes, outcomes
from flatlens.problem.ranks import ALONE
from flatlens.problem.samples import FORWARD_CHUNK

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
) -> tuple[nn.Module, Layout, Weight]:
    """Return the network, its plan, and the named layer (the last one for None), whose features can be moved.

    Raises:
        BadInput: they cannot; `where` names the function that was called.
        UnknownName: no linear layer has this name.
    """
    model = problem.measured() if model is None else model
    layout = lay_out(problem, model)
    name = layout.last() if layer is None else layer
    if name is None:
        raise BadInput(f"{where}(...): the network has no linear layer whose features could move")
    if name not in layout.weights:
        raise UnknownName.among("linear layer", name, layout.weights)
    if why := unmovable(layout.weights[name], by_noise=by_noise):
        raise BadInput(f"{where}(layer={name!r}): {why}")
    return model, layout, layout.weights[name]


@contextmanager
def moved(weight: Weight, layout: Layout, move: Move) -> Iterator[None]:
    """Give the layer's call the features that `move` returns, inside this context."""
    axis = layout.batch_axis[weight.layer]

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        x: Tensor = kwargs["input"] if not args else args[0]
        x = move(by_sample(x, axis)).movedim(0, axis)
        return (args, {**kwargs, "input": x}) if not args else ((x, *args[1:]), kwargs)

    assert weight.module is not None
    handle: RemovableHandle = weight.module.register_forward_pre_hook(enter, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def with_moved_features(problem: Problem, model: nn.Module, layout: Layout, weight: Weight, move: Move) -> Outcomes:
    """Return the outcomes over the data with moved features."""
    with problem.measuring(model), moved(weight, layout, move):
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
        self._elsewhere = Elsewhere(problem, [weight.parameter], model=model)
        self.W = weight.matrix.W.to("cpu")  #: (g, d, m)
        self.risk = self._elsewhere.outcomes(self._elsewhere.here).risk

    @property
    def m(self) -> int:
        """Return the number of features that one group's A acts on."""
        return self.W.shape[2]

    def change(self, WA: Tensor) -> float:
        """Return the change of the risk when the weight moves by W A, (g, d, m)."""
        return self._elsewhere.outcomes(self._at(WA)).risk - self.risk

    def _at(self, WA: Tensor) -> Tensor:
        return (self.W + WA).flatten().to(self._elsewhere.here)

    def draw(self, delta: float, law: str, sigma: float, generator: torch.Generator) -> Tensor:
        """Return W A, A = delta r O with a Haar-distributed rotation O and r of `law`."""
        r = delta * float(radii(1, law, self.m, sigma, generator))
        return r * self._rotated(generator)

    def balanced(self, most: int, generator: torch.Generator) -> Tensor | None:
        """Return W A of rotations whose second moments are exactly those of Haar's law, (k, g, d, m).

        Taken with both signs, they give the exact mean of a quadratic form of A. None if there are more than `most`.
        """
        g, d, m = self.W.shape
        r = min(d, m)
        if balanced_count(g, r, m) > most:
            return None
        return row_factor(self.W).mT @ balanced_rows(g, r, m, generator)

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

    def rounding(self) -> float:
        """Return the rounding error of the risk, to compare changes with."""
        return self._elsewhere.rounding()

    def slope(self, WA: Tensor) -> tuple[float, Tensor]:
        """Return (the change, its gradient in the weight, (g, d, m)) at the weight moved by W A."""
        value, g = self._elsewhere.slope(self._at(WA), self._elsewhere.chunks(), self._elsewhere.problem.mass)
        return value - self.risk, g.to("cpu", torch.float64).reshape(self.W.shape)

    def steepest(self, G: Tensor) -> Tensor:
        """Return W A for the A, ||A|| <= 1, with the largest <W A, G>, G of the weight's shape."""
        return torch.stack([_steepest(block, slope) for block, slope in zip(self.W, G, strict=True)])


def _steepest(W: Tensor, G: Tensor) -> Tensor:
    """Return W A for the A, ||A|| <= 1, with the largest <A, W^T G>."""
    U, Vh = polar(W.mT, G)
    return (W @ U) @ Vh


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
        raise BadInput(f"smallest_feature_matrix(...): two matrices (n, m) are needed, got {got}")
    A: Tensor = (torch.linalg.pinv(phi) @ moves).mT
    missed = float((phi @ A.mT - moves).abs().max())
    if not missed <= 1e-8 * float(moves.abs().max()):
        raise BadInput(
            f"smallest_feature_matrix(...): no matrix moves these features so (the nearest misses by {missed:.3g}): "
            f"they depend on each other linearly, and their moves do not in the same way"
        )
    return A
