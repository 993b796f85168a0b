"""Tiny networks of every kind that transforms must read, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from networks import NETWORKS, Made, drawn, module_of
from torch import Tensor, nn
from torch.nn import functional as F

import flatlens as fl


def cnn() -> nn.Module:
    """Norms, pooling, a channel that spans four inputs of the next layer."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.LeakyReLU(0.1), nn.Flatten(),
        nn.Linear(24, 7), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(7, 3),
    )  # fmt: skip


def nested() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Linear(36, 8), nn.Sequential(nn.ReLU(), nn.Identity())),
        nn.Sequential(nn.Linear(8, 7, bias=False), nn.ReLU()),
        nn.Linear(7, 3),
    )


def block() -> nn.Module:
    """Two convolutions under a skip."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        h = F.relu(net.bn1(net.conv1(x)))
        return torch.relu(x + net.bn2(net.conv2(h)))

    return module_of(
        forward,
        conv1=nn.Conv2d(4, 5, 3, padding=1, bias=False),
        bn1=nn.BatchNorm2d(5),
        conv2=nn.Conv2d(5, 4, 3, padding=1),
        bn2=nn.BatchNorm2d(4),
    )


def residual() -> nn.Module:
    """A skip, and features that two layers read; shapes asked for inside."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        h = net.block(torch.relu(net.stem(x)))
        h = F.max_pool2d(h, 2)
        h = torch.relu(net.mid(h.view(h.size(0), -1)))
        return net.left(h) + net.right(h / 2)

    return module_of(forward, stem=nn.Conv2d(1, 4, 3), block=block(), mid=(16, 6), left=(6, 3), right=(6, 3))


def tokens() -> nn.Module:
    """Linear layers over tokens, a transpose into channels, a mean over positions."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        h = torch.relu(net.mix(torch.relu(net.embed(x[:, 0]))))
        h = torch.relu(net.depthwise(torch.relu(net.conv(h.transpose(1, 2)))))
        return net.head(torch.relu(net.wide(h.mean(-1))))

    return module_of(
        forward,
        embed=nn.Linear(6, 5),
        mix=nn.Linear(5, 4),
        conv=nn.Conv1d(4, 8, 3),
        depthwise=nn.Conv1d(8, 8, 2, groups=8),
        wide=(8, 4),
        head=(4, 3),
    )


def flattened() -> nn.Module:
    """Tokens flattened with their features last: one neuron's outputs lie apart."""
    return module_of(lambda net, x: net.head(torch.relu(net.embed(x[:, 0])).flatten(1)), embed=(6, 5), head=(30, 3))


def images(n: int) -> Tensor:
    return torch.randn(n, 1, 6, 6)


MADE: dict[str, Made] = {
    "cnn": (cnn, images),
    "nested": (nested, lambda n: torch.randn(n, 36)),
    "fx-residual": (residual, images),
    "tokens": (tokens, images),
    "flattened": (flattened, images),
}
ALL = [*MADE, *NETWORKS]


def made(name: str, n: int = 12) -> tuple[nn.Module, Tensor, Tensor]:
    return drawn((MADE | NETWORKS)[name], n)


@pytest.fixture
def problem_of() -> Callable[..., fl.Problem]:
    """A problem on one of the networks, by name."""

    def build(name: str, n: int = 12, **options: object) -> fl.Problem:
        net, x, y = made(name, n)
        return fl.Problem(net, "cross_entropy", (x, y), **options)

    return build


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "network_name" in metafunc.fixturenames:
        metafunc.parametrize("network_name", ALL)
