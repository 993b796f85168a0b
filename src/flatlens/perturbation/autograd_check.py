"""Whether autograd's derivative is that of the function: a network may change it, on purpose or by a slip.

Gradient reversal, straight-through estimators and `detach()` do. Differences of outputs over a small step tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import product

import torch
from torch import Tensor, nn

from flatlens.errors import FlatlensError
from flatlens.grams.autograd import Runner
from flatlens.grams.data_pass import random_signs
from flatlens.operations.graph import Graph, sources_of, walk
from flatlens.problem import Batch, Problem
from flatlens.problem.batches import move, size, take
from flatlens.problem.eval_context import copy_of, device_of, differentiable
from flatlens.problem.forward import slopes_of_each
from flatlens.problem.op_overrides import HALF

_STEP = {torch.float32: 1e-4, torch.float64: 1e-6}
"""Length of a step, relative to the length of the weights and to that of the inputs."""
_ASIDE = 0.03  #: how far aside the test takes place, in these units: zero biases and black pixels may lie on kinks
_RANDOM = 4  #: number of random directions
_APART = 0.05  #: smallest difference from autograd's derivative, relative to the larger of both, that counts
_AGREE = 0.2
"""Largest spread of the differences over several steps, relative to their mean, and to its distance from autograd's."""
_ROUNDINGS = 4  #: the same, in roundings of the outputs over the shortest step
_VECTORS = 16  #: vectors as long as the weights, or as the outputs, that the test holds at once
_FEW = 3  #: number of samples on which rounding is looked at
_ROUNDED = 0.01  #: smallest relative change of the derivative by rounding that is worth a word
_ANOTHER = 0.1  #: smallest difference of outputs, relative to the largest, that is not taken for rounding
_SIGHT = 8  #: number of samples on which roughness is looked at
_ROUGH = 2.0**-13  #: roughness over long steps that is bfloat16's; a quarter of it over short ones is a half type's
_FALLS = 0.125  #: share of the roughness over long steps that is left over short ones: more by rounding, less by kinks
_MOVED = 4000  #: weights of which one in some dozens is rounded another way over a short step
_SIDES = ("weights", "inputs")
_FOUND = "the derivative that is not autograd's"
_INSIDE = "the coarsest dtype inside, and fake quantisation"
_ROUNDS = ("FakeQuantize", "FusedMovingAvgObsFq")  #: beginnings of the names of nodes of fake quantisation


def other_derivative(problem: Problem, model: nn.Module) -> tuple[str, str]:
    """Return in words that the derivative in the weights, and in the inputs, is not autograd's; empty if none is found.

    Tested once for a problem, beside its weights and inputs, on at most 8 samples and a random combination of their
    outputs: in the measured weights, then in the inputs, along autograd's gradient and along random directions. Where
    inputs are not floating numbers, the words about weights stand for both. At a kink a difference of outputs is
    another, too: it is believed if it is the same over two steps to each side. Not seen are changes of less than a
    twentieth of the derivative, or that rounding of the outputs hides, operations that jump many times within a step
    (fine rounding), and networks whose weights take a 16th of the problem's memory.
    """
    if _FOUND not in problem.facts:
        told = "", ""
        numbers = sum(p.numel() for p in model.parameters()) + size(problem.probes[0]) * problem.outputs
        held = _VECTORS * numbers * torch.finfo(problem.dtype).bits // 8
        if problem.parameters and not problem.sharded and held <= problem.memory:
            _, told = _inside(problem, model)
            if told == ("", ""):
                # a RuntimeError: it has no derivative, or does not run at other weights
                with suppress(RuntimeError, FlatlensError), problem.measuring(model):
                    words = _Combination(problem, model).words()
                    told = words[0], words[-1]
        problem.facts[_FOUND] = told
    found: tuple[str, str] = problem.facts[_FOUND]
    return found


def coarsest_inside(problem: Problem, model: nn.Module) -> torch.dtype:
    """Return the coarsest dtype of differentiated operations behind the outputs, if coarser than the network's."""
    return problem.dtype if problem.arithmetic != "full" else _inside(problem, model)[0]


