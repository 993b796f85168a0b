"""Every entry's nodes, modules, functions and methods are torch's, and do to their inputs what the table says.

Activations, entries that are applied to `"each"` number, are tested from their entry alone: arguments of
classes that need some are in `of_the_table`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from networks import SquaredReLU
from of_the_table import SETTINGS, made, modules
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from flatlens.operations.table import OPERATIONS, Operation, hooked, operation_of, role_of

ROWS = torch.tensor([2, 0, 2])
PLACES = (torch.tensor([1, 0, 2]), torch.tensor([3, 1, 0]))
HIGH = torch.arange(12).reshape(3, 4) % 3 == 0
LABELS, HEADS = torch.tensor([[1, 2]]), (1, 2, 3, 4)
LINE, PLANE, SPACE = (1, 2, 6), (1, 2, 5, 6), (1, 1, 4, 4, 5)
RANDOM = torch.rand(1, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def up(mode: str, **more: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, scale_factor=1.7, mode=mode, **more)


def unpooled(d: int) -> Callable[[Tensor], Tensor]:
    pool, undo = getattr(F, f"max_pool{d}d"), getattr(F, f"max_unpool{d}d")
    return lambda x: undo(x, pool(torch.arange(float((2 * x.shape[-1]) ** d)).reshape(1, 1, *[2 * x.shape[-1]] * d), 2,
                                  return_indices=True)[1], 2)  # fmt: skip


M, N, V = (3, 4), (3, 4), (4,)
LINEAR: dict[str, tuple[Any, ...]] = {
    "AddBackward0": (torch.add, M, N),
    "AddBackward1": (lambda x: torch.ops.aten.add.Scalar(x, 2), M),
    "SubBackward1": (lambda x: torch.ops.aten.sub.Scalar(x, 2), M),
    "SqueezeBackward3": (lambda x: (x + 0).squeeze_(), (3, 1)),
    "SqueezeBackward4": (lambda x: (x + 0).squeeze_(1), (3, 1)),
    "SqueezeBackward5": (lambda x: (x + 0).squeeze_((0, 1)), (3, 1)),
    "TransposeBackward1": (lambda x: (x + 0).transpose_(0, 1), M),
    "UnsqueezeBackward1": (lambda x: (x + 0).unsqueeze_(0), M),
    "EmbeddingBackward0": (lambda w: F.embedding(ROWS, w), M),
    "SubBackward0": (torch.sub, M, N),
    "RsubBackward0": (torch.rsub, M, N),
    "RsubBackward1": (lambda x: 2 - x, M),
    "NegBackward0": (torch.neg, M),
    "LerpBackward0": (lambda x, y: x.lerp(y, 0.3), M, N),
    "CloneBackward0": (torch.clone, M),
    "ToCopyBackward0": (lambda x: x.to(torch.float32).to(torch.float64), M),
    "AliasBackward0": (torch.ops.aten.alias, M),
    "ViewBackward0": (lambda x: x.view(12), M),
    "UnsafeViewBackward0": (lambda x: torch.ops.aten._unsafe_view(x, [12]), M),
    "ReshapeAliasBackward0": (lambda x: torch.ops.aten._reshape_alias(x, [12], [1]), M),
    "PermuteBackward0": (lambda x: x.permute(1, 0), M),
    "TransposeBackward0": (lambda x: x.transpose(0, 1), M),
    "TBackward0": (torch.t, M),
    "SqueezeBackward0": (torch.squeeze, (3, 1)),
    "SqueezeBackward1": (lambda x: x.squeeze(1), (3, 1)),
    "SqueezeBackward2": (lambda x: x.squeeze((0, 1)), (3, 1)),
    "UnsqueezeBackward0": (lambda x: x.unsqueeze(0), M),
    "FlipBackward0": (lambda x: x.flip(1), M),
    "RollBackward0": (lambda x: x.roll(1, 0), M),
    "Rot90Backward0": (torch.rot90, M),
    "PixelShuffleBackward0": (lambda x: F.pixel_shuffle(x, 2), (1, 4, 2, 2)),
    "PixelUnshuffleBackward0": (lambda x: F.pixel_unshuffle(x, 2), (1, 1, 4, 4)),
    "ChannelShuffleBackward0": (lambda x: torch.ops.aten.channel_shuffle(x, 2), (1, 4, 2, 2)),
    "SelectBackward0": (lambda x: x[1], M),
    "SliceBackward0": (lambda x: x[1:], M),
    "SplitBackward0": (lambda x: x.split(2)[0], M),
    "UnsafeSplitBackward0": (lambda x: x.unsafe_split(2)[0], M),
    "SplitWithSizesBackward0": (lambda x: x.split([1, 2])[1], M),
    "UnsafeSplitWithSizesBackward0": (lambda x: x.unsafe_split_with_sizes([1, 2])[1], M),
    "UnbindBackward0": (lambda x: x.unbind()[1], M),
    "IndexBackward0": (lambda x: x[ROWS], M),
    "IndexSelectBackward0": (lambda x: x.index_select(0, ROWS), M),
    "GatherBackward0": (lambda x: x.gather(1, ROWS[None]), M),
    "TakeBackward0": (lambda x: x.take(ROWS), M),
    "MaskedSelectBackward0": (lambda x: x.masked_select(HIGH), M),
    "DiagonalBackward0": (torch.diagonal, M),
    "TrilBackward0": (torch.tril, M),
    "TriuBackward0": (torch.triu, M),
    "AsStridedBackward0": (lambda x: x.as_strided((2, 2), (1, 3)), M),
    "UnfoldBackward0": (lambda x: x.unfold(1, 2, 1), M),
    "ExpandBackward0": (lambda x: x.expand(2, 3, 4), M),
    "RepeatBackward0": (lambda x: x.repeat(2, 1), M),
    "DiagEmbedBackward0": (torch.diag_embed, M),
    "ZeroBackward0": (lambda x: (x + 0).zero_(), M),
    "CatBackward0": (lambda x, y: torch.cat((x, y)), M, N),
    "StackBackward0": (lambda x, y: torch.stack((x, y)), M, N),
    "IndexAddBackward0": (lambda x, y: x.index_add(0, ROWS, y), M, N),
    "IndexCopyBackward0": (lambda x, y: x.index_copy(0, ROWS[1:], y[1:]), M, N),
    "IndexPutBackward0": (lambda x, y: x.index_put(PLACES, y[0, :3]), M, N),
    "IndexFillBackward0": (lambda x: x.index_fill(0, ROWS, 2.0), M),
    "IndexFillBackward1": (lambda x, y: x.index_fill(0, ROWS, y), M, ()),
    "MaskedFillBackward0": (lambda x: x.masked_fill(HIGH, 2.0), M),
    "MaskedFillBackward1": (lambda x, y: x.masked_fill(HIGH, y), M, ()),
    "MaskedScatterBackward0": (lambda x, y: x.masked_scatter(HIGH, y), M, N),
    "PutBackward0": (lambda x, y: x.put(ROWS[1:], y[0, :2]), M, N),
    "ScatterBackward0": (lambda x, y: x.scatter(1, ROWS[None, 1:], y), M, N),
    "ScatterBackward1": (lambda x: x.scatter(1, ROWS[None], 2.0), M),
    "ScatterAddBackward0": (lambda x, y: x.scatter_add(1, ROWS[None], y), M, N),
    "SelectScatterBackward0": (lambda x, y: x.select_scatter(y, 0, 1), M, V),
    "SliceScatterBackward0": (lambda x, y: x.slice_scatter(y, 0, 1, 2), M, (1, 4)),
    "DiagonalScatterBackward0": (lambda x, y: x.diagonal_scatter(y), M, (3,)),
    "FillBackward0": (lambda x: torch.fill(x, 2.0), M),
    "FillBackward1": (lambda x, y: torch.fill(x, y), M, ()),
    "FillBackward2": (lambda x: (x + 0).fill_(2.0), M),
    "FillBackward3": (lambda x, y: (x + 0).fill_(y), M, ()),
    "torch::autograd::CopyBackwards": (lambda x, y: (x + 0).copy_(y), M, N),
    "WhereBackward0": (lambda x, y: torch.where(HIGH, x, y), M, N),
    "MeanBackward0": (torch.mean, M),
    "MeanBackward1": (lambda x: x.mean(1), M),
    "SumBackward0": (torch.sum, M),
    "SumBackward1": (lambda x: x.sum(1), M),
    "NansumBackward0": (lambda x: x.nansum(1), M),
    "TraceBackward0": (torch.trace, (3, 3)),
    "CumsumBackward0": (lambda x: x.cumsum(1), M),
    "NllLossBackward0": (lambda x: F.nll_loss(x, ROWS), M),
    "NllLoss2DBackward0": (lambda x: F.nll_loss(x, torch.ones(1, 5, 6, dtype=torch.long)), PLANE),
    "ConstantPadNdBackward0": (lambda x: F.pad(x, (1, 2), value=3.0), M),
    **{
        f"ReflectionPad{d}DBackward0": (lambda x, d=d: F.pad(x, (1, 1) * d, "reflect"), s)
        for d, s in ((1, LINE), (2, PLANE), (3, SPACE))
    },
    **{
        f"ReplicationPad{d}DBackward0": (lambda x, d=d: F.pad(x, (1, 1) * d, "replicate"), s)
        for d, s in ((1, LINE), (2, PLANE), (3, SPACE))
    },
    "Im2ColBackward0": (lambda x: F.unfold(x, 2), PLANE),
    "Col2ImBackward0": (lambda x: F.fold(x, 3, 2), (1, 8, 4)),
    "MaxUnpool2DBackward0": (unpooled(2), (1, 1, 3, 3)),
    "MaxUnpool3DBackward0": (unpooled(3), (1, 1, 2, 2, 2)),
    "UpsampleLinear1DBackward0": (up("linear"), LINE),
    "UpsampleBilinear2DBackward0": (up("bilinear"), PLANE),
    "UpsampleBilinear2DAaBackward0": (up("bilinear", antialias=True), PLANE),
    "UpsampleBicubic2DBackward0": (up("bicubic"), PLANE),
    "UpsampleBicubic2DAaBackward0": (up("bicubic", antialias=True), PLANE),
    "UpsampleTrilinear3DBackward0": (up("trilinear"), SPACE),
    **{f"UpsampleNearest{d}DBackward0": (up("nearest"), s) for d, s in ((1, LINE), (2, PLANE), (3, SPACE))},
    **{f"UpsampleNearestExact{d}DBackward0": (up("nearest-exact"), s) for d, s in ((1, LINE), (2, PLANE), (3, SPACE))},
    "AvgPool2DBackward0": (lambda x: F.avg_pool2d(x, 2), PLANE),
    "AvgPool3DBackward0": (lambda x: F.avg_pool3d(x, 2), SPACE),
    "AdaptiveAvgPool2DBackward0": (lambda x: F.adaptive_avg_pool2d(x, 2), PLANE),
    "AdaptiveAvgPool3DBackward0": (lambda x: F.adaptive_avg_pool3d(x, 2), SPACE),
}
PIECEWISE: dict[str, tuple[Any, ...]] = {
    "HardtanhBackward0": (lambda x: F.hardtanh(x, -0.3, 0.4), M),
    "ThresholdBackward0": (lambda x: F.threshold(x, 0.1, 2.0), M),
    "HardsigmoidBackward0": (lambda x: F.hardsigmoid(4 * x), M),
    "MultilabelMarginLossBackward0": (lambda x: F.multilabel_margin_loss(x, torch.tensor([[3, 0, -1, 1]] * 3)), M),
    "AbsBackward0": (torch.abs, M),
    "ClampBackward1": (lambda x: x.clamp(-0.3, 0.4), M),
    "ClampBackward0": (torch.clamp, M, N, N),
    "ClampMinBackward0": (lambda x: x.clamp_min(0.1), M),
    "ClampMinBackward1": (torch.clamp_min, M, N),
    "ClampMaxBackward0": (lambda x: x.clamp_max(0.1), M),
    "ClampMaxBackward1": (torch.clamp_max, M, N),
    "MaxBackward0": (lambda x: x.max(1).values, M),
    "MaxBackward1": (torch.max, M),
    "MinBackward0": (lambda x: x.min(1).values, M),
    "MinBackward1": (torch.min, M),
    "AminmaxBackward0": (lambda x: x.aminmax(dim=1).max, M),
    "MaximumBackward0": (torch.maximum, M, N),
    "MinimumBackward0": (torch.minimum, M, N),
    "FmaxBackward0": (torch.fmax, M, N),
    "FminBackward0": (torch.fmin, M, N),
    "SortBackward0": (lambda x: x.sort().values, M),
    "SortBackward1": (lambda x: x.sort(stable=True).values, M),
    "TopkBackward0": (lambda x: x.topk(2).values, M),
    "KthvalueBackward0": (lambda x: x.kthvalue(2).values, M),
    "MedianBackward0": (torch.median, M),
    "MedianBackward1": (lambda x: x.median(1).values, M),
    "NanmedianBackward0": (torch.nanmedian, M),
    "NanmedianBackward1": (lambda x: x.nanmedian(1).values, M),
    "CummaxBackward0": (lambda x: x.cummax(1).values, M),
    "CumminBackward0": (lambda x: x.cummin(1).values, M),
    "AmaxBackward0": (lambda x: x.amax(1), M),
    "AminBackward0": (lambda x: x.amin(1), M),
    "SignBackward0": (torch.sign, M),
    "FloorBackward0": (torch.floor, M),
    "CeilBackward0": (torch.ceil, M),
    "RoundBackward0": (torch.round, M),
    "RoundBackward1": (lambda x: x.round(decimals=1), M),
    "TruncBackward0": (torch.trunc, M),
    "FracBackward0": (torch.frac, M),
    "FmodBackward0": (lambda x: x.fmod(0.3), M),
    "RemainderBackward0": (lambda x: x.remainder(0.3), M),
    "MaxPool2DWithIndicesBackward0": (lambda x: F.max_pool2d(x, 2), PLANE),
    "MaxPool3DWithIndicesBackward0": (lambda x: F.max_pool3d(x, 2), SPACE),
    "AdaptiveMaxPool2DBackward0": (lambda x: F.adaptive_max_pool2d(x, 2), PLANE),
    "AdaptiveMaxPool3DBackward0": (lambda x: F.adaptive_max_pool3d(x, 2), SPACE),
    "FractionalMaxPool2DBackward0": (
        lambda x: F.fractional_max_pool2d(x, 2, 2, _random_samples=RANDOM[..., :2]),
        PLANE,
    ),
    "FractionalMaxPool3DBackward0": (lambda x: F.fractional_max_pool3d(x, 2, 2, _random_samples=RANDOM[:, :1]), SPACE),
}
BILINEAR: dict[str, tuple[Any, ...]] = {
    "MmBackward0": (torch.mm, M, (4, 2)),
    "BmmBackward0": (torch.bmm, (2, 3, 4), (2, 4, 2)),
    "MvBackward0": (torch.mv, M, V),
    "DotBackward0": (torch.dot, V, V),
    "VdotBackward0": (torch.vdot, V, V),
    "AddmmBackward0": (torch.addmm, (2,), M, (4, 2)),
    "AddbmmBackward0": (torch.addbmm, (3, 2), (2, 3, 4), (2, 4, 2)),
    "BaddbmmBackward0": (torch.baddbmm, (2, 3, 2), (2, 3, 4), (2, 4, 2)),
    "AddmvBackward0": (torch.addmv, (3,), M, V),
    "AddrBackward0": (torch.addr, M, (3,), V),
    "AddcmulBackward0": (torch.addcmul, M, M, N),
    "TrilinearBackward0": (
        lambda x, w, y: torch.ops.aten._trilinear(x, w, y, [1, 3], [0], [1, 2], [2, 3]),
        M,
        (2, 4, 4),
        N,
    ),
    "LinalgCrossBackward0": (torch.linalg.cross, (2, 3), (2, 3)),
    "LerpBackward1": (torch.lerp, M, N, N),
    "MulBackward0": (torch.mul, M, N),
    "MulBackward1": (lambda x: torch.ops.aten.mul.Scalar(x, 2), M),
    "ConvolutionBackward0": (lambda x, w, b: F.conv2d(x, w, b), PLANE, (3, 2, 2, 2), (3,)),
    "NativeBatchNormBackward0": (
        lambda x, w, b: F.batch_norm(x, torch.zeros(4).double(), torch.ones(4).double(), w, b),
        M,
        V,
        V,
    ),
    "PreluKernelBackward0": (F.prelu, M, V),
}
CURVED: dict[str, tuple[Any, ...]] = {
    "ExpBackward0": (torch.exp, M),
    "PowBackward0": (torch.square, M),
    "SoftmaxBackward0": (lambda x: x.softmax(1), M),
    "NativeLayerNormBackward0": (lambda x: F.layer_norm(x, (4,)), M),
    "GluBackward0": (F.glu, M),
    "NativeGroupNormBackward0": (lambda x: F.group_norm(x, 1), M),
    "HardswishBackward0": (lambda x: F.hardswish(2 * x), M),
    "ProdBackward0": (torch.prod, M),
    "LinalgVectorNormBackward0": (torch.linalg.vector_norm, M),
    "ReciprocalBackward0": (torch.reciprocal, M),
    "torch::autograd::CopySlices": (lambda x: (y := x + 0, y[:, 0].exp_())[0], M),
    "MseLossBackward0": (F.mse_loss, M, N),
    "HuberLossBackward0": (F.huber_loss, M, N),
    "MultiMarginLossBackward0": (lambda x: F.multi_margin_loss(x, ROWS, p=2), M),
    "SmoothL1LossBackward0": (F.smooth_l1_loss, M, N),
    "LogsumexpBackward0": (lambda x: x.logsumexp(1), M),
    "AddcdivBackward0": (torch.addcdiv, M, M, N),
    "CumprodBackward0": (lambda x: x.cumprod(1), M),
    "VarBackward0": (torch.var, M),
    "NativeBatchNormBackward0": (lambda x: F.batch_norm(x, None, None, training=True), M),
    **{
        f"{name}Backward0": (lambda x, f=f: f(x.square() + 0.1), M)
        for name, f in {"Log": torch.log, "Log2": torch.log2, "Log10": torch.log10, "Rsqrt": torch.rsqrt}.items()
    },
    **{
        f"{name}Backward0": (lambda x, f=f: f(x / 4), M)
        for name, f in {
            **{"Exp2": torch.exp2, "Expm1": torch.expm1, "Log1P": torch.log1p, "Sin": torch.sin, "Cos": torch.cos},
            **{"Tan": torch.tan, "Sinh": torch.sinh, "Cosh": torch.cosh, "Atan": torch.atan, "Asinh": torch.asinh},
            **{"Atanh": torch.atanh, "Erf": torch.erf, "Erfc": torch.erfc},
        }.items()
    },
    "LgammaBackward0": (lambda x: torch.lgamma(x + 9), M),
    "DigammaBackward0": (lambda x: torch.digamma(x + 9), M),
    "PowBackward1": (lambda x, y: (x.square() + 1).pow(y), M, N),
    "PowBackward2": (lambda y: torch.pow(2.0, y), M),
    "LogSoftmaxBackward0": (lambda x: x.log_softmax(1), M),
    "SafeSoftmaxBackward0": (lambda x: torch.ops.aten._safe_softmax(x, 1), M),
    "LogaddexpBackward0": (torch.logaddexp, M, N),
    "Logaddexp2Backward0": (torch.logaddexp2, M, N),
    "LogcumsumexpBackward0": (lambda x: x.logcumsumexp(1), M),
    "ScaledDotProductFlashAttentionForCpuBackward0": (F.scaled_dot_product_attention, HEADS, HEADS, HEADS),
    "VarMeanBackward0": (lambda x: torch.var_mean(x, 1)[0], M),
    "WeightNormInterfaceBackward0": (lambda v, g: torch._weight_norm(v, g, 0), M, (3, 1)),
    "ProdBackward1": (lambda x: x.prod(1), M),
    "LinalgInvExBackward0": (torch.linalg.inv, (3, 3)),
    "LinalgSolveExBackward0": (torch.linalg.solve, (3, 3), (3, 2)),
    "LinalgDetBackward0": (torch.linalg.det, (3, 3)),
    "LinalgSlogdetBackward0": (lambda x: torch.linalg.slogdet(x).logabsdet, (3, 3)),
    "LinalgMatrixExpBackward0": (torch.linalg.matrix_exp, (3, 3)),
    "CtcLossBackward0": (lambda x: F.ctc_loss(x.log_softmax(2), LABELS, (5,), (2,), reduction="none"), (5, 1, 4)),
    "BinaryCrossEntropyBackward0": (lambda x: F.binary_cross_entropy(x.sigmoid(), HIGH.double()), M),
    "BinaryCrossEntropyWithLogitsBackward0": (
        lambda x: F.binary_cross_entropy_with_logits(x, HIGH.double()),
        M,
    ),
    "SoftMarginLossBackward0": (lambda x: F.soft_margin_loss(x, 2 * HIGH.double() - 1), M),
}
QUOTIENTS: dict[str, tuple[Any, ...]] = {
    "DivBackward0": (torch.div, M, N),
    "DivBackward1": (lambda x: torch.ops.aten.div.Scalar(x, 2), M),
}
ROLES: dict[str | None, dict[str, tuple[Any, ...]]] = {
    "linear": LINEAR,
    "piecewise linear": PIECEWISE,
    "bilinear": BILINEAR,
    "quotient": QUOTIENTS,
    None: CURVED,
}
# activations, those above apart: what their entry's module does
for one in OPERATIONS:
    for module, node in product(modules(one), one.node_names) if one.effect == "each" else ():
        ROLES[one.role].setdefault(node, (made(module), M))

ELSEWHERE = {  # made on other devices alone
    "CtcLossBackward1",
    *(f"{name}Backward0" for name in ("Linear", "CudnnBatchNorm", "MiopenBatchNorm", "FusedRmsNorm")),
    *(f"ScaledDotProduct{kind}AttentionBackward0" for kind in ("Flash", "Efficient", "Cudnn")),
    *(f"ThnnFused{kind}CellBackward0" for kind in ("Gru", "Lstm")),
}


def has_kink(name: str) -> bool:
    return getattr(operation_of(name), "kinks", False)


def inputs(shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    g = torch.Generator().manual_seed(4)
    return [torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_() for shape in shapes]


def bend(f: Callable[..., Tensor], xs: list[Tensor], moved: set[int], step: float) -> float:
    """The largest entry of f(x + u) - 2 f(x) + f(x - u), u random in some of the inputs."""
    g = torch.Generator().manual_seed(5)
    u = [step * torch.randn(x.shape, generator=g, dtype=torch.float64) * (k in moved) for k, x in enumerate(xs)]
    with torch.no_grad():
        there, back = ([x + sign * by for x, by in zip(xs, u, strict=True)] for sign in (1, -1))
        return float((f(*there) - 2 * f(*xs) + f(*back)).abs().max())


@pytest.mark.parametrize(("role", "name"), [(role, name) for role, cases in ROLES.items() for name in cases])
def test_a_node_is_named_and_acts_as_the_table_says(role: str | None, name: str) -> None:
    f, *shapes = ROLES[role][name]
    xs = inputs(tuple(shapes))
    node = f(*xs).grad_fn
    assert node.name() == name
    assert role_of(node) == role
    every, rounding = set(range(len(xs))), 1e-5 if name == "ToCopyBackward0" else 1e-11
    if role == "linear":
        assert bend(f, xs, every, 1.0) < rounding
    elif role == "piecewise linear":
        assert bend(f, xs, every, 1e-4) < rounding
        assert bend(f, xs, every, 1.0) > 1e-3
    elif role == "bilinear":
        assert all(bend(f, xs, {k}, 1e-4 if has_kink(name) else 1.0) < rounding for k in every)
        assert len(xs) == 1 or bend(f, xs, every, 1.0) > 1e-3
    elif role == "quotient":
        assert bend(f, xs, {0}, 1.0) < rounding
        assert all(bend(f, xs, {k}, 0.1) > 1e-5 for k in every - {0})
    else:
        assert bend(f, xs, every, 0.1) > 1e-5


def test_every_node_of_the_table_was_made() -> None:
    listed = [name for one in OPERATIONS for name in one.node_names]
    assert set(listed) <= {name for cases in ROLES.values() for name in cases} | ELSEWHERE
    assert len(set(listed)) == len(listed)


def test_kinks_are_what_bends_sharply() -> None:
    """Whatever is piecewise linear and not linear; among other operations those whose pieces meet."""
    activations = {name for one, module in ENTRIES if one.effect == "each" for name in one.node_names}
    sharp = {name for cases in ROLES.values() for name in cases if has_kink(name)}
    sharp -= activations - PIECEWISE.keys()
    curved = {"HuberLoss", "SmoothL1Loss", "MultiMarginLoss"}
    others = {"WhereBackward0", "PreluKernelBackward0", "torch::autograd::CopySlices"}
    assert sharp == {*PIECEWISE, *others, *(f"{name}Backward0" for name in curved)}


def test_complex_numbers_have_no_role() -> None:
    """|z| is curved in the real and the imaginary part, and a real tensor becomes complex by a mere product."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    for z in (x.to(torch.complex128), x * (1 + 2j)):
        assert operation_of(z.grad_fn.name()).role is not None
        assert role_of(z.grad_fn) is None


