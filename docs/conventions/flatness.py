"""Flatness in units of the weights."""

from __future__ import annotations

import torch

from conventions.literal import hessian, top, weight_hessian
from conventions.networks import DECAY, Network, Networks
from conventions.table import Convention, Quantity, covers

FLATNESS = "RelativeFlatnessAndGeneralization"


def _last(net: Network) -> tuple[torch.Tensor, float, float]:
    """(W, ||W||_F^2, Tr H) of the last layer."""
    W = net.parameters["fc3.weight"].detach()
    return W, float(W.square().sum()), float(weight_hessian(net, "fc3.weight").trace())


@covers("relative_flatness")
def relative_flatness(networks: Networks) -> Quantity:
    """Which layer, which trace, which normalisation."""
    net = networks.entropy
    W, size, trace = _last(net)
    own = net("relative_flatness")
    rows = [
        Convention("sum of ⟨w_s, w_s'⟩ Tr H_ss', last linear layer", "relative2021 Def. 3", own),
        Convention("the layer before", "relative2021 Fig. 8", net("relative_flatness", layer="fc2")),
        Convention("summed over layers: `.sum`", "for scale", net("relative_flatness", "sum")),
        Convention(
            'features in units of their standard deviation: `normalized="std"`',
            f"{FLATNESS} `measure_comparison.py`",
            net("relative_flatness(normalized='std')"),
        ),
        Convention(
            'in units of their variance: `normalized="variance"`',
            f"relative2021 Thm 4 as printed; {FLATNESS} `SyntheticExperiments/flatness.py`",
            net("relative_flatness(normalized='variance')"),
        ),
        Convention(
            "each trace divided by its size m",
            f"{FLATNESS} `FAMloss.py`, `SyntheticExperiments/utils.py`",
            own / W.shape[1],
            "1 / m",
        ),
        Convention("‖W‖_F² Tr H", "reparam2019 section 2", size * trace),
        Convention(
            "‖W‖_F² Tr H / (d m)", "relativeFlatnessGeneralization `calculate_measures.py`", size * trace / W.numel()
        ),
        Convention(
            "‖W‖_F Tr H, the norm not squared", f"{FLATNESS} `FAMloss.py` (`layerwise_trace`)", size**0.5 * trace
        ),
        Convention(f"plus 2 x weight decay {DECAY:g} x ‖W‖_F²", f"{FLATNESS} `utils.py`", own + 2 * DECAY * size),
    ]
    return Quantity(
        "`relative_flatness`",
        net.name,
        "Definition 3 exactly: last linear layer, weights alone, traces not divided, no weight decay",
        "The sum over pairs of rows is not ‖W‖² Tr H. With the standard deviation it is invariant under "
        "rescaling of neurons; with the variance, as printed, it is not.",
        rows,
    )


@covers("relative_flatness_ggn", "relative_flatness")
def relative_flatness_ggn(networks: Networks) -> Quantity:
    """The term that ReLU networks do not have."""
    net = networks.tanh
    rows = [
        Convention("Gauss-Newton part, first layer", "flatlens", net("relative_flatness_ggn", layer="fc1")),
        Convention(
            "Hessian, first layer: `relative_flatness`", "relative2021 Def. 3", net("relative_flatness", layer="fc1")
        ),
    ]
    return Quantity(
        "`relative_flatness_ggn`",
        net.name,
        "the Gauss-Newton part and the whole have two names",
        "They are equal at interpolation, and where the outputs are piecewise linear in a weight that is used"
        " once (the last layer; ReLU networks without LayerNorm or attention). `head_flatness` and "
        "`head_flatness_ggn` are the two for heads of attention.",
        rows,
    )


