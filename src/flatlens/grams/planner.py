"""The planner: makes the plan of a pass from trials on the problem's probe samples.

The plan states only what all trials show (`AgreedFacts`). It is then compared with autograd's own gradients on the same
trials (`unproved`); a place where they differ is distrusted, and the plan is made again without it. If a weight's
arithmetic is right on some samples, it is right on all batches with the same structure, and the pass compares every
chunk's structure with the plan's.

Parts of attention's weights: a projection that is fused with others has rows of its own in one weight. So has each head
in a projection, and columns in the weight that reads the heads. Such a part is the matrix of a linear map itself, and
measures of weights have a value for it. Sums over weights do not count it, as they count the whole weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from flatlens.grams.jacobians import ChunkJacobians, lookups_of, saved_of
from flatlens.grams.output_jacobians import Checker, certificate_of, watched_places
from flatlens.grams.plan import BATCHING, Layout, Weight, clear_autograd_errors
from flatlens.grams.record import Call, made_reads
from flatlens.grams.trial import Rows, Structure, Trial, common_structure
from flatlens.operations.graph import Node, sources_of, walk
from flatlens.operations.layers import Adapter, layer_of
from flatlens.operations.pair_finders import HeadFinder, HeadPairs
from flatlens.operations.parameter_uses import Bias, Entrywise, Lookup, Product, Read, matrix_in_products
from flatlens.operations.weight_pairs import Entries
from flatlens.problem import Batch, Problem, measuring
from flatlens.problem.eval_context import differentiable


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
    found = HeadFinder(trial.tape.graph).run()
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
    if last is None or not last.products:
        return False
    own = {facts.first.operations[name].node for name in last.products}

    def behind(node: Node) -> list[Node]:
        return [] if node in own or graph.is_layer(node) else sources_of(node)

    reached = walk(graph.nodes[-1:], behind)
    return len({node in own for node in reached if node in own or graph.is_layer(node)}) == 2


def _input_call(facts: AgreedFacts, weights: dict[str, Weight]) -> str | None:
    key = facts.structure.first
    return key if key is not None and facts.axes.get(key) == 0 and key in weights else None


class AgreedFacts:
    """The facts on which all trials agree, less those of places that are distrusted."""

    def __init__(
        self,
        problem: Problem,
        model: nn.Module,
        trials: list[Trial],
        structure: Structure,
        distrusted: Collection[str],
    ) -> None:
        self.problem, self.model = problem, model
        self.trials, self.first, self.structure = trials, trials[0], structure
        self.distrusted = distrusted
        self.parameters = {name: p for name, p in model.named_parameters() if name in self.first.tape.reads}
        places = [name for name in self.first.rows if not name.startswith("input:") and name not in distrusted]
        found = {name: self._rows(name) for name in places}
        self.rows = {name: rows for name, rows in found.items() if rows is not None}
        self.axes, self.unplaced = self._axes()

    def _rows(self, name: str) -> Rows | None:
        """Return the first arrangement of a place's samples that is possible in every trial that has the place.

        None if there is none, or if a sample has several rows at a call and nothing tells which.
        """
        there = [trial for trial in self.trials if name in trial.rows]
        possible = [rows for rows in there[0].rows[name] if all(rows in trial.rows[name] for trial in there)]
        unclear = any(trial.unclear(name, possible) for trial in there)
        return possible[0] if possible and not unclear else None

    def _axes(self) -> tuple[dict[str, int], dict[str, str]]:
        """Return the axis of samples in each call's input, and for the other calls the reason why there is none."""
        axes: dict[str, int] = {}
        unplaced: dict[str, str] = {}
        for key in (*self.structure.calls, *sorted(self.structure.varying_calls)):
            rows = self.rows.get(f"x:{key}")
            if key in self.structure.varying_calls:
                unplaced[key] = "the layer is not called in the same way on every batch"
            elif rows is None or rows.order != "outer":
                unplaced[key] = "its calls do not have the samples of a batch separately along one axis"
            else:
                axes[key] = rows.axis
        return axes, unplaced

    def acts_through(self, parameter: str) -> tuple[str, ...] | None:
        """Return the operations through which a parameter acts; None if one is unknown or has no known samples."""
        if self.structure.reads[parameter] is None:
            return None
        return self._known(self.first.tape.reads[parameter] or ())

    def acts_through_made(self, parameter: str) -> tuple[str, ...] | None:
        """Return the operations that read the tensors made from a parameter; None if one has no known samples."""
        if parameter not in self.structure.made:
            return None
        return self._known(made_reads(self.first.tape, parameter)) or None

    def _known(self, reads: Iterable[Read]) -> tuple[str, ...] | None:
        """Return the names of operations; None if one has no known samples."""
        operations = tuple(self.first.names[read.node] for read in reads)
        return operations if all(operation in self.rows for operation in operations) else None

    def made_entries(self, parameter: str) -> int:
        """Return the entries of a sample's derivatives in a parameter and in the tensors made from it."""
        lookups = lookups_of(self.first.tape, parameter)
        own = sum(lookup.shape.numel() for lookup in lookups) or self.parameters[parameter].numel()
        return own + sum(made.shape.numel() for made in self.first.tape.made[parameter] or ())


