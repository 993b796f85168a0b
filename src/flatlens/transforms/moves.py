"""Changes of the tensors of one module, in place: rows and columns are rescaled or permuted."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatlens.operations.layers import layer_of


def rescale_source(module: nn.Module, factors: Tensor) -> None:
    """Multiply the features of a layer or a norm by factors (features,): its rows and biases.

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
    """Divide a reader's weights by factors (features,): it reads multiplied features and gives the same outputs.

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
    """Permute the features of a layer: new feature j is old feature order[j]. For a BatchNorm, its statistics, too."""
    held = {**module._parameters, **module._buffers}
    with torch.no_grad():
        for name in ("weight", "bias", "running_mean", "running_var"):
            if (tensor := held.get(name)) is not None:
                tensor.copy_(tensor[order.to(tensor.device)].clone())


def order_reader(module: nn.Module, owner: Tensor, order: Tensor) -> None:
    """Permute the inputs of a layer; the inputs of a channel that spans several keep their order."""
    weight, _ = _tensors(module)
    with torch.no_grad():
        weight.copy_(weight[:, entries_in(owner, order).to(weight.device)].clone())


def entries_in(owner: Tensor, order: Tensor) -> Tensor:
    """Return the old input of each new one, for inputs that belong to permuted features.

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
