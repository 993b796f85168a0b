"""The network that is measured: a copy of the user's modules, on the weights of the user's network.

Measuring changes much of a network for a time: modes, options of modules, gradients, hooks, buffers, and what
forward() keeps in attributes. All of this happens in a copy, so that the user's network can be read and used
meanwhile, also by another thread. Modules, buffers and attributes are copied. A parameter of the copy is a tensor of
its own, with a `requires_grad` and a `grad` of its own, on the memory of the user's parameter: it takes no memory,
and the copy sees each step of training.

Some networks have no such copy: their attributes cannot be copied (locks, open files), their parameters lie in
several processes, or their functions hold the user's modules or parameters, as a closure does, and would run these
instead. They are measured in place. Threads that measure one network do so one after the other (`in_turn`).
"""

from __future__ import annotations

import copy
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from types import FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset
from torch.utils.weak import WeakIdKeyDictionary

from flatlens.errors import BadModel

_LOCK = threading.Lock()
_numbers = count()
_turns: Any = WeakIdKeyDictionary()
"""By module and parameter of the networks that were measured: their `_Turn`."""


class _Turn:
    """A lock that its own thread passes, and that any thread may end.

    An RLock would stay locked for ever where a generator inside, left by an exception, is ended by another thread.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)  #: turns are taken in this order, so that no two threads wait for each other
        self.lock = threading.Lock()
        self.thread: int | None = None  #: whose turn it is

    @contextmanager
    def held(self) -> Iterator[None]:
        if self.thread == threading.get_ident():
            yield
            return
        with self.lock:
            self.thread = threading.get_ident()
            try:
                yield
            finally:
                self.thread = None


@contextmanager
def in_turn(model: nn.Module) -> Iterator[None]:
    """Wait until no other thread measures this network; contexts of one thread may be nested.

    >>> net = nn.Linear(2, 1)
    >>> with in_turn(net), in_turn(net):
    ...     pass
    """
    own = _turns.get(model)
    with ExitStack() as stack:
        for turn in _of(model) if own is None or own.thread != threading.get_ident() else ():
            stack.enter_context(turn.held())
        yield


def turn_together(copied: nn.Module, model: nn.Module) -> None:
    """Let a copy of a network have its turns with the network."""
    turns = _of(model)
    with _LOCK:
        _turns[copied] = turns[0]


def _of(model: nn.Module) -> list[_Turn]:
    """Return the turns of a network: one, unless it joins networks that were measured before."""
    with _LOCK:
        parts = [*model.modules(), *model.parameters()]
        known = {turn.number: turn for part in parts if (turn := _turns.get(part)) is not None}
        turns = [known[number] for number in sorted(known)] or [_Turn()]
        for part in parts:
            _turns.setdefault(part, turns[0])
        return turns


def _begin_anew() -> None:
    global _LOCK  # of a forked process: the threads that had turns are not there
    _LOCK = threading.Lock()
    for turn in list(_turns.values()):
        turn.lock, turn.thread = threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


# What forward() keeps in attributes

_OF_ALL = frozenset(vars(nn.Module()))  #: the attributes that every module has
_Held = list[tuple[nn.Module, dict[str, tuple[Any, Any]]]]
_held: WeakKeyDictionary[nn.Module, _Held] = WeakKeyDictionary()
"""By network that is measured: each module's attributes, and copies of the content of lists, dicts and sets."""


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Put back all plain attributes of the network's own modules afterwards, and whenever `put_back` is called inside.

    Torch's modules are left alone: they keep none, and where their weight is no parameter, hooks or forward() set it in
    each pass.
    """
    put_back(model)
    outer = _held.get(model)
    own = [module for module in model.modules() if not type(module).__module__.startswith("torch.nn.")]

    def content(value: Any) -> Any:
        return value.copy() if type(value) in (list, dict, set) else None

    _held[model] = [(m, {name: (vars(m)[name], content(vars(m)[name])) for name in _names(m)}) for m in own]
    try:
        yield
    finally:
        put_back(model)
        if outer is None:
            del _held[model]
        else:
            _held[model] = outer


def put_back(model: nn.Module) -> None:
    """Give a network that is measured the attributes that it had when `attributes_kept` began."""
    for module, before in _held.get(model, ()):
        attributes = vars(module)
        for name in _names(module) - before.keys():
            del attributes[name]
        for name, (value, content) in before.items():
            attributes[name] = value
            if content is not None:
                value.clear()
                if isinstance(value, list):
                    value.extend(content)
                else:
                    value.update(content)


def _names(module: nn.Module) -> set[str]:
    """Return the names of a module's own plain attributes, without weights that hooks of torch's compute."""
    computed = {name.removesuffix(end) for name in module._parameters for end in ("_orig", "_g")}
    return vars(module).keys() - _OF_ALL - computed


# The copy

_LEFT = torch.optim.Optimizer, DataLoader, Dataset
"""Attributes that are no part of the network, and may be large: a copy has them in common with its original."""
_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
"""Attributes of a tensor that give its values; the others, such as its shape, tell nothing about them."""
_PLAIN = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
"""Types of attributes that hold nothing else."""
_MOST = 100_000  #: most objects in the attributes of a network's modules that are looked at
_originals: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()  #: by copy: the user's network


def copy_on_same_weights(model: nn.Module) -> nn.Module | None:
    """Return a copy of a network whose parameters share the memory of its own; None if it has no such copy.

    >>> net = nn.Linear(2, 1)
    >>> copied = copy_on_same_weights(net)
    >>> copied.weight is net.weight, copied.weight.data_ptr() == net.weight.data_ptr()
    (False, True)
    """
    spread = any(hasattr(module, "_get_fsdp_state") for module in model.modules())
    if spread or any(type(p) is not nn.Parameter for p in model.parameters()):
        return None
    known: dict[int, Any] = {}
    for p in model.parameters():  # another parameter on the same memory, with what else the user has noted on it
        with torch.inference_mode(False):
            known[id(p)] = alias = nn.Parameter(p.detach(), p.requires_grad)
        vars(alias).update(vars(p))
    attributes = [one for module in model.modules() for one in vars(module).values() if type(one) not in _PLAIN]
    known |= {id(one): one for one in attributes if isinstance(one, _LEFT)}
    # most are empty, and deepcopy takes longest for these
    empty = [one for one in attributes if type(one) in (OrderedDict, dict, set, list) and not one]
    known |= {id(one): type(one)() for one in empty}
    try:
        if holds(attributes, model):
            return None
        with torch.inference_mode(False), torch.no_grad(), _Copying():
            copied: nn.Module = copy.deepcopy(model, known)
    except Exception:  # the user's modules may raise anything
        return None
    if not _is_apart(copied, model):
        return None
    _originals[copied] = model
    turn_together(copied, model)
    return copied


def original_of(model: nn.Module) -> nn.Module | None:
    """Return the user's network of a copy on its weights; None for any other network."""
    return _originals.get(model)


