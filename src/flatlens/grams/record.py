"""Watching one forward pass: which layers were called, on what, giving what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from flatlens.problem import NORMS, Batch, Problem, is_linear
from flatlens.problem.sequences import attention_mask


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module: its own copy of the input x and its output z, both inside the graph."""

    key: str  #: `fc1`; `fc1:1` for the second call
    name: str  #: the module's name
    module: nn.Module
    x: Tensor
    z: Tensor

    @property
    def read(self) -> Tensor:
        """What the call read, without its graph; of half a type, in which coarser arithmetic works, in float32."""
        x = self.x.detach()
        return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass(eq=False)
class Tape:
    """What a forward pass did, in execution order."""

    linear: dict[str, Call] = field(default_factory=dict)
    norms: dict[str, Call] = field(default_factory=dict)
    embedded: list[Tensor] = field(default_factory=list)  #: outputs of embeddings
    lookups: dict[str, Call] = field(default_factory=dict)  #: calls of embeddings, x the ids
    leaves: list[nn.Module] = field(default_factory=list)  #: every module without children
    before: dict[str, int] = field(default_factory=dict)  #: how many leaves had run when a call began
    mask: Tensor | None = None  #: 0 at padding, (n, T), where the batch says so

    def calls(self) -> list[Call]:
        """Linear and norm calls together."""
        return [*self.linear.values(), *self.norms.values()]


@contextmanager
def record(model: nn.Module, batch: Batch = None) -> Iterator[Tape]:
    """Put every linear, norm and embedding call of the forward passes inside on a tape.

    A linear layer works on its own copy of its input, so that a gradient at x is the one *through this call*, and
    hands on a copy of its output, so that an in-place activation behind it does not move the point where the
    gradient at z is taken.
    """
    tape = Tape(mask=attention_mask(batch))
    inputs: dict[nn.Module, Tensor] = {}
    names = {module: name for name, module in model.named_modules()}
    differentiating = torch.is_grad_enabled()

    # Inside a torch.no_grad() of the model's own nothing is differentiated: such calls are left alone.

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if differentiating and not torch.is_grad_enabled():
            return args, kwargs
        named = "input" if "input" in kwargs else "x"
        x: Tensor = kwargs[named] if not args else args[0]
        x = x.clone() if x.requires_grad else x.detach().clone().requires_grad_()
        inputs[module] = x
        return (args, {**kwargs, named: x}) if not args else ((x, *args[1:]), kwargs)

    def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], z: Tensor) -> Tensor:
        if module not in inputs:
            return z
        book = tape.linear if is_linear(module) else tape.norms
        times = sum(call.module is module for call in book.values())
        key = names[module] if times == 0 else f"{names[module]}:{times}"
        book[key] = Call(key, names[module], module, inputs.pop(module), z)
        tape.before[key] = len(tape.leaves)
        return z.clone()

    def embed(module: nn.Module, args: tuple[Any, ...], z: Tensor) -> Tensor:
        tape.embedded.append(z if z.requires_grad else z.detach().requires_grad_())
        times = sum(call.module is module for call in tape.lookups.values())
        key = names[module] if times == 0 else f"{names[module]}:{times}"
        tape.lookups[key] = Call(key, names[module], module, args[0] if args else z, tape.embedded[-1])
        return tape.embedded[-1].clone()

    def passed(module: nn.Module, args: tuple[Any, ...], z: Any) -> None:
        tape.leaves.append(module)

    with ExitStack() as hooks:
        for module, name in names.items():
            if is_linear(module) or (isinstance(module, NORMS) and _norm_is_fixed(module)):
                _until_left(hooks, module.register_forward_pre_hook(enter, with_kwargs=True))
                _until_left(hooks, module.register_forward_hook(leave, with_kwargs=True))
            if isinstance(module, nn.Embedding):
                _until_left(hooks, module.register_forward_hook(embed))
            if _acts_on_features(module, name):
                _until_left(hooks, module.register_forward_hook(passed))
        yield tape


def _until_left(hooks: ExitStack, handle: RemovableHandle) -> None:
    hooks.callback(handle.remove)


def _acts_on_features(module: nn.Module, name: str) -> bool:
    """Whether it is a leaf of the network, and not what remakes a weight from other parameters."""
    return "parametrizations" not in name.split(".") and not any(True for _ in module.children())


def _norm_is_fixed(module: nn.Module) -> bool:
    """Whether a norm's affine map acts on something computed from its own sample: a BatchNorm needs running
    statistics."""
    return getattr(module, "running_mean", True) is not None and getattr(module, "weight", None) is not None


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
    return tape, leaves or tape.embedded[:1], f, y
