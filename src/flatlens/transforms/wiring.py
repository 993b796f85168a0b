"""The wiring of a network, from a symbolic trace and a trial: which layers read which layer's features.

A trial run on the problem's probes carries, beside each tensor, the feature that each of its entries is of. Flatten,
pooling, transposes and views move these along, so a channel that spans several inputs of the next layer is known as
one. A feature that meets another branch, reaches the outputs, or enters an operation not known to act on each feature
by itself, is left where it is, with the reason.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from flatlens.errors import typed_line
from flatlens.operations.table import Trace, hooked, operation_of
from flatlens.problem import Problem
from flatlens.transforms import rules
from flatlens.transforms.symmetries import STAYS_WITHIN, Symmetries, read_symmetries

OUTPUTS = "its features are the network's outputs"
_LAYERS = ("linear", "convolution")


@dataclass(frozen=True, eq=False)
class Reader:
    """A layer or norm that reads features of another."""

    name: str
    owner: Tensor  #: feature that each of its inputs belongs to, (inputs,)


@dataclass(eq=False)
class Link:
    """A layer or norm, and everything that reads its features."""

    source: str
    features: int
    readers: list[Reader] = field(default_factory=list)
    norms: list[Reader] = field(default_factory=list)  #: norms in between; they are permuted with the features
    refused: str = ""  #: why its features are not moved
    direct: bool = True  #: whether no operation acts on its features; one in place acts on all who read them

    def refuse(self, why: str) -> None:
        """Set the reason, if there is none yet."""
        self.refused = self.refused or why

    def __str__(self) -> str:
        return f"{self.source} -> {', '.join(reader.name for reader in self.readers)}"


@dataclass(frozen=True, eq=False)
class Wiring:
    """The wiring of one network: whose features can be rescaled, and whose permuted."""

    scales: dict[str, Link] = field(default_factory=dict)  #: those of linear layers and BatchNorms, in execution order
    orders: dict[str, Link] = field(default_factory=dict)  #: those of linear layers
    unreadable: str = ""  #: why the network cannot be read
    coupled: bool = False  #: whether BatchNorms normalise over the samples of a batch
    problem: Problem | None = None
    model: nn.Module | None = None

    @cached_property
    def symmetries(self) -> Symmetries:
        """Return the symmetries of attentions, norms and gates, which autograd's graph shows."""
        if self.problem is None or self.model is None:
            return Symmetries()
        return read_symmetries(self.problem, self.model)


@dataclass(frozen=True, eq=False)
class _Tag:
    """The origin of a tensor's features: the layer that made them, and the last one that set their scale."""

    order: Link | None
    scale: Link | None
    ids: Tensor  #: feature of each entry

    def refuse(self, why: str) -> None:
        for link in (self.order, self.scale):
            if link is not None:
                link.refuse(why)


def read_wiring(problem: Problem, model: nn.Module) -> Wiring:
    """Return the wiring of a network; the caller owns the copy.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> wiring = read_wiring(Problem(net, "mse", (torch.ones(4, 2), torch.zeros(4, 1))), net)
    >>> str(wiring.scales["0"]), wiring.scales["2"].refused
    ('0 -> 2', "its features are the network's outputs")
    """
    batch = problem.place(problem.probes[0])
    try:
        with problem.measuring(model), torch.no_grad():
            reader = _Reader(model, problem.coupled)
            found, _ = problem.run(reader.in_place(), batch)
            expected, _ = problem.run(model, batch)
    except Exception as error:  # the network's own forward() may raise anything on symbols
        why = f"torch.fx cannot trace the network ({typed_line(error, 120)})"
        return Wiring(unreadable=why, problem=problem, model=model)
    if not torch.allclose(found, expected, rtol=STAYS_WITHIN * torch.finfo(found.dtype).eps):
        why = "what torch.fx traced gives other outputs than the network"
        return Wiring(unreadable=why, problem=problem, model=model)
    return replace(reader.wiring, problem=problem, model=model)


