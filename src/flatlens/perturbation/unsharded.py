"""Whole parameters of a network under FSDP2, which cuts a second derivative short by freeing them after a backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from flatlens.curvature.space import Space


@contextmanager
def whole_parameters(model: nn.Module, space: Space) -> Iterator[list[Tensor]]:
    """Give the tensors that a forward inside this context uses as the parameters of a space, in their order.

    Under FSDP2 each process holds every parameter whole until the end; those of any other network are given as they
    are. It raises AttributeError where this torch's FSDP2 is another than the one this was written for.

    >>> net = nn.Linear(2, 1, bias=False)
    >>> with whole_parameters(net, Space(dict(net.named_parameters()))) as tensors:
    ...     tensors[0] is net.weight
    True
    """
    spread: list[Any] = [m for m in model.modules() if hasattr(m, "unshard") and hasattr(m, "reshard")]
    groups = [group for module in spread for group in module._get_fsdp_state()._fsdp_param_groups]
    earlier = [group.reshard_after_backward for group in groups]  # it has a setter alone
    try:
        for module in spread:
            module.unshard()
        for group in groups:
            group.reshard_after_backward = False
        whole = dict(model.named_parameters()) if spread else space.parameters
        yield [whole[name] for name in space.parameters]
    finally:
        for group, kept in zip(groups, earlier, strict=True):
            group.reshard_after_backward = kept
        for module in spread:
            module.reshard()
