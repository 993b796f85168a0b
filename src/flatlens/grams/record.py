"""The record of one forward pass: the calls of linear layers, and autograd's graph.

Hooks on the linear layers keep the input x and the output z of every call. The graph then shows which operation in a
call multiplies by the layer's weight, and through which operations every parameter acts. The rest of the package
differentiates to these tensors and operations, never to a weight: the Jacobian of a weight follows from df/dz and x.
"""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._pytree import tree_map

from flatlens.operations.graph import Graph, Node
from flatlens.operations.layers import is_linear
from flatlens.operations.pair_finders import HeadFinder, ScaleFinder
from flatlens.operations.parameter_uses import (
    Derived,
    GraphOperation,
    Lookup,
    Product,
    Read,
    derived_from,
    features_of,
    product_of,
    reaches,
    reads_of,
)
from flatlens.problem import Batch, Problem
from flatlens.problem.batches import is_list, take, unlisted
from flatlens.problem.eval_context import differentiable

READ_ON = 2  #: samples on which heads are read; what they do not reach, as an expert, all the others show


@dataclass(eq=False)
class Call:
    """A call of a linear layer: its own copy of the input x, and its output z, both in the graph."""

    key: str  #: `fc1`; `fc1:1` for the second call
    name: str  #: the module's name
    module: nn.Module
    x: Tensor
    z: Tensor
    began: int  #: autograd's sequence number at the start of the call
    ended: int  #: autograd's sequence number at its end
    product: Product | None = None  #: the operation that multiplies by the layer's weight, if there is exactly one
    pure: bool = False  #: whether the call is this product and the addition of the bias, and nothing else
    as_given: bool = False  #: whether its product, or the only one in it, multiplies the very numbers of the input

    @property
    def read(self) -> Tensor:
        """Return the input, detached; half precision is widened to float32."""
        x = self.x.detach()
        return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass(eq=False)
class Tape:
    """The record of a forward pass, in execution order."""

    linear: dict[str, Call] = field(default_factory=dict)
    embedded: list[Tensor] = field(default_factory=list)
    """Outputs of embeddings of the batch's ids, samples in front; those that may be of positions come last."""
    mask: Tensor | None = None  #: attention mask (n, T), 0 at padding; None if the batch has none
    rounded: bool = False  #: whether products round what they are given: the arithmetic asked for does
    graph: Graph = field(init=False)  #: autograd's graph of the outputs
    reads: dict[str, tuple[Read, ...] | None] = field(default_factory=dict)
    """Operations that read each parameter, by its name; None if one of them is of an unknown type."""
    derived: dict[str, tuple[Derived, ...] | None] = field(default_factory=dict)
    """Tensors that are made from a parameter, where `reads` does not say how it acts; None if one read is unknown."""
    operations: dict[str, GraphOperation] = field(default_factory=dict)  #: cache of `Plan.operations`
    names: dict[Node, str] = field(default_factory=dict)  #: their names in the plan, by node

    def read_graph(self, f: Tensor, model: nn.Module, inputs: list[Tensor]) -> None:
        """Find in the graph of f how each parameter acts, and the product of each call."""
        self.graph = graph = Graph(f, model)
        self.reads = {name: reads_of(graph, p) for name, p in graph.parameters.items() if p.is_floating_point()}
        # Where reads do not tell all, a parameter may act through tensors derived from it without the network's input.
        sources = [graph.leaves.get(id(x)) if x.grad_fn is None else x.grad_fn for x in inputs]
        sampled = graph.behind([node for node in sources if node is not None])
        for name, p in graph.parameters.items():
            reads, leaf = self.reads.get(name, ()), graph.leaves.get(id(p))
            kinds = {(type(read), read.adapter if isinstance(read, Product) else None) for read in reads or ()}
            read_alike = reads is not None and len(kinds) <= 1 and all(read.node in sampled for read in reads)
            if leaf is None or read_alike:
                continue
            if reads is not None and all(isinstance(read, Lookup) for read in reads):
                each = [derived_from(graph, read.node, read.shape, sampled) for read in reads]
                self.derived[name] = None if None in each else tuple(one for some in each for one in some or ())
            else:
                self.derived[name] = derived_from(graph, leaf, p.shape, sampled)
        # A call's product is among those that ran between its start and its end.
        products = [product for node in graph.nodes if (product := product_of(node)) is not None]
        by_turn = sorted((product.turn, number) for number, (product, _) in enumerate(products))
        turns = [turn for turn, _ in by_turn]
        for call in self.linear.values():
            first, end = bisect(turns, call.began), bisect_left(turns, call.ended)
            inside = [products[number] for _, number in by_turn[first:end]]
            weight = call.module._parameters.get("weight")
            if weight is not None:
                reads = self.reads.get(graph.names.get(id(weight), ""))
                mine = {read.node: read for read in reads or () if isinstance(read, Product)}
                found = [mine[product.node] for product, _ in inside if product.node in mine]
            else:  # a weight that is computed from other parameters (weight_norm) is recognised by its value
                value: Tensor = call.module.weight  # type: ignore[assignment]
                found = [product for product, W in inside if _equal_to_rounding(W, value.detach())]
            call.product = found[0] if len(found) == 1 else None
            if call.product is not None:
                node = call.product.node
                call.pure = reaches(call.z.grad_fn, node) and reaches(call.product.source, call.x.grad_fn)
            known = call.product or (inside[0][0] if len(inside) == 1 else None)
            # torch's own convolution reads its input through its padding
            own = type(call.module).__module__.startswith("torch.nn.modules") and "forward" not in vars(call.module)
            call.as_given = own and getattr(call.module, "padding_mode", "zeros") != "zeros"
            # else the product multiplies the input, cast if products round, and no write changed it in between
            if known is not None and not call.as_given and reaches(known.source, call.x.grad_fn):
                x, phi = call.x.detach(), features_of(known.node)
                if phi is not None:  # a derivative in the weight is asked for
                    x = x.to(phi.dtype) if self.rounded else x
                    whole = x.is_contiguous() and phi.is_contiguous() and x.numel() == phi.numel()
                    itself = whole and x.data_ptr() == phi.data_ptr()
                    call.as_given = itself or (x.dtype == phi.dtype and torch.equal(x.flatten(), phi.flatten()))


