"""An upper bound of a network's Lipschitz constant, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from flatlens.errors import BadInput, one_line
from flatlens.operations.layers import is_linear
from flatlens.operations.operator_norm import operator_norm
from flatlens.operations.table import Operation, hooked, operation_of
from flatlens.problem import measuring
from flatlens.problem.copies import copy_on_same_weights

_SLACK = 1e-9  #: relative margin: operator norms are found from below, to 1e-10 of the value


def lipschitz_product(network: nn.Module, size: tuple[int, ...]) -> float:
    """Return prod_l Lip(layer l) >= Lip(network), for one input of shape `size`; in eval mode.

    The network is an nn.Sequential, nested or not, of Linear and Conv layers, which stretch by their operator norms,
    and of maps that move entries or act on each alone with a known slope. Each norm is raised by 1e-9 of itself, so
    the product is never below the constant. It equals the constant if the layers' steepest directions meet; it can be
    far above.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid())
    >>> _ = nn.init.ones_(net[0].weight)
    >>> round(lipschitz_product(net, (2,)) ** 2, 6)  # sqrt 6 / 4
    0.375
    """
    product, network = 1.0, copy_on_same_weights(network) or network
    with measuring(network), torch.no_grad():
        x = torch.zeros(1, *size)
        for called, module, found in _steps(network, ""):
            if is_linear(module):
                if not bool(torch.isfinite(module.weight).all()):
                    raise BadInput(f"lipschitz_product(network=...): {called} has weights that are not finite")
                norm, converged = operator_norm(module, x.shape[1:])
                if not converged:
                    raise _refused(f"the search of the operator norm of {called} did not converge")
                product *= norm * (1 + _SLACK)
                x = x.to(module.weight)
            else:
                product *= _steepest(found, module, called)
            x = _shown(module, x, called)
    return product


def _steps(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module, Operation]]:
    """Yield the parts of an nn.Sequential in order, with their names; raise where a forward() is unknown."""
    called = f"{name or 'the network'} ({type(module).__name__})"
    if hooked(module):
        raise _refused(f"{called} has forward hooks, which may change its output")
    if type(module).forward is nn.Sequential.forward:
        for part in module._modules:  # named_children would omit a module's second use
            yield from _steps(module.get_submodule(part), f"{name}.{part}" if name else part)
    elif (found := operation_of(module)) is None:
        raise _refused(f"the constant of {called} is not known here")
    else:
        yield called, module, found


def _steepest(found: Operation, module: nn.Module, called: str) -> float:
    constant = found.lipschitz(module)
    if constant is None:
        raise _refused(f"the constant of {called} is not known here")
    if math.isnan(constant):
        raise _refused(f"{called} jumps at its threshold, so that it has no constant")
    return constant


def _refused(why: str) -> BadInput:
    return BadInput(f"lipschitz_product(network=...): {why}: give the constant: PushForward(..., lipschitz=...)")


def _shown(module: nn.Module, x: Tensor, name: str) -> Tensor:
    """Return the module's output, used for its shape."""
    try:
        y: Tensor = module(x)
    except RuntimeError as error:
        raise BadInput(
            f"lipschitz_product(size=...): {name} fails on inputs of shape {(*x.shape,)} ({one_line(error)})"
        ) from error
    return y
