"""What went wrong in the user's own code, in one line: its errors, and the causes of what a check has found.

An error of the network's forward pass or of the loss is told with its likely cause and the way on. A cause of what a
check has found (random outputs, coupled samples, NaN) is tested before it is named, in further passes whose calls are
watched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from flatlens.errors import FORWARD, Code, ForwardFailed, Give, LossFailed, Words
from flatlens.problem.batches import tensors_in
from flatlens.problem.data import seeded
from flatlens.problem.loss import Loss
from flatlens.problem.op_overrides import NO_LOOP, OperationMode
from flatlens.user_code import said, users_code

_Cause = TypeVar("_Cause", bound=Words)


@contextmanager
def losing(loss: Loss, where: str, f: Tensor, y: Any) -> Iterator[None]:
    """Raise any exception of the loss as one line that says where in the data it happened."""

    def failed(line: str) -> LossFailed:
        return LossFailed(f"the loss failed on {where} ({line})", value=loss, remedy=_mend_of_loss(line, f, y))

    with users_code(failed):
        try:
            yield
        except LossFailed as error:
            raise error.__cause__ or error from None


def forward_failed(
    line: str,
    where: str,
    model: nn.Module | None = None,
    batch: Any = None,
    itself: Callable[[], object] | None = None,
) -> ForwardFailed:
    """Error of a failed forward(), from a line on the exception; `itself` runs it in its owner's dtype."""
    what = "forward failed on ", where, f" ({line})"
    if NO_LOOP in line:
        return ForwardFailed(what)
    return ForwardFailed(what, remedy=_mend_of_forward(line, model, tensors_in(batch), itself))


def _mend_of_forward(line: str, model: nn.Module | None, inputs: list[Tensor], itself: Any) -> Words:
    name = getattr(getattr(type(model), "forward", None), "__qualname__", "")
    if name and f"{name}() " in line and re.match("TypeError: .*(missing|takes|unexpected)", line):
        return (
            "it does not take the inputs that the data give: give several as a tuple, ((x, mask), y), or in a dict by "
            "their names, or call the network yourself: ",
            FORWARD,
        )
    given = f"inputs of {', '.join(map(_kind, inputs[:4]))}" if inputs else "the inputs"
    kinds = {kind.lower() for kind in re.findall(r"\b(BFloat16|Half|Float|Double|Long|Int)(?:Tensor)?\b", line, re.I)}
    if len(kinds) > 1 and "type" in line:
        if itself is not None and _works(itself):
            return (
                "the network is measured in a copy of another dtype, and forward() casts to a fixed one: cast to the "
                "weight's dtype, as in x.to(self.layer.weight.dtype)"
            )
        if kinds & {"long", "int"}:
            return f"it needs numbers of another type, floating ones or whole ones, and gets {given}: cast them"
        if model is not None and (held := _held(model, lambda one, p: one.dtype != p.dtype)):
            return f"the attribute {held} has another dtype than the weights: cast it in forward(), or make it a buffer"
        return "forward() computes in several dtypes: cast to the weight's, as in x.to(self.layer.weight.dtype)"
    if "device" in line:
        if model is not None and (held := _held(model, lambda one, p: one.device != p.device)):
            return f"the attribute {held} is on another device than the weights: make it a buffer (register_buffer)"
        return "forward() makes a tensor on another device than its inputs: give it device=x.device"
    if line.startswith("IndexError: index out of range in self"):
        return f"an embedding has fewer rows than the largest index of {given} needs"
    if re.search(_SHAPES, line):
        return f"forward() gets {given}: does the network take these shapes?"
    return f"its own code raised this, on {given}"


def _works(call: Callable[[], object]) -> bool:
    with suppress(Exception):
        call()
        return True
    return False


def _held(model: nn.Module, other: Callable[[Tensor, Tensor], bool]) -> str:
    """Return the name of a floating tensor, a plain attribute or a buffer, that is other than the first parameter."""
    first = next(model.parameters(), torch.zeros(()))
    for name, module in model.named_modules():
        for key, value in {**vars(module), **module._buffers}.items():
            if isinstance(value, Tensor) and value.is_floating_point() and other(value, first):
                return f"{key!r} of {repr(name) if name else 'the network'}"
    return ""


