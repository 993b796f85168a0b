"""The network that is measured, and its state meanwhile: a copy on the user's weights, in eval mode.

Measuring changes much of a network for a time: modes, options of modules, gradients, hooks, buffers, and what
forward() keeps in attributes. All of this happens in a copy, so that the user's network can be read and used
meanwhile, also by another thread. Modules, buffers and attributes are copied. A parameter of the copy is a tensor of
its own, with a `requires_grad` and a `grad` of its own, on the memory of the user's parameter: it takes no memory,
and the copy sees each step of training.

Some networks have no such copy: their attributes cannot be copied (locks, open files), their parameters lie in
several processes, or their functions hold the user's modules or parameters, as a closure does, and would run these
instead. They are measured in place, and `measuring` restores everything afterwards. Threads that measure one network
do so one after the other (`in_turn`).
"""

from __future__ import annotations

import copy
import math
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader, Dataset
from torch.utils.weak import WeakIdKeyDictionary

from flatlens.errors import BadInput, BadModel, ForwardFailed, one_line
from flatlens.problem.batches import checksum
from flatlens.problem.data import random_kept
from flatlens.problem.op_overrides import (
    held_by_all,
    plain_autocast,
    plain_modules,
    plain_operations,
    plain_weight_norms,
    replaced,
)
from flatlens.problem.ranks import parts_between_calls
from flatlens.user_code import said, users_code

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
def in_turn(model: nn.Module) -> Iterator[None]:
    """Wait until no other thread measures this network; contexts of one thread may be nested.

    >>> net = nn.Linear(2, 1)
    >>> with in_turn(net), in_turn(net):
    ...     pass
    """
    own, here = _turns.get(model), threading.get_ident()
    with ExitStack() as stack:
        for turn in _of(model) if own is None or own.thread != here else ():
            if turn.thread != here:
                stack.enter_context(turn.lock)
                turn.thread = here
                stack.callback(setattr, turn, "thread", None)
        yield


def turn_together(copied: nn.Module, model: nn.Module) -> None:
    """Let a copy of a network have its turns with the network."""
    turns = _of(model)
    with _LOCK:
        _turns[copied] = turns[0]


