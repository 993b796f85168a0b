"""The ways in which operations use a parameter: as a product's matrix, as a bias, entry by entry, or row by row.

For each read listed here, the per-sample derivative follows from the output Jacobian at the operation's output and from
the other inputs, which autograd saved. If anything else reads a parameter, `reads_of` returns None.

    Product    z = W phi + b: a matrix product or a convolution, by whatever module or function
    Bias       the b of z = W phi + b
    Entrywise  y = factor * theta + ..., theta broadcast: norms' weights and biases, shifts, scales, expanded tokens
    Lookup     rows of theta: an embedding lookup

A network may also derive tensors from parameters without its input, before an operation reads them with samples:
slices of a weight, table rows at fixed positions, scaled or masked weights (`derived_from`). The derivative in the
parameter follows from the one in the derived tensor: autograd takes it back from there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeAlias, final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from flatlens.operations.graph import LEAF, Graph, Node, shape_of, walk
from flatlens.operations.layers import Adapter, Convolution, Dense, TransposedConvolution, both_sides
from flatlens.operations.table import is_complex

RESHAPING = (
    "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "CloneBackward0", "ToCopyBackward0",
    "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "AliasBackward0",
    "UnflattenBackward0", "ContiguousBackward0",
)  # fmt: skip
"""Operations that keep every entry, in order."""

_BLOCKS = (
    "TBackward0", "TransposeBackward0", "PermuteBackward0", "SplitBackward0", "SplitWithSizesBackward0",
    "SliceBackward0", "CloneBackward0", "AliasBackward0",
)  # fmt: skip
"""Operations that give a block of a matrix's rows and columns."""

_MOST = 64  #: nodes between a parameter and its reads at most


@dataclass(eq=False)
class GraphOperation:
    """An operation of the graph, identified by its node."""

    node: Node
    number = 0  #: which of the node's outputs it is
    edge: GradientEdge = field(init=False)  #: its output, as a place to differentiate from or to
    shape: torch.Size = field(init=False)  #: of its output
    dtype: torch.dtype = field(init=False)  #: of its output
    turn: int = field(init=False)  #: a number that grows with the order in which operations ran

    def __post_init__(self) -> None:
        made = self.node._input_metadata[self.number]
        self.edge, self.turn = GradientEdge(self.node, self.number), int(self.node._sequence_nr())
        self.shape, self.dtype = torch.Size(made.shape), made.dtype

    @property
    def signature(self) -> tuple[object, ...]:
        """Return what is equal in two passes that did the same here: products' geometry, axes of repetition."""
        kind = type(self).__name__
        if isinstance(self, Product | Bias):
            return (kind, self.adapter, self.stored) if isinstance(self, Product) else (kind, self.adapter)
        return (kind, self.node.name(), *([self.broadcast] if isinstance(self, Entrywise) else ()))

    def kept(self) -> Tensor | None:
        """Return the other inputs that the parameter's derivative needs; they are gone once the graph is freed."""
        return None


@final
@dataclass(eq=False)
class Product(GraphOperation):
    """The read of W in z = W phi + b."""

    adapter: Adapter
    stored: torch.Size  #: shape of W as stored: the parameter's own, or a reshaping of it

    def kept(self) -> Tensor:
        """Return phi as the operation read it; half precision is widened to float32."""
        phi = features_of(self.node)
        assert phi is not None
        return phi.to(torch.promote_types(phi.dtype, torch.float32))

    @property
    def source(self) -> Node | None:
        """Return the node whose output the weight multiplies."""
        found: Node | None = self.node.next_functions[1 if self.node.name() == "AddmmBackward0" else 0][0]
        return found


@final
@dataclass(eq=False)
class Bias(GraphOperation):
    """The read of b in z = W phi + b."""

    adapter: Adapter


@final
@dataclass(eq=False)
class Entrywise(GraphOperation):
    """The read of theta in y = factor * theta + ..., with theta broadcast to the output's shape."""

    broadcast: torch.Size  #: theta's shape, with as many axes as the output
    factor: Callable[[], Tensor] | None = None  #: factor of theta; None for 1

    def kept(self) -> Tensor | None:
        """Return the factor, in the output's shape."""
        return None if self.factor is None else self.factor().broadcast_to(self.shape)


