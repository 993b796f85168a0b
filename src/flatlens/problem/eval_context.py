"""Contexts that put the model in eval mode while it is measured, and restore everything afterwards."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from flatlens.errors import BadInput, BadModel, ForwardFailed, one_line
from flatlens.problem.batches import checksum
from flatlens.problem.data import random_kept
from flatlens.problem.measured_copy import attributes_kept, catch_up, in_turn
from flatlens.problem.op_overrides import (
    held_by_all,
    plain_autocast,
    plain_embeddings,
    plain_gradients,
    plain_operations,
    plain_weight_norms,
    replaced,
)
from flatlens.problem.ranks import parts_between_calls
from flatlens.user_code import said, users_code

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
    model: nn.Module, *, batch_statistics: bool = False, tf32: bool = False, twice: bool = True
) -> Iterator[None]:
    """Put the model in eval mode with gradients on, and restore all of its state afterwards, also after an error.

    Operations that torch differentiates wrongly, or once only, are computed by plain ones (`problem.op_overrides`;
    attention, too, unless `twice` is False: its fast kernels can be differentiated once).

    Float32 stays float32, also under autocast, the network's own included. On CUDA, torch convolves in TF32 by default,
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
        with parts_between_calls(model), _restored(model, batch_statistics, tf32, twice):
            yield


@contextmanager
def _restored(model: nn.Module, batch_statistics: bool, tf32: bool, twice: bool) -> Iterator[None]:
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)] if batch_statistics else []
    compiled = "torch._dynamo" in sys.modules  # its import takes a second; without it nothing is compiled
    as_written = partial(torch.compiler.set_stance, "force_eager")
    with (
        _buffers_kept(model),
        replaced((p, "grad", None) for p in model.parameters()),  # forward() may add to an existing gradient
        users_code(hook_failed, hooks=True),
        modes_kept(model),
        random_kept(devices),
        torch.inference_mode(False),
        torch.enable_grad(),
        held_by_all("math attention", partial(sdpa_kernel, SDPBackend.MATH)) if twice else nullcontext(),
        # in float32 under any autocast, or in TF32
        torch.autocast(device_of(model).type, enabled=False),
        plain_autocast(),
        _tf32(tf32),
        torch.autograd.set_detect_anomaly(False),  # its search for NaN cannot look into batched derivatives
        plain_embeddings(model),
        plain_gradients(model),
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
