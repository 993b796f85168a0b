"""Networks under FSDP2 (`fully_shard`): when each process holds whole parameters, and when its part of them.

torch has no public names for this; those it has are used here alone. Other networks are left as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def parts_between_calls(model: nn.Module) -> Iterator[None]:
    """Leave each process its part of every parameter, before this context, after it, and after each forward inside.

    Without this the outermost module keeps its parameters whole until a backward, under other names' tensors.

    >>> with parts_between_calls(nn.Linear(2, 1)) as nothing:
    ...     nothing
    """
    modules = _wrapped(model)
    for module in modules:  # the outermost first, as in a first forward, which decides what it keeps whole
        module._get_fsdp_state()._lazy_init()
    groups = _groups(modules)
    earlier = [group.post_forward_mesh_info for group in groups]
    try:
        _to_parts(modules)
        for group in groups:
            group.post_forward_mesh_info = group.mesh_info
        yield
    finally:
        _to_parts(modules)
        for group, kept in zip(groups, earlier, strict=True):
            group.post_forward_mesh_info = kept


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
    groups = _groups(modules)
    earlier = [(group.post_forward_mesh_info, group.reshard_after_backward) for group in groups]
    try:
        for module in modules:
            module.unshard()
        for group in groups:
            group.post_forward_mesh_info, group.reshard_after_backward = None, False
        whole = dict(model.named_parameters()) if modules else parameters
        yield [whole[name] for name in parameters]
    finally:
        for group, (forward, backward) in zip(groups, earlier, strict=True):
            group.post_forward_mesh_info, group.reshard_after_backward = forward, backward
        _to_parts(modules)


def _wrapped(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]


def _groups(modules: list[Any]) -> list[Any]:
    """Return the groups of parameters that are gathered together; older versions of torch have one a module."""
    found: list[Any] = []
    for module in modules:
        state = module._get_fsdp_state()
        found += getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in found if group is not None]


def _to_parts(modules: list[Any]) -> None:
    for module in modules:
        module.reshard()
