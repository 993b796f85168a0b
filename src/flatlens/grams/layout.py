"""Which parameter is explained by which layer: found by one small trial run, and checked against autograd there.

A weight belongs to a linear layer only if the gradient rebuilt from the layer's calls equals autograd's. What does
not (used through a bare function as attention's projections are, tied to an embedding, reparametrised) is left over:
it still counts in every sum over parameters, through per-sample autograd, under its own name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from flatlens.errors import BadModel
from flatlens.grams.linearity import affine_downstream
from flatlens.grams.record import Call, Tape, run_recorded
from flatlens.grams.shared import WeightMatrix
from flatlens.problem import LinearLayer, Problem, is_linear, measuring
from flatlens.problem.data import size, take
from flatlens.problem.layers import affine_gradient, by_position, matrix, normalised, patches

TRIAL = 4  #: samples in the trial run


@dataclass(frozen=True, eq=False)
class Weight:
    """The weight tensor of a linear layer, its calls and what of it counts in sums over parameters."""

    layer: str
    module: LinearLayer
    calls: tuple[str, ...]
    parameter: str | None  #: None where the weight is not a parameter of the model, or not of this layer alone
    bias: str | None
    dense: bool  #: applied once per sample, at one position

    @cached_property
    def matrix(self) -> WeightMatrix:
        """W as (g, d, m) in float64."""
        return WeightMatrix(matrix(self.module).detach().to(torch.float64))


@dataclass(frozen=True, eq=False)
class Layout:
    """The plan of a pass over one network."""

    weights: dict[str, Weight]  #: by layer, in execution order
    norms: dict[str, tuple[str, str | None]]  #: norm call -> names of its affine weight and bias
    leftovers: tuple[str, ...]  #: parameters that go through per-sample autograd
    batch_axis: dict[str, int]  #: per call: which axis counts samples
    input_is: str | None  #: the one call whose input is the network's input, if there is one
    affine: frozenset[str]  #: layers whose pre-activation the outputs are (piecewise) affine in
    bytes_per_sample: int

    def last(self) -> str | None:
        """The last linear layer."""
        return next(reversed(self.weights), None)


def by_sample(call_tensor: Tensor, axis: int) -> Tensor:
    """The tensor with its sample axis in front."""
    return call_tensor.movedim(axis, 0)


def lay_out(problem: Problem, model: nn.Module) -> Layout:
    """Run the network on a few samples and see what is where."""
    raw = next(problem.data.chunks(TRIAL))
    batch = problem.place(take(raw, 0, TRIAL))
    n = size(batch)
    generator = torch.Generator().manual_seed(0)
    with measuring(model):
        tape, inputs, f, _ = run_recorded(problem, model, batch)
        if not f.requires_grad:
            raise BadModel(
                "Problem(model=...): the outputs do not depend differentiably on any input or weight: is there a "
                "torch.no_grad() or detach() inside forward()?"
            )
        u = torch.randn(f[0].shape, generator=generator).to(f)
        trial = _Trial(model, tape, inputs, f, u, n)
        weights, claimed = trial.weights()
        norms = trial.norms(claimed)
        chosen = [name for name in dict(model.named_parameters()) if name in problem.parameters]
        affine = affine_downstream(tape, f, generator)
    return Layout(
        weights=weights,
        norms=norms,
        leftovers=tuple(name for name in chosen if name not in claimed),
        batch_axis=trial.axes,
        input_is=trial.input_is(),
        affine=frozenset(layer for layer, w in weights.items() if w.calls == (layer,) and layer in affine),
        bytes_per_sample=_bytes_per_sample(tape, f, n),
    )


def _bytes_per_sample(tape: Tape, f: Tensor, n: int) -> int:
    """Buffers of all N slopes at every call (float64 at worst), and the graph's activations."""
    held = sum(call.x.numel() + call.z.numel() for call in tape.calls()) // n
    return held * (8 * f.shape[1] + 6 * f.element_size())


