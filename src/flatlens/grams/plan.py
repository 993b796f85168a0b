"""The plan of a pass: which parameter acts through which operations, and where their samples lie.

`planner` reads it from autograd's graph on the problem's probes, and every chunk of the pass is compared with it:
where a chunk differs, `PlanBroken` makes the caller plan again. A weight belongs to a linear layer if the graph shows
that it acts through this layer's calls and nothing else. A parameter that the plan does not explain (one that is
sliced, indexed, divided by or made into another weight) is measured by per-sample autograd: it counts in every sum
over parameters, under its own name.

A network may put its samples on the first axis, on the second (tokens first), or may merge them with tokens into one
axis. A backward pass shows where they are: the Jacobian of a sample's outputs is 0 at all other samples' rows. This is
tested exactly, not to rounding (`independent_rows`).

The graph holds every operation that ran, also those whose derivative is 0 on these samples. So the structure that it
shows holds for all samples of the batch. Another batch may take another branch of the network's code: the plan uses the
structure that all trials have in common, and the pass compares each chunk's own structure with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, count, islice
from math import comb
from typing import Literal

import torch
from torch import Tensor, nn

from flatlens.errors import BadModel
from flatlens.grams.record import Tape, derived_reads
from flatlens.grams.weight_jacobians import WeightMatrix
from flatlens.operations.graph import Place
from flatlens.operations.layers import Adapter
from flatlens.operations.operator_norm import SearchedNorm, blocks_norm, map_norm
from flatlens.operations.parameter_uses import RESHAPING, Derived, GraphOperation, Product, Read
from flatlens.problem import Batch
from flatlens.problem.batches import size
from flatlens.problem.ranks import Ranks
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

    def fit(self, shape: torch.Size, n: int) -> bool:
        """Return whether a tensor of this shape can hold n samples in this way."""
        return len(shape) > self.axis and shape.numel() > 0 and shape[self.axis] % n == 0


FRONT = Rows()
CANDIDATES = (FRONT, Rows(0, "inner"), Rows(1), Rows(1, "inner"))


def splits(n: int) -> Iterator[Tensor]:
    """Yield masks of n samples: for every two samples i and j, some mask contains i and not j.

    Each sample lies in its own half of the masks. No fewer masks separate all pairs (Sperner 1928).

    >>> [mask.tolist() for mask in splits(3)]
    [[True, True, False], [True, False, True], [False, True, True]]
    """
    most = next(most for most in count(1) if comb(most, most // 2) >= n)
    halves = list(islice(combinations(range(most), (most + 1) // 2), n))
    for number in range(most):
        yield torch.tensor([number in half for half in halves])


def independent_rows(
    f: Tensor,
    at: Mapping[str, Place],
    allowed: Mapping[str, list[Rows]],
    generator: torch.Generator,
    moving: set[str] | None = None,
) -> dict[str, list[Rows]]:
    """Return for each place `at` those of the `allowed` arrangements under which samples are independent.

    One backward pass for each mask of `splits`: the outputs (n, N) of the samples in the mask are combined with random
    weights, and the derivative at all other samples' rows must be exactly 0. The masks separate every pair of samples.
    Rounding cannot change the result: a derivative of 0 is computed as 0. `moving` gets the names of the places that
    move the outputs: elsewhere every arrangement is possible.
    """
    n, left = len(f), {name: list(rows) for name, rows in allowed.items()}
    u = torch.randn(f.shape, generator=generator).to(f)
    for mask in splits(n) if at else ():
        inside = mask.to(f.device)
        chosen = (u * inside.to(f)[:, None] * f).sum()
        derivatives = torch.autograd.grad(chosen, list(at.values()), retain_graph=True, allow_unused=True)
        for name, derivative in zip(at, derivatives, strict=True):
            if derivative is not None:
                # false for NaN, which shows nothing: it is 0 times the infinite derivative of a sample's own
                reached = derivative.abs() > 0
                if moving is not None and name not in moving and bool(reached.any()):
                    moving.add(name)
                left[name] = [rows for rows in left[name] if not bool(rows.by_sample(reached, n)[~inside].any())]
    return left


def of_own_inputs(
    at: Place, like: Tensor, inputs: list[Tensor], allowed: list[Rows], n: int, generator: torch.Generator
) -> list[Rows]:
    """The same test one place up: arrangements of a place whose rows read no other sample's `inputs`."""
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
    read = {number: node for number, node in read.items() if node is not None and graph.readers[node]}
    pure = {call.x.grad_fn: key for key, call in tape.linear.items() if call.pure}
    node = next(iter(read.values())) if len(read) == 1 else None
    while node is not None and node not in pure:
        readers = graph.readers[node]
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
    products = [one for one in claimed if isinstance(one[1], Product)]
    for name, read in (*products, *(one for one in claimed if not isinstance(one[1], Product))):
        if read.node not in known:
            found[name] = read
            known.add(read.node)
    return found