def planned_weights(facts: AgreedFacts) -> dict[str, Weight]:
    """Return the weights by name, in the order in which they first multiply."""
    return _Weights(facts).all()


class _Weights:
    def __init__(self, facts: AgreedFacts) -> None:
        self.facts, self.first, self.structure = facts, facts.first, facts.structure
        self.parameters, self.measured = facts.parameters, facts.problem.parameters
        self.names = {id(p): name for name, p in self.parameters.items()}

    def all(self) -> dict[str, Weight]:
        return self._in_order({**self._weights(), **self._outside_layers()})

    def _weights(self) -> dict[str, Weight]:
        """Return the weights of linear layers, in execution order; calls that share a tensor share a weight."""
        together: dict[int, list[str]] = {}
        for key, call in self.first.tape.linear.items():
            kept = call.module._parameters.get("weight")
            together.setdefault(id(call.module if kept is None else kept), []).append(key)
        return {keys[0]: self._weight(keys) for keys in together.values()}

    def _weight(self, keys: list[str]) -> Weight:
        calls = [self.first.tape.linear[key] for key in keys]
        module, parameter = calls[0].module, self.names.get(id(calls[0].module._parameters.get("weight")))
        value = module.weight
        assert isinstance(value, Tensor)
        own = tuple(f"z:{key}" for key in keys)
        products = self._products(parameter, value.shape) if parameter is not None else self._products_in_calls(keys)
        explained = bool(products) and set(products) == set(own)
        pure = explained and all(call.pure for call in calls)
        operations = [self.first.operations[product] for product in products]
        adapter = operations[0].adapter if operations and isinstance(operations[0], Product) else layer_of(module)
        bias = module.bias
        positions = self._positions(products, adapter, value)
        return Weight(
            layer=keys[0],
            calls=tuple(keys),
            products=products,
            adapter=adapter,
            value=value.detach(),
            bias_value=bias.detach() if isinstance(bias, Tensor) else None,
            parameter=parameter,
            bias=self._bias(calls, products) if explained else None,
            explained=explained,
            dense=explained and adapter.token_wise and len(keys) == 1 and positions == 1,
            pure=pure,
            as_given=pure and self.structure.altered.isdisjoint(keys),
            positions=positions,
            module=module,
            linear_map=_linear_map(calls[0], adapter, self.first.n),
            unplaced=next((self.facts.unplaced[key] for key in keys if key in self.facts.unplaced), ""),
            measured=parameter is None or parameter in self.measured,
        )

    def _positions(self, products: tuple[str, ...], adapter: Adapter, value: Tensor) -> int:
        """Return the number of positions per sample at which the products act, the largest over trials."""
        rows = max(1, adapter.matrix(value)[:, :, 0].numel())
        each = [
            sum(trial.operations[product].shape.numel() for product in products) // (trial.n * rows)
            for trial in self.facts.trials
        ]
        return max(each)

    def _products(self, parameter: str, stored: torch.Size) -> tuple[str, ...]:
        """Return the products through which a weight acts; () if it also acts otherwise, or if their types differ."""
        products, reads = self.facts.acts_through(parameter), self.first.tape.reads[parameter] or ()
        kinds = {(read.adapter, read.stored) for read in reads if isinstance(read, Product)}
        only = all(isinstance(read, Product) for read in reads) and len(kinds) == 1
        return products if products and only and all(shape == stored for _, shape in kinds) else ()

    def _products_in_calls(self, keys: list[str]) -> tuple[str, ...]:
        """Return the products in the calls of a layer whose weight is computed from other parameters."""
        products = tuple(f"z:{key}" for key in keys)
        known = all(self.structure.calls.get(key) is not None and f"z:{key}" in self.facts.rows for key in keys)
        operations = [self.first.operations.get(product) for product in products]
        adapters = {op.adapter if isinstance(op, Product) else None for op in operations}
        return products if known and len(adapters) == 1 and None not in adapters else ()

    def _bias(self, calls: list[Call], products: tuple[str, ...]) -> str | None:
        """Return the name of a layer's bias, if it is added to the layer's products and acts nowhere else."""
        biases = {id(call.module._parameters.get("bias")) for call in calls}
        name = self.names.get(biases.pop())
        if name is None or biases or set(self.facts.acts_through(name) or ()) != set(products):
            return None
        return name if all(isinstance(read, Bias) for read in self.first.tape.reads[name] or ()) else None

    def _outside_layers(self) -> dict[str, Weight]:
        """Return the parameters that multiply outside calls of linear layers, as weights, by their names."""
        of_layers = {id(call.module._parameters.get("weight")) for call in self.first.tape.linear.values()}
        found = {name: self._outside(name) for name, p in self.parameters.items() if id(p) not in of_layers}
        return {name: weight for name, weight in found.items() if weight is not None}

    def _outside(self, name: str) -> Weight | None:
        """Return a parameter that acts in products outside linear layers as a weight; None if it does not."""
        reads = [read for read in self.first.tape.reads[name] or () if isinstance(read, Product)]
        stored = reads[0].stored if reads else torch.Size()
        products, parameter = self._products(name, stored) if reads else (), self.parameters[name]
        value = parameter.detach()
        if products:
            value, adapter = value.reshape(stored), reads[0].adapter
        elif name in self.structure.made and (side := matrix_in_products(self.first.tape.made[name] or ())) is not None:
            adapter = side
        else:
            return None
        positions = self._positions(products, adapter, value)
        dense = adapter.token_wise and len(products) == 1 and positions == 1
        first = self.first.operations[products[0]] if products else None
        return Weight(
            layer=name,
            calls=(),
            products=products,
            adapter=adapter,
            value=value,
            bias_value=None,
            parameter=name,
            bias=None,
            explained=bool(products),
            dense=dense,
            pure=False,
            as_given=False,
            positions=positions,
            linear_map=(adapter, first.kept().shape[1:] if isinstance(first, Product) else torch.Size()),
            unplaced="" if products else "its products read tensors made from the weight: their features are not known",
            measured=name in self.measured,
        )

    def _in_order(self, weights: dict[str, Weight]) -> dict[str, Weight]:
        """Return the weights in the order in which they first multiply."""
        tape = self.first.tape

        def turn(weight: Weight) -> int:
            if weight.calls:
                return tape.linear[weight.calls[0]].began
            assert weight.parameter is not None
            reads = (*(tape.reads[weight.parameter] or ()), *made_reads(tape, weight.parameter))
            return min(read.turn for read in reads if isinstance(read, Product))

        return dict(sorted(weights.items(), key=lambda item: turn(item[1])))


