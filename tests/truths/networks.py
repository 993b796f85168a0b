"""Tiny networks of every kind the pass must get right, in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from flatlens import Lens, Problem

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}


def mlp(activation: str) -> nn.Module:
    act = ACTIVATIONS[activation]
    return nn.Sequential(nn.Linear(6, 7), act(), nn.Linear(7, 5), act(), nn.Linear(5, 3))


def cnn(activation: str) -> nn.Module:
    """Stride, padding, dilation, groups, an in-place activation shared by all layers, pooling."""
    act = nn.ReLU(inplace=True) if activation == "relu" else ACTIVATIONS[activation]()
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1), act, nn.Conv2d(4, 6, 2, groups=2, dilation=2), act,
        nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(6, 5), act, nn.Linear(5, 3),
    )  # fmt: skip


def cnn_1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 3, 3, padding="same", padding_mode="circular"), nn.ReLU(),
        nn.Conv1d(3, 4, 3, dilation=2, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


def cnn_3d() -> nn.Module:
    """Volumes, which torch does not unfold by itself."""
    return nn.Sequential(
        nn.Conv3d(2, 4, (1, 2, 3), stride=(1, 2, 1), padding=(0, 1, 0), groups=2), nn.Tanh(),
        nn.Conv3d(4, 3, 2, dilation=(1, 1, 2)), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3),
    )  # fmt: skip


class Residual(nn.Module):
    """A skip around a convolution and a norm, with in-place sums; branches that meet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 3, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.left = nn.Conv2d(3, 3, 3, padding=1)
        self.right = nn.Conv2d(3, 3, 1)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.relu_(self.norm(self.stem(x)))
        branch = self.left(h)
        branch += self.right(h)
        branch += h
        return self.head(nn.functional.relu(branch).flatten(1))


class Twice(nn.Module):
    """One module called twice, the second call reading what the first one made."""

    def __init__(self, activation: str = "relu") -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.mid = nn.Linear(4, 4)
        self.act = ACTIVATIONS[activation]()
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.first(x))
        return self.last(self.act(self.mid(self.act(self.mid(h)))))


class Attention(nn.Module):
    """An encoder layer: attention's bare in_proj, an out_proj that fires no hook, LayerNorms, token-wise linears."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.encoder = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, activation="gelu", batch_first=batch_first)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x if self.batch_first else x.transpose(0, 1)
        return self.head(self.encoder(tokens).mean(1 if self.batch_first else 0))


class Bare(nn.Module):
    """A parameter that belongs to no layer, used as a scale, and a weight used through a bare function."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.first = nn.Linear(6, 5)
        self.tied = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x)) * self.scale
        return self.last(torch.relu(self.tied(h)) + nn.functional.linear(h, self.tied.weight))


def flat(n: int) -> Tensor:
    return torch.randn(n, 6)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp-relu": (lambda: mlp("relu"), flat),
    "mlp-tanh": (lambda: mlp("tanh"), flat),
    "mlp-gelu": (lambda: mlp("gelu"), flat),
    "cnn-relu-inplace": (lambda: cnn("relu"), lambda n: torch.randn(n, 2, 8, 8)),
    "cnn-tanh": (lambda: cnn("tanh"), lambda n: torch.randn(n, 2, 8, 8)),
    "cnn-1d": (cnn_1d, lambda n: torch.randn(n, 2, 7)),
    "cnn-3d": (cnn_3d, lambda n: torch.randn(n, 2, 3, 4, 5)),
    "residual": (Residual, lambda n: torch.randn(n, 1, 2, 2)),
    "twice-relu": (lambda: Twice("relu"), flat),
    "twice-tanh": (lambda: Twice("tanh"), flat),
    "attention": (Attention, lambda n: torch.randn(n, 3, 4)),
    "attention-tokens-first": (lambda: Attention(False), lambda n: torch.randn(n, 3, 4)),
    "bare": (Bare, flat),
}


def network(name: str, n: int = 5, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """(a network in eval mode, inputs, labels), in float64; norm statistics and affine entries not at their
    defaults."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        make, inputs = NETWORKS[name]
        net = make().double().eval()
        x = inputs(n).double()
        with torch.no_grad():
            for module in net.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.running_mean.normal_()
                    module.running_var.uniform_(0.5, 2)
                if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
                    module.weight.uniform_(0.5, 2)
                    module.bias.normal_()
        y = torch.randint(0, 3, (n,))
    return net, x, y


def lens(name: str = "mlp-relu", **options: object) -> Lens:
    """Return a lens on 5 samples of a network, under cross-entropy; the options are those of `Problem`."""
    net, x, y = network(name)
    return Lens(Problem(net, "cross_entropy", (x, y), **options))
