"""What a move does to the tensors of one module, in place: rows and columns are rescaled or put in another order."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatlens.operations.layers import layer_of


def rescale_source(module: nn.Module, factors: Tensor) -> None:
    """Multiply the features that a layer or a norm gives: its rows and biases, by factors (features,).

    >>> net = nn.Linear(2, 2)
    >>> before = net(torch.ones(1, 2))
    >>> rescale_source(net, torch.tensor([2.0, 3.0]))
    >>> torch.allclose(net(torch.ones(1, 2)), before * torch.tensor([2.0, 3.0]))
    True
    """
    weight, bias = _tensors(module)
    a = factors.to(weight)
    with torch.no_grad():
        weight.mul_(_along(a, weight))
        if bias is not None:
            bias.mul_(a)


def rescale_reader(module: nn.Module, owner: Tensor, factors: Tensor) -> None:
    """Let a layer or a norm read features that were multiplied by factors (features,), and give what it gave.

    Of a layer the columns are divided; of a BatchNorm the running statistics take the factor: the mean a mu, the
    variance a^2 (sigma^2 + eps) - eps.
    """
    a = factors[owner]
    with torch.no_grad():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            assert module.running_mean is not None
            assert module.running_var is not None
            a = a.to(module.running_mean)
            module.running_mean.mul_(a)
            module.running_var.add_(module.eps).mul_(a.square()).sub_(module.eps)
            return
        weight, _ = _tensors(module)
        by_group = weight.view(layer_of(module).groups, -1, *weight.shape[1:])  # (g, d / g, m / g, kernel...)
        a = a.to(weight).reshape(len(by_group), 1, -1, *(1,) * (weight.ndim - 2))
        by_group.div_(a)


def order_source(module: nn.Module, order: Tensor) -> None:
    """Give the features in another order: new feature j is old feature order[j]. Of a BatchNorm its statistics, too."""
    held = {**module._parameters, **module._buffers}
    with torch.no_grad():
        for name in ("weight", "bias", "running_mean", "running_var"):
            if (tensor := held.get(name)) is not None:
                tensor.copy_(tensor[order.to(tensor.device)].clone())


def order_reader(module: nn.Module, owner: Tensor, order: Tensor) -> None:
    """Let a layer read features that come in another order. A channel that spans several inputs keeps theirs apart."""
    weight, _ = _tensors(module)
    with torch.no_grad():
        weight.copy_(weight[:, entries_in(owner, order).to(weight.device)].clone())


def entries_in(owner: Tensor, order: Tensor) -> Tensor:
    """Which old input each new one is, where inputs belong to features and features change places.

    >>> entries_in(torch.tensor([0, 0, 1, 1]), torch.tensor([1, 0])).tolist()
    [2, 3, 0, 1]
    """
    mine = owner.argsort(stable=True).reshape(len(order), -1)  # (features, inputs of each, in order)
    found = torch.empty_like(owner)
    found[mine.reshape(-1)] = mine[order].reshape(-1)
    return found


def _tensors(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    assert weight is not None
    return weight, bias


def _along(a: Tensor, weight: Tensor) -> Tensor:
    return a.reshape(-1, *(1,) * (weight.ndim - 1))