class _Trial:
    """One backward pass of <u, f(x_0)>: slopes at every call and parameter."""

    def __init__(self, model: nn.Module, tape: Tape, inputs: list[Tensor], f: Tensor, u: Tensor, n: int) -> None:
        self.tape, self.inputs, self.n = tape, inputs, n
        self.named = {id(p): name for name, p in model.named_parameters()}
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.calls = tape.calls()
        wanted = [*[c.z for c in self.calls], *[c.x for c in self.calls], *inputs, *self.parameters.values()]
        grads = torch.autograd.grad((f[0] * u).sum(), wanted, retain_graph=True, allow_unused=True)
        slopes = [torch.zeros_like(at) if g is None else g for at, g in zip(wanted, grads, strict=True)]
        k = len(self.calls)
        self.at_z = {c.key: s for c, s in zip(self.calls, slopes, strict=False)}
        self.at_x = {c.key: s for c, s in zip(self.calls, slopes[k:], strict=False)}
        self.at_inputs = slopes[2 * k : 2 * k + len(inputs)]
        self.at_parameters = dict(zip(self.parameters, slopes[2 * k + len(inputs) :], strict=True))
        self.axes = {c.key: axis for c in self.calls if (axis := self._batch_axis(c)) is not None}

    def _batch_axis(self, call: Call) -> int | None:
        """The axis on which only sample 0 has a slope: 0 (perhaps folded with others), or 1 (tokens first)."""
        slope = self.at_z[call.key]
        if slope.shape[0] % self.n == 0 and not bool(slope.reshape(self.n, -1)[1:].any()):
            return 0
        if slope.ndim > 2 and slope.shape[1] == self.n and not bool(slope[:, 1:].any()):
            return 1
        return None

    def weights(self) -> tuple[dict[str, Weight], set[str]]:
        """Linear layers by weight tensor, and the names of the parameters they explain."""
        together: dict[int, list[Call]] = {}
        for call in self.tape.linear.values():
            if call.key in self.axes:
                together.setdefault(id(_stored(call.module)), []).append(call)
        weights, claimed = {}, set()
        for calls in together.values():
            module = calls[0].module
            assert is_linear(module)
            rebuilt, rebuilt_bias = self._rebuild(module, calls)
            parameter = self._explained(_stored(module), rebuilt)
            shared_bias = all(c.module.bias is module.bias for c in calls)  # a tied weight may have several biases
            bias = self._explained(module.bias, rebuilt_bias) if shared_bias and module.bias is not None else None
            claimed |= {name for name in (parameter, bias) if name}
            dense = (
                len(calls) == 1 and isinstance(module, nn.Linear) and calls[0].z.numel() == self.n * module.out_features
            )
            weights[calls[0].key] = Weight(calls[0].key, module, tuple(c.key for c in calls), parameter, bias, dense)
        return weights, claimed

    def _rebuild(self, module: LinearLayer, calls: list[Call]) -> tuple[Tensor, Tensor]:
        """The gradients of weight and bias that the calls' slopes and inputs imply."""
        weight, bias = torch.zeros_like(module.weight), module.weight.new_zeros(len(module.weight))
        for call in calls:
            axis = self.axes[call.key]
            J = by_position(module, by_sample(self.at_z[call.key], axis), self.n)
            phi = patches(module, by_sample(call.x.detach(), axis), self.n)
            weight += torch.einsum("ngdp,ngmp->gdm", J, phi).reshape(weight.shape)
            bias += J.sum((0, 3)).flatten()
        return weight, bias

    def _explained(self, parameter: Tensor | None, rebuilt: Tensor) -> str | None:
        """The parameter's name if autograd finds the same gradient; a frozen one cannot be asked and is believed."""
        name = self.named.get(id(parameter))
        if name is None or name not in self.at_parameters:
            return name
        true = self.at_parameters[name]
        tolerance = 1e-3 if true.dtype == torch.float32 else 1e-9
        return name if float((true - rebuilt).norm()) <= tolerance * float(true.norm()) else None

    def norms(self, claimed: set[str]) -> dict[str, tuple[str, str | None]]:
        """Norm calls whose affine map is explained; their parameters join `claimed`."""
        found: dict[str, tuple[str, str | None]] = {}
        for call in self.tape.norms.values():
            if self.axes.get(call.key) != 0 or len(call.z) != self.n:
                continue
            slope, module = self.at_z[call.key], call.module
            weight = affine_gradient(module, slope * normalised(module, call.x.detach()), self.n).sum(0)
            bias = affine_gradient(module, slope, self.n).sum(0)
            affine = ((module._parameters["weight"], weight), (module._parameters["bias"], bias))
            names = [None if p is None else self._explained(p, g.reshape(p.shape)) for p, g in affine]
            if names[0] is not None:
                found[call.key] = (names[0], names[1])
                claimed |= {name for name in names if name}
        return found

    def input_is(self) -> str | None:
        """The call that alone reads the network's input, its slope there being the network's own."""
        if len(self.inputs) != 1:
            return None
        slope = self.at_inputs[0].flatten()
        for key in self.tape.linear:
            mine = self.at_x[key]
            if (
                self.axes.get(key) == 0
                and mine.numel() == slope.numel()
                and bool(slope.any())
                and torch.equal(mine.flatten(), slope)
            ):
                return key
        return None


def _stored(module: nn.Module) -> Tensor | None:
    """The weight as a parameter; a reparametrised weight is made anew at each look and is none."""
    return module._parameters.get("weight") if "weight" in module._parameters else None