def padding_ignored(mask: Tensor, derivatives: list[Tensor | None]) -> Tensor:
    """Return whether derivatives at inputs are 0 at padded tokens, as a tensor."""
    zero = [(unpadded(derivative, mask) == derivative).all() for derivative in derivatives if derivative is not None]
    return torch.stack(zero).all() if zero else torch.tensor(True)


BATCHING = "backward passes in one"
"""A name in `distrusted`, beside those of places: it stands for torch's batching of backward passes."""


class PlanBroken(Exception):
    """The network does not do on a chunk what the plan says: make the plan again, with this chunk as a trial."""

    def __init__(self, batches: list[Batch], distrusted: Collection[str] = ()) -> None:
        super().__init__("the plan of the pass does not hold on every chunk of the data")
        self.batches = batches
        self.distrusted = frozenset(distrusted)  #: places whose samples do not lie as planned, or `BATCHING`


def coupled_samples_error() -> BadModel:
    """Return the error for a network whose samples affect each other on some batch."""
    return BadModel(
        "in some batch a sample's outputs change with the other samples, so per-sample derivatives do not exist",
        remedy="a branch that few batches take, batch statistics, and attention over samples are possible causes",
    )


@contextmanager
def agreed(ranks: Ranks) -> Iterator[None]:
    """Raise PlanBroken on all ranks, with all their reasons, if one raised it inside; any other error of one, too."""
    broken = None
    with ranks.as_one():
        try:
            yield
        except PlanBroken as error:
            broken = error
    told = None if broken is None else (broken.batches, broken.distrusted)
    every = [one for one in ranks.together(told) if one is not None]
    if every:
        raise PlanBroken(
            [batch for batches, _ in every for batch in batches], frozenset().union(*(places for _, places in every))
        ) from broken


@dataclass(frozen=True, eq=False)
class Weight:
    """A weight as a matrix: that of a linear layer, or of products outside layers, such as attention's projections.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(3, 2)
    >>> problem = fl.Problem(net, "mse", (torch.ones(4, 3), torch.zeros(4, 2)))
    >>> [(weight.value.shape, weight.dense) for weight in fl.Lens(problem).plan.weights.values()]
    [(torch.Size([2, 3]), True)]
    """

    layer: str  #: key of the layer's first call; outside layers the parameter's name
    products: tuple[str, ...]  #: names of the products it acts through; empty if per-sample autograd measures it
    adapter: Adapter
    value: Tensor  #: the weight as stored
    parameter: str | None  #: the parameter's name; None if the weight is computed from other parameters
    explained: bool  #: whether the weight acts through these calls and nothing else
    positions: int  #: positions per sample at which it is applied, over all its calls
    calls: tuple[str, ...] = ()  #: keys of the layer's calls; empty outside layers
    bias: str | None = None  #: the bias's name; None if it also acts elsewhere
    bias_value: Tensor | None = None
    pure: bool = False  #: whether the layer's calls multiply, add the bias and do nothing else
    as_given: bool = False  #: whether these are pure calls that multiply the very numbers of their inputs
    module: nn.Module | None = None
    linear_map: tuple[Adapter, torch.Size] | None = None  #: the layer's linear map, and the size of one sample's input
    unplaced: str = ""  #: why the samples in the inputs of the layer's calls cannot be found; empty if they can
    measured: bool = True  #: whether it is among the problem's parameters (a frozen one is not)
    part_of: str = ""  #: name of the weight that this is a part of (`planner.parts_of`)
    rows: Tensor | None = None  #: the part's rows of that weight; None for all
    columns: Tensor | None = None  #: the part's columns of that weight; None for all

    @cached_property
    def matrix(self) -> WeightMatrix:
        """Return W as (g, d, m), and the bias if it acts in the layer only, in float64."""
        bias = None if self.bias is None or self.bias_value is None else self.bias_value.to(torch.float64)
        whole, rounded = self.adapter.matrix(self.value), self.value.dtype != torch.float64
        return WeightMatrix((self.cut(whole) if self.part_of else whole).to(torch.float64), bias, rounded)

    def cut(self, W: Tensor) -> Tensor:
        """Return the part of a tensor of the whole matrix's shape, (..., d, m)."""
        W = W if self.rows is None else W[..., self.rows.to(W.device), :]
        return W if self.columns is None else W[..., self.columns.to(W.device)]

    def embedded(self, V: Tensor) -> Tensor:
        """Return the part's tensor (..., d, m) inside zeros of the whole matrix's shape."""
        whole = V.new_zeros(*V.shape[:-2], *self.adapter.matrix(self.value).shape[-2:])
        rows = torch.arange(whole.shape[-2]) if self.rows is None else self.rows
        columns = torch.arange(whole.shape[-1]) if self.columns is None else self.columns
        whole[..., rows[:, None].to(V.device), columns.to(V.device)] = V
        return whole

    @property
    def dense(self) -> bool:
        """Return whether the weight is applied once per sample, at one position."""
        return self.explained and self.adapter.token_wise and len(self.products) == 1 == self.positions

    @property
    def has_derivative(self) -> bool:
        """Return whether the pass knows the derivative in the whole weight, which measures of its curvature need."""
        return bool(self.products) or (self.parameter is not None and self.measured)

    @property
    def neurons(self) -> int:
        """Return the number of rows of the weight, g d."""
        return self.matrix.W.shape[:2].numel()

    @cached_property
    def searched_kernel_norm(self) -> SearchedNorm:
        """Return ||W||_2 of the weight as a matrix; for a convolution, of its kernel, the largest over groups."""
        return blocks_norm(self.matrix.row_factor)

    @cached_property
    def searched_spectral_norm(self) -> SearchedNorm:
        """Return ||W||_2 of the map from one sample's input to its output: of the convolution, not of its kernel."""
        if self.part_of:
            return self.searched_kernel_norm
        assert self.linear_map is not None
        adapter, size = self.linear_map
        loosely = size.numel() > 4096 and self.value.dtype != torch.float64
        # the error of the square is at most this, and the square of this where no other singular value is near
        return map_norm(adapter, self.value, size, 1e-6 if loosely else 1e-8)

    @property
    def spectral_norm(self) -> float:
        """Return the value of `searched_spectral_norm`."""
        return self.searched_spectral_norm.value


