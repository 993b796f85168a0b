"""Whether autograd sees all that a forward pass does with the weights and the inputs.

Where each operation on them is torch's own and in the graph, autograd's derivative is the function's, and its numbers
have the dtypes that the graph shows. `Sight` looks at one forward pass for the contrary: `detach()`, `no_grad()`,
functions of autograd's with a derivative of their own, rounding, casts, hooks on gradients, numbers that leave torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch._C import _autograd
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from flatlens.operations.graph import LEAF, Graph
from flatlens.problem import op_overrides
from flatlens.problem.op_overrides import OperationMode

_NAMES = (
    # products, sums
    "_trilinear add addbmm addcdiv addcmul addmm addmv baddbmm bmm convolution div dot linear mkldnn_convolution mm "
    "mul mv neg reciprocal rsub sub vdot "
    # moved entries; autograd itself detaches what it keeps, and a detached number that is computed with has no graph
    "_reshape_alias _unsafe_view alias cat clone constant_pad_nd detach diagonal embedding expand flip gather im2col "
    "index index_select masked_fill permute pixel_shuffle reflection_pad1d reflection_pad2d reflection_pad3d repeat "
    "replication_pad1d replication_pad2d replication_pad3d roll select slice split split_with_sizes squeeze stack t "
    "transpose unbind unfold unsafe_split unsqueeze upsample_bilinear2d upsample_nearest2d view where "
    # pools, activations, norms, attention
    "_adaptive_avg_pool2d _adaptive_avg_pool3d _log_softmax _native_batch_norm_legit_no_training _prelu_kernel "
    "_safe_softmax _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention "
    "_scaled_dot_product_flash_attention_for_cpu _softmax abs amax amin avg_pool2d avg_pool3d celu clamp clamp_max "
    "clamp_min cos cumsum elu erf exp gelu hardswish hardtanh leaky_relu linalg_vector_norm log log_sigmoid_forward "
    "logsumexp max_pool2d_with_indices max_pool3d_with_indices maximum mean minimum mish native_batch_norm "
    "native_group_norm native_layer_norm norm pow relu rsqrt sigmoid silu sin softplus sqrt sum tanh var "
    "var_mean"
)
_OWN = frozenset(_NAMES.split())
"""Torch's operations, also in place, whose derivative is that of the function; nothing is assumed of others."""

_FAST = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")
"""Settings of the environment by which products may be computed in a half type without a cast."""

_KEPT = getattr(_autograd, "_top_saved_tensors_default_hooks", None)
"""Tells what changes the tensors that autograd keeps; before torch 2.8 nothing does."""

_EXITS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr, Tensor.untyped_storage)


class _Calls(TorchFunctionMode):
    """Notes whether numbers leave torch, and hooks on gradients that flatlens has not set."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        hooks = [*args[1:], *kwargs.values()] if func is Tensor.register_hook else []
        self.found |= func in _EXITS
        self.found |= any(getattr(hook, "__module__", "") != op_overrides.__name__ for hook in hooks)
        return func(*args, **kwargs)


def _ordinary(t: Tensor) -> bool:
    return type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided and not is_functorch_wrapped_tensor(t)


def _memory(t: Tensor) -> int:
    found: int = t.untyped_storage()._cdata
    return found


@final
class Sight(OperationMode):
    """A context that watches a forward pass which reads some tensors: weights and inputs.

    >>> x, net = torch.ones(2, 3, requires_grad=True), nn.Linear(3, 2)
    >>> with Sight([x, *net.parameters()]) as sight:
    ...     f, other = net(x), net(x) * x.detach().sum()
    >>> sight.sees(Graph(f))
    False
    >>> with Sight([x, *net.parameters()]) as sight:
    ...     f = net(x)
    >>> sight.sees(Graph(f))
    True
    """

    supports_higher_order_operators = True

    def __init__(self, read: Iterable[Tensor]) -> None:
        super().__init__()
        tensors = list(read)
        self._calls, self._whole = _Calls(), all(map(_ordinary, tensors))
        self._following = set(map(_memory, filter(_ordinary, tensors)))
        """The memory of tensors that follow from those that are read."""
        self._dtypes = {t.dtype for t in tensors}

    def sees(self, graph: Graph) -> bool:
        """Return whether autograd saw all that made the outputs of this graph."""
        names = {node.name() for node in graph.nodes} - {LEAF}
        others = any(isinstance(node, BackwardCFunction) for node in graph.nodes) or any(":" in name for name in names)
        fast = any(os.environ.get(setting, "STRICT").upper() != "STRICT" for setting in _FAST)
        return self._whole and not self._calls.found and not others and not fast

    def __enter__(self) -> Self:
        self._calls.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._calls.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given, made = ([t for t in tree_leaves(of) if isinstance(t, Tensor)] for of in ((args, kwargs), out))
        if not (self._whole and all(map(_ordinary, (*given, *made)))):
            self._whole = False
            return out
        following = [t for t in given if _memory(t) in self._following]
        if not following:  # what they are made in may be memory that was freed
            self._following.difference_update(map(_memory, made))
        else:
            self._following.update(map(_memory, made))
            name, _, kind = str(func).removeprefix("aten.").partition(".")
            self._whole = (
                name.removesuffix("_") in _OWN
                and not kind.endswith("_mode")  # a division that rounds
                and not (name == "embedding" and any(args[3:]))  # a gradient by how often the batch holds a row
                and torch.is_grad_enabled()
                and all(t.requires_grad and t.dtype in self._dtypes for t in following)
                and _KEPT is not None
                and _KEPT(True) is None
            )
        if len(following) < sum(t.requires_grad for t in given):  # made where nobody watches, as in another thread
            self._whole = False
        return out
