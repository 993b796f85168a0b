"""Sizes: of weights, of features, of outputs; and the Fisher-Rao norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatlens.curvature.operators import ParameterJacobian
from flatlens.curvature.spectral_norms import feature_norms
from flatlens.estimate import Estimate, undefined, with_note
from flatlens.grams import UNREAD_PRODUCT, LayerGrams
from flatlens.grams.weight_jacobians import euclidean
from flatlens.measures.definition import FUNCTION, PERMUTATION, Parts, Run, on_lens, per_sample
from flatlens.measures.leading_eigenvalues import of_norm
from flatlens.measures.lens import Lens
from flatlens.measures.notes import NO_PARAMETER, left_out, no_linear_layer
from flatlens.operations.operator_norm import largest_norm
from flatlens.problem.forward import fisher_slopes, forwards

WEIGHTLESS = "F is infinite: the loss of a sample with weight 0 has a gradient (smoothed labels of a class of weight 0)"


of_outputs = partial(per_sample, id="own", family="norms", place="outputs", needs=(), invariant_under=FUNCTION)
of_network = partial(on_lens, family="norms", works_coupled=True, differentiates=False)


@of_outputs(symbol=r"\|f_i\|", source="sharpening App. C.1", unit="output")
def _output_norms(g: LayerGrams) -> Tensor:
    """Norm of each sample's outputs: ||f(x_i)||."""
    return euclidean(g.f, 1)


@of_outputs(symbol=r"\langle g_i, f_i \rangle", source="relative2021 Fig. 5 (Liang et al. 2019)", unit="loss")
def _slope_along_outputs(g: LayerGrams) -> Tensor:
    """Slope of each sample's loss along its own outputs: <g_i, f_i>, with g_i of `fisher_slopes`."""
    assert g.slope is not None
    return (g.slope * g.f).sum(1)


@of_outputs(
    symbol=r"\langle g_i, \sum_j \theta_j \partial f_i / \partial \theta_j \rangle",
    source="relative2021 Fig. 5 (Liang et al. 2019)",
    unit="loss",
    place="parameters",
    needs={"along"},
    invariant_under={PERMUTATION},
)
def _slope_along_parameters(g: LayerGrams) -> Tensor:
    """Slope of each sample's loss along the place's own parameters: <g_i, sum_j theta_j df_i/dtheta_j>."""
    assert g.slope is not None
    return (g.slope * g.along).sum(1)


@of_network(
    id="M16",
    symbol=r"\|W\|_F",
    source="relative2021 Fig. 5",
    unit="parameter",
    cost="operator norms",
    invariant_under={PERMUTATION},
)
def weight_norm(lens: Lens, run: Run) -> Estimate | Parts:
    """Frobenius norm of all linear layers' weights, biases not counted: sqrt(sum_l ||W_l||_F^2).

    `.spectral` is ||W_l||_2. For a convolution it is the norm of the operator on inputs of the layer's size; `.kernel`
    is then the norm of the kernel as a matrix out x (in k k). The network's `.spectral` and `.kernel` are the largest
    of the layers'.
    """
    weights = lens.plan.weights
    if not weights:
        return undefined(no_linear_layer(lens))
    others = left_out(lens, weights)
    norms = {layer: float(euclidean(weight.matrix.W)) for layer, weight in weights.items()}
    parts: dict[tuple[str, str | None], Estimate] = {("", None): Estimate(math.hypot(*norms.values()), note=others)}
    parts |= {("", layer): Estimate(norm) for layer, norm in norms.items()}
    if run.budget < math.inf:  # the summary shows neither
        return parts
    spectral = {layer: weight.searched_spectral_norm for layer, weight in weights.items()}
    kernel = {layer: w.searched_kernel_norm for layer, w in weights.items() if not w.adapter.token_wise}
    for part, values in (("spectral", spectral), ("kernel", kernel)):
        if values:
            parts[part, None] = of_norm(largest_norm(values.values()), others)
            parts |= {(part, layer): of_norm(value) for layer, value in values.items()}
    return parts


@of_network(
    id="M18",
    symbol=r"\|f(X)\|_F",
    source="sharpening App. C.1",
    unit="output",
    invariant_under=FUNCTION,
    reads=(_output_norms,),
)
def output_norm(lens: Lens) -> Estimate:
    """Frobenius norm of the outputs over all data: sqrt(sum_i ||f(x_i)||^2)."""
    samples = lens.gathered(_output_norms).get(None)
    if samples is None:
        samples = _by_a_forward_pass(lens, lambda f, y: euclidean(f, 1))
    return Estimate(float(euclidean(samples)), samples=samples)


