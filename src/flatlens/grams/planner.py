"""The planner: makes the plan of a pass from trials on the problem's probe samples.

The plan states only what all trials show. It is then compared with autograd's own gradients on the same
trials (`proved`); a place where they differ is distrusted, and the plan is made again without it. If a weight's
arithmetic is right on some samples, it is right on all batches with the same structure, and the pass compares every
chunk's structure with the plan's.

Parts of attention's weights: a projection that is fused with others has rows of its own in one weight. So has each head
in a projection, and columns in the weight that reads the heads. Such a part is the matrix of a linear map itself, and
measures of weights have a value for it. Sums over weights do not count it, as they count the whole weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.modules.conv import _ConvTransposeNd

from flatlens.errors import BadModel
from flatlens.grams.autograd import clear_autograd_errors
from flatlens.grams.jacobians import ForwardPass, kept_by, lookups_of
from flatlens.grams.output_jacobians import Certificate, Checker, certificate_of, watched_places
from flatlens.grams.plan import (
    BATCHING,
    CANDIDATES,
    Plan,
    PlanBroken,
    Rows,
    Structure,
    Weight,
    independent_rows,
    of_own_inputs,
    operations_of,
    padding_ignored,
    structure_of,
)
from flatlens.grams.record import derived_reads, run_recorded
from flatlens.operations.graph import Place, sources_of, walk
from flatlens.operations.layers import Adapter, layer_of
from flatlens.operations.pair_finders import HeadFinder
from flatlens.operations.parameter_uses import (
    Bias,
    Entrywise,
    Lookup,
    Product,
    Read,
    matrix_in_products,
)
from flatlens.problem import Batch, Problem
from flatlens.problem.diagnosis import if_found, why_cut
from flatlens.problem.eval_context import device_of, differentiable


class Trial:
    """A recorded forward pass, and the possible arrangements of samples at its operations and inputs."""

    def __init__(self, problem: Problem, model: nn.Module, batch: Batch) -> None:
        self._given = problem, model, batch
        self.record()
        if not self.f.requires_grad:
            why = if_found(lambda: why_cut(model, lambda: problem.run(model, batch)[0]))
            raise BadModel(
                "the outputs do not depend differentiably on any input or weight",
                remedy=why or "torch.no_grad() or detach() inside forward() is possible",
            )
        self.n = len(self.f)
        self.input_is_embedding = len(self.inputs) == 1 and any(self.inputs[0] is x for x in self.tape.embedded[:1])
        self.structure = structure_of(self.tape, self.inputs)
        self.ignores_padding = self.tape.mask is not None and self._ignores(self.tape.mask)
        self.attends = any(node.name() in _ATTENDS for node in self.tape.graph.nodes)
        self.shapes: dict[str, torch.Size] = {}  #: by place
        self.rows: dict[str, list[Rows]] = {}  #: all possible arrangements of the samples, by place
        self.tested: dict[tuple[Any, ...], list[Rows]] = {}  #: the same, by place and by what was allowed there

    def record(self) -> None:
        """Run the forward pass and keep its graph."""
        self.tape, self.inputs, self.f, _ = run_recorded(*self._given)

    def forget(self) -> None:
        """Free the graph, until the pass is recorded again: its places are then others."""
        del self.tape, self.inputs, self.f
        self.tested.clear()

    def find_rows(self, structure: Structure, generator: torch.Generator) -> None:
        """Find the possible arrangements at all operations of the trials' common structure, and at inputs of calls."""
        operations = self.tape.operations = operations_of(self.tape, structure)
        self.tape.names = {operation.node: name for name, operation in operations.items()}
        inputs = {f"x:{key}": call.x for key, call in self.tape.linear.items() if call.x.requires_grad}
        inputs |= {f"input:{number}": x for number, x in enumerate(self.inputs)}
        at: dict[str, Place] = {name: found.edge for name, found in operations.items()} | inputs
        shapes = {name: operation.shape for name, operation in operations.items()}
        shapes |= {name: x.shape for name, x in inputs.items()}
        allowed = {name: [rows for rows in CANDIDATES if rows.fit(shape, self.n)] for name, shape in shapes.items()}
        self.shapes = shapes
        for name, operation in operations.items():
            if isinstance(operation, Product | Bias):
                allowed[name] = [rows for rows in allowed[name] if rows.axis == 0]
            elif isinstance(operation, Entrywise):
                allowed[name] = [rows for rows in allowed[name] if operation.broadcast[rows.axis] == 1]
        known = {name: (name[:2], at[name], tuple(rows)) for name, rows in allowed.items()}
        new, moving = {name: at[name] for name in at if known[name] not in self.tested}, set[str]()
        left = independent_rows(self.f, new, {name: allowed[name] for name in new}, generator, moving)
        for name, possible in left.items():  # where the outputs do not tell, as behind a gate that is shut
            if self.unclear(name, possible) or (name[:2] in ("x:", "z:") and name not in moving):
                like = self.f.new_empty(shapes[name])
                left[name] = of_own_inputs(at[name], like, self.inputs, possible, self.n, generator)
        self.tested |= {known[name]: rows for name, rows in left.items()}
        self.rows = {name: self.tested[known[name]] for name in at}

    def unclear(self, name: str, possible: list[Rows]) -> bool:
        """Return whether a sample has several rows at a call's input or product, and several arrangements are left."""
        if len(possible) < 2 or self.n == 1 or name[:2] not in ("x:", "z:"):
            return False
        return self.shapes[name][possible[0].axis] != self.n

    def _ignores(self, padding: Tensor) -> bool:
        """Return whether the derivative is 0 at padded tokens, at every call's input and at the network's."""
        read = [call.x for call in self.tape.linear.values() if call.x.requires_grad]
        u = torch.randn(self.f.shape, generator=torch.Generator().manual_seed(0)).to(self.f)
        derivatives = torch.autograd.grad(
            (u * self.f).sum(), [*read, *self.inputs], retain_graph=True, allow_unused=True
        )
        return bool(padding_ignored(padding, list(derivatives)))


