"""The plan of a pass: which parameter acts through which operations, and where their samples lie.

`planner` reads it from autograd's graph on the problem's probes, and every chunk of the pass is compared with it:
where a chunk differs, `PlanBroken` makes the caller plan again. A weight belongs to a linear layer if the graph shows
that it acts through this layer's calls and nothing else. A parameter that the plan does not explain (one that is
sliced, indexed, divided by or made into another weight) is measured by per-sample autograd: it counts in every sum
over parameters, under its own name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from flatlens.errors import BadModel
from flatlens.grams.record import Tape
from flatlens.grams.trial import Rows, Structure, operations_of, structure_of
from flatlens.grams.weight_jacobians import WeightMatrix
from flatlens.operations.layers import Adapter
from flatlens.operations.operator_norm import SearchedNorm, blocks_norm, map_norm
from flatlens.operations.parameter_uses import Derived, GraphOperation, Read
from flatlens.problem import Batch
from flatlens.problem.batches import size
from flatlens.problem.ranks import Ranks
from flatlens.problem.row_layout import unpadded

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
    """Raise PlanBroken on all ranks, with all their reasons, if one of them raised it inside the block.

    Any other error of one rank is raised on all, too.
    """
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
        rounded = self.value.dtype != torch.float64
        return WeightMatrix(self.cut(self.adapter.matrix(self.value)).to(torch.float64), bias, rounded)

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
        """Whether the weight is applied once per sample, at one position."""
        return self.explained and self.adapter.token_wise and len(self.products) == 1 == self.positions

    @property
    def has_derivative(self) -> bool:
        """Return whether the pass knows the derivative in the whole weight, which measures of its curvature need."""
        return bool(self.products) or (self.parameter is not None and self.measured)

    @property
    def neurons(self) -> int:
        """Return the number of rows of the weight, g d."""
        return self.matrix.W.shape[0] * self.matrix.W.shape[1]

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


UNREAD_PRODUCT = "its calls multiply other numbers than their inputs, by no product of a known form"

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
        """Return a pass's bytes per sample, with so many outputs.

        The terms: output Jacobians, activations, per-sample gradients of unexplained parameters, Gram matrices.
        """
        unexplained = self.unexplained_size * outputs * (8 + 2 * self.itemsize)
        return (
            outputs * self.jacobian_bytes
            + 6 * self.itemsize * self.activation_entries
            + unexplained
            + _GRAM_BYTES * outputs**2 * (len(self.weights) + len(self.parts))
        )

    def samples_at_once(self, memory: int, outputs: int, needs: Collection[str] = ()) -> int:
        """Return how many samples fit in `memory` bytes in a pass with so many outputs; at least 1.

        Independent of the chunk are the weights in float64 with their row factors, and two copies of the diagonal if it
        is in `needs`: the chunk's and the running sum.
        """
        sizes = [weight.matrix.W.shape for weight in self.weights.values()]
        entries, factors = sum(g * d * m for g, d, m in sizes), sum(g * d * min(d, m) for g, d, m in sizes)
        fixed = 8 * (entries + factors + 2 * entries * ("diagonal" in needs))
        return max(1, (memory - fixed) // max(1, self.bytes_per_sample(outputs)))

    def shared_products(self, outputs: int) -> int:
        """Return the multiplications that give one sample's gradients of so many outputs in all shared weights."""
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
        if not self.structure.covers(structure_of(tape, inputs)):
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
