"""ResNet-18 (He et al. 2016) with a thousand outputs and initial weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3 x 3 convolutions with a skip connection, which has a projection where the shape changes."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        same = stride == 1 and into == out
        self.skip = (
            nn.Identity() if same else nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both branches."""
        return self.act(self.body(x) + self.skip(x))


def resnet18(outputs: int = 1000, seed: int = 0) -> nn.Module:
    """Return ResNet-18 with He's initial weights and BatchNorm statistics of 32 x 32 noise."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        parts: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        parts.append(nn.MaxPool2d(3, 2, 1))
        into = 64
        for out, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            parts += [Block(into, out, stride), Block(out, out, 1)]
            into = out
        net = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, outputs))
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        noise = torch.randn(256, 3, 32, 32)
        with torch.no_grad():
            for _ in range(30):
                net(noise)
    return net.eval()
