"""Where a network adds what a linear layer reads to what becomes of it: residual blocks, found by torch.fx."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from flatlens.errors import typed_line

SUMS = (operator.add, operator.iadd, torch.add, "add", "add_")
PASSING = (nn.Identity, nn.Flatten, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)  #: change no norm, in eval
FLATTENED = (torch.flatten, "flatten")
SIZES = ("size", "dim", "shape")  #: of a tensor: no gradient goes that way


@dataclass(frozen=True, eq=False)
class Block:
    """out = skip(x) + branch(x)."""

    start: fx.Node  #: x
    end: fx.Node  #: out
    through: tuple[str, ...]  #: modules the skip passes; none where it is the identity
    readers: tuple[fx.Node, ...]  #: what else reads x

    def layer(self, linear: Collection[str]) -> str | None:
        """The linear layer that alone reads x beside the skip."""
        if len(self.readers) == 1 and self.readers[0].op == "call_module" and str(self.readers[0].target) in linear:
            return str(self.readers[0].target)
        return None


@dataclass(eq=False)
class Wiring:
    """The graph of a network, and its residual blocks in execution order."""

    traced: fx.GraphModule

    @cached_property
    def _modules(self) -> dict[str, nn.Module]:
        return dict(self.traced.named_modules())

    @property
    def closed(self) -> list[str]:
        """Modules of several layers that the graph has as one step, by type: torch's own transformers, say."""
        called = [self._modules[str(node.target)] for node in self.traced.graph.nodes if node.op == "call_module"]
        return [type(m).__name__ for m in called if any(True for _ in m.children())]

    @cached_property
    def _above(self) -> dict[fx.Node, frozenset[fx.Node]]:
        """All nodes whose values lead to a node's; a size is none."""
        found: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in self.traced.graph.nodes:
            above = [one for one in node.all_input_nodes if not _asks_size(node)]
            found[node] = frozenset(above).union(*(found[one] for one in above))
        return found

    def _passes(self, node: fx.Node) -> bool:
        """Whether it hands on what it is given, in another shape at most."""
        if node.op == "call_module":
            return isinstance(self._modules[str(node.target)], PASSING)
        return node.op in ("call_function", "call_method") and node.target in FLATTENED

    def source(self, node: fx.Node) -> fx.Node:
        """Where what a node holds comes from."""
        while self._passes(node):
            node = node.all_input_nodes[0]
        return node

    def readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """What uses a node's values."""
        for user in node.users:
            if self._passes(user):
                yield from self.readers(user)
            elif not _asks_size(user):
                yield user

    @cached_property
    def blocks(self) -> list[Block]:
        """Every sum of which one side leads, by modules alone, to something that the other side is made of."""
        return [block for node in self.traced.graph.nodes if (block := self._block(node)) is not None]

    def _block(self, end: fx.Node) -> Block | None:
        if end.op not in ("call_function", "call_method") or end.target not in SUMS or len(end.all_input_nodes) != 2:
            return None
        if any(value != 1 for value in end.kwargs.values()) or len(end.args) != 2:
            return None
        one, other = end.all_input_nodes
        found = [walk for walk in (self._skip(one, other), self._skip(other, one)) if walk is not None]
        if not found:
            return None
        start, path = min(found, key=lambda walk: len(walk[1]))
        entry = path[-1] if path else end
        readers = list(self.readers(start))
        readers.remove(entry)
        return Block(start, end, tuple(str(node.target) for node in reversed(path)), tuple(readers))

    def _skip(self, skip: fx.Node, branch: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
        """(where a skip begins, modules on its way, last first)."""
        path: list[fx.Node] = []
        node = self.source(skip)
        while node not in self._above[branch]:
            if node.op != "call_module" or len(node.all_input_nodes) != 1:
                return None
            path.append(node)
            node = self.source(node.all_input_nodes[0])
        return node, path

    def last(self, linear: Collection[str]) -> str | None:
        """The linear layer behind the last block that gives the outputs, if that is all there is."""
        behind = list(self.readers(self.blocks[-1].end))
        if len(behind) != 1 or behind[0].op != "call_module" or str(behind[0].target) not in linear:
            return None
        return str(behind[0].target) if [node.op for node in self.readers(behind[0])] == ["output"] else None


def _asks_size(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in SIZES
    return node.op == "call_function" and node.target is getattr and node.args[1] in SIZES


def wiring(model: nn.Module) -> Wiring | str:
    """The graph of a network, or why there is none."""
    try:
        return Wiring(fx.symbolic_trace(model))
    except Exception as error:  # whatever a forward() does with a proxy
        return f"torch.fx cannot trace it ({typed_line(error, 100)})"


class _Keeping(fx.Interpreter):
    """Runs a graph and keeps the tensors at some nodes, inside the gradient's path."""

    def __init__(self, traced: fx.GraphModule, nodes: Collection[fx.Node]) -> None:
        super().__init__(traced)
        self.nodes, self.kept = nodes, dict[fx.Node, Tensor]()

    def run_node(self, n: fx.Node) -> Any:
        """One node, its value kept where it is wanted."""
        value = super().run_node(n)
        if n not in self.nodes or not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        self.kept[n] = value if value.requires_grad else value.detach().requires_grad_()
        return self.kept[n].clone()  # what follows may change it in place


class Watched(nn.Module):
    """The traced network in the place of the original, keeping the tensors at some nodes of its last run."""

    def __init__(self, traced: fx.GraphModule, original: nn.Module, nodes: Collection[fx.Node]) -> None:
        super().__init__()
        self.signature = inspect.signature(original.forward)
        self.run = _Keeping(traced, nodes)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the network itself, node by node."""
        given = self.signature.bind(*args, **kwargs)
        given.apply_defaults()
        return self.run.run(*given.arguments.values())

    @property
    def kept(self) -> dict[fx.Node, Tensor]:
        """By node."""
        return self.run.kept
