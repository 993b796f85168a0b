"""Whether autograd's derivative is that of the function: a network may change it, on purpose or by a slip.

Gradient reversal, straight-through estimators and `detach()` do. Differences of outputs over a small step tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from flatlens.errors import FlatlensError
from flatlens.grams.autograd import Runner
from flatlens.grams.data_pass import random_signs
from flatlens.operations.graph import Graph, sources_of, walk
from flatlens.perturbation.hidden_operations import Sight
from flatlens.problem import Batch, Problem
from flatlens.problem.batches import move, size, take
from flatlens.problem.eval_context import copy_of, device_of, differentiable
from flatlens.problem.forward import slopes_of_each
from flatlens.problem.op_overrides import HALF

_STEP = {torch.float32: 1e-4, torch.float64: 1e-6}
"""Length of a step, relative to the length of the weights and to that of the inputs."""
_ASIDE = 0.03  #: how far aside the test takes place, in these units: zero biases and black pixels may lie on kinks
_RANDOM = 5  #: number of random directions
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
_INSIDE = "the coarsest dtype inside, fake quantisation, and whether autograd sees all"
_ROUNDS = ("FakeQuantize", "FusedMovingAvgObsFq")  #: beginnings of the names of nodes of fake quantisation


def other_derivative(problem: Problem, model: nn.Module) -> tuple[str, str]:
    """Return in words that the derivative in the weights, and in the inputs, is not autograd's; empty if none is found.

    Tested once for a problem, beside its weights and inputs, on at most 8 samples and a random combination of their
    outputs: in the measured weights, then in the inputs, along autograd's gradient, and along random directions unless
    a forward pass shows that autograd sees all of it (`hidden_operations`). Where inputs are not floating numbers, the
    words about weights stand for both. At a kink a difference of outputs is another, too: it is believed if it is the
    same over two steps to each side. Not seen are changes of less than a twentieth of the derivative, or that rounding
    of the outputs hides, operations that jump many times within a step (fine rounding), and networks whose weights take
    a 16th of the problem's memory.
    """
    if _FOUND not in problem.facts:
        told = "", ""
        numbers = sum(p.numel() for p in model.parameters()) + size(problem.probes[0]) * problem.outputs
        held = _VECTORS * numbers * torch.finfo(problem.dtype).bits // 8
        if problem.parameters and not problem.sharded and held <= problem.memory:
            _, told, seen = _inside(problem, model)
            if told == ("", ""):
                # a RuntimeError: it has no derivative, or does not run at other weights
                with suppress(RuntimeError, FlatlensError), problem.measuring(model):
                    words = _Combination(problem, model).words(0 if seen else _RANDOM)
                    told = words[0], words[-1]
        problem.facts[_FOUND] = told
    found: tuple[str, str] = problem.facts[_FOUND]
    return found


def coarsest_inside(problem: Problem, model: nn.Module) -> torch.dtype:
    """Return the coarsest dtype of differentiated operations behind the outputs, if coarser than the network's."""
    return _inside(problem, model)[0] if problem.arithmetic == "full" else problem.dtype


def _inside(problem: Problem, model: nn.Module) -> tuple[torch.dtype, tuple[str, str], bool]:
    """Return the coarsest dtype in the graph of the outputs; words on fake quantisation, which differences miss.

    And whether autograd sees all that forward() does with the weights and inputs: no dtype is out of sight then.
    """
    if _INSIDE not in problem.facts:
        dtype, told, whole = problem.dtype, ("", ""), False
        batch, frozen = problem.place(problem.probes[0]), {id(p) for p in model.parameters() if not p.requires_grad}
        # a RuntimeError: the outputs have no derivative
        with suppress(RuntimeError, FlatlensError), problem.measuring(model), differentiable(model.parameters()):
            leaf = x if (x := _floating_input(batch)) is None else x.clone().requires_grad_()
            own = [] if leaf is None else [leaf.clone()]
            with Sight([*model.parameters(), *own]) as sight:
                f, _ = problem.run(model, (*own, *batch[1:]) if own else batch)
            graph = Graph(f)
            nodes, whole = graph.nodes, sight.sees(graph)
            dtypes = {made.dtype for node in nodes for made in node._input_metadata}
            numbers = {torch.finfo(one).eps: one for one in dtypes if one.is_floating_point or one.is_complex}
            dtype = numbers[max(numbers)] if numbers else dtype
            behind = walk([node for node in nodes if node.name().startswith(_ROUNDS)], sources_of)
            rounded = {id(node.variable) for node in behind if hasattr(node, "variable")} - frozen
            words = (
                "autograd's derivative is not the function's, with respect to the {} (fake quantisation counts as "
                "linear)"
            )
            in_weights, in_inputs = map(words.format, _SIDES)
            told = in_weights if rounded - {id(leaf)} else "", in_inputs if id(leaf) in rounded else ""
            finer = torch.finfo(dtype).eps < min(torch.finfo(half).eps for half in HALF)
            if finer and not rounded and not whole and problem.parameters and not problem.sharded:
                dtype = _out_of_sight(problem, model) or dtype
        problem.facts[_INSIDE] = dtype, told, whole
    found: tuple[torch.dtype, tuple[str, str], bool] = problem.facts[_INSIDE]
    return found