def _of(model: nn.Module) -> list[_Turn]:
    """Return the turns of a network: one, unless it joins networks that were measured before."""
    with _LOCK:
        each = {part: _turns.get(part) for part in (*model.modules(), *model.parameters())}
        known = {turn.number: turn for turn in each.values() if turn is not None}
        turns = [known[number] for number in sorted(known)] or [_Turn()]
        _turns.update({part: turns[0] for part, turn in each.items() if turn is None})
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

    Torch's modules are left alone: they keep none, and where their weight is not a parameter, hooks or forward() set it
    in each pass.
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
"""Attributes that are not part of the network, and may be large: a copy has them in common with its original."""
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
    # it has all that its original has, and other modules and tensors under the same names
    kinds = ("named_modules", "named_parameters", "named_buffers")
    names, own = ([[name for name, _ in getattr(m, kind)()] for kind in kinds] for m in (model, copied))
    if names != own or _ids(copied) & _ids(model):
        return None
    pairs = zip(model.modules(), copied.modules(), strict=True)
    if any(vars(new).get(k) is None for one, new in pairs for k, v in vars(one).items() if v is not None):
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
            mine, new = ((t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for t in (own, now))
            if mine != new:
                own.data = now.detach()
        theirs = dict(original.named_buffers(remove_duplicate=False))
        for name, kept in copied.named_buffers(remove_duplicate=False):
            kept.data = theirs.get(name, kept).detach().clone()


class _Copying(TorchFunctionMode):
    """Leaves tensors with a graph, which torch does not copy, as they are: forward() or a hook makes them anew."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and args[0].grad_fn is not None:
            return args[0]
        return func(*args, **kwargs or {})


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


_T = TypeVar("_T")


def unwrapped(model: _T) -> _T:
    """Return the network inside torch's wrappers, with its own names of layers; anything else unchanged.

    >>> net = nn.Linear(2, 1)
    >>> unwrapped(nn.DataParallel(net)) is net
    True
    """
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif (dynamo := sys.modules.get("torch._dynamo")) and isinstance(model, dynamo.OptimizedModule):
            model = model._orig_mod
        else:
            return model


def modes_kept(model: nn.Module) -> AbstractContextManager[None]:
    """Restore every module's mode, train or eval, afterwards."""
    return replaced((module, "training", module.training) for module in model.modules())


@contextmanager
def measuring(
    model: nn.Module,
    *,
    batch_statistics: bool = False,
    tf32: bool = False,
    twice: bool = True,
    casts: bool = False,
) -> Iterator[None]:
    """Put the model in eval mode with gradients on, and restore all of its state afterwards, also after an error.

    Operations that torch differentiates wrongly, or once only, are computed by plain ones (`problem.op_overrides`;
    attention, too, unless `twice` is False: its fast kernels can be differentiated once).

    Float32 stays float32, also under autocast, the network's own included, and with `casts` where forward() casts to a
    half type. On CUDA, torch convolves in TF32 by default,
    which keeps 10 of 23 bits; here it is off unless `tf32`. With `batch_statistics` every BatchNorm normalises by its
    own batch, as in training, and does not update its running statistics.

    `.grad` is put away and restored: nothing inside needs it. Buffers that forward() writes to are restored; a
    forward() that writes to parameters is refused when the Problem is made (`untouched`). A copy on the weights of a
    network first gets the values that these have now. Threads that measure one network do so one after the other.

    >>> net = nn.Dropout(0.5)
    >>> with measuring(net):
    ...     net.training
    False
    >>> net.training
    True
    """
    require_own_torch()
    with in_turn(model):
        catch_up(model)
        modules, parameters = [*model.modules()], [*model.parameters()]
        devices = sorted({p.device.index or 0 for p in parameters if p.device.type == "cuda"})
        norms = [m for m in modules if isinstance(m, _BatchNorm)] if batch_statistics else []
        compiled = "torch._dynamo" in sys.modules  # its import takes a second; without it nothing is compiled
        as_written = partial(torch.compiler.set_stance, "force_eager")
        # forward() may add to an existing gradient; eval() sets the modes
        before = [(p, "grad", None) for p in parameters] + [(m, "training", m.training) for m in modules]
        with (
            parts_between_calls(model),
            _buffers_kept(model),
            replaced(before),
            users_code(hook_failed, hooks=True),
            random_kept(devices),
            torch.inference_mode(False),
            torch.enable_grad(),
            held_by_all("math attention", partial(sdpa_kernel, SDPBackend.MATH)) if twice else nullcontext(),
            # in float32 under any autocast, or in TF32
            torch.autocast(device_of(model).type, enabled=False),
            plain_autocast(casts=parameters[0].dtype if casts else None),
            _tf32(tf32),
            torch.autograd.set_detect_anomaly(False),  # its search for NaN cannot look into batched derivatives
            plain_modules(model),
            plain_weight_norms(model),
            held_by_all("plain operations", plain_operations),
            # compiled code calls no hooks and has no second derivative
            held_by_all("eager", as_written) if compiled else nullcontext(),
        ):
            try:
                model.eval()
            except Exception as error:
                remedy = "of a module of torch.export, pass the nn.Module that was exported"
                raise BadModel(f"eval() failed ({said(error)})", remedy=remedy) from error
            # a BatchNorm's running statistics are neither used nor updated
            as_trained = (("training", True), ("track_running_stats", False))
            # attributes last: some of the others set them
            with replaced((norm, *setting) for norm in norms for setting in as_trained), attributes_kept(model):
                yield


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore buffers, to which forward() may write, or which it may replace by other tensors."""
    held = [(module, dict(module._buffers)) for module in model.modules()]
    buffers = [(buffer, buffer.detach(), buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, own in held:
            module._buffers.clear()
            module._buffers.update(own)
        with torch.no_grad():
            for buffer, memory, before in buffers:
                _put_back(buffer, memory, before)


def hook_failed(line: str) -> ForwardFailed:
    """Return the error for user code that torch called during differentiation."""
    return ForwardFailed(f"code of the network's own, such as a hook, failed ({line})")


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Refuse a forward() that writes to parameters, replaces or adds them; restore them."""
    modules = [(module, dict(module._modules), dict(module._parameters)) for module in model.modules()]
    kept = [(name, p, p.detach(), p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()]
    try:
        yield
    except BaseException as error:
        with suppress(*() if isinstance(error, Exception) else (BadModel,)):  # this is the more useful error
            _require_untouched(model, modules, kept)
        raise
    _require_untouched(model, modules, kept)


def _require_untouched(model: nn.Module, modules: list[Any], kept: list[Any]) -> None:
    before, now = [(name, p) for name, p, *_ in kept], list(model.named_parameters())
    for module, children, parameters in modules:
        for own, was in ((module._modules, children), (module._parameters, parameters)):
            own.clear()
            own.update(was)
    written = []
    with torch.no_grad():
        for name, p, memory, values, trainable in kept:
            moved = p.requires_grad != trainable or _put_back(p, memory, values)
            p.requires_grad_(trainable)
            written += [name] * moved
    if written:
        raise BadModel(
            f"forward() changes the parameter {written[0]!r} in place (its old value was restored)",
            remedy="do this in the training step, or only where self.training is true, which it is not here "
            "(F.embedding(..., max_norm=...) does it, too)",
        )
    if [(name, id(p)) for name, p in before] != [(name, id(p)) for name, p in now]:
        other = {name: id(p) for name, p in now}
        name = next((name for name, p in [*before, *now] if other.get(name) != id(dict(before).get(name))), "")
        raise BadModel(
            f"forward() creates the parameter {name!r} or replaces it",
            remedy="create it in __init__, or run the model once on a batch first",
        )


def _put_back(tensor: Tensor, memory: Tensor, before: Tensor) -> bool:
    """Restore a tensor's memory and values; return whether they were changed.

    The values are compared, not the version: native kernels write running statistics without a new version, and so does
    every write through `.data`.
    """
    if tensor.layout != torch.strided:
        if torch.equal(tensor.to_dense(), before.to_dense()):
            return False
        tensor.copy_(before)
        return True
    moved = tensor.data_ptr() != memory.data_ptr() or tensor.shape != memory.shape
    if moved:
        tensor.data = memory
    if written := not torch.equal(memory, before):
        tensor.copy_(before)
    return moved or written


def copy_of(model: nn.Module, needed_by: str, instead: str = "") -> nn.Module:
    """Return a copy of a network; the error says what it is `needed_by`, and what does without one."""
    try:
        return copy.deepcopy(model)
    except Exception as error:  # old weight_norm cannot be copied, and the user's modules may raise anything
        what, mend = _uncopied(model)
        raise BadModel(
            f"{needed_by} needs a copy of the network, and {what} cannot be copied ({one_line(error, 120)})",
            remedy=f"{instead}{mend}",
        ) from error


def _uncopied(model: nn.Module) -> tuple[str, str]:
    for name, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if key not in ("_modules", "_parameters", "_buffers")}
        for key, value in {**own, **module._parameters, **module._buffers}.items():
            try:
                copy.deepcopy(value)
            except Exception:
                mend = "make it outside the network, or in forward()"
                if isinstance(value, Tensor):
                    mend = "detach() it, or compute it in forward()"
                    if f"{key}_g" in module._parameters:
                        mend = "use torch.nn.utils.parametrizations.weight_norm, not torch.nn.utils.weight_norm"
                where = f"{key!r} of {repr(name) if name else 'the network'}"
                return f"the attribute {where} ({type(value).__name__})", mend
    return "it", "see the error of copy.deepcopy(model)"


def size_of_parts(model: nn.Module, needed_by: str, outputs: Callable[[nn.Module], Tensor]) -> float:
    """Return the largest of the `outputs` of a copy with each weight moved by up to a tenth; 0 if it is not finite.

    Outputs that are differences of two equal parts are 0, or no more than rounding, and their rounding is that of the
    parts. In the copy the parts are not equal, so that its outputs show their size.
    """
    moved, generator = copy_of(model, needed_by), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in filter(torch.is_floating_point, moved.parameters()):
            p.mul_(0.9 + 0.2 * torch.rand(p.shape, dtype=torch.float64, generator=generator).to(p))
    largest = float(outputs(moved).abs().max())
    return largest if math.isfinite(largest) else 0.0


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter."""
    return next(model.parameters(), torch.empty(0)).device


def require_own_torch() -> None:
    """Refuse to run where torch makes other tensors than those that are asked for."""
    modes = [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise BadInput(
            "flatlens cannot run inside a function that torch.func transforms: call it outside of vmap or grad"
        )
    if "FakeTensorMode" in modes:
        raise BadInput("flatlens cannot run under FakeTensorMode, whose tensors have no values: call it outside of it")
    device = torch.get_default_device()
    if device.type != "cpu":
        raise BadInput(
            f"torch's default device is {device}, and flatlens makes its own tensors on the processor: call it inside "
            f"`with torch.device('cpu'):` (the network stays where it is)"
        )


@contextmanager
def _tf32(on: bool) -> Iterator[None]:
    """Set the precision of float32's products by the one of torch's two interfaces that was used before.

    Torch refuses to mix them. Convolutions and recurrences on a processor have the newer one alone.
    """
    cudnn, newer, processors = torch.backends.cudnn, "fp32_precision", torch.backends.mkldnn
    places = [(getattr(processors, name, None), newer, "ieee") for name in ("conv", "rnn")]
    try:
        matmul, _ = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:
        how = "tf32" if on else "ieee"
        places += [(place, newer, how) for place in (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)]  # type: ignore[attr-defined]
        with replaced([*places, (getattr(processors, "matmul", None), newer, "ieee")]):
            yield
        return
    with replaced([*places, (cudnn, "allow_tf32", on)]):
        torch.set_float32_matmul_precision("high" if on else "highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(matmul)


def differentiable(parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Make frozen parameters differentiable inside this context."""
    return replaced((p, "requires_grad", True) for p in parameters if not p.requires_grad and p.is_floating_point())


@contextmanager
def moved_in_place(tensors: list[Tensor]) -> Iterator[tuple[list[Tensor], Callable[[Iterable[Tensor]], None]]]:
    """Give the tensors' values, and a function that puts others in their place; they have their own again afterwards.

    Each gets other memory for a time: nothing is written to its own, which a copy of a network shares with the user's.
    Graphs that hold a tensor stay valid. Only a tensor that is spread over processes is written to.
    """
    here = [tensor.detach().clone() if hasattr(tensor, "to_local") else tensor.detach() for tensor in tensors]

    def put(values: Iterable[Tensor]) -> None:
        for tensor, value in zip(tensors, values, strict=True):
            if hasattr(tensor, "to_local"):
                tensor.data.copy_(value)
            else:
                tensor.data = value

    try:
        yield here, put
    finally:
        put(here)


def fingerprint(p: Tensor) -> tuple[int, ...]:
    """Return a fingerprint that shows a changed parameter: identity, version, freezing, and a checksum of the values.

    The checksum is needed because writing to `.data` does not change the version.
    """
    return id(p), p.data_ptr(), p._version, p.requires_grad, checksum(p)
