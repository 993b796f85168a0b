"""Largest eigenvalues."""

from __future__ import annotations

import flatlens as fl
from conventions.literal import batch_hessian, hessian, power_iteration, seeded, slopes, top
from conventions.networks import BATCHES, DECAY, Networks
from conventions.table import Agreed, Convention, Quantity, covers

EVERY_BATCH_ALIKE = tuple(sum(BATCHES) / len(BATCHES) for _ in BATCHES)


@covers("sharpness")
def sharpness(networks: Networks) -> Quantity:
    """Which loss, parameters, batches, solver."""
    net = networks.relu
    H, weights = hessian(net), net.is_weight
    summed = sum(batch_hessian(net, b) for b in range(len(BATCHES)))
    mse = fl.measure(fl.Lens(net.problem("mse")), "sharpness")["sharpness"].value
    own = net("sharpness")
    rows = [
        Convention("lmax(H) of the mean loss, all parameters", "sharpening section 3", own),
        Convention("of torch's MSE", "torch `mse_loss`", mse, "2 / N"),
        Convention("of the summed loss", '`reduction="sum"`', top(H * len(net.y)), "n"),
        Convention(
            "mean of batch means, the last batch smaller",
            "hessian-eigenthings `HessianOperator`",
            top(hessian(net, EVERY_BATCH_ALIKE)),
        ),
        Convention("one batch", "PyHessian `data=`", top(batch_hessian(net, 0))),
        Convention("one batch, the small one", "the same", top(batch_hessian(net, len(BATCHES) - 1))),
        Convention(
            "batches added, never divided; no biases, no BatchNorm parameters",
            "loss-landscape `hess_vec_prod.py`",
            top(summed[weights][:, weights]),
        ),
        Convention("weights alone, no biases", "for scale", top(H[weights][:, weights])),
        Convention(
            "power iteration, stopped when it moves by less than 0.1%",
            "PyHessian `eigenvalues`",
            power_iteration(H, seeded()),
        ),
        Convention(
            f"with weight decay {DECAY:g} in the loss",
            "torch `SGD(weight_decay=...)` trains on that loss",
            own + DECAY,
        ),
        Convention("of the Gauss-Newton matrix: `ggn_norm`", "sharpening B.3", net("ggn_norm")),
    ]
    return Quantity(
        "`sharpness`",
        net.name,
        "the largest algebraic eigenvalue, mean over samples, all trainable parameters, no weight decay",
        "The residual of Lanczos' method says how near an eigenvalue lies.",
        rows,
    )


@covers("sharpness")
def sharpness_with_batchnorm(networks: Networks) -> Quantity:
    """Running or batch statistics."""
    net = networks.conv

    def trained(ghost: int) -> float:
        problem = net.problem(batchnorm="train", ghost_batch=ghost)
        return fl.measure(fl.Lens(problem), "sharpness")["sharpness"].value

    rows = [
        Convention("running statistics", "PyHessian, loss-landscape (`model.eval()`)", net("sharpness")),
        Convention("statistics of the whole data, as one batch", "sharpening B.3 (1000 samples)", trained(len(net.y))),
        Convention("of batches of 50: `ghost_batch=50`", "for scale", trained(50)),
        Convention("of batches of 10", "for scale", trained(10)),
    ]
    return Quantity(
        "`sharpness` with BatchNorm",
        net.name,
        'running statistics, as after training; `Problem(batchnorm="train", ghost_batch=...)` for the others',
        "So per-sample measures are defined. The other convention is the sharpness during training.",
        rows,
    )


@covers("ggn_norm")
def ggn_norm(networks: Networks) -> Quantity:
    """Gauss-Newton, Hessian, Fisher."""
    net = networks.tanh
    g = slopes(net)
    rows = [
        Convention("lmax of the Gauss-Newton matrix", "sharpening B.3", net("ggn_norm")),
        Convention("lmax of the Hessian: `sharpness`", "sharpening section 3", net("sharpness")),
        Convention("lmax of the empirical Fisher", "curvlinops `EFLinearOperator`", top(g @ g.T / len(g))),
    ]
    return Quantity(
        "`ggn_norm`",
        net.name,
        "Gauss-Newton with the loss's own C",
        "The three matrices have three names.",
        rows,
    )


@covers("layer_sharpness")
def layer_sharpness(networks: Networks) -> Quantity:
    """With or without biases, with or without the weight's size."""
    net = networks.entropy
    layers = ("fc1", "fc2", "fc3")
    rows = [
        Convention(
            "sum over layers of lmax(H_l), weights alone", "reparam2019 Fig. 2 (one layer)", net("layer_sharpness")
        ),
        Convention("the largest layer's: `.max`", "for scale", net("layer_sharpness", "max")),
        Convention(
            "weight and bias together, summed: rows of `sharpness(layers=True)`",
            "for scale",
            sum(net("sharpness(layers=True)", layer=layer) for layer in layers),
        ),
        Convention("sum of ‖W_l‖_F² lmax(H_l): `.kappa`", "reparam2019 Def. 1", net("layer_sharpness", "kappa")),
        Convention(
            "the last layer's `.kappa`",
            "relativeFlatnessGeneralization `calculate_measures.py`",
            net("layer_sharpness", "kappa", "fc3"),
        ),
    ]
    return Quantity(
        "`layer_sharpness`",
        net.name,
        "each layer's weight alone; the sum; the maximum and κ are given, too",
        "κ is invariant under layer-wise rescaling, the eigenvalue is not.",
        rows,
    )


@covers("layer_factors")
def layer_factors(networks: Networks) -> Agreed:
    """As published."""
    return Agreed(
        "layer_factors", "relu", networks.relu("layer_factors"), "sharpening Eq. 4 alone; its C holds 1 / sqrt(n)"
    )
