"""Parameters spread over processes: by `fully_shard` (FSDP2), or by tensor parallelism.

The process that writes is the first one; what may differ by rounding between processes, and decides something, is taken
from it. FSDP2 keeps whole parameters and pending gradients beside each process's part. torch has no public names for
this; those it has are used here alone. Other networks are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from flatlens.errors import BadModel

_PLAIN: Mapping[str, object] = {
    "reduce_grads": True,
    "all_reduce_grads": True,
    "gradient_divide_factor": None,
    "force_sum_reduction_for_comms": False,
}
"""Settings of a group of parameters with which a gradient is the mean over processes, at once."""


@contextmanager
def parts_between_calls(model: nn.Module) -> Iterator[None]:
    """Leave each process its part of every parameter, before this context, after it, and after each forward inside.

    Otherwise the outermost module keeps its parameters whole until a backward, as other tensors. Gradients inside are
    means over the processes; those that wait to be added up are put away, and restored.

    >>> with parts_between_calls(nn.Linear(2, 1)) as nothing:
    ...     nothing
    """
    modules = _wrapped(model)
    for module in modules:  # the outermost first, as in a first forward, which decides what it keeps whole
        module._get_fsdp_state()._lazy_init()
    to_parts(model)
    groups = _groups(modules)
    waiting = [one for group in groups for one in _pending(group)]
    with _set(groups, lambda group: {**_PLAIN, "post_forward_mesh_info": group.mesh_info}):
        try:
            for holder, name, _ in waiting:
                setattr(holder, name, None)
            yield
        finally:
            to_parts(model)
            for holder, name, gradient in waiting:
                setattr(holder, name, gradient)


@contextmanager
def whole_parameters(model: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[list[Tensor]]:
    """Give the tensors that a forward inside this context uses as these parameters, in their order.

    Each process holds them whole until the end, so that a backward can be differentiated: otherwise it frees them.

    >>> net = nn.Linear(2, 1, bias=False)
    >>> with whole_parameters(net, dict(net.named_parameters())) as tensors:
    ...     tensors[0] is net.weight
    True
    """
    modules = _wrapped(model)
    with _set(_groups(modules), lambda _: {"post_forward_mesh_info": None, "reshard_after_backward": False}):
        try:
            for module in modules:
                module.unshard()
            whole = dict(model.named_parameters()) if modules else parameters
            yield [whole[name] for name in parameters]
        finally:
            to_parts(model)


def to_parts(model: nn.Module) -> None:
    """Leave each process its part of every parameter: after a forward without a backward, some are whole."""
    for module in _wrapped(model):
        module.reshard()


def in_one_piece(tensor: Tensor) -> Tensor:
    """Return a tensor whose parts lie in several processes in one piece; any other as it is."""
    full: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def of_the_first(tensor: Tensor, sharded: bool) -> Tensor:
    """Return the first process's tensor in every process, if parameters are spread over them; else the tensor."""
    if sharded:
        dist.broadcast(tensor, 0)
    return tensor


def require_all_processes(model: nn.Module) -> None:
    """Refuse parameters that are spread over some of the processes: the others have another network, or none."""
    over = max((p.device_mesh.size() for p in model.parameters() if hasattr(p, "device_mesh")), default=None)
    if over is not None and over != (size := dist.get_world_size()):
        raise BadModel(
            f"Problem(model=...): its parameters are spread over {over} of the {size} processes of torch.distributed, "
            f"and a network is measured by all of them: use a mesh of all, or measure a copy in one piece (full_tensor)"
        )


def _wrapped(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]


def _groups(modules: list[Any]) -> list[Any]:
    """Return the groups of parameters that are gathered together; older versions of torch have one a module."""
    found: list[Any] = []
    for module in modules:
        state = module._get_fsdp_state()
        found += getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in found if group is not None]


def _pending(group: Any) -> Iterator[tuple[Any, str, Tensor]]:
    """Yield the gradients of a group that are not added up over the processes yet: where they are kept, and they."""
    for one in group.fsdp_params:
        for holder, name in ((one, "unsharded_accumulated_grad"), (getattr(one, "_unsharded_param", None), "grad")):
            if (gradient := getattr(holder, name, None)) is not None:
                yield holder, name, gradient


@contextmanager
def _set(groups: list[Any], wanted: Callable[[Any], Mapping[str, object]]) -> Iterator[None]:
    """Set attributes of groups, those that this version of torch has, and restore them."""
    earlier = [
        (group, name, getattr(group, name)) for group in groups for name in wanted(group) if hasattr(group, name)
    ]
    try:
        for group, name, _ in earlier:
            setattr(group, name, wanted(group)[name])
        yield
    finally:
        for group, name, kept in earlier:
            setattr(group, name, kept)
