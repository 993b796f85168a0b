"""Matching of neurons: the order of one network's neurons in which its weights are nearest to another one's.

    min over permutations ||theta_a - pi(theta_b)||^2,   that is   max <theta_a, pi(theta_b)>

A permutation of one layer's neurons moves the rows that make them, their norms, and the columns that read them. With
all other layers' fixed, the best one solves a linear assignment problem; layer after layer, again and again, the
distance never rises (coordinate descent: Ainsworth et al. 2023, Algorithm 1). It ends in a local minimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from flatlens.problem import Problem
from flatlens.problem.eval_context import copy_of
from flatlens.progress import count_of
from flatlens.transforms import OUTPUTS, Link, order_reader, order_source, permutation, read_wiring
from flatlens.transforms.definition import change_of_outputs

_GAIN = 1e-12  #: a gain of the inner product below this share of its terms is rounding


@dataclass(frozen=True, eq=False)
class Matching:
    """A network with its neurons in another order, nearer to a target, and the same function."""

    model: nn.Module  #: the permuted copy
    layers: tuple[str, ...]  #: layers whose neurons may be permuted
    left: dict[str, str]  #: other layers, with the reason
    moved: int  #: neurons that are at another place
    neurons: int  #: neurons that may be permuted

    @property
    def told(self) -> str:
        """Return what was done, in words."""
        if not self.layers:
            reasons = "; ".join(dict.fromkeys(self.left.values())) or "no layer reads another one's features"
            return f"no layer's neurons can be permuted ({reasons})"
        stay = f"; layers left in their order: {', '.join(self.left)}" if self.left else ""
        return (
            f"{self.moved:,} of {self.neurons:,} neurons of {count_of(len(self.layers), 'layer')} changed places{stay}"
        )


def match(problem: Problem, target: nn.Module, model: nn.Module) -> Matching:
    """Return a network's copy with its neurons in the order in which its weights are nearest to the target's.

    Two descents are run, and the nearer result is kept: from the given order, and from a sweep in execution order by
    incoming weights alone. The sweep finds a permuted copy exactly, whatever the depth, if no two neurons of a layer
    have the same incoming weights: once all earlier layers agree, the rows of a neuron and its copy are equal.
    """
    problem = problem.changed(model=model, ghost_batch=None, seen=None)
    offer = permutation.offer(read_wiring(problem, copy_of(model, "matching")))
    links: Sequence[Link] = offer.links
    starts = []
    for sweep in (False, True):
        moved = copy_of(model, "matching")
        orders = {link.source: torch.arange(link.features) for link in links}
        if sweep:
            for link in links:
                _assign(link, target, moved, orders, incoming=True)
        better = True
        while better:  # until no layer has a better order
            better = sum(_assign(link, target, moved, orders) for link in links) > 0
        pairs = zip(target.parameters(), moved.parameters(), strict=True)
        inner = sum(float((p.detach().to(torch.float64) * q.detach().to(torch.float64)).sum()) for p, q in pairs)
        starts.append((inner, sweep, moved, orders))
    _, _, best, orders = max(starts, key=lambda one: one[:2])
    if links:
        change_of_outputs("permutation", problem, best)
    shifted = sum(int((order != torch.arange(len(order))).sum()) for order in orders.values())
    left = {name: why for name, why in offer.left.items() if name and why != OUTPUTS}
    if not links:
        left = left or {"": offer.refused}
    return Matching(best, tuple(link.source for link in links), left, shifted, sum(link.features for link in links))


def _assign(
    link: Link, target: nn.Module, moved: nn.Module, orders: dict[str, Tensor], *, incoming: bool = False
) -> bool:
    """Put the features of one link in the best order; return whether that is another one."""
    S = similarity(link, target, moved, incoming=incoming)
    rows, columns = linear_sum_assignment(S.numpy(), maximize=True)
    gain = float(S[rows, columns].sum() - S.diagonal().sum())
    if gain <= _GAIN * float(S.abs().sum()):
        return False
    order = torch.as_tensor(columns)
    for name in (link.source, *(norm.name for norm in link.norms)):
        order_source(moved.get_submodule(name), order)
    for reader in link.readers:
        order_reader(moved.get_submodule(reader.name), reader.owner, order)
    orders[link.source] = orders[link.source][order]
    return True


def similarity(link: Link, target: nn.Module, moved: nn.Module, *, incoming: bool = False) -> Tensor:
    """Return <all weights of feature i in the target, those of feature j in the other network>, (m, m) float64.

    These are the feature's row, bias and norms, and the columns that read it, which `incoming` leaves out.
    """
    S = torch.zeros(link.features, link.features, dtype=torch.float64)
    for name in (link.source, *(norm.name for norm in link.norms)):
        for kind in ("weight", "bias"):
            pair = [net.get_submodule(name)._parameters.get(kind) for net in (target, moved)]
            S += _products(*(None if p is None else p.detach().flatten(1) if p.ndim > 1 else p.detach()[:, None]
                             for p in pair))  # fmt: skip
    for reader in [] if incoming else link.readers:
        mine = reader.owner.argsort(stable=True).reshape(link.features, -1)
        pair = [net.get_submodule(reader.name)._parameters["weight"] for net in (target, moved)]
        S += _products(*(None if p is None else p.detach()[:, mine.to(p.device)].transpose(0, 1).flatten(1)
                         for p in pair))  # fmt: skip
    return S


def _products(A: Tensor | None, B: Tensor | None) -> Tensor | float:
    if A is None or B is None:
        return 0.0
    return (A.to(torch.float64) @ B.to(torch.float64).T).cpu()
