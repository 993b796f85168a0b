"""Brute-force references for gradients, Jacobians and Hessian products; finite differences check them.

There is one backward for each sample and output, and a Hessian product by double backward, sample by sample. A sample
is alone but twice in its batch, and its first copy is differentiated. The reason: for batches of one, the backward of
torch 2.13's BatchNorm on the CPU is wrong without a warning if the gradient has another memory layout than the input
(`bn(x).flatten(2).transpose(1, 2)`, as in xcit and levit).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

STEPS, LONG = (1e-6, 1e-8), (1e-3, 1e-4, 1e-5)
"""Steps of finite differences along normal numbers: in float64, and where a network rounds to float32."""


class Composed(TorchFunctionMode):
    """Hardsigmoid made of operations that torch can differentiate twice, unlike its own kernel."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not F.hardsigmoid:
            return function(*args, **kwargs)
        value = F.relu6(args[0] + 3) / 6
        return args[0].copy_(value) if kwargs.get("inplace", args[1:] == (True,)) else value


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode, with all of it differentiable twice."""
    before = model.training
    with sdpa_kernel(SDPBackend.MATH), Composed():
        model.eval()
        yield
    model.train(before)


def alone(x: Any, i: int) -> Any:
    """Return a batch that holds one sample twice."""
    return tree_map(lambda part: part[[i, i]], x)


def size(x: Any) -> int:
    """Return the number of samples."""
    return len(next(iter(x.values())) if isinstance(x, dict) else x)


def outputs(model: nn.Module, x: Any) -> Tensor:
    """Return the network's output, (n, N), computed anew.

    Some of timm's networks keep a function of a parameter, with its graph or without, until they are put in training
    mode.
    """
    model.train()
    model.eval()
    return as_it_is(model, x)


def as_it_is(model: nn.Module, x: Any) -> Tensor:
    """Return the network's output in its current mode."""
    found = model(**x) if isinstance(x, dict) else model(x)
    logits: Tensor = getattr(found, "logits", found)
    return logits


def at_input(model: nn.Module, x: Any) -> tuple[Tensor, Tensor]:
    """Return (outputs, the tensor to differentiate to beside the parameters).

    This tensor is the image, or for token ids the first embedding's output.
    """
    if not isinstance(x, dict):
        leaf = x.clone().requires_grad_()
        return outputs(model, leaf.clone()), leaf  # a clone, as the network may begin with an in-place operation
    looked_up: list[Tensor] = []

    def keep(module: nn.Module, ids: Any, found: Tensor) -> Tensor:
        looked_up.append(found)
        return found.clone()

    hooks = [part.register_forward_hook(keep) for part in model.modules() if isinstance(part, nn.Embedding)]
    try:
        return outputs(model, x), looked_up[0]
    finally:
        for hook in hooks:
            hook.remove()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters, tied ones once."""
    return [p for p in model.parameters() if p.requires_grad]


def first_order(model: nn.Module, x: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Return two dictionaries of first-order numbers.

    The first has the sharpness under interpolation, the Gauss-Newton trace of the cross-entropy and the maximum local
    sensitivity. The second has each parameter's share of the sharpness.
    """
    totals = {"interpolation_sharpness": 0.0, "ggn_trace": 0.0, "mls": 0.0}
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    shares, n = dict.fromkeys(names, 0.0), size(x)
    for i in range(n):
        f, leaf = at_input(model, alone(x, i))
        to = [leaf, *trainable(model)]
        rows = [torch.autograd.grad(f[0, k], to, retain_graph=True, allow_unused=True) for k in range(f.shape[1])]
        J, *by_parameter = (
            torch.stack([torch.zeros_like(at) if g is None else g for g in each])
            for at, each in zip(to, zip(*rows, strict=True), strict=True)
        )
        K = torch.zeros(f.shape[1], f.shape[1], dtype=f.dtype)
        for name, each in zip(names, by_parameter, strict=True):
            own = each.flatten(1) @ each.flatten(1).T
            shares[name] += float(own.trace()) / n
            K += own
        p = f[0].detach().softmax(0)
        totals["interpolation_sharpness"] += float(K.trace()) / n
        totals["ggn_trace"] += float(((p.diag() - p[:, None] * p) @ K).trace()) / n
        totals["mls"] += float(torch.linalg.matrix_norm(J[:, 0].flatten(1), 2)) / n
    return totals, shares


