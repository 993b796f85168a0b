"""The small networks on which every convention is evaluated: trained in float64, the same digits every time."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

import flatlens as fl
from flatlens.data import digits
from flatlens.models import MLP

TRAIN, TEST, CLASSES = 250, 50, 10
BATCHES = (120, 120, 10)  #: what a loader with batches of 120 makes of the data
DECAY = 5e-4  #: weight decay, where a convention counts it
LOSSES = {
    "half_squared_error": lambda f, y: 0.5 * (f - nn.functional.one_hot(y, CLASSES)).square().sum(1),
    "cross_entropy": lambda f, y: nn.functional.cross_entropy(f, y, reduction="none"),
}


@dataclass(eq=False)
class Network:
    """A trained network with its data, and everything flatlens says of it."""

    name: str
    model: nn.Sequential
    loss: str
    x: Tensor
    y: Tensor
    test: tuple[Tensor, Tensor]
    reports: dict[str, fl.Report] = field(default_factory=dict)

    @cached_property
    def lens(self) -> fl.Lens:
        """Under its own loss."""
        return fl.Lens(self.problem())

    def problem(self, loss: object = None, **options: object) -> fl.Problem:
        """Under another loss, or with other options."""
        return fl.Problem(self.model, loss or self.loss, (self.x, self.y), test=self.test, **options)

    def __call__(self, measure: str, part: str = "", layer: str | None = None) -> float:
        """What flatlens says: of the network, or of one layer."""
        if measure not in self.reports:
            self.reports[measure] = fl.measure(self.lens, measure)
        name = f"{measure}.{part}" if part else measure
        return self.reports[measure][name, layer].value

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """By name."""
        return dict(self.model.named_parameters())

    @cached_property
    def theta(self) -> Tensor:
        """All parameters as one vector."""
        return torch.cat([p.detach().flatten() for p in self.parameters.values()])

    @cached_property
    def is_weight(self) -> Tensor:
        """Which entries of theta are weights, not biases."""
        return torch.cat([torch.full((p.numel(),), p.ndim > 1) for p in self.parameters.values()])

    def losses(self, f: Tensor, part: slice = slice(None)) -> Tensor:
        """One for each sample."""
        return LOSSES[self.loss](f, self.y[part])

    @torch.no_grad()
    def outcome(self, theta: Tensor, part: slice = slice(None)) -> tuple[float, float]:
        """(risk, accuracy) with other weights."""
        values = dict(zip(self.parameters, self.split(theta), strict=True))
        f = torch.func.functional_call(self.model, values, (self.x[part],))
        return float(self.losses(f, part).mean()), float((f.argmax(1) == self.y[part]).double().mean())

    def split(self, theta: Tensor) -> list[Tensor]:
        """A vector cut into the parameters' shapes."""
        pieces = theta.split([p.numel() for p in self.parameters.values()])
        return [piece.view_as(p) for piece, p in zip(pieces, self.parameters.values(), strict=True)]


class Networks:
    """All of them, each trained when first asked for."""

    def __init__(self) -> None:
        split = digits(train=TRAIN)
        self.x, self.y = split.x.double(), split.y
        self.test = (split.test_x[:TEST].double(), split.test_y[:TEST])

    def _trained(self, name: str, model: nn.Sequential, loss: str, steps: int) -> Network:
        network = Network(name, model.double(), loss, self.x, self.y, self.test)
        optimiser = torch.optim.Adam(model.parameters(), lr=0.005)
        for _ in range(steps):
            optimiser.zero_grad()
            torch.autograd.backward(network.losses(model(self.x)).mean())
            optimiser.step()
        optimiser.zero_grad()
        model.eval()
        return network

    @cached_property
    def relu(self) -> Network:
        """Fully connected, half squared error."""
        return self._trained("relu", MLP(64, (32, 32), CLASSES).build(), "half_squared_error", 200)

    @cached_property
    def entropy(self) -> Network:
        """The same from the same start, under cross-entropy."""
        return self._trained("entropy", MLP(64, (32, 32), CLASSES).build(), "cross_entropy", 100)

    @cached_property
    def tanh(self) -> Network:
        """Smooth, and stopped before it interpolates."""
        return self._trained("tanh", MLP(64, (32, 32), CLASSES, "tanh").build(), "half_squared_error", 50)

    @cached_property
    def conv(self) -> Network:
        """Two convolutions, one of them with BatchNorm."""
        torch_seed = torch.Generator().manual_seed(0)
        model = nn.Sequential()
        model.add_module("image", nn.Unflatten(1, (1, 8, 8)))
        model.add_module("conv1", nn.Conv2d(1, 6, 3, padding=1))
        model.add_module("norm", nn.BatchNorm2d(6))
        model.add_module("act1", nn.ReLU())
        model.add_module("conv2", nn.Conv2d(6, 8, 3, stride=2))
        model.add_module("act2", nn.ReLU())
        model.add_module("flat", nn.Flatten())
        model.add_module("fc", nn.Linear(72, CLASSES))
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim > 1:
                    p.normal_(0, (2 / p[0].numel()) ** 0.5, generator=torch_seed)
                elif p.sum() != len(p):  # a bias, not BatchNorm's factor
                    p.zero_()
        return self._trained("conv", model, "cross_entropy", 100)

    def all(self) -> list[tuple[Network, str]]:
        """With a description each."""
        return [
            (self.relu, "fully connected 64-32-32-10, ReLU"),
            (self.entropy, "the same, same start"),
            (self.tanh, "64-32-32-10, tanh, stopped early"),
            (self.conv, "conv 6, BatchNorm, ReLU, conv 8 (stride 2), ReLU, linear"),
        ]
