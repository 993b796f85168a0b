"""What a case starts from: a small network with its loss and data, before anything is made odd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from networks import module_of
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

N, INPUTS, OUTPUTS = 6, 3, 2


@dataclass
class Setup:
    """All that a call is given; mutations change it in place."""

    model: object
    loss: object
    data: object
    options: dict[str, object] = field(default_factory=dict)
    truth: bool = True  #: whether brute force can tell the numbers of this model on x and y
    x: Tensor | None = None
    y: Tensor | None = None
    last: nn.Module = field(default_factory=nn.Module)

    @property
    def net(self) -> nn.Module:
        """The network to mutate, or the one that it was."""
        if isinstance(self.model, nn.Module):
            self.last = self.model
        return self.last

    def set_data(self, x: object, y: object) -> None:
        self.data, self.x, self.y = (x, y), x, y


def temperature() -> nn.Module:
    """A learned scalar, without an axis."""
    return module_of(
        lambda net, x: net.a(x).tanh() * net.scale, a=(INPUTS, OUTPUTS), scale=nn.Parameter(torch.tensor(1.3))
    )


def residual() -> nn.Module:
    return module_of(lambda net, x: net.b(x + net.a(x).relu()), a=(INPUTS, INPUTS), b=(INPUTS, OUTPUTS))


def checkpointed(reentrant: bool = False) -> nn.Module:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        return net.b(checkpoint(lambda h: net.a(h).tanh(), x, use_reentrant=reentrant))

    return module_of(forward, a=(INPUTS, INPUTS), b=(INPUTS, OUTPUTS))


def looked(beside: bool = False) -> nn.Module:
    """Token ids, or ids beside numbers."""

    def forward(net: nn.Module, ids: Tensor, x: Tensor | None = None) -> Tensor:
        h = net.embed(ids).flatten(1)
        return net.head(h if x is None else torch.cat([h, x], 1))

    return module_of(forward, embed=nn.Embedding(7, 2), head=(4 + INPUTS * beside, OUTPUTS))


def tied() -> nn.Module:
    return module_of(lambda net, x: net.a(net.a(x).tanh())[:, :OUTPUTS], a=(INPUTS, INPUTS))


def attention() -> nn.Module:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        h = net.a(x[..., None])
        return net.b(net.attend(h, h, h)[0].mean(1))

    return module_of(forward, a=nn.Linear(1, 2), attend=nn.MultiheadAttention(2, 1, batch_first=True), b=(2, 2))


def mlp(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 4), *layers, nn.Linear(4, OUTPUTS))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, INPUTS)), nn.Conv1d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(4, OUTPUTS)
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(INPUTS, OUTPUTS),
    "relu": lambda: mlp(nn.ReLU()),
    "tanh": lambda: mlp(nn.Tanh(), nn.Linear(4, 4), nn.GELU()),
    "dropout": lambda: mlp(nn.Dropout(0.5), nn.ReLU()),
    "batchnorm": lambda: mlp(nn.BatchNorm1d(4), nn.ReLU()),
    "layernorm": lambda: mlp(nn.LayerNorm(4), nn.ReLU()),
    "weightnorm": lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Linear(INPUTS, 3)), nn.Tanh(), nn.Linear(3, OUTPUTS)
    ),
    "spectralnorm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(INPUTS, OUTPUTS))),
    "convolutional": convolutional,
    "residual": residual,
    "temperature": temperature,
    "tied": tied,
    "attention": attention,
    "checkpoint": checkpointed,
    "reentrant": lambda: checkpointed(reentrant=True),
    "one output": lambda: nn.Sequential(nn.Linear(INPUTS, 3), nn.SiLU(), nn.Linear(3, 1)),
    "ids": looked,
    "ids and numbers": lambda: looked(beside=True),
}
SPECTRAL = ("weightnorm", "spectralnorm")  #: cannot be copied: their truth is asked of other tests


def setup(network: str, loss: str, seed: int, dtype: torch.dtype) -> Setup:
    """Of a network by its name, the same one every time."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = NETWORKS[network]().to(dtype)
        x = torch.randn(N, INPUTS, dtype=dtype)
        ids = torch.randint(0, 7, (N, 2))
        outputs = 1 if network == "one output" else OUTPUTS
        loss = "mse" if outputs == 1 and loss == "cross_entropy" else loss
        y = torch.randint(0, outputs, (N,)) if loss == "cross_entropy" else torch.randn(N, outputs, dtype=dtype)
    given = ids if network == "ids" else (ids, x) if network == "ids and numbers" else x
    made = Setup(net, loss, (given, y))
    made.x, made.y = given, y
    made.truth = network not in SPECTRAL and network not in ("ids and numbers", "reentrant") and dtype == torch.float64
    return made