UNREAD_PRODUCT = "its calls multiply something other than their inputs, by an unknown kind of product"

_GRAM_BYTES = 2 * 5 * 8
"""Bytes of one entry of G, R, K and K's two parts, for two chunks: a chunk is freed only when the next one exists."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The plan of a pass over one network.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> problem = fl.Problem(net, "mse", (torch.ones(4, 3), torch.zeros(4, 2)))
    >>> list(fl.Lens(problem).plan.weights)
    ['0', '2']
    """

    structure: Structure  #: facts that the graph proves
    weights: dict[str, Weight]  #: weights of linear layers and of products outside layers, in execution order
    small_parameters: tuple[str, ...]  #: parameters that act entry by entry
    embeddings: tuple[str, ...]  #: parameters used only in embedding lookups
    derived: tuple[str, ...]  #: parameters that act through tensors made from them, the same for all samples
    unexplained: tuple[str, ...]  #: parameters measured by per-sample autograd
    rows: dict[str, Rows]  #: arrangement of the samples, by operation
    call_rows: dict[str, Rows]  #: arrangement of the samples in the input of each call, where it is known
    batch_axis: dict[str, int]  #: axis of samples in the input of each call that has a sample's rows side by side
    unplaced: dict[str, str]  #: all other calls, with the reason why they have no such axis
    inputs: tuple[int, ...]  #: indices of the network's floating inputs on which the outputs depend
    input_is_embedded: bool  #: whether the network reads token ids, so that its input is the first embedding's output
    input_call: str | None  #: the call that reads the network's input unchanged, if nothing else reads it
    activation_entries: int  #: entries of the tensors that are differentiated to, per sample
    jacobian_bytes: int  #: bytes of one output's derivatives at all of these, per sample
    unexplained_size: int  #: entries of the unexplained parameters
    itemsize: int  #: bytes of a number in the network's arithmetic
    ignores_padding: bool  #: whether tokens outside the attention mask have no effect; then their features are left out
    batched: bool  #: whether several backward passes may run as one batched pass
    several_ends: bool  #: whether outputs come from other layers than the last, too, through no layer after these
    parts: dict[str, Weight] = field(default_factory=dict)
    """Projections and heads of attention, where they are asked for (`planner.parts_of`)."""
    not_parted: dict[str, str] = field(default_factory=dict)
    """Attentions whose projections and heads cannot be told, with the reason."""
    fused: bool = False
    """Whether the pass runs attention in torch's fused kernel, which is faster and can be differentiated once."""

    @cached_property
    def affine(self) -> frozenset[str]:
        """Return the layers in whose weight the outputs are affine or piecewise affine."""
        curved, calls = self.structure.curved, self.structure.curved_calls
        return frozenset(
            name
            for name, w in (self.weights | self.parts).items()
            if (w.parameter not in curved if w.parameter is not None else w.calls == (name,) and name not in calls)
        )

    def unread(self, weight: Weight) -> str:
        """Return why the features that a weight multiplies are not known; empty if nothing speaks against it."""
        if weight.unplaced or weight.products or self.structure.altered.isdisjoint(weight.calls):
            return weight.unplaced
        return UNREAD_PRODUCT

    def weight(self, name: str) -> Weight:
        """Return a weight, or a part of one, by its name."""
        return self.parts[name] if name in self.parts else self.weights[name]

    def bytes_per_sample(self, outputs: int) -> int:
        """Return a pass's bytes per sample: output Jacobians, activations, unexplained gradients, Gram matrices."""
        unexplained = self.unexplained_size * outputs * (8 + 2 * self.itemsize)
        return (
            outputs * self.jacobian_bytes
            + 6 * self.itemsize * self.activation_entries
            + unexplained
            + _GRAM_BYTES * outputs**2 * (len(self.weights) + len(self.parts))
        )

    def samples_at_once(self, memory: int, outputs: int, needs: Collection[str] = ()) -> int:
        """Return the number of samples that fit in `memory` bytes in a pass over a number of outputs; at least 1.

        Independent of the chunk are the weights in float64 with their row factors, and two copies of the diagonal if it
        is in `needs`: the chunk's and the running sum.
        """
        sizes = [weight.matrix.W.shape for weight in self.weights.values()]
        entries, factors = sum(g * d * m for g, d, m in sizes), sum(g * d * min(d, m) for g, d, m in sizes)
        fixed = 8 * (entries + factors + 2 * entries * ("diagonal" in needs))
        return max(1, (memory - fixed) // max(1, self.bytes_per_sample(outputs)))

    def shared_products(self, outputs: int) -> int:
        """Return the multiplications for one sample's gradients of a number of outputs in all shared weights."""
        weights = (w for w in self.weights.values() if w.products and not w.dense)
        return outputs * sum(weight.matrix.W.numel() * weight.positions for weight in weights)

    def unpadded(self, x: Tensor, tape: Tape) -> Tensor:
        """Return features x, (n, ...), with those of padded tokens set to 0."""
        return unpadded(x, tape.mask if self.ignores_padding else None)

    def last(self) -> str | None:
        """Return the last weight; None if there is none."""
        return next(reversed(self.weights), None)

    def require_same(self, tape: Tape, inputs: list[Tensor], batch: Batch) -> None:
        """Raise PlanBroken if the network does not do on this batch what the plan says."""
        if self.structure.common_with(structure_of(tape, inputs)) != self.structure:
            raise PlanBroken([batch])
        n, operations = size(batch), self.operations(tape)
        if any(name not in operations for name in self.rows):
            raise PlanBroken([batch])
        unfit = [name for name, rows in self.rows.items() if not rows.fit(operations[name].shape, n)]
        if unfit:
            raise PlanBroken([batch], unfit)
        for weight in self.weights.values():
            if weight.dense and operations[weight.products[0]].shape.numel() != n * weight.neurons:
                raise PlanBroken([batch])  # the weight acts at several positions on this batch

    def operations(self, tape: Tape) -> dict[str, GraphOperation]:
        """Return the operations of a forward pass that the plan names, by name."""
        if not tape.operations:
            tape.operations = operations_of(tape, self.structure)
            tape.names = {operation.node: name for name, operation in tape.operations.items()}
        return tape.operations

    def uses(self, tape: Tape, parameter: str) -> list[tuple[Read, str]]:
        """Return the operations through which a parameter acts in a forward pass, each with its name in the plan."""
        if parameter in self.derived:
            return [use for _, uses in self.derived_uses(tape, parameter) for use in uses]
        self.operations(tape)
        return [(read, tape.names[read.node]) for read in tape.reads[parameter] or ()]

    def derived_uses(self, tape: Tape, parameter: str) -> list[tuple[Derived, list[tuple[Read, str]]]]:
        """Return the tensors derived from a parameter, each with the operations that read it and their names."""
        self.operations(tape)
        found = tape.derived[parameter] or ()
        return [(derived, [(read, tape.names[read.node]) for read in derived.reads]) for derived in found]
