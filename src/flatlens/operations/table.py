"""The table of operations: what each computes, whether a module, a function, a method or a node of autograd's graph.

Everything holds for real tensors and in eval mode. What is not in the table is unknown, and nothing may be supposed of
it; so is a module that has forward hooks or a forward of its own, whatever it is derived from.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn import functional as F

from flatlens.operations import activations
from flatlens.operations.activations import Activation

Role: TypeAlias = Literal["linear", "piecewise linear", "bilinear", "quotient"]
"""Of an output in the tensors it is made from: jointly affine; jointly piecewise affine; piecewise affine in each of
them while the others stay; affine in the first while the others stay."""
Effect: TypeAlias = Literal["identity", "shape", "each", "window", "average"]
"""On the entries of the first tensor: handed on; moved; each by itself; pooled in windows, or over whole axes."""


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation, the names it goes by, and what is known of it."""

    name: str
    modules: tuple[type[nn.Module], ...] = ()
    calls: str = (
        ""  #: functions of operator, torch and torch.nn.functional, and tensor methods, by the names they share
    )
    nodes: str = ""  #: of autograd's graph, `Relu0` for ReluBackward0
    role: Role | None = None  #: none: curved
    effect: Effect | None = None
    homogeneous: bool = False  #: op(a x) = a op(x) for a > 0
    kinks: bool = False  #: whether its value, or its first, second or third derivative, jumps somewhere
    axes: int = 0  #: of a window, the last ones
    activation: Callable[[Any], Activation | None] | None = None  #: from a module's settings
    steepest: Callable[[Any], float] | None = None  #: the largest |slope|, NaN where it jumps; else the activation's

    @property
    def affine(self) -> bool:
        """Whether it is affine in its first tensor, all else fixed."""
        return self.role in ("linear", "bilinear", "quotient") and not self.kinks

    @property
    def moves(self) -> bool:
        """Whether it hands on all entries as they are, in another shape or order at most."""
        return self.effect in ("identity", "shape")

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """Of Python's and torch's namespaces."""
        homes = (operator, torch, F)
        return tuple(getattr(home, call) for call in self.calls.split() for home in homes if hasattr(home, call))

    @property
    def methods(self) -> tuple[str, ...]:
        """Of a tensor."""
        return tuple(call for call in self.calls.split() if hasattr(Tensor, call))


def _pools(axes: int) -> tuple[Operation, Operation]:
    """Pools over windows of the last so many axes: by the average, by the largest."""
    d = f"{axes}d"
    D = d.upper()
    averages = (
        f"AvgPool{D}0 AdaptiveAvgPool{D}0" if axes > 1 else ""
    )  # in one dimension it is two, one of them of length 1
    largest = f"MaxPool{D}WithIndices0 AdaptiveMaxPool{D}0 FractionalMaxPool{D}0" if axes > 1 else ""
    return (
        Operation(
            f"avg_pool{d}", (getattr(nn, f"AvgPool{d}"), getattr(nn, f"AdaptiveAvgPool{d}")),
            f"avg_pool{d} adaptive_avg_pool{d}", averages, "linear", "window", homogeneous=True, axes=axes,
        ),
        Operation(
            f"max_pool{d}", (getattr(nn, f"MaxPool{d}"), getattr(nn, f"AdaptiveMaxPool{d}")),
            f"max_pool{d} adaptive_max_pool{d}", largest, "piecewise linear", "window", homogeneous=True, kinks=True,
            axes=axes,
        ),
    )  # fmt: skip