def _inside(problem: Problem, model: nn.Module) -> tuple[torch.dtype, tuple[str, str]]:
    """Return the coarsest dtype in the graph of the outputs; words on fake quantisation, which differences miss."""
    if _INSIDE not in problem.facts:
        dtype, told = problem.dtype, ("", "")
        batch, frozen = problem.place(problem.probes[0]), {id(p) for p in model.parameters() if not p.requires_grad}
        # a RuntimeError: the outputs have no derivative
        with suppress(RuntimeError, FlatlensError), problem.measuring(model), differentiable(model.parameters()):
            leaf = x if (x := _floating_input(batch)) is None else x.clone().requires_grad_()
            f, _ = problem.run(model, batch if leaf is None else (leaf.clone(), *batch[1:]))
            nodes = Graph(f).nodes
            dtypes = {made.dtype for node in nodes for made in node._input_metadata}
            numbers = (dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex)
            dtype = max(numbers, key=lambda dtype: torch.finfo(dtype).eps, default=problem.dtype)
            behind = walk([node for node in nodes if node.name().startswith(_ROUNDS)], sources_of)
            rounded = {id(node.variable) for node in behind if hasattr(node, "variable")} - frozen
            finer = torch.finfo(dtype).eps < min(torch.finfo(half).eps for half in HALF)
            if finer and not rounded and not problem.sharded:
                dtype = _out_of_sight(problem, model) or dtype
            words = (
                "autograd's derivative is not the function's, with respect to the {} (fake quantisation counts as "
                "linear)"
            )
            in_weights, in_inputs = map(words.format, _SIDES)
            told = in_weights if rounded - {id(leaf)} else "", in_inputs if id(leaf) in rounded else ""
        problem.facts[_INSIDE] = dtype, told
    found: tuple[torch.dtype, tuple[str, str]] = problem.facts[_INSIDE]
    return found