def _mend_of_loss(line: str, f: Tensor, y: Any) -> str:
    if isinstance(y, list | tuple) and any(isinstance(one, str) for one in y):
        return "the labels are text: number the classes 0, 1, ..."
    if "'Tensor' object has no attribute" in line:
        return (
            "the loss gets the .logits of the network's result if it has any (a Categorical normalises them), else its "
            "tensor: compute the loss from a tensor"
        )
    given = f"outputs of shape {tuple(f.shape)}, and targets of {_kind(y)}"
    whole = isinstance(y, Tensor) and not y.is_floating_point()
    if f.ndim > 1 and whole and y.numel() and "out of bounds" in line:
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= f.shape[1]:
            classes = (
                f"{f.shape[1]} outputs are classes 0 to {f.shape[1] - 1}" if f.shape[1] > 1 else "there is 1 output"
            )
            return f"the targets run from {low} to {high}, and {classes}"
    if re.search(r"\b(d?type|LongTensor|int64)\b", line):
        if isinstance(y, Tensor) and (
            re.search("to be Long|Expected dtype int|LongTensor|found (Double|Float)$", line) and not whole
        ):
            return "the targets are floating numbers where class numbers are needed: give y.long()"
        if whole and re.search("output type Long|but found Long|Found dtype Long|got Long", line):
            return "the targets are whole numbers where floating ones are needed: give y.float()"
        if f.dtype == torch.float64:
            return (
                "the loss gets float64 outputs: cast its own tensors with .to(outputs.dtype), or, for class weights, "
                "give nn.CrossEntropyLoss(weight=...)"
            )
    if "does not require grad" in line:
        return "it is not differentiable: compute it from the outputs, without argmax, comparison or detach()"
    if re.search(_SHAPES, line):
        return f"it gets {given}: does it take these shapes?"
    return f"its own code raised this, on {given}"


@contextmanager
def retold(where: str | Callable[[], str]) -> Iterator[None]:
    """Add to the error of a failed forward() where in the data it happened."""
    try:
        yield
    except ForwardFailed as error:
        cause, place = error.__cause__ or error, where if isinstance(where, str) else where()
        if isinstance(error.what, tuple):  # of `forward_failed`: what, where, line
            raise error.but(what=(error.what[0], place, error.what[2])) from cause
        raise forward_failed(said(cause), place) from cause


def _kind(y: Any) -> str:
    return f"shape {tuple(y.shape)} and {y.dtype}" if isinstance(y, Tensor) else f"type {type(y).__name__}"


_SHAPES = r"shape|[Ss]ize|dimension|channels|[0-9]D|elements|unpack|\.dim\b|subscript|indices for tensor"
"""Words of torch's and Python's errors about shapes."""

# Causes of what a check has found

_Run = Callable[[], Tensor]  #: one pass of the network: its outputs, (n, N)

_FIRST_AXES = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.RNNBase)
"""Layers that read (tokens, samples, features) unless they are made with batch_first=True."""


@dataclass(frozen=True, eq=False)
class Watched:
    """A recorded call of a module."""

    name: str
    module: nn.Module
    inputs: list[Tensor]
    outputs: list[Tensor]
    graded: bool  #: whether autograd can differentiate the outputs


