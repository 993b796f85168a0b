"""Plain operations in place of those that torch differentiates wrongly, or that do not give the risk's derivative.

Each is a context for measuring. It restores everything afterwards, costs nothing where the network has no such
module, and changes outputs by rounding errors at most.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops import utils as control_flow
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils import checkpoint as checkpoints
from torch.utils._pytree import tree_leaves

from flatlens.errors import BadModel

_PLAIN: dict[str, object] = {"sparse": False, "scale_grad_by_freq": False, "max_norm": None}
"""Options of an embedding while it is measured.

A sparse gradient cannot be differentiated again; `scale_grad_by_freq` depends on how often the batch holds a row, so
it is not the risk's gradient; and `max_norm` writes to the weight.
"""


@contextmanager
def plain_embeddings(model: nn.Module) -> Iterator[None]:
    """Set every embedding's options to `_PLAIN`; refuse rows that the next lookup would shorten to `max_norm`."""
    tables = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    for name, table in tables:
        _require_short_rows(f"{name}.weight" if name else "weight", table)
    before = [(table, option, getattr(table, option)) for _, table in tables for option in _PLAIN]
    try:
        for table, option, _ in before:
            setattr(table, option, _PLAIN[option])
        yield
    finally:
        for table, option, was in before:
            setattr(table, option, was)


def _require_short_rows(name: str, table: nn.Embedding | nn.EmbeddingBag) -> None:
    """Refuse rows longer than `max_norm`; without such rows a lookup does not change the weight."""
    if table.max_norm is None:
        return
    W = table.weight.detach()
    most = table.max_norm * (1 + 1e3 * torch.finfo(W.dtype).eps)
    long = int((torch.linalg.vector_norm(W, table.norm_type, 1) > most).sum())
    if long:
        raise BadModel(
            f"{long} of {len(W)} rows of {name!r} exceed max_norm={table.max_norm:g}. Each lookup would rescale them "
            "in place and change the network. Rescale them first",
            remedy=f"{name}.data.renorm_({table.norm_type:g}, 0, {table.max_norm:g})",
        )


@contextmanager
def plain_weight_norms(model: nn.Module) -> Iterator[None]:
    """Compute weight_norm (a hook or a parametrisation) as v (g / ||v||).

    The second derivative of torch's fused kernel is wrong (2.13): it treats the saved norms as constants.
    """
    hooks = [(m, hook) for m in model.modules() for hook in m._forward_pre_hooks.values() if type(hook) is WeightNorm]
    fused: list[tuple[Any, str, object]] = [
        *((m, "forward", partial(_of_parts, m.dim)) for m in model.modules() if type(m) is _WeightNorm),
        *((hook, "compute_weight", partial(_of_module, hook.name, hook.dim)) for _, hook in hooks),
    ]
    fused = [(owner, name, plain) for owner, name, plain in fused if name not in vars(owner)]  # contexts may be nested
    weights = [(module, hook.name, getattr(module, hook.name)) for module, hook in hooks]
    try:
        for owner, name, plain in fused:
            setattr(owner, name, plain)
        for module, hook in hooks:
            hook(module, None)  # the cached weight may belong to older parameters
        yield
    finally:
        for owner, name, _ in fused:
            delattr(owner, name)
        for module, name, weight in weights:
            setattr(module, name, weight)


@contextmanager
def plain_norms(model: nn.Module) -> Iterator[None]:
    """Give batch and instance norms contiguous inputs and gradients.

    Where an axis has length 1 (a batch of one sample), torch 2.13 misreads the channels-last memory format, and the
    first derivative is already wrong. An instance norm makes such an axis itself. The hooks are torch's global ones:
    hooks on the module would make its operation unknown.
    """
    norms = {m for m in model.modules() if isinstance(m, _BatchNorm | _InstanceNorm)}

    def laid_out(norm: nn.Module, t: Any) -> Any:
        whole = isinstance(t, Tensor) and (1 in t.shape or isinstance(norm, _InstanceNorm))
        return t.contiguous() if whole else t

    def before(norm: nn.Module, given: Any) -> Any:
        return tuple(laid_out(norm, t) for t in given) if norm in norms else None

    def after(norm: nn.Module, given: Any, z: Any) -> None:
        if norm in norms and isinstance(z, Tensor) and z.requires_grad:
            z.register_hook(lambda slope: laid_out(norm, slope))  # type: ignore[no-untyped-call]

    hooks = [register_module_forward_pre_hook(before), register_module_forward_hook(after)] if norms else []
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def plain_parametrizations() -> Iterator[None]:
    """Compute parametrised weights again: one that was cached without a graph does not depend on any parameter."""
    with _replaced(parametrize, "_cache_enabled", 0), _replaced(parametrize, "_cache", {}):
        yield


