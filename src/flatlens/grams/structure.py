"""What autograd's graph proves of a network: how each parameter acts, where the outputs bend, what reads the input.

The structure of one batch holds for all its samples. The structure that several batches share is their `meet`: it
claims only what every one of them shows. A pass compares each chunk's own structure with the plan's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce

from torch import Tensor, nn

from flatlens.grams.record import Call, Tape
from flatlens.operations.graph import Graph, Node
from flatlens.operations.reads import RESHAPING

Signature = tuple[object, ...]


@dataclass(frozen=True)
class Structure:
    """Claims about a network, each proved by the graph of every batch it was read from."""

    calls: Mapping[str, Signature | None]
    """Calls of linear layers that every batch has: (operation, geometry, whether the call does nothing else); None
    where no single operation multiplies by the layer's weight."""
    varying_calls: frozenset[str]  #: calls that some batches have and others have not, or not in the same form
    reads: Mapping[str, tuple[Signature, ...] | None]  #: by parameter: the operations that read it; None: not known
    curved: frozenset[str]  #: parameters that the outputs are not piecewise linear in
    curved_calls: frozenset[str]  #: and calls whose product they are not piecewise linear in
    inputs: frozenset[int]  #: which of the network's inputs the outputs depend on
    first: str | None  #: the call that alone reads the network's input, as it is

    def common_with(self, other: Structure) -> Structure:
        """The claims that hold on both."""
        same = {key: found for key, found in self.calls.items() if key in other.calls and other.calls[key] == found}
        missing = (self.calls.keys() | other.calls.keys()) - same.keys()
        reads = {
            name: found if other.reads[name] == found else None for name, found in self.reads.items()
        }  # both are of the same model
        return Structure(
            same,
            self.varying_calls | other.varying_calls | missing,
            reads,
            self.curved | other.curved,
            self.curved_calls | other.curved_calls,
            self.inputs | other.inputs,
            self.first if self.first == other.first else None,
        )

    def covers(self, other: Structure) -> bool:
        """Return whether every claim made here holds on the other, too."""
        return self.common_with(other) == self


def common_structure(structures: Iterable[Structure]) -> Structure:
    """The claims that hold on all of them, at least one."""
    return reduce(Structure.common_with, structures)


def structure_of(tape: Tape, inputs: list[Tensor], model: nn.Module) -> Structure:
    """Read off one pass."""
    graph = tape.graph
    assert graph is not None
    parameters = {name: p for name, p in model.named_parameters() if name in tape.reads}
    sources: dict[Node, int] = {}
    meant: list[tuple[bool, str]] = []  # by bit: (whether a call, its key) or a parameter's name
    for name, p in parameters.items():
        if (leaf := graph.leaves.get(id(p))) is not None:
            sources[leaf] = 1 << len(meant)
            meant.append((False, name))
    for key, call in tape.linear.items():
        if call.product is not None:
            sources[call.product.node] = 1 << len(meant)
            meant.append((True, key))
    bits = graph.curved_in(sources)
    bent = [what for number, what in enumerate(meant) if bits >> number & 1]
    connected = frozenset(number for number, x in enumerate(inputs) if _node(graph, x) is not None)
    return Structure(
        {key: _call_signature(call) for key, call in tape.linear.items()},
        frozenset(),
        {
            name: None if found is None else tuple(read.signature for read in found)
            for name, found in tape.reads.items()
        },
        frozenset(key for is_call, key in bent if not is_call),
        frozenset(key for is_call, key in bent if is_call),
        connected,
        _first(graph, tape, inputs, connected),
    )


def _call_signature(call: Call) -> Signature | None:
    return None if call.product is None else (*call.product.signature, call.pure)


def _node(graph: Graph, x: Tensor) -> Node | None:
    """The node of a tensor that something in the graph reads."""
    node = graph.leaves.get(id(x)) if x.grad_fn is None else x.grad_fn
    return node if node is not None and graph.read_by(node) else None


def _first(graph: Graph, tape: Tape, inputs: list[Tensor], connected: frozenset[int]) -> str | None:
    """The call whose input is the network's only input, reshaped at most, where nothing else reads that."""
    if len(connected) != 1:
        return None
    calls = {call.x.grad_fn: key for key, call in tape.linear.items() if call.pure}
    (number,) = connected
    node = _node(graph, inputs[number])
    while node is not None:
        if node in calls:
            return calls[node]
        readers = graph.read_by(node)
        node = readers[0][0] if len(readers) == 1 and readers[0][0].name() in RESHAPING else None
    return None
