"""Fully connected networks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from flatlens.models.activations import ACTIVATIONS, Activation
from flatlens.models.checks import require_known, require_sizes
from flatlens.models.initialisation import LAWS, Init, built


@dataclass(frozen=True)
class MLP:
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
        require_sizes("MLP(inputs=..., widths=..., outputs=...)", self.sizes)
        require_known("MLP(activation=...)", self.activation, ACTIVATIONS)
        require_known("MLP(init=...)", self.init, LAWS)

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

    def build(self) -> nn.Sequential:
        """Return the network with its initial weights, float32 on the CPU; the global random state does not change."""
        return built(
            lambda: dense(self.sizes, ACTIVATIONS[self.activation], last_activation=self.last_activation),
            self.init,
            torch.Generator().manual_seed(self.seed),
        )


def dense(sizes: Sequence[int], activation: Callable[[], nn.Module], *, last_activation: bool = False) -> nn.Sequential:
    """Return fc1, act1, fc2, act2, ...: linear layers of these sizes, each with its own activation."""
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (fan_in, fan_out) in enumerate(pairwise(sizes), start=1):
        parts[f"fc{number}"] = nn.Linear(fan_in, fan_out)
        if number < len(sizes) - 1 or last_activation:
            parts[f"act{number}"] = activation()
    return nn.Sequential(parts)