def _out_of_sight(problem: Problem, model: nn.Module) -> torch.dtype | None:
    """Return the half type by which outputs are rough, as those of a function whose graph does not show it.

    Roughness is in fourth differences of the outputs along moved weights, as a share of them: those of a smooth
    function vanish. Over short steps it is up to 5e-6 in small ReLU networks in float32, 8e-5 to 1e-3 in float16, 1e-4
    to 4e-3 in bfloat16. Kinks of a deep ReLU network reach 5e-4; what they add falls with the step, or faster, as fewer
    are met: over short steps, a 16th of the long ones, it is 0.8 to 3% of that over long ones. Rounding of what weights
    make does not fall, rounding of weights alone by the step's root: 26% or more.
    """
    few, runner, draw = take(problem.probes[0], 0, _SIGHT), Runner(problem, model), torch.Generator()
    weights = {name: p.detach() for name, p in model.named_parameters() if name in problem.parameters}
    moves = []
    for seed in range(max(1, min(4, _MOVED // max(1, sum(p.numel() for p in weights.values()))))):
        draw.manual_seed(seed)
        moves.append({name: random_signs(p.shape, p, draw) * p for name, p in weights.items()})

    @cache
    def outputs(number: int, share: float) -> Tensor:
        if not share and number:
            return outputs(0, share)
        point = {name: p + share * moves[number][name] for name, p in weights.items()}
        with torch.no_grad():  # placed each time: forward() may write to its input
            return runner.at(point, problem.place(few))[0].detach().to(torch.float64)

    def rough(step: float, factors: dict[int, int]) -> float:
        shares = []
        for number in range(len(moves)):
            terms = [factor * outputs(number, k * step) for k, factor in factors.items()]
            # where outputs cancel here, their parts have the size of outputs farther away
            size = max(float(outputs(number, share).abs().max()) for share in (0.0, 0.1))
            shares.append(torch.stack(terms).sum(0).abs().amax(1) / (math.hypot(*factors.values()) * size + 1e-300))
        return float(torch.cat(shares).quantile(0.9))

    short, long, second, fourth = 2.0**-12, 2.0**-8, {-2: 1, 0: -2, 2: 1}, {-2: 1, -1: -4, 0: 6, 1: -4, 2: 1}
    # Second differences have the same rounding, and more of what is smooth: where they are small, so are fourth ones.
    # A comparison with NaN is false.
    if not (rough(short, second) >= _ROUGH / 16 and (near := rough(short, fourth)) >= _ROUGH / 4):
        return None
    if not near >= _FALLS * (far := rough(long, fourth)):
        return None
    return torch.bfloat16 if far >= _ROUGH else torch.float16


def _floating_input(batch: Batch) -> Tensor | None:
    """Return the first input of a batch, if it has floating numbers."""
    x = batch[0] if isinstance(batch, tuple) else None
    return x if isinstance(x, Tensor) and x.is_floating_point() else None


def moved_by_rounding(problem: Problem, model: nn.Module) -> tuple[str, str]:
    """Return in words how far rounding moves the derivative in the weights, and in the inputs; empty if not far.

    The network in float32 is compared with its copy in float64, on a few samples: in a random combination of the
    outputs, and along the loss's slope. Outputs behind a softmax, or units deep in the flat part of a tanh, have
    derivatives that are differences of almost equal numbers. Nothing is said where the copy does not run. Where
    operations inside have a coarser dtype, as in norms that convert what they read, the words are theirs.
    """
    inside = coarsest_inside(problem, model)
    if inside != problem.dtype:
        eps = torch.finfo(inside).eps
        told = (
            f"the network computes in {str(inside).removeprefix('torch.')} inside: derivatives are good to some "
            f"{eps:.1g}, second ones to {10 * eps:.1g}"
        )
        return told, told
    wide = torch.finfo(torch.float64).bits // 8 * _VECTORS * sum(p.numel() for p in model.parameters())
    full = problem.dtype == torch.float32 and problem.arithmetic == "full"
    words: list[str] = []
    if not full or not problem.parameters or problem.sharded or wide > problem.memory:
        return "", ""
    with suppress(Exception):  # the network may work in float32 alone, and users' modules may raise anything
        fine = copy_of(model, "a comparison with float64").to(torch.float64)
        few = problem.probes[0]  # each sample alone, so that a backward pass takes no others along
        parts = [few] if problem.coupled else [take(few, i, i + 1) for i in range(min(_FEW, size(few)))]
        # More than half of the samples decide the median if all of them agree.
        off = _moved(problem, fine, model, parts[: len(parts) // 2 + 1])
        if off and any(float(side.max()) > _ROUNDED for side in off):
            off = _moved(problem, fine, model, parts)
        for side, moved in enumerate(off):
            most = float(moved.median(0).values.max())
            share = f"up to {most:.0%}" if most < 1 else "its size or more"
            told = (
                f"rounding in float32 moves the derivative in the {_SIDES[side]} by {share} (the median of a few "
                f"samples): use Problem(dtype=torch.float64)"
            )
            words.append(told if most > _ROUNDED else "")
    return (words[0], words[-1]) if words else ("", "")


def _moved(problem: Problem, fine: nn.Module, model: nn.Module, parts: list[Batch]) -> list[Tensor]:
    """Return how far derivatives are from the float64 copy's, (samples, 2), by side; [] if that is another function."""
    rows: list[tuple[Tensor, Tensor]] = []  # of each part, made for the first network
    both = ((fine, torch.float64), (model, torch.float32))
    found = [_by_sample(problem, network, dtype, parts, rows) for network, dtype in both]
    outputs, derivatives = zip(*found, strict=True)
    if float((outputs[0] - outputs[1]).abs().max()) > _ANOTHER * float(outputs[0].abs().max()):
        return []
    sides = range(len(derivatives[0][0]))
    every = [[_off(true[side], own[side]) for true, own in zip(*derivatives, strict=True)] for side in sides]
    return [torch.tensor(off).reshape(-1, 2) for off in every]


def _off(true: list[Tensor], own: list[Tensor]) -> float:
    """Return the distance of a derivative from the true one, over the latter's length."""
    length = math.hypot(*(float(torch.linalg.vector_norm(one)) for one in true))
    apart = math.hypot(*(float(torch.linalg.vector_norm(a - b)) for a, b in zip(true, own, strict=True)))
    return apart / length if length else 0.0


def _by_sample(
    problem: Problem, network: nn.Module, dtype: torch.dtype, parts: list[Batch], rows: list[tuple[Tensor, Tensor]]
) -> tuple[Tensor, list[list[list[Tensor]]]]:
    """Return the outputs of some batches, and the derivatives of a few samples along both rows, by side."""
    # the rows are random signs, and the loss's slope, whose largest entry is 1 for each sample; once made, they stay
    tensors: list[Tensor] = [p for name, p in network.named_parameters() if name in problem.parameters]
    outputs, derivatives = list[Tensor](), list[list[list[Tensor]]]()
    with problem.measuring(network), differentiable(tensors):
        for number, part in enumerate(parts):
            batch = move(part, device_of(network), dtype)
            x = _floating_input(batch)
            leaf = [] if x is None else [x.clone().requires_grad_()]
            f, y = problem.run(network, (leaf[0].clone(), *batch[1:]) if leaf else batch)
            outputs.append(f.detach().to("cpu", torch.float64))
            if number == len(rows):
                slope = slopes_of_each(problem, f, y)
                longest = slope.abs().amax(1, keepdim=True)
                slope = torch.where(longest > 0, slope / longest, 0.0).to(f.dtype)
                rows.append((random_signs(f.shape, f.detach(), torch.Generator().manual_seed(number)), slope))
            # each sample's derivative along a row: in the weights and, if they have one, in the inputs
            at = [*tensors, *leaf]
            for i, row in product(range(min(len(f), _FEW)), rows[number]):
                along = row[i].to(f.device)
                found = torch.autograd.grad(f[i], at, along, True, allow_unused=True, materialize_grads=True)
                wide = [one.to(torch.complex128 if one.is_complex() else torch.float64) for one in found]
                derivatives.append([wide[: len(tensors)], wide[len(tensors) :]][: 1 + len(leaf)])
    return torch.cat(outputs), derivatives


class _Combination:
    """A random combination of a batch's outputs, as a function of the weights and, if they are floating, the inputs."""

    def __init__(self, problem: Problem, model: nn.Module) -> None:
        self.batch, self.runner = problem.place(problem.probes[0]), Runner(problem, model)
        self.inside = coarsest_inside(problem, model)  #: the coarsest dtype that makes the outputs
        self.generator = torch.Generator().manual_seed(0)
        weights = {name: p.detach() for name, p in model.named_parameters() if name in problem.parameters}
        self.weights = {name: p for name, p in weights.items() if p.is_floating_point()}
        x = _floating_input(self.batch)
        own = [torch.cat([p.flatten() for p in self.weights.values()]), *([] if x is None else [x.detach()])]
        signs = (random_signs(one.shape, one, self.generator) for one in own)
        self.here = [one + _ASIDE * _as_long(one, part) for one, part in zip(own, signs, strict=True)]
        leaves = [one.clone().requires_grad_() for one in self.here]
        outputs = self._outputs([leaf.clone() for leaf in leaves])
        self.signs = random_signs(outputs.shape, outputs.detach(), self.generator)
        value = torch.sum(outputs * self.signs, dtype=torch.float64)
        self.gradient = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
        coarse = torch.finfo(self.inside).eps if self.inside != problem.dtype else problem.precision
        self.rounding = coarse * float(torch.linalg.vector_norm(outputs.detach()))
        self.value, self.step = float(value.detach()), _STEP.get(self.inside, _STEP[torch.float32])

    def words(self) -> list[str]:
        """Return in words, for the weights and for floating inputs, that a derivative is not autograd's."""
        told = [""] * len(self.here)
        for pair in zip(*(self.directions(side) for side in range(len(told))), strict=True):
            # Both sides at once: where their sum agrees by the smaller slope's tolerance, so does each but by chance.
            if len(pair) == 2 and self.agree_together(pair):
                continue
            for side, (direction, slope) in enumerate(pair):
                told[side] = told[side] or self._words_along(side, direction, slope)
        return told

    def _words_along(self, side: int, direction: Tensor, slope: float) -> str:
        """Return in words that the derivative along a direction is not autograd's; empty if none is found."""
        step, found = self.step, list[float]()
        for length in (step, step / 4, -step, -step / 4):  # beside a kink the second one is another: no more is asked
            found.append(self.difference({side: direction}, length))
            mean = sum(found) / len(found)
            alike = max(found) - min(found) <= _AGREE * min(abs(mean), abs(mean - slope))
            if not (abs(mean - slope) > _APART * max(abs(mean), abs(slope)) and any(found) and alike):
                return ""
        if abs(mean - slope) < _ROUNDINGS * self.rounding / (step / 4):
            return ""
        return (
            f"autograd's derivative is not the function's, with respect to the {_SIDES[side]} (along one "
            f"direction {slope:.3g}; differences of the outputs give {mean:.3g})"
        )

    def agree_together(self, pair: Sequence[tuple[Tensor, float]]) -> bool:
        """Return whether the difference along both sides' directions is the sum of their slopes."""
        found = self.difference({side: direction for side, (direction, _) in enumerate(pair)}, self.step)
        slopes = [slope for _, slope in pair]
        return abs(found - sum(slopes)) <= _APART * min(map(abs, slopes))

    def directions(self, side: int) -> Iterator[tuple[Tensor, float]]:
        """Yield the gradient and random signs, each as long as the weights or the inputs, with their slopes."""
        # weights without a gradient stay: the row of an embedding's padding has none on purpose
        here, gradient = self.here[side], self.gradient[side]
        moving = (gradient != 0).to(gradient) if side == 0 else None
        for turn in range(1 + _RANDOM):
            part = random_signs(here.shape, here, self.generator) if turn else gradient
            part = _as_long(here, part if moving is None else part * moving)
            yield part, float(torch.dot(gradient.flatten(), part.flatten()))

    def difference(self, directions: Mapping[int, Tensor], step: float) -> float:
        """Return the difference quotient along directions of some sides at once."""
        with torch.no_grad():
            moved = [one.clone() for one in self.here]
            for side, direction in directions.items():
                moved[side].add_(direction, alpha=step)
            return (float(torch.sum(self._outputs(moved) * self.signs, dtype=torch.float64)) - self.value) / step

    def _outputs(self, point: Sequence[Tensor]) -> Tensor:
        theta, *x = point  # not read again: forward() may write to its input, or call requires_grad_() on it
        parts = torch.split(theta, [p.numel() for p in self.weights.values()])
        values = {name: part.view(p.shape) for (name, p), part in zip(self.weights.items(), parts, strict=True)}
        return self.runner.at(values, (*x, *self.batch[1:]) if x else self.batch)[0]


def _as_long(here: Tensor, part: Tensor) -> Tensor:
    length, own = (float(torch.linalg.vector_norm(one)) for one in (here, part))
    return part * (length / own) if own else part
