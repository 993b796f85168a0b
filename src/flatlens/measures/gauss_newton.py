"""Traces of the Gauss-Newton matrix and of the Jacobian's Gram matrix, over parameters."""

from __future__ import annotations

from torch import Tensor

from flatlens.grams import LayerGrams, trace
from flatlens.measures.card import PERMUTATION, per_sample
from flatlens.measures.reduce import mean


@per_sample(
    id="M1",
    family="sharpness",
    symbol="S",
    source="compression Eq. 3",
    unit="output^2 / parameter^2",
    reduce=mean,
    place="parameters",
    needs={"K"},
    sketched="probes",
    invariant_under={PERMUTATION},
)
def interpolation_sharpness(g: LayerGrams) -> Tensor:
    """Size of the outputs' response to the parameters: mean_i ||df/dtheta||_F^2.

    It is mean_i tr K_i, summed over all measured parameters. It equals Tr H if the network interpolates the data under
    the half squared error. The paper's figures plot its square root.
    """
    return g.K.diagonal(dim1=1, dim2=2).sum(1)


@per_sample(
    id="M2",
    family="sharpness",
    symbol=r"\mathrm{Tr}\,GN",
    source="sharpening Eq. 3",
    unit="loss / parameter^2",
    reduce=mean,
    place="parameters",
    needs={"C", "K"},
    sketched="probes",
    invariant_under={PERMUTATION},
)
def ggn_trace(g: LayerGrams) -> Tensor:
    """Trace of the Gauss-Newton matrix: mean_i tr(C_i K_i), summed over parameters.

    It equals Tr H if the outputs are an affine function of each weight. Those of ReLU networks that use
    each weight once are.
    """
    return trace(g.C, g.K)


@per_sample(
    id="M18",
    family="sharpness",
    symbol=r"\overline{\|\partial f/\partial\theta\|_F^2}",
    source="sharpening App. D",
    unit="output^2 / parameter^2",
    place="parameters",
    needs={"K"},
    sketched="probes",
    invariant_under={PERMUTATION},
)
def parameter_jacobian_frobenius(g: LayerGrams) -> Tensor:
    """Squared Frobenius norm of the parameter-output Jacobian, under the name that regularisers use.

    The same number as `interpolation_sharpness`: mean_i ||df_i/dtheta||_F^2 = mean_i tr K_i.
    """
    found: Tensor = interpolation_sharpness.evaluate(g)
    return found
