"""The assumption that the risk is smooth in a layer's weights: no kink between the layer's output and the loss."""

from __future__ import annotations

import torch

from flatlens.bounds.claim import Assumption
from flatlens.bounds.context import Context
from flatlens.grams.record import record
from flatlens.operations.graph import Graph, Node
from flatlens.operations.table import operation_of


def smooth(context: Context, layer: str) -> Assumption:
    """Return the assumption that no operation between the layer's output and the loss has a kink.

    The operations are read from autograd's graph of one probe. Those below the layer do not matter, because its
    features stay fixed. ELU counts as a kink, because its second derivative jumps; so does every operation on a part
    that was changed in place. A user's own `torch.autograd.Function` counts as smooth.
    """
    problem, model = context.lens.problem, context.lens.model
    with problem.measuring(model), torch.enable_grad(), record(model) as tape:
        f, y = problem.run(model, problem.place(problem.probes[0]))
        risk = problem.loss.values(f.to(torch.float64), y).sum()
    ends = [call.z.grad_fn for key, call in tape.linear.items() if key in context.layers[layer].calls]
    graph, above, waiting = Graph(risk), set[Node](), [end for end in ends if end is not None]
    while waiting:
        more = {reader for reader, _ in graph.read_by(waiting.pop())} - above
        above |= more
        waiting += more
    names = [node.name() for node in graph.nodes if node in above]
    kinks = (name for name in names if getattr(operation_of(name), "kinks", False))
    called = next(kinks, "").rpartition("::")[2].partition("Backward")[0].removesuffix("Kernel").lower()
    return Assumption("smooth", not called, f"{called} acts above {layer}" if called else "")
