"""Fully connected networks."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
from torch import Generator, nn

from flatlens.errors import BadInput

Activation: TypeAlias = Literal["relu", "tanh", "gelu"]
_ACTIVATIONS: dict[Activation, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}


@dataclass(frozen=True)
class MLP:
    """A fully connected network: linear layers fc1, fc2, ... with an activation after each but the last.

    `seed` draws the initial weights: PyTorch's own law for `nn.Linear`, uniform on +-1/sqrt(fan in).

    >>> [name for name, _ in MLP(inputs=64, widths=(32, 32), outputs=10).build().named_children()]
    ['fc1', 'act1', 'fc2', 'act2', 'fc3']
    """

    inputs: int
    widths: tuple[int, ...]  #: of the hidden layers
    outputs: int
    activation: Activation = "relu"
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", tuple(self.widths))  # a list, when it comes from JSON
        if min((self.inputs, *self.widths, self.outputs)) < 1:
            raise BadInput(f"MLP: every width must be at least 1, not {(self.inputs, *self.widths, self.outputs)}")
        if self.activation not in _ACTIVATIONS:
            raise BadInput(f"MLP(activation={self.activation!r}): known are {', '.join(_ACTIVATIONS)}")

    def build(self) -> nn.Sequential:
        """The network with its initial weights, float32 on the CPU; the global random state is not touched."""
        generator = torch.Generator().manual_seed(self.seed)
        sizes = (self.inputs, *self.widths, self.outputs)
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        for number, (fan_in, fan_out) in enumerate(pairwise(sizes), start=1):
            parts[f"fc{number}"] = _linear(fan_in, fan_out, generator)
            if number < len(sizes) - 1:
                parts[f"act{number}"] = _ACTIVATIONS[self.activation]()
        return nn.Sequential(parts)


def _linear(fan_in: int, fan_out: int, generator: Generator) -> nn.Linear:
    layer = nn.Linear(fan_in, fan_out, device="meta").to_empty(device="cpu")  # so that nothing global is drawn from
    bound = 1 / math.sqrt(fan_in)
    with torch.no_grad():
        layer.weight.uniform_(-bound, bound, generator=generator)
        layer.bias.uniform_(-bound, bound, generator=generator)
    return layer
