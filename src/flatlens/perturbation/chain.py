"""A network read as a chain: affine maps, written out as matrices, with elementwise activations between them."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from flatlens.errors import one_line
from flatlens.perturbation.activations import Activation, activation
from flatlens.perturbation.inputs import Refused
from flatlens.problem import Problem

AGREEMENT = 1e-7  #: of the chain's outputs with the network's, both in float64

AFFINE = (
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
)  # fmt: skip  (in eval mode)
ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.truediv, torch.add, torch.sub, torch.mul, torch.div)
DIVISIONS = (operator.truediv, torch.div)
AFFINE_FUNCTIONS = (
    *ARITHMETIC, operator.neg, torch.neg, torch.flatten, torch.reshape, torch.mean,
    F.linear, F.conv1d, F.conv2d, F.conv3d,
    F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d,
    F.dropout,
)  # fmt: skip
AFFINE_METHODS = ("flatten", "view", "reshape", "contiguous", "mean")
SIZES = ("shape", "ndim")  #: attributes that do not depend on values
ACTIVATIONS: dict[Any, Callable[..., nn.Module]] = {
    F.relu: nn.ReLU, torch.relu: nn.ReLU, "relu": nn.ReLU, F.relu6: nn.ReLU6, F.hardtanh: nn.Hardtanh,
    torch.tanh: nn.Tanh, F.tanh: nn.Tanh, "tanh": nn.Tanh,
    torch.sigmoid: nn.Sigmoid, F.sigmoid: nn.Sigmoid, "sigmoid": nn.Sigmoid,
    F.leaky_relu: nn.LeakyReLU, F.elu: nn.ELU, F.softplus: nn.Softplus, F.gelu: nn.GELU, F.silu: nn.SiLU,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Chain:
    """f(x) = W_L a_{L-1}( ... a_1(W_1 x + b_1) ... ) + b_L, of flat x, in float64."""

    maps: list[tuple[Tensor, Tensor]]  #: (W_l (m_l, m_{l-1}), b_l (m_l,))
    activations: list[Activation]  #: one less

    def __call__(self, x: Tensor) -> Tensor:
        """The outputs (n, N) of flat inputs (n, M)."""
        for (W, b), between in zip(self.maps, self.activations, strict=False):
            x = between.value(x @ W.mT + b)
        return x @ self.maps[-1][0].mT + self.maps[-1][1]


def read_chain(problem: Problem, model: nn.Module) -> Chain:
    """The network as a chain, from a symbolic trace of a float64 copy; it must give the network's outputs.

    Raises `Refused`, naming the operation that is no part of a chain, or where the matrices outgrow the memory.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> problem = Problem(net, "mse", (torch.ones(4, 2), torch.zeros(4, 1)))
    >>> [tuple(W.shape) for W, _ in read_chain(problem, net).maps]
    [(3, 2), (1, 3)]
    """
    batch = problem.place(problem.probes[0])
    if problem.forward is not None or not isinstance(batch[0], Tensor) or not batch[0].is_floating_point():
        raise Refused("only a network called on one floating tensor is read as a chain")
    x = batch[0].detach().to(torch.float64)
    exact = copy.deepcopy(model).to(torch.float64).eval()
    try:
        chain = _Reader(fx.symbolic_trace(exact), problem.memory).read(x[:1])
        with torch.no_grad():
            f = exact(x)
            apart = float((chain(x.flatten(1)) - f).abs().max())
    except Refused:
        raise
    except Exception as error:  # whatever the network's own forward() makes of symbols
        raise Refused(f"torch.fx cannot read the network ({one_line(error, 120)})") from error
    if apart > AGREEMENT * (1 + float(f.abs().max())):
        raise Refused(f"the chain read from the network gives other outputs (by {apart:.1g})")
    return chain


class _Reader(fx.Interpreter):
    """Runs the graph with every activation cut: what goes in is kept, and a leaf goes on in place of what comes out."""

    def __init__(self, graph: fx.GraphModule, memory: int) -> None:
        super().__init__(graph)
        self.extra_traceback = False  # what it raises is one line
        self.memory = memory
        self.aside = _off_the_chain(graph.graph)
        self.before: list[Tensor] = []
        self.after: list[Tensor] = []
        self.activations: list[Activation] = []

    def read(self, x: Tensor) -> Chain:
        """All matrices, from the derivative of one batch as large as the widest layer: row k gives their rows k."""
        self._cut(x)
        widths = [leaf[0].numel() for leaf in self.after], [z[0].numel() for z in self.before]
        numbers = sum(m * d for m, d in zip(*widths, strict=True))
        widest = max(widths[1])
        if 8 * (numbers + 4 * widest * sum(map(sum, widths))) > self.memory // 2:
            raise Refused(f"its maps, written out as matrices of {numbers:.2g} numbers, outgrow the problem's memory")
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
            raise Refused("an operation takes the samples apart")

    def run_node(self, n: fx.Node) -> Any:
        """One operation: an affine one as it is, an activation as a cut."""
        if n.op in ("placeholder", "get_attr", "output") or n in self.aside:
            return super().run_node(n)
        arguments, options = self.fetch_args_kwargs_from_env(n)
        what: Any = self.fetch_attr(str(n.target)) if n.op == "call_module" else n.target
        module = what if isinstance(what, nn.Module) else _as_module(what, arguments[1:], options)
        known = None if module is None else activation(module)
        if known is not None:
            self.before.append(arguments[0] if arguments else options["input"])
            self.after.append(torch.zeros_like(self.before[-1]).requires_grad_())
            self.activations.append(known)
            return self.after[-1].clone()
        if not _is_affine(n, what, self.aside):
            raise Refused(f"{_name(n, what)} is neither affine nor an activation whose slopes are bounded here")
        return super().run_node(n)


def _off_the_chain(graph: fx.Graph) -> frozenset[fx.Node]:
    """The nodes that hold constants and sizes; refuses what joins branches."""
    aside: set[fx.Node] = set()
    last: fx.Node | None = None
    for node in graph.nodes:
        on = [used for used in node.all_input_nodes if used not in aside]
        if node.op == "placeholder" and last is None:
            last = node
        elif node.op in ("placeholder", "get_attr") or (node.op != "output" and (not on or _asks_size(node))):
            aside.add(node)
        elif on != [last] or (node.op == "output" and node.args[0] is not last):
            raise Refused(f"{_name(node, node.target)} joins branches: only a chain of layers is bounded")
        else:
            last = node
    return frozenset(aside)


def _asks_size(node: fx.Node) -> bool:
    return node.target in ("size", "dim") or (node.target is getattr and node.args[1] in SIZES)


def _is_affine(node: fx.Node, what: Any, aside: frozenset[fx.Node]) -> bool:
    if node.op == "call_module":
        return isinstance(what, AFFINE)
    carried = [at for at, end in enumerate(node.args) if isinstance(end, fx.Node) and end not in aside]
    if what in ARITHMETIC:  # neither x * x nor 1 / x, nor any rounding
        plain = len(node.args) == 2 and not node.kwargs
        return plain and (carried == [0] or (carried == [1] and what not in DIVISIONS))
    return carried == [0] and what in (AFFINE_FUNCTIONS if node.op == "call_function" else AFFINE_METHODS)


def _as_module(what: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> nn.Module | None:
    """An activation called as a function, as the module of the same settings."""
    if what not in ACTIVATIONS:
        return None
    return ACTIVATIONS[what](*arguments, **{name: value for name, value in options.items() if name != "input"})


def _name(node: fx.Node, what: Any) -> str:
    if node.op == "call_module":
        return f"{node.target} ({type(what).__name__})" if isinstance(what, nn.Module) else f"module {node.target}"
    return str(getattr(node.target, "__name__", node.target))
