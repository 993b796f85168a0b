"""Elementwise activations with known values and slopes over an interval."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_SLACK = 4e-15  #: relative error of computed slopes: rounding, and positions of turns that are known to 1e-9
SOFTPLUS_TAIL = 20.0  #: least threshold; above it torch's softplus is the identity, 2e-9 off the true one

_FAR = 1e300  #: a z where slopes equal those at infinity


@dataclass(frozen=True, eq=False)
class Activation:
    """An elementwise function, its derivative and the turns of both: between turns they are monotone."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    lowest: tuple[tuple[float, float], ...] = ()  #: extrema as (z, value)
    turns: tuple[tuple[float, float], ...] = ()  #: (z, slope) at extrema of the slope and on both sides of kinks
    slack: float = _SLACK  #: relative error of slopes; 0 where they are constants

    def values(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return the least and the largest value over [low, high]."""
        return _hull(self.value, self.lowest, low, high)

    def slopes(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return the least and the largest derivative over [low, high]; at kinks, the one-sided ones.

        >>> low, high = relu(nn.ReLU()).slopes(torch.tensor([-2.0, -1.0, 1.0]), torch.tensor([-1.0, 1.0, 2.0]))
        >>> low.tolist(), high.tolist()
        ([0.0, 0.0, 1.0], [0.0, 1.0, 1.0])
        """
        least, most = _hull(self.slope, self.turns, low, high)
        return least - self.slack * (1 + least.abs()), most + self.slack * (1 + most.abs())

    @property
    def steepest(self) -> float:
        """Return the largest absolute slope anywhere."""
        far = torch.tensor(_FAR, dtype=torch.float64)
        return float(torch.stack(self.slopes(-far, far)).abs().max())


def _hull(
    function: Callable[[Tensor], Tensor], turns: tuple[tuple[float, float], ...], low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor]:
    ends = function(low), function(high)
    least, most = torch.minimum(*ends), torch.maximum(*ends)
    for z, there in turns:
        inside = (low <= z) & (z <= high) & (low < high)
        least = torch.where(inside, least.clamp(max=there), least)
        most = torch.where(inside, most.clamp(min=there), most)
    return least, most


def relu(module: nn.Module) -> Activation:
    """Return max(z, 0)."""
    return Activation(F.relu, _step(0.0, 1.0), slack=0.0)


def leaky_relu(module: nn.LeakyReLU) -> Activation | None:
    """Return max(z, c z), for c >= 0; None for other c."""
    c = float(module.negative_slope)
    if c < 0:
        return None
    return Activation(lambda z: F.leaky_relu(z, c), _step(c, 1.0), slack=0.0)


def _step(below: float, above: float) -> Callable[[Tensor], Tensor]:
    """Return the slope of two rays that meet at 0; at 0 it is the lower ray's, as in autograd."""
    return lambda z: torch.where(z > 0, z.new_tensor(above), z.new_tensor(below))


def hardtanh(module: nn.Hardtanh) -> Activation:
    """Return z clipped to two bounds; ReLU6 too."""
    a, b = float(module.min_val), float(module.max_val)
    return Activation(
        lambda z: z.clamp(a, b), lambda z: ((z > a) & (z < b)).to(z), turns=((a, 0), (a, 1), (b, 0), (b, 1)), slack=0.0
    )


def tanh(module: nn.Module) -> Activation:
    """Return tanh of z."""
    return Activation(torch.tanh, lambda z: 4 * _bump(2 * z), turns=((0.0, 1.0),))


def sigmoid(module: nn.Module) -> Activation:
    """Return 1 / (1 + exp(-z))."""
    return Activation(torch.sigmoid, _bump, turns=((0.0, 0.25),))


def _bump(z: Tensor) -> Tensor:
    """Return sigma(z) (1 - sigma(z)), without cancellation at large |z|."""
    e = (-z.abs()).exp()
    return e / (1 + e).square()


def softplus(module: nn.Softplus) -> Activation | None:
    """Return log(1 + exp(beta z)) / beta; None where torch's function differs from it by more than rounding."""
    beta, tail = float(module.beta), float(module.threshold)
    if beta <= 0 or tail < SOFTPLUS_TAIL:
        return None
    return Activation(
        lambda z: torch.logaddexp(beta * z, torch.zeros_like(z)) / beta, lambda z: torch.sigmoid(beta * z)
    )


def elu(module: nn.ELU) -> Activation | None:
    """Return z above 0, alpha (exp(z) - 1) below, for alpha >= 0; None for other alpha."""
    alpha = float(module.alpha)
    if alpha < 0:
        return None
    return Activation(
        lambda z: F.elu(z, alpha),
        lambda z: torch.where(z > 0, 1.0, alpha * z.clamp(max=0).exp()),
        turns=((0.0, alpha), (0.0, 1.0)),
    )


def gelu(module: nn.GELU) -> Activation | None:
    """Return z Phi(z), least at -0.7518; its slope Phi + z phi turns at z = +-sqrt 2, where phi (2 - z^2) = 0."""
    if module.approximate != "none":
        return None

    def slope(z: Tensor) -> Tensor:
        return 0.5 * torch.erfc(-z / math.sqrt(2)) + z * (-z.square() / 2).exp() / math.sqrt(2 * math.pi)

    ends = slope(torch.tensor([-math.sqrt(2), math.sqrt(2)], dtype=torch.float64)).tolist()
    turns = ((-math.sqrt(2), ends[0]), (math.sqrt(2), ends[1]))
    return Activation(F.gelu, slope, lowest=((-0.7517915247, -0.16997120748),), turns=turns)


def silu(module: nn.Module) -> Activation:
    """Return z sigma(z), least at -1.2785; its slope sigma (1 + z (1 - sigma)) turns where z tanh(z/2) = 2."""

    def slope(z: Tensor) -> Tensor:
        return torch.sigmoid(z) * (1 + z * torch.sigmoid(-z))

    turn = 2.3993572805
    ends = slope(torch.tensor([-turn, turn], dtype=torch.float64)).tolist()
    return Activation(
        F.silu, slope, lowest=((-1.2784645428, -0.2784645427611),), turns=((-turn, ends[0]), (turn, ends[1]))
    )


def hardswish(module: nn.Module) -> Activation:
    """Return z min(max(z + 3, 0), 6) / 6, least at -1.5."""
    return Activation(
        F.hardswish,
        lambda z: torch.where(z.abs() < 3, z / 3 + 0.5, (z > 0).to(z)),
        lowest=((-1.5, -0.375),),
        turns=((-3.0, 0.0), (-3.0, -0.5), (3.0, 1.0), (3.0, 1.5)),
    )
