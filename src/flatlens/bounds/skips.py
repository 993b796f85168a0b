"""Residual blocks, found by torch.fx: a network adds the input of a linear layer to the result of a branch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, fx, nn

from flatlens.errors import typed_line
from flatlens.operations.tracing import Trace, asks


@dataclass(frozen=True, eq=False)
class ResidualBlock:
    """A residual block, out = skip(x) + branch(x)."""

    start: fx.Node  #: x
    end: fx.Node  #: out
    through: tuple[str, ...]  #: modules on the skip; empty for the identity
    readers: tuple[fx.Node, ...]  #: other nodes that read x

    def layer(self, linear: Collection[str]) -> str | None:
        """Return the linear layer that alone reads x beside the skip."""
        if len(self.readers) == 1 and self.readers[0].op == "call_module" and str(self.readers[0].target) in linear:
            return str(self.readers[0].target)
        return None


class SkipGraph(Trace):
    """The graph of a network, its residual blocks in execution order, and the tensors at their ends in its last run."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.kept: dict[fx.Node, Tensor] = {}

    @property
    def closed(self) -> list[str]:
        """Return types of modules with several layers that the graph has as one step, as torch's transformers are."""
        called = [self.what(node) for node in self.nodes if node.op == "call_module"]
        return [type(m).__name__ for m in called if any(True for _ in m.children())]

    @cached_property
    def _turns(self) -> dict[fx.Node, int]:
        return {node: turn for turn, node in enumerate(self.nodes)}

    def _leads(self, node: fx.Node, end: fx.Node) -> bool:
        """Return whether a node's values lead to those of `end`; sizes do not count. What ran before it is not seen."""
        seen, waiting = {end}, [end]
        while waiting:
            one = waiting.pop()
            more = () if asks(one) else set(one.all_input_nodes) - seen
            if node in more:
                return True
            above = [source for source in more if self._turns[source] > self._turns[node]]
            seen.update(above)
            waiting += above
        return False

    def _passes(self, node: fx.Node) -> bool:
        """Return whether the node changes the shape or order of its input at most: no norm changes."""
        found = self.operation(node)
        return found is not None and found.moves

    def source(self, node: fx.Node) -> fx.Node:
        """Return the node that a node's values come from."""
        while self._passes(node):
            node = node.all_input_nodes[0]
        return node

    def readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the nodes that use a node's values."""
        for user in node.users:
            if self._passes(user):
                yield from self.readers(user)
            elif not asks(user):
                yield user

    @cached_property
    def blocks(self) -> list[ResidualBlock]:
        """Return every sum with one side that leads, through modules alone, to an input of the other side."""
        return [block for node in self.nodes if (block := self._block(node)) is not None]

    @cached_property
    def ends(self) -> list[fx.Node]:
        """Return the nodes where blocks begin and end."""
        return list(dict.fromkeys(node for block in self.blocks for node in (block.start, block.end)))

    def run_node(self, n: fx.Node) -> Any:
        """Run one node; keep its value, on the gradient's path, if a block begins or ends there."""
        value = super().run_node(n)
        if n not in self.ends or not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        self.kept[n] = value if value.requires_grad else value.detach().requires_grad_()
        return self.kept[n].clone()  # the next operation may change it in place

    def _block(self, end: fx.Node) -> ResidualBlock | None:
        found = self.operation(end)
        if found is None or found.name != "addition" or len(end.all_input_nodes) != 2:
            return None
        if any(value != 1 for value in end.kwargs.values()) or len(end.args) != 2:
            return None
        one, other = end.all_input_nodes
        walks = [walk for walk in (self._skip(one, other), self._skip(other, one)) if walk is not None]
        if not walks:
            return None
        start, path = min(walks, key=lambda walk: len(walk[1]))
        entry = path[-1] if path else end
        readers = list(self.readers(start))
        readers.remove(entry)
        return ResidualBlock(start, end, tuple(str(node.target) for node in reversed(path)), tuple(readers))

    def _skip(self, skip: fx.Node, branch: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
        """Return (the start of a skip, its modules, last first)."""
        path: list[fx.Node] = []
        node = self.source(skip)
        while node.op == "get_attr" or not self._leads(node, branch):  # a parameter is no input of a block
            if node.op != "call_module" or len(node.all_input_nodes) != 1:
                return None
            path.append(node)
            node = self.source(node.all_input_nodes[0])
        return node, path

    def last(self, linear: Collection[str]) -> str | None:
        """Return the linear layer after the last block if it alone gives the outputs."""
        behind = list(self.readers(self.blocks[-1].end))
        if len(behind) != 1 or behind[0].op != "call_module" or str(behind[0].target) not in linear:
            return None
        return str(behind[0].target) if [node.op for node in self.readers(behind[0])] == ["output"] else None


def wiring(model: nn.Module) -> SkipGraph | str:
    """Return the graph of a network, or why there is none."""
    try:
        return SkipGraph(model)
    except Exception as error:  # a forward() may raise anything on symbols
        return f"torch.fx cannot trace it ({typed_line(error, 100)})"
