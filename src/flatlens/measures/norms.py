"""Sizes: of weights, of features, of outputs; and the Fisher-Rao norm."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flatlens.curvature.features import feature_norms
from flatlens.curvature.jacobians import ParameterJacobian
from flatlens.curvature.operators import slopes
from flatlens.estimate import Estimate, undefined
from flatlens.measures.card import FUNCTION, PERMUTATION, Parts, on_lens
from flatlens.measures.left_out import left_out
from flatlens.measures.lens import Lens
from flatlens.problem import measuring


@on_lens(
    id="M16",
    family="norms",
    symbol=r"\|W\|_F",
    source="relative2021 Fig. 5",
    unit="parameter",
    cost="operator norms",
    invariant_under={PERMUTATION},
)
def weight_norm(lens: Lens) -> Parts:
    """Frobenius norm of all linear layers' weights, biases not counted: sqrt(sum_l ||W_l||_F^2).

    `.spectral` is ||W_l||_2, of a convolution that of the operator on its input's size, with `.kernel` that of the
    kernel as a matrix out x (in k k) beside it. The network's are the largest of its layers', as of one block-diagonal
    matrix.
    """
    parts: dict[tuple[str, str | None], Estimate] = {}
    weights = lens.layout.weights
    if not weights:
        return {("", None): undefined("the network has no linear layer")}
    squares = {layer: float(weight.matrix.W.square().sum()) for layer, weight in weights.items()}
    parts["", None] = Estimate(math.sqrt(sum(squares.values())), note=left_out(lens, weights))
    parts |= {("", layer): Estimate(math.sqrt(square)) for layer, square in squares.items()}
    spectral = {layer: weight.spectral_norm for layer, weight in weights.items()}
    kernel = {layer: w.kernel_norm for layer, w in weights.items() if not w.adapter.token_wise}
    for part, values in (("spectral", spectral), ("kernel", kernel)):
        if not values:
            continue
        parts[part, None] = Estimate(max(values.values()), note=left_out(lens, weights))
        parts |= {(part, layer): Estimate(value) for layer, value in values.items()}
    return parts


@on_lens(
    id="M18",
    family="norms",
    symbol=r"\|f(X)\|_F",
    source="sharpening App. C.1",
    unit="output",
    invariant_under=FUNCTION,
)
def output_norm(lens: Lens) -> Estimate:
    """Frobenius norm of the outputs over all data: sqrt(sum_i ||f(x_i)||^2)."""
    norms = []
    with measuring(lens.model), torch.no_grad():
        for raw in lens.problem.data.chunks(1024):
            f, _ = lens.problem.run(lens.model, lens.problem.place(raw))
            norms.append(f.to(torch.float64).norm(dim=1).cpu())
    samples = torch.cat(norms)
    return Estimate(float(samples.square().sum().sqrt()), samples=samples)


@on_lens(
    id="M18",
    family="norms",
    symbol=r"\|f_{l-1}(X)\|_2",
    source="sharpening App. C",
    unit="feature",
    cost="one forward, Lanczos on the features",
    invariant_under={PERMUTATION},
)
def feature_norm(lens: Lens) -> Parts:
    """Spectral norm of the matrix of features that each linear layer reads, n x M_l; the network's is the largest.

    A convolution's features are its whole input, flattened; a module called twice has two rows.
    """
    norms = feature_norms(lens.problem, lens.model, lens.layout)
    if not norms:
        return {("", None): undefined("the network has no linear layer")}
    return {("", None): Estimate(max(norms.values())), **{("", layer): Estimate(v) for layer, v in norms.items()}}


@on_lens(
    id="M15",
    family="norms",
    symbol=r"\|\theta\|_{fr}",
    source="relative2021 Fig. 5 (Liang et al. 2019)",
    unit="loss",
    cost="one forward, one Jacobian product",
    invariant_under=FUNCTION,
)
def fisher_rao(lens: Lens) -> Parts:
    """Fisher-Rao norm: (number of weight layers) * sqrt(mean_i <dl_i/df_i, f_i>^2).

    `.parameters` is sqrt(theta^T F theta) with F = mean_i g_i g_i^T the empirical Fisher matrix of the measured
    parameters: sqrt(mean_i <dl_i/df_i, sum_j theta_j df_i/dtheta_j>^2). The two are equal where the outputs are
    homogeneous in the parameters of degree the number of layers: ReLU networks without biases. Elsewhere the note says
    how far they part. Means weigh samples as the risk does: ignored ones count nothing.
    """
    problem = lens.problem
    along = _along_parameters(lens)
    outer, inner, start = 0.0, 0.0, 0
    with measuring(lens.model):
        for raw in problem.data.chunks(1024):
            f, y = problem.run(lens.model, problem.place(raw))
            f, mass = f.detach().to(torch.float64), problem.loss.mass(f, y)
            g = (
                slopes(problem, f, y) * problem.mass / mass.clamp(min=1e-300)[:, None]
            )  # the gradient of a sample's own loss
            outer += float((mass * (g * f).sum(1).square()).sum()) / problem.mass
            if along is not None:
                inner += float((mass * (g * along[start : start + len(f)]).sum(1).square()).sum()) / problem.mass
            start += len(f)
    whole, parameters = len(lens.layout.weights) * math.sqrt(outer), math.sqrt(inner)
    if along is None:
        return {("", None): Estimate(whole), ("parameters", None): undefined("no parameter is measured")}
    apart = abs(whole - parameters) / max(whole, parameters, 1e-300)
    note = "" if apart < 1e-4 else f"sqrt(theta^T F theta) is {parameters:.4g}: the network has biases, or is not ReLU"
    return {("", None): Estimate(whole, note=note), ("parameters", None): Estimate(parameters, products=1)}


def _along_parameters(lens: Lens) -> Tensor | None:
    """Return sum_j theta_j df_i/dtheta_j, (n, N)."""
    if not lens.problem.parameters:
        return None
    jacobian = ParameterJacobian(lens.problem, model=lens.model)
    return jacobian.times(jacobian.space.point()).to(torch.float64)
