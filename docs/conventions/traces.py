"""Traces: of S, of the Gauss-Newton matrix, of the Hessian; and the spectrum's density."""

from __future__ import annotations

import math

import torch

import flatlens as fl
from conventions.literal import hessian, hutchinson, seeded, signs, slopes
from conventions.networks import DECAY, Network, Networks
from conventions.table import Agreed, Convention, Quantity, covers


@covers("interpolation_sharpness", "parameter_jacobian_frobenius")
def interpolation_sharpness(networks: Networks) -> Quantity:
    """S, its root, and the traces that it stands for."""
    net = networks.relu
    own = net("interpolation_sharpness")
    mse = fl.measure(fl.Lens(net.problem("mse")), "hessian_trace")["hessian_trace"].value
    rows = [
        Convention("mean of ‖df/dθ‖_F², all parameters", "compression Eq. 3", own),
        Convention("its square root", "compression Fig. 1; sharpdim `get_gradW`", math.sqrt(own)),
        Convention("Tr H of the half squared error: `hessian_trace`", "compression Eq. 2", net("hessian_trace"), "1"),
        Convention("Tr H of torch's MSE", "`mse_loss` with any Hessian library", mse, "2 / N"),
        Convention(
            "the first layer's weight alone",
            "compression Eq. 48; sharpdim `get_gradW` (rooted)",
            float(_weight_share(net)),
        ),
    ]
    return Quantity(
        "`interpolation_sharpness`, `parameter_jacobian_frobenius`",
        net.name,
        "squared, all trainable parameters, biases too",
        "Squares add up over layers and, at interpolation under the half squared error, equal the trace of "
        "the Hessian; the paper's figures plot the square root.",
        rows,
    )


def _weight_share(net: Network) -> torch.Tensor:
    """mean_i ||df_i/dW_1||_F^2."""
    x = net.x
    f, weight, total = net.model(x), net.parameters["fc1.weight"], torch.tensor(0.0, dtype=x.dtype)
    for k in range(f.shape[1]):
        basis = torch.eye(len(x), dtype=x.dtype)
        total += torch.autograd.grad(f[:, k], weight, basis, retain_graph=True, is_grads_batched=True)[0].square().sum()
    return total / len(x)


@covers("ggn_trace")
def ggn_trace(networks: Networks) -> Quantity:
    """Which C."""
    net = networks.entropy
    own, size = net("ggn_trace"), len(net.theta)
    rows = [
        Convention("mean of tr(C K), C the loss's second derivative", "sharpening Eq. 3", own),
        Convention(
            "C = 1, whatever the loss: `interpolation_sharpness`", "compression Eq. 3", net("interpolation_sharpness")
        ),
        Convention(
            "empirical Fisher: mean of the squared gradient",
            "curvlinops `EFLinearOperator`",
            float(slopes(net).square().sum(1).mean()),
        ),
        Convention(
            "divided by the number of parameters", "relativeFlatnessGeneralization (of a layer)", own / size, "1 / P"
        ),
        Convention("of the summed loss", '`reduction="sum"`', own * len(net.y), "n"),
    ]
    return Quantity(
        "`ggn_trace`",
        net.name,
        "the loss's own C, mean over samples, not divided by P",
        "At interpolation the empirical Fisher vanishes; the Gauss-Newton matrix need not.",
        rows,
    )


@covers("hessian_trace")
def hessian_trace(networks: Networks) -> Quantity:
    """Exact or estimated, and of what."""
    net = networks.relu
    H, size = hessian(net), len(net.theta)
    v = signs(size, seeded())
    own = net("hessian_trace")
    rows = [
        Convention("Tr H, exact here", "compression Eq. 2", own),
        Convention(
            "random signs, until the running mean moves by less than 0.1%",
            "PyHessian `trace`",
            hutchinson(H, seeded()),
        ),
        Convention("one random probe", "for scale", float(v @ (H @ v))),
        Convention(
            "divided by the number of parameters", "relativeFlatnessGeneralization (of a layer)", own / size, "1 / P"
        ),
        Convention("weights alone, no biases", "for scale", float(H.diagonal()[net.is_weight].sum())),
        Convention(
            f"with weight decay {DECAY:g} in the loss",
            "torch `SGD(weight_decay=...)` trains on that loss",
            own + size * DECAY,
        ),
    ]
    return Quantity(
        "`hessian_trace`",
        net.name,
        "the sum over all parameters: exact Gauss-Newton part, plus probes only for the functional Hessian of "
        "smooth networks",
        "A running mean says nothing about its error.",
        rows,
    )


@covers("hessian_diagonal")
def hessian_diagonal(networks: Networks) -> Agreed:
    """Entry by entry."""
    value = networks.relu("hessian_diagonal")
    return Agreed("hessian_diagonal", "relu", value, "the sum of BackPACK's `DiagHessian` over all parameters")


@covers("spectral_density")
def spectral_density(networks: Networks) -> Quantity:
    """How many probes."""
    net = networks.relu
    H = hessian(net)
    v = signs(len(H), seeded())
    rows = [
        Convention("‖H‖_F / sqrt(P) from 8 probes of 40 steps", "flatlens", net("spectral_density")),
        Convention("from one probe", "PyHessian `density` (`n_v=1`)", float((H @ v).norm()) / math.sqrt(len(H))),
        Convention("exact", "for scale", float(H.norm()) / math.sqrt(len(H))),
    ]
    return Quantity(
        "`spectral_density`",
        net.name,
        "8 probes, and a standard error at every point of the curve",
        "The curve also depends on the smoothing, here 1.9% of the range (0.75 / `steps`).",
        rows,
    )


@covers("interpolation_gap")
def interpolation_gap(networks: Networks) -> Agreed:
    """As published."""
    return Agreed("interpolation_gap", "tanh", networks.tanh("interpolation_gap"), "compression Lemma B.1 alone")