def catch_up(copied: nn.Module) -> None:
    """Give a copy the weights and buffers that its original has now, unless it is measured at this moment.

    Training in place is seen without this; `p.data = ...` and a loaded state may give a parameter other memory.
    """
    original = _originals.get(copied)
    if original is None or copied in _held:
        return
    with torch.inference_mode(False), torch.no_grad():
        theirs: dict[str, Tensor] = dict(original.named_parameters(remove_duplicate=False))
        for name, own in copied.named_parameters(remove_duplicate=False):
            now = theirs.get(name, own)
            if _place(own) != _place(now):
                own.data = now.detach()
        theirs = dict(original.named_buffers(remove_duplicate=False))
        for name, kept in copied.named_buffers(remove_duplicate=False):
            kept.data = theirs.get(name, kept).detach().clone()


def _place(p: Tensor) -> tuple[object, ...]:
    return p.data_ptr(), p.shape, p.stride(), p.dtype, p.device


class _Copying(TorchFunctionMode):
    """Leaves tensors with a graph, which torch does not copy, as they are: forward() or a hook makes them anew."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and args[0].grad_fn is not None:
            return args[0]
        return func(*args, **kwargs or {})


def _is_apart(copied: nn.Module, model: nn.Module) -> bool:
    """Return whether a copy has all that its original has, and other modules and tensors under the same names."""
    names = [
        [[name for name, _ in named] for named in (m.named_modules(), m.named_parameters(), m.named_buffers())]
        for m in (copied, model)
    ]
    if names[0] != names[1] or _ids(copied) & _ids(model):
        return False
    pairs = zip(model.modules(), copied.modules(), strict=True)
    return all(vars(own).get(k) is not None for one, own in pairs for k, v in vars(one).items() if v is not None)


def _ids(model: nn.Module) -> set[int]:
    return {id(one) for one in (*model.modules(), *model.parameters(), *model.buffers())}


def holds(given: Iterable[object], model: nn.Module, *, inside: bool = False) -> bool:
    """Return whether a function in some objects holds modules, parameters or buffers of a network.

    With `inside`, whether the objects themselves do, too: they are not copied with it. Functions are not copied: a
    patched forward(), a hook or a loss that holds a module of the user's would run or read this one.
    """
    theirs = _ids(model)
    waiting = [(one, inside) for one in given]
    seen: set[tuple[int, bool]] = set()
    while waiting:
        if len(seen) > _MOST:
            return True
        one, inside = waiting.pop()  # inside: whether a function holds it
        if type(one) in _PLAIN or (id(one), inside) in seen or isinstance(one, (type, ModuleType, *_LEFT)):
            continue
        seen.add((id(one), inside))
        if id(one) in theirs:
            if inside:
                return True
        elif isinstance(one, FunctionType):
            waiting += [(part, True) for part in _enclosed(one)]
        else:
            waiting += [(part, inside) for part in _parts(one)]
    return False


def _enclosed(function: FunctionType) -> Iterator[Any]:
    """Yield what a function holds: variables around it, default arguments, and networks and functions of its file."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a variable without a value yet
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for name in function.__code__.co_names:
        one = function.__globals__.get(name)
        own = isinstance(one, FunctionType) and one.__globals__ is function.__globals__
        if own or isinstance(one, nn.Module | Tensor | list | tuple | dict | partial):
            yield one


