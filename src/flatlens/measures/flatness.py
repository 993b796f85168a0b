"""Curvature of the risk along a layer's own weights: the measures that survive a rescaling of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from flatlens.errors import BadInput
from flatlens.grams import LayerGrams, trace
from flatlens.measures.card import FUNCTION, LAYERWISE, PERMUTATION, Measure, Option, per_sample
from flatlens.measures.reduce import mean

if TYPE_CHECKING:
    from flatlens.measures.lens import Lens

# with the features' standard deviations as units, their scale drops out
UNITS: dict[tuple[str, Option], frozenset[str]] = {("normalize", "std"): FUNCTION}


def in_units_of_features(g: LayerGrams, normalize: str | None) -> Tensor:
    """R, of the layer as it is or after Theorem 4's preprocessing: features divided by their spread, weights
    multiplied."""
    if normalize is None:
        return g.R
    if normalize not in ("std", "variance"):
        raise BadInput(f"relative_flatness(normalize={normalize!r}): None, 'std' or 'variance' (as printed) is needed")
    assert g.feature_scale is not None
    return g.relative_gram(g.feature_scale if normalize == "std" else g.feature_scale.square())


@per_sample(
    id="M9",
    family="flatness",
    symbol=r"\kappa_{Tr}^{GN}",
    source="relative2021 Def. 3, Gauss-Newton part",
    unit="loss",
    reduce=mean,
    place="weight",
    answer="last",
    invariant_under={LAYERWISE, PERMUTATION},
    invariances=UNITS,
    needs_feature_scale="normalize",
)
def relative_flatness_ggn(g: LayerGrams, *, normalize: str | None = None) -> Tensor:
    """Curvature of the risk along a layer's own weights, Gauss-Newton part: mean_i tr(C_i R_i).

    R = (W^T M_k . W^T M_k') with M_k output k's weight gradient; ||phi||^2 G for a dense layer. The network's answer
    is the last linear layer's, as published; `.sum` and `.max` over layers stand beside it.
    """
    return trace(g.C, in_units_of_features(g, normalize))


def with_curvature(lens: Lens, layer: str, measure: Measure) -> Tensor:
    """The literal definition where the outputs curve in the layer's pre-activation: the Gauss-Newton part and the
    rest."""
    normalize = measure.option("normalize")
    scale = None
    if normalize is not None:
        spread = lens.feature_scale()[layer]
        scale = spread if normalize == "std" else spread.square()
    part = relative_flatness_ggn(normalize=normalize)
    return lens.per_sample([part])[part.key, layer] + lens.curvature(layer, scale)


@per_sample(
    id="M9",
    family="flatness",
    symbol=r"\kappa_{Tr}",
    source="relative2021 Def. 3, Thm 4",
    unit="loss",
    reduce=mean,
    place="weight",
    answer="last",
    cost="one pass; d Hessian products for a layer below a smooth activation",
    invariant_under={LAYERWISE, PERMUTATION},
    invariances=UNITS,
    elsewhere=with_curvature,
    needs_feature_scale="normalize",
)
def relative_flatness(g: LayerGrams, *, normalize: str | None = None) -> Tensor:
    """Relative flatness: sum_{s,s'} <w_s, w_s'> Tr H_{s,s'}, H the Hessian of the risk in one layer's weights.

    H_{s,s'} is its block of rows s and s'. Equals `relative_flatness_ggn` for the last linear layer and in
    piecewise-linear networks that use the weight once; elsewhere min(d, m) curvature products are run, when asked
    for by name. A convolution's kernel is read out x (in k k), a grouped one as diagonal blocks.

    `normalize="std"` is Theorem 4's preprocessing done right: with it the value also survives a rescaling of the
    features feeding the layer. As printed, with variances, it does not: `normalize="variance"` is there to show it.
    Constant features are left alone.
    """
    return trace(g.C, in_units_of_features(g, normalize))
