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
from flatlens.operations.table import ARITHMETIC, Effect, Trace, hooked, operation_of
from flatlens.problem import Problem
from flatlens.transforms.symmetries import STAYS_WITHIN, Symmetries, read_symmetries

OUTPUTS = "its features are the network's outputs"
_LAYERS = ("linear", "convolution")


@dataclass(frozen=True, eq=False)
class Reader:
    """A layer or norm that reads features of another.

    >>> import torch
    >>> Reader("2", torch.arange(4)).name
    '2'
    """

    name: str
    owner: Tensor  #: feature that each of its inputs belongs to, (inputs,)


@dataclass(eq=False)
class Link:
    """A layer or norm, and everything that reads its features.

    >>> Link("0", features=4).readers
    []
    """

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
    """The wiring of one network: whose features can be rescaled, and whose permuted.

    >>> import torch, flatlens as fl
    >>> from flatlens.transforms import read_wiring
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> problem = fl.Problem(net, "mse", (torch.ones(4, 3), torch.zeros(4, 2)))
    >>> [reader.name for reader in read_wiring(problem, net).scales["0"].readers]
    ['2']
    """

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
        self.reasons: dict[int, str] = {}  #: why a layer must stay as it is, by the id of its module
        self.tags: dict[fx.Node, _Tag] = {}
        self.wiring = Wiring(coupled=coupled)
        calls = Counter(id(self.what(n)) for n in self.nodes if n.op == "call_module")
        holders = Counter(id(p) for m in model.modules() for p in {id(p): p for p in m._parameters.values()}.values())
        bare = {id(self.fetch_attr(str(n.target))) for n in self.nodes if n.op == "get_attr"}
        for module in {id(m): m for m in self.module.modules() if type(m).__module__.startswith("torch.nn")}.values():
            own = [p for p in module._parameters.values() if p is not None]
            if calls[id(module)] > 1:
                self.reasons[id(module)] = f"it is called {calls[id(module)]} times"
            elif any(holders[id(p)] > 1 for p in own):
                self.reasons[id(module)] = "its parameters are tied to another layer's"
            elif any(id(p) in bare for p in own):
                self.reasons[id(module)] = "its parameters are used outside its call, too"
            elif hasattr(module, "weight") and "weight" not in module._parameters:
                self.reasons[id(module)] = "its weight is made from other parameters"
            elif hooked(module):
                self.reasons[id(module)] = "a hook may change what it reads or gives"

    def run_node(self, n: fx.Node) -> Any:
        """Run one operation."""
        tags = {node: self.tags[node] for node in n.all_input_nodes if node in self.tags}
        arguments, options = self.fetch_args_kwargs_from_env(n)
        out = super().run_node(n)
        what = self.what(n)
        kind = operation_of(what, hooks=True) if n.op == "call_module" else None
        # A module that is one step of the graph may have layers inside, as torch's transformers have
        layered = isinstance(what, nn.Module) and (isinstance(what, nn.RNNBase) or any(True for _ in what.children()))
        if n.op == "call_module" and kind is None and layered:
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
        # A layer reads its input's features, and makes features of its own
        name, why, grouped = str(n.target), self.reasons.get(id(module), ""), getattr(module, "groups", 1) > 1
        for fed in tags.values():
            # the feature of each input, if it is one
            rows = fed.ids.movedim(_feature_axis(module, fed.ids), -1)
            owner = rows[(0,) * (rows.ndim - 1)].clone()
            if why or not bool((rows == owner).all()):
                fed.refuse(f"{name} reads them: {why or 'some of its inputs are several features in turn'}")
                continue
            for link in {id(one): one for one in (fed.order, fed.scale) if one is not None}.values():
                link.readers.append(Reader(name, owner))
            if fed.order is not None and grouped:
                fed.order.refuse(f"{name} reads them in groups")
            elif fed.order is not None:
                features = fed.order.features
                if bool((torch.bincount(owner, minlength=features) * features != len(owner)).any()):
                    fed.order.refuse(f"{name} reads some of them more often than others")
        order, scale = (Link(name, len(module.weight), refused=why) for _ in range(2))
        if grouped:
            order.refuse("its groups of channels cannot be mixed")
        self.wiring.orders.setdefault(name, order)
        self.wiring.scales.setdefault(name, scale)
        if not why:
            axis = _feature_axis(module, out)
            ids = torch.arange(out.shape[axis]).reshape(-1, *(1,) * (out.ndim - 1 - axis)).expand(out.shape)
            self.tags[n] = _Tag(order, scale, ids)

    def _norm(self, n: fx.Node, module: Any, tags: dict[fx.Node, _Tag], out: Tensor) -> None:
        # A BatchNorm takes its input's scale and sets its own; the order of features passes through
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
        # The features after an operation on one tensor; None, with a reason at the source, if it stops them
        called, found = self.called(n), self.operation(n)
        feeds = tags.get(n.args[0]) if n.args and isinstance(n.args[0], fx.Node) else None
        # What it does to its first argument (None: unknown), and whether it is positively homogeneous
        done, homogeneous = (None, False) if found is None else (found.effect, found.homogeneous)
        by_number = len(rest) == 1 and isinstance(rest[0], int | float) and not options
        if found is not None and found.name in ARITHMETIC and by_number:
            done, homogeneous = "each", found.name in ARITHMETIC[2:] and rest[0] > 0
        ids = None
        if len(tags) > 1 or any(node not in tags and node not in self.sizes for node in n.all_input_nodes):
            why = f"they meet another tensor at {called}"
        elif feeds is None or found is None or done is None or not isinstance(out, Tensor):
            why = f"{called} is not known to act on each feature separately"
        else:
            why = f"{called} mixes them"
            ids = _moved(feeds.ids, done, found.axes, self.what(n), rest, options, out)
        if ids is None or feeds is None:
            for tag in tags.values():
                tag.refuse(why)
            return None
        if feeds.scale is not None:
            feeds.scale.direct = False
            if not homogeneous:
                feeds.scale.refuse(f"{called} is not positively homogeneous")
        return replace(feeds, ids=ids)