def _parts(one: Any) -> Iterable[Any]:
    """Return what an object holds, as far as a copy of it holds copies."""
    if isinstance(one, dict):
        return one.values()
    if isinstance(one, list | tuple | set | frozenset):
        return one
    if isinstance(one, MethodType):
        return one.__self__, one.__func__
    if isinstance(one, partial):
        return one.func, *one.args, *one.keywords.values()
    return vars(one).values() if hasattr(one, "__dict__") and not isinstance(one, Tensor) else ()


class ReachesOriginal(Exception):
    """A copy runs modules, or reads parameters, of its original; or it fails, perhaps for want of these."""


@contextmanager
def apart_from_original(copied: nn.Module) -> Iterator[None]:
    """Raise `ReachesOriginal` if a copy on the weights of the user's network reaches this inside, or fails."""
    if (original := original_of(copied)) is None:
        yield
        return
    reached: list[None] = []  # not empty once this thread has run a module or read a tensor of the original
    modules, here = {id(module) for module in original.modules()}, threading.get_ident()

    def note(module: nn.Module, given: Any) -> None:
        if id(module) in modules and threading.get_ident() == here:
            reached.append(None)

    hook = register_module_forward_pre_hook(note)
    try:
        with _Reading({id(tensor) for tensor in (*original.parameters(), *original.buffers())}, reached):
            yield
    except Exception as error:
        if reached:
            raise ReachesOriginal from None
        if isinstance(error, BadModel):  # a part of the network may be missing in its copy
            raise ReachesOriginal from error
        raise
    finally:
        hook.remove()
    if reached:
        raise ReachesOriginal


class _Reading(TorchFunctionMode):
    """Notes the operations of this thread on some tensors."""

    def __init__(self, tensors: set[int], found: list[None]) -> None:
        super().__init__()
        self._tensors, self._found = tensors, found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (*args, *(kwargs or {}).values())
        several = (part for one in given if isinstance(one, list | tuple) for part in one)
        attribute = getattr(func, "__name__", "") == "__get__" and func.__self__.__name__ not in _VALUES
        if not attribute and any(id(one) in self._tensors for one in (*given, *several)):
            self._found.append(None)
        return func(*args, **kwargs or {})
