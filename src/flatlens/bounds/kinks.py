"""Whether the risk is smooth in a layer's weights: no kink between the layer's output and the loss."""

from __future__ import annotations

import torch

from flatlens.bounds.claim import Assumption
from flatlens.bounds.context import Context
from flatlens.grams.record import record

KINKS = (
    "Relu", "LeakyRelu", "RreluWithNoise", "Prelu", "Elu", "Threshold", "Hardtanh", "Hardsigmoid", "Hardswish",
    "Hardshrink", "Softshrink", "Abs", "Sign", "Clamp", "Where", "Max", "Min", "Amax", "Amin", "Aminmax", "Maximum",
    "Minimum", "AdaptiveMaxPool", "FractionalMaxPool", "MaxPool", "Sort", "Topk", "Kthvalue", "Median",
    "HuberLoss", "SmoothL1Loss", "L1Loss",
)  # fmt: skip
"""Operations, by autograd's names, whose first, second or third derivative jumps somewhere."""


def smooth(context: Context, layer: str) -> Assumption:
    """Nothing that ran between the layer's output and the loss has a kink: read off autograd's graph of one probe.

    What lies below the layer does not matter, for its features stay where they are. ELU counts as a kink, its second
    derivative jumps. A `torch.autograd.Function` of the user's own is taken to be smooth.
    """
    problem, model = context.lens.problem, context.lens.model
    with problem.measuring(model), torch.enable_grad(), record(model) as tape:
        f, y = problem.run(model, problem.place(problem.probes[0]))
        risk = problem.loss.values(f.to(torch.float64), y).sum()
    ends: set[object] = {call.z.grad_fn for key, call in tape.linear.items() if key in context.layers[layer].calls}
    found = next((name for name in _between(risk.grad_fn, ends - {None}) if _is_kink(name)), "")
    return Assumption("smooth", not found, f"{found.lower()} acts above {layer}" if found else "")


def _is_kink(name: str) -> bool:
    return name.removesuffix("Kernel").rstrip("123D") in KINKS or name.startswith(("MaxPool", "AdaptiveMaxPool"))


def _between(top: object, ends: set[object]) -> list[str]:
    """Names of the graph's operations, without their `Backward0`, from which one of the ends can be reached."""
    leads: dict[object, bool] = {None: False}
    stack = [top]
    while stack:
        node = stack[-1]
        below = [] if node in ends or node is None else [at for at, _ in node.next_functions]  # type: ignore[attr-defined]
        waiting = [at for at in below if at not in leads]
        if waiting and node not in leads:
            stack += waiting
            continue
        leads[node] = leads.get(node, False) or node in ends or any(leads[at] for at in below)
        stack.pop()
    names = [node.name() for node, does in leads.items() if does and node not in ends]  # type: ignore[attr-defined]
    return [name.partition("Backward")[0] for name in names]