def _moved(
    ids: Tensor, done: Effect, axes: int, what: Any, rest: tuple[Any, ...], options: dict[str, Any], out: Tensor
) -> Tensor | None:
    """The feature of each entry of the output from those of the input, int64; None if an entry mixes several."""
    # The operation is `what`, a module, a function or a method's name; `rest` and `options` follow the input
    if done in ("identity", "each"):
        return ids.reshape(out.shape)
    if done == "window":
        if out.ndim != ids.ndim or ids.ndim <= axes:
            return None
        corner = ids
        for axis in range(ids.ndim - axes, ids.ndim):
            corner = corner.narrow(axis, 0, 1)
        return corner.expand(out.shape) if bool((ids == corner).all()) else None  # a window of one feature
    if done == "average":
        given = {name: options[name] for name in ("dim", "keepdim") if name in options}
        low, high = (torch.as_tensor(pick(*rest, **given)) for pick in (ids.amin, ids.amax))
        return low if low.shape == out.shape and torch.equal(low, high) else None
    if done == "shape":
        if isinstance(what, nn.Module):
            return torch.as_tensor(what(ids))
        name = what if isinstance(what, str) else what.__name__
        return torch.as_tensor(getattr(ids, "reshape" if name == "view" else name)(*rest, **options))
    return None


def _feature_axis(module: nn.Module, x: Tensor) -> int:
    """The axis of neurons or channels; convolutions may have no sample axis.

    >>> _feature_axis(nn.Conv2d(1, 2, 3), torch.ones(5, 1, 8, 8)), _feature_axis(nn.Linear(8, 2), torch.ones(5, 3, 8))
    (1, 2)
    """
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return x.ndim - 1 - len(module.kernel_size)
    return x.ndim - 1 if isinstance(module, nn.Linear) else 1
