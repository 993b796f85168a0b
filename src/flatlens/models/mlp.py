"""Fully connected networks, and coordinate networks that start at a high or a low frequency (sharpening C.3)."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from flatlens.models.building_blocks import ACTIVATIONS, LAWS, Activation, Drawn, GaussianActivation, Init, built
from flatlens.settings_json import check, require_setting
from flatlens.training import Adam, Training, train


@dataclass(frozen=True)
class MLP(Drawn):
    """A fully connected network: linear layers fc1, fc2, ... with an activation after each but the last.

    `seed` draws the initial weights by the law `init`: by default PyTorch's own, uniform on +-1/sqrt(fan in).

    The networks of the papers: `MLP(3072, (200, 200), 10)` of sharpening C.2, `MLP(784, (50, 50, 50, 30), 10,
    init="xavier_normal")` of reparam2019 Appendix C, `MLP.feature_extractor()` of relative2021 C.1.

    >>> [name for name, _ in MLP(inputs=64, widths=(32, 32), outputs=10).build().named_children()]
    ['fc1', 'act1', 'fc2', 'act2', 'fc3']
    """

    inputs: int
    widths: tuple[int, ...]  #: sizes of the hidden layers
    outputs: int
    activation: Activation = "relu"  #: "gaussian" has spread 1
    seed: int = 0
    init: Init = "torch"
    last_activation: bool = False  #: an activation after the last layer too

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", tuple(self.widths))  # a list, when it comes from JSON
        check(self, ("inputs", "widths", "outputs"), activation=ACTIVATIONS, init=LAWS)

    @classmethod
    def feature_extractor(cls, seed: int = 0, *, init: Init = "xavier_normal") -> MLP:
        """Return the random 784-512-128-16-8 tanh network with which relative2021 C.1 maps features back to inputs.

        tanh follows the last layer too: the pull-back begins with tanh^-1 of the features. The text says "Glorot
        initialisation": of its two laws the normal one is taken, as reparam2019 names it; `init="xavier_uniform"` is
        the other.

        >>> [layer for layer in MLP.feature_extractor().build()][-1]
        Tanh()
        """
        return cls(784, (512, 128, 16), 8, "tanh", seed, init, last_activation=True)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the sizes of all layers of neurons, from the inputs to the outputs."""
        return (self.inputs, *self.widths, self.outputs)

    def _design(self) -> nn.Sequential:
        return dense(self.sizes, ACTIVATIONS[self.activation], last_activation=self.last_activation)


def dense(sizes: Sequence[int], activation: Callable[[], nn.Module], *, last_activation: bool = False) -> nn.Sequential:
    """Return fc1, act1, fc2, act2, ...: linear layers of these sizes, each with its own activation."""
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (fan_in, fan_out) in enumerate(pairwise(sizes), start=1):
        parts[f"fc{number}"] = nn.Linear(fan_in, fan_out)
        if number < len(sizes) - 1 or last_activation:
            parts[f"act{number}"] = activation()
    return nn.Sequential(parts)


Start: TypeAlias = Literal["high", "low"]
PERIODS = 3  #: number of periods of sin(6 pi x) between 0 and 1


@dataclass(frozen=True)
class CoordinateNet:
    """A four-layer network from R to R that fits points in the plane, after sharpening C.3 (Ramasinghe et al. 2023).

    Gaussian: "high" is PyTorch's own law; "low" draws weights from N(0, `low_std`^2), so small that each bump
    exp(-z^2 / (2 s^2)) is wide in x. ReLU: "low" is PyTorch's own law; "high" is pre-trained on sin(6 pi x), by Adam.

    The text leaves the following open; the norms it prints of the first layer's weight decide where they can.

    - The width. PyTorch's law at 256 gives sqrt(256/3) = 9.24 +- 0.26; printed are 9.09 +- 0.34 and 9.56 +- 0.16.
    - "A wide Gaussian distribution". Printed is 0.56 +- 0.02, which weights of N(0, 0.035^2) give: 16 * 0.035 +- 0.025.
      A wide activation beside weights of PyTorch's law would give 9.24. Which layers are meant hardly matters:
      PyTorch's law has the standard deviation 1/sqrt(3 * 256) = 0.036 in all others.
    - Biases at the low start. They keep PyTorch's law: with zeros every z starts where the Gaussian is flat, and at
      s = 0.05 10,000 steps of descent left a squared error of 2.2 on 8 points (mean of 3 seeds; below 1e-14 so).
    - The activation's spread s. At 0.05 the function turns about 54 times between 0 and 1 from a high start, 3 times
      from a low one (47 and 4 when 8 points are fitted). At 0.1 it is 12 and 1, and the fits are equally steep; at 1
      neither turns.
    - The pre-training's points and steps: the midpoints of `points` equal parts of (0, 1), all in every step. The first
      layer's norm becomes 9.6 by it, on (-1, 1) it would be 9.9; printed is 9.61 +- 0.28.

    >>> [name for name, _ in CoordinateNet("gaussian", "high").build().named_children()]
    ['fc1', 'act1', 'fc2', 'act2', 'fc3', 'act3', 'fc4']
    """

    activation: Literal["gaussian", "relu"]
    start: Start
    width: int = 256
    seed: int = 0
    spread: float = 0.05  #: s of the Gaussian activation
    low_std: float = 0.035  #: standard deviation of the weights, at the Gaussian's low start
    steps: int = 2000  #: steps of the pre-training, at ReLU's high start
    points: int = 256
    lr: float = 1e-4

    def __post_init__(self) -> None:
        check(self, activation=("gaussian", "relu"), start=("high", "low"))
        check(self, ("width", "steps", "points"))
        for name in ("spread", "low_std", "lr"):
            require_setting(self, name, 0 < getattr(self, name) < math.inf, "it must be positive and finite")

    def build(self) -> nn.Sequential:
        """Return the network at its start, float32 on the CPU; the global random state does not change.

        ReLU's high start takes seconds: at width 256 about six, to a root mean square error near 0.01 on sin(6 pi x).
        """
        generator = torch.Generator().manual_seed(self.seed)
        network = built(self._design, "torch", generator)
        if (self.activation, self.start) == ("gaussian", "low"):
            with torch.no_grad():
                for module in network:
                    if isinstance(module, nn.Linear):
                        module.weight.normal_(0, self.low_std, generator=generator)
        if (self.activation, self.start) == ("relu", "high"):
            x = midpoints(self.points)
            how = Training(Adam(self.lr), loss="mse", max_steps=self.steps, check_every=self.steps)
            train(network, (x, sine(x)), how)
        return network

    def _design(self) -> nn.Sequential:
        sizes = (1, self.width, self.width, self.width, 1)
        return dense(sizes, nn.ReLU if self.activation == "relu" else lambda: GaussianActivation(self.spread))


def sine(x: Tensor) -> Tensor:
    """Return sin(6 pi x), three periods between 0 and 1."""
    return torch.sin(2 * math.pi * PERIODS * x)


def midpoints(count: int) -> Tensor:
    """Return the midpoints of `count` equal parts of (0, 1), shape (count, 1)."""
    return ((torch.arange(count, dtype=torch.float32) + 0.5) / count)[:, None]