@contextmanager
def plain_gradients(model: nn.Module) -> Iterator[None]:
    """Put away hooks on the gradients of parameters and modules.

    A hook that clips or scales a gradient, for training, makes it another than the risk's.
    """
    hooks = [p._backward_hooks for p in model.parameters()]
    hooks += [kept for module in model.modules() for kept in (module._backward_hooks, module._backward_pre_hooks)]
    before = [(kept, dict(kept)) for kept in hooks if kept]
    try:
        for kept, _ in before:
            kept.clear()
        yield
    finally:
        for kept, own in before:
            kept.update(own)


_LOCK = threading.RLock()
_HELD: dict[Hashable, tuple[int, ExitStack]] = {}
"""By what is held: (how many contexts hold it, what ends it)."""


@contextmanager
def held_by_all(what: Hashable, hold: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Hold a setting of torch's until the last of these contexts ends: threads may measure at the same time.

    `hold` makes the context that sets it and puts it back. Only the first of these contexts enters one: put back in
    another order than set, the setting would stay.
    """
    with _LOCK:
        contexts, end = _HELD.get(what) or (0, ExitStack())
        if not contexts:
            end.enter_context(hold())
        _HELD[what] = contexts + 1, end
    try:
        yield
    finally:
        with _LOCK:
            contexts, end = _HELD.pop(what)
            if contexts > 1:
                _HELD[what] = contexts - 1, end
            else:
                end.close()


def _replaced(owner: Any, name: str, plain: object) -> AbstractContextManager[None]:
    """Replace an attribute of torch's."""

    @contextmanager
    def hold() -> Iterator[None]:
        before = getattr(owner, name)
        setattr(owner, name, plain)
        try:
            yield
        finally:
            setattr(owner, name, before)

    return held_by_all((owner, name), hold)


def plain_attention() -> AbstractContextManager[None]:
    """Compute nn.MultiheadAttention without its fast path, which calls no hooks and has no derivative."""

    @contextmanager
    def hold() -> Iterator[None]:
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(before)

    return held_by_all("fast attention", hold)


_WIDENED = threading.local()  #: `on` in a thread whose networks keep float32 under an autocast of their own
_ENTER_AUTOCAST = torch.autocast.__enter__


def _enter_autocast(cast: torch.autocast) -> Any:
    found = _ENTER_AUTOCAST(cast)  # type: ignore[no-untyped-call]
    if getattr(_WIDENED, "on", False):
        torch.set_autocast_dtype(cast.device, torch.float32)
    return found


@contextmanager
def plain_autocast(on: bool = True) -> Iterator[None]:
    """Let an autocast of the network's own cast to float32, in this thread; if not `on`, to the dtype that it names.

    Derivatives and differences would be rounding, and its cache of cast weights outlives moves of them.
    """
    before = getattr(_WIDENED, "on", False)
    with _replaced(torch.autocast, "__enter__", _enter_autocast):
        try:
            _WIDENED.on = on
            yield
        finally:
            _WIDENED.on = before


@contextmanager
def in_bfloat16(kind: str) -> Iterator[None]:
    """Compute in bfloat16 on devices of this kind."""
    with plain_autocast(on=False), torch.autocast(kind, torch.bfloat16, cache_enabled=False):
        yield


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    return F.relu6(input + 3) / 6


@contextmanager
def plain_hardsigmoid() -> Iterator[None]:
    """Compute F.hardsigmoid, and so nn.Hardsigmoid, as relu6(x + 3) / 6.

    torch's own has no second derivative, and its first derivative rounds 1/6 to float32.
    """
    with _replaced(F, "hardsigmoid", _hardsigmoid):
        yield


_RECURRENCES = {name: getattr(torch._VF, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}


@contextmanager
def plain_recurrences() -> Iterator[None]:
    """Compute nn.LSTM, nn.GRU and nn.RNN by torch's plain operations, without mkldnn and cuDNN.

    mkldnn's LSTM (float32, bfloat16 and float16 on CPU) is one node of the graph, so its weights would not be seen as
    matrices of products. cuDNN's recurrences have no second derivative, and in eval mode not even a first one.
    """
    with ExitStack() as stack:
        for name, fast in _RECURRENCES.items():
            stack.enter_context(_replaced(torch._VF, name, partial(_without_backends, fast)))
        yield


def _without_backends(recurrence: Callable[..., Any], *given: Any) -> Any:
    # only here: convolutions need them for speed
    with _replaced(torch.backends.mkldnn, "enabled", False), _replaced(torch.backends.cudnn, "enabled", False):
        return recurrence(*given)


class _NotReentrant:
    """Stands in for torch's `CheckpointFunction`: what it recomputes can be differentiated as often as is needed."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Return what the function returns."""
        again = checkpoints.checkpoint
        return again(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


class _Counted(checkpoints._checkpoint_hook):
    """Counts the parts of a graph whose values backward() computes anew."""

    made = 0

    def __init__(self, frame: Any) -> None:
        _Counted.made += 1
        super().__init__(frame)


def checkpoints_made() -> int:
    """Return how many checkpoints forward passes have made so far, while networks were measured."""
    return _Counted.made


@contextmanager
def plain_checkpoints() -> Iterator[None]:
    """Compute `checkpoint(..., use_reentrant=True)` as with False, and count checkpoints.

    The reentrant kind gives no derivatives to chosen tensors, and none at all to the parameters inside if its own
    inputs have none, as in a network's first block: these would silently count as 0.
    """
    hook = _replaced(checkpoints, "_checkpoint_hook", _Counted)
    with _replaced(checkpoints, "CheckpointFunction", _NotReentrant), hook:
        yield


@contextmanager
def plain_operations() -> Iterator[None]:
    """Compute all that no module of the network has a part in, plainly, in every thread."""
    with plain_hardsigmoid(), plain_recurrences(), plain_parametrizations(), plain_checkpoints(), plain_attention():
        yield


@contextmanager
def plain_control_flow() -> Iterator[None]:
    """Run torch.cond and torch.while_loop as Python's `if` and `while`; refuse torch's other control flow.

    Torch compiles them also where nothing else is compiled. Compiled code calls no hooks; run without its compiler, a
    branch has no derivative in the parameters that it reads, without an error.
    """
    if not hasattr(control_flow, "_hop_compile_and_call"):  # another version of torch
        yield
        return
    with _replaced(control_flow, "_hop_compile_and_call", _in_python):
        yield


NO_LOOP = "gives no derivative in the parameters that its function reads: write a loop of Python"


def _in_python(wrapper: Callable[..., Any], given: tuple[Any, ...], named: Any = None) -> Any:
    if wrapper.__name__ == "_cond_op_wrapper":
        chosen, true, false, operands = given
        return (true if chosen else false)(*operands)
    if wrapper.__name__ == "_while_loop_op_wrapper":
        goes_on, body, carried, more = given
        while goes_on(*tree_leaves(carried), *more):
            carried = body(*tree_leaves(carried), *more)
        return carried
    raise NotImplementedError(f"torch's {wrapper.__name__.strip('_')} {NO_LOOP}")


def _of_parts(dim: int, g: Tensor, v: Tensor) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _of_module(name: str, dim: int, module: nn.Module) -> Tensor:
    return _of_parts(dim, getattr(module, f"{name}_g"), getattr(module, f"{name}_v"))
