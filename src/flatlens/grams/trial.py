"""A trial run on a few samples: the structure that its graph proves, and where each operation's samples may lie.

A network may put its samples on the first axis, on the second (tokens first), or may merge them with tokens into one
axis. A backward pass shows where they are: the Jacobian of a sample's outputs is 0 at all other samples' rows. This is
tested exactly, not to rounding (`independent_rows`).

The graph holds every operation that ran, also those whose derivative is 0 on these samples. So the structure that it
shows holds for all samples of the batch. Another batch may take another branch of the network's code: the plan uses the
structure that all trials have in common, and the pass compares each chunk's own structure with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from flatlens.errors import BadModel
from flatlens.grams.record import Tape, derived_reads, run_recorded
from flatlens.operations.graph import Place
from flatlens.operations.parameter_uses import RESHAPING, Bias, Entrywise, GraphOperation, Product
from flatlens.problem import Batch, Problem
from flatlens.problem.diagnosis import if_found, why_cut
from flatlens.problem.row_layout import unpadded


@dataclass(frozen=True)
class Rows:
    """The axis that holds the samples, and their order on it.

    The axis has size n w: w rows for each sample. In order "outer" a sample's rows are neighbours; in order "inner"
    sample i has rows i, i + n, i + 2n, ...
    """

    axis: int = 0
    order: Literal["outer", "inner"] = "outer"

    def by_sample(self, tensor: Tensor, n: int) -> Tensor:
        """Return the tensor as (n, w, the other axes)."""
        front = tensor.movedim(self.axis, 0)
        if self.order == "outer":
            return front.reshape(n, -1, *front.shape[1:])
        return front.reshape(-1, n, *front.shape[1:]).transpose(0, 1)

    def in_front(self, tensor: Tensor, n: int) -> Tensor:
        """Return the tensor as (n w, the other axes), with each sample's rows next to each other."""
        front = tensor.movedim(self.axis, 0)
        return front if self.order == "outer" else self.by_sample(tensor, n).flatten(0, 1)

    def fit(self, shape: torch.Size, n: int) -> bool:
        """Return whether a tensor of this shape can hold n samples in this way."""
        return len(shape) > self.axis and shape.numel() > 0 and shape[self.axis] % n == 0


FRONT = Rows()
CANDIDATES = (FRONT, Rows(0, "inner"), Rows(1), Rows(1, "inner"))


def splits(n: int) -> Iterator[Tensor]:
    """Yield masks of n samples: for every two samples i and j, some mask contains i and not j.

    >>> [mask.tolist() for mask in splits(3)]
    [[True, False, True], [False, True, False], [True, True, False], [False, False, True]]
    """
    numbers = torch.arange(n)
    for bit in range(max(1, (n - 1).bit_length())):
        mask = (numbers >> bit) % 2 == 0
        yield mask
        yield ~mask


def independent_rows(
    f: Tensor,
    at: Mapping[str, Place],
    allowed: Mapping[str, list[Rows]],
    generator: torch.Generator,
    moving: set[str] | None = None,
) -> dict[str, list[Rows]]:
    """Return for each place the arrangements under which no sample's outputs depend on another sample's rows.

    One backward pass for each mask of `splits`: the outputs of the samples in the mask are combined with random
    weights, and the derivative at all other samples' rows must be exactly 0. The masks separate every pair of samples.
    Rounding cannot change the result: a derivative of 0 is computed as 0.

    Args:
        f: outputs, (n, N).
        at: places in the graph of f, by name.
        allowed: candidate arrangements of each place.
        generator: draws the random weights.
        moving: gets the names of the places that move the outputs: elsewhere every arrangement is possible.
    """
    n, left = len(f), {name: list(rows) for name, rows in allowed.items()}
    u = torch.randn(f.shape, generator=generator).to(f)
    for mask in splits(n) if at else ():
        inside = mask.to(f.device)
        chosen = (u * inside.to(f)[:, None] * f).sum()
        derivatives = torch.autograd.grad(chosen, list(at.values()), retain_graph=True, allow_unused=True)
        for name, derivative in zip(at, derivatives, strict=True):
            if derivative is not None:
                # NaN shows nothing: it is 0 times the infinite derivative of a sample's own
                reached = (derivative != 0) & ~derivative.isnan()
                if moving is not None and name not in moving and bool(reached.any()):
                    moving.add(name)
                left[name] = [rows for rows in left[name] if not bool(rows.by_sample(reached, n)[~inside].any())]
    return left


def of_own_inputs(
    at: Place, like: Tensor, inputs: list[Tensor], allowed: list[Rows], n: int, generator: torch.Generator
) -> list[Rows]:
    """Return the arrangements of a place under which no sample's rows depend on another sample's inputs.

    `like` has the place's shape; `inputs` are the network's, samples in front. The test is that of `independent_rows`,
    one place further up.
    """
    left = list(allowed)
    for mask in splits(n) if inputs else ():
        for rows in list(left):
            u = torch.randn(like.shape, generator=generator).to(like)
            rows.by_sample(u, n)[~mask] = 0  # a view: an axis is only split
            derivatives = torch.autograd.grad([at], inputs, [u], retain_graph=True, allow_unused=True)
            if any(d is not None and bool(d[~mask].nan_to_num(0.0).any()) for d in derivatives):
                left.remove(rows)
    return left


