"""The laws of initial weights: one generator for a network, its parameters in order.

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
from collections.abc import Callable
from typing import Literal, TypeAlias, TypeVar

import torch
from torch import Generator, nn

from flatlens.operations.layers import LinearLayer, is_linear

Init: TypeAlias = Literal["torch", "xavier_normal", "xavier_uniform", "kaiming_uniform", "uniform", "normal", "vgg"]
Law: TypeAlias = Callable[[LinearLayer, Generator], None]
Network = TypeVar("Network", bound=nn.Module)


def built(design: Callable[[], Network], init: Init, generator: Generator) -> Network:
    """Return the network that `design` makes, float32 on the CPU, drawn from `generator` alone.

    >>> net = built(lambda: nn.Linear(4, 1), "torch", torch.Generator().manual_seed(0))
    >>> bool(net.weight.abs().max() <= 1 / math.sqrt(4))
    True
    """
    with torch.device("meta"):  # so that PyTorch's constructors draw nothing from the global generator
        network = design()
    network = network.float().to_empty(device="cpu")
    initialise(network, init, generator)
    return network


@torch.no_grad()
def initialise(network: nn.Module, init: Init, generator: Generator) -> None:
    """Draw the network's parameters again, in order, and reset the statistics of its BatchNorms."""
    for module in network.modules():
        if is_linear(module):
            LAWS[init](module, generator)
        elif isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()
        else:  # a parameter without a law would stay uninitialised
            assert not [*module.parameters(recurse=False), *module.buffers(recurse=False)], type(module)


def torch_law(layer: LinearLayer, generator: Generator) -> None:
    """Draw weight and bias by PyTorch's own law, Kaiming's with a = sqrt(5): U(+-1/sqrt(fan in))."""
    bound = 1 / math.sqrt(layer.weight[0].numel())
    for parameter in layer.parameters(recurse=False):
        parameter.uniform_(-bound, bound, generator=generator)


def _xavier_normal(layer: LinearLayer, generator: Generator) -> None:
    nn.init.xavier_normal_(layer.weight, generator=generator)
    _zero_bias(layer)


def _xavier_uniform(layer: LinearLayer, generator: Generator) -> None:
    nn.init.xavier_uniform_(layer.weight, generator=generator)
    _zero_bias(layer)


def _kaiming_uniform(layer: LinearLayer, generator: Generator) -> None:
    nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu", generator=generator)
    _zero_bias(layer)


def _uniform(layer: LinearLayer, generator: Generator) -> None:
    for parameter in layer.parameters(recurse=False):
        parameter.uniform_(-0.1, 0.1, generator=generator)


def _normal(layer: LinearLayer, generator: Generator) -> None:
    for parameter in layer.parameters(recurse=False):
        parameter.normal_(0, math.sqrt(0.1), generator=generator)


def _vgg(layer: LinearLayer, generator: Generator) -> None:
    if isinstance(layer, nn.Linear):
        torch_law(layer, generator)
    else:
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu", generator=generator)
        _zero_bias(layer)


def _zero_bias(layer: LinearLayer) -> None:
    if layer.bias is not None:
        layer.bias.zero_()


LAWS: dict[Init, Law] = {
    "torch": torch_law,
    "xavier_normal": _xavier_normal,
    "xavier_uniform": _xavier_uniform,
    "kaiming_uniform": _kaiming_uniform,
    "uniform": _uniform,
    "normal": _normal,
    "vgg": _vgg,
}