def _linear_map(call: Call, adapter: Adapter, n: int) -> tuple[Adapter, torch.Size]:
    """Return the linear map that a layer applies, and the size of one sample's input to it.

    Of a convolution it is the module's; of one in a user's own module, and of a transposed convolution, whose call may
    choose the output's size, it is the product's.
    """
    if adapter.token_wise:
        return adapter, torch.Size((call.x.numel() // (n * call.x.shape[-1]), call.x.shape[-1]))
    torchs_own = type(call.module).__module__.startswith("torch.nn.modules")
    if call.product is not None and (isinstance(call.module, _ConvTransposeNd) or not torchs_own):
        return adapter, call.product.kept().shape[1:]
    return layer_of(call.module), call.x.shape[1:]


def parts_of(weights: Mapping[str, Weight], heads: HeadPairs) -> dict[str, Weight]:
    """Return the projections and heads of attention as weights, by name, in the order of `weights`.

    `attn.qkv/query` has the rows of all queries in the weight of `attn.qkv`, `attn.qkv/query/0` those of the first
    head, and `attn.proj/output/0` the columns that read its values. A part that would be the whole weight is left out.
    """
    owners = {w.parameter: w for w in weights.values() if w.parameter is not None and w.adapter.token_wise}
    found: dict[str, dict[str, set[tuple[int, ...]]]] = {name: {} for name in weights}
    for kind, entries in _entries(heads):
        if (weight := owners.get(entries.parameter)) is not None and weight.has_derivative:
            found[weight.layer].setdefault(kind, set()).add(_indices(weight, entries, kind))
    parts: dict[str, Weight] = {}
    for name, kinds in found.items():
        for kind, indices in kinds.items():
            each = sorted(indices)
            named = {f"{name}/{kind}": tuple(sorted(set().union(*each)))}
            named |= {f"{name}/{kind}/{number}": one for number, one in enumerate(each)}
            axis = 2 if kind == "output" else 1
            size = weights[name].matrix.W.shape[axis]
            parts |= {
                part: _part(weights[name], part, axis, torch.tensor(one))
                for part, one in named.items()
                if len(one) < size and not (part.endswith("/0") and len(each) == 1)
            }
    return parts


def _entries(heads: HeadPairs) -> Iterator[tuple[str, Entries]]:
    """Yield the entries of every head, with what they make or read."""
    for kind, pairs, side in (
        ("query", heads.queries, "left"),
        ("key", heads.queries, "right"),
        ("value", heads.values, "left"),
        ("output", heads.values, "right"),
    ):
        yield from ((kind, entries) for pair in pairs for entries in getattr(pair, side))


def _indices(weight: Weight, entries: Entries, kind: str) -> tuple[int, ...]:
    """Return the rows of the matrix that make a head's features, or the columns that read them, ascending."""
    stored = torch.zeros(weight.value.shape, dtype=torch.bool)
    stored.view(-1)[entries.at[:, 0].cpu()] = True
    return tuple(weight.adapter.matrix(stored)[0].any(int(kind != "output")).nonzero()[:, 0].tolist())


def _part(weight: Weight, name: str, axis: int, indices: Tensor) -> Weight:
    """Return some rows (axis 1) or columns (axis 2) of a weight, as a weight."""
    rows, columns = (indices, None) if axis == 1 else (None, indices)
    return replace(weight, layer=name, part_of=weight.layer, rows=rows, columns=columns, bias=None, bias_value=None)


def unproved(problem: Problem, model: nn.Module, layout: Layout, trial: Trial, generator: torch.Generator) -> list[str]:
    """Return the places at which parameters act whose computed gradient is not autograd's on a trial."""
    f, tape, n = trial.f, trial.tape, trial.n
    named: dict[str, Tensor] = dict(model.named_parameters())
    weights = [w for w in layout.weights.values() if w.products]
    names = dict.fromkeys(
        (*layout.small_parameters, *layout.made, *(name for w in weights for name in (w.parameter, w.bias) if name))
    )
    watched = watched_places(tape, layout, [], n, ())
    certificate = certificate_of(f, watched, {name: named[name] for name in names}, generator)
    like = f.new_zeros(n, 1, 1, dtype=torch.float64)
    jacobians = ChunkJacobians(problem, tape, layout, named, {}, saved_of(layout, tape, n), {}, like, frozenset())
    rebuilt = jacobians.rebuilt(certificate.totals, weights=True)
    checker = Checker(problem, model, layout)
    same = checker.same_gradients(certificate, rebuilt)
    return [checker.place_of(tape, name) for name, right in zip(rebuilt, same, strict=True) if not bool(right)]
