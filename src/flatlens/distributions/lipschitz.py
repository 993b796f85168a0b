"""An upper bound of a network's Lipschitz constant, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flatlens.errors import BadInput, one_line
from flatlens.problem import is_linear, measuring
from flatlens.problem.operator_norm import operator_norm

SLACK = 1e-9  #: operator norms are found from below, to 1e-10 of the value

STEEPEST: dict[type[nn.Module], Callable[[Any], float]] = {
    nn.Identity: lambda _: 1.0,
    nn.Flatten: lambda _: 1.0,
    nn.Unflatten: lambda _: 1.0,
    nn.Dropout: lambda _: 1.0,  # in eval mode, in which the network is run
    nn.ReLU: lambda _: 1.0,
    nn.LeakyReLU: lambda m: max(1.0, abs(m.negative_slope)),
    nn.ELU: lambda m: max(1.0, abs(m.alpha)),
    nn.Tanh: lambda _: 1.0,
    nn.Sigmoid: lambda _: 0.25,
    # the jump to the identity, past the threshold, is beta^-1 exp(-threshold) high: rounding, if that is large
    nn.Softplus: lambda m: 1.0 if m.beta > 0 and m.threshold >= 20 else math.nan,
}
"""The largest slope of each known map that acts entry by entry, or moves entries; NaN for none."""


def lipschitz_product(network: nn.Module, size: tuple[int, ...]) -> float:
    """prod_l Lip(layer l) >= Lip(network), for one input of shape `size`; in eval mode.

    The network is an nn.Sequential, nested or not, of Linear and Conv layers, which stretch by their operator norms,
    and of the maps in `STEEPEST`. Each norm is raised by 1e-9 of itself, so that the product is never below the
    constant. It is the constant itself if the layers' steepest directions meet; it can be far above.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid())
    >>> _ = nn.init.ones_(net[0].weight)
    >>> round(lipschitz_product(net, (2,)) ** 2, 6)  # sqrt 6 / 4
    0.375
    """
    product = 1.0
    with measuring(network), torch.no_grad():
        x = torch.zeros(1, *size)
        for name, module in _steps(network, ""):
            if is_linear(module):
                if not bool(torch.isfinite(module.weight).all()):
                    raise BadInput(f"lipschitz_product(network=...): {name} has weights that are not finite")
                product *= operator_norm(module, x.shape[1:]) * (1 + SLACK)
                x = x.to(module.weight)
            else:
                product *= STEEPEST[_known(module)](module)
            x = _shown(module, x, name)
    return product


def _steps(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The parts of an nn.Sequential in order, by name; those whose constant is not known are refused."""
    called = f"{name or 'the network'} ({type(module).__name__})"
    mend = "give the constant: PushForward(..., lipschitz=...)"
    if module._forward_hooks or module._forward_pre_hooks:
        raise BadInput(
            f"lipschitz_product(network=...): {called} has forward hooks, which may change its output: {mend}"
        )
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        for part in module._modules:  # named_children would leave out what comes a second time
            child = module.get_submodule(part)
            yield from _steps(child, f"{name}.{part}" if name else part)
    elif _known(module) is nn.Module:
        raise BadInput(f"lipschitz_product(network=...): the constant of {called} is not known here: {mend}")
    elif not is_linear(module) and math.isnan(STEEPEST[_known(module)](module)):
        raise BadInput(f"lipschitz_product(network=...): {called} jumps at its threshold, so that it has no constant")
    else:
        yield called, module


def _known(module: nn.Module) -> type[nn.Module]:
    """The class of PyTorch's whose forward this module runs; nn.Module if none."""
    mine: type[nn.Module] = type(module)
    all_known: tuple[type[nn.Module], ...] = (*STEEPEST, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    for known in all_known:
        if issubclass(mine, known) and mine.forward is known.forward:
            return known
    return nn.Module


def _shown(module: nn.Module, x: Tensor, name: str) -> Tensor:
    """The module's output, for its shape."""
    try:
        y: Tensor = module(x)
    except RuntimeError as error:
        raise BadInput(
            f"lipschitz_product(size=...): {name} takes no input of shape {(*x.shape,)} ({one_line(error)})"
        ) from error
    return y