def one_at_a_time(trials: Iterable[Trial]) -> Iterator[Trial]:
    """Yield trials, each with its graph; when the next one is asked for, only the first keeps it, to save memory."""
    for number, trial in enumerate(trials):
        if "tape" not in vars(trial):
            trial.record()
        yield trial
        if number:
            trial.forget()


def lay_out(
    problem: Problem,
    model: nn.Module,
    also: Iterable[Batch] = (),
    distrusted: Collection[str] = (),
    *,
    attention_heads: bool = False,
) -> Plan:
    """Return the plan of a pass, from trials on the problem's probes, and on the batches `also`, already on the device.

    No arrangement of samples is assumed at places that are `distrusted`; if `BATCHING` is among them, backward passes
    run one by one. With `attention_heads`, attention's projections and heads are parts of the plan.
    """
    generator = torch.Generator().manual_seed(0)
    # differentiable: so that the graph also shows frozen parameters
    with clear_autograd_errors(), problem.measuring(model, plain=True), differentiable(model.parameters()):
        batches = [*(problem.place(probe) for probe in problem.probes), *also]
        trials = list(one_at_a_time(Trial(problem, model, batch) for batch in batches))
        attends = any(trial.attends for trial in trials)

        def planned(structure: Structure, distrusted: Collection[str]) -> Plan:
            while True:
                for trial in one_at_a_time(trials):
                    trial.find_rows(structure, generator)
                plan = _Planner(problem, model, trials, structure, distrusted).plan()
                # Names of operations depend on the derived tensors: where the plan drops one, names are given anew.
                if plan.structure.derived.keys() == structure.derived.keys():
                    return plan
                structure = plan.structure

        plan = planned(reduce(Structure.common_with, (trial.structure for trial in trials)), distrusted)
        proofs, wrong = list[Certificate](), set[str]()
        for trial in one_at_a_time(trials):
            proof, unproved = proved(problem, model, plan, trial, generator)
            proofs += [proof] * attends
            wrong.update(unproved)
        plan = plan if not wrong else planned(plan.structure, {*distrusted, *wrong})
        if attention_heads:
            heads = HeadFinder(trials[0].tape.graph).run()
            parts = parts_of(plan.weights, heads)
            more = sum(w.matrix.W.shape[1] * w.positions for w in parts.values()) * plan.itemsize
            refused = {**heads.refused_queries, **heads.refused_values}
            plan = replace(plan, parts=parts, not_parted=refused, jacobian_bytes=plan.jacobian_bytes + more)
    return replace(plan, fused=attends and _fused_alike(problem, model, plan, batches, proofs))


