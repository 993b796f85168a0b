"""Checks of the arguments of a Problem: each refuses in one line, or returns the argument in the form that is used."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flatlens.errors import BadInput, BadModel, Code, Give, UnknownName
from flatlens.problem.batches import finite
from flatlens.problem.data import Data
from flatlens.problem.eval_context import in_turn
from flatlens.problem.ranks import Ranks, in_one_piece

HALF = (torch.float16, torch.bfloat16)
Arithmetic = Literal["full", "tf32", "bfloat16"]
_MOST = 2**62  #: largest number of bytes; larger sizes become this
REDUCED_PRECISION = {"tf32": 2.0**-10, "bfloat16": torch.finfo(torch.bfloat16).eps}  #: machine epsilon of each mode


def require_usable(model: object, dtype: object) -> None:
    """Refuse anything but a network that can be hooked and differentiated."""
    if not isinstance(model, nn.Module):
        raise BadModel(f"a torch.nn.Module is needed, got {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"{name!r} is a ScriptModule, which" if name else "a ScriptModule"
            raise BadModel(f"{where} has no hooks", remedy="pass the nn.Module that it was compiled from")
        if is_quantised(module):
            raise BadModel(
                f"{repr(name) if name else 'the network'} ({type(module).__name__}) is quantised, and quantised "
                "weights have no derivatives: measure the network as it was before quantisation"
            )
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(p, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer):
            raise BadModel(f"{name!r} is not initialised", remedy="run the lazy model once on a batch first")
        if p.numel() == 0 and p.ndim > 1 and isinstance(p, nn.Parameter):
            raise BadModel(f"{name!r}, of shape {tuple(p.shape)}, is empty", remedy="remove its layer")
        if p.is_meta:
            raise BadModel(
                f"{name!r} is on the meta device, where tensors have no values",
                remedy="make the model on a device (model.to_empty(device=...), then load weights into it)",
            )
        if p.is_floating_point() and p.element_size() == 1:
            raise BadModel(f"{name!r} is {p.dtype}, with which torch cannot compute", remedy="call model.float() first")
        if p.layout != torch.strided and isinstance(p, nn.Parameter):
            raise BadModel(f"{name!r} is sparse", remedy="hold it as a dense parameter, p.to_dense()")
        if p.is_inference():
            raise BadModel(f"{name!r} was made under torch.inference_mode()", remedy="build the model outside it")
    if dtype is not None and dtype not in (torch.float32, torch.float64):
        raise BadInput("None, torch.float32 or torch.float64 is needed", argument="dtype", value=dtype)
    _require_real(model, dtype or measuring_dtype(model))


def is_quantised(module: nn.Module) -> bool:
    """Return whether a module computes with quantised weights; fake quantisation computes with float numbers.

    >>> is_quantised(nn.Linear(2, 2))
    False
    """
    tensors = [one for one in vars(module).values() if isinstance(one, Tensor)]
    held = [one for one in (*module._parameters.values(), *module._buffers.values(), *tensors) if one is not None]
    if any(one.is_quantized or type(one).__module__.startswith("torchao.") for one in held):
        return True
    return any(
        kind.__module__.startswith("torch.") and ".quantized" in kind.__module__ for kind in type(module).__mro__
    )


def _require_real(model: nn.Module, dtype: torch.dtype) -> None:
    """Refuse complex parameters, and complex buffers where a copy in `dtype` would lose their imaginary part."""
    copied = any(p.dtype != dtype for p in model.parameters())
    for name, tensor in [*model.named_parameters(), *(model.named_buffers() if copied else ())]:
        if tensor.is_complex():
            raise BadModel(
                f"{name!r} is complex ({tensor.dtype}), and in {dtype} its imaginary part would be dropped",
                remedy="hold both parts in a real tensor (torch.view_as_real), and join them in forward()",
            )


def require_finite_weights(model: nn.Module) -> None:
    """Refuse a network with NaN or inf in its parameters or running statistics; a mask may well hold -inf."""
    running = ("running_mean", "running_var")
    statistics = [(name, buffer) for name, buffer in model.named_buffers() if name.rpartition(".")[2] in running]
    for name, tensor in [*model.named_parameters(), *statistics]:
        if tensor.is_floating_point() and not finite(tensor):
            bad = int(in_one_piece((~torch.isfinite(tensor)).sum()))
            raise BadModel(
                f"{bad} of {tensor.numel()} entries of {name!r} are NaN or inf, as training that diverged or weights "
                "that were never set leave them: load a checkpoint without"
            )


def require_forward(forward: Any) -> Any:
    """Return forward=; refuse what cannot be called."""
    if forward is not None and not callable(forward):
        raise BadInput(
            f"a function (model, batch) -> (outputs, targets) is needed, got {type(forward).__name__}",
            argument="forward",
        )
    return forward


def require_ranks(ranks: object) -> Ranks:
    """Return ranks=; refuse anything but `Ranks`."""
    if not isinstance(ranks, Ranks):
        raise BadInput(
            "give Ranks.joined() under torchrun; leave ranks out in a single process", argument="ranks", value=ranks
        )
    return ranks


def require_same_form(test: Data) -> None:
    """Refuse test data whose labels lie at other places than those of dicts with labels."""
    next(test.chunks(1), None)
    if not test.labelled:
        raise BadInput(
            "the data are dicts with labels, and the network says which output a label belongs to",
            argument="test",
            remedy="give the test data in the same form",
        )


def require_arithmetic(arithmetic: Arithmetic, dtype: torch.dtype, device: torch.device) -> Arithmetic:
    """Return arithmetic=; refuse a reduced precision that would have no effect, or would contradict `dtype`."""
    if arithmetic not in ("full", *REDUCED_PRECISION):
        raise BadInput("'full', 'tf32' or 'bfloat16' is needed", argument="arithmetic", value=arithmetic)
    if arithmetic != "full" and dtype != torch.float32:
        raise BadInput(
            f"only for networks measured in float32, not in {dtype}", argument="arithmetic", value=arithmetic
        )
    if arithmetic == "tf32" and device.type != "cuda":
        raise BadInput(f"only for CUDA devices, and the network is on {device}", argument="arithmetic", value="tf32")
    return arithmetic


def chosen_parameters(model: nn.Module, which: str | Iterable[str]) -> frozenset[str]:
    """Return the names of the parameters that count in sums over parameters."""
    if which not in ("trainable", "all") if isinstance(which, str) else not isinstance(which, Iterable):
        raise BadInput("'trainable', 'all' or a list of parameter names is needed", argument="parameters", value=which)
    with in_turn(model):  # freezing differs while another thread measures it in place
        known = {name: p.requires_grad for name, p in model.named_parameters() if p.is_floating_point()}
    if isinstance(which, str):
        return frozenset(name for name, trainable in known.items() if which == "all" or trainable)
    names = list(which)
    for name in names:
        if not isinstance(name, str):
            shown = type(name).__name__ if isinstance(name, Tensor) else repr(name)
            raise BadInput("a list of parameter names is needed", argument="parameters", value=Code(f"[{shown}]"))
        if name not in known:
            raise UnknownName.among("parameter", name, known)
    return frozenset(names)


def require_present(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse a network that has lost a parameter of these names: what is left would be measured without a word."""
    known = [name for name, _ in model.named_parameters()]
    for name in sorted(set(names).difference(known)):
        raise BadModel(
            f"{UnknownName.among('parameter', name, known)} (it had this name when the Problem was made; pruning, for "
            "instance, gives another: make a new Problem with the present names)",
            argument="parameters",
            value=Code("[...]"),
        )


