"""The weights of a plan: of linear layers, and of parameters that multiply outside them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvTransposeNd

from flatlens.grams.facts import AgreedFacts
from flatlens.grams.layout import Weight
from flatlens.grams.record import Call, made_reads
from flatlens.operations.layers import Adapter, layer_of
from flatlens.operations.made import matrix_in_products
from flatlens.operations.reads import Bias, Product


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
