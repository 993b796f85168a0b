"""The plan of a pass: which parameter acts through which operations, and where their samples lie.

`planner` reads it off autograd's graph on the problem's probes, and each chunk of the pass is held against it. A weight
belongs to a linear layer if the graph has it act through that layer's calls and nothing else. A parameter that the
graph does not explain (divided by, indexed, sliced, made into another weight) is left over: it still counts in every
sum over parameters, through per-sample autograd, under its own name.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from flatlens.grams.broken import PlanBroken
from flatlens.grams.record import Tape
from flatlens.grams.rows import Rows
from flatlens.grams.structure import Structure, structure_of
from flatlens.grams.trial import operations_of
from flatlens.grams.weight import WeightMatrix
from flatlens.operations.layers import Adapter
from flatlens.operations.operator_norm import blocks_norm, map_norm
from flatlens.operations.reads import Operation, Read
from flatlens.problem import Batch
from flatlens.problem.data import size
from flatlens.problem.sequences import unpadded


@dataclass(frozen=True, eq=False)
class Weight:
    """A weight as a matrix: of a linear layer, or of products outside layers, as attention's projections are."""

    layer: str  #: of the first call; of a product outside layers the parameter's name
    calls: tuple[str, ...]  #: of the layer
    products: tuple[str, ...]  #: names of the products it acts through; empty where autograd takes its slopes by sample
    adapter: Adapter
    value: Tensor  #: as stored
    bias_value: Tensor | None
    parameter: str | None  #: None where the weight is made from other parameters
    bias: str | None  #: None where the bias also acts elsewhere
    explained: bool  #: whether the weight acts through these calls and nothing else
    dense: bool  #: applied once per sample, at one position
    pure: bool  #: whether the layer's calls multiply, add the bias and do nothing else
    positions: int  #: per sample, over all its calls
    module: nn.Module | None = None
    linear_map: tuple[Adapter, torch.Size] | None = None  #: the layer's linear map, and the size of one sample's input
    unplaced: str = ""  #: why the inputs of the layer's calls cannot be told apart by sample
    measured: bool = True  #: whether it is among the problem's parameters: a frozen one is not

    @cached_property
    def matrix(self) -> WeightMatrix:
        """W as (g, d, m), and the bias, in float64."""
        bias = None if self.bias_value is None else self.bias_value.to(torch.float64)
        return WeightMatrix(self.adapter.matrix(self.value).to(torch.float64), bias)

    @property
    def has_derivative(self) -> bool:
        """Return whether the derivative in the whole weight is known, so that measures of its curvature are defined."""
        return bool(self.products) or (self.parameter is not None and self.measured)

    @property
    def neurons(self) -> int:
        """Rows of the weight, g d."""
        return self.matrix.W.shape[0] * self.matrix.W.shape[1]

    @property
    def row_axis(self) -> int:
        """Return the axis of the stored weight that counts its rows."""
        return self.adapter.row_axis

    @cached_property
    def kernel_norm(self) -> float:
        """||W||_2 of the weight as a matrix, a convolution's kernel block by block."""
        return blocks_norm(self.matrix.W)

    @cached_property
    def spectral_norm(self) -> float:
        """||W||_2 of the map from one sample's input to its output; of a convolution, of the operator, not its
        kernel."""
        assert self.linear_map is not None
        adapter, size = self.linear_map
        tolerance = 1e-10 if size.numel() <= 4096 else 1e-6  # of the square: its error is that squared
        return map_norm(adapter, self.value, size, tolerance)


_GRAM_BYTES = (
    2 * 5 * 8
)  #: bytes of G, R, K and its two parts, a number each, of two chunks: one dies when the next is there