def _by_a_forward_pass(lens: Lens, of: Callable[[Tensor, Any], Tensor]) -> Tensor:
    """Return numbers per sample, (n, ...), from its outputs in float64 and its target."""
    return torch.cat([of(f.to(torch.float64), y).cpu() for f, y in forwards(lens.problem, lens.model)])


@of_network(
    id="M18",
    symbol=r"\|f_{l-1}(X)\|_2",
    source="sharpening App. C",
    unit="feature",
    cost="one forward, Lanczos on the features",
    invariant_under={PERMUTATION},
)
def feature_norm(lens: Lens) -> Parts:
    """Spectral norm of the matrix of features that each linear layer reads, n x M_l; the network's is the largest.

    The features of a convolution are its whole input, flattened. For a layer that reads a sample in several rows
    (tokens, windows, views), side by side or folded into the batch, they are all rows. A module that is called twice
    has two rows. Where a call changes its input before it multiplies it, its features are what it multiplies.
    """
    norms, plan = feature_norms(lens.problem, lens.model, lens.plan), lens.plan
    calls = [*plan.structure.calls, *sorted(plan.structure.varying_calls)]
    missing = {key: plan.unplaced.get(key, UNREAD_PRODUCT) for key in calls if key not in norms}
    rows: dict[tuple[str, str | None], Estimate] = {("", key): undefined(why) for key, why in missing.items()}
    rows |= {("", at): of_norm(norm) for at, norm in norms.items()}
    if not norms:
        return {("", None): undefined(next(iter(missing.values()), no_linear_layer(lens))), **rows}
    whole = of_norm(largest_norm(norms.values()))
    if missing:
        key, why = next(iter(missing.items()))
        whole = with_note(replace(whole, kind="lower bound"), f"without {len(missing)} calls, the first {key}: {why}")
    return {("", None): whole, **rows}


@on_lens(
    id="M15",
    family="norms",
    symbol=r"\|\theta\|_{fr}",
    source="relative2021 Fig. 5 (Liang et al. 2019)",
    unit="loss",
    cost="one forward, one Jacobian product",
    invariant_under=FUNCTION,
    reads=(_slope_along_outputs, _slope_along_parameters),
)
def fisher_rao(lens: Lens) -> Parts:
    """Fisher-Rao norm: (number of weight layers) * sqrt(mean_i <dl_i/df_i, f_i>^2).

    `.parameters` is sqrt(theta^T F theta) with the empirical Fisher matrix F = mean_i g_i g_i^T of the measured
    parameters, that is sqrt(mean_i <dl_i/df_i, sum_j theta_j df_i/dtheta_j>^2). It equals the value if the outputs are
    homogeneous in the parameters, and the degree is the number of layers: ReLU networks without biases. For other
    networks the note says by how much the two differ. Means weigh samples as the risk does: ignored samples do not
    count.
    """
    outer = lens.gathered(_slope_along_outputs).get(None)
    if outer is None:
        outer = _by_a_forward_pass(lens, lambda f, y: (fisher_slopes(lens.problem, f, y) * f).sum(1))
    if outer.isnan().any():
        return {("", None): undefined(WEIGHTLESS), ("parameters", None): undefined(WEIGHTLESS)}
    whole = len(lens.plan.weights) * float(euclidean(outer)) / math.sqrt(len(outer))
    found: tuple[Tensor, int] | str = NO_PARAMETER

    def along_parameters() -> tuple[Tensor, int]:
        """Return (<g_i, sum_j theta_j df_i/dtheta_j>, (n,), with g_i of `fisher_slopes`; the products that it took)."""
        if places := lens.gathered(_slope_along_parameters):
            return torch.stack(list(places.values())).sum(0).detach(), 0
        jacobian = ParameterJacobian(lens.problem, model=lens.model)
        along = jacobian.times(jacobian.space.point()).to(torch.float64)
        return (_by_a_forward_pass(lens, lambda f, y: fisher_slopes(lens.problem, f, y)).to(along) * along).sum(1), 1

    if lens.problem.parameters:
        found = lens.attempted(along_parameters, "fisher_rao.parameters")
    if isinstance(found, str):
        return {("", None): Estimate(whole), ("parameters", None): undefined(found)}
    inner, products = found
    parameters = float(euclidean(inner)) / math.sqrt(len(inner))
    apart = abs(whole - parameters) / (max(whole, parameters) or 1.0)
    note = f"sqrt(theta^T F theta) is {parameters:.4g}: the network has biases, or is not ReLU"
    alike = apart < max(1e-4, lens.problem.as_asked().precision)
    return {
        ("", None): Estimate(whole, note="" if alike else note),
        ("parameters", None): Estimate(parameters, products=products),
    }
