"""The planner: makes the plan of a pass from trials on the problem's probe samples.

The plan states only what all trials show. `proof` then compares it with autograd's own gradients on the same trials; a
place where they differ is distrusted, and the plan is made again without it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

import torch
from torch import nn

from flatlens.grams.broken import BATCHING, clear_autograd_errors
from flatlens.grams.facts import AgreedFacts
from flatlens.grams.layout import Layout, Weight
from flatlens.grams.parts import parts_of
from flatlens.grams.planned_weights import planned_weights
from flatlens.grams.proof import unproved
from flatlens.grams.structure import Structure, common_structure
from flatlens.grams.trial import Trial
from flatlens.operations.graph import Node
from flatlens.operations.heads import HeadFinder
from flatlens.operations.paths import Paths
from flatlens.operations.reads import Bias, Entrywise, Lookup
from flatlens.problem import Batch, Problem, measuring
from flatlens.problem.state import differentiable


def lay_out(
    problem: Problem,
    model: nn.Module,
    also: Iterable[Batch] = (),
    distrusted: Collection[str] = (),
    *,
    attention_heads: bool = False,
) -> Layout:
    """Return the plan of a pass, from trials on the problem's probes.

    Args:
        problem: the problem.
        model: its network.
        also: more batches to run trials on, already on the model's device.
        distrusted: places at which no arrangement of samples is assumed. If it contains `BATCHING`, backward passes
            are run one by one.
        attention_heads: whether attention's projections and heads are parts of the plan.
    """
    generator = torch.Generator().manual_seed(0)
    # differentiable: so that the graph also shows frozen parameters
    with clear_autograd_errors(), measuring(model), differentiable(model.parameters()):
        batches = [*(problem.place(probe) for probe in problem.probes), *also]
        trials = [Trial(problem, model, batch) for batch in batches]

        def planned(structure: Structure, distrusted: Collection[str]) -> Layout:
            for trial in trials:
                trial.find_rows(structure, generator)
            layout = _plan(AgreedFacts(problem, model, trials, structure, distrusted))
            # names of operations depend on the tensors made: where the plan drops one, names are given anew
            same = layout.structure.made.keys() == structure.made.keys()
            return layout if same else planned(layout.structure, distrusted)

        layout = planned(common_structure(trial.structure for trial in trials), distrusted)
        wrong = {place for trial in trials for place in unproved(problem, model, layout, trial, generator)}
        layout = layout if not wrong else planned(layout.structure, {*distrusted, *wrong})
        return _with_heads(layout, trials[0], model) if attention_heads else layout


def _with_heads(layout: Layout, trial: Trial, model: nn.Module) -> Layout:
    """Return the plan with attention's projections and heads, found on one trial."""
    assert trial.tape.graph is not None
    found = HeadFinder(Paths(trial.tape.graph, model)).run()
    parts = parts_of(layout.weights, found)
    more = sum(w.matrix.W.shape[1] * w.positions for w in parts.values()) * layout.itemsize
    refused = {**found.refused_queries, **found.refused_values}
    return replace(layout, parts=parts, not_parted=refused, jacobian_bytes=layout.jacobian_bytes + more)


def _plan(facts: AgreedFacts) -> Layout:
    """Return the plan that follows from the facts."""
    weights = planned_weights(facts)
    first = facts.first
    explained = {name for w in weights.values() if w.products for name in (w.parameter, w.bias) if name}
    small: dict[str, tuple[str, ...]] = {}  # small parameters, with the names of their operations
    embeddings: dict[str, tuple[str, ...]] = {}
    made: dict[str, tuple[str, ...]] = {}  # parameters that other tensors are made from
    for name in facts.parameters:
        if name in explained or name not in facts.problem.parameters:
            continue
        operations = facts.acts_through(name)
        kinds = {type(read) for read in first.tape.reads[name] or ()}
        if operations is not None and kinds == {Lookup}:
            embeddings[name] = operations
        elif operations is not None and kinds <= {Bias, Entrywise}:
            small[name] = operations
        if name not in embeddings and name not in small and (through := facts.acts_through_made(name)) is not None:
            made[name] = through
    known = explained | small.keys() | embeddings.keys() | made.keys()
    sizes = {name: p.numel() for name, p in facts.parameters.items() if name in facts.problem.parameters}
    unexplained = tuple(name for name in sizes if name not in known)
    needed = {operation for weight in weights.values() for operation in weight.products}
    entries = (*small.values(), *embeddings.values(), *made.values())
    needed |= {operation for operations in entries for operation in operations}
    calls, n = first.tape.linear, first.n
    shapes = [(op.shape, op.dtype) for name, op in first.operations.items() if name in needed]
    shapes += [(calls[key].x.shape, calls[key].x.dtype) for key in facts.axes]
    return Layout(
        structure=replace(facts.structure, made={name: facts.structure.made[name] for name in made}),
        weights=weights,
        small_parameters=tuple(small),
        embeddings=tuple(embeddings),
        made=tuple(made),
        unexplained=unexplained,
        rows={name: rows for name, rows in facts.rows.items() if name in needed},
        call_rows={key: facts.rows[f"x:{key}"] for key in facts.structure.calls if f"x:{key}" in facts.rows},
        batch_axis=facts.axes,
        unplaced=facts.unplaced,
        inputs=tuple(sorted(facts.structure.inputs)),
        input_is_embedded=any(trial.input_is_embedding for trial in facts.trials),
        input_call=_input_call(facts, weights),
        activation_entries=sum(shape.numel() for shape, _ in shapes) // n,
        jacobian_bytes=sum(shape.numel() * dtype.itemsize for shape, dtype in shapes) // n,
        unexplained_size=sum(sizes[name] for name in unexplained)
        + sum(facts.parameters[name].numel() for name in small)
        + sum(facts.made_entries(name) for name in made),
        itemsize=first.f.element_size(),
        parts={},
        not_parted={},
        ignores_padding=all(trial.ignores_padding for trial in facts.trials),
        batched=BATCHING not in facts.distrusted,
        several_ends=_several_ends(facts, weights),
    )


def _several_ends(facts: AgreedFacts, weights: dict[str, Weight]) -> bool:
    """Return whether outputs come from other layers than the last, too, through no layer after these."""
    last, graph = next(reversed(weights.values()), None), facts.first.tape.graph
    if last is None or not last.products or graph is None:
        return False
    paths, own = Paths(graph, facts.model), {facts.first.operations[name].node for name in last.products}
    waiting: list[Node] = [graph.nodes[-1]]
    seen: set[Node] = set()
    ends: set[bool] = set()  # whether a layer that is reached is the last
    while waiting:
        node = waiting.pop()
        if node in own or paths.is_layer(node):
            ends.add(node in own)
        elif node not in seen:
            seen.add(node)
            waiting += [source for source, _ in node.next_functions if source is not None]
    return len(ends) == 2


def _input_call(facts: AgreedFacts, weights: dict[str, Weight]) -> str | None:
    key = facts.structure.first
    return key if key is not None and facts.axes.get(key) == 0 and key in weights else None
