"""What architectures are made of: activations, and the laws of initial weights.

Each network is drawn from one generator, its parameters in order.
Linear layers and convolutions are drawn; a BatchNorm starts as the identity (scale 1, shift 0) under every law.

    law               weight                                     bias         source
    torch             U(+-1/sqrt(fan in))                        like weight  PyTorch's own, for either kind of layer
    xavier_normal     N(0, 2 / (fan in + fan out))               0            reparam2019 section 3, relative2021 C.1
    xavier_uniform    U(+-sqrt(6 / (fan in + fan out)))          0            Glorot and Bengio 2010
    kaiming_uniform   U(+-sqrt(6 / fan in))                      0            reparam2019 section 3
    uniform           U(-0.1, 0.1)                               like weight  reparam2019 section 3
    normal            N(0, variance 0.1)                         like weight  reparam2019 section 3
    vgg               N(0, 2 / fan out) in convolutions;         0;           the VGG code cited in sharpening B.2
                      torch's law in linear layers               torch's

The papers say nothing of biases. Zero is what the schemes of Glorot and He are derived for; a law that names one
interval or variance for the network is taken at its word, for biases too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, TypeVar

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from flatlens.errors import BadInput
from flatlens.operations.layers import LinearLayer, is_linear

Activation: TypeAlias = Literal["relu", "tanh", "gelu", "sigmoid", "silu", "gaussian"]

VANISHING = 1e-30  #: Gaussian values below it become 0: subnormal numbers would make the next layers five times slower


class GaussianActivation(nn.Module):
    """exp(-z^2 / (2 s^2)) of each entry, s the `spread`; 0 where that is below 1e-30, beyond 11.8 s.

    >>> GaussianActivation(spread=2.0)(torch.tensor([0.0, 2.0])).tolist()  # 1 and exp(-1/2)
    [1.0, 0.6065306663513184]
    """

    def __init__(self, spread: float = 1.0) -> None:
        super().__init__()
        if not 0 < spread < float("inf"):
            raise BadInput("it must be positive and finite", argument="spread", value=spread, call="GaussianActivation")
        self.spread = spread

    def forward(self, z: Tensor) -> Tensor:
        """Return the activation of each entry, in z's shape."""
        return F.threshold(torch.exp(torch.square(z) * (-0.5 / self.spread**2)), VANISHING, 0.0)

    def extra_repr(self) -> str:
        """Return what `print(network)` shows."""
        return f"spread={self.spread:g}"


ACTIVATIONS: dict[Activation, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "gaussian": GaussianActivation,  # of spread 1
}


def scaled(owner: str, sizes: Sequence[int], width: float) -> list[int]:
    """Return the sizes times `width`, rounded; none may become 0.

    >>> scaled("VGG11", (64, 512), 0.125)
    [8, 64]
    """
    if not (width > 0 and math.isfinite(width)):
        raise BadInput(f"{owner}(width={width!r}): it must be positive and finite")
    found = [round(size * width) for size in sizes]
    if min(found, default=1) < 1:
        raise BadInput(f"{owner}(width={width!r}): no channel would be left where the network has {min(sizes)}")
    return found


def pooled(owner: str, image: int, poolings: int) -> int:
    """Return the side of an image after this number of poolings by 2, each rounding down.

    >>> pooled("VGG11", 32, 5)
    1
    """
    side = image >> poolings
    if side < 1:
        raise BadInput(f"{owner}(image={image}): {poolings} poolings by 2 need at least {1 << poolings} pixels a side")
    return side


Init: TypeAlias = Literal[
    "torch", "xavier_normal", "xavier_uniform", "kaiming_uniform", "uniform", "normal", "normal_sd", "vgg"
]
Law: TypeAlias = Callable[[LinearLayer, Generator], None]
Network = TypeVar("Network", bound=nn.Module)


class Drawn(ABC):
    """An architecture whose network is a sequence of modules, drawn by the law `init` with `seed`."""

    seed: int
    init: Init

    def build(self) -> nn.Sequential:
        """Return the network with its initial weights, float32 on the CPU; the global random state does not change."""
        return built(self._design, self.init, torch.Generator().manual_seed(self.seed))

    @abstractmethod
    def _design(self) -> nn.Sequential: ...


def built(design: Callable[[], Network], init: Init, generator: Generator) -> Network:
    """Return the network that `design` makes, float32 on the CPU, drawn from `generator` alone."""
    with torch.device("meta"):  # so that PyTorch's constructors draw nothing from the global generator
        network = design()
    network = network.float().to_empty(device="cpu")
    with torch.no_grad():
        for module in network.modules():
            if is_linear(module):
                LAWS[init](module, generator)
            elif isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()
            else:  # a parameter without a law would stay uninitialised
                assert not [*module.parameters(recurse=False), *module.buffers(recurse=False)], type(module)
    return network


def _torch(layer: LinearLayer, generator: Generator) -> None:
    bound = 1 / math.sqrt(layer.weight[0].numel())  # Kaiming's with a = sqrt(5)
    for parameter in layer.parameters(recurse=False):
        parameter.uniform_(-bound, bound, generator=generator)


def _every_parameter(draw: Callable[..., object], *numbers: float) -> Law:
    def law(layer: LinearLayer, generator: Generator) -> None:
        for parameter in layer.parameters(recurse=False):
            draw(parameter, *numbers, generator=generator)

    return law


def _biases_zero(draw: Callable[..., object], **options: str) -> Law:
    def law(layer: LinearLayer, generator: Generator) -> None:
        draw(layer.weight, generator=generator, **options)
        if layer.bias is not None:
            layer.bias.zero_()

    return law


_VGG_CONVOLUTION = _biases_zero(nn.init.kaiming_normal_, mode="fan_out", nonlinearity="relu")

LAWS: dict[Init, Law] = {
    "torch": _torch,
    "xavier_normal": _biases_zero(nn.init.xavier_normal_),
    "xavier_uniform": _biases_zero(nn.init.xavier_uniform_),
    "kaiming_uniform": _biases_zero(nn.init.kaiming_uniform_, nonlinearity="relu"),
    "uniform": _every_parameter(Tensor.uniform_, -0.1, 0.1),
    "normal": _every_parameter(Tensor.normal_, 0, math.sqrt(0.1)),
    "normal_sd": _every_parameter(Tensor.normal_, 0, 0.1),
    "vgg": lambda layer, generator: (_torch if isinstance(layer, nn.Linear) else _VGG_CONVOLUTION)(layer, generator),
}