@dataclass(frozen=True, eq=False)
class Layout:
    """The plan of a pass over one network."""

    structure: Structure  #: what the graph proves
    weights: dict[str, Weight]  #: of linear layers, in execution order
    outside: dict[str, Weight]  #: of products outside layers, by parameter
    small_parameters: tuple[str, ...]  #: parameters that act entry by entry
    embeddings: tuple[str, ...]  #: weights of embeddings that do nothing else
    unexplained: tuple[str, ...]  #: parameters that go through per-sample autograd
    rows: dict[str, Rows]  #: by operation: where its samples lie
    batch_axis: dict[str, int]  #: per call of a layer that every batch has: which axis of its input counts samples
    unplaced: dict[str, str]  #: the other calls -> why not
    inputs: tuple[int, ...]  #: which of the floating tensors fed in the outputs depend on
    input_is_embedded: bool  #: token ids go in, so the input is what the first embedding makes of them
    input_call: str | None  #: the one call whose input is the network's input, if there is one
    activation_entries: int  #: numbers that the calls read and give, per sample
    jacobian_bytes: int  #: bytes of one output's slopes at all of these, per sample
    unexplained_size: int  #: entries of the parameters left over
    itemsize: int  #: bytes of a number in the network's arithmetic
    ignores_padding: bool  #: whether what an attention_mask calls padding has no effect: its features do not count
    batched: bool  #: whether several backward passes may be taken in one

    @cached_property
    def affine(self) -> frozenset[str]:
        """Layers in whose weight the outputs are (piecewise) affine."""
        curved, calls = self.structure.curved, self.structure.curved_calls
        return frozenset(
            name
            for name, w in self.weights.items()
            if (w.parameter not in curved if w.parameter is not None else w.calls == (name,) and name not in calls)
        )

    def bytes_per_sample(self, rows: int) -> int:
        """Return a pass's bytes per sample: slopes of `rows` outputs, activations, gradients of unexplained, Grams."""
        unexplained = self.unexplained_size * rows * (8 + 2 * self.itemsize)
        return (
            rows * self.jacobian_bytes
            + 6 * self.itemsize * self.activation_entries
            + unexplained
            + _GRAM_BYTES * rows**2 * len(self.weights)
        )

    def samples_at_once(self, memory: int, rows: int, needs: Collection[str] = ()) -> int:
        """Return how many samples fit in `memory` bytes in a pass over so many outputs, beside what does not grow.

        That is the weights in float64 with their row factors, and each diagonal twice: a chunk's and the sum so far.
        """
        sizes = [weight.matrix.W.shape for weight in self.weights.values()]
        entries, factors = sum(g * d * m for g, d, m in sizes), sum(g * d * min(d, m) for g, d, m in sizes)
        fixed = 8 * (entries + factors + 2 * entries * sum("diagonal" in what for what in needs))
        return max(1, (memory - fixed) // max(1, self.bytes_per_sample(rows)))

    def unpadded(self, x: Tensor, tape: Tape) -> Tensor:
        """Features with their samples in front, those of padding zero."""
        return unpadded(x, tape.mask if self.ignores_padding else None)

    def last(self) -> str | None:
        """The last linear layer."""
        return next(reversed(self.weights), None)

    def require_same(self, tape: Tape, inputs: list[Tensor], model: nn.Module, batch: Batch) -> None:
        """Raise PlanBroken where the network does something else on a batch than the plan says."""
        if not self.structure.covers(structure_of(tape, inputs, model)):
            raise PlanBroken([batch])
        n, operations = size(batch), self.operations(tape)
        if any(name not in operations for name in self.rows):
            raise PlanBroken([batch])
        unfit = [name for name, rows in self.rows.items() if not rows.fit(operations[name].shape, n)]
        if unfit:
            raise PlanBroken([batch], unfit)
        for weight in (*self.weights.values(), *self.outside.values()):
            if weight.dense and operations[weight.products[0]].shape.numel() != n * weight.neurons:
                raise PlanBroken([batch])  # at several positions, here

    def operations(self, tape: Tape) -> dict[str, Operation]:
        """The operations of a pass that the plan speaks of, by name."""
        if not tape.operations:
            tape.operations = operations_of(tape, self.structure)
        return tape.operations

    def places(self, tape: Tape, parameter: str) -> list[tuple[Read, str]]:
        """The operations through which a parameter acts in a pass, each with the name of the place of its slopes."""
        names = {operation.node: name for name, operation in self.operations(tape).items()}
        return [(read, names[read.node]) for read in tape.reads[parameter] or ()]