def _equal_to_rounding(W: Tensor, weight: Tensor) -> bool:
    scale = float(weight.abs().max()) if weight.numel() else 0.0
    most = 100 * torch.finfo(W.dtype).eps * scale
    return W.shape == weight.shape and torch.allclose(W, weight.to(W), rtol=0, atol=most)


def derived_reads(tape: Tape, parameter: str) -> list[Read]:
    """Return the operations that read the tensors derived from a parameter."""
    return [read for derived in tape.derived.get(parameter) or () for read in derived.reads]


@contextmanager
def record(model: nn.Module, mask: Tensor | None = None, ids: Sequence[Tensor] = ()) -> Iterator[Tape]:
    """Yield a tape that records the linear layers' calls in forward passes inside the block.

    `ids` are the tensors of whole numbers in the batch: embeddings of anything else are not recorded.
    Only calls from one tensor to one tensor are recorded. A layer gets its own copy of its input, so that a gradient at
    x is the one *through this call*. It returns a copy of its output, so that an in-place activation that follows does
    not change the recorded z.
    """
    tape = Tape(mask=mask)
    inputs: dict[nn.Module, list[Tensor | None]] = {}  # of the calls that have not ended; None: not recorded
    called: Counter[nn.Module] = Counter()  # calls that were recorded
    names = {module: name for name, module in model.named_modules()}
    differentiating = torch.is_grad_enabled()

    # Not recorded are calls inside a torch.no_grad() of the model, where nothing is differentiated, those of other
    # tensors than floating ones, and those inside a transform of torch.func.
    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        named = "input" if "input" in kwargs else "x"
        x = args[0] if args else kwargs.get(named)
        inputs.setdefault(module, []).append(None)
        if differentiating and not torch.is_grad_enabled():
            return args, kwargs
        if not isinstance(x, Tensor) or not x.is_floating_point() or is_functorch_wrapped_tensor(x):
            return args, kwargs
        x = (x if x.requires_grad or not differentiating else x.detach().requires_grad_()).clone()
        inputs[module][-1] = x
        return (args, {**kwargs, named: x}) if not args else ((x, *args[1:]), kwargs)

    def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], z: Tensor) -> Tensor:
        x = inputs[module].pop() if inputs.get(module) else None
        if x is None or not isinstance(z, Tensor):
            return z
        times = called[module]
        called[module] += 1
        key = names[module] if times == 0 else f"{names[module]}:{times}"
        handed_on = z.clone()
        began = -1 if x.grad_fn is None else int(x.grad_fn._sequence_nr())
        ended = 2**63 if handed_on.grad_fn is None else int(handed_on.grad_fn._sequence_nr())
        tape.linear[key] = Call(key, names[module], module, x, z, began, ended)
        return handed_on

    doubtful: list[Tensor] = []

    def embed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], z: Tensor) -> Tensor:
        axis, sure = sample_axis(args[0] if args else kwargs["input"], ids)
        if axis is None or (isinstance(module, nn.EmbeddingBag) and (axis != 0 or len(z) != len(ids[0]))):
            return z  # a bag has one row for each row that it reads
        front = z.movedim(axis, 0) if axis else z
        leaf = front if z.requires_grad else front.detach().requires_grad_()
        (tape.embedded if sure else doubtful).append(leaf)
        return leaf.clone().movedim(0, axis) if axis else leaf.clone()

    with ExitStack() as hooks:
        for module in names:
            if is_linear(module):
                hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                hooks.callback(module.register_forward_hook(embed, with_kwargs=True).remove)
        yield tape
        tape.embedded += doubtful