@final
@dataclass(eq=False)
class Lookup(GraphOperation):
    """The read of rows of theta, one for each id."""

    def kept(self) -> Tensor:
        """Return the ids; their shape is the output's without its last axis."""
        found: Tensor = self.node._saved_indices
        return found

    @property
    def padding(self) -> int:
        """Return the id whose row has no derivative; negative if there is none."""
        found = int(self.node._saved_padding_idx)
        return found - 2**64 if found >= 2**63 else found


Read: TypeAlias = Product | Bias | Entrywise | Lookup


def reads_of(graph: Graph, parameter: Tensor) -> tuple[Read, ...] | None:
    """Return all operations through which a parameter acts, in the order in which they ran; None where one is unknown.

    >>> layer = torch.nn.Linear(2, 3)
    >>> f = layer(torch.ones(1, 2))
    >>> [type(read).__name__ for read in reads_of(Graph(f), layer.weight)]
    ['Product']
    """
    leaf = graph.leaves.get(id(parameter))
    found: list[Read | None] = []

    def onward(at: tuple[Node, torch.Size, bool]) -> Iterator[tuple[Node, torch.Size, bool]]:
        node, shape, transposed = at  # the parameter in another shape, or its transpose
        for reader, operand in graph.readers[node]:
            if is_complex(reader):
                found.append(None)
            elif transposes(reader) and not transposed:
                yield reader, shape, True
            elif reader.name() == "ToCopyBackward0":
                yield reader, shape, transposed
            elif reader.name() in RESHAPING and not transposed:
                yield reader, shape_of((reader, 0)), False
            else:
                found.append(read_of(graph, reader, operand, shape, transposed))

    for _ in walk([] if leaf is None else [(leaf, parameter.shape, False)], onward):
        pass
    known = [read for read in found if read is not None]
    return tuple(sorted(known, key=attrgetter("turn"))) if len(known) == len(found) else None


def transposes(node: Node) -> bool:
    """Return whether a node exchanges the two axes of a matrix."""
    if len(shape_of((node, 0))) != 2:
        return False
    if node.name() == "TransposeBackward0":
        return int(node._saved_dim0) % 2 != int(node._saved_dim1) % 2  # torch saves -1 as 2^64 - 1
    if node.name() == "PermuteBackward0":
        return [int(dim) % 2 for dim in node._saved_dims] == [1, 0]
    return bool(node.name() == "TBackward0")


def read_of(graph: Graph, node: Node, operand: int, shape: torch.Size, transposed: bool = False) -> Read | None:
    """Return the read of a tensor of this shape that follows from a node's name; None where none is known."""
    name = node.name()
    if name in ("AddmmBackward0", "MmBackward0"):
        matrix = 2 if name == "AddmmBackward0" else 1
        if matrix == 2 and not node._saved_alpha == node._saved_beta == 1:
            return None
        if operand == matrix and len(shape) == 2:
            return Product(node, Dense(transposed=not transposed), shape)
        out = node._input_metadata[0].shape[-1]
        return Bias(node, Dense()) if operand == 0 and matrix == 2 and tuple(shape) == (out,) else None
    if transposed:
        return None
    if name == "ConvolutionBackward0":
        adapter = _convolution(node)
        return None if operand == 0 else Product(node, adapter, shape) if operand == 1 else Bias(node, adapter)
    if name == "EmbeddingBackward0":
        return None if node._saved_scale_grad_by_freq else Lookup(node)
    return _added_behind(graph, node, operand, shape) or _entrywise(node, operand, shape)


def features_of(product: Node) -> Tensor | None:
    """Return what a product multiplies by its weight, while the graph lives; None if no derivative is asked for."""
    saved = {"ConvolutionBackward0": "_saved_input", "AddmmBackward0": "_saved_mat1", "MmBackward0": "_saved_self"}
    phi: Tensor | None = getattr(product, saved[product.name()])
    return None if phi is None else phi.detach()