class _Reader(Trace):
    """A run of the graph that keeps track of whose features every tensor holds."""

    def __init__(self, model: nn.Module, coupled: bool) -> None:
        super().__init__(model)
        self.sizes = self.without_values()
        self.reasons = _reasons(self, model)
        self.tags: dict[fx.Node, _Tag] = {}
        self.wiring = Wiring(coupled=coupled)

    def run_node(self, n: fx.Node) -> Any:
        """Run one operation."""
        tags = {node: self.tags[node] for node in n.all_input_nodes if node in self.tags}
        arguments, options = self.fetch_args_kwargs_from_env(n)
        out = super().run_node(n)
        what = self.what(n)
        kind = operation_of(what, hooks=True) if n.op == "call_module" else None
        if n.op == "call_module" and kind is None and _is_closed(what):
            closed = Link(str(n.target), 0, refused=f"torch.fx does not look into {type(what).__name__}")
            for links in (self.wiring.orders, self.wiring.scales):
                links.setdefault(closed.source, closed)
        if n.op == "output":
            for tag in tags.values():
                tag.refuse(OUTPUTS)
        elif kind is not None and kind.name in _LAYERS:
            self._linear(n, what, tags, out)
        elif kind is not None and kind.name == "batch norm":
            self._norm(n, what, tags, out)
        elif tags and n not in self.sizes:
            after = self._passed(n, tags, arguments[1:], options, out)
            if after is not None:
                self.tags[n] = after
        return out

    def _linear(self, n: fx.Node, module: Any, tags: dict[fx.Node, _Tag], out: Tensor) -> None:
        """Note that a layer reads its input's features, and makes features of its own."""
        name, why = str(n.target), self.reasons.get(id(module), "")
        for fed in tags.values():
            owner = rules.read(module, fed.ids)
            if why or owner is None:
                fed.refuse(f"{name} reads them: {why or 'some of its inputs are several features in turn'}")
                continue
            for link in {id(one): one for one in (fed.order, fed.scale) if one is not None}.values():
                link.readers.append(Reader(name, owner))
            if fed.order is not None:
                _refuse_order(fed.order, name, module, owner)
        order, scale = (Link(name, len(module.weight), refused=why) for _ in range(2))
        if getattr(module, "groups", 1) > 1:
            order.refuse("its groups of channels cannot be mixed")
        self.wiring.orders.setdefault(name, order)
        self.wiring.scales.setdefault(name, scale)
        if not why:
            self.tags[n] = _Tag(order, scale, rules.given(module, out))

    def _norm(self, n: fx.Node, module: Any, tags: dict[fx.Node, _Tag], out: Tensor) -> None:
        """Note that a BatchNorm takes its input's scale and sets its own; the order of features passes through."""
        name, why = str(n.target), self.reasons.get(id(module), "")
        if self.wiring.coupled or module.running_mean is None:
            why = "it normalises by the samples of a batch"
        shape = (-1, *(1,) * (out.ndim - 2))
        channels = torch.arange(module.num_features).reshape(shape).expand(out.shape)
        tag = next(iter(tags.values()), None)
        if tag is not None and (why or not torch.equal(tag.ids, channels)):
            tag.refuse(f"{name} reads them: {why or 'its channels are not their features'}")
        mine = Link(name, module.num_features, refused=why or ("" if module.affine else "it has no affine map"))
        self.wiring.scales.setdefault(name, mine)
        if why:
            return
        order = None if tag is None or tag.order is None or tag.order.refused else tag.order
        reader = Reader(name, torch.arange(module.num_features))
        if tag is not None and tag.scale is not None:
            tag.scale.readers.append(reader)
        if order is not None:
            order.norms.append(reader)
        self.tags[n] = _Tag(order, mine, channels)

    def _passed(
        self, n: fx.Node, tags: dict[fx.Node, _Tag], rest: tuple[Any, ...], options: dict[str, Any], out: Any
    ) -> _Tag | None:
        """Return the features after an operation on one tensor; None, with a reason at the source, if it stops them."""
        called, found = self.called(n), self.operation(n)
        if len(tags) > 1 or any(node not in tags and node not in self.sizes for node in n.all_input_nodes):
            _refuse_all(tags, f"they meet another tensor at {called}")
            return None
        feeds = tags.get(n.args[0]) if n.args and isinstance(n.args[0], fx.Node) else None
        done, homogeneous = rules.effect(found, rest, options)
        if feeds is None or found is None or done is None or not isinstance(out, Tensor):
            _refuse_all(tags, f"{called} is not known to act on each feature separately")
            return None
        ids = rules.moved(feeds.ids, found, self.what(n), rest, options, out)
        if ids is None:
            _refuse_all(tags, f"{called} mixes them")
            return None
        if feeds.scale is not None:
            feeds.scale.direct = False
            if not homogeneous:
                feeds.scale.refuse(f"{called} is not positively homogeneous")
        return replace(feeds, ids=ids)


def _is_closed(module: nn.Module) -> bool:
    """Return whether a module that is one step of the graph has layers inside, as torch's transformers have."""
    return isinstance(module, nn.RNNBase) or any(True for _ in module.children())


def _refuse_order(link: Link, name: str, module: Any, owner: Tensor) -> None:
    if getattr(module, "groups", 1) > 1:
        link.refuse(f"{name} reads them in groups")
    elif bool((torch.bincount(owner, minlength=link.features) * link.features != len(owner)).any()):
        link.refuse(f"{name} reads some of them more often than others")


def _refuse_all(tags: dict[fx.Node, _Tag], why: str) -> None:
    for tag in tags.values():
        tag.refuse(why)


def _reasons(trace: Trace, model: nn.Module) -> dict[int, str]:
    """Return why a layer must stay as it is, by the id of its module; nothing for one that may change."""
    calls = Counter(id(trace.what(n)) for n in trace.nodes if n.op == "call_module")
    holders = Counter(id(p) for m in model.modules() for p in {id(p): p for p in m._parameters.values()}.values())
    bare = {id(trace.fetch_attr(str(n.target))) for n in trace.nodes if n.op == "get_attr"}
    found = {}
    for module in {id(m): m for m in trace.module.modules() if type(m).__module__.startswith("torch.nn")}.values():
        own = [p for p in module._parameters.values() if p is not None]
        if calls[id(module)] > 1:
            found[id(module)] = f"it is called {calls[id(module)]} times"
        elif any(holders[id(p)] > 1 for p in own):
            found[id(module)] = "its parameters are tied to another layer's"
        elif any(id(p) in bare for p in own):
            found[id(module)] = "its parameters are used outside its call, too"
        elif hasattr(module, "weight") and "weight" not in module._parameters:
            found[id(module)] = "its weight is made from other parameters"
        elif hooked(module):
            found[id(module)] = "a hook may change what it reads or gives"
    return found
