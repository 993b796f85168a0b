"""The assumption that the risk is smooth in a layer's weights: no kink between the layer's output and the loss."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from flatlens.bounds.claim import Assumption
from flatlens.bounds.context import Context
from flatlens.grams.record import record
from flatlens.operations.activations import SOFTPLUS_TAIL
from flatlens.operations.graph import Graph, Node
from flatlens.operations.table import operation_of

_COMPARISONS = frozenset(
    {
        *("gt", "ge", "lt", "le", "eq", "ne", "greater", "greater_equal", "less", "less_equal", "maximum", "minimum"),
        *("sign", "sgn", "signbit", "copysign", "heaviside", "floor", "ceil", "round", "trunc", "searchsorted"),
        *("argmax", "argmin", "argsort", "sort", "topk", "max", "min", "median", "kthvalue", "bucketize"),
    }
)
"""Functions whose results are constant between jumps, or that choose entries by their size."""
_HIDING = frozenset({"detach", "item", "tolist", "__float__", "__int__", "__bool__", "int", "long", "bool"})
"""Ways to values without a gradient: a comparison of these is not seen. `float()` of a tensor keeps its gradient."""


class _Compared(TorchFunctionMode):
    """Keeps which tensors with a gradient were compared, and by what; and which were read without their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, Any]] = []
        self.hidden: list[tuple[str, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = getattr(func, "__name__", "")
        name = called.strip("_")
        if name in _COMPARISONS or called in _HIDING:
            given = (part for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor))
            kept = self.found if name in _COMPARISONS else self.hidden
            kept += [(name, part.grad_fn) for part in given if part.grad_fn is not None]
        return func(*args, **(kwargs or {}))


def smooth(context: Context, layer: str) -> Assumption:
    """Return the assumption that no operation between the layer's output and the loss has a kink.

    The operations are read from autograd's graph of one probe. Those below the layer do not matter, because its
    features stay fixed. ELU counts as a kink, because its second derivative jumps; so does every operation on a part
    that was changed in place, and a comparison of what depends on the layer (a mask `z > 0`, an argmax). An operation
    that may have a kink (a norm, a square root, a user's own `torch.autograd.Function`) leaves the assumption open, as
    does one that hides values from autograd (`detach()`): the user may declare it.
    """
    problem, model = context.lens.problem, context.lens.model
    with problem.measuring(model), torch.enable_grad(), record(model) as tape, _Compared() as compared:
        f, y = problem.run(model, problem.place(problem.probes[0]))
        risk = problem.loss.values(f.to(torch.float64), y).sum()
    ends = [call.z.grad_fn for key, call in tape.linear.items() if key in context.layers[layer].calls]
    graph, above, waiting = Graph(risk), set[Node](), [end for end in ends if end is not None]
    while waiting:
        more = {reader for reader, _ in graph.read_by(waiting.pop())} - above
        above |= more
        waiting += more
    nodes = [node for node in graph.nodes if node in above]
    kinks = (
        node.name()
        for node in nodes
        if getattr(operation_of(node.name()), "kinks", False) and node.name() != "WhereBackward0"
    )  # which has none where its condition is fixed
    of_layer = above.union(ends)
    masks = (f"{name}Backward" for name, node in compared.found if _leads_to(node, of_layer))
    if bent := next(chain(kinks, masks), ""):
        return Assumption("smooth", False, f"{_called(bent)} acts above {layer}")
    hidden = (f"{name}Backward" for name, node in compared.hidden if _leads_to(node, of_layer))
    unproved = next(chain((node.name() for node in nodes if not _without_kinks(node)), hidden), "")
    if not unproved or "smooth" in context.declared:
        return context.declare("smooth") if unproved else Assumption("smooth", True)
    return Assumption("smooth", None, f"{_called(unproved)} acts above {layer}, and may have a kink")


def _leads_to(node: Any, wanted: set[Any]) -> bool:
    """Return whether a node is made from one of the wanted; it need not lead to the loss."""
    waiting, seen = {node}, set[Any]()
    while waiting and not waiting & wanted:
        seen |= waiting
        waiting = {below for one in waiting for below, _ in one.next_functions if below is not None} - seen
    return bool(waiting)


def _without_kinks(node: Any) -> bool:
    """Return whether a node of no known kink has none where it is defined."""
    name = node.name()
    if name == "WhereBackward0":
        return False  # its condition may come from values by a way that is not recorded
    if name == "PowBackward0":
        return float(node._saved_exponent).is_integer()  # sqrt(z^2) is |z|
    if name == "SoftplusBackward0":
        return float(node._saved_threshold) >= SOFTPLUS_TAIL  # below it, the jump is more than rounding
    return operation_of(name) is not None


def _called(name: str) -> str:
    """Return a node's name as users know the operation.

    >>> _called("ReluBackward0"), _called("torch::autograd::CopySlices"), _called("PreluKernelBackward0")
    ('relu', 'copyslices', 'prelu')
    """
    return name.rpartition("::")[2].partition("Backward")[0].removesuffix("Kernel").lower()
