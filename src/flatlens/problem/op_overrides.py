"""Plain operations in place of those that torch differentiates wrongly, or that do not give the risk's derivative.

`plain_operations` has the table of torch's functions that are replaced while a network is measured, in every thread:
until the last thread has ended. Two kinds of module have options that training needs beside it: embeddings and hooks
are changed in the network that is measured alone. Everything is restored afterwards, and outputs change by rounding
errors at most.

A `TorchFunctionMode` would need no lock. But each call of torch's that flatlens makes itself would pass through it:
measures of a small network then take 1.7 times as long (torch 2.13). On during forward() alone it would miss what a
checkpoint recomputes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._higher_order_ops import utils as control_flow
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils import checkpoint as checkpoints
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from flatlens.errors import BadModel

HALF = (torch.float16, torch.bfloat16)


@contextmanager
def replaced(changes: Iterable[tuple[Any, str, object]]) -> Iterator[None]:
    """Set attributes, (owner, name, value), those that are there; restore them afterwards.

    >>> net = nn.Dropout()
    >>> with replaced([(net, "p", 0.0)]):
    ...     net.p
    0.0
    >>> net.p
    0.5
    """
    changes = [change for change in changes if hasattr(*change[:2])]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for (owner, name, value), (_, _, was) in zip(changes, before, strict=True):
            if value is not was:
                setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            if getattr(owner, name, None) is not value or value is None:  # a module is slow to set, and many stay
                setattr(owner, name, value)


def plain_operations() -> AbstractContextManager[None]:
    """Compute all that no module of the network has a part in, plainly, in every thread."""
    # (owner, name, what replaces it) of torch's own, for every network
    return replaced([
        *_NORMS,
        # torch's own has no second derivative, and its first derivative rounds 1/6 to float32
        (F, "hardsigmoid", lambda input, inplace=False: F.relu6(input + 3) / 6),
        *_RECURRENCES,
        # a parametrised weight that was cached without a graph does not depend on any parameter
        (parametrize, "_cache_enabled", 0),
        (parametrize, "_cache", {}),
        # the fast path of attention calls no hooks and has no derivative
        (torch.backends.mha, "_is_fastpath_enabled", False),
        (checkpoints, "CheckpointFunction", _NotReentrant),
        (checkpoints, "_checkpoint_hook", _Counted),
        (control_flow, "_hop_compile_and_call", _in_python),
    ])  # fmt: skip


_LOCK = threading.RLock()
_HELD: dict[Hashable, tuple[int, ExitStack]] = {}  #: by what is held: (how many contexts hold it, what ends it)


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


# Weight norms: the second derivative of torch's fused kernel is wrong (2.13), it treats the saved norms as constants


def _scaled(v: Tensor, g: Tensor, dim: int) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


_WEIGHT_NORMS: list[tuple[Any, str, object]] = [
    (_WeightNorm, "forward", lambda norm, g, v: _scaled(v, g, norm.dim)),
    (WeightNorm, "compute_weight",
     lambda hook, module: _scaled(getattr(module, f"{hook.name}_v"), getattr(module, f"{hook.name}_g"), hook.dim)),
]  # fmt: skip


@contextmanager
def plain_weight_norms(model: nn.Module) -> Iterator[None]:
    """Compute weight_norm (a hook or a parametrisation) as v (g / ||v||), and weights of hooks anew."""
    hooks = [(m, hook) for m in model.modules() for hook in m._forward_pre_hooks.values() if type(hook) is WeightNorm]
    with (
        held_by_all("weight norms", partial(replaced, _WEIGHT_NORMS)),
        # the weights that are there may belong to older parameters
        replaced([(module, hook.name, hook.compute_weight(module)) for module, hook in hooks]),
    ):
        yield


def _in_order(norm: Callable[..., Tensor], always: bool) -> Callable[..., Tensor]:
    """Return a norm that gets contiguous inputs and gradients.

    Where an axis has length 1 (a batch of one sample), torch 2.13 misreads the channels-last memory format, and the
    first derivative is already wrong. An instance norm makes such an axis itself.
    """

    def laid_out(t: Tensor | None) -> Tensor | None:  # autograd gives None where nothing depends on the norm
        return t.contiguous() if t is not None and (always or 1 in t.shape) else t

    @wraps(norm)
    def plain(input: Tensor, *given: Any, **options: Any) -> Tensor:
        z = norm(laid_out(input), *given, **options)
        if z.requires_grad:
            z.register_hook(laid_out)  # type: ignore[no-untyped-call]
        return z

    return plain


_NORMS: list[tuple[Any, str, object]] = [
    (F, "batch_norm", _in_order(F.batch_norm, False)), (F, "instance_norm", _in_order(F.instance_norm, True)),
]  # fmt: skip


def _without_backends(recurrence: Callable[..., Any], *given: Any) -> Any:
    """Compute nn.LSTM, nn.GRU or nn.RNN by torch's plain operations, without mkldnn and cuDNN.

    mkldnn's LSTM (float32, bfloat16 and float16 on CPU) is one node of the graph, so its weights would not be seen as
    matrices of products. cuDNN's recurrences have no second derivative, and in eval mode not even a first one.
    """
    # only here: convolutions need them for speed
    off = [(backend, "enabled", False) for backend in (torch.backends.mkldnn, torch.backends.cudnn)]
    with held_by_all("backends", partial(replaced, off)):
        return recurrence(*given)


_RECURRENCES: list[tuple[Any, str, object]] = [
    (torch._VF, name, partial(_without_backends, getattr(torch._VF, name)))
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
]


# Checkpoints: the reentrant kind gives no derivatives to chosen tensors, and none at all to the parameters inside if
# its own inputs have none, as in a network's first block: these would silently count as 0


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


# torch.cond and torch.while_loop as Python's `if` and `while`. Torch compiles them also where nothing else is compiled.
# Compiled code calls no hooks; run without its compiler, a branch has no derivative in the parameters that it reads,
# without an error.

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


# Options and hooks of the network's own modules

_PLAIN: dict[str, object] = {"sparse": False, "scale_grad_by_freq": False, "max_norm": None}
"""Options of an embedding while it is measured.