def test_a_function_of_ones_own_has_no_role() -> None:
    class Relu(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.exp()

        @staticmethod
        def backward(ctx: Any, *slopes: Tensor) -> Tensor:
            return slopes[0]

    node = Relu.apply(torch.ones(3, requires_grad=True)).grad_fn
    assert node.name() == "ReluBackward"
    assert role_of(node) is None


ENTRIES = [(one, module) for one in OPERATIONS for module in modules(one) if module is not nn.PReLU]


def fed(module: type[nn.Module]) -> Tensor:
    """Six features of three samples, or four channels in as many dimensions as the module's name ends in."""
    last = module.__name__[-2:]
    space = int(last[0]) if last in ("1d", "2d", "3d") and module is not nn.BatchNorm1d else 0
    space = 2 if "Shuffle" in module.__name__ or "Unshuffle" in module.__name__ else space
    shape = (3, 4, *(4,) * space) if space else (3, 6)
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("one", "module"), ENTRIES, ids=lambda value: getattr(value, "__name__", ""))
def test_modules_do_what_their_entry_says(one: Operation, module: type[nn.Module]) -> None:
    act, x = made(module), fed(module)
    assert operation_of(act) is not None
    with torch.no_grad():
        y, u = act(x), torch.randn_like(x)
        step = 1e-4 if one.kinks else 1.0
        bend = float((act(x + step * u) - 2 * y + act(x - step * u)).abs().max())
        assert (bend < 1e-12) == (one.role is not None)
        assert one.affine == (one.role is not None and not one.kinks)
        assert torch.allclose(act(30 * x), 30 * y) == one.homogeneous
        if one.moves:
            assert torch.equal(y.flatten().sort().values, x.flatten().sort().values)
        if one.effect == "identity":
            assert torch.equal(y, x)
        if one.effect in ("identity", "each"):
            other = x.clone()
            other[:, 0] += 1
            assert torch.equal(act(other)[:, 1:], y[:, 1:])
        if one.effect == "each":
            assert not torch.equal(y, x)
        if one.effect == "window":
            assert y.ndim == x.ndim
            other = x.clone()
            other[:, 0] += 1  # windows lie within a channel
            assert torch.equal(act(other)[:, 1:], y[:, 1:])
            assert bool((act(other)[:, 0] != y[:, 0]).any())


