"""Watching one forward pass: which layers were called, and what autograd's graph says of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from flatlens.operations.graph import Graph
from flatlens.operations.layers import is_linear
from flatlens.operations.reads import Operation, Product, Read, product_of, reaches, reads_of
from flatlens.problem import Batch, Problem
from flatlens.problem.sequences import attention_mask


@dataclass(eq=False)
class Call:
    """One call of a linear layer: its own copy of the input x and its output z, both inside the graph."""

    key: str  #: `fc1`; `fc1:1` for the second call
    name: str  #: the module's name
    module: nn.Module
    x: Tensor
    z: Tensor
    began: int  #: when, as autograd numbers operations
    ended: int
    product: Product | None = None  #: the one operation in the call that multiplies by the layer's weight
    pure: bool = False  #: whether the call does that, adds its bias, and nothing else

    @property
    def read(self) -> Tensor:
        """Return what the call read, without its graph; a half-precision input comes in float32."""
        x = self.x.detach()
        return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass(eq=False)
class Tape:
    """The record of a forward pass, in execution order."""

    linear: dict[str, Call] = field(default_factory=dict)
    embedded: list[Tensor] = field(default_factory=list)  #: outputs of embeddings
    mask: Tensor | None = None  #: 0 at padding, (n, T), where the batch says so
    graph: Graph | None = None  #: of the whole pass
    reads: dict[str, tuple[Read, ...] | None] = field(default_factory=dict)  #: by the parameter's name
    operations: dict[str, Operation] = field(default_factory=dict)  #: by the names that a plan gives them, once it has

    def read_graph(self, f: Tensor, model: nn.Module) -> None:
        """Read from the graph which operations read each parameter, and which product each call made."""
        self.graph = graph = Graph(f)
        self.reads = {name: reads_of(graph, p) for name, p in model.named_parameters() if p.is_floating_point()}
        by_turn = sorted(
            (product for node in graph.nodes if (product := product_of(node)) is not None),
            key=lambda found: found[0].turn,
        )
        own = {id(p): self.reads.get(name) for name, p in model.named_parameters()}
        for call in self.linear.values():
            inside = [found for found in by_turn if call.began < found[0].turn < call.ended]
            call.product = _product_in(call, inside, own.get(id(call.module._parameters.get("weight"))))
            if call.product is not None:
                node = call.product.node
                call.pure = reaches(call.z.grad_fn, node) and reaches(call.product.source, call.x.grad_fn)


def _product_in(call: Call, inside: list[tuple[Product, Tensor]], reads: tuple[Read, ...] | None) -> Product | None:
    """The product by the module's own weight; of a weight made from other parameters, the one by its value."""
    if call.module._parameters.get("weight") is not None:
        mine = {read.node: read for read in reads or () if isinstance(read, Product)}
        found = [mine[product.node] for product, _ in inside if product.node in mine]
    else:
        weight = call.module.weight
        assert isinstance(weight, Tensor)
        found = [product for product, W in inside if W.shape == weight.shape and _alike(W, weight.detach())]
    return found[0] if len(found) == 1 else None


def _alike(W: Tensor, weight: Tensor) -> bool:
    """Return whether two makings of one weight agree, to rounding."""
    scale = float(weight.abs().max()) if weight.numel() else 0.0
    return bool(torch.allclose(W, weight.to(W), rtol=0, atol=100 * torch.finfo(W.dtype).eps * scale))


@contextmanager
def record(model: nn.Module, batch: Batch = None) -> Iterator[Tape]:
    """Put every call of a linear layer in the forward passes inside on a tape, those on a tensor that give a tensor.

    A layer works on its own copy of its input, so that a gradient at x is the one *through this call*, and hands on a
    copy of its output, so that an in-place activation behind it does not change what is recorded.
    """
    tape = Tape(mask=attention_mask(batch))
    inputs: dict[nn.Module, list[Tensor | None]] = {}  # of the calls that are going on; None: one left alone
    names = {module: name for name, module in model.named_modules()}
    differentiating = torch.is_grad_enabled()

    # Inside a torch.no_grad() of the model's own nothing is differentiated: such calls are left alone.

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        named = "input" if "input" in kwargs else "x"
        x = args[0] if args else kwargs.get(named)
        inputs.setdefault(module, []).append(None)
        if (differentiating and not torch.is_grad_enabled()) or not _is_recorded(x):
            return args, kwargs
        x = (x if x.requires_grad or not differentiating else x.detach().requires_grad_()).clone()
        inputs[module][-1] = x
        return (args, {**kwargs, named: x}) if not args else ((x, *args[1:]), kwargs)

    def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], z: Tensor) -> Tensor:
        x = inputs[module].pop() if inputs.get(module) else None
        if x is None or not isinstance(z, Tensor):
            return z
        times = sum(call.module is module for call in tape.linear.values())
        key = names[module] if times == 0 else f"{names[module]}:{times}"
        handed_on = z.clone()
        tape.linear[key] = Call(
            key, names[module], module, x, z, _sequence_number(x, -1), _sequence_number(handed_on, 2**63)
        )
        return handed_on

    def embed(module: nn.Module, args: tuple[Any, ...], z: Tensor) -> Tensor:
        tape.embedded.append(z if z.requires_grad else z.detach().requires_grad_())
        return tape.embedded[-1].clone()

    with ExitStack() as hooks:
        for module in names:
            if is_linear(module):
                _remove_at_exit(hooks, module.register_forward_pre_hook(enter, with_kwargs=True))
                _remove_at_exit(hooks, module.register_forward_hook(leave, with_kwargs=True))
            if isinstance(module, nn.Embedding):
                _remove_at_exit(hooks, module.register_forward_hook(embed))
        yield tape


def _is_recorded(x: object) -> TypeGuard[Tensor]:
    """Return whether a call's input is a floating tensor of the graph, and none of a transform of torch.func."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


def _sequence_number(tensor: Tensor, otherwise: int) -> int:
    """When a tensor was made, as autograd numbers operations."""
    return otherwise if tensor.grad_fn is None else int(tensor.grad_fn._sequence_nr())


def _remove_at_exit(hooks: ExitStack, handle: RemovableHandle) -> None:
    hooks.callback(handle.remove)


def run_recorded(problem: Problem, model: nn.Module, batch: Batch) -> tuple[Tape, list[Tensor], Tensor, Any]:
    """(tape, the network's inputs as leaves of the graph, outputs, targets) of one placed batch.

    The network's inputs are the floating tensors handed to it, masks apart; where there are none (token ids), its
    first embedding's output.
    """
    mask = attention_mask(batch)
    leaves: list[Tensor] = []

    def as_leaf(part: Any) -> Any:
        if not isinstance(part, Tensor) or not part.is_floating_point() or part is mask:
            return part
        leaves.append(part.detach().requires_grad_())
        return leaves[-1].clone()  # the network may begin with an in-place operation

    if problem.forward is None and isinstance(batch, tuple):
        batch = (tree_map(as_leaf, batch[0]), *batch[1:])
    else:
        batch = tree_map(as_leaf, batch)
    with record(model, batch) as tape:
        f, y = problem.run(model, batch)
    tape.read_graph(f, model)
    return tape, leaves or tape.embedded[:1], f, y
