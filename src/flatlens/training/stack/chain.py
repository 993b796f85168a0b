"""Networks that are a chain of linear layers and activations, many at once: forward and backward over lanes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ELEMENTWISE: tuple[type[nn.Module], ...] = (
    nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Softplus, nn.ELU, nn.LeakyReLU, nn.Identity,
)  # fmt: skip
_ALIGNED = 16  #: the start of each parameter in a row is rounded to it: every address is a multiple of 64 bytes

Views: TypeAlias = list[tuple[Tensor, Tensor | None]]
"""For each linear layer: the weights, (L, out, in), and the biases, (L, 1, out)."""
UseGradient: TypeAlias = Callable[[int, Tensor], object]
"""Called with the number of a part of the rows and the loss's gradient there, (L, part), which it may overwrite."""


class NotStackable(Exception):
    """The network cannot be trained in a stack; says why, in words that follow "it has" or "it is"."""


@dataclass(frozen=True)
class Linear:
    """A linear layer, what follows it up to the next, and where its parameters are in a row."""

    inputs: int
    outputs: int
    weight: int
    bias: int | None
    activations: nn.Sequential  #: elementwise, without parameters

    @cached_property
    def rectifies(self) -> bool:
        """Return whether a single ReLU follows: its slope needs no graph."""
        return [type(one) for one in self.activations] == [nn.ReLU]


@dataclass(frozen=True)
class ForwardRecord:
    """The tensors of a forward pass that the backward pass needs, layer by layer."""

    inputs: list[Tensor]  #: one for each linear layer, (L, B, in)
    graphs: list[tuple[Tensor, Tensor] | None]  #: values before and after other activations than ReLU
    outputs: Tensor  #: (L, B, N)


class LayerChain:
    """The architecture that the lanes of a stack share; the parameters come from outside, as rows (L, size).

    A row holds the weights of all layers, then all biases. `model` is any of the networks. With `singly`, each lane's
    products are taken by themselves, for shapes where a batched one has other bits.
    """

    def __init__(self, model: nn.Module, *, singly: bool = False) -> None:
        self.singly = singly
        modules = list(_flat(model))
        if modules and isinstance(modules[0], nn.Flatten) and (modules[0].start_dim, modules[0].end_dim) == (1, -1):
            modules = modules[1:]
        # The linear layers, each with the activations that follow it
        found: list[tuple[nn.Linear, list[nn.Module]]] = []
        for module in modules:
            if type(module) is nn.Linear:
                found.append((module, []))
            elif (type(module) in ELEMENTWISE or getattr(module, "elementwise", False)) and found:
                found[-1][1].append(module)
            else:
                stacked = "only linear layers and elementwise activations are stacked"
                raise NotStackable(f"a {type(module).__name__}: {stacked}")
        if not found:
            raise NotStackable("no linear layer")
        parameters = [p for linear, _ in found for p in (linear.weight, linear.bias) if p is not None]
        tensors = [*model.parameters(), *model.buffers()]
        if len(tensors) != len(parameters) or not all(p.requires_grad for p in tensors):
            raise NotStackable("frozen or shared weights")
        # Where each parameter begins in a row
        begins: dict[int, int] = {}
        self.size = 0  #: numbers in a row, gaps included
        for p in sorted(parameters, key=torch.Tensor.dim, reverse=True):  # weights before biases, else as they come
            begins[id(p)] = self.size
            self.size += -(-p.numel() // _ALIGNED) * _ALIGNED
        self.places = [(begins[id(p)], p.shape) for p in parameters]  #: starts of `model.parameters()`, their shapes
        self.layers = [
            Linear(
                one.in_features, one.out_features, begins[id(one.weight)],
                None if one.bias is None else begins[id(one.bias)], nn.Sequential(*activations),
            )
            for one, activations in found
        ]  # fmt: skip
        biases = min((one.bias for one in self.layers if one.bias is not None), default=self.size)
        weights = [slice(one.weight, one.weight + one.inputs * one.outputs) for one in self.layers]
        self.parts = [*weights, slice(biases, self.size)]  #: of a row: the weight of each layer, and all biases

    def views(self, rows: Tensor) -> Views:
        """Return views of the layers' weights and biases in rows (L, size)."""
        return [
            (
                rows[:, one.weight : one.weight + one.outputs * one.inputs].view(-1, one.outputs, one.inputs),
                None if one.bias is None else rows[:, one.bias : one.bias + one.outputs].view(-1, 1, one.outputs),
            )
            for one in self.layers
        ]

    def of_row(self, row: Tensor) -> list[Tensor]:
        """Return one lane's row as tensors of the shapes of `model.parameters()`, in their order."""
        return [row[begins : begins + shape.numel()].view(shape) for begins, shape in self.places]

    def forward(self, views: Views, x: Tensor) -> ForwardRecord:
        """Run the forward pass on inputs x, (L, B, in)."""
        inputs, graphs, h = [], [], x
        for layer, (weight, bias) in zip(self.layers, views, strict=True):
            inputs.append(h)
            h = self._linear(h, weight, bias)
            graph = None
            if layer.rectifies:
                h.relu_()
            elif len(layer.activations):
                with torch.enable_grad():
                    graph = h.requires_grad_(), layer.activations(h)
                h = graph[1].detach()
            graphs.append(graph)
        return ForwardRecord(inputs, graphs, h)

    def backward(self, views: Views, tape: ForwardRecord, slope: Tensor, use: UseGradient) -> None:
        """Call `use` for each of `parts`, the last layer's first; `slope` is the loss's in the outputs, (L, B, N)."""
        # A part's weights are not needed any more when `use` is called with it, so it may change them: a gradient that
        # is used at once is still in the processor's cache
        biases = slope.new_zeros(len(slope), self.size - self.parts[-1].start)
        after = [*tape.inputs[1:], tape.outputs]
        for number in reversed(range(len(self.layers))):
            layer = self.layers[number]
            if (graph := tape.graphs[number]) is not None:
                (slope,) = torch.autograd.grad(graph[1], graph[0], slope)
            elif layer.rectifies:
                slope = torch.ops.aten.threshold_backward(slope, after[number], 0)
            if layer.bias is not None:
                begins = layer.bias - self.parts[-1].start
                torch.sum(slope, 1, out=biases[:, begins : begins + layer.outputs])
            gradient = self._product(slope.mT, tape.inputs[number])
            if number:
                slope = self._product(slope, views[number][0])
            use(number, gradient.flatten(1))
        use(len(self.layers), biases)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            return self._product(x, weight.mT)
        if self.singly:
            return torch.stack([F.linear(*lane) for lane in zip(x, weight, bias[:, 0], strict=True)])
        return torch.baddbmm(bias, x, weight.mT)

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        if self.singly:
            return torch.stack([torch.mm(*lane) for lane in zip(a, b, strict=True)])
        return torch.bmm(a, b)

    def outputs(self, views: Views, x: Tensor) -> Tensor:
        """Return the outputs (L, B, N) for inputs x (L, B, in), without a record for a backward pass."""
        for layer, (weight, bias) in zip(self.layers, views, strict=True):
            x = self._linear(x, weight, bias)
            x = x.relu_() if layer.rectifies else layer.activations(x)
        return x


def _flat(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a `Sequential` of `Sequential`s, in order."""
    if model._forward_hooks or model._forward_pre_hooks or model._backward_hooks or model._backward_pre_hooks:
        raise NotStackable("hooks")
    if type(model) is not nn.Sequential:
        yield model
        return
    for child in model:
        yield from _flat(child)