def measuring_dtype(model: nn.Module) -> torch.dtype:
    """Return the model's dtype; float32 for half types, in which derivatives are mostly rounding errors."""
    first = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return torch.float32 if first in HALF else first


def in_bytes(memory: str | int) -> int:
    """Return a size such as '1GiB' or '500 MB' in bytes.

    >>> in_bytes("1.5GiB"), in_bytes("500 MB")
    (1610612736, 500000000)
    """
    if isinstance(memory, int) and not isinstance(memory, bool) and memory > 0:
        return min(memory, _MOST)
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d*)?)\s*([KMGT]?I?)B?\s*", str(memory).upper())
    if match is None or match[2] not in units or float(match[1]) == 0:
        raise BadInput("a size is needed, such as '1GiB' or '500MB'", argument="memory", value=memory)
    return min(int(float(match[1]) * units[match[2]]), _MOST)


def require_ghosts(batchnorm: object, ghost_batch: object) -> None:
    """Refuse batchnorm='train' without ghost_batch, or the reverse."""
    if batchnorm not in ("eval", "train"):
        raise BadInput("'eval' or 'train' is needed", argument="batchnorm", value=batchnorm)
    if batchnorm == "eval" and ghost_batch is not None:
        what = "has an effect with ", Give("batchnorm", "train"), " only"
        raise BadInput(what, argument="ghost_batch", remedy="set both or neither")
    if batchnorm == "train" and not (isinstance(ghost_batch, int) and ghost_batch >= 2):
        needed = "the number of samples normalised together is needed, at least 2"
        raise BadInput(needed, argument="ghost_batch", value=ghost_batch)