def run_recorded(problem: Problem, model: nn.Module, batch: Batch) -> tuple[Tape, list[Tensor], Tensor, Any]:
    """Return (tape, network's inputs, outputs, targets) of a batch on the model's device; the inputs are graph leaves.

    The network's inputs are the floating tensors that it gets, except the attention mask, and those in lists of
    samples. If there are none (token ids), the input is the output of its first embedding.
    """
    mask = problem.mask(batch)
    leaves: list[Tensor] = []

    def as_leaf(part: Any) -> Any:
        if not isinstance(part, Tensor) or not part.is_floating_point() or part is mask:
            return part
        leaves.append(part.detach().requires_grad_())
        return leaves[-1].clone()  # the first operation may be in-place, and a leaf may not be changed

    if problem.forward is None and isinstance(batch, tuple):
        batch = (tree_map(as_leaf, batch[0], is_leaf=is_list), *batch[1:])
    else:
        batch = tree_map(as_leaf, batch, is_leaf=is_list)
    given = unlisted(batch[0] if problem.forward is None and isinstance(batch, tuple) else batch)
    ids = [part for part in given if part.ndim and not part.is_floating_point()]
    with record(model, mask, ids) as tape:
        f, y = problem.run(model, batch)
    inputs, tape.rounded = leaves or tape.embedded[:1], problem.precision > torch.finfo(problem.dtype).eps
    tape.read_graph(f, model, inputs)
    return tape, inputs, f, y


@contextmanager
def read_heads(problem: Problem, model: nn.Module) -> Iterator[tuple[HeadFinder, ScaleFinder]]:
    """Give the heads, norms and gates that autograd's graph of the first samples shows."""
    with problem.measuring(model), differentiable(model.parameters()):
        tape, _, _, _ = run_recorded(problem, model, problem.place(take(problem.probes[0], 0, READ_ON)))
        finder = HeadFinder(tape.graph).run()
        yield finder, ScaleFinder(finder).run()


def sample_axis(read: Tensor, given: Sequence[Tensor]) -> tuple[int | None, bool]:
    """Return the axis of the samples in what an embedding reads, and whether this is sure; None: it reads no samples.

    `given` are the ids of the batch, samples in front. An axis is sure if the numbers are those of the batch, by memory
    that the two share or by their values, or if only its length is the number of samples. Numbers without such an axis
    are positions, say. Ids of all samples in one row have the samples in front.

    >>> words = torch.tensor([[1, 2], [3, 4], [5, 0]])
    >>> sample_axis(words, [words]), sample_axis(words.T, [words]), sample_axis(torch.arange(2), [words])
    ((0, True), (1, True), (None, False))
    >>> square = torch.tensor([[1, 2], [3, 4]])
    >>> sample_axis(square.T.contiguous(), [square]), sample_axis(torch.arange(2), [square])
    ((1, True), (0, False))
    """
    if not given or is_functorch_wrapped_tensor(read):
        return None, False
    if read.ndim == 1 and any(
        ids.ndim > 1 and ids.numel() == len(read) and _same(read, ids.flatten()) for ids in given
    ):
        return 0, True
    n = len(given[0])
    axes = [axis for axis, length in enumerate(read.shape[:2]) if length == n]
    if not axes:
        return None, False
    if n > 1 and len(axes) == 1 and all(ids.ndim == 1 or ids.shape[1] != n for ids in given):
        return axes[0], True
    for ids in given:
        for axis in axes:
            if _same(read.movedim(axis, 0), ids):
                return axis, True
    return axes[0], False


def _same(read: Tensor, ids: Tensor) -> bool:
    """Return whether both are the same numbers, samples in front; of one column of the ids, whether it is a view."""
    if read.untyped_storage().data_ptr() == ids.untyped_storage().data_ptr():
        return read.stride(0) == ids.stride(0)
    return read.shape == ids.shape and torch.equal(read, ids)
