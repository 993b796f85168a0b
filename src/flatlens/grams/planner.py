"""Making the plan of a pass from trials on a few samples: it claims what all of them show."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from flatlens.grams.broken import BATCHING, clear_autograd_errors
from flatlens.grams.layout import Layout, Weight
from flatlens.grams.proof import unproved
from flatlens.grams.record import Call
from flatlens.grams.rows import Rows
from flatlens.grams.structure import Structure, common_structure
from flatlens.grams.trial import Trial
from flatlens.operations.layers import Adapter, layer_of
from flatlens.operations.reads import Bias, Entrywise, Lookup, Product
from flatlens.problem import Batch, Problem, measuring
from flatlens.problem.state import differentiable


def lay_out(problem: Problem, model: nn.Module, also: Iterable[Batch] = (), distrusted: Collection[str] = ()) -> Layout:
    """Run the network on the probes, and on placed batches `also`, and see what is where.

    Places that are `distrusted` are not assumed to have any arrangement of samples; with `BATCHING` among them backward
    passes are taken one by one.
    """
    generator = torch.Generator().manual_seed(0)
    # differentiable, so that the graph shows frozen parameters, too
    with clear_autograd_errors(), measuring(model), differentiable(model.parameters()):
        batches = [*(problem.place(probe) for probe in problem.probes), *also]
        trials = [Trial(problem, model, batch) for batch in batches]
        structure = common_structure(trial.structure for trial in trials)
        for trial in trials:
            trial.find_rows(structure, generator)
        layout = _Planner(problem, model, trials, structure, distrusted).plan()
        wrong = {place for trial in trials for place in unproved(problem, model, layout, trial, generator)}
        return layout if not wrong else _Planner(problem, model, trials, structure, {*distrusted, *wrong}).plan()


class _Planner:
    """Makes a plan of what all trials agree on."""

    def __init__(
        self,
        problem: Problem,
        model: nn.Module,
        trials: list[Trial],
        structure: Structure,
        distrusted: Collection[str],
    ) -> None:
        self.problem, self.trials, self.first, self.structure = problem, trials, trials[0], structure
        self.distrusted = distrusted
        self.parameters = {name: p for name, p in model.named_parameters() if name in self.first.tape.reads}
        places = [name for name in self.first.rows if not name.startswith("input:") and name not in distrusted]
        found = {name: self._rows(name) for name in places}
        self.rows = {name: rows for name, rows in found.items() if rows is not None}

    def _rows(self, name: str) -> Rows | None:
        """Return the first arrangement of a place's samples that every trial with this place allows."""
        allowed = [trial.rows[name] for trial in self.trials if name in trial.rows]
        return next((rows for rows in allowed[0] if all(rows in others for others in allowed)), None)

    def plan(self) -> Layout:
        """Put together what every trial shows."""
        self.axes, self.unplaced = self._axes()
        weights = self._weights()
        of_layers = {name for w in weights.values() if w.products for name in (w.parameter, w.bias) if name}
        outside: dict[str, Weight] = {}
        small: dict[str, tuple[str, ...]] = {}  # with the names of their operations
        embeddings: dict[str, tuple[str, ...]] = {}
        for name in self.parameters:
            slots = None if name in of_layers else self._slots(name)
            if slots is None or name not in self.problem.parameters:
                continue
            kinds = {type(read) for read in self.first.tape.reads[name] or ()}
            if kinds == {Product}:
                if (found := self._outside(name)) is not None:
                    outside[name] = found
            elif kinds == {Lookup}:
                embeddings[name] = slots
            elif kinds <= {Bias, Entrywise}:
                small[name] = slots
        known = of_layers | outside.keys() | small.keys() | embeddings.keys()
        sizes = {name: p.numel() for name, p in self.parameters.items() if name in self.problem.parameters}
        unexplained = tuple(name for name in sizes if name not in known)
        needed = {slot for w in (*weights.values(), *outside.values()) for slot in w.products}
        needed |= {slot for slots in (*small.values(), *embeddings.values()) for slot in slots}
        axes = self.axes
        calls, n = self.first.tape.linear, self.first.n
        shapes = [(op.shape, op.dtype) for name, op in self.first.operations.items() if name in needed]
        shapes += [(calls[key].x.shape, calls[key].x.dtype) for key in axes]
        return Layout(
            structure=self.structure,
            weights=weights,
            outside=outside,
            small_parameters=tuple(small),
            embeddings=tuple(embeddings),
            unexplained=unexplained,
            rows={name: rows for name, rows in self.rows.items() if name in needed},
            batch_axis=axes,
            unplaced=self.unplaced,
            inputs=tuple(sorted(self.structure.inputs)),
            input_is_embedded=any(trial.input_is_embedding for trial in self.trials),
            input_call=self._input_call(axes, weights),
            activation_entries=sum(shape.numel() for shape, _ in shapes) // n,
            jacobian_bytes=sum(shape.numel() * dtype.itemsize for shape, dtype in shapes) // n,
            unexplained_size=sum(sizes[name] for name in unexplained)
            + sum(self.parameters[name].numel() for name in small),
            itemsize=self.first.f.element_size(),
            ignores_padding=all(trial.ignores_padding for trial in self.trials),
            batched=BATCHING not in self.distrusted,
        )

    def _axes(self) -> tuple[dict[str, int], dict[str, str]]:
        """Per call of a layer the axis of its input that counts samples; the other calls, with the reason."""
        axes: dict[str, int] = {}
        unplaced: dict[str, str] = {}
        for key in (*self.structure.calls, *sorted(self.structure.varying_calls)):
            rows = self.rows.get(f"x:{key}")
            if key in self.structure.varying_calls:
                unplaced[key] = "the layer is not called in the same way on every batch"
            elif rows is None or rows.order != "outer":
                unplaced[key] = "its calls do not see every sample of a batch, each by itself, along one axis"
            else:
                axes[key] = rows.axis
        return axes, unplaced

    def _slots(self, parameter: str) -> tuple[str, ...] | None:
        """The operations that a parameter acts through, if all are known and tell samples apart."""
        if self.structure.reads[parameter] is None:
            return None
        slots = tuple(self.first.names[read.node] for read in self.first.tape.reads[parameter] or ())
        return slots if all(slot in self.rows for slot in slots) else None

    def _weights(self) -> dict[str, Weight]:
        """Linear layers by weight tensor, in execution order."""
        together: dict[int, list[str]] = {}
        for key, call in self.first.tape.linear.items():
            kept = call.module._parameters.get("weight")
            together.setdefault(id(call.module if kept is None else kept), []).append(key)
        return {keys[0]: self._weight(keys) for keys in together.values()}

    def _weight(self, keys: list[str]) -> Weight:
        names = {id(p): name for name, p in self.parameters.items()}
        calls = [self.first.tape.linear[key] for key in keys]
        module, parameter = calls[0].module, names.get(id(calls[0].module._parameters.get("weight")))
        value = module.weight
        assert isinstance(value, Tensor)
        own = tuple(f"z:{key}" for key in keys)
        slots = self._products(parameter, value.shape) if parameter is not None else self._products_in_calls(keys)
        explained = bool(slots) and set(slots) == set(own)
        pure = explained and all(call.pure for call in calls)
        operations = [self.first.operations[slot] for slot in slots]
        adapter = operations[0].adapter if operations and isinstance(operations[0], Product) else layer_of(module)
        bias = module.bias
        positions = self._positions(slots, adapter, value)
        return Weight(
            layer=keys[0],
            calls=tuple(keys),
            products=slots,
            adapter=adapter,
            value=value.detach(),
            bias_value=bias.detach() if isinstance(bias, Tensor) else None,
            parameter=parameter,
            bias=self._bias(calls, slots, names) if explained else None,
            explained=explained,
            dense=explained and adapter.token_wise and len(keys) == 1 and positions == 1,
            pure=pure,
            positions=positions,
            module=module,
            linear_map=_linear_map(calls[0], adapter, pure),
            unplaced=next((self.unplaced[key] for key in keys if key in self.unplaced), ""),
            measured=parameter is None or parameter in self.problem.parameters,
        )

    def _positions(self, slots: tuple[str, ...], adapter: Adapter, value: Tensor) -> int:
        """Return the number of positions at which the products act, in the trial that has the most."""
        rows = max(1, adapter.matrix(value)[:, :, 0].numel())
        each = [
            sum(trial.operations[slot].shape.numel() for slot in slots) // (trial.n * rows) for trial in self.trials
        ]
        return max(each)

    def _products(self, parameter: str, stored: torch.Size) -> tuple[str, ...]:
        """The products that a weight acts through, if they are all it does and of one kind; else nothing."""
        slots, reads = self._slots(parameter), self.first.tape.reads[parameter] or ()
        kinds = {(read.adapter, read.stored) for read in reads if isinstance(read, Product)}
        only = all(isinstance(read, Product) for read in reads) and len(kinds) == 1
        return slots if slots and only and all(shape == stored for _, shape in kinds) else ()

    def _products_in_calls(self, keys: list[str]) -> tuple[str, ...]:
        """The products in a layer's calls, whose weight is made from other parameters."""
        slots = tuple(f"z:{key}" for key in keys)
        known = all(self.structure.calls.get(key) is not None and f"z:{key}" in self.rows for key in keys)
        operations = [self.first.operations.get(slot) for slot in slots]
        adapters = {op.adapter if isinstance(op, Product) else None for op in operations}
        return slots if known and len(adapters) == 1 and None not in adapters else ()

    def _bias(self, calls: list[Call], slots: tuple[str, ...], names: dict[int, str]) -> str | None:
        """The name of a layer's bias, if it acts where the layer's products are and nowhere else."""
        biases = {id(call.module._parameters.get("bias")) for call in calls}
        name = names.get(biases.pop())
        if name is None or biases or set(self._slots(name) or ()) != set(slots):
            return None
        return name if all(isinstance(read, Bias) for read in self.first.tape.reads[name] or ()) else None

    def _outside(self, name: str) -> Weight | None:
        """A weight of products alone that is no layer's."""
        reads = self.first.tape.reads[name] or ()
        stored = reads[0].stored if reads and isinstance(reads[0], Product) else torch.Size()
        slots = self._products(name, stored)
        if not slots or not isinstance(reads[0], Product):
            return None
        adapter, value = reads[0].adapter, self.parameters[name].detach().reshape(stored)
        positions = self._positions(slots, adapter, value)
        dense = adapter.token_wise and len(slots) == 1 and positions == 1
        return Weight(name, (), slots, adapter, value, None, name, None, True, dense, False, positions)

    def _input_call(self, axes: dict[str, int], weights: dict[str, Weight]) -> str | None:
        key = self.structure.first
        return key if key is not None and axes.get(key) == 0 and key in weights else None


def _linear_map(call: Call, adapter: Adapter, pure: bool) -> tuple[Adapter, torch.Size]:
    """The linear map that a layer applies: as its operation has it, or, with a padding of its own before that, as torch
    defines the module."""
    torchs_own = type(call.module).__module__.startswith("torch.nn.modules")
    if call.product is not None and not pure and not torchs_own:
        return adapter, call.product.kept().shape[1:]
    return layer_of(call.module), call.x.shape[1:]