A sparse gradient cannot be differentiated again; `scale_grad_by_freq` depends on how often the batch holds a row, so
it is not the risk's gradient; and `max_norm` writes to the weight.
"""


@contextmanager
def plain_modules(model: nn.Module) -> Iterator[None]:
    """Set every embedding's options to `_PLAIN`, and put away hooks on gradients.

    Rows that the next lookup would shorten to `max_norm` are refused. A hook that clips or scales for training makes
    another gradient than the risk's.
    """
    options, hooks = list[tuple[Any, str, object]](), [p._backward_hooks for p in model.parameters()]
    for name, module in model.named_modules():
        hooks += [module._backward_hooks, module._backward_pre_hooks]
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        options += [(module, option, value) for option, value in _PLAIN.items()]
        if module.max_norm is not None:
            W, own = module.weight.detach(), f"{name}.weight" if name else "weight"
            most = module.max_norm * (1 + 1e3 * torch.finfo(W.dtype).eps)
            if long := int((torch.linalg.vector_norm(W, module.norm_type, 1) > most).sum()):
                raise BadModel(
                    f"{long} of {len(W)} rows of {own!r} exceed max_norm={module.max_norm:g}. Each lookup would "
                    "rescale them in place and change the network. Rescale them first",
                    remedy=f"{own}.data.renorm_({module.norm_type:g}, 0, {module.max_norm:g})",
                )
    before = [(kept, dict(kept)) for kept in hooks if kept]
    with replaced(options):
        try:
            for kept, _ in before:
                kept.clear()
            yield
        finally:
            for kept, hooks_before in before:
                kept.update(hooks_before)


_WIDENED = threading.local()  #: `on` in a thread whose networks keep float32 under an autocast of their own
_ENTER_AUTOCAST = torch.autocast.__enter__


def _enter_autocast(cast: torch.autocast) -> Any:
    found = _ENTER_AUTOCAST(cast)  # type: ignore[no-untyped-call]
    if getattr(_WIDENED, "on", False):
        torch.set_autocast_dtype(cast.device, torch.float32)
    return found


@contextmanager
def plain_autocast(on: bool = True, casts: torch.dtype | None = None) -> Iterator[None]:
    """Let an autocast of the network's own cast to float32, in this thread; if not `on`, to the dtype that it names.

    Derivatives and differences would be rounding, and its cache of cast weights outlives moves of them. With `casts`,
    other casts to a half type are casts to this dtype, too.
    """
    before = getattr(_WIDENED, "on", False)
    plain = nullcontext() if casts is None else plain_casts(casts)
    with plain, held_by_all("autocast", partial(replaced, [(torch.autocast, "__enter__", _enter_autocast)])):
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


# Casts to a half type in forward(): their rounding, and what underflows there, is none of the function's


class OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that sees each operation of this thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls) -> None:
        """Leave `__torch_dispatch__` as it is: torch's own would import its compiler first, two seconds."""


@final
class NotedCasts(OperationMode):
    """Notes the half types to which operations inside cast."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.found = set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") in HALF:
            self.found.add(kwargs["dtype"])
        return func(*args, **kwargs)


_COPIES = frozenset(
    f"aten::{name}"
    for name in ("clone", "new_empty", "new_empty_strided", "empty_like", "new_zeros", "zeros_like", "new_ones",
                 "ones_like", "new_full", "full_like")
)  # fmt: skip
"""Operations that make a tensor of the same type; it stays as it is, as views and what is written to do."""


@final
class _PlainCasts(OperationMode):
    """Leaves in a dtype what would be cast to a half type; tensors that have one are cast where they are computed with.

    A function of autograd's, and what TorchScript runs, is seen, too; a kernel that computes in half by itself is not.
    """

    supports_higher_order_operators = True

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not getattr(_WIDENED, "on", False):
            return func(*args, **kwargs)
        if kwargs.get("dtype") in HALF:
            own = args[0].dtype if args and isinstance(args[0], Tensor) else self._dtype
            wide = own.is_floating_point and own not in HALF
            kwargs = {**kwargs, "dtype": own if wide else self._dtype}
        if _holds_half(args) or _holds_half(kwargs.values()):
            schema = getattr(func, "_schema", None)
            if schema is not None and not (schema.name in _COPIES or any(one.alias_info for one in schema.arguments)):
                args, kwargs = tree_map_only(Tensor, self._wide, (args, kwargs))
        return func(*args, **kwargs)

    def _wide(self, t: Tensor) -> Tensor:
        return t.to(self._dtype) if t.dtype in HALF else t


def _holds_half(given: Iterable[Any]) -> bool:
    for one in given:
        if isinstance(one, Tensor):
            if one.dtype in HALF:
                return True
        elif isinstance(one, list | tuple) and _holds_half(one):
            return True
    return False


@contextmanager
def plain_casts(dtype: torch.dtype) -> Iterator[None]:
    """Compute in this dtype, in this thread, what forward() casts to a half type."""
    if any(isinstance(mode, _PlainCasts) for mode in _get_current_dispatch_mode_stack()):
        yield
        return
    with _PlainCasts(dtype):
        yield