class _Watch(OperationMode):
    """A context that records the calls of a network's modules, and the operations that draw numbers or make NaN."""

    def __init__(self, model: nn.Module, values: bool = True) -> None:
        super().__init__()
        self.model, self.values = model, values
        self.calls: list[Watched] = []  #: in the order in which they end: layers before what is made of them
        self.draws: list[tuple[str, str]] = []  #: (module, operation) that draws random numbers
        self.own_generator = False  #: whether one of these draws from another generator than torch's global one
        self.broken: list[tuple[str, str]] = []  #: (module, operation) that makes NaN of numbers
        self.without_graph: list[tuple[str, str]] = []  #: (module, operation) under torch.no_grad()
        self._inside: list[str] = []
        self._hooks = ExitStack()

    def __enter__(self) -> _Watch:
        for name, module in self.model.named_modules():
            begin = module.register_forward_pre_hook(lambda *_, name=name: self._inside.append(name), prepend=True)
            end = module.register_forward_hook(
                lambda module, args, kwargs, output, name=name: self._ended(name, module, (args, kwargs), output),
                with_kwargs=True,
            )
            self._hooks.callback(begin.remove)
            self._hooks.callback(end.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def _ended(self, name: str, module: nn.Module, given: Any, output: Any) -> None:
        self._inside.pop()
        graded = any(leaf.requires_grad for leaf in _tensors(output))
        copies = (_copies(given), _copies(output)) if self.values else ([], [])
        self.calls.append(Watched(name, module, *copies, graded))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look at its result."""
        named = (self._inside[-1] if self._inside else "", func._schema.name.partition("::")[2].strip("_"))
        if torch.Tag.nondeterministic_seeded in func.tags and "scaled_dot" not in named[1] and "sdp" not in named[1]:
            self.draws.append(named)
            self.own_generator |= any(isinstance(one, torch.Generator) for one in tree_leaves((args, kwargs)))
        if not torch.is_grad_enabled():
            self.without_graph.append(named)
        before = self.values and all(map(_sound, tree_leaves((args, kwargs))))
        result = func(*args, **(kwargs or {}))
        if before and "empty" not in named[1] and not all(map(_sound, tree_leaves(result))):
            all_masked = named[1] in ("softmax", "log_softmax") and bool((args[0] == -torch.inf).all(args[1]).any())
            self.broken.append((named[0], f"{named[1]} of a row that is all -inf" if all_masked else named[1]))
        return result

    def place(self, name: str) -> str:
        """Return a module in words: a layer by its name, anything else by the forward() of its class."""
        module = self.model.get_submodule(name)
        kind = type(module).__name__
        if type(module).__module__.startswith("torch.nn."):
            return f"the layer {name!r} ({kind})" if name else f"the network ({kind})"
        return f"forward() of {name!r} ({kind})" if name else f"forward() of {kind}"

    def places(self, found: Iterable[tuple[str, str]], joined: str = " and ") -> str:
        """Return modules with their operations in words, at most three of each."""
        of: dict[str, list[str]] = {}
        for name, operation in dict.fromkeys(found):
            of.setdefault(name, []).append(operation)
        each = [f"{self.place(name)} (in {', '.join(operations[:3])})" for name, operations in of.items()]
        return joined.join(each[:3]) + (", ..." if len(each) > 3 else "")


def if_found(cause: Callable[[], _Cause]) -> _Cause | str:
    """Return a cause in words; empty if looking for it fails, since the network is faulty already."""
    with suppress(Exception):
        return cause()
    return ""


def _watched(model: nn.Module, run: _Run, *, values: bool = True) -> _Watch:
    watch = _Watch(model, values)
    with watch:
        run()
    return watch


def why_random(model: nn.Module, run: _Run, alike: Callable[[Tensor, Tensor], bool]) -> str:
    """Return why a network gives different outputs for the same batch, and the way on; `alike` compares outputs."""
    watch = _watched(model, run, values=False)
    mend = "draw them beforehand, and give them with the data as an input (docs/recipes.md)"
    if is_random(run, alike):
        what = watch.places(watch.draws) if watch.draws else "forward()"
        which = "random numbers" if watch.draws else "random numbers of NumPy or Python"
        return f"{what} draws {which}, also in eval mode: {mend}"
    if watch.own_generator:
        return f"{watch.places(watch.draws)} draws random numbers from a generator of its own: {mend}"
    buffers = [(name, buffer, buffer.detach().clone()) for name, buffer in model.named_buffers()]
    first = run()
    written = [(name, buffer, before) for name, buffer, before in buffers if not torch.equal(buffer, before)]
    for _, buffer, before in written:
        buffer.copy_(before)
    if written and alike(first, run()):
        if _observes(model.get_submodule(written[0][0].rpartition(".")[0])):
            return _observing(watch.place(written[0][0].rpartition(".")[0]))
        return (
            f"forward() changes the buffer {written[0][0]!r}, on which its outputs depend, also in eval mode: change "
            f"it only where self.training is true"
        )
    apart = _first_apart(_watched(model, run).calls, _watched(model, run).calls, None, 0)
    where = f"the first to differ is {watch.place(apart.name)}" if apart else "forward() differs outside of its layers"
    return (
        f"no buffer and no random numbers of torch, NumPy or Python cause it; {where}: a counter, a cache, a clock, or "
        f"sums in an order that varies are possible"
    )


def is_random(call: Callable[[], object], alike: Callable[[Any, Any], bool]) -> bool:
    """Return whether calls that differ are the same from the same random state: global random numbers cause it."""
    found = []
    for _ in range(2):
        with seeded(0):
            found.append(call())
    return alike(*found)


def why_cut(model: nn.Module, run: _Run) -> str:
    """Return where outputs lose their graph, so that they depend differentiably on nothing."""
    with torch.enable_grad():
        watch = _watched(model, run, values=False)
    if watch.without_graph:
        return f"torch.no_grad() or torch.inference_mode() is on in {watch.places(watch.without_graph)}"
    cut = next((call.name for call in watch.calls if not call.graded), None)
    where = "forward=" if cut is None else watch.place(cut)
    return f"{where} cuts them off: detach(), .data, argmax, rounding, a comparison or NumPy does"


def why_no_slope(batch: Any) -> str:
    """Return why the outputs depend differentiably on no input of a batch."""
    x = batch[0] if isinstance(batch, tuple) and batch else batch
    if any(map(torch.is_floating_point, tensors_in(x))):
        return "forward() does not use them, or cuts them off: detach(), rounding, a comparison or NumPy does"
    return "they are whole numbers"


def training_in(function: Any) -> str:
    """Return the name of a network in train mode that a function uses; empty if there is none."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    known = {name: function.__globals__.get(name) for name in code.co_names}
    known |= {name: cell.cell_contents for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True)}
    return next((name for name, one in known.items() if isinstance(one, nn.Module) and one.training), "")


