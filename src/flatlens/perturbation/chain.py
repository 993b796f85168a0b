"""Networks as chains: affine maps, written out as matrices, with elementwise activations between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from flatlens.errors import one_line
from flatlens.operations.activations import Activation
from flatlens.operations.table import ARITHMETIC, Operation, hooked
from flatlens.operations.tracing import Trace
from flatlens.perturbation.inputs import Refused, in_float64
from flatlens.problem import Problem

AGREEMENT = 1e-7  #: allowed difference of the chain's outputs from the network's, both in float64


@dataclass(frozen=True, eq=False)
class Chain:
    """A chain f(x) = W_L a_{L-1}( ... a_1(W_1 x + b_1) ... ) + b_L of flat x, in float64."""

    maps: list[tuple[Tensor, Tensor]]  #: (W_l (m_l, m_{l-1}), b_l (m_l,))
    activations: list[Activation]  #: one fewer than maps

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs (n, N) of flat inputs (n, M)."""
        for (W, b), between in zip(self.maps, self.activations, strict=False):
            x = between.value(x @ W.mT + b)
        return x @ self.maps[-1][0].mT + self.maps[-1][1]


def read_chain(problem: Problem, model: nn.Module) -> Chain:
    """Return the network as a chain, from a symbolic trace of a float64 copy; both must give the same outputs.

    Raises `Refused`, naming the operation that is not part of a chain, or if the matrices exceed the memory.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> problem = Problem(net, "mse", (torch.ones(4, 2), torch.zeros(4, 1)))
    >>> [tuple(W.shape) for W, _ in read_chain(problem, net).maps]
    [(3, 2), (1, 3)]
    """
    exact, x = in_float64(problem, model, "a certified variation")
    try:
        chain = _Reader(exact, problem.memory).read(x[:1])
        with torch.no_grad():
            f = exact(x).reshape(len(x), -1)
            apart = float((chain(x.flatten(1)) - f).abs().max())
    except Refused:
        raise
    except Exception as error:  # the network's own forward() may raise anything under tracing
        raise Refused(f"torch.fx cannot read the network ({one_line(error, 120)})") from error
    if apart > AGREEMENT * (1 + float(f.abs().max())):
        raise Refused(f"the chain read from the network gives other outputs (by {apart:.1g})")
    return chain


class _Reader(Trace):
    """A run of the graph that is cut at every activation: its input is kept, and a leaf tensor replaces its output."""

    def __init__(self, model: nn.Module, memory: int) -> None:
        super().__init__(model)
        self.memory = memory
        self.valueless = self.without_values(constants=True)
        self.before: list[Tensor] = []
        self.after: list[Tensor] = []
        self.activations: list[Activation] = []
        _require_chain(self, self.valueless)

    def read(self, x: Tensor) -> Chain:
        """Return all matrices, from the derivative of one batch as large as the widest layer: sample k gives row k."""
        self._cut(x)
        widths = [leaf[0].numel() for leaf in self.after], [z[0].numel() for z in self.before]
        numbers = sum(m * d for m, d in zip(*widths, strict=True))
        widest = max(widths[1])
        if 8 * (numbers + 4 * widest * sum(map(sum, widths))) > self.memory // 2:
            raise Refused(f"its maps as matrices, {numbers:.2g} numbers, do not fit in the problem's memory")
        self._cut(torch.zeros_like(x).expand(widest, *x.shape[1:]))
        rows = [z.reshape(widest, -1).diagonal().sum() for z in self.before]
        slopes = torch.autograd.grad(rows, self.after)
        maps = [
            (slope.reshape(widest, -1)[: z[0].numel()], z[0].detach().flatten())
            for slope, z in zip(slopes, self.before, strict=True)
        ]
        return Chain(maps, self.activations)

    def _cut(self, x: Tensor) -> None:
        self.before, self.after, self.activations = [], [x.detach().requires_grad_()], []
        self.before.append(self.run(self.after[0].clone()))
        if any(len(z) != len(x) for z in self.before):
            raise Refused("an operation changes the number of rows: each sample must stay one row")

    def run_node(self, n: fx.Node) -> Any:
        """Run one operation; cut the graph at an activation."""
        if not n.op.startswith("call") or n in self.valueless:
            return super().run_node(n)
        what, found = self.what(n), self.operation(n)
        if found is None and isinstance(what, nn.Module) and hooked(what):
            raise Refused(f"{self.called(n)} has forward hooks: it may give other outputs than its type says")
        arguments, options = self.fetch_args_kwargs_from_env(n)
        known = None if found is None else found.activation_of(what, arguments[1:], options)
        if known is not None:
            self.before.append(arguments[0] if arguments else options["input"])
            self.after.append(torch.zeros_like(self.before[-1]).requires_grad_())
            self.activations.append(known)
            return self.after[-1].clone()
        if found is None or not _is_affine(found, n, self.valueless):
            raise Refused(f"{self.called(n)} is neither affine nor an activation whose slopes are bounded here")
        return super().run_node(n)


def _require_chain(trace: Trace, valueless: frozenset[fx.Node]) -> None:
    """Refuse operations that join branches."""
    last: fx.Node | None = None
    for node in trace.nodes:
        if node in valueless:
            continue
        on = [used for used in node.all_input_nodes if used not in valueless]
        if last is not None and (on != [last] or (node.op == "output" and node.args[0] is not last)):
            raise Refused(f"{trace.called(node)} joins branches: only a chain of layers is bounded")
        last = node


def _is_affine(found: Operation, node: fx.Node, valueless: frozenset[fx.Node]) -> bool:
    """Return whether a call is affine in its first argument, or in a term or factor."""
    carried = [at for at, end in enumerate(node.args) if isinstance(end, fx.Node) and end not in valueless]
    if found.name in ARITHMETIC and (len(node.args) != 2 or node.kwargs):  # for example, with rounding_mode
        return False
    return found.affine and (
        carried == [0] or (carried == [1] and found.name in ARITHMETIC and found.role != "quotient")
    )
