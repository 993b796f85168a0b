"""The plan of a pass: which parameter is explained by which layer, and what is where.

It is read off small trial runs on the problem's probes and checked against autograd there. A weight belongs to a linear
layer only if the gradient rebuilt from the layer's calls equals autograd's. What does not (used through a bare
function as attention's projections are, tied to an embedding, reparametrised) is left over: it still counts in every
sum over parameters, through per-sample autograd, under its own name.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from flatlens.errors import BadModel
from flatlens.grams.record import Tape
from flatlens.grams.trial import Trial, stored
from flatlens.grams.weight import WeightMatrix
from flatlens.problem import LinearLayer, Problem, is_linear, measuring
from flatlens.problem.layers import is_token_wise, matrix, neurons
from flatlens.problem.operator_norm import operator_norm
from flatlens.problem.sequences import unpadded
from flatlens.problem.state import differentiable


@dataclass(frozen=True, eq=False)
class Weight:
    """The weight tensor of a linear layer, its calls and what of it counts in sums over parameters."""

    layer: str
    module: LinearLayer
    calls: tuple[str, ...]
    parameter: str | None  #: None where the weight is not a parameter of the model, or not of this layer alone
    bias: str | None
    explained: bool  #: whether the weight acts through these calls and nothing else
    dense: bool  #: applied once per sample, at one position
    positions: int  #: per sample, over all its calls
    input_size: torch.Size  #: of what one call reads of one sample
    measured: bool = True  #: whether it is among the problem's parameters: a frozen one is not

    @cached_property
    def matrix(self) -> WeightMatrix:
        """W as (g, d, m), and the bias, in float64."""
        b = self.module.bias
        bias = None if b is None else b.detach().to(torch.float64)
        return WeightMatrix(matrix(self.module).detach().to(torch.float64), bias)

    @cached_property
    def spectral_norm(self) -> float:
        """||W||_2 of the map from one sample's input to its output; of a convolution, of the operator, not its
        kernel."""
        tolerance = 1e-10 if self.input_size.numel() <= 4096 else 1e-6  # of the square: its error is that squared
        return operator_norm(self.module, self.input_size, tolerance)


GRAMS = 2 * 5 * 8  #: bytes of G, R, K and its two parts, a number each, of two chunks: one dies when the next is there


@dataclass(frozen=True, eq=False)
class Layout:
    """The plan of a pass over one network."""

    weights: dict[str, Weight]  #: by layer, in execution order
    norms: dict[str, tuple[str, str | None]]  #: norm call -> names of its affine weight and bias
    lookups: dict[str, tuple[str, ...]]  #: weight of an embedding -> its calls, where they are all it does
    leftovers: tuple[str, ...]  #: parameters that go through per-sample autograd
    batch_axis: dict[str, int]  #: per call: which axis counts samples
    inputs: tuple[int, ...]  #: which of the floating tensors fed in the outputs depend on
    input_is_embedded: bool  #: token ids go in, so the input is what the first embedding makes of them
    input_is: str | None  #: the one call whose input is the network's input, if there is one
    affine: frozenset[str]  #: layers whose pre-activation the outputs are (piecewise) affine in
    affine_norms: frozenset[str]  #: and norms, called once, whose output they are affine in
    held: int  #: numbers that the calls read and give, per sample
    sloped: int  #: bytes of one output's slopes at all of these, per sample
    unexplained: int  #: entries of the parameters left over
    itemsize: int  #: bytes of a number in the network's arithmetic
    hides_padding: bool  #: whether what an attention_mask calls padding has no effect: its features do not count

    def bytes_per_sample(self, rows: int) -> int:
        """Of a pass over so many outputs: their slopes, the graph's activations, gradients of the leftovers, Grams."""
        leftovers = self.unexplained * rows * (8 + 2 * self.itemsize)
        return rows * self.sloped + 6 * self.itemsize * self.held + leftovers + GRAMS * rows**2 * len(self.weights)

    def samples_at_once(self, memory: int, rows: int, needs: Collection[str] = ()) -> int:
        """How many samples' pass over so many outputs fits in `memory` bytes, beside what does not grow with them.

        That is the weights in float64 with their row factors, and each diagonal twice: a chunk's and the sum so far.
        """
        sizes = [weight.matrix.W.shape for weight in self.weights.values()]
        entries, factors = sum(g * d * m for g, d, m in sizes), sum(g * d * min(d, m) for g, d, m in sizes)
        fixed = 8 * (entries + factors + 2 * entries * sum("diagonal" in what for what in needs))
        return max(1, (memory - fixed) // max(1, self.bytes_per_sample(rows)))

    def unpadded(self, x: Tensor, tape: Tape) -> Tensor:
        """Features with their samples in front, those of padding zero."""
        return unpadded(x, tape.mask if self.hides_padding else None)

    def last(self) -> str | None:
        """The last linear layer."""
        return next(reversed(self.weights), None)

    def require_same(self, tape: Tape, n: int) -> None:
        """Refuse a batch on which the network does something else than on the probes."""
        calls = {**tape.linear, **tape.norms}
        for key, axis in self.batch_axis.items():
            if key not in calls or calls[key].z.shape[axis] % n:
                raise BadModel(
                    f"Problem(model=...): layer call {key!r} does not see every sample of every batch: routing, "
                    f"packing or loops that depend on the data cannot be measured per sample; pad to one length, or "
                    f"measure each kind apart"
                )
        for keys in self.lookups.values():
            name = keys[0].partition(":")[0]
            found = [key for key, call in tape.lookups.items() if call.name == name]
            if found != list(keys) or any(len(tape.lookups[key].x) != n for key in keys):
                raise BadModel(
                    f"Problem(model=...): embedding {name!r} is called {len(found)} times on some batches and "
                    f"{len(keys)} on others, or not on every sample: pad the data to one length"
                )
        for weight in self.weights.values():
            made = sum(call.module is weight.module for call in tape.linear.values())
            if weight.explained and made > sum(tape.linear[key].module is weight.module for key in weight.calls):
                raise BadModel(
                    f"Problem(model=...): {weight.layer!r} is called {made} times on some batches and fewer on others: "
                    f"pad the data to one length"
                )


def lay_out(problem: Problem, model: nn.Module) -> Layout:
    """Run the network on the probes and see what is where."""
    generator = torch.Generator().manual_seed(0)
    with measuring(model), differentiable(model.parameters()):  # frozen ones too, so that none has to be believed
        trials = [Trial(problem, model, problem.place(probe), generator) for probe in problem.probes]
        axes = _axes(trials)
        weights = _weights(problem, model, trials, axes)
        norms = _norms(trials, axes)
        lookups = _lookups(trials)
        affine = frozenset.intersection(*(trial.affine(generator) for trial in trials))
    claimed = {name for w in weights.values() for name in (w.parameter, w.bias) if name}
    claimed |= {name for names in norms.values() for name in names if name} | set(lookups)
    sizes = {name: p.numel() for name, p in model.named_parameters() if name in problem.parameters}
    leftovers = tuple(name for name in sizes if name not in claimed)
    watched = [*trials[0].calls.values(), *trials[0].lookups.values()]
    alone = (key for key in axes if all(trial.is_input(key, axes[key]) for trial in trials))
    return Layout(
        weights=weights,
        norms=norms,
        lookups={name: calls for name, calls in lookups.items() if name in sizes},
        leftovers=leftovers,
        batch_axis=axes,
        inputs=tuple(sorted(set().union(*(trial.connected for trial in trials)))),
        input_is_embedded=any(trial.embeds for trial in trials),
        input_is=next((key for key in alone if any(trial.responds(key) for trial in trials)), None),
        affine_norms=frozenset(call for call in norms if call in affine and _called_once(call, norms)),
        affine=frozenset(name for name, w in weights.items() if w.calls == (name,) and w.explained and name in affine),
        held=sum(call.x.numel() + call.z.numel() for call in watched) // trials[0].n,
        sloped=sum(call.z.nbytes + call.x.nbytes * is_linear(call.module) for call in watched) // trials[0].n,
        unexplained=sum(sizes[name] for name in leftovers),
        itemsize=trials[0].f.element_size(),
        hides_padding=all(trial.hides_padding for trial in trials),
    )


def _axes(trials: list[Trial]) -> dict[str, int]:
    """Per call: the sample axis on which all trials agree; 0 where no trial responds there."""
    found: dict[str, int] = {}
    for key in trials[0].calls:
        if all(key in trial.calls for trial in trials):
            seen = {trial.axis(key) for trial in trials} - {"silent"}
            axis = seen.pop() if seen else 0
            if not seen and isinstance(axis, int) and all(t.calls[key].z.shape[axis] % t.n == 0 for t in trials):
                found[key] = axis
    return found


def _weights(problem: Problem, model: nn.Module, trials: list[Trial], axes: dict[str, int]) -> dict[str, Weight]:
    """Linear layers by weight tensor, in execution order."""
    names = {id(p): name for name, p in model.named_parameters()}
    together: dict[int, list[str]] = {}
    for key, call in trials[0].tape.linear.items():
        if key in axes:
            together.setdefault(id(stored(call.module, "weight", call.module)), []).append(key)
    weights = {}
    for keys in together.values():
        first = trials[0].calls[keys[0]]
        module = first.module
        assert is_linear(module)
        modules = [trials[0].calls[key].module for key in keys]
        rebuilt = [trial.rebuild(module, {key: axes[key] for key in keys}) for trial in trials]
        parameter, bias = names.get(id(stored(module, "weight"))), names.get(id(stored(module, "bias")))
        whole = parameter
        if not all(trial.explains(parameter, r[0]) for trial, r in zip(trials, rebuilt, strict=True)):
            parameter = None
        tied_alone = any(m.bias is not module.bias for m in modules)  # a tied weight may have several biases
        if tied_alone or not all(trial.explains(bias, r[1], r[2]) for trial, r in zip(trials, rebuilt, strict=True)):
            bias = None
        dense = len(keys) == 1 and is_token_wise(module) and first.z.numel() == trials[0].n * neurons(module)
        explained = parameter is not None or _is_reparametrised(module)
        positions = sum(trials[0].calls[key].z.numel() for key in keys) // (trials[0].n * neurons(module))
        measured = whole is None or whole in problem.parameters
        weights[keys[0]] = Weight(
            keys[0], module, tuple(keys), parameter, bias, explained, dense, positions, first.x.shape[1:], measured
        )
    return weights


def _is_reparametrised(module: nn.Module) -> bool:
    """Whether the weight is made from other parameters by torch's own weight or spectral norm."""
    return nn.utils.parametrize.is_parametrized(module, "weight") or any(
        hasattr(module, f"weight_{part}") for part in ("g", "orig")
    )


def _norms(trials: list[Trial], axes: dict[str, int]) -> dict[str, tuple[str, str | None]]:
    """Norm calls whose affine map is explained on every trial."""
    found = {}
    for key in trials[0].tape.norms:
        if axes.get(key) == 0 and all(len(trial.calls[key].z) == trial.n for trial in trials):
            names = [trial.explained_norm(key) for trial in trials]
            if names[0] is not None and all(name == names[0] for name in names):
                found[key] = names[0]
    return found


def _lookups(trials: list[Trial]) -> dict[str, tuple[str, ...]]:
    """Embeddings whose calls explain their weight's gradient on every trial."""
    together: dict[str, list[str]] = {}
    for key in trials[0].lookups:
        names = {trial.looks_up(key) if key in trial.lookups else None for trial in trials}
        name = names.pop()
        if name is not None and not names:
            together.setdefault(name, []).append(key)
    return {
        name: tuple(keys)
        for name, keys in together.items()
        if len({id(trials[0].lookups[key].module) for key in keys}) == 1
        and all(trial.explains_lookups(name, keys) for trial in trials)
    }


def _called_once(call: str, norms: dict[str, tuple[str, str | None]]) -> bool:
    """Whether no other call uses the norm's parameters."""
    return sum(names[0] == norms[call][0] for names in norms.values()) == 1
