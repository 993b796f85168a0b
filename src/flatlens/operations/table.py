"""The table of operations: what each one computes, as a module, a function, a tensor's method or a node of autograd.

Entries hold for real tensors in eval mode. An operation that is not in the table is unknown, and nothing is assumed
of it. A module with forward hooks or its own forward is unknown, too, whatever its base class. `Trace` is a network's
graph as torch.fx traces it: the operation of each node, and a run of the graph node by node.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import Node
from torch.nn import functional as F

Role: TypeAlias = Literal["linear", "piecewise linear", "bilinear", "quotient"]
"""Dependence of an output on the tensors it is made from. linear: affine in all together; piecewise linear: piecewise
affine in all together; bilinear: piecewise affine in each while the others are fixed; quotient: affine in the first
while the others are fixed.
"""
Effect: TypeAlias = Literal["identity", "shape", "each", "window", "average"]
"""Effect on the entries of the first tensor: unchanged; reordered or reshaped; each mapped alone; pooled in
windows; averaged over whole axes.
"""
PIECES: Role = "piecewise linear"
ARITHMETIC = ("addition", "subtraction", "multiplication", "division")

_SLACK = 4e-15  #: relative error of computed slopes: rounding, and positions of turns that are known to 1e-9
SOFTPLUS_TAIL = 20.0  #: least threshold; above it torch's softplus is the identity, 2e-9 off the true one

_FAR = 1e300  #: a z where slopes equal those at infinity


@dataclass(frozen=True, eq=False)
class Activation:
    """An elementwise function, its derivative and the turns of both: between turns they are monotone."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    extrema: tuple[tuple[float, float], ...] = ()  #: (z, value) where the value turns
    turns: tuple[tuple[float, float], ...] = ()  #: (z, slope) at extrema of the slope and on both sides of kinks
    slack: float = _SLACK  #: relative error of slopes; 0 where they are constants

    def values(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return the least and the largest value over [low, high]."""
        return _hull(self.value, self.extrema, low, high)

    def slopes(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return the least and the largest derivative over [low, high]; at kinks, the one-sided ones.

        >>> low, high = relu(nn.ReLU()).slopes(torch.tensor([-2.0, -1.0, 1.0]), torch.tensor([-1.0, 1.0, 2.0]))
        >>> low.tolist(), high.tolist()
        ([0.0, 0.0, 1.0], [0.0, 1.0, 1.0])
        """
        least, most = _hull(self.slope, self.turns, low, high)
        return least - self.slack * (1 + least.abs()), most + self.slack * (1 + most.abs())

    @property
    def steepest(self) -> float:
        """Return the largest absolute slope anywhere."""
        far = torch.tensor(_FAR, dtype=torch.float64)
        return float(torch.stack(self.slopes(-far, far)).abs().max())


def _hull(
    function: Callable[[Tensor], Tensor], turns: tuple[tuple[float, float], ...], low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor]:
    ends = function(low), function(high)
    least, most = torch.minimum(*ends), torch.maximum(*ends)
    for z, there in turns:
        inside = (low <= z) & (z <= high) & (low < high)
        least = torch.where(inside, least.clamp(max=there), least)
        most = torch.where(inside, most.clamp(min=there), most)
    return least, most


def relu(module: nn.Module) -> Activation:
    """Return max(z, 0)."""
    return Activation(F.relu, _step(0.0, 1.0), slack=0.0)


def leaky_relu(module: nn.LeakyReLU) -> Activation | None:
    """Return max(z, c z), for c >= 0; None for other c."""
    c = float(module.negative_slope)
    if c < 0:
        return None
    return Activation(lambda z: F.leaky_relu(z, c), _step(c, 1.0), slack=0.0)


def _step(below: float, above: float) -> Callable[[Tensor], Tensor]:
    """Return the slope of two rays that meet at 0; at 0 it is the lower ray's, as in autograd."""
    return lambda z: torch.where(z > 0, z.new_tensor(above), z.new_tensor(below))


def hardtanh(module: nn.Hardtanh) -> Activation:
    """Return z clipped to two bounds; ReLU6 too."""
    a, b = float(module.min_val), float(module.max_val)
    return Activation(
        lambda z: z.clamp(a, b), lambda z: ((z > a) & (z < b)).to(z), turns=((a, 0), (a, 1), (b, 0), (b, 1)), slack=0.0
    )


def tanh(module: nn.Module) -> Activation:
    """Return tanh of z."""
    return Activation(torch.tanh, lambda z: 4 * _bump(2 * z), turns=((0.0, 1.0),))


def sigmoid(module: nn.Module) -> Activation:
    """Return 1 / (1 + exp(-z))."""
    return Activation(torch.sigmoid, _bump, turns=((0.0, 0.25),))


def _bump(z: Tensor) -> Tensor:
    """Return sigma(z) (1 - sigma(z)), without cancellation at large |z|."""
    e = (-z.abs()).exp()
    return e / (1 + e).square()


def softplus(module: nn.Softplus) -> Activation | None:
    """Return log(1 + exp(beta z)) / beta; None where torch's function differs from it by more than rounding."""
    beta, tail = float(module.beta), float(module.threshold)
    if beta <= 0 or tail < SOFTPLUS_TAIL:
        return None
    return Activation(
        lambda z: torch.logaddexp(beta * z, torch.zeros_like(z)) / beta, lambda z: torch.sigmoid(beta * z)
    )


def elu(module: nn.ELU) -> Activation | None:
    """Return z above 0, alpha (exp(z) - 1) below, for alpha >= 0; None for other alpha."""
    alpha = float(module.alpha)
    if alpha < 0:
        return None
    return Activation(
        lambda z: F.elu(z, alpha),
        lambda z: torch.where(z > 0, 1.0, alpha * z.clamp(max=0).exp()),
        turns=((0.0, alpha), (0.0, 1.0)),
    )


def gelu(module: nn.GELU) -> Activation | None:
    """Return z Phi(z), least at -0.7518; its slope Phi + z phi turns at z = +-sqrt 2, where phi (2 - z^2) = 0."""
    if module.approximate != "none":
        return None

    def slope(z: Tensor) -> Tensor:
        return 0.5 * torch.erfc(-z / math.sqrt(2)) + z * (-z.square() / 2).exp() / math.sqrt(2 * math.pi)

    ends = slope(torch.tensor([-math.sqrt(2), math.sqrt(2)], dtype=torch.float64)).tolist()
    turns = ((-math.sqrt(2), ends[0]), (math.sqrt(2), ends[1]))
    return Activation(F.gelu, slope, extrema=((-0.7517915247, -0.16997120748),), turns=turns)


def silu(module: nn.Module) -> Activation:
    """Return z sigma(z), least at -1.2785; its slope sigma (1 + z (1 - sigma)) turns where z tanh(z/2) = 2."""

    def slope(z: Tensor) -> Tensor:
        return torch.sigmoid(z) * (1 + z * torch.sigmoid(-z))

    turn = 2.3993572805
    ends = slope(torch.tensor([-turn, turn], dtype=torch.float64)).tolist()
    return Activation(
        F.silu, slope, extrema=((-1.2784645428, -0.2784645427611),), turns=((-turn, ends[0]), (turn, ends[1]))
    )


def hardswish(module: nn.Module) -> Activation:
    """Return z min(max(z + 3, 0), 6) / 6, least at -1.5."""
    return Activation(
        F.hardswish,
        lambda z: torch.where(z.abs() < 3, z / 3 + 0.5, (z > 0).to(z)),
        extrema=((-1.5, -0.375),),
        turns=((-3.0, 0.0), (-3.0, -0.5), (3.0, 1.0), (3.0, 1.5)),
    )


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation, or several of a kind: its names, and its known properties."""

    name: str
    called: str = ""  #: classes of torch.nn; functions of operator, torch and torch.nn.functional; methods of tensors
    nodes: str = ""  #: names of autograd's nodes; `Relu0` stands for ReluBackward0
    role: Role | None = None  #: None where the operation is curved
    effect: Effect | None = None
    homogeneous: bool = False  #: op(a x) = a op(x) for a > 0
    kinks: bool = False  #: whether the value or one of the first three derivatives jumps somewhere
    activation: Callable[[Any], Activation | None] | None = None  #: from a module of the first class in `called`
    steepest: Callable[[Any], float] | None = None  #: largest |slope|, NaN at a jump; None: the activation's
    axes: int = 0  #: number of axes of a window, counted from the last

    @property
    def node_names(self) -> list[str]:
        """Return the full names of autograd's nodes."""
        return [f"{stem[:-1]}Backward{stem[-1]}" if stem[-1].isdigit() else stem for stem in self.nodes.split()]

    @property
    def affine(self) -> bool:
        """Return whether the operation is affine in its first tensor, everything else fixed."""
        return self.role in ("linear", "bilinear", "quotient") and not self.kinks

    @property
    def moves(self) -> bool:
        """Return whether the operation leaves all entries as they are, and changes at most their shape or order."""
        return self.effect in ("identity", "shape")

    def activation_of(
        self, what: Any, arguments: tuple[Any, ...] = (), options: Mapping[str, Any] = MappingProxyType({})
    ) -> Activation | None:
        """Return the activation of a module, or of a function or method with these arguments; None if unknown."""
        if self.activation is None:
            return None
        settings = {name: value for name, value in options.items() if name != "input"}
        module = getattr(nn, self.called.split()[0])
        return self.activation(what if isinstance(what, nn.Module) else module(*arguments, **settings))

    def lipschitz(self, module: nn.Module) -> float | None:
        """Return the Lipschitz constant of a module that maps entries alone; NaN at a jump, None if unknown."""
        if self.moves:
            return 1.0
        if self.steepest is not None:
            return self.steepest(module)
        known = self.activation_of(module)
        return None if known is None else known.steepest


def _pools(axes: int) -> tuple[Operation, Operation]:
    """Return the average and the largest pool over windows of the last `axes` axes."""
    d = f"{axes}D"  # torch pools one dimension as two, one of them of length 1
    nodes = [f"AvgPool{d}0 AdaptiveAvgPool{d}0", f"MaxPool{d}WithIndices0 AdaptiveMaxPool{d}0 FractionalMaxPool{d}0"]
    means, largest = (
        f"{kind}Pool{axes}d Adaptive{kind}Pool{axes}d {kind.lower()}_pool{axes}d adaptive_{kind.lower()}_pool{axes}d"
        for kind in ("Avg", "Max")
    )
    return (
        Operation("average pool", means, nodes[0] * (axes > 1), "linear", "window", True, axes=axes),
        Operation("largest of a window", largest, nodes[1] * (axes > 1), PIECES, "window", True, True, axes=axes),
    )


OPERATIONS = (
    # affine maps with weights
    Operation("linear", "Linear linear", "Linear0", "bilinear"),
    Operation("convolution", "Conv1d Conv2d Conv3d conv1d conv2d conv3d", "Convolution0", "bilinear"),
    Operation("transposed convolution", "ConvTranspose1d ConvTranspose2d ConvTranspose3d conv_transpose1d "
              "conv_transpose2d conv_transpose3d", role="bilinear"),
    Operation("batch norm", "BatchNorm1d BatchNorm2d BatchNorm3d", "NativeBatchNorm0 CudnnBatchNorm0 MiopenBatchNorm0",
              "bilinear"),
    Operation("matrix product", "matmul mm bmm mv", "Mm0 Bmm0 Mv0 Dot0 Vdot0 Addmm0 Addbmm0 Baddbmm0 Addmv0 Addr0 "
              "Addcmul0 Trilinear0 LinalgCross0", "bilinear"),
    # arithmetic
    Operation("addition", "add iadd add_", "Add0 Add1", "linear"),
    Operation("subtraction", "sub isub sub_", "Sub0 Sub1 Rsub0 Rsub1", "linear"),
    Operation("multiplication", "mul imul mul_", "Mul0 Mul1", "bilinear"),
    Operation("division", "truediv itruediv div div_", "Div0 Div1", "quotient"),
    Operation("negation", "neg", "Neg0", "linear", "each", True),
    Operation("between two, by a number", "", "Lerp0", "linear"),
    Operation("between two, by a tensor", "", "Lerp1", "bilinear"),
    # selections, reorderings and sums of entries
    Operation("identity", "Identity Dropout Dropout1d Dropout2d Dropout3d AlphaDropout FeatureAlphaDropout dropout "
              "contiguous clone", "Clone0 ToCopy0 Alias0", "linear", "identity", True),
    Operation("shape", "Flatten Unflatten PixelShuffle PixelUnshuffle ChannelShuffle flatten unflatten reshape view "
              "permute transpose swapaxes squeeze unsqueeze movedim moveaxis",
              "View0 UnsafeView0 ReshapeAlias0 Permute0 Transpose0 Transpose1 T0 Squeeze0 Squeeze1 Squeeze2 Squeeze3 "
              "Squeeze4 Squeeze5 Unsqueeze0 Unsqueeze1 Flip0 Roll0 Rot900 PixelShuffle0 PixelUnshuffle0 "
              "ChannelShuffle0", "linear", "shape", True),
    Operation("selection", "", "Select0 Slice0 Split0 UnsafeSplit0 SplitWithSizes0 UnsafeSplitWithSizes0 Unbind0 "
              "Index0 IndexSelect0 Embedding0 Gather0 Take0 MaskedSelect0 Diagonal0 Tril0 Triu0 AsStrided0 Unfold0 "
              "Expand0 Repeat0 DiagEmbed0 Zero0", "linear"),
    Operation("joining", "", "Cat0 Stack0 IndexAdd0 IndexCopy0 IndexPut0 IndexFill0 IndexFill1 MaskedFill0 MaskedFill1 "
              "MaskedScatter0 Put0 Scatter0 Scatter1 ScatterAdd0 SelectScatter0 SliceScatter0 DiagonalScatter0 Fill0 "
              "Fill1 Fill2 Fill3 torch::autograd::CopyBackwards", "linear"),
    Operation("change of a part in place", "", "torch::autograd::CopySlices", kinks=True),  # the node tells no more
    Operation("choice", "", "Where0", "linear", kinks=True),  # the condition may depend on the values
    Operation("average", "mean sum", "Mean0 Mean1 Sum0 Sum1 Nansum0 Trace0", "linear", "average", True),
    Operation("running sum", "", "Cumsum0", "linear"),
    Operation("entries of the labels", "", "NllLoss0 NllLoss2D0", "linear"),
    Operation("padding", "pad", "ConstantPadNd0 ReflectionPad1D0 ReflectionPad2D0 ReflectionPad3D0 ReplicationPad1D0 "
              "ReplicationPad2D0 ReplicationPad3D0", "linear"),
    Operation("resampling", "", "Im2Col0 Col2Im0 MaxUnpool2D0 MaxUnpool3D0 UpsampleLinear1D0 UpsampleBilinear2D0 "
              "UpsampleBilinear2DAa0 UpsampleBicubic2D0 UpsampleBicubic2DAa0 UpsampleTrilinear3D0 UpsampleNearest1D0 "
              "UpsampleNearest2D0 UpsampleNearest3D0 UpsampleNearestExact1D0 UpsampleNearestExact2D0 "
              "UpsampleNearestExact3D0", "linear"),
    *_pools(1), *_pools(2), *_pools(3),
    # largest, smallest and sorted entries; steps
    Operation("extremes", "amax amin", "Amax0 Amin0", PIECES, "average", True, True),
    Operation("order and steps", "", "Max0 Max1 Min0 Min1 Aminmax0 Maximum0 Minimum0 Fmax0 Fmin0 Sort0 Sort1 Topk0 "
              "Kthvalue0 Median0 Median1 Nanmedian0 Nanmedian1 Cummax0 Cummin0 Clamp0 Clamp1 ClampMin0 ClampMin1 "
              "ClampMax0 ClampMax1 Sign0 Floor0 Ceil0 Round0 Round1 Trunc0 Frac0 Fmod0 Remainder0 "
              "MultilabelMarginLoss0", PIECES, kinks=True),
    Operation("curved losses", "", "HuberLoss0 SmoothL1Loss0 MultiMarginLoss0", kinks=True),
    # activations, mapped entry by entry
    Operation("abs", "abs abs_", "Abs0", PIECES, "each", True, True),
    Operation("relu", "ReLU relu relu_", "Relu0", PIECES, "each", True, True, relu),
    Operation("leaky_relu", "LeakyReLU leaky_relu leaky_relu_", "LeakyRelu0", PIECES, "each", True, True,
              leaky_relu, lambda m: max(1.0, abs(m.negative_slope))),
    Operation("rrelu", "RReLU rrelu rrelu_", "RreluWithNoise0", PIECES, "each", True, True),
    Operation("prelu", "PReLU", "PreluKernel0", "bilinear", kinks=True),
    Operation("hardtanh", "Hardtanh hardtanh hardtanh_", "Hardtanh0", PIECES, "each", False, True, hardtanh),
    Operation("relu6", "ReLU6 relu6", "", PIECES, "each", False, True, hardtanh),
    Operation("threshold", "Threshold threshold", "Threshold0", PIECES, "each", False, True),
    Operation("hardsigmoid", "Hardsigmoid hardsigmoid", "Hardsigmoid0", PIECES, "each", False, True),
    Operation("hardshrink", "Hardshrink hardshrink", "Hardshrink0", PIECES, "each", False, True),
    Operation("softshrink", "Softshrink softshrink", "Softshrink0", PIECES, "each", False, True),
    Operation("hardswish", "Hardswish hardswish", "Hardswish0", None, "each", False, True, hardswish),
    Operation("elu", "ELU elu elu_", "Elu0", None, "each", False, True, elu, lambda m: max(1.0, abs(m.alpha))),
    Operation("selu", "SELU selu selu_", "", None, "each", False, True),
    Operation("celu", "CELU celu celu_", "Celu0", None, "each", False, True),
    Operation("tanh", "Tanh tanh tanh_", "Tanh0", effect="each", activation=tanh),
    Operation("sigmoid", "Sigmoid sigmoid sigmoid_", "Sigmoid0", effect="each", activation=sigmoid),
    Operation("softplus", "Softplus softplus", "Softplus0", effect="each", activation=softplus,
              steepest=lambda m: 1.0 if softplus(m) else math.nan),  # else a jump may be more than rounding
    Operation("gelu", "GELU gelu", "Gelu0", effect="each", activation=gelu),
    Operation("silu", "SiLU silu", "Silu0", effect="each", activation=silu),
    Operation("mish", "Mish mish", "Mish0", effect="each"),
    Operation("softsign", "Softsign softsign", effect="each", kinks=True),
    Operation("logsigmoid", "LogSigmoid logsigmoid", "LogSigmoid0", effect="each"),
    Operation("tanhshrink", "Tanhshrink tanhshrink", effect="each"),
    Operation("functions of one number", "exp square sin cos", "Exp0 Exp20 Expm10 Log0 Log20 Log100 Log1P0 Pow0 Pow1 "
              "Pow2 Reciprocal0 Rsqrt0 Sin0 Cos0 Tan0 Sinh0 Cosh0 Atan0 Asinh0 Atanh0 Erf0 Erfc0 Lgamma0 Digamma0",
              effect="each"),
    # curved and without kinks where they are defined
    Operation("softmax", "", "Softmax0 LogSoftmax0 SafeSoftmax0 Logsumexp0 Logaddexp0 Logaddexp20 Logcumsumexp0"),
    Operation("attention", "", "ScaledDotProductFlashAttentionForCpu0 ScaledDotProductFlashAttention0 "
              "ScaledDotProductEfficientAttention0 ScaledDotProductCudnnAttention0"),
    Operation("norms and gates", "", "NativeLayerNorm0 NativeGroupNorm0 FusedRmsNorm0 Var0 VarMean0 Glu0 "
              "WeightNormInterface0 ThnnFusedGruCell0 ThnnFusedLstmCell0"),
    Operation("products", "", "Prod0 Prod1 Cumprod0 Addcdiv0 LinalgInvEx0 LinalgSolveEx0 LinalgDet0 LinalgSlogdet0 "
              "LinalgMatrixExp0"),
    Operation("smooth losses", "", "MseLoss0 BinaryCrossEntropy0 BinaryCrossEntropyWithLogits0 SoftMarginLoss0 "
              "CtcLoss0 CtcLoss1"),  # torch's logarithm of a probability ends at -100
)  # fmt: skip


def _keys(one: Operation) -> Iterator[Any]:
    """Yield every key under which an operation is found: forward(), function, method's name, node's name."""
    for name in one.called.split():
        for home in (nn, operator, torch, F):
            if (found := getattr(home, name, None)) is not None:
                yield found.forward if home is nn else found
        if hasattr(Tensor, name):
            yield name
    yield from one.node_names


_KNOWN: dict[Any, Operation] = {key: one for one in OPERATIONS for key in _keys(one)}


def operation_of(what: Any, *, hooks: bool = False) -> Operation | None:
    """Return the operation of a module, a function, a method's name or an autograd node's name; None if unknown.

    With `hooks`, forward hooks of a module are ignored.

    >>> operation_of(nn.ReLU()).name, operation_of(torch.tanh).name, operation_of("view").name
    ('relu', 'tanh', 'shape')
    """
    if not isinstance(what, nn.Module):
        return _KNOWN.get(what)
    if "forward" in vars(what) or (hooked(what) and not hooks):
        return None
    return _KNOWN.get(type(what).forward)


def hooked(module: nn.Module) -> bool:
    """Return whether a forward hook may change what it reads or gives."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def role_of(node: Node) -> Role | None:
    """Return the role of an autograd node as it ran; None: curved or unknown.

    So it is where a norm takes batch statistics, and where the output is complex. A change of a part of a tensor in
    place (CopySlices) is unknown: its node does not tell what was done to the part.

    >>> role_of(torch.ones(2, requires_grad=True).relu().grad_fn)
    'piecewise linear'
    """
    found = operation_of(node.name())
    return None if found is None or getattr(node, "_saved_training", False) or is_complex(node) else found.role


def is_complex(node: Node) -> bool:
    """Return whether an output of a node is complex: derivatives through it take conjugates and real parts."""
    return any(output.dtype.is_complex for output in node._input_metadata)


ASKED = ("size", "dim", "shape", "ndim", "dtype", "device")  #: attributes of a tensor that do not depend on its values


class Trace(fx.Interpreter):
    """The graph of a network, and a run of it. Tracing raises for what torch.fx cannot follow.

    >>> trace = Trace(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    >>> [trace.called(node) for node in trace.nodes if trace.operation(node)]
    ['0 (Linear)', '1 (ReLU)']
    """

    def __init__(self, model: nn.Module) -> None:
        traced = fx.symbolic_trace(model)
        super().__init__(traced)
        self.extra_traceback = False  # so that its errors have one line
        self.signature = inspect.signature(model.forward)
        self.nodes: list[fx.Node] = list(traced.graph.nodes)

    def what(self, node: fx.Node) -> Any:
        """Return what a node calls: a module, a function or the name of a method."""
        return self.module.get_submodule(str(node.target)) if node.op == "call_module" else node.target

    def operation(self, node: fx.Node) -> Operation | None:
        """Return the operation that a call computes, None where it is unknown or the node is not a call."""
        return operation_of(self.what(node)) if node.op.startswith("call") else None

    def called(self, node: fx.Node) -> str:
        """Return a node's name for messages."""
        if node.op == "call_module":
            return f"{node.target} ({type(self.what(node)).__name__})"
        return f"{getattr(node.target, '__name__', node.target)}()"

    def without_values(self, *, constants: bool = False) -> frozenset[fx.Node]:
        """Return the nodes that hold sizes of tensors; with `constants`, all that need no value of the first input."""
        found: set[fx.Node] = set()
        for at, node in enumerate(self.nodes):
            inputs = node.all_input_nodes
            fixed = constants and at > 0 if not inputs else found.issuperset(inputs)
            if asks(node) or (fixed and node.op != "output"):
                found.add(node)
        return frozenset(found)

    def in_place(self) -> nn.Module:
        """Return a module that takes the network's arguments and runs the graph."""
        return _InPlace(self)


def asks(node: fx.Node) -> bool:
    """Return whether a node asks for a tensor's size or kind, not for its values."""
    if node.op == "call_function":
        return node.target is getattr and node.args[1] in ASKED
    return node.op == "call_method" and node.target in ASKED


class _InPlace(nn.Module):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def forward(self, *arguments: Any, **options: Any) -> Any:
        given = self.trace.signature.bind(*arguments, **options)
        given.apply_defaults()
        return self.trace.run(*given.arguments.values())
