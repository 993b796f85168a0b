"""The structure of a network: what autograd's graph proves about its parameters, and where the outputs are curved.

The graph holds every operation that ran, also those whose derivative is 0 on these samples. So the structure that it
shows holds for all samples of the batch. Another batch may take another branch of the network's code: the plan uses the
structure that all trials have in common, and the pass compares each chunk's own structure with it.
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
    """Facts about a network, each proved by the graph of every batch that was looked at."""

    calls: Mapping[str, Signature | None]
    """Calls of linear layers, the same on every batch: (operation, geometry, whether the call does nothing else); None
    if no single operation multiplies by the layer's weight."""
    varying_calls: frozenset[str]  #: calls that some batches do not have, or have in another form
    reads: Mapping[str, tuple[Signature, ...] | None]  #: operations that read each parameter; None if unknown
    made: Mapping[str, tuple[Signature, ...]]  #: tensors made from parameters whose reads do not tell
    curved: frozenset[str]  #: parameters in which the outputs are not piecewise linear
    curved_calls: frozenset[str]  #: calls in whose product the outputs are not piecewise linear
    altered: frozenset[str]  #: calls that are not known to multiply the very numbers of their input
    inputs: frozenset[int]  #: indices of the network's inputs on which the outputs depend
    first: str | None  #: the call that reads the network's input unchanged, if nothing else reads it

    def common_with(self, other: Structure) -> Structure:
        """Return the facts that hold on both."""
        same = {key: found for key, found in self.calls.items() if key in other.calls and other.calls[key] == found}
        missing = (self.calls.keys() | other.calls.keys()) - same.keys()
        reads = {
            name: found if other.reads[name] == found else None for name, found in self.reads.items()
        }  # both are of the same model
        return Structure(
            same,
            self.varying_calls | other.varying_calls | missing,
            reads,
            {name: found for name, found in self.made.items() if other.made.get(name) == found},
            self.curved | other.curved,
            self.curved_calls | other.curved_calls,
            self.altered | other.altered,
            self.inputs | other.inputs,
            self.first if self.first == other.first else None,
        )

    def covers(self, other: Structure) -> bool:
        """Return whether every fact stated here also holds on the other."""
        return self.common_with(other) == self


def common_structure(structures: Iterable[Structure]) -> Structure:
    """Return the facts that hold on all of the structures (one or more)."""
    return reduce(Structure.common_with, structures)


def structure_of(tape: Tape, inputs: list[Tensor], model: nn.Module) -> Structure:
    """Return the structure that one recorded forward pass shows."""
    graph = tape.graph
    assert graph is not None
    parameters = {name: p for name, p in model.named_parameters() if name in tape.reads}
    sources: dict[Node, int] = {}
    labels: list[tuple[bool, str]] = []  # for each bit: (whether it is a call, key of the call or parameter's name)
    for name, p in parameters.items():
        if (leaf := graph.leaves.get(id(p))) is not None:
            sources[leaf] = 1 << len(labels)
            labels.append((False, name))
    for key, call in tape.linear.items():
        if call.product is not None:
            sources[call.product.node] = 1 << len(labels)
            labels.append((True, key))
    bits = graph.curved_in(sources)
    curved = [what for number, what in enumerate(labels) if bits >> number & 1]
    connected = frozenset(number for number, x in enumerate(inputs) if _node(graph, x) is not None)
    return Structure(
        {key: _call_signature(call) for key, call in tape.linear.items()},
        frozenset(),
        {
            name: None if found is None else tuple(read.signature for read in found)
            for name, found in tape.reads.items()
        },
        {name: tuple(made.signature for made in found) for name, found in tape.made.items() if found is not None},
        frozenset(key for is_call, key in curved if not is_call),
        frozenset(key for is_call, key in curved if is_call),
        frozenset(key for key, call in tape.linear.items() if not call.as_given),
        connected,
        _first_call(graph, tape, inputs, connected),
    )


def _call_signature(call: Call) -> Signature | None:
    return None if call.product is None else (*call.product.signature, call.pure)


def _node(graph: Graph, x: Tensor) -> Node | None:
    """Return the node of a tensor, or None if nothing in the graph reads it."""
    node = graph.leaves.get(id(x)) if x.grad_fn is None else x.grad_fn
    return node if node is not None and graph.read_by(node) else None


def _first_call(graph: Graph, tape: Tape, inputs: list[Tensor], connected: frozenset[int]) -> str | None:
    """Return the pure call whose input is the network's only input, perhaps reshaped, if nothing else reads that."""
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