def _convolution(node: Node) -> Adapter:
    """Return the geometry of a convolution, as autograd saved it."""
    weight = node._saved_weight
    kernel = tuple(weight.shape[2:])
    stride, dilation = tuple(node._saved_stride), tuple(node._saved_dilation)
    pad = both_sides(tuple(node._saved_padding))
    if node._saved_transposed:
        extra = tuple(node._saved_output_padding)
        return TransposedConvolution(kernel, stride, pad, dilation, int(node._saved_groups), extra)
    return Convolution(kernel, stride, pad, dilation, int(node._saved_groups))


def _added_behind(graph: Graph, node: Node, operand: int, shape: torch.Size) -> Bias | None:
    """Return the read of a bias that F.linear adds in a separate operation, as for some non-contiguous inputs."""
    if node.name() != "AddBackward0" or node._saved_alpha != 1 or operand != 1 or len(shape) != 1:
        return None
    out = shape_of((node, 0))
    below = node.next_functions[0][0]
    while below is not None and below.name() in RESHAPING and len(graph.readers[below]) == 1:
        below = below.next_functions[0][0]
    if below is None or below.name() != "MmBackward0" or len(graph.readers[below]) != 1:
        return None
    product = shape_of((below, 0))
    fits = product.numel() == out.numel() and product[-1] == out[-1] == shape[0]
    return Bias(below, Dense()) if fits else None


def _entrywise(node: Node, operand: int, shape: torch.Size) -> Entrywise | None:
    """Return the read in a sum, a product with another tensor, a norm or an expansion; None for other nodes."""
    name, out = node.name(), shape_of((node, 0))
    aligned = torch.Size((*(1,) * (len(out) - len(shape)), *shape))  # as broadcasting puts the axes
    if name in ("AddBackward0", "SubBackward0") and node._saved_alpha == 1 and len(shape) <= len(out):
        minus = name == "SubBackward0" and operand == 1
        return Entrywise(node, aligned, (lambda: torch.tensor(-1.0)) if minus else None)
    if name == "MulBackward0" and len(shape) <= len(out):
        other = "_saved_other" if operand == 0 else "_saved_self"
        return None if getattr(node, other) is None else Entrywise(node, aligned, lambda: getattr(node, other).detach())
    if name == "ExpandBackward0":
        return Entrywise(node, aligned)
    if name == "PreluKernelBackward0" and operand == 1:
        return Entrywise(node, aligned, lambda: node._saved_self.detach().clamp(max=0))
    if name in _NORMED and operand in (1, 2) and not (name == "NativeBatchNormBackward0" and node._saved_training):
        channels = torch.Size((1, *shape, *(1,) * (len(out) - 2)))
        broadcast = aligned if name == "NativeLayerNormBackward0" else channels
        return Entrywise(node, broadcast, (lambda: _NORMED[name](node)) if operand == 1 else None)
    return None


def _layer_normed(node: Node) -> Tensor:
    normed: Tensor = (node._saved_input.detach() - node._saved_result1) * node._saved_result2
    return normed


def _group_normed(node: Node) -> Tensor:
    x, rows = node._saved_input.detach(), (int(node._saved_N), int(node._saved_group))
    mean, scale = node._saved_result1.reshape(*rows, 1), node._saved_result2.reshape(*rows, 1)
    normed: Tensor = ((x.reshape(*rows, -1) - mean) * scale).reshape(x.shape)
    return normed


def _batch_normed(node: Node) -> Tensor:
    x = node._saved_input.detach()
    shape = (1, -1, *(1,) * (x.ndim - 2))
    scale: Tensor = (node._saved_running_var + node._saved_eps).rsqrt()
    normed: Tensor = (x - node._saved_running_mean.reshape(shape)) * scale.reshape(shape)
    return normed


_NORMED: dict[str, Callable[[Node], Tensor]] = {
    "NativeLayerNormBackward0": _layer_normed,
    "NativeGroupNormBackward0": _group_normed,
    "NativeBatchNormBackward0": _batch_normed,
}
"""The normalised inputs of norms: of a batch norm in eval mode."""


