"""The network that is measured: a copy of the user's modules, on the weights of the user's network.

Measuring changes much of a network for a time: modes, options of modules, gradients, hooks, buffers, and what forward()
keeps in attributes. All of this happens in a copy, so that the user's network can be read and used meanwhile, also by
another thread. Modules, buffers and attributes are copied. A parameter of the copy is a tensor of its own, with a
`requires_grad` and a `grad` of its own, on the memory of the user's parameter: it takes no memory, and the copy sees
each step of training.

Some networks have no such copy: their attributes cannot be copied (locks, open files), their parameters lie in several
processes, or their functions hold the user's modules or parameters, as a closure does, and would run these instead.
They are measured in place.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset

from flatlens.errors import BadModel
from flatlens.problem.attributes import is_measured
from flatlens.problem.turns import turn_together

_LEFT = torch.optim.Optimizer, DataLoader, Dataset
"""Attributes that are no part of the network, and may be large: a copy has them in common with its original."""

_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
"""Attributes of a tensor that give its values; the others, such as its shape, tell nothing about them."""

_PLAIN = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
"""Types of attributes that hold nothing else."""

_MOST = 100_000
"""Most objects in the attributes of a network's modules that are looked at."""

_originals: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
"""By copy: the user's network."""


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
    known: dict[int, Any] = {id(p): _alias(p) for p in model.parameters()}
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
    if original is None or is_measured(copied):
        return
    theirs = dict(original.named_modules())
    with torch.inference_mode(False), torch.no_grad():
        for name, module in copied.named_modules():
            if (source := theirs.get(name)) is not None:
                for own, now in _pairs(module._parameters, source._parameters):
                    if _place(own) != _place(now):
                        own.data = now.detach()
                for own, now in _pairs(module._buffers, source._buffers):
                    own.data = now.detach().clone()


def _pairs(own: dict[str, Any], theirs: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tensors that both have under one name."""
    both = ((tensor, theirs.get(name)) for name, tensor in own.items())
    return ((tensor, other) for tensor, other in both if tensor is not None and other is not None)


def _place(p: Tensor) -> tuple[object, ...]:
    return p.data_ptr(), p.shape, p.stride(), p.dtype, p.device


def _alias(p: nn.Parameter) -> nn.Parameter:
    """Return another parameter on the same memory, with what else the user has noted on it."""
    with torch.inference_mode(False):
        alias = nn.Parameter(p.detach(), p.requires_grad)
    vars(alias).update(vars(p))
    return alias


class _Copying(TorchFunctionMode):
    """Leaves tensors with a graph, which torch does not copy, as they are: forward() or a hook makes them anew."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and args[0].grad_fn is not None:
            return args[0]
        return func(*args, **kwargs or {})


def _is_apart(copied: nn.Module, model: nn.Module) -> bool:
    """Return whether a copy has all that its original has, and other modules and tensors under the same names."""
    theirs = {id(one) for one in (*model.modules(), *model.parameters(), *model.buffers())}
    own = (*copied.modules(), *copied.parameters(), *copied.buffers())
    if _names(copied) != _names(model) or any(id(one) in theirs for one in own):
        return False
    pairs = zip(model.modules(), copied.modules(), strict=True)
    return not any(
        value is not None and vars(copy_of_it).get(name) is None
        for module, copy_of_it in pairs
        for name, value in vars(module).items()
    )


def _names(model: nn.Module) -> list[list[str]]:
    named = model.named_modules(), model.named_parameters(), model.named_buffers()
    return [[name for name, _ in each] for each in named]


def holds(given: Iterable[object], model: nn.Module, *, inside: bool = False) -> bool:
    """Return whether a function in some objects holds modules, parameters or buffers of a network.

    With `inside`, whether the objects themselves do, too: they are not copied with it.

    Functions are not copied: a patched forward(), a hook or a loss that holds a module of the user's
    would run or read this one.
    """
    theirs = {id(one) for one in (*model.modules(), *model.parameters(), *model.buffers())}
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
    with _reaching(original) as reached:
        try:
            yield
        except Exception as error:
            if reached:
                raise ReachesOriginal from None
            if isinstance(error, BadModel):  # a part of the network may be missing in its copy
                raise ReachesOriginal from error
            raise
    if reached:
        raise ReachesOriginal


@contextmanager
def _reaching(model: nn.Module) -> Iterator[list[None]]:
    """Give a list that is empty as long as this thread runs no module and reads no tensor of a network."""
    found: list[None] = []
    modules, here = {id(module) for module in model.modules()}, threading.get_ident()

    def note(module: nn.Module, given: Any) -> None:
        if id(module) in modules and threading.get_ident() == here:
            found.append(None)

    hook = register_module_forward_pre_hook(note)
    try:
        with _Reading({id(tensor) for tensor in (*model.parameters(), *model.buffers())}, found):
            yield found
    finally:
        hook.remove()


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