@pytest.mark.parametrize(("one", "module"), [entry for entry in ENTRIES if entry[0].effect == "each"],
                         ids=lambda value: getattr(value, "__name__", ""))  # fmt: skip
def test_kinks_are_jumps_of_the_first_three_derivatives(one: Operation, module: type[nn.Module]) -> None:
    """Fourth differences over h^3: with half of the step half as large without a jump, else no smaller."""
    act = made(module)
    sizes = []
    for step in (0.02, 0.01):
        with torch.no_grad():
            y = act(torch.arange(-8.003, 8.003, step, dtype=torch.float64))
        sizes.append(float(y.diff(n=4).abs().max()) / step**3)
    assert (sizes[1] > 0.75 * sizes[0]) == one.kinks


CALLS = [(one, call) for one in OPERATIONS if one.effect == "each" for call in one.called.split()[1:] if modules(one)]


@pytest.mark.parametrize(("one", "call"), CALLS, ids=lambda value: value if isinstance(value, str) else "")
def test_functions_and_methods_are_their_modules(one: Operation, call: str) -> None:
    (module,) = modules(one)
    x, settings = fed(module), SETTINGS.get(module, ())
    expected = made(module)(x)
    functions = [getattr(home, call) for home in (torch, nn.functional) if hasattr(home, call)]
    assert functions or hasattr(x, call)
    for function in functions:
        assert operation_of(function) is one
        assert torch.equal(function(x.clone(), *settings), expected)
    if hasattr(x, call):
        assert operation_of(call) is one
        assert torch.equal(getattr(x.clone(), call)(*settings), expected)