@covers("kappa_trace")
def kappa_trace(networks: Networks) -> Quantity:
    """Sum, maximum or one layer; divided or not."""
    net = networks.entropy
    W, size, trace = _last(net)
    rows = [
        Convention("sum over layers of ‖W_l‖_F² Tr H_l", "reparam2019 Table 1", net("kappa_trace")),
        Convention("the largest layer's: `.max`", "reparam2019 Table 1", net("kappa_trace", "max")),
        Convention("the last layer's", "reparam2019 Fig. 1 (one layer)", net("kappa_trace", layer="fc3")),
        Convention(
            "the last layer's, divided by d m",
            "relativeFlatnessGeneralization `calculate_measures.py`",
            size * trace / W.numel(),
        ),
        Convention(
            "the last layer's, norm not squared", f"{FLATNESS} `FAMloss.py` (`layerwise_trace`)", size**0.5 * trace
        ),
    ]
    return Quantity(
        "`kappa_trace`",
        net.name,
        "the sum over layers, the trace not divided; `.max` and every layer are given, too",
        "A single layer is a choice: name it.",
        rows,
    )


@covers("neuron_flatness", "neuron_flatness_ggn")
def neuron_flatness(networks: Networks) -> Quantity:
    """Sum or maximum."""
    net = networks.entropy
    tanh = networks.tanh
    rows = [
        Convention("summed over columns and layers", "reparam2019 App. B (ρ^Σ)", net("neuron_flatness")),
        Convention("the largest column: `.max`", "reparam2019 App. B (ρ^max)", net("neuron_flatness", "max")),
        Convention("one layer, the last", "reparam2019 Fig. 4", net("neuron_flatness", layer="fc3")),
        Convention("Gauss-Newton part: `neuron_flatness_ggn`", "flatlens", net("neuron_flatness_ggn"), "1"),
    ]
    parted = tanh("neuron_flatness") / tanh("neuron_flatness_ggn")
    return Quantity(
        "`neuron_flatness`, `neuron_flatness_ggn`",
        net.name,
        "the sum; `.max` and all columns are given, too",
        f"In a ReLU network the Gauss-Newton part is the whole value; on `tanh` the whole is {parted:.4g} times as "
        f"large.",
        rows,
    )


@covers("maximal_relative_flatness")
def maximal_relative_flatness(networks: Networks) -> Quantity:
    """Rows or the whole layer."""
    net = networks.entropy
    size = _last(net)[1]
    own = net("maximal_relative_flatness")
    rows = [
        Convention("sum of ‖w_s‖² lmax(H_ss) over rows, last layer", "relative2021 Def. 13", own),
        Convention("summed over layers: `.sum`", "for scale", net("maximal_relative_flatness", "sum")),
        Convention(
            "‖W‖_F² lmax(H_l), last layer: `layer_sharpness.kappa`",
            "reparam2019 Def. 1",
            net("layer_sharpness", "kappa", "fc3"),
        ),
        Convention(f"plus 2 x weight decay {DECAY:g} x ‖W‖_F²", f"{FLATNESS} `utils.py`", own + 2 * DECAY * size),
    ]
    return Quantity(
        "`maximal_relative_flatness`",
        net.name,
        "Definition 13, row by row",
        "The eigenvalue of the whole layer has another name.",
        rows,
    )


@covers("adaptive_sharpness", "adaptive_sharpness_ggn")
def adaptive_sharpness(networks: Networks) -> Quantity:
    """In units of what."""
    net = networks.relu
    H = hessian(net)
    units = torch.where(net.is_weight, net.theta.abs() + 0.01, 1.0)
    rows = [
        Convention("sum of θ_j² H_jj, all parameters", "compression Def. E.1", net("adaptive_sharpness")),
        Convention(
            "Gauss-Newton part: `adaptive_sharpness_ggn`", "compression Lemma E.2", net("adaptive_sharpness_ggn"), "1"
        ),
        Convention(
            "weights alone",
            "for scale",
            float((net.theta.square() * H.diagonal())[net.is_weight].sum()),
        ),
        Convention(
            "units |w| + 0.01 for weights, 1 for biases",
            "ASAM `asam.py` (its perturbation)",
            float((units.square() * H.diagonal()).sum()),
        ),
        Convention("units 1: `hessian_trace`", "compression Eq. 2", float(H.trace())),
        Convention("worst direction: lmax of θ_i H_ij θ_j", "for scale", top(net.theta[:, None] * H * net.theta)),
    ]
    return Quantity(
        "`adaptive_sharpness`, `adaptive_sharpness_ggn`",
        net.name,
        "every parameter in units of its own size, biases too",
        "Each term θ_j² H_jj is invariant under rescaling of neurons. For finite steps see `average_sharpness`.",
        rows,
    )
