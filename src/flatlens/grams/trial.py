"""One trial run on a few samples: what every tensor's gradient says of the network's wiring."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from flatlens.errors import BadModel
from flatlens.grams.linearity import affine_downstream
from flatlens.grams.record import Call, run_recorded
from flatlens.problem import Batch, LinearLayer, Problem
from flatlens.problem.layers import affine_gradient, as_stored, by_position, by_sample, neurons, normalised, patches
from flatlens.problem.sequences import unpadded


def stored(module: nn.Module, name: str, otherwise: object = None) -> object:
    """A parameter kept as such; a reparametrised weight is made anew at each look and is none."""
    kept = module._parameters.get(name)
    return otherwise if kept is None else kept


def without_padding(call: Call, slope: Tensor) -> Tensor:
    """Slopes at an embedding's output (..., ids' shape, D), zero at the one id that it never trains."""
    assert isinstance(call.module, nn.Embedding)
    padding = call.module.padding_idx
    return slope if padding is None else slope * torch.ne(call.x, padding)[..., None].to(slope)


class Trial:
    """Slopes of sample 0 alone, which tell the sample axes, and of a random combination of all outputs, which must
    add up."""

    def __init__(self, problem: Problem, model: nn.Module, batch: Batch, generator: torch.Generator) -> None:
        self.tape, self.inputs, self.f, _ = run_recorded(problem, model, batch)
        if not self.f.requires_grad:
            raise BadModel(
                "Problem(model=...): the outputs do not depend differentiably on any input or weight: is there a "
                "torch.no_grad() or detach() inside forward()?"
            )
        self.n = len(self.f)
        self.embeds = bool(self.tape.embedded) and self.inputs == self.tape.embedded[:1]
        self.calls: dict[str, Call] = {call.key: call for call in self.tape.calls()}
        self.parameters = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
        u = torch.randn(self.f.shape, generator=generator).to(self.f)
        self.lookups = self.tape.lookups
        z = [call.z for call in (*self.calls.values(), *self.lookups.values())]
        self.first = dict(zip([*self.calls, *self.lookups], _slopes((u[0] * self.f[0]).sum(), z), strict=True))
        x = [call.x for call in self.calls.values()]
        wanted = [*z, *x, *self.inputs, *self.parameters.values()]
        self.total = (u * self.f).sum()
        slopes = iter(_slopes(self.total, wanted))
        self.at_z = {key: next(slopes) for key in (*self.calls, *self.lookups)}
        self.at_x = {key: next(slopes) for key in self.calls}
        self.at_inputs = [next(slopes) for _ in self.inputs]
        self.at_parameters = {name: next(slopes) for name in self.parameters}
        self.connected = {number for number, slope in enumerate(self.at_inputs) if slope is not None}
        self.at_input = [slope for slope in self.at_inputs if slope is not None]

    def axis(self, key: str) -> int | Literal["silent", "mixed"]:
        """The axis on which only sample 0 has a slope: 0 (perhaps folded with others), or 1 (tokens first)."""
        slope = self.first[key]
        if slope is None or not bool(slope.any()):
            return "silent"
        if slope.shape[0] % self.n == 0 and not bool(slope.reshape(self.n, -1)[1:].any()):
            return 0
        if slope.ndim > 2 and slope.shape[1] == self.n and not bool(slope[:, 1:].any()):
            return 1
        return "mixed"

    def rebuild(self, module: LinearLayer, axes: dict[str, int]) -> tuple[Tensor, Tensor, float]:
        """The gradients of weight and bias that the calls' slopes and inputs imply; and the bias's rounding, of terms
        that cancel: those of attention's keys do, at every input."""
        weight, bias = torch.zeros_like(module.weight), module.weight.new_zeros(neurons(module))
        rounding = 0.0
        for key, axis in axes.items():
            slope, call = self.at_z[key], self.calls[key]
            if slope is not None:
                J = by_position(module, by_sample(slope, axis), self.n)
                phi = patches(module, by_sample(call.read, axis), self.n)
                weight = weight + as_stored(module, torch.einsum("ngdp,ngmp->gdm", J, phi))
                bias = bias + J.sum((0, 3)).flatten()
                rounding += float(J.norm()) * (len(J) * J.shape[3]) ** 0.5 * torch.finfo(J.dtype).eps
        return weight, bias, rounding

    def explains(self, parameter: str | None, rebuilt: Tensor, rounding: float = 0.0) -> bool:
        """Whether autograd finds the same gradient, or none beyond rounding."""
        if parameter is None:
            return False
        true = self.at_parameters[parameter]
        true = torch.zeros_like(rebuilt) if true is None else true
        tolerance = 1e-9 if true.dtype == torch.float64 else 1e-3
        return float((true - rebuilt).norm()) <= max(tolerance * float(true.norm()), rounding)

    def looks_up(self, key: str) -> str | None:
        """The parameter of an embedding's call whose ids go sample by sample, (n, ...)."""
        call = self.lookups[key]
        names = {id(p): name for name, p in self.parameters.items()}
        apart = call.x.ndim > 0 and len(call.x) == self.n and self.axis(key) in (0, "silent")
        return names.get(id(stored(call.module, "weight"))) if apart else None

    def explains_lookups(self, parameter: str, keys: list[str]) -> bool:
        """Whether the slopes at these calls, each added to its id's row, are the parameter's gradient."""
        rebuilt = torch.zeros_like(self.parameters[parameter])
        for key in keys:
            call, slope = self.lookups[key], self.at_z[key]
            if slope is not None:
                rebuilt.index_add_(0, call.x.flatten(), without_padding(call, slope).reshape(-1, rebuilt.shape[1]))
        return self.explains(parameter, rebuilt)

    def explained_norm(self, key: str) -> tuple[str, str | None] | None:
        """Names of a norm's affine weight and bias, if its slopes imply their gradients."""
        call, slope = self.calls[key], self.at_z[key]
        slope = torch.zeros_like(call.z) if slope is None else slope
        names = {id(p): name for name, p in self.parameters.items()}
        rows = (slope * normalised(call.module, call.read), slope)
        found: list[str | None] = []
        for part, row in zip(("weight", "bias"), rows, strict=True):
            kept = stored(call.module, part)
            name = names.get(id(kept))
            gradient = affine_gradient(call.module, row, self.n).sum(0)
            known = isinstance(kept, Tensor) and self.explains(name, gradient.reshape(kept.shape))
            found.append(name if known else None)
        return None if found[0] is None else (found[0], found[1])

    def is_input(self, key: str, axis: int) -> bool:
        """Whether this call reads the network's input as it is, and its slope there is the network's own."""
        if len(self.at_input) != 1 or key not in self.tape.linear or axis != 0:
            return False
        (number,) = self.connected
        if not torch.equal(self.calls[key].x.flatten(), self.inputs[number].flatten()):  # shifted, say
            return False
        mine, whole = self.at_x[key], self.at_input[0]
        return mine is not None and mine.numel() == whole.numel() and torch.equal(mine.flatten(), whole.flatten())

    @property
    def hides_padding(self) -> bool:
        """Whether nothing flows back to the features of padded tokens, at any call and at the input."""
        mask = self.tape.mask
        if mask is None:
            return False
        slopes = [*self.at_x.values(), *self.at_inputs]
        return all(slope is None or torch.equal(unpadded(slope, mask), slope) for slope in slopes)

    def responds(self, key: str) -> bool:
        """Whether anything at all flows back to this call's input."""
        mine = self.at_x[key]
        return mine is not None and bool(mine.any())

    def affine(self, generator: torch.Generator) -> frozenset[str]:
        """Linear calls whose pre-activation the outputs are affine in, as far as these samples show."""
        return affine_downstream(self.tape, self.total, generator)


def _slopes(of: Tensor, at: list[Tensor]) -> list[Tensor | None]:
    """Gradients, dense; None where nothing depends on a tensor."""
    grads = torch.autograd.grad(of, at, retain_graph=True, allow_unused=True) if at else ()
    return [g.to_dense() if g is not None and g.is_sparse else g for g in grads]