def coupled_places(
    f: Tensor, at: Mapping[str, Place], planned: Mapping[str, Rows], generator: torch.Generator
) -> list[str]:
    """Return the places where samples do not lie as planned, or affect each other's outputs.

    Quick test with two backward passes: when sample i's outputs are multiplied by w_i, the derivative at its rows must
    be multiplied by w_i. Where this fails by more than rounding, `independent_rows` decides.
    """
    n, weights = len(f), 1 + torch.arange(len(f)).to(f) / len(f)
    u = torch.randn(f.shape, generator=generator).to(f)
    once, weighted = (
        torch.autograd.grad((v * f).sum(), list(at.values()), retain_graph=True, allow_unused=True)
        for v in (u, u * weights[:, None])
    )
    odd = []
    for name, first, second in zip(at, once, weighted, strict=True):
        if first is not None and second is not None:
            mine, other = (planned[name].by_sample(derivative, n).reshape(n, -1) for derivative in (first, second))
            off = torch.linalg.vector_norm(other - weights.to(mine)[:, None] * mine, dim=1)
            if not bool((off <= 1e4 * torch.finfo(f.dtype).eps * mine.norm(dim=1).max()).all()):
                odd.append(name)
    left = independent_rows(f, {name: at[name] for name in odd}, {name: [planned[name]] for name in odd}, generator)
    return [name for name in odd if not left[name]]


Signature = tuple[object, ...]


@dataclass(frozen=True)
class Structure:
    """Facts about a network, each proved by the graph of every batch that was looked at."""

    calls: Mapping[str, Signature | None]
    """Calls of linear layers, the same on every batch: (operation, geometry, whether the call does nothing else); None
    if no single operation multiplies by the layer's weight."""
    varying_calls: frozenset[str]  #: calls that some batches do not have, or have in another form
    reads: Mapping[str, tuple[Signature, ...] | None]  #: operations that read each parameter; None if unknown
    derived: Mapping[str, tuple[Signature, ...]]  #: tensors made from parameters whose reads do not tell
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
            {name: found for name, found in self.derived.items() if other.derived.get(name) == found},
            self.curved | other.curved,
            self.curved_calls | other.curved_calls,
            self.altered | other.altered,
            self.inputs | other.inputs,
            self.first if self.first == other.first else None,
        )

    def covers(self, other: Structure) -> bool:
        """Return whether every fact stated here also holds on the other."""
        return self.common_with(other) == self


def structure_of(tape: Tape, inputs: list[Tensor]) -> Structure:
    """Return the structure that one recorded forward pass shows."""
    graph = tape.graph
    # Where the outputs are curved: in each parameter, and in the product of each call.
    leaves = {name: graph.leaves.get(id(graph.parameters[name])) for name in tape.reads}
    products = {key: call.product.node for key, call in tape.linear.items() if call.product is not None}
    nodes = [node for node in (*leaves.values(), *products.values()) if node is not None]
    bits = {node: 1 << number for number, node in enumerate(dict.fromkeys(nodes))}
    curved = graph.curved_in(bits)
    # The inputs that the graph reads, and the pure call that alone reads the network's only input, perhaps reshaped.
    read = {number: graph.leaves.get(id(x)) if x.grad_fn is None else x.grad_fn for number, x in enumerate(inputs)}
    read = {number: node for number, node in read.items() if node is not None and graph.read_by(node)}
    pure = {call.x.grad_fn: key for key, call in tape.linear.items() if call.pure}
    node = next(iter(read.values())) if len(read) == 1 else None
    while node is not None and node not in pure:
        readers = graph.read_by(node)
        node = readers[0][0] if len(readers) == 1 and readers[0][0].name() in RESHAPING else None
    return Structure(
        calls={
            key: None if call.product is None else (*call.product.signature, call.pure)
            for key, call in tape.linear.items()
        },
        varying_calls=frozenset(),
        reads={
            name: None if found is None else tuple(read.signature for read in found)
            for name, found in tape.reads.items()
        },
        derived={
            name: tuple(tensor.signature for tensor in found)
            for name, found in tape.derived.items()
            if found is not None
        },
        curved=frozenset(name for name, leaf in leaves.items() if leaf is not None and curved & bits[leaf]),
        curved_calls=frozenset(key for key, node in products.items() if curved & bits[node]),
        altered=frozenset(key for key, call in tape.linear.items() if not call.as_given),
        inputs=frozenset(read),
        first=None if node is None else pure[node],
    )


