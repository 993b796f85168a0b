"""Curvature of the risk along a layer's own weights: the measures that are invariant under rescaling of layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from flatlens.curvature.functional_hessian import column_directions, row_directions
from flatlens.errors import BadOption
from flatlens.grams import LayerGrams, Weight, row_factor, trace
from flatlens.measures.definition import (
    LAYERWISE,
    PERMUTATION,
    UNITS_AND_ORDER,
    Measure,
    Reduced,
    Run,
    per_sample,
    require_one_of,
)
from flatlens.measures.lens import Lens

# the end of the `cost` of measures that take products at layers below a smooth activation
AT_POSITIONS = ", for shared weights times the smaller of m and the number of positions"


of_weight = partial(
    per_sample,
    family="flatness",
    unit="loss",
    place="weight",
    needs={"C", "CK"},
    sketched="probes",
    invariant_under={LAYERWISE, PERMUTATION},
)
relative = partial(
    of_weight,
    id="M9",
    needs={"C", "CR"},
    answer="last",
    invariances={("normalized", "std"): UNITS_AND_ORDER},  # features in units of their standard deviation have no scale
    needs_feature_scale=("normalized", "kernel"),
)


def _in_units_of_features(g: LayerGrams, normalized: str | None, kernel: str | None) -> Tensor:
    """Return tr(C R) of the layer, R_i[k, k'] = <W^T M_k, W^T M_k'>, M_k the gradient of output k in W.

    With `normalized` it is that after Theorem 4's preprocessing: features divided by their spread. With `kernel` it has
    W S in place of W.
    """
    if kernel is not None:
        require_one_of(("spread",), kernel=kernel)
        if normalized is not None:
            raise BadOption("options normalized= and kernel= exclude each other")
        assert g.feature_scale is not None
        linear = g.linear
        moved = replace(linear.weight, W=linear.weight.W * shape_of_kernel(g.feature_scale)[:, None])
        return linear.block(moved, None, None).relative_trace()
    if normalized is None:
        return g.CR
    require_one_of(("std", "variance"), normalized=normalized)
    assert g.feature_scale is not None
    return trace(g.C, g.relative_gram(g.feature_scale if normalized == "std" else g.feature_scale.square()))


def shape_of_kernel(spread: Tensor) -> Tensor:
    """Return the diagonal of S, (g, m): the spread of the features, scaled so that tr S^2 = m."""
    return spread * (spread.shape[1] / spread.square().sum(1, keepdim=True)).sqrt()


def _relative_curvature(lens: Lens, layer: str, measure: Measure, run: Run) -> Tensor:
    """Return Tr of the functional Hessian's part, which `measure` adds to the Gauss-Newton part that the pass has."""
    weight, normalized = lens.plan.weight(layer).matrix, measure.option("normalized")
    if measure.option("kernel") is not None:
        shaped = weight.W * shape_of_kernel(lens.feature_scale()[layer])[:, None]
        return lens.functional_hessian(layer, row_directions(row_factor(shaped)), run)
    if normalized is None:
        return lens.functional_hessian(layer, row_directions(weight.row_factor), run)
    spread = lens.feature_scale()[layer]
    scale = spread if normalized == "std" else spread.square()
    return lens.functional_hessian(layer, row_directions(row_factor(weight.W * scale[:, None]), scale), run)


def _products_of_rows(weight: Weight, rows: int) -> int:
    # for each feature, or for each position if the weight acts through one product and they are fewer
    g, _, m = weight.matrix.W.shape
    return g * rows * (min(m, weight.positions) if len(weight.products) == 1 else m)


@relative(
    symbol=r"\kappa_{Tr}",
    source="relative2021 Def. 3, Thm 4",
    cost=f"one pass; at a layer below a smooth activation min(d, m) Hessian products{AT_POSITIONS}",
    curvature=_relative_curvature,
    products=lambda weight: _products_of_rows(weight, min(weight.matrix.W.shape[1:])),
)
def relative_flatness(g: LayerGrams, *, normalized: str | None = None, kernel: str | None = None) -> Tensor:
    """Relative flatness: sum_{s,s'} <w_s, w_s'> Tr H_{s,s'}, H the Hessian of the risk in one layer's weights.

    H_{s,s'} is the block of rows s and s'. The value equals `relative_flatness_ggn` for a last linear layer whose
    result is the output, and in piecewise-linear networks that use the weight once. For other layers it takes curvature
    products, which run only if you ask for the measure by name: min(d, m), times the number of positions (such as
    tokens) that the weight acts at, or times m if that is less. The kernel of a convolution is a matrix out x (in k k);
    a grouped convolution has a block for each group.

    `normalized="std"` divides the features by their standard deviations before the measurement, as Theorem 4 needs it.
    The value is then also invariant under rescaling of the features that the layer reads. `normalized="variance"`
    divides by the variances, as the paper prints; the value is not invariant then. A feature that is 0 for all data is
    dropped. A constant feature is measured in units of its value.

    `kernel="spread"` is section 7's other shape of the local distributions: they stretch along each feature by its
    standard deviation, xi = delta ||phi|| S u with u uniform on the sphere, S diagonal, tr S^2 = m. By Theorem 5's
    argument with A = delta S O, O of Haar's law, the mean change is delta^2 / (2m) times sum <w_s S, w_s' S>
    Tr H_{s,s'}, which this is. The shape changes the scalar products of the rows. The paper says that it changes the
    trace to a weighted average of the Hessian's eigenvalues: that is A = delta O S, balls whose radius is ||S phi||.
    """
    return _in_units_of_features(g, normalized, kernel)


@relative(symbol=r"\kappa_{Tr}^{GN}", source="relative2021 Def. 3, Gauss-Newton part")
def relative_flatness_ggn(g: LayerGrams, *, normalized: str | None = None, kernel: str | None = None) -> Tensor:
    """Curvature of the risk along a layer's own weights, Gauss-Newton part: mean_i tr(C_i R_i).

    R_i[k, k'] is the inner product of W^T M_k and W^T M_k', where M_k is the gradient of output k in the weight. For a
    dense layer R_i = ||phi_i||^2 G_i. The network-level value is that of the last linear layer, as in the paper; `.sum`
    and `.max` are over layers. Options are as in `relative_flatness`.
    """
    return _in_units_of_features(g, normalized, kernel)


def _curvature_of_trace(lens: Lens, layer: str, measure: Measure, run: Run) -> Tensor:
    W = lens.plan.weight(layer).matrix.W
    every_row = torch.eye(W.shape[1], dtype=W.dtype, device=W.device).expand(len(W), -1, -1)
    return W.square().sum() * lens.functional_hessian(layer, row_directions(every_row), run)


@of_weight(
    id="M10",
    symbol=r"\kappa_\tau",
    source="reparam2019 section 2, Table 1",
    cost=f"one pass; at a layer below a smooth activation d Hessian products{AT_POSITIONS}",
    curvature=_curvature_of_trace,
    products=lambda weight: _products_of_rows(weight, weight.matrix.W.shape[1]),
)
def kappa_trace(g: LayerGrams) -> Tensor:
    """Trace of a layer's Hessian in units of its weight: ||W_l||_F^2 Tr H_l, summed over layers; `.max` beside it.

    H_l is the Hessian of the risk in the layer's weight alone.
    """
    return g.linear.weight.W.square().sum() * g.CK_weight


def _all_columns(mean_columns: Tensor, weight: Weight, measure: Measure) -> Reduced:
    columns = mean_columns.cpu()
    return Reduced(float(columns.sum()), None, terms=columns.flatten(), arrays={"columns": columns})


of_columns = partial(
    of_weight,
    id="M11",
    needs={"C", "columns"},
    total=True,
    finish=_all_columns,
    cost="one pass, per-sample gradients of shared weights",
    invariant_under=UNITS_AND_ORDER,
)


@of_columns(
    symbol=r"\rho_\sigma",
    source="reparam2019 App. B",
    cost="one pass, per-sample gradients of shared weights; m Hessian products for a layer below a smooth activation",
    curvature=lambda lens, layer, measure, run: lens.functional_hessian(layer, column_directions(), run, each=True),
    products=lambda weight: weight.matrix.W.shape[0] * weight.matrix.W.shape[2],
)
def neuron_flatness(g: LayerGrams) -> Tensor:
    """Curvature of the risk along each column of the weights: sum_j w_j^T H_jj w_j, summed over layers.

    w_j is column j of a layer's W, and H_jj the Hessian in it. The measure is invariant under every rescaling of layers
    and of neurons (the paper's "linear reparametrisations"), but no change of basis. It equals `neuron_flatness_ggn`
    for a last linear layer whose result is the output, and in piecewise-linear networks that use the weight once. For
    other layers it takes one curvature product per column, which runs only if you ask for the measure by name. `.max`
    and `arrays["columns"]` are as in `neuron_flatness_ggn`.
    """
    return g.linear.columns().sum(0)


@of_columns(symbol=r"\rho_\sigma^{GN}", source="reparam2019 App. B, Gauss-Newton part")
def neuron_flatness_ggn(g: LayerGrams) -> Tensor:
    """Curvature of the risk along each column of the weights, Gauss-Newton part, summed over columns and layers.

    The term of column j of a layer's W is rho(j) = mean_i ||C_i^(1/2) sum_p phi_pj J_p w_j||^2: the part of the layer's
    input j. A convolution has a column for each input channel and place in the kernel; the positions of the image are
    summed before squaring. `.max` is the largest column of the layer, and of all layers. `arrays["columns"]` has all
    columns.
    """
    return g.linear.columns().sum(0)