def product_of(node: Node) -> tuple[Product, Tensor] | None:
    """Return a node's product, whatever made its weight, and the weight's value; None for other nodes."""
    name = node.name()
    if name == "ConvolutionBackward0":
        weight: Tensor = node._saved_weight.detach()
        return Product(node, _convolution(node), weight.shape), weight
    if name == "AddmmBackward0" and not node._saved_alpha == node._saved_beta == 1:
        return None
    # mat2 is not saved where no derivative passes through the weight's factor
    if name not in ("AddmmBackward0", "MmBackward0") or node._saved_mat2 is None:
        return None
    source = node.next_functions[-1][0]
    transposed = source is None or not transposes(source)
    weight = node._saved_mat2.detach() if transposed else node._saved_mat2.detach().T
    return Product(node, Dense(transposed=transposed), weight.shape), weight


def reaches(node: Node | None, goal: Node | None) -> bool:
    """Return whether a node's output is that of `goal` in another shape, perhaps with a bias added."""
    while node is not None and node is not goal:
        name = node.name()
        below = node.next_functions[0][0]
        if name == "AddBackward0" and node._saved_alpha == 1:
            vector = node.next_functions[1][0]
            added = vector is not None and vector.name() == LEAF
            # the sum must not broadcast the output of `below`
            if not added or below is None or shape_of((below, 0)) != shape_of((node, 0)):
                return False
        elif name not in RESHAPING:
            return False
        node = below
    return node is not None


@dataclass(eq=False)
class Derived(GraphOperation):
    """A tensor made from parameters, or the parameter itself, and the operations that read it with samples."""

    reads: tuple[Read, ...]
    number: int = 0

    @property
    def signature(self) -> tuple[object, ...]:
        """Return the signature: equal in two passes if both did the same here."""
        return (self.node.name(), self.number, self.shape, *(read.signature for read in self.reads))


def derived_from(graph: Graph, leaf: Node, shape: torch.Size, sampled: Collection[Node]) -> tuple[Derived, ...] | None:
    """Return the tensors derived from a parameter that operations read with samples; None if one read is unknown.

    `leaf` is the parameter's node, or that of a lookup in it; `sampled` are the nodes that depend on the input.
    """
    found: list[Derived | None] = []

    def onward(at: tuple[Node, int, torch.Size]) -> Iterator[tuple[Node, int, torch.Size]]:
        node, number, shape = at
        reads: list[Read] = []
        for reader, operand in graph.readers[node]:
            if reader.next_functions[operand][1] != number:
                continue
            read = None if is_complex(reader) else read_of(graph, reader, operand, shape)
            # an expansion may repeat the tensor along the axis of the samples: in a chunk of one sample, too
            repeats = isinstance(read, Entrywise) and (
                read.broadcast != read.shape or reader.name() == "ExpandBackward0"
            )
            if not (is_complex(reader) or reader in sampled or repeats):
                yield from ((reader, which, shape_of((reader, which))) for which in range(len(reader._input_metadata)))
            elif read is None or (isinstance(read, Lookup) and len(shape) != 2):
                found.append(None)
            else:
                reads.append(read)
        if reads:
            found.append(Derived(node, tuple(reads), number))

    for visited, _ in enumerate(walk([(leaf, 0, shape)], onward)):
        if visited >= _MOST or None in found:
            return None
    known = [derived for derived in found if derived is not None]
    ordered = tuple(sorted(known, key=lambda derived: min(read.turn for read in derived.reads)))
    return ordered if len(known) == len(found) else None


def matrix_in_products(tensors: Iterable[Derived]) -> Dense | None:
    """Return how a parameter stores the matrix whose blocks its products multiply by.

    None if no product reads it, if a product reads other entries than a block of its rows and columns, or if its
    products take its rows for outputs in some places and for inputs in others.
    """
    sides: set[Dense | None] = set()
    for derived in tensors:
        sides |= {_side(derived.node, read.adapter) for read in derived.reads if isinstance(read, Product)}
    return sides.pop() if len(sides) == 1 else None


def _side(node: Node, adapter: Adapter) -> Dense | None:
    """Return how the parameter behind a node stores its matrix, from how the node's output stores the product's."""
    if not isinstance(adapter, Dense):
        return None
    transposed = adapter.transposed
    while node.name() != LEAF:
        if node.name() not in _BLOCKS or len(node._input_metadata[0].shape) != 2:
            return None
        transposed ^= transposes(node)
        node = node.next_functions[0][0]
    return Dense(transposed) if node.variable.ndim == 2 else None