def operations_of(tape: Tape, structure: Structure) -> dict[str, GraphOperation]:
    """Return the operations through which parameters act, by name.

    `z:CALL` is the product in a layer's call, `PARAMETER@k` the k-th other operation that reads a parameter, and
    `PARAMETER~k` the k-th that reads a tensor made from it. Output Jacobians at these operations give the Jacobians of
    the parameters. Only operations in `structure` are included.
    """
    found: dict[str, GraphOperation] = {
        f"z:{key}": call.product
        for key, call in tape.linear.items()
        if call.product is not None and structure.calls.get(key) is not None
    }
    known = {operation.node for operation in found.values()}
    claimed = [
        (f"{name}@{k}", read)
        for name, reads in tape.reads.items()
        for k, read in enumerate(reads or () if structure.reads[name] is not None else ())
    ]
    claimed += [(f"{name}~{k}", read) for name in structure.derived for k, read in enumerate(derived_reads(tape, name))]
    # Products first: a bias that is added in the same operation then shares the product's entry.
    for name, read in sorted(claimed, key=lambda one: not isinstance(one[1], Product)):
        if read.node not in known:
            found[name] = read
            known.add(read.node)
    return found


class Trial:
    """A recorded forward pass, and the possible arrangements of samples at its operations and inputs."""

    def __init__(self, problem: Problem, model: nn.Module, batch: Batch) -> None:
        self.tape, self.inputs, self.f, _ = run_recorded(problem, model, batch)
        if not self.f.requires_grad:
            why = if_found(lambda: why_cut(model, lambda: problem.run(model, batch)[0]))
            raise BadModel(
                "the outputs do not depend differentiably on any input or weight",
                remedy=why or "torch.no_grad() or detach() inside forward() is possible",
            )
        self.n = len(self.f)
        self.input_is_embedding = len(self.inputs) == 1 and any(self.inputs[0] is x for x in self.tape.embedded[:1])
        self.structure = structure_of(self.tape, self.inputs)
        self.rows: dict[str, list[Rows]] = {}  #: all possible arrangements of the samples, by place

    def find_rows(self, structure: Structure, generator: torch.Generator) -> None:
        """Find the possible arrangements at all operations of the trials' common structure, and at inputs of calls."""
        operations = self.tape.operations = operations_of(self.tape, structure)
        self.tape.names = {operation.node: name for name, operation in operations.items()}
        inputs = {f"x:{key}": call.x for key, call in self.tape.linear.items() if call.x.requires_grad}
        inputs |= {f"input:{number}": x for number, x in enumerate(self.inputs)}
        at: dict[str, Place] = {name: found.edge for name, found in operations.items()} | inputs
        shapes = {name: operation.shape for name, operation in operations.items()}
        shapes |= {name: x.shape for name, x in inputs.items()}
        allowed = {name: [rows for rows in CANDIDATES if rows.fit(shape, self.n)] for name, shape in shapes.items()}
        for name, operation in operations.items():
            if isinstance(operation, Product | Bias):
                allowed[name] = [rows for rows in allowed[name] if rows.axis == 0]
            elif isinstance(operation, Entrywise):
                allowed[name] = [rows for rows in allowed[name] if operation.broadcast[rows.axis] == 1]
        moving: set[str] = set()
        self.rows = independent_rows(self.f, at, allowed, generator, moving)
        for name, possible in self.rows.items():  # where the outputs do not tell, as behind a gate that is shut
            if self.unclear(name, possible) or (name[:2] in ("x:", "z:") and name not in moving):
                like = self.f.new_empty(shapes[name])
                self.rows[name] = of_own_inputs(at[name], like, self.inputs, possible, self.n, generator)

    def unclear(self, name: str, possible: list[Rows]) -> bool:
        """Return whether a sample has several rows at a call's input or product, and several arrangements are left."""
        if len(possible) < 2 or self.n == 1 or name[:2] not in ("x:", "z:"):
            return False
        shape = self.tape.linear[name[2:]].x.shape if name.startswith("x:") else self.tape.operations[name].shape
        return shape[possible[0].axis] != self.n

    @property
    def ignores_padding(self) -> bool:
        """Return whether the derivative is 0 at padded tokens, at every call's input and at the network's."""
        if self.tape.mask is None:
            return False
        read = [call.x for call in self.tape.linear.values() if call.x.requires_grad]
        u = torch.randn(self.f.shape, generator=torch.Generator().manual_seed(0)).to(self.f)
        derivatives = torch.autograd.grad(
            (u * self.f).sum(), [*read, *self.inputs], retain_graph=True, allow_unused=True
        )
        return bool(padding_ignored(self.tape.mask, list(derivatives)))


def padding_ignored(mask: Tensor, derivatives: list[Tensor | None]) -> Tensor:
    """Return whether derivatives at inputs are 0 at padded tokens, as a tensor."""
    zero = [(unpadded(derivative, mask) == derivative).all() for derivative in derivatives if derivative is not None]
    return torch.stack(zero).all() if zero else torch.tensor(True)