def why_coupled(model: nn.Module, whole: _Run, alone: _Run, rows: Tensor, n: int, ways: str) -> Words:
    """Return where outputs begin to depend on the batch, by passes of all n samples and of `rows`; then `ways`."""
    first, second = _watched(model, whole), _watched(model, alone)
    found = _first_apart(first.calls, second.calls, rows, n)
    if found is None:
        one = next((call for call in reversed(first.calls) if call.name == ""), None)
        other = next((call for call in reversed(second.calls) if call.name == ""), None)
        if one and other and _all_same(one.outputs, other.outputs, rows, n):
            return f"forward=, after the network, mixes the samples: {ways}"
        return f"forward() takes them together: {ways}"
    module, place = found.module, first.place(found.name)
    if isinstance(module, _BatchNorm):
        give = (Give("batchnorm", "train"), " with ", Give("ghost_batch", Code("k")))
        return f"{place} normalises over the batch: ", *give, " measures the network in batches of k"
    batch_first = getattr(module, "batch_first", getattr(getattr(module, "self_attn", None), "batch_first", True))
    if isinstance(module, _FIRST_AXES) and not batch_first:
        return f"{place} takes axis 0, that of the samples, for the tokens: make it with batch_first=True"
    if _observes(module):
        return _observing(place)
    if drawn := [draw for draw in first.draws if draw[0] == found.name]:
        return (
            f"{first.places(drawn)} draws random numbers for the whole batch: draw them beforehand, and give them with "
            f"the data"
        )
    return f"{place} mixes them: {ways}"


def _observes(module: nn.Module) -> bool:
    """Return whether a module of fake quantisation adapts its range to every batch."""
    return bool(getattr(module, "observer_enabled", torch.zeros(1)).any())


def _observing(place: str) -> str:
    return f"{place} observes the range of each batch: model.apply(torch.ao.quantization.disable_observer) stops it"


def why_not_finite(model: nn.Module, run: _Run) -> str:
    """Return where outputs begin that are not finite, also in float64."""
    watch = _watched(model, run)
    if not watch.broken:
        return "it begins with a number that is not finite in forward() itself"
    return f"it arises in {watch.places(watch.broken, ' or ')}"


def _first_apart(whole: list[Watched], alone: list[Watched], rows: Tensor | None, n: int) -> Watched | None:
    for one, other in zip(whole, alone, strict=False):
        if one.name != other.name:
            return None
        if _all_same(one.inputs, other.inputs, rows, n) and not _all_same(one.outputs, other.outputs, rows, n):
            return one
    return None


def _all_same(whole: list[Tensor], alone: list[Tensor], rows: Tensor | None, n: int) -> bool:
    if len(whole) != len(alone):
        return False
    return all(_same(one, other, rows, n) for one, other in zip(whole, alone, strict=True))


def _same(one: Tensor, other: Tensor, rows: Tensor | None, n: int) -> bool:
    """Return whether `other` has the values of some samples of `one`, on axis 0 or 1, or several rows for each."""
    if rows is not None and one.ndim:
        k, rows = len(rows), rows.to(one.device)
        if len(one) % n == 0 and len(other) * n == len(one) * k and one.shape[1:] == other.shape[1:]:
            one = one.reshape(n, -1, *one.shape[1:])[rows].reshape(other.shape)
        elif one.ndim > 1 and one.shape[1] == n and other.shape[1:2] == (k,):
            one = one[:, rows]
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    scale = float(one.abs().nan_to_num(0.0, 0.0, 0.0).max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=1e4 * torch.finfo(one.dtype).eps * scale, equal_nan=True)


def _tensors(values: Any) -> list[Tensor]:
    if not isinstance(values, Tensor | tuple | list | dict):
        values = vars(values) if hasattr(values, "__dict__") else values
    return tensors_in(values)


def _copies(values: Any) -> list[Tensor]:
    return [leaf.detach().clone() for leaf in _tensors(values)]


def _sound(leaf: Any) -> bool:
    return not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not bool(leaf.isnan().any())
