"""Sizes of weights, outputs and features; measures in units of whole matrices."""

from __future__ import annotations

import math

import numpy as np
import torch

from conventions.literal import product
from conventions.networks import Network, Networks
from conventions.table import Agreed, Convention, Quantity, covers

ROBUST = "robust-generalization-measures `measures.py`"


def _circular(net: Network, layer: str) -> float:
    """The norm of the convolution on an 8 x 8 torus, stride 1."""
    kernel = net.parameters[f"{layer}.weight"].detach().numpy()
    spectrum = np.fft.fft2(kernel, (8, 8), axes=(2, 3)).transpose(2, 3, 0, 1)
    return float(np.linalg.svd(spectrum, compute_uv=False).max())


def _as_matrices(net: Network) -> dict[str, float]:
    """The spectral norm of every kernel, flattened."""
    weights = {layer: net.parameters[f"{layer}.weight"].detach().flatten(1) for layer in ("conv1", "conv2", "fc")}
    return {layer: float(torch.linalg.matrix_norm(W, 2)) for layer, W in weights.items()}


@covers("weight_norm")
def weight_norm(networks: Networks) -> Quantity:
    """Squared or not, sum or product."""
    net = networks.conv
    own = net("weight_norm")
    everything = torch.cat([p.detach().flatten() for p in net.model.parameters()])
    rows = [
        Convention("sqrt of the sum of ‖W_l‖_F², linear layers' weights", "relative2021 Fig. 5", own),
        Convention("not rooted: the sum of ‖W_l‖_F²", f"{ROBUST} (`PARAM_NORM`)", own**2),
        Convention("sqrt(‖w‖ / n)", f"{ROBUST} (`L2`, adjusted)", math.sqrt(own / len(net.y))),
        Convention("all parameters, biases and BatchNorm too", "for scale", float(everything.norm())),
        Convention("largest spectral norm: `.spectral`", "for scale", net("weight_norm", "spectral")),
        Convention(
            "product of the spectral norms, kernels as matrices",
            f"{ROBUST} (`PROD_OF_SPEC`, squared, in logs)",
            product(list(_as_matrices(net).values())),
        ),
    ]
    return Quantity(
        "`weight_norm`",
        net.name,
        "the square root, weights of linear layers, no biases",
        "The norm of one vector: it scales with the weights.",
        rows,
    )


@covers("weight_norm")
def norm_of_a_convolution(networks: Networks) -> Quantity:
    """Operator or kernel."""
    net = networks.conv
    W = net.parameters["conv2.weight"].detach()
    rows = [
        Convention(
            "of the operator, as padded and strided", "compression Eq. 5", net("weight_norm", "spectral", "conv2")
        ),
        Convention(
            "of the kernel as a matrix: `.kernel`",
            f"torch `spectral_norm`; {ROBUST} (`LOG_PROD_OF_SPEC`)",
            net("weight_norm", "kernel", "conv2"),
        ),
        Convention(
            "by FFT: circular padding, stride 1, the image's size",
            f"{ROBUST} (`LOG_PROD_OF_SPEC_FFT`)",
            _circular(net, "conv2"),
        ),
        Convention("‖W‖_F sqrt(positions)", "sharpdim `get_nmls`", float(W.norm()) * math.sqrt(_positions("conv2"))),
    ]
    return Quantity(
        "`weight_norm.spectral` of a convolution",
        net.name,
        "of the operator, with the layer's padding and stride, at its input's size; `.kernel` is the other",
        "Bounds need the norm of the operator.",
        rows,
        at=", layer `conv2`",
    )


def _positions(layer: str) -> int:
    """Where the kernel is laid."""
    return {"conv1": 64, "conv2": 9, "fc": 1}[layer]


@covers("matrix_normalized_sharpness")
def matrix_normalized_sharpness(networks: Networks) -> Quantity:
    """In units of which norm."""
    net = networks.conv
    name, layers = "matrix_normalized_sharpness", ("conv1", "conv2", "fc")
    roots = {layer: net(name, layer=layer) / net("weight_norm", "spectral", layer) for layer in layers}
    kernels = {layer: norm * roots[layer] for layer, norm in _as_matrices(net).items()}
    spread = {layer: net("weight_norm", layer=layer) * math.sqrt(_positions(layer)) * roots[layer] for layer in layers}
    rows = [
        Convention("sum of ‖W_l‖₂ sqrt(S_l), operator norm", "compression Eq. 35", net(name)),
        Convention("the kernel as a matrix", "torch `spectral_norm`", sum(kernels.values())),
        Convention("‖W_l‖_F: `frobenius=True`", "for scale", net(f"{name}(frobenius=True)")),
        Convention("‖W_l‖_F sqrt(positions)", "sharpdim `get_nmls` (its norm of a convolution)", sum(spread.values())),
    ]
    return Quantity(
        f"`{name}`",
        net.name,
        "the operator's norm, S of the weight alone",
        "The proof of the inequality uses it.",
        rows,
    )


@covers("normalized_sharpness")
def normalized_sharpness(networks: Networks) -> Quantity:
    """Which lambda, and whether it is minimised."""
    net = networks.relu
    rows = [
        Convention("λ = 1, minimised, with a certificate", "compression Eq. 36", net("normalized_sharpness")),
        Convention(
            "W² in place of W² / (4 λ²), which is λ = 1/2: `lam=0.5`",
            "reparameterization-and-flatness-measures `normalized_sharpness.py`",
            net("normalized_sharpness(lam=0.5)"),
            "2",
        ),
        Convention("the largest layer's: `.max`", "for scale", net("normalized_sharpness", "max")),
    ]
    return Quantity(
        "`normalized_sharpness`",
        net.name,
        "λ = 1; the minimum, certified",
        'λ only divides the value. A descent that stops early misses the minimum: see `arrays["gap"]`.',
        rows,
    )


@covers("fisher_rao")
def fisher_rao(networks: Networks) -> Quantity:
    """How many layers, which Fisher."""
    net = networks.entropy
    own, layers = net("fisher_rao"), 3
    rows = [
        Convention("L sqrt(mean ⟨dl/df, f⟩²), L weight layers", "relative2021 Fig. 5 (Liang et al. 2019)", own),
        Convention(
            "L + 1 in place of L",
            "relativeFlatnessGeneralization `calculate_measures.py`: 5 + 1 for LeNet5's five weight layers",
            own * (layers + 1) / layers,
            "(L + 1) / L",
        ),
        Convention(
            "sqrt(θᵀFθ), F the empirical Fisher: `.parameters`", "Liang et al. 2019", net("fisher_rao", "parameters")
        ),
        Convention("squared", "for scale", own**2),
    ]
    return Quantity(
        "`fisher_rao`",
        net.name,
        "the number of weight layers; not squared; `.parameters` is given, too",
        "The closed form equals sqrt(θᵀFθ) only without biases: the note says how far they differ.",
        rows,
    )


@covers("output_norm")
def output_norm(networks: Networks) -> Agreed:
    """As published."""
    return Agreed("output_norm", "relu", networks.relu("output_norm"), "sharpening C.1 alone; it grows with sqrt(n)")


@covers("feature_norm")
def feature_norm(networks: Networks) -> Agreed:
    """As published."""
    return Agreed(
        "feature_norm", "relu", networks.relu("feature_norm"), "sharpening App. C alone; it grows with sqrt(n)"
    )
