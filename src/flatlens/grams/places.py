"""The places to which the pass differentiates, and the form in which their derivatives are kept.

They are the outputs of the plan's operations, which the Jacobians of parameters need, and the inputs of linear layers
and of the network. A name says which: `z:CALL` or `PARAMETER@k` (see `trial.operations_of`), `x:CALL`, `input:NUMBER`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from flatlens.grams.first_layer import input_side_follows
from flatlens.grams.layout import Layout, Weight
from flatlens.grams.record import Tape
from flatlens.grams.rows import FRONT, Rows
from flatlens.operations.graph import Place
from flatlens.operations.layers import by_sample
from flatlens.operations.reads import Bias, GraphOperation, Lookup, Product


@dataclass(frozen=True, eq=False)
class WatchedPlace:
    """A place to differentiate to, and the form in which the derivatives are kept."""

    at: Place
    size: torch.Size  #: shape of autograd's derivative
    shape: Callable[[Tensor], Tensor]  #: puts a derivative's samples in front
    plain: bool = False  #: whether the derivative already has one row per sample
    tokens_first: bool = False  #: whether the kept form (g, d, P) is stored as (g, P, d), as it comes

    @property
    def kept(self) -> torch.Size:
        """Return the shape of a sample's derivative after `shape`."""
        return self.shape(torch.empty(self.size, device="meta")).shape[1:]


def watched_places(
    tape: Tape, layout: Layout, inputs: list[Tensor], n: int, needs: Collection[str]
) -> dict[str, WatchedPlace]:
    """Return all places at which output Jacobians are needed, by name."""
    dense = {place for w in layout.weights.values() if w.dense for place in w.products}
    operations = layout.operations(tape)
    watched = {name: _watched_place(operations[name], rows, n, name in dense) for name, rows in layout.rows.items()}
    for key, axis in layout.batch_axis.items() if "G" in needs else ():
        if not (is_first_layer(layout, key) or follows_from_output(layout, key, needs)):
            x = tape.linear[key].x
            plain = f"z:{key}" in dense and axis == 0

            def flat(derivative: Tensor, axis: int = axis) -> Tensor:
                return by_sample(derivative, axis).reshape(n, -1)

            watched[f"x:{key}"] = WatchedPlace(x, x.shape, flat, plain)
    if layout.input_call is None and "G" in needs:
        for number, x in enumerate(inputs):
            watched[f"input:{number}"] = WatchedPlace(x, x.shape, lambda derivative: derivative.reshape(n, -1), True)
    return watched


def _watched_place(operation: GraphOperation, rows: Rows, n: int, dense: bool) -> WatchedPlace:
    """Return the output of an operation as a place; its derivatives are kept in the form that its type needs.

    (n, d) for a dense product, (n, g, d, P) for other products, (n, T, D) for an embedding lookup, (n, w, the other
    axes) for an operation that acts entry by entry.
    """
    if dense:
        return WatchedPlace(
            operation.edge,
            operation.shape,
            lambda derivative: rows.in_front(derivative, n).reshape(n, -1),
            rows == FRONT,
        )
    if isinstance(operation, Product | Bias):
        adapter = operation.adapter
        return WatchedPlace(
            operation.edge,
            operation.shape,
            lambda derivative: adapter.by_position(rows.in_front(derivative, n), n),
            tokens_first=adapter.token_wise,
        )
    if isinstance(operation, Lookup):
        width = operation.shape[-1]
        return WatchedPlace(
            operation.edge, operation.shape, lambda derivative: rows.by_sample(derivative, n).reshape(n, -1, width)
        )
    return WatchedPlace(operation.edge, operation.shape, lambda derivative: rows.by_sample(derivative, n))


def same_tokens(layout: Layout, weight: Weight) -> bool:
    """Return whether a weight acts in one call, whose input has the tokens in the order of the product's output."""
    only = weight.pure and weight.adapter.token_wise and len(weight.products) == 1 == len(weight.calls)
    return only and layout.batch_axis.get(weight.layer) == 0 and layout.rows[weight.products[0]] == FRONT


def follows_from_output(layout: Layout, key: str, needs: Collection[str]) -> bool:
    """Return whether the Gram matrix at a call's input is made from the output Jacobian at its output, J W.

    That takes less where the layer has fewer outputs than inputs, and only that Gram matrix is needed.
    """
    weight = layout.weights.get(key)
    if weight is None or weight.dense or "squares" in needs or layout.ignores_padding:
        return False
    _, d, m = weight.matrix.W.shape
    return d < m and same_tokens(layout, weight)


def along_follows(layout: Layout, key: str) -> bool:
    """Return whether df/dx x at a call's input equals <df/dW, W>: the weight acts there alone, on the whole input."""
    weight = layout.weights.get(key)
    return weight is not None and weight.as_given and len(weight.products) == 1 and not layout.ignores_padding


def is_first_layer(layout: Layout, key: str) -> bool:
    """Return whether a call is the only reader of the network's input, and df/dx there follows from df/dz."""
    return key == layout.input_call and key in layout.weights and input_side_follows(layout.weights[key])
