"""What bounds read off the pass beside the measures: norms of each layer's input and Jacobian, per sample."""

from __future__ import annotations

from torch import Tensor

from flatlens.grams import LayerGrams
from flatlens.measures.card import per_sample


@per_sample(id="", family="", symbol="", source="", unit="", place="input", needs={"G"}, sketched="never")
def input_norm2(g: LayerGrams) -> Tensor:
    """||x||^2 of the place's input."""
    assert g.x_norm2 is not None
    return g.x_norm2


@per_sample(id="", family="", symbol="", source="", unit="", place="weight", needs={"K"}, sketched="never")
def weight_slope2(g: LayerGrams) -> Tensor:
    """||df/dW||_F^2 of the layer's weight alone."""
    return g.K_weight.diagonal(dim1=1, dim2=2).sum(1)


@per_sample(id="", family="", symbol="", source="", unit="", place="weight", needs={"K"}, sketched="never")
def output_slope2(g: LayerGrams) -> Tensor:
    """||J||_F^2, J = df/dz of the layer's output, over all its positions."""
    return g.linear.J.flatten(1).double().square().sum(1)