class _Planner:
    """The facts on which all trials agree, less those of places that are distrusted, and the plan that they give."""

    def __init__(
        self, problem: Problem, model: nn.Module, trials: list[Trial], structure: Structure, distrusted: Collection[str]
    ) -> None:
        self.trials, self.first, self.tape, self.structure = trials, trials[0], trials[0].tape, structure
        self.distrusted, self.measured = distrusted, problem.parameters
        self.parameters = {name: p for name, p in model.named_parameters() if name in self.tape.reads}
        self.names = {id(p): name for name, p in self.parameters.items()}
        self.rows: dict[str, Rows] = {}  #: how the samples lie at each place
        for name, allowed in self.first.rows.items():
            if name.startswith("input:") or name in distrusted:
                continue
            # The first arrangement that is possible in every trial, if something tells which it is.
            there = [trial for trial in trials if name in trial.rows]
            possible = [rows for rows in allowed if all(rows in trial.rows[name] for trial in there)]
            if possible and not any(trial.unclear(name, possible) for trial in there):
                self.rows[name] = possible[0]
        # The operations through which each parameter acts; None if one is unknown or has no known samples.
        self.uses = {
            name: None if structure.reads[name] is None else self._known(self.tape.reads[name] or ())
            for name in self.parameters
        }
        self.axes: dict[str, int] = {}  #: axis of the samples in each call's input
        self.unplaced: dict[str, str] = {}  #: for the other calls the reason why there is none
        for key in (*structure.calls, *sorted(structure.varying_calls)):
            rows = self.rows.get(f"x:{key}")
            if key in structure.varying_calls:
                self.unplaced[key] = "the layer is not called in the same way on every batch"
            elif rows is None or rows.order != "outer":
                self.unplaced[key] = "its calls do not have the samples of a batch separately along one axis"
            else:
                self.axes[key] = rows.axis

    def plan(self) -> Plan:
        """Return the plan that follows from the facts."""
        first, structure, tape = self.first, self.structure, self.tape
        weights = self._weights()
        # Other parameters, by how they act, each with the names of its operations.
        known = {name for w in weights.values() if w.products for name in (w.parameter, w.bias) if name}
        small: dict[str, tuple[str, ...]] = {}
        embeddings: dict[str, tuple[str, ...]] = {}
        derived: dict[str, tuple[str, ...]] = {}
        for name in self.parameters:
            if name in known or name not in self.measured:
                continue
            uses, kinds = self.uses[name], {type(read) for read in tape.reads[name] or ()}
            if uses is not None and kinds == {Lookup}:
                embeddings[name] = uses
            elif uses is not None and kinds <= {Bias, Entrywise}:
                small[name] = uses
            elif name in structure.derived and (uses := self._known(derived_reads(tape, name))):
                derived[name] = uses
        known |= small.keys() | embeddings.keys() | derived.keys()
        sizes = {name: p.numel() for name, p in self.parameters.items() if name in self.measured}
        unexplained = tuple(name for name in sizes if name not in known)
        # Bytes of the derivatives at all places that the pass differentiates to, and of those kept entry by entry.
        needed = {operation for weight in weights.values() for operation in weight.products}
        needed.update(*small.values(), *embeddings.values(), *derived.values())
        shapes = [(op.shape, op.dtype) for name, op in tape.operations.items() if name in needed]
        shapes += [(tape.linear[key].x.shape, tape.linear[key].x.dtype) for key in self.axes]
        stored = sum(sizes[name] for name in (*unexplained, *small))
        for name in derived:
            stored += sum(lookup.shape.numel() for lookup in lookups_of(tape, name)) or sizes[name]
            stored += sum(tensor.shape.numel() for tensor in tape.derived[name] or ())
        # Whether the outputs also come from other layers than the last, with no layer after them.
        key, graph, several_ends = structure.first, tape.graph, False
        if own := {tape.operations[name].node for name in [*weights.values()][-1].products} if weights else set():
            ends = {tape.operations[name].node for weight in weights.values() for name in weight.products}
            onward = {node: [] if node in ends else sources_of(node) for node in graph.nodes}
            reached = ends.intersection(walk(graph.nodes[-1:], onward.__getitem__))
            several_ends = not own.isdisjoint(reached) and not own.issuperset(reached)
        return Plan(
            structure=replace(structure, derived={name: structure.derived[name] for name in derived}),
            weights=weights,
            small_parameters=tuple(small),
            embeddings=tuple(embeddings),
            derived=tuple(derived),
            unexplained=unexplained,
            rows={name: rows for name, rows in self.rows.items() if name in needed},
            call_rows={key: self.rows[f"x:{key}"] for key in structure.calls if f"x:{key}" in self.rows},
            batch_axis=self.axes,
            unplaced=self.unplaced,
            inputs=tuple(sorted(structure.inputs)),
            input_is_embedded=any(trial.input_is_embedding for trial in self.trials),
            input_call=key if key is not None and self.axes.get(key) == 0 and key in weights else None,
            activation_entries=sum(shape.numel() for shape, _ in shapes) // first.n,
            jacobian_bytes=sum(shape.numel() * dtype.itemsize for shape, dtype in shapes) // first.n,
            unexplained_size=stored,
            itemsize=first.f.element_size(),
            ignores_padding=all(trial.ignores_padding for trial in self.trials),
            batched=BATCHING not in self.distrusted,
            several_ends=several_ends,
        )

    def _known(self, reads: Iterable[Read]) -> tuple[str, ...] | None:
        """The names of operations; None if one has no known samples."""
        names = tuple(self.tape.names[read.node] for read in reads)
        return names if all(name in self.rows for name in names) else None

    def _weights(self) -> dict[str, Weight]:
        """The weights of layers and of products outside them, by name, in the order in which they first multiply."""
        tape = self.tape
        calls: dict[int, list[str]] = {}  # calls that share a tensor share a weight
        for key, call in tape.linear.items():
            kept = call.module._parameters.get("weight")
            calls.setdefault(id(call.module if kept is None else kept), []).append(key)
        turns = {keys[0]: tape.linear[keys[0]].began for keys in calls.values()}
        found = {keys[0]: self._of_layer(keys) for keys in calls.values()}
        for name, p in self.parameters.items():
            reads = (*(tape.reads[name] or ()), *derived_reads(tape, name))
            own = [read.turn for read in reads if isinstance(read, Product)]
            if own and id(p) not in calls and (weight := self._outside_layers(name, p.detach())) is not None:
                found[name], turns[name] = weight, min(own)
        return {name: found[name] for name in sorted(found, key=turns.__getitem__)}

    def _of_layer(self, keys: list[str]) -> Weight:
        """The weight of a layer, from all its calls."""
        calls, own = [self.tape.linear[key] for key in keys], tuple(f"z:{key}" for key in keys)
        module, parameter = calls[0].module, self.names.get(id(calls[0].module._parameters.get("weight")))
        value, bias = module.weight, module.bias
        assert isinstance(value, Tensor)
        # the products through which the weight acts
        if parameter is not None:
            products = self._products(parameter, value.shape)
        else:  # a weight that is computed from other parameters acts through the products in its layer's calls
            known = all(self.structure.calls.get(key) is not None and f"z:{key}" in self.rows for key in keys)
            adapters = {getattr(self.tape.operations.get(product), "adapter", None) for product in own}
            products = own if known and len(adapters) == 1 and None not in adapters else ()
        explained = bool(products) and set(products) == set(own)
        operation = self.tape.operations[products[0]] if products else None
        adapter = operation.adapter if isinstance(operation, Product) else layer_of(module)
        pure = explained and all(call.pure for call in calls)
        # the bias, if it is added to the layer's products and acts nowhere else
        added = self.names.get(id(calls[0].module._parameters.get("bias"))) if explained else None
        if added is not None:
            alone = len({id(call.module._parameters.get("bias")) for call in calls}) == 1
            only = all(isinstance(read, Bias) for read in self.tape.reads[added] or ())
            added = added if alone and only and set(self.uses[added] or ()) == set(products) else None
        # The linear map, and the size of one sample's input to it. Of a convolution it is the module's; of one in a
        # user's own module, and of a transposed convolution, whose call may choose the output's size, the product's.
        x, product = calls[0].x, calls[0].product
        torchs_own = type(module).__module__.startswith("torch.nn.modules")
        if adapter.token_wise:
            linear_map = adapter, torch.Size((x.numel() // (self.first.n * x.shape[-1]), x.shape[-1]))
        elif product is not None and (isinstance(module, _ConvTransposeNd) or not torchs_own):
            linear_map = adapter, product.kept().shape[1:]
        else:
            linear_map = layer_of(module), x.shape[1:]
        return Weight(
            layer=keys[0],
            calls=tuple(keys),
            products=products,
            adapter=adapter,
            value=value.detach(),
            bias_value=bias.detach() if isinstance(bias, Tensor) else None,
            parameter=parameter,
            bias=added,
            explained=explained,
            pure=pure,
            as_given=pure and self.structure.altered.isdisjoint(keys),
            positions=self._positions(products, adapter, value),
            module=module,
            linear_map=linear_map,
            unplaced=next((self.unplaced[key] for key in keys if key in self.unplaced), ""),
            measured=parameter is None or parameter in self.measured,
        )

    def _outside_layers(self, name: str, value: Tensor) -> Weight | None:
        """A parameter that acts in products outside linear layers as a weight; None if it does not."""
        reads = [read for read in self.tape.reads[name] or () if isinstance(read, Product)]
        products = self._products(name, reads[0].stored) if reads else ()
        adapter: Adapter | None
        size = torch.Size()  # of one sample's input
        if products:
            value, adapter = value.reshape(reads[0].stored), reads[0].adapter
            first = self.tape.operations[products[0]]
            size = first.kept().shape[1:] if isinstance(first, Product) else size
        elif name in self.structure.derived:
            adapter = matrix_in_products(self.tape.derived[name] or ())
        else:
            adapter = None
        if adapter is None:
            return None
        return Weight(
            layer=name,
            products=products,
            adapter=adapter,
            value=value,
            parameter=name,
            explained=bool(products),
            positions=self._positions(products, adapter, value),
            linear_map=(adapter, size),
            unplaced="" if products else "its products read tensors made from the weight: their features are not known",
            measured=name in self.measured,
        )

    def _products(self, parameter: str, stored: torch.Size) -> tuple[str, ...]:
        """The products through which a weight acts; () if it also acts otherwise, or if their types differ."""
        uses, reads = self.uses[parameter], self.tape.reads[parameter] or ()
        kinds = {(read.adapter, read.stored) if isinstance(read, Product) else None for read in reads}
        alike = len(kinds) == 1 and all(kind is not None and kind[1] == stored for kind in kinds)
        return uses if uses and alike else ()

    def _positions(self, products: tuple[str, ...], adapter: Adapter, value: Tensor) -> int:
        """The number of positions per sample at which the products act, the largest over trials."""
        rows = max(1, adapter.matrix(value)[:, :, 0].numel())
        return max(
            sum(trial.shapes[product].numel() for product in products) // (trial.n * rows) for trial in self.trials
        )


def parts_of(weights: Mapping[str, Weight], heads: HeadFinder) -> dict[str, Weight]:
    """Return the projections and heads of attention as weights, by name, in the order of `weights`.

    `attn.qkv/query` has the rows of all queries in the weight of `attn.qkv`, `attn.qkv/query/0` those of the first
    head, and `attn.proj/output/0` the columns that read its values. A part that would be the whole weight is left out.
    """
    owners = {w.parameter: w for w in weights.values() if w.parameter is not None and w.adapter.token_wise}
    found: dict[str, dict[str, set[tuple[int, ...]]]] = {name: {} for name in weights}
    sides = [("query", pair.left) for pair in heads.queries] + [("key", pair.right) for pair in heads.queries]
    sides += [("value", pair.left) for pair in heads.values] + [("output", pair.right) for pair in heads.values]
    for kind, side in sides:
        for entries in side:
            if (weight := owners.get(entries.parameter)) is not None and weight.has_derivative:
                # the rows of the matrix that make a head's features, or the columns that read them
                stored = torch.zeros(weight.value.shape, dtype=torch.bool)
                stored.view(-1)[entries.at[:, 0].cpu()] = True
                at = weight.adapter.matrix(stored)[0].any(int(kind != "output")).nonzero()[:, 0]
                found[weight.layer].setdefault(kind, set()).add(tuple(at.tolist()))
    parts: dict[str, Weight] = {}
    for name, kinds in found.items():
        for kind, indices in kinds.items():
            each = sorted(indices)
            named = {f"{name}/{kind}": tuple(sorted(set().union(*each)))}
            named |= {f"{name}/{kind}/{number}": one for number, one in enumerate(each)}
            axis = 2 if kind == "output" else 1
            whole = replace(weights[name], part_of=name, bias=None, bias_value=None)
            for part, one in named.items():
                if len(one) < whole.matrix.W.shape[axis] and not (part.endswith("/0") and len(each) == 1):
                    rows, columns = (torch.tensor(one), None) if axis == 1 else (None, torch.tensor(one))
                    parts[part] = replace(whole, layer=part, rows=rows, columns=columns)
    return parts


_ATTENDS = ("SoftmaxBackward0", "SafeSoftmaxBackward0")  #: nodes of which attention in plain operations has one


def _fused_alike(
    problem: Problem, model: nn.Module, plan: Plan, batches: list[Batch], proofs: Sequence[Certificate]
) -> bool:
    """Return whether torch's fused attention has the same plan and, on the trials, the same derivatives.

    On a processor alone: other kernels multiply in less than float32.
    """
    if device_of(model).type != "cpu" or problem.arithmetic != "full" or plan.unexplained:
        return False
    once, rtol = problem.measuring(model, twice=False, plain=True), Checker(problem, model, plan).rtol
    try:
        with clear_autograd_errors(), once, differentiable(model.parameters()):
            pairs = zip(batches, proofs, strict=True)
            return all(_fused_on(Trial(problem, model, batch), batch, plan, proof, rtol) for batch, proof in pairs)
    except (PlanBroken, RuntimeError):
        return False


def _fused_on(trial: Trial, batch: Batch, plan: Plan, proof: Certificate, rtol: float) -> bool:
    plan.require_same(trial.tape, trial.inputs, batch)
    fused = any(node.name().startswith("ScaledDotProduct") for node in trial.tape.graph.nodes)
    if not fused or (plan.ignores_padding and not trial.ignores_padding):
        return False
    # the derivatives that plain operations have
    watched = watched_places(trial.tape, plan, [], trial.n, ())
    at = {name: place.at for name, place in watched.items() if name in proof.raw}
    found = torch.autograd.grad(trial.f, list(at.values()), proof.u, allow_unused=True)
    for name, own in zip(at, found, strict=True):
        plain = proof.raw[name]
        if own is None or plain is None:
            if own is not plain:
                return False
        elif not vector_norm(own - plain) <= rtol * vector_norm(plain):
            return False
    return True


def proved(
    problem: Problem, model: nn.Module, plan: Plan, trial: Trial, generator: torch.Generator
) -> tuple[Certificate, list[str]]:
    """Return a random combination of a trial's outputs, and the parameters' places where its gradient is wrong."""
    tape, n, named = trial.tape, trial.n, dict[str, Tensor](model.named_parameters())
    weights = [w for w in plan.weights.values() if w.products]
    of_weights = (name for w in weights for name in (w.parameter, w.bias) if name)
    names = dict.fromkeys((*plan.small_parameters, *plan.derived, *of_weights))
    watched = watched_places(tape, plan, [], n, ())
    proof = certificate_of(trial.f, watched, {name: named[name] for name in names}, generator)
    rebuilt = ForwardPass(plan, tape, named, n, kept_by(plan, tape, n)).rebuilt(proof.totals, weights=True)
    same = zip(rebuilt, Checker(problem, model, plan).same_gradients(proof, rebuilt), strict=True)
    # if a parameter's first place is distrusted, the parameter becomes unexplained
    return proof, [plan.uses(tape, name)[0][1] for name, right in same if not bool(right)]