def _out_of_sight(problem: Problem, model: nn.Module) -> torch.dtype | None:
    """Return the half type by which outputs are rough, as those of a function whose graph does not show it.

    Roughness is in fourth differences of the outputs along moved weights, as a share of them: those of a smooth
    function vanish. Over short steps it is up to 5e-6 in small ReLU networks in float32, 8e-5 to 1e-3 in float16, 1e-4
    to 4e-3 in bfloat16. Kinks of a deep ReLU network reach 5e-4; what they add falls with the step, or faster, as fewer
    are met: over short steps, a 16th of the long ones, it is 0.8 to 3% of that over long ones. Rounding of what weights
    make does not fall, rounding of weights alone by the step's root: 26% or more.
    """
    moved, draw = _Moved(problem, model, take(problem.probes[0], 0, _SIGHT)), torch.Generator().manual_seed(0)
    theta = moved.here[0]
    moves = [_signs(theta, draw).to(theta).mul_(theta) for _ in range(max(1, min(4, _MOVED // max(1, len(theta)))))]
    seen, roughness = dict[tuple[int, float], Tensor](), list[float]()
    short, long, second, fourth = 2.0**-12, 2.0**-8, {-2: 1, 0: -2, 2: 1}, {-2: 1, -1: -4, 0: 6, 1: -4, 2: 1}
    # Second differences have the same rounding, and more of what is smooth: where they are small, so are fourth ones.
    for step, factors, least in ((short, second, _ROUGH / 16), (short, fourth, _ROUGH / 4), (long, fourth, 0.0)):
        shares = []
        for number, along in enumerate(moves):
            for share in {0.0, 0.1, *(k * step for k in factors)} - {share for of, share in seen if of == number}:
                with torch.no_grad():  # forward() may turn gradients on
                    f = moved.at(torch.add(theta, along, alpha=share, out=moved.there[0]).detach()).detach()
                seen[number, share] = f.to(torch.float64)
            terms = [factor * seen[number, k * step] for k, factor in factors.items()]
            # where outputs cancel here, their parts have the size of outputs farther away
            size = max(float(seen[number, share].abs().max()) for share in (0.0, 0.1))
            shares.append(torch.stack(terms).sum(0).abs().amax(1) / (math.hypot(*factors.values()) * size + 1e-300))
        roughness.append(float(torch.cat(shares).quantile(0.9)))
        if not roughness[-1] >= least:  # a comparison with NaN is false
            return None
    _, near, far = roughness
    if not near >= _FALLS * far:
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


def _signs(like: Tensor, draw: torch.Generator) -> Tensor:
    """Return random +1 and -1, int8, in the shape of a tensor: the lowest bits of drawn bytes, as these cost least."""
    drawn = torch.empty(like.numel() // 8 + 1, dtype=torch.int64).random_(generator=draw).view(torch.int8)
    return drawn[: like.numel()].bitwise_and_(1).mul_(2).sub_(1).view(like.shape).to(like.device)


class _Moved:
    """The outputs of some samples as a function of the weights and, if they are floating numbers, the inputs."""

    def __init__(self, problem: Problem, model: nn.Module, batch: Batch) -> None:
        self.placed, self.runner = partial(problem.place, batch), Runner(problem, model)
        weights = {name: p.detach() for name, p in model.named_parameters() if name in problem.parameters}
        self.weights = {name: p for name, p in weights.items() if p.is_floating_point()}
        x = _floating_input(self.placed())
        self.here = [torch.cat([p.flatten() for p in self.weights.values()]), *([] if x is None else [x])]
        self.there = [torch.empty_like(one) for one in self.here]  #: new memory for each move would take longer

    def at(self, theta: Tensor, *x: Tensor) -> Tensor:
        """Return the outputs, (n, N), at other weights and inputs, to which forward() may write."""
        parts, batch = torch.split(theta, [p.numel() for p in self.weights.values()]), self.placed()
        values = {name: part.view(p.shape) for (name, p), part in zip(self.weights.items(), parts, strict=True)}
        return self.runner.at(values, (*x, *batch[1:]) if x else batch)[0]


class _Combination(_Moved):
    """A random combination of a batch's outputs beside the weights and inputs, and autograd's gradient there."""

    def __init__(self, problem: Problem, model: nn.Module) -> None:
        super().__init__(problem, model, problem.probes[0])
        inside = coarsest_inside(problem, model)  # makes the outputs
        self.draw = torch.Generator().manual_seed(0)
        self.lengths = [float(torch.linalg.vector_norm(one)) for one in self.here]
        for here, length in zip(self.here, self.lengths, strict=True):
            here.add_(_signs(here, self.draw), alpha=_ASIDE * length / math.sqrt(max(1, here.numel())))
        leaves = [one.requires_grad_() for one in self.here]
        theta, *x = leaves
        f = self.at(theta, *(one.clone() for one in x))  # forward() may write to its input, or make it a leaf
        self.signs = _signs(f, self.draw).to(f.dtype)
        value = torch.sum(f * self.signs, dtype=torch.float64)
        self.gradient = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
        self.here = [one.detach() for one in leaves]
        coarse = torch.finfo(inside).eps if inside != problem.dtype else problem.precision
        self.rounding = coarse * float(torch.linalg.vector_norm(f.detach()))
        self.value, self.step = float(value.detach()), _STEP.get(inside, _STEP[torch.float32])

    def words(self, random: int) -> list[str]:
        """Return in words, for the weights and for floating inputs, that a derivative is not autograd's.

        Along the gradient and a number of random signs, as long as the weights or the inputs.
        """
        # weights without a gradient stay: the row of an embedding's padding has none on purpose
        moving = [
            (self.gradient[0] != 0).to(torch.int8),
            *(torch.ones_like(x, dtype=torch.int8) for x in self.here[1:]),
        ]
        told, drawn = [""] * len(self.here), [torch.empty_like(one) for one in self.here]
        for turn in range(1 + random):
            moves, slopes = list[tuple[Tensor, float]](), list[float]()
            for side, gradient in enumerate(self.gradient):
                along = drawn[side].copy_(_signs(gradient, self.draw).mul_(moving[side])) if turn else gradient
                factor = self.lengths[side] / (float(torch.linalg.vector_norm(along)) or 1.0)
                moves.append((along, factor))
                slopes.append(factor * float(torch.dot(gradient.flatten(), along.flatten())))
            # Both sides at once, each so far that the least that would be told of it has the same size: where their sum
            # agrees, so does each but by chance. Slopes have one sign, so that a reversed gradient cannot cancel.
            unseen = [max(_APART * abs(slope), 2 * _ROUNDINGS * self.rounding / self.step) for slope in slopes]
            least = min(unseen)
            shares = [math.copysign(least / (own or 1.0), slope) for own, slope in zip(unseen, slopes, strict=True)]
            pair = {side: (moves[side][0], share * moves[side][1]) for side, share in enumerate(shares)}
            expected = sum(share * slope for share, slope in zip(shares, slopes, strict=True))
            if len(pair) == 2 and least and abs(self.difference(pair, self.step) - expected) <= least:
                continue
            for side, slope in enumerate(slopes):
                told[side] = told[side] or self._words_along(side, moves[side], slope)
        return told

    def _words_along(self, side: int, along: tuple[Tensor, float], slope: float) -> str:
        """Return in words that the derivative along a direction is not autograd's; empty if none is found."""
        step, found = self.step, list[float]()
        for length in (step, step / 4, -step, -step / 4):  # beside a kink the second one is another: no more is asked
            found.append(self.difference({side: along}, length))
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

    def difference(self, moves: Mapping[int, tuple[Tensor, float]], step: float) -> float:
        """Return the difference quotient along the directions of some sides, each times its factor."""
        with torch.no_grad():
            point = list[Tensor]()
            for side, (here, there) in enumerate(zip(self.here, self.there, strict=True)):
                along, factor = moves.get(side, (here, 0.0))
                point.append(torch.add(here, along, alpha=factor * step, out=there).detach())
            f = self.at(*point).detach()
            return (float(torch.sum(f * self.signs, dtype=torch.float64)) - self.value) / step