OPERATIONS = (
    # affine maps with weights
    Operation("linear", (nn.Linear,), "linear", "Linear0", "bilinear"),
    Operation("convolution", (nn.Conv1d, nn.Conv2d, nn.Conv3d), "conv1d conv2d conv3d", "Convolution0", "bilinear"),
    Operation(
        "transposed convolution", (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        "conv_transpose1d conv_transpose2d conv_transpose3d", role="bilinear",
    ),
    Operation(
        "batch norm", (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
        nodes="NativeBatchNorm0 CudnnBatchNorm0 MiopenBatchNorm0", role="bilinear",
    ),
    Operation("embedding", nodes="Embedding0", role="linear"),
    # arithmetic
    Operation("addition", calls="add iadd add_", nodes="Add0 Add1", role="linear"),
    Operation("subtraction", calls="sub isub sub_", nodes="Sub0 Sub1 Rsub0 Rsub1", role="linear"),
    Operation("multiplication", calls="mul imul mul_", nodes="Mul0 Mul1", role="bilinear"),
    Operation("division", calls="truediv itruediv div div_", nodes="Div0 Div1", role="quotient"),
    Operation("negation", calls="neg", nodes="Neg0", role="linear", effect="each", homogeneous=True),
    Operation(
        "matrix product", calls="matmul mm bmm mv",
        nodes="Mm0 Bmm0 Mv0 Dot0 Vdot0 Addmm0 Addbmm0 Baddbmm0 Addmv0 Addr0 Addcmul0 Trilinear0 LinalgCross0 Lerp1",
        role="bilinear",
    ),
    Operation("interpolation between two", nodes="Lerp0", role="linear"),
    # what moves or picks entries, or sums them
    Operation(
        "identity",
        (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
        "contiguous clone dropout", "Clone0 ToCopy0 Alias0", "linear", "identity", homogeneous=True,
    ),
    Operation(
        "shape", (nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle),
        "flatten unflatten reshape view permute transpose swapaxes squeeze unsqueeze movedim moveaxis",
        "View0 UnsafeView0 ReshapeAlias0 Permute0 Transpose0 Transpose1 T0 Squeeze0 Squeeze1 Squeeze2 Squeeze3 "
        "Squeeze4 Squeeze5 Unsqueeze0 Unsqueeze1 Flip0 Roll0 Rot900 PixelShuffle0 PixelUnshuffle0 ChannelShuffle0",
        "linear", "shape", homogeneous=True,
    ),
    Operation(
        "selection",
        nodes="Select0 Slice0 Split0 UnsafeSplit0 SplitWithSizes0 UnsafeSplitWithSizes0 Unbind0 Index0 IndexSelect0 "
        "Gather0 Take0 MaskedSelect0 Diagonal0 Tril0 Triu0 AsStrided0 Unfold0 Expand0 Repeat0 DiagEmbed0 Zero0",
        role="linear",
    ),
    Operation(
        "joining", calls="cat concat stack",
        nodes="Cat0 Stack0 IndexAdd0 IndexCopy0 IndexPut0 IndexFill0 IndexFill1 MaskedFill0 MaskedFill1 MaskedScatter0 "
        "Put0 Scatter0 Scatter1 ScatterAdd0 SelectScatter0 SliceScatter0 DiagonalScatter0 Fill0 Fill1 Fill2 Fill3 "
        "torch::autograd::CopyBackwards",
        role="linear",
    ),
    Operation("choice", nodes="Where0", role="linear", kinks=True),  # its condition may depend on what it chooses from
    Operation(
        "average", calls="mean sum", nodes="Mean0 Mean1 Sum0 Sum1 Nansum0 Trace0", role="linear", effect="average",
        homogeneous=True,
    ),
    Operation("running sum", nodes="Cumsum0", role="linear"),
    Operation(
        "padding", calls="pad",
        nodes="ConstantPadNd0 ReflectionPad1D0 ReflectionPad2D0 ReflectionPad3D0 ReplicationPad1D0 ReplicationPad2D0 "
        "ReplicationPad3D0",
        role="linear",
    ),
    Operation(
        "resampling",
        nodes="Im2Col0 Col2Im0 MaxUnpool2D0 MaxUnpool3D0 UpsampleLinear1D0 UpsampleBilinear2D0 UpsampleBilinear2DAa0 "
        "UpsampleBicubic2D0 UpsampleBicubic2DAa0 UpsampleTrilinear3D0 UpsampleNearest1D0 UpsampleNearest2D0 "
        "UpsampleNearest3D0 UpsampleNearestExact1D0 UpsampleNearestExact2D0 UpsampleNearestExact3D0",
        role="linear",
    ),
    *_pools(1), *_pools(2), *_pools(3),
    # the largest, the smallest, the sorted; steps
    Operation(
        "extremes", calls="amax amin", nodes="Amax0 Amin0", role="piecewise linear", effect="average", homogeneous=True,
        kinks=True,
    ),
    Operation(
        "order",
        nodes="Max0 Max1 Min0 Min1 Aminmax0 Maximum0 Minimum0 Fmax0 Fmin0 Sort0 Sort1 Topk0 Kthvalue0 Median0 Median1 "
        "Nanmedian0 Nanmedian1 Cummax0 Cummin0",
        role="piecewise linear", kinks=True,
    ),
    Operation(
        "clamp", nodes="Clamp0 Clamp1 ClampMin0 ClampMin1 ClampMax0 ClampMax1", role="piecewise linear", kinks=True,
    ),
    Operation(
        "steps", nodes="Sign0 Floor0 Ceil0 Round0 Round1 Trunc0 Frac0 Fmod0 Remainder0", role="piecewise linear",
        kinks=True,
    ),
    Operation("losses with kinks", nodes="HuberLoss0 SmoothL1Loss0 MultiMarginLoss0", kinks=True),
    Operation("margins of several labels", nodes="MultilabelMarginLoss0", role="piecewise linear", kinks=True),
    # activations, entry by entry
    Operation(
        "abs", calls="abs abs_", nodes="Abs0", role="piecewise linear", effect="each", homogeneous=True, kinks=True,
    ),
    Operation(
        "relu", (nn.ReLU,), "relu relu_", "Relu0", "piecewise linear", "each", homogeneous=True, kinks=True,
        activation=activations.relu,
    ),
    Operation(
        "leaky_relu", (nn.LeakyReLU,), "leaky_relu leaky_relu_", "LeakyRelu0", "piecewise linear", "each",
        homogeneous=True, kinks=True, activation=activations.leaky_relu,
        steepest=lambda m: max(1.0, abs(m.negative_slope)),
    ),
    Operation("rrelu", (nn.RReLU,), nodes="RreluWithNoise0", role="piecewise linear", kinks=True),
    Operation("prelu", (nn.PReLU,), nodes="PreluKernel0", role="bilinear", kinks=True),
    Operation(
        "hardtanh", (nn.Hardtanh,), "hardtanh hardtanh_", "Hardtanh0", "piecewise linear", "each", kinks=True,
        activation=activations.hardtanh,
    ),
    Operation(
        "relu6", (nn.ReLU6,), "relu6", role="piecewise linear", effect="each", kinks=True,
        activation=activations.hardtanh,
    ),
    Operation("threshold", (nn.Threshold,), "threshold", "Threshold0", "piecewise linear", "each", kinks=True),
    Operation("hardsigmoid", (nn.Hardsigmoid,), "hardsigmoid", "Hardsigmoid0", "piecewise linear", "each", kinks=True),
    Operation("hardshrink", (nn.Hardshrink,), "hardshrink", "Hardshrink0", "piecewise linear", "each", kinks=True),
    Operation("softshrink", (nn.Softshrink,), "softshrink", "Softshrink0", "piecewise linear", "each", kinks=True),
    Operation("hardswish", (nn.Hardswish,), "hardswish", "Hardswish0", effect="each", kinks=True),
    Operation(
        "elu", (nn.ELU,), "elu elu_", "Elu0", effect="each", kinks=True, activation=activations.elu,
        steepest=lambda m: max(1.0, abs(m.alpha)),
    ),
    Operation("selu", (nn.SELU,), "selu selu_", effect="each", kinks=True),
    Operation("celu", (nn.CELU,), "celu celu_", "Celu0", effect="each", kinks=True),
    Operation("tanh", (nn.Tanh,), "tanh tanh_", effect="each", activation=activations.tanh),
    Operation("sigmoid", (nn.Sigmoid,), "sigmoid sigmoid_", effect="each", activation=activations.sigmoid),
    Operation(
        "softplus", (nn.Softplus,), "softplus", effect="each", activation=activations.softplus,
        steepest=activations.softplus_steepest,
    ),
    Operation("gelu", (nn.GELU,), "gelu", effect="each", activation=activations.gelu),
    Operation("silu", (nn.SiLU,), "silu", effect="each", activation=activations.silu),
    Operation("mish", (nn.Mish,), "mish", effect="each"),
    Operation("softsign", (nn.Softsign,), "softsign", effect="each"),
    Operation("logsigmoid", (nn.LogSigmoid,), "logsigmoid", effect="each"),
    Operation("tanhshrink", (nn.Tanhshrink,), "tanhshrink", effect="each"),
    Operation("functions of one number", calls="exp square sin cos", effect="each"),
)  # fmt: skip


def _node(stem: str) -> str:
    return f"{stem[:-1]}Backward{stem[-1]}" if stem[-1].isdigit() else stem


_BY_FORWARD: dict[Any, Operation] = {}
_BY_CALL: dict[Any, Operation] = {}
_BY_NODE: dict[str, Operation] = {}
for _one in OPERATIONS:
    for _module in _one.modules:  # ReLU6 runs the forward of Hardtanh, of which it is one
        _BY_FORWARD.setdefault(_module.forward, _one)
    _BY_CALL.update(dict.fromkeys((*_one.functions, *_one.methods), _one))
    _BY_NODE.update({_node(stem): _one for stem in _one.nodes.split()})


def operation_of(what: Any) -> Operation | None:
    """The operation that a module, a function or a tensor's method (its name) computes; None where it is not known.

    >>> operation_of(nn.ReLU()).name, operation_of(torch.tanh).name, operation_of("view").name
    ('relu', 'tanh', 'shape')
    """
    if not isinstance(what, nn.Module):
        return _BY_CALL.get(what)
    return None if hooked(what) or "forward" in vars(what) else _BY_FORWARD.get(type(what).forward)


def hooked(module: nn.Module) -> bool:
    """Whether a forward hook may change what it reads or gives."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def activation(module: nn.Module) -> Activation | None:
    """Values and slopes of a module that acts entry by entry; None where they are not known.

    >>> activation(nn.MaxPool2d(2)) is None
    True
    """
    found = operation_of(module)
    return None if found is None or found.activation is None else found.activation(module)


def node_role(name: str) -> Role | None:
    """The role of a node of autograd's graph by its name, of real tensors and in eval mode; None: curved, or not known.

    A part of a tensor changed in place (CopySlices) is not known: its node does not tell what was done to the part.

    >>> node_role("ReluBackward0"), node_role("MulBackward0"), node_role("ExpBackward0")
    ('piecewise linear', 'bilinear', None)
    """
    found = _BY_NODE.get(name)
    return None if found is None else found.role


def role_of(node: Node) -> Role | None:
    """The role of a node as it ran: none where a norm takes statistics of its samples, or what comes out is complex."""
    trains = getattr(node, "_saved_training", False)
    if trains or any(made.dtype.is_complex for made in node._input_metadata):
        return None
    return node_role(node.name())


def has_kink(name: str) -> bool:
    """Whether a node's value, or its first, second or third derivative, is known to jump somewhere."""
    found = _BY_NODE.get(name)
    return found is not None and found.kinks