def test_no_name_stands_for_two() -> None:
    names = [name for one in OPERATIONS for name in one.called.split()]
    assert len(set(names)) == len(names)


class Renamed(nn.ReLU):
    pass


def patched() -> nn.Module:
    act = nn.ReLU()
    act.forward = lambda x: x.relu().square()  # type: ignore[method-assign]
    return act


def followed() -> nn.Module:
    act = nn.ReLU()
    act.register_forward_hook(lambda module, inputs, z: z.square())
    return act


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (SquaredReLU(), None), (patched(), None), (followed(), None), (nn.Softmax(1), None),
        (nn.InstanceNorm1d(3), None), (nn.Sequential(), None), (Renamed(), "relu"),
        (weight_norm(nn.Linear(2, 2)), "linear"),
    ],
    ids=["squared", "patched", "followed", "softmax", "instance norm", "sequential", "renamed", "weight_norm"],
)  # fmt: skip
def test_a_module_is_what_its_forward_is(module: nn.Module, name: str | None) -> None:
    found = operation_of(module)
    assert (found.name if found else None) == name
    assert found is None or (found.activation_of(module) is not None) == (name == "relu")


def test_hooks_can_be_overlooked() -> None:
    act = followed()
    assert hooked(act)
    found = operation_of(act, hooks=True)
    assert found is not None
    assert found.name == "relu"


def test_an_operation_that_is_not_listed_is_unknown() -> None:
    assert operation_of(torch.softmax) is operation_of("softmax") is None
    assert operation_of(torch.nn.functional.layer_norm) is None
