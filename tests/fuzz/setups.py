"""What a case starts from: a small network with its loss and data, before anything is made odd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
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


class Temperature(nn.Module):
    """A learned scalar, without an axis."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale = nn.Linear(INPUTS, OUTPUTS), nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).tanh() * self.scale


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x + self.a(x).relu())


class Checkpointed(Residual):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return self.b(checkpoint(lambda h: self.a(h).tanh(), x, use_reentrant=self.reentrant))


class Reentrant(Checkpointed):
    reentrant = True


class Looked(nn.Module):
    """Token ids, or ids beside numbers."""

    def __init__(self, beside: bool = False) -> None:
        super().__init__()
        self.embed, self.head, self.beside = nn.Embedding(7, 2), nn.Linear(4 + INPUTS * beside, OUTPUTS), beside

    def forward(self, ids: Tensor, x: Tensor | None = None) -> Tensor:
        h = self.embed(ids).flatten(1)
        return self.head(h if x is None else torch.cat([h, x], 1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(INPUTS, INPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.a(x).tanh())[:, :OUTPUTS]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.attend, self.b = nn.Linear(1, 2), nn.MultiheadAttention(2, 1, batch_first=True), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x[..., None])
        return self.b(self.attend(h, h, h)[0].mean(1))


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
    "residual": Residual,
    "temperature": Temperature,
    "tied": Tied,
    "attention": Attention,
    "checkpoint": Checkpointed,
    "reentrant": Reentrant,
    "one output": lambda: nn.Sequential(nn.Linear(INPUTS, 3), nn.SiLU(), nn.Linear(3, 1)),
    "ids": Looked,
    "ids and numbers": lambda: Looked(beside=True),
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