def flat(parts: Any, like: list[nn.Parameter]) -> Tensor:
    """Return one vector; zeros for parameters that nothing depends on."""
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(parts, like, strict=True)])


def loss_of(model: nn.Module, x: Any, y: Tensor, i: int) -> Tensor:
    """Return a sample's share of the mean cross-entropy."""
    return F.cross_entropy(outputs(model, alone(x, i))[:1], y[i : i + 1]) / size(x)


def hessian_product(model: nn.Module, x: Any, y: Tensor, v: Tensor) -> Tensor:
    """Return the Hessian of the mean cross-entropy times v, by explicit double backward."""
    parameters, total = trainable(model), torch.zeros_like(v)
    for i in range(size(x)):
        g = torch.autograd.grad(loss_of(model, x, y, i), parameters, create_graph=True, allow_unused=True)
        along = flat(g, parameters) @ v
        total += flat(torch.autograd.grad(along, parameters, allow_unused=True), parameters)
    return total


@contextmanager
def moved(parameters: Sequence[Tensor], v: Tensor, step: float) -> Iterator[None]:
    """Move the parameters a step along v, and put them back exactly."""
    before = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p, part in zip(parameters, torch.split(v, [p.numel() for p in parameters]), strict=True):
            p += step * part.view_as(p)
    yield
    with torch.no_grad():
        for p, value in zip(parameters, before, strict=True):
            p.copy_(value)


def gradient(model: nn.Module, x: Any, y: Tensor) -> Tensor:
    """Return the gradient of the mean cross-entropy."""
    parameters, total = trainable(model), torch.zeros(())
    for i in range(size(x)):
        total = total + flat(torch.autograd.grad(loss_of(model, x, y, i), parameters, allow_unused=True), parameters)
    return total


def by_differences(
    model: nn.Module, x: Any, y: Tensor, v: Tensor, product: Tensor, steps: Sequence[float] = STEPS
) -> dict[str, float]:
    """Return how far gradient and product along v are from central differences of loss and of gradient.

    Relative, at the best of the steps: rounding spoils the small steps and kinks the large ones.
    """
    found = [_along(model, x, y, v, product, step) for step in steps]
    return {"gradient": min(one[0] for one in found), "hessian_product": min(one[1] for one in found)}


def _along(model: nn.Module, x: Any, y: Tensor, v: Tensor, product: Tensor, step: float) -> tuple[float, float]:
    ends = []
    for sign in (1, -1):
        with moved(trainable(model), v, sign * step):
            with torch.no_grad():
                loss = float(sum(loss_of(model, x, y, i) for i in range(size(x))))
            ends.append((loss, gradient(model, x, y)))
    (loss_up, up), (loss_down, down) = ends
    slope = float((up + down) @ v) / 2
    return abs((loss_up - loss_down) / (2 * step) / slope - 1), relative((up - down) / (2 * step), product)


def relative(a: Tensor, b: Tensor) -> float:
    """Return ||a - b|| / ||b||."""
    return float((a - b).norm() / b.norm())


def direction(model: nn.Module) -> Tensor:
    """Return normal numbers, one for each parameter; zeros for an embedding's padding rows, which are never trained."""
    generator = torch.Generator().manual_seed(1)
    parts: dict[Tensor, Tensor] = {
        p: torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in trainable(model)
    }
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None and module.weight in parts:
            parts[module.weight][module.padding_idx] = 0
    return flat(parts.values(), trainable(model))
