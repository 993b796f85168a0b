"""A network's graph, traced by torch.fx: the operation of each node, and a run of the graph node by node."""

from __future__ import annotations

import inspect
from typing import Any

from torch import fx, nn

from flatlens.operations.table import Operation, operation_of

ASKED = ("size", "dim", "shape", "ndim", "dtype", "device")  #: attributes of a tensor that do not depend on its values


class Trace(fx.Interpreter):
    """The graph of a network, and a run of it. Tracing raises for what torch.fx cannot follow.

    >>> trace = Trace(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    >>> [trace.called(node) for node in trace.nodes if trace.operation(node)]
    ['0 (Linear)', '1 (ReLU)']
    """

    def __init__(self, model: nn.Module) -> None:
        traced = fx.symbolic_trace(model)
        super().__init__(traced)
        self.extra_traceback = False  # so that its errors have one line
        self.signature = inspect.signature(model.forward)
        self.nodes: list[fx.Node] = list(traced.graph.nodes)

    def what(self, node: fx.Node) -> Any:
        """Return what a node calls: a module, a function or the name of a method."""
        return self.module.get_submodule(str(node.target)) if node.op == "call_module" else node.target

    def operation(self, node: fx.Node) -> Operation | None:
        """Return the operation that a call computes, None where it is unknown or the node is not a call."""
        return operation_of(self.what(node)) if node.op.startswith("call") else None

    def called(self, node: fx.Node) -> str:
        """Return a node's name for messages."""
        if node.op == "call_module":
            return f"{node.target} ({type(self.what(node)).__name__})"
        return f"{getattr(node.target, '__name__', node.target)}()"

    def without_values(self, *, constants: bool = False) -> frozenset[fx.Node]:
        """Return the nodes that hold sizes of tensors; with `constants`, all that need no value of the first input."""
        found: set[fx.Node] = set()
        for at, node in enumerate(self.nodes):
            inputs = node.all_input_nodes
            fixed = constants and at > 0 if not inputs else found.issuperset(inputs)
            if asks(node) or (fixed and node.op != "output"):
                found.add(node)
        return frozenset(found)

    def in_place(self) -> nn.Module:
        """Return a module that takes the network's arguments and runs the graph."""
        return _InPlace(self)


def asks(node: fx.Node) -> bool:
    """Return whether a node asks for a tensor's size or kind, not for its values."""
    if node.op == "call_function":
        return node.target is getattr and node.args[1] in ASKED
    return node.op == "call_method" and node.target in ASKED


class _InPlace(nn.Module):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def forward(self, *arguments: Any, **options: Any) -> Any:
        given = self.trace.signature.bind(*arguments, **options)
        given.apply_defaults()
        return self.trace.run(*given.arguments.values())
