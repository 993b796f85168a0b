"""A training run to track: everything that measuring could disturb is in it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import flatlens as fl


def blobs(n: int = 96) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 4
    return torch.randn(4, 12, generator=generator)[y] + 0.7 * torch.randn(n, 12, generator=generator), y


def network(seed: int = 0) -> nn.Sequential:
    """Dropout draws from the global generator, BatchNorm has buffers."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 4))


class Run:
    """SGD with momentum and a schedule, on batches drawn from the global generator."""

    def __init__(self, n: int = 96) -> None:
        self.net, (self.x, self.y) = network(), blobs(n)
        self.optimiser = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimiser, 10, 0.5)
        self.problem = fl.Problem(self.net, "cross_entropy", (self.x, self.y))
        torch.manual_seed(1)

    def steps(self, count: int) -> Iterator[int]:
        for step in range(count):
            batch = torch.randint(len(self.x), (16,))
            self.optimiser.zero_grad()
            nn.functional.cross_entropy(self.net(self.x[batch]), self.y[batch]).backward()
            self.optimiser.step()
            self.schedule.step()
            yield step + 1

    def train(self, count: int, tracker: fl.Tracker | None = None, after: Callable[[int], None] | None = None) -> None:
        if tracker is not None:
            tracker.step(optimiser=self.optimiser)
        for step in self.steps(count):
            if tracker is not None:
                tracker.step(optimiser=self.optimiser)
            if after is not None:
                after(step)

    def state(self) -> dict[str, object]:
        return copy.deepcopy(
            {
                "net": self.net.state_dict(),
                "grads": [p.grad for p in self.net.parameters()],
                "optimiser": self.optimiser.state_dict(),
                "modes": [m.training for m in self.net.modules()],
                "rng": torch.get_rng_state(),
            }
        )
